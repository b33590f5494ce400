"""What the attention to a place is for: what later tokens lose without it, who takes over, how far a change spreads.

1. The place is hidden from later tokens in all layers; or in the layers after the spike's first writer (`Knockout`).
2. Later tokens keep their attention to it there, and read zero, or the mean value of ordinary tokens.
3. The same hiding of an ordinary key, and of the ordinary key with the most attention, is the control.

Each tells the change of loss with a margin, the heads and the position that take over, and by how much the last states
change when one earlier token is another (Barbero et al. 2025: a sink keeps tokens from mixing).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.engine.actor import Actor
from sinkscope.engine.attention import Attention
from sinkscope.engine.run import Run
from sinkscope.engine.step import Step
from sinkscope.engine.tap import visible_rows
from sinkscope.hooks.edit import Knockout
from sinkscope.hooks.edit.base import Intervention, under
from sinkscope.measure.margin import interval_of, margin_of
from sinkscope.measure.setup import rows_at_once
from sinkscope.models.draws import draws
from sinkscope.models.grouped_heads import per_query_head
from sinkscope.models.hook_points import heads_point
from sinkscope.models.hooks import Hook, on_hidden, on_input
from sinkscope.models.partial_pass import LayerInput
from sinkscope.models.target import Target
from sinkscope.sinks.spikes.answer_records import Change, ChangeName, Purpose
from sinkscope.sinks.spikes.edited import losses_at, read_positions, rows_of_logits
from sinkscope.sinks.spikes.survey import Survey
from sinkscope.sinks.thresholds import READS
from sinkscope.sinks.tokens import TokenRows

BEGIN = 16  # tokens from here on are read: all of them come after the keys that are hidden
CHANGED = 12  # the token that is another one, to see how far this spreads
KEYS = range(4, CHANGED)  # ordinary keys that may be hidden
TAKERS = 3  # positions that may take over: the place and those next to it
ORDINARY = 8  # from here on values are averaged
TEXTS = 8  # texts that are read, two of each kind
EVERYWHERE: ChangeName = "hidden in all layers"

Way = Callable[[int], AbstractContextManager[object]]
"""Opens a `with` block in which the rows of a pass, so many, are read in another way."""


@dataclass(frozen=True, eq=False)
class ReplaceValue(Intervention):
    """Later queries keep their attention to a position, and read another value from it.

    Attributes:
        position: The position.
        layers: The layers.
        mean: Whether it is the mean value of ordinary tokens; else it is zero.
    """

    position: int
    layers: range
    mean: bool

    def enter(self, run: Run, key: int) -> None:
        """Add, in each head, its attention to the position times the change of the value."""
        actor = _ValuesActor(self)
        run.act(actor)
        for layer in run.target.attending:
            if layer in self.layers:
                module, when, edit = heads_point(run.target, layer).hook(partial(actor.edited, layer))
                run.hook_edit(module, when, edit)


@dataclass(frozen=True, eq=False)
class _ValuesActor(Actor):
    """Reads attention and values of the layers, and changes what heads give.

    Attributes:
        of: The edit.
        attention: Attention to the position, by layer.
        change: The new value less its own, by layer.
    """

    of: ReplaceValue
    attention: dict[int, Float[Tensor, "row head query"]] = field(default_factory=dict)
    change: dict[int, Float[Tensor, "row head d_value"]] = field(default_factory=dict)

    def attends(self, step: Step) -> bool:
        """Return True: every call has queries."""
        return True

    def attend(self, step: Step, attention: Attention) -> None:
        """Keep what the layer's queries give to the position, and how its value changes."""
        layer, position = attention.layer, self.of.position
        if layer not in self.of.layers:
            return
        values = per_query_head(attention.value, attention.query.shape[1])
        own = values[:, :, position]
        new = torch.zeros_like(own)
        if self.of.mean:
            new = values[:, :, ORDINARY:].mean((0, 2)).expand_as(own)
        self.change[layer] = new - own

        def keep(first: int, rows: Tensor) -> None:
            assert first == 0
            to_position = rows[..., position].clone()
            to_position[..., : position + 1] = 0
            self.attention[layer] = to_position

        attention.show(keep, chunk=attention.queries, gives_output=False)

    def edited(self, layer: int, heads: Float[Tensor, "row query head_value"]) -> Float[Tensor, "row query head_value"]:
        """Return what the heads give with another value at the position."""
        change, attention = self.change.pop(layer), self.attention.pop(layer)
        added = torch.einsum("rhq,rhd->rqhd", attention.to(change), change)
        return heads + added.reshape(heads.shape).to(heads)


@dataclass(frozen=True, eq=False)
class WayReading:
    """What is read of texts in one way.

    Attributes:
        loss: Loss of tokens from `BEGIN` on; NaN where it is not read.
        attention: Attention of later queries to the first positions, mean over texts.
        states: The residual stream after the last layer from `BEGIN` on.
        entered: The whole stream where it enters some layers.
    """

    loss: Float[Tensor, "text following"]
    attention: Float[Tensor, "layer head position"]
    states: Float[Tensor, "text pos d_model"]
    entered: dict[int, list[Float[Tensor, "row token d_model"]]] = field(default_factory=dict)

    def begins(self, survey: Survey, layer: int) -> Begin | None:
        """Return where a pass over these texts may begin that changes nothing before a layer; None: at the first."""
        if layer not in self.entered or not survey.target.skips_layers:
            return None
        hidden = torch.cat(self.entered[layer]).to(survey.weights)
        return Begin(LayerInput(layer, hidden, survey.wrapped), self.attention[:layer])


@dataclass(frozen=True, eq=False)
class Begin:
    """Where a pass begins, and the attention of the layers before, which do not run again."""

    input: LayerInput
    attention: Float[Tensor, "layer head position"]

    def of(self, rows: Tensor) -> LayerInput:
        """Return what some of the texts begin with: a copy, because some layers add to it in place."""
        return replace(self.input, hidden=self.input.hidden[rows])


@torch.no_grad()
def read_way(
    target: Target,
    ids: TokenRows,
    way: Way,
    positions: int,
    *,
    kept_layers: Sequence[int] = (),
    begin: Begin | None = None,
    only_states: bool = False,
) -> WayReading:
    """Read texts in one way.

    Args:
        target: The model.
        ids: The texts.
        way: The way.
        positions: Number of the first positions to which attention is read.
        kept_layers: Layers whose whole input is kept.
        begin: Where the pass begins. None: at the first layer.
        only_states: Whether no loss and no attention is read.
    """
    loss = torch.full((len(ids), ids.shape[1] - 1), torch.nan)
    attention, entered = (
        torch.zeros(target.n_layers, target.n_heads, positions),
        {layer: list[Tensor]() for layer in kept_layers},
    )
    if begin is not None:
        attention[: begin.input.layer] = begin.attention[..., :positions]
    states, read = list[Tensor](), read_positions(target, ids.shape[1])
    read = read[read >= BEGIN]
    size = min(rows_at_once(ids.shape[1], max(target.d_mlp, target.d_model)), rows_of_logits(target, len(read)))

    def attend(layer: int, _first: int, probs: Tensor, visible: Tensor) -> None:
        attention[layer] += probs[:, :, BEGIN:, :positions].mean(2).sum(0).float().cpu() / len(ids)

    def keep(hidden: Tensor) -> None:
        states.append(hidden.reshape(-1, ids.shape[1], hidden.shape[-1])[:, BEGIN:].float().cpu())

    def keep_input(layer: int, hidden: Tensor) -> None:
        entered[layer].append(hidden.reshape(-1, ids.shape[1], hidden.shape[-1]).clone())

    hooks: list[Hook] = [(target.layers[-1], "post", on_hidden(keep))]
    for layer in entered:
        hooks.append((target.layers[layer], "first", on_input(partial(keep_input, layer))))
    for rows in torch.arange(len(ids)).split(size):
        with ExitStack() as stack:
            start = None if begin is None else begin.of(rows)
            stack.enter_context(way(len(rows)))
            stack.enter_context(target.hooks(*hooks))
            if only_states:
                target.forward(ids[rows], last_layer=target.n_layers - 1, start=start)
            else:
                stack.enter_context(visible_rows(target, attend, rows_per_chunk=ids.shape[1]))
                loss[rows[:, None], read] = losses_at(target, ids[rows], read, start)
    return WayReading(loss, attention, torch.cat(states), entered)


def hidden(target: Target, position: int, layers: range | None, length: int) -> Way:
    """Return the way in which later queries do not see a position in some layers (None: in all)."""

    def way(_rows: int) -> AbstractContextManager[object]:
        chosen = [layer for layer in target.attending if layers is None or layer in layers]
        return under(Knockout([position], layers=chosen), target) if chosen else nullcontext()

    return way


def valued(target: Target, position: int, layers: range, mean: bool) -> Way:
    """Return the way in which later queries read another value from a position in some layers."""
    return lambda _rows: under(ReplaceValue(position, layers, mean), target)


def intact(_rows: int) -> AbstractContextManager[object]:
    """Change nothing."""
    return nullcontext()


@torch.no_grad()
def purposes_of(survey: Survey, first_writers: Sequence[int], seed: int) -> list[Purpose]:
    """Ask what the attention to the first token is for; empty where it cannot be asked.

    That is of texts that are too short, and of a model that is read layer by layer. How far a change spreads is read
    for the first spike alone.

    Args:
        survey: Texts that found no spike.
        first_writers: Of each spike of the first token, the layer of the first neuron or component that it needs.
        seed: Seed of the ordinary key.
    """
    target, ids, purposes = survey.target, survey.ids[:TEXTS], list[Purpose]()
    length = ids.shape[1]
    if not first_writers or length <= 2 * BEGIN or not target.resident:
        return []
    ordinary = KEYS[int(torch.randint(len(KEYS), (1,), generator=draws(seed, "ordinary key of purpose")))]
    attended = most_attended(survey)
    changed = ids.clone()
    changed[:, CHANGED] = ids.roll(1, 0)[:, CHANGED + 7]
    late_layers = sorted({layer + 1 for layer in first_writers if layer + 1 < target.n_layers})
    plain = read_way(target, ids, intact, TAKERS, kept_layers=late_layers)
    other = read_way(target, changed, intact, 1, kept_layers=late_layers, only_states=True)
    base = spread_of(plain, other)
    everywhere: Change | None = None
    for first_writer in first_writers:
        late, changes = range(first_writer + 1, target.n_layers), list[Change]()
        ways: dict[ChangeName, Way] = {
            EVERYWHERE: hidden(target, 0, None, length),
            "hidden": hidden(target, 0, late, length),
            "value zero": valued(target, 0, late, False),
            "mean value": valued(target, 0, late, True),
            "ordinary key hidden": hidden(target, ordinary, late, length),
            "most attended key hidden": hidden(target, attended, late, length),
        }
        for name, way in ways.items():
            if name == EVERYWHERE and everywhere is not None:
                changes.append(everywhere)
                continue
            begin, begin_other, spread = plain.begins(survey, late.start), other.begins(survey, late.start), None
            if name == EVERYWHERE:
                begin = begin_other = None
            read = read_way(target, ids, way, TAKERS, begin=begin)
            if not purposes and "key" not in name:
                spread = spread_of(read, read_way(target, changed, way, 1, begin=begin_other, only_states=True))
            changes.append(record_of_way(name, plain, read, spread))
        everywhere = changes[0]
        purpose = Purpose(
            layers=(late.start, late.stop - 1),
            changes=tuple(changes),
            spread=float(base.mean()),
            spread_margin=margin_of(base.numpy()),
            heads=int((plain.attention[..., 0] > READS).sum()),
            ordinary=ordinary,
            attended=attended,
            texts=len(ids),
            tokens=int(plain.loss.isfinite().sum()),
        )
        purposes.append(purpose)
    return purposes


def most_attended(survey: Survey) -> int:
    """Return the ordinary key that gets the most attention, mean over heads and texts."""
    attention = survey.attention[survey.target.attending].mean((0, 1, 2))
    return KEYS[int(attention[KEYS.start : KEYS.stop].argmax())]


def spread_of(read: WayReading, changed: WayReading) -> Float[Tensor, " text"]:
    """Return by how much the last states of later tokens change, relative to their norm, when a token is another."""
    return ((read.states - changed.states).norm(dim=-1) / read.states.norm(dim=-1)).mean(1)


def record_of_way(
    name: ChangeName, plain: WayReading, read: WayReading, spread: Float[Tensor, " text"] | None
) -> Change:
    """Return the record of a way."""
    rise = (read.loss - plain.loss).nanmean(1)
    interval = interval_of(rise.numpy())
    counts = [int((read.attention[..., position] > READS).sum()) for position in range(TAKERS)]
    taker = 1 + int(torch.tensor(counts[1:]).argmax())
    return Change(
        name=name,
        loss=float(rise.mean()),
        interval=None if interval is None else (interval.low, interval.high),
        heads=counts[0],
        taker=taker,
        taker_heads=counts[taker],
        spread=None if spread is None else float(spread.mean()),
        spread_margin=None if spread is None else margin_of(spread.numpy()),
    )
