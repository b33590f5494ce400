"""What makes a position a sink: its token, that it sees only itself, its position id; each alone and together.

1. Sufficient? An ordinary position, drawn in each text, gets each of the eight combinations. The outcome is the share
   of the spike that it then has; heads attend beside it, fewer than to the place, because that is still there.
2. Necessary? Each is taken away at the place itself: another token; tokens before it that nobody else sees; a shifted
   start.
3. Controls: a random token in place of the place's own, and seeing one random other token alone.
4. In which layers? The first layers in which seeing only itself suffices, found by halving; and how many others it
   bears, at an ordinary position and at the place.

A mask of the whole text is given beside position ids, because ids that jump are read as packed texts. Barbero et al.
2025, Sun et al. 2024 (constant bias), and later papers each claim one of these causes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.engine.tap import visible_rows
from sinkscope.hooks.edit.base import under
from sinkscope.hooks.edit.knockout import HideCells
from sinkscope.measure.margin import margin_of
from sinkscope.measure.setup import rows_at_once
from sinkscope.models.draws import draws
from sinkscope.models.hooks import Hook, on_hidden
from sinkscope.models.target import Target
from sinkscope.models.windows import ChunkWindow, layer_window
from sinkscope.sinks.spikes.answer_records import Cause, Cell, Conditions, Taken
from sinkscope.sinks.spikes.spike import Spike
from sinkscope.sinks.spikes.survey import given_later, to_place
from sinkscope.sinks.thresholds import HALF, READS, REMOVED
from sinkscope.sinks.tokens import Mask, TokenRows

TEXTS = 8  # texts that are read, two of each kind
FIRST, LAST = 16, 40  # ordinary positions are drawn from these on, up to here
BEFORE = 4  # tokens that stand before the place, which nobody else sees
SHIFT = 32  # by which the start is shifted
BORNE = (1, 2, 4, 8)  # other tokens that a position, or the place, sees beside itself
DRAWS = 4  # positions of each text that see one other token: it matters much which both are


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
        unseen = torch.zeros(len(ids), ids.shape[1], ids.shape[1], dtype=torch.bool)
        return cls(ids, torch.arange(ids.shape[1]).expand_as(ids), at, unseen)

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

    def until(self, length: int) -> Layout:
        """Return the first tokens of each row alone: later ones change nothing before them."""
        unseen = self.unseen[:, :length, :length]
        return replace(self, ids=self.ids[:, :length], positions=self.positions[:, :length], unseen=unseen)

    @contextmanager
    def hiding(self, target: Target) -> Iterator[None]:
        """Context manager in which what is unseen is hidden, and what is outside the windows of layers.

        A mask of the whole text, as `masked` gives it, is the mask of every layer, with a window or without.
        """
        with ExitStack() as stack:
            layers = [layer for layer in target.attending if self.layers is None or layer in self.layers]
            if bool(self.unseen.any()) and layers:
                stack.enter_context(under(HideCells(self.unseen, layers), target))
            for window, of_window in windows_of(target).items():
                outside = outside_window(window, self.ids.shape[1])
                if bool(outside.any()):
                    stack.enter_context(under(HideCells(outside[None], of_window), target))
            yield

    @property
    def place(self) -> Mask:
        """The position of each row, as a mask."""
        return torch.arange(self.ids.shape[1]) == self.at[:, None]


@dataclass(frozen=True, eq=False)
class PositionReading:
    """What is read at the position of each row.

    Attributes:
        share: Projection on each spike's direction after its peak, as a share of the first token's.
        attention: Attention to the position in every layer, mean over later queries; None if it was not read.
    """

    share: Float[Tensor, "spike row"]
    attention: Float[Tensor, "row layer head"] | None

    def heads(self, spike: Spike) -> int:
        """Heads of the layers that read a spike which give the position more than 0.3, mean over rows."""
        if self.attention is None:
            return 0
        reading = spike.reading_layers
        return int((self.attention[:, reading.start : reading.stop].mean(0) > READS).sum())


@torch.no_grad()
def read_layout(spikes: Sequence[Spike], layout: Layout, *, heads: bool = False) -> PositionReading:
    """Read the position of each row.

    Args:
        spikes: The spikes.
        layout: The rows.
        heads: Whether attention is read; else the pass ends at the last peak.
    """
    target, seen, size = spikes[0].survey.target, list[PositionReading](), len(layout.ids)
    if not heads:
        layout = layout.until(int(layout.at.max()) + 1)
    if target.resident:
        size = rows_at_once(layout.ids.shape[1], max(target.d_mlp, target.d_model))
    for rows in layout.rows.split(size):
        of_row = {"positions": layout.positions[rows], "at": layout.at[rows], "unseen": layout.unseen[rows]}
        seen.append(_read(spikes, replace(layout, ids=layout.ids[rows], **of_row), heads))
    attention = [chunk.attention for chunk in seen if chunk.attention is not None]
    return PositionReading(torch.cat([chunk.share for chunk in seen], 1), torch.cat(attention) if attention else None)


def _read(spikes: Sequence[Spike], layout: Layout, heads: bool) -> PositionReading:
    """Read rows in one pass."""
    target = spikes[0].survey.target
    share = torch.zeros(len(spikes), len(layout.ids))
    attention = torch.zeros(len(layout.ids), target.n_layers, target.n_heads)

    def at_peak(number: int, hidden: Tensor) -> None:
        states = hidden.reshape(*layout.ids.shape, -1)[layout.rows, layout.at]
        share[number] = spikes[number].along(states.float().cpu())

    def attend(layer: int, _first: int, probs: Tensor, _visible: Tensor) -> None:
        length = layout.ids.shape[1]
        later = torch.ones(length, length, dtype=torch.bool).tril().expand(len(probs), 1, -1, -1)
        to, seen = given_later(probs, later)
        attention[:, layer] = to_place(to.cpu(), seen, layout.place[:, None])

    listening: AbstractContextManager[object] = nullcontext()
    last = max(spike.peak for spike in spikes)
    if heads and target.attending:
        listening = visible_rows(target, attend, rows_per_chunk=layout.ids.shape[1])
        last = target.n_layers - 1
    hooks: list[Hook] = []
    for number, spike in enumerate(spikes):
        hooks.append((target.layers[spike.peak], "post", on_hidden(partial(at_peak, number))))
    with layout.hiding(target), listening, target.hooks(*hooks):
        target.forward(layout.ids, last_layer=last, **masked(target, layout.positions))
    return PositionReading(share, attention if heads else None)


def windows_of(target: Target) -> dict[int, list[int]]:
    """Return the layers that attend within each window or chunk."""
    by_window: dict[int, list[int]] = {}
    for layer in target.attending:
        window = layer_window(target.config, layer)
        if window is not None:
            by_window.setdefault(window, []).append(layer)
    return by_window


def outside_window(window: int, length: int) -> Bool[Tensor, "query key"]:
    """Mark the earlier keys that a query does not see in a layer with a window, or with chunks."""
    at = torch.arange(length)
    begin = at - window + 1
    if isinstance(window, ChunkWindow):
        begin = at // window * window
    return at < begin[:, None]


def masked(target: Target, positions: Int[Tensor, "row pos"]) -> dict[str, Any]:
    """Return position ids, and a mask of tokens, without which a model reads packed texts out of them.

    There is nothing to return for a model that takes no ids.
    """
    if not takes_positions(target):
        return {}
    ids = positions.to(target.device)
    return {"attention_mask": torch.ones_like(ids), "position_ids": ids}


def takes_positions(target: Target) -> bool:
    """Return whether the model takes position ids; with ALiBi it has none."""
    return "position_ids" in inspect.signature(type(target.base).forward).parameters


# --- the questions ---


@torch.no_grad()
def conditions_of(spikes: Sequence[Spike], seed: int) -> list[Conditions]:
    """Ask what makes a position the place of spikes of the first token; empty if the texts are too short.

    Args:
        spikes: The spikes, in texts that did not find them.
        seed: Seed of the ordinary positions, tokens and others.
    """
    if not spikes or spikes[0].survey.ids.shape[1] <= LAST:
        return []
    ids, target = spikes[0].survey.ids[:TEXTS], spikes[0].survey.target
    generator = draws(seed, "other tokens of conditions")
    ordinary, others = ordinary_positions(ids, seed), tokens_from(ids, generator)
    at = ordinary.at
    cells: dict[tuple[bool, bool, bool], PositionReading] = {}
    for token, alone, start in product((False, True), repeat=3):
        if not start or takes_positions(target):
            layout = changed(ordinary, ids[:, 0], token, alone, start)
            cells[token, alone, start] = read_layout(spikes, layout, heads=True)
    random = read_layout(spikes, ordinary.with_token(others).alone())
    other = with_one_other(spikes, seed)
    borne = {count: read_layout(spikes, ordinary.seeing(nearest_others(at, ids.shape[1], count))) for count in BORNE}
    held = {count: read_layout(spikes, before_place(ids, count)) for count in BORNE}
    taken = taken_away(spikes, ids, others)
    by_spike: list[Conditions] = []
    for number, spike in enumerate(spikes):
        own = [Cell(*key, *position_outcome(seen, number, spike)) for key, seen in cells.items()]
        enough = float(cells[False, True, False].share[number].mean()) >= HALF
        away = [Taken(cause, *position_outcome(seen, number, spike)) for cause, seen in taken.items()]
        conditions = Conditions(
            cells=tuple(own),
            taken=tuple(away),
            random_token=float(random.share[number].mean()),
            one_other=float(other[number].mean()),
            one_other_margin=margin_of(other[number].numpy()),
            layers=first_layers(spike, ordinary) if enough else None,
            borne=tuple((count, float(seen.share[number].mean())) for count, seen in borne.items()),
            held=tuple((count, *position_outcome(seen, number, spike)[:2]) for count, seen in held.items()),
            sufficient=sufficient_of(own),
            necessary=tuple(cause.cause for cause in away if cause.share + (cause.margin or 0.0) < REMOVED),
            texts=len(ids),
        )
        by_spike.append(conditions)
    return by_spike


class PositionOutcome(NamedTuple):
    """The share of a spike that a position has, its margin over texts, and the heads that attend to the position."""

    share: float
    margin: float | None
    heads: int


def position_outcome(seen: PositionReading, number: int, spike: Spike) -> PositionOutcome:
    """Return what the positions have of one spike, by its number, mean over texts."""
    share = seen.share[number]
    return PositionOutcome(float(share.mean()), margin_of(share.numpy()), seen.heads(spike))


def changed(layout: Layout, tokens: Int[Tensor, " row"], token: bool, alone: bool, start: bool) -> Layout:
    """Return ordinary positions with one of the combinations."""
    if token:
        layout = layout.with_token(tokens)
    if alone:
        layout = layout.alone()
    return layout.at_id(0) if start else layout


def sufficient_of(cells: Sequence[Cell]) -> tuple[Cause, ...]:
    """Return the fewest causes that give an ordinary position half of the spike; each alone, if several do so alone."""
    enough: list[tuple[Cause, ...]] = []
    for cell in cells:
        if cell.causes and cell.share - (cell.margin or 0.0) >= HALF:
            enough.append(cell.causes)
    fewest = min(map(len, enough), default=0)
    if fewest == 1:
        return tuple(causes[0] for causes in enough if len(causes) == 1)
    return next((causes for causes in enough if len(causes) == fewest), ())


def taken_away(spikes: Sequence[Spike], ids: TokenRows, others: Int[Tensor, " row"]) -> dict[Cause, PositionReading]:
    """Take each cause away at the place itself."""
    whole = Layout.of(ids, torch.zeros(len(ids), dtype=torch.long))
    layouts: dict[Cause, Layout] = {"token": whole.with_token(others), "sight": before_place(ids, BEFORE)}
    target = spikes[0].survey.target
    if takes_positions(target) and ids.shape[1] + SHIFT <= (target.max_positions or ids.shape[1] + SHIFT):
        layouts["position"] = replace(whole, positions=whole.positions + SHIFT)
    return {cause: read_layout(spikes, layout, heads=True) for cause, layout in layouts.items()}


def before_place(ids: TokenRows, more: int) -> Layout:
    """Put so many tokens before the place, which the place alone sees."""
    count, length = len(ids), ids.shape[1]
    whole = torch.cat([ids[:, length - more :], ids], 1)
    own = torch.arange(length).expand(count, -1)
    positions = torch.cat([torch.zeros(count, more, dtype=torch.long), own], 1)
    unseen = torch.zeros(count, length + more, length + more, dtype=torch.bool)
    unseen[:, more + 1 :, :more] = True
    return Layout(whole, positions, torch.full((count,), more), unseen)


def first_layers(spike: Spike, ordinary: Layout) -> int | None:
    """Return the last of the first layers in which seeing only itself gives half of the spike, by halving.

    None: in all layers up to the peak it does not.
    """
    low, high = 0, spike.peak + 1
    while high - low > 1:
        middle = (low + high) // 2
        share = float(read_layout([spike], replace(ordinary.alone(), layers=range(middle))).share.mean())
        low, high = (low, middle) if share >= HALF else (middle, high)
    return high - 1


# --- draws ---


def ordinary_positions(ids: TokenRows, seed: int) -> Layout:
    """Draw an ordinary position in each text."""
    generator = draws(seed, "ordinary positions of conditions")
    return Layout.of(ids, torch.randint(FIRST, LAST, (len(ids),), generator=generator))


def tokens_from(ids: TokenRows, generator: torch.Generator) -> Int[Tensor, " row"]:
    """Draw a token of another text for each row."""
    at = torch.randint(FIRST, ids.shape[1], (len(ids),), generator=generator)
    return ids.roll(1, 0)[torch.arange(len(ids)), at]


def one_other(at: Int[Tensor, " row"], length: int, generator: torch.Generator) -> Bool[Tensor, "row key"]:
    """Draw another token before each position, but the first."""
    others = torch.zeros(len(at), length, dtype=torch.bool)
    for row, position in enumerate(at.tolist()):
        others[row, int(torch.randint(1, position, (1,), generator=generator))] = True
    return others


def with_one_other(spikes: Sequence[Spike], seed: int) -> Float[Tensor, "spike text"]:
    """Return the share of each spike at ordinary positions that see one other token, mean over draws."""
    ids, generator = spikes[0].survey.ids, draws(seed, "one other token of conditions")
    shares = list[Tensor]()
    for _ in range(DRAWS):
        at = torch.randint(FIRST, LAST, (len(ids),), generator=generator)
        shares.append(read_layout(spikes, Layout.of(ids, at).seeing(one_other(at, ids.shape[1], generator))).share)
    return torch.stack(shares).mean(0)


def nearest_others(at: Int[Tensor, " row"], length: int, count: int) -> Bool[Tensor, "row key"]:
    """Mark the nearest tokens before each position."""
    key = torch.arange(length)
    return (key < at[:, None]) & (key >= at[:, None] - count)
