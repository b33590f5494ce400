"""What is recorded of both questions about a place: what makes it the sink, and what it is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Cause = Literal["token", "sight", "position"]
"""What may make a position a sink: its token; that it sees only itself; its position id."""
ConstantName = Literal["state", "value", "score"]
"""A number that says how constant a spike makes its place."""
ChangeName = Literal[
    "hidden in all layers", "hidden", "value zero", "mean value", "ordinary key hidden", "most attended key hidden"
]
"""A way of reading the place, or a control."""


@dataclass(frozen=True)
class Cell:
    """What an ordinary position is like under one combination of causes.

    Attributes:
        token: Whether it carries the token of the place.
        alone: Whether it sees only itself.
        start: Whether it has the position id of the place.
        share: Share of the spike that it then has.
        margin: Half of the 95 % interval over texts.
        heads: Heads that attend to it beside the place, which is still there.
    """

    token: bool
    alone: bool
    start: bool
    share: float
    margin: float | None
    heads: int

    @property
    def causes(self) -> tuple[Cause, ...]:
        """The causes of the combination."""
        has: dict[Cause, bool] = {"token": self.token, "sight": self.alone, "position": self.start}
        return tuple(cause for cause, there in has.items() if there)


@dataclass(frozen=True)
class Taken:
    """What the place is like with one cause taken away.

    Attributes:
        cause: The cause: another token stands there; tokens before it are seen; the whole text begins later.
        share: Share of the spike that is left.
        margin: Half of the 95 % interval over texts.
        heads: Heads that attend to it.
    """

    cause: Cause
    share: float
    margin: float | None
    heads: int


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What makes a position such a place.

    Attributes:
        cells: Combinations of causes at ordinary positions.
        taken: Each cause taken away at the place.
        sufficient: The fewest causes that give an ordinary position half of the spike; each alone, if several do.
        necessary: Causes without which less than a quarter of the spike is left at the place.
        random_token: Share of the spike at an ordinary position that carries a random token and sees only itself.
        one_other: Share at an ordinary position that sees itself and one random other token: in all texts, several
            draws of both in each.
        one_other_margin: Half of the 95 % interval over texts.
        layers: The last of the first layers in which seeing only itself suffices. None: it does not suffice.
        borne: By the number of nearest tokens that it sees beside itself: the share of the spike that it has.
        texts: Number of texts.
        held: By the number of earlier tokens that the place sees: the share of the spike that it keeps, and half of the
            95 % interval over texts.
    """

    cells: tuple[Cell, ...]
    taken: tuple[Taken, ...]
    sufficient: tuple[Cause, ...]
    necessary: tuple[Cause, ...]
    random_token: float
    one_other: float
    one_other_margin: float | None
    layers: int | None
    borne: tuple[tuple[int, float], ...]
    texts: int
    held: tuple[tuple[int, float, float | None], ...] = ()


@dataclass(frozen=True)
class Constant:
    """How constant a spike makes its place, in one number; mean over texts.

    Attributes:
        name: "state": cosine between the states of texts whose tokens differ. "value": norm of the value over the
            typical one. "score": share of the score's lead over other keys (mean square over queries) that every query
            gives.
        before: The number before the first spike of the place, in all heads of a layer.
        after: The number after the spike, in the heads that attend to the place.
        margin: Half of its 95 % interval over texts.
        ordinary_before: The number at an ordinary position before.
        ordinary_after: The number at an ordinary position after, in the same heads.
    """

    name: ConstantName
    before: float
    after: float
    margin: float | None
    ordinary_before: float
    ordinary_after: float


@dataclass(frozen=True, kw_only=True)
class Constancy:
    """Why heads attend to a place: the spike makes its state constant, and a norm layer passes that on.

    Attributes:
        before: The layer whose input is before the first spike of the place.
        after: The first layer whose input has half of the spike, and some of whose heads attend to the place.
        heads: Heads of such layers that attend to the place.
        numbers: The numbers.
        by_layer: Cosine between texts where the state enters each layer, of ordinary positions that are made such
            places.
        ordinary_by_layer: The same of ordinary positions as they are.
        texts: Number of texts.
    """

    before: int
    after: int
    heads: int
    numbers: tuple[Constant, ...]
    by_layer: tuple[float, ...]
    ordinary_by_layer: tuple[float, ...]
    texts: int


@dataclass(frozen=True, kw_only=True)
class Change:
    """What another way of reading a place does to later tokens.

    Attributes:
        name: The way.
        loss: Rise of their loss, in nats a token.
        interval: Its 95 % interval, from paired differences over texts.
        heads: Heads that still attend to the place.
        taker: The next position that takes over most.
        taker_heads: Heads that attend to it then.
        spread: Change of the last states when an earlier token is another, relative to their norm. None: not read.
        spread_margin: Half of the 95 % interval over texts.
    """

    name: ChangeName
    loss: float
    interval: tuple[float, float] | None
    heads: int
    taker: int
    taker_heads: int
    spread: float | None
    spread_margin: float | None

    @property
    def margin(self) -> float | None:
        """Half of the interval of the loss."""
        return None if self.interval is None else (self.interval[1] - self.interval[0]) / 2


@dataclass(frozen=True, kw_only=True)
class Purpose:
    """What the attention to a place is for.

    Attributes:
        layers: The first and the last layer after the spike's first writer, in which the place is hidden or changed.
        changes: What each way of reading it does.
        spread: Change of the last states when an earlier token is another, in the intact model.
        spread_margin: Half of the 95 % interval over texts.
        heads: Heads of all layers that attend to the place in the intact model.
        ordinary: The ordinary key that is hidden as a control.
        attended: The ordinary key with the most attention.
        texts: Number of texts.
        tokens: Number of tokens whose loss was read.
    """

    layers: tuple[int, int]
    changes: tuple[Change, ...]
    spread: float
    spread_margin: float | None
    heads: int
    ordinary: int
    attended: int
    texts: int
    tokens: int

    def change(self, name: ChangeName) -> Change:
        """Return what one way does."""
        return next(change for change in self.changes if change.name == name)


@dataclass(frozen=True)
class Answers:
    """What is answered of a place: what makes it, what attention to it is for, why heads attend to it."""

    conditions: Conditions | None = None
    purpose: Purpose | None = None
    constancy: Constancy | None = None
