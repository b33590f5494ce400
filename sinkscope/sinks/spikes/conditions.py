"""What makes a position a sink: its token, that it sees only itself, its position id; each alone and together.

1. Sufficient? An ordinary position, drawn in each text, gets each of the eight combinations. The outcome is the share of
   the spike that it then has; heads attend beside it, fewer than to the place, because that is still there.
2. Necessary? Each is taken away at the place itself: another token; tokens before it that nobody else sees; a shifted
   start.
3. Controls: a random token in place of the place's own, and seeing one random other token alone.
4. In which layers? The first layers in which seeing only itself suffices, found by halving; and how many others it bears.

A mask of the whole text is given, because position ids that jump are otherwise read as packed texts. Barbero et al.
2025, Sun et al. 2024 (constant bias), and later papers each claim one of these causes.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.engine.tap import visible_rows
from sinkscope.hooks.edit import Knockout
from sinkscope.hooks.edit.base import under
from sinkscope.measure.margin import margin_of
from sinkscope.measure.setup import rows_at_once
from sinkscope.models.draws import draws
from sinkscope.models.hooks import on_hidden
from sinkscope.models.target import Target
from sinkscope.sinks.spikes.records import Cause, Cell, Conditions, Taken
from sinkscope.sinks.spikes.spike import Spike
from sinkscope.sinks.spikes.survey import given_later, to_place
from sinkscope.sinks.thresholds import HALF, READS, REMOVED
from sinkscope.sinks.tokens import Mask, TokenRows

TEXTS = 8  # texts that are read, two of each kind
FIRST, LAST = 16, 40  # ordinary positions are drawn from these on, up to here
BEFORE = 4  # tokens that stand before the place, which nobody else sees
SHIFT = 32  # by which the start is shifted
BORNE = (1, 2, 4, 8)  # other tokens that a position sees beside itself


@dataclass(frozen=True, eq=False)
class Layout:
    """Rows in which a position is changed.

    Attributes:
        ids: The tokens.
        positions: Their position ids.
        at: The position of each row that is read.
        unseen: What queries do not see beyond what is causal.
        layers: Layers in which they do not see it. None: all.
    """

    ids: TokenRows
    positions: Int[Tensor, "row pos"]
    at: Int[Tensor, " row"]
    unseen: Bool[Tensor, "row query key"]
    layers: range | None = None

    @classmethod
    def of(cls, ids: TokenRows, at: Int[Tensor, " row"]) -> Layout:
        """Return rows as they are."""
        length = ids.shape[1]
        return cls(ids, torch.arange(length).expand_as(ids), at, torch.zeros(len(ids), length, length, dtype=torch.bool))

    @property
    def rows(self) -> Int[Tensor, " row"]:
        """The number of each row."""
        return torch.arange(len(self.ids))

    def with_token(self, tokens: Int[Tensor, " row"]) -> Layout:
        """Put a token at the position of each row."""
        ids = self.ids.clone()
        ids[self.rows, self.at] = tokens
        return replace(self, ids=ids)

    def seeing(self, others: Bool[Tensor, "row key"]) -> Layout:
        """Let the position of each row see itself and these others alone."""
        unseen = self.unseen.clone()
        unseen[self.rows, self.at] = ~others
        return replace(self, unseen=unseen)

    def alone(self) -> Layout:
        """Let the position of each row see only itself."""
        return self.seeing(torch.zeros_like(self.ids, dtype=torch.bool))

    def at_id(self, position: int) -> Layout:
        """Give the position of each row another position id."""
        positions = self.positions.clone()
        positions[self.rows, self.at] = position
        return replace(self, positions=positions)

    def hiding(self, target: Target) -> AbstractContextManager[object]:
        """Return a `with` block in which what is unseen is hidden."""
        if not bool(self.unseen.any()) or self.layers == range(0):
            return nullcontext()
        return under(Knockout(self.unseen, layers=None if self.layers is None else list(self.layers)), target)

    @property
    def place(self) -> Mask:
        """The position of each row, as a mask."""
        return torch.arange(self.ids.shape[1]) == self.at[:, None]


@dataclass(frozen=True, eq=False)
class Seen:
    """What is read at the position of each row.

    Attributes:
        share: Projection on the spike's direction after its peak, as a share of the first token's.
        attention: Attention to it in the layers that read the spike; None if it was not read.
    """

    share: Float[Tensor, " row"]
    attention: Float[Tensor, "row layer head"] | None

    @property
    def heads(self) -> int | None:
        """Heads that give it more than 0.3 of their attention, mean over rows."""
        if self.attention is None:
            return None
        return int((self.attention.mean(0) > READS).sum())


@torch.no_grad()
def read_layout(spike: Spike, layout: Layout, *, heads: bool = False) -> Seen:
    """Read the position of each row.

    Args:
        spike: The spike.
        layout: The rows.
        heads: Whether attention is read; else the pass ends at the peak.
    """
    target, shares, attention = spike.survey.target, list[Tensor](), list[Tensor]()
    size = len(layout.ids)
    if target.resident:
        size = rows_at_once(layout.ids.shape[1], max(target.d_mlp, target.d_model))
    for rows in layout.rows.split(size):
        some = replace(layout, ids=layout.ids[rows], positions=layout.positions[rows], at=layout.at[rows], unseen=layout.unseen[rows])
        share, given = torch.zeros(len(rows)), torch.zeros(len(rows), len(spike.reading_layers), target.n_heads)
        _read(spike, some, share, given if heads else None)
        shares.append(share)
        attention.append(given)
    return Seen(torch.cat(shares), torch.cat(attention) if heads else None)


def _read(spike: Spike, layout: Layout, share: Tensor, given: Tensor | None) -> None:
    target, reading = spike.survey.target, spike.reading_layers
    layers = [layer for layer in target.attending if layer in reading]

    def at_peak(hidden: Tensor) -> None:
        states = hidden.reshape(*layout.ids.shape, -1)[layout.rows, layout.at]
        share[:] = spike.along(states.float().cpu())

    def attend(layer: int, _first: int, probs: Tensor, _visible: Tensor) -> None:
        later = torch.ones(layout.ids.shape[1], layout.ids.shape[1], dtype=torch.bool).tril()[None, None]
        to, seen = given_later(probs, later)
        assert given is not None
        given[:, layer - reading.start] = to_place(to.cpu(), seen, layout.place[:, None])

    listening: AbstractContextManager[object] = nullcontext()
    if given is not None and layers:
        listening = visible_rows(target, attend, layers=layers, rows_per_chunk=layout.ids.shape[1])
    last = spike.peak if given is None else max([spike.peak, *layers])
    with layout.hiding(target), listening, target.hooks((target.layers[spike.peak], "post", on_hidden(at_peak))):
        target.forward(layout.ids, **masked(target, layout.positions), last_layer=last)


def masked(target: Target, positions: Int[Tensor, "row pos"]) -> dict[str, Tensor]:
    """Return a mask of the whole text, and position ids where the model takes them."""
    length = positions.shape[1]
    never = torch.finfo(target.dtype).min
    causal = torch.full((length, length), never, dtype=target.dtype, device=target.device).triu(1)
    given = {"attention_mask": causal[None, None].expand(len(positions), 1, -1, -1)}
    if takes_positions(target):
        given["position_ids"] = positions.to(target.device)
    return given


def takes_positions(target: Target) -> bool:
    """Return whether the model takes position ids; with ALiBi it has none."""
    return "position_ids" in inspect.signature(type(target.base).forward).parameters


# --- the questions ---


@torch.no_grad()
def conditions_of(spike: Spike, seed: int) -> Conditions | None:
    """Ask what makes a position such a place; None if the spike is not at the first token, or texts are too short.

    Args:
        spike: The spike, in texts that did not find it.
        seed: Seed of the ordinary positions, tokens and others.
    """
    ids = spike.survey.ids[:TEXTS]
    if not spike.place.is_first or ids.shape[1] <= LAST:
        return None
    generator = draws(seed, "ordinary positions of conditions")
    at = torch.randint(FIRST, LAST, (len(ids),), generator=generator)
    ordinary, tokens = Layout.of(ids, at), ids[:, 0]
    others = tokens_from(ids, generator)
    cells: list[Cell] = []
    for token in (False, True):
        for alone in (False, True):
            for start in (False, True):
                if start and not takes_positions(spike.survey.target):
                    continue
                cells.append(cell_of(spike, changed(ordinary, tokens, token, alone, start), token, alone, start))
    random = read_layout(spike, ordinary.with_token(others).alone())
    one = read_layout(spike, ordinary.seeing(some_others(at, ids.shape[1], 1, generator)))
    taken = taken_away(spike, ids, others)
    borne: list[tuple[int, float]] = []
    layers = None
    if _share(cells, alone=True) >= HALF:
        for count in BORNE:
            borne.append((count, float(read_layout(spike, ordinary.seeing(nearest_others(at, ids.shape[1], count))).share.mean())))
        layers = first_layers(spike, ordinary)
    return Conditions(
        cells=tuple(cells),
        taken=taken,
        random_token=float(random.share.mean()),
        one_other=float(one.share.mean()),
        one_other_margin=margin_of(one.share.numpy()),
        layers=layers,
        borne=tuple(borne),
        sufficient=sufficient_of(cells),
        necessary=tuple(one.cause for one in taken if one.share < REMOVED),
        texts=len(ids),
    )


def changed(layout: Layout, tokens: Int[Tensor, " row"], token: bool, alone: bool, start: bool) -> Layout:
    """Return ordinary positions with one of the combinations."""
    if token:
        layout = layout.with_token(tokens)
    if alone:
        layout = layout.alone()
    return layout.at_id(0) if start else layout


def cell_of(spike: Spike, layout: Layout, token: bool, alone: bool, start: bool) -> Cell:
    """Read one of the combinations."""
    seen = read_layout(spike, layout, heads=True)
    return Cell(token, alone, start, float(seen.share.mean()), margin_of(seen.share.numpy()), seen.heads or 0)


def _share(cells: Sequence[Cell], *, token: bool = False, alone: bool = False, start: bool = False) -> float:
    """The share of one combination."""
    return next((one.share for one in cells if (one.token, one.alone, one.start) == (token, alone, start)), 0.0)


def sufficient_of(cells: Sequence[Cell]) -> tuple[Cause, ...]:
    """Return the fewest causes that give an ordinary position half of the spike; each alone, if several do so alone."""
    enough: list[tuple[Cause, ...]] = []
    for cell in cells:
        causes: list[Cause] = []
        for has, cause in ((cell.token, "token"), (cell.alone, "sight"), (cell.start, "position")):
            if has:
                causes.append(cause)
        if causes and cell.share - (cell.margin or 0.0) >= HALF:
            enough.append(tuple(causes))
    fewest = min(map(len, enough), default=0)
    if fewest == 1:
        return tuple(one[0] for one in enough if len(one) == 1)
    return next((one for one in enough if len(one) == fewest), ())


def taken_away(spike: Spike, ids: TokenRows, others: Int[Tensor, " row"]) -> tuple[Taken, ...]:
    """Take each cause away at the place itself."""
    first = torch.zeros(len(ids), dtype=torch.long)
    whole, found = Layout.of(ids, first), list[Taken]()
    layouts: list[tuple[Cause, Layout]] = [("token", whole.with_token(others)), ("sight", before_place(ids))]
    if takes_positions(spike.survey.target):
        layouts.append(("position", replace(whole, positions=whole.positions + SHIFT)))
    for cause, layout in layouts:
        seen = read_layout(spike, layout, heads=True)
        found.append(Taken(cause, float(seen.share.mean()), margin_of(seen.share.numpy()), seen.heads or 0))
    return tuple(found)


def before_place(ids: TokenRows) -> Layout:
    """Put tokens before the place, which the place alone sees."""
    count, length = len(ids), ids.shape[1]
    whole = torch.cat([ids[:, length - BEFORE :], ids], 1)
    own = torch.arange(length).expand(count, -1)
    positions = torch.cat([torch.zeros(count, BEFORE, dtype=torch.long), own], 1)
    unseen = torch.zeros(count, length + BEFORE, length + BEFORE, dtype=torch.bool)
    unseen[:, BEFORE + 1 :, :BEFORE] = True
    return Layout(whole, positions, torch.full((count,), BEFORE), unseen)


def first_layers(spike: Spike, ordinary: Layout) -> int | None:
    """Return the last of the first layers in which seeing only itself gives half of the spike, by halving.

    None: in all layers up to the peak it does not.
    """
    low, high = 0, spike.peak + 1
    while high - low > 1:
        middle = (low + high) // 2
        share = float(read_layout(spike, replace(ordinary.alone(), layers=range(middle))).share.mean())
        low, high = (low, middle) if share >= HALF else (middle, high)
    return high - 1


# --- draws ---


def tokens_from(ids: TokenRows, generator: torch.Generator) -> Int[Tensor, " row"]:
    """Draw a token of another text for each row."""
    at = torch.randint(FIRST, ids.shape[1], (len(ids),), generator=generator)
    return ids.roll(1, 0)[torch.arange(len(ids)), at]


def some_others(at: Int[Tensor, " row"], length: int, count: int, generator: torch.Generator) -> Bool[Tensor, "row key"]:
    """Draw other tokens before each position, but the first."""
    others = torch.zeros(len(at), length, dtype=torch.bool)
    for row, position in enumerate(at.tolist()):
        others[row, 1 + torch.randperm(position - 1, generator=generator)[:count]] = True
    return others


def nearest_others(at: Int[Tensor, " row"], length: int, count: int) -> Bool[Tensor, "row key"]:
    """Mark the nearest tokens before each position."""
    key = torch.arange(length)
    return (key < at[:, None]) & (key >= at[:, None] - count)
