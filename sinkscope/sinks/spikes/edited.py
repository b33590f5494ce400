"""The one reader: batches of texts, each row under an edit of its own, and the three things that are read of them.

Whatever is asked of a place (needs, effects, controls, marks, conditions, purpose) is a `Batch` for `read`.

1. A hook edits the rows of its part: neurons are zeroed at the place, or everywhere; a component or a head writes its
   mean over ordinary positions at the place. A mask hides keys, and later tokens may read another value at the place.
2. A pass starts at the first layer at which anything acts, from what the survey kept there.
3. It ends at the last peak or the last layer whose attention is read; for the loss, at the end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from sinkscope.engine.attention import AttentionRows
from sinkscope.engine.tap import attention_rows
from sinkscope.files.progress import report_progress
from sinkscope.hooks.edit.knockout import keys_hidden
from sinkscope.hooks.trace import trace
from sinkscope.models.hooks import Hook, forward_parameters, on_hidden
from sinkscope.models.layers import per_query_head
from sinkscope.models.neurons import heads_point, neurons_point
from sinkscope.models.target import LayerInput, Target
from sinkscope.results.notation import Head, Neuron
from sinkscope.sinks.spikes.spike import Part, Parts, Spike, mean_by_row
from sinkscope.sinks.spikes.survey import MOST_NUMBERS, rows_at_once, to_place
from sinkscope.sinks.spikes.writers import hook_points_of
from sinkscope.sinks.thresholds import NARROWEST
from sinkscope.sinks.tokens import Mask, TokenRows

LOGITS = 1 << 23  # logits of a text at most: of very large vocabularies, every second token is read, or fewer
AT_ONCE = 16  # tokens whose logits become losses together: of more, each time new memory would be taken
ORDINARY = 8  # from here on values are averaged
Some = TypeVar("Some", bound=Parts)
Written = Mapping[Part, Float[Tensor, " d"]]
"""What a component or a head writes at the place instead: its mean over ordinary positions."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Texts that are read together.

    Attributes:
        spikes: The spikes whose projections are read.
        ids: The tokens of each row.
        places: The place of each spike in them; edits act at the first, and attention to it is read.
        edits: Sets of parts. Neurons are zeroed, components and heads replaced at the place.
        everywhere: Whether neurons are zeroed at every position; else at the place alone.
        edit_of: Number of each row's set. None: nothing is removed.
        values: What replaced parts write instead.
        texts: Number of each row's text in the survey, from whose states a pass may start. None: it is in none.
        unseen: What queries do not see beyond what is causal.
        value: What later tokens read at the place, which is one position in all rows, instead of its own value.
        layers: Layers in which keys are hidden, or another value is read. None: all.
        positions: Position ids. None: as usual.
    """

    spikes: tuple[Spike, ...]
    ids: TokenRows
    places: Bool[Tensor, "row spike pos"]
    edits: Sequence[Parts] = ()
    everywhere: bool = False
    edit_of: Int[Tensor, " row"] | None = None
    values: Written = field(default_factory=dict)
    texts: Int[Tensor, " row"] | None = None
    unseen: Bool[Tensor, "row query key"] | None = None
    value: Literal["zero", "mean"] | None = None
    layers: Sequence[int] | None = None
    positions: Int[Tensor, "row pos"] | None = None

    @property
    def target(self) -> Target:
        """The model."""
        return self.spikes[0].survey.target

    def until_place(self) -> Batch:
        """Return the tokens up to the last of the place alone: later ones change nothing before them."""
        end = 1 + int(self.places[:, 0].nonzero()[:, 1].max())
        unseen = None if self.unseen is None else self.unseen[:, :end, :end]
        positions = None if self.positions is None else self.positions[:, :end]
        return replace(self, ids=self.ids[:, :end], places=self.places[..., :end], unseen=unseen, positions=positions)

    @contextmanager
    def acting(self, *more: Hook) -> Iterator[None]:
        """Context manager in which everything acts that is done to the rows: each part is edited in its own rows.

        Args:
            more: Hooks that read.
        """
        target = self.target
        place = self.places[:, 0]
        hooks = list[Hook]()
        removed = dict[Any, dict[Any, Any]]()  # the rows without each part, by what a hook edits together
        layers = target.attending if self.layers is None else sorted({*self.layers} & {*target.attending})
        for number, members in enumerate(self.edits):
            rows = self.edit_of == number
            for part in members:
                one = (part.layer, part.expert) if isinstance(part, Neuron) else part
                parts = removed.setdefault(one, {})
                parts[part] = parts.get(part, False) | rows
        for one, parts in removed.items():
            where = torch.stack([*parts.values()], -1)[:, None] & (place[..., None] | self.everywhere)
            if isinstance(one, tuple):
                hooks.append(neurons_point(target, [*parts]).rows(where, torch.zeros(())))
            else:
                for point in hook_points_of(target, one):
                    hooks.append(point.rows(where, self.values[one]))
        with ExitStack() as stack:
            if self.unseen is not None and layers:
                stack.enter_context(keys_hidden(target, layers, self.unseen))
            if self.value is not None:
                position = int(place[0].nonzero()[0])
                stack.enter_context(other_value(target, layers, position, mean=self.value == "mean"))
            stack.enter_context(target.hooks(*hooks, *more))
            yield

    def inputs(self) -> dict[str, Any]:
        """Return the position ids; and a mask, without which ids that jump would be read as those of packed texts."""
        if self.positions is None or not takes_positions(self.target):
            return {}
        positions = self.positions.to(self.target.device)
        return {"attention_mask": torch.ones_like(positions), "position_ids": positions}


class Reading(NamedTuple):
    """What is read of each row.

    Attributes:
        along: Projection of the place on each spike's direction after its peak, as a share of the spike; NaN where the
            row does not have the place.
        intact: The same in the row's text without an edit; NaN if it is in none.
        attention: Attention to the place of the first spike, mean over the later queries that see it; 0 in layers that
            are not read.
        loss: Loss of the next tokens, in nats; NaN where it is not read.
    """

    along: Float[Tensor, "row spike"]
    intact: Float[Tensor, "row spike"]
    attention: Float[Tensor, "row layer head"]
    loss: Float[Tensor, "row following"]


@torch.no_grad()
def read(batch: Batch, heads: Sequence[int] = (), *, loss: bool = False, since: int = 0) -> Reading:
    """Read rows under their edits, in a single pass if the model is streamed: it is then read from disk once.

    Args:
        batch: The rows.
        heads: Layers whose attention is read.
        loss: Whether the loss is read, of a model in memory.
        since: The first position whose attention and loss are read.
    """
    target, (count, length), positions = batch.target, batch.ids.shape, None
    size = count
    layers = sorted({*heads} & {*target.attending})
    if target.resident:
        size = rows_at_once(length, max(target.d_mlp, target.d_model))
        if loss:
            words = int(target.config.vocab_size)
            step = -(-length * words // LOGITS)
            positions = torch.arange(step - 1, length - 1, step)
            positions = positions[positions >= since]
            size = min(size, max(1, 2 * MOST_NUMBERS // (max(1, len(positions)) * words)))
    passes: list[Reading] = []
    for rows in torch.arange(count).split(size):
        own: dict[str, Any] = {}
        for name, value in vars(batch).items():
            if isinstance(value, Tensor):
                own[name] = value[rows]
        passes.append(_read(replace(batch, **own), layers, positions, since))
        if size < count:
            report_progress("removals", len(passes), -(-count // size))
    return Reading(*map(torch.cat, zip(*passes, strict=True)))


def _read(batch: Batch, layers: Sequence[int], positions: Int[Tensor, " some"] | None, since: int) -> Reading:
    """Read rows in one pass. Before the layer at which it starts, nothing acts and nothing is read."""
    target = batch.target
    ids = batch.ids
    spikes = batch.spikes
    along, intact = torch.full((2, len(ids), len(spikes)), torch.nan)
    attention = torch.zeros(len(ids), target.n_layers, target.n_heads)
    loss = torch.full((len(ids), max(ids.shape[1] - 1, 0)), torch.nan)
    last = max(layers, default=0)
    begins = min(layers, default=target.n_layers - 1)
    start = None
    hooks = list[Hook]()

    def at_peak(number: int, hidden: Tensor) -> None:
        own = batch.places[:, number]
        there = hidden.reshape(*own.shape, -1)[own.to(hidden.device)].float().cpu()
        along[:, number] = mean_by_row(spikes[number].along(there), own)

    def received_by(rows: AttentionRows) -> None:
        given, seen = rows.given_later(since=since)
        if rows.is_narrow(NARROWEST):
            given, seen = torch.zeros_like(given), torch.zeros_like(seen)
        attention[:, rows.layer] = to_place(given, seen, batch.places[:, :1])

    for part in chain(*batch.edits):
        begins = min(begins, part.layer or 0)
    if batch.unseen is not None or batch.value is not None:
        begins = min([begins, 0] if batch.layers is None else [begins, *batch.layers])
    if batch.positions is not None:
        begins = 0
    if batch.texts is not None:
        start = spikes[0].survey.start(begins, batch.texts, ids.shape[1])
    for number, spike in enumerate(spikes):
        last = max(last, spike.peak)
        if batch.texts is not None:
            intact[:, number] = spike.intact[batch.texts]
        if start is None or spike.peak >= begins:
            hooks.append(on_hidden(target.layers[spike.peak], "post", partial(at_peak, number)))
        else:  # it is as the survey saw it: nothing acts up to there
            along[:, number] = intact[:, number]
    with ExitStack() as stack:
        if layers:
            stack.enter_context(attention_rows(target, received_by, layers=[*layers]))
        stack.enter_context(batch.acting(*hooks))
        if positions is None:
            target.forward(ids, last_layer=last, start=start, **batch.inputs())
        else:
            loss[:, positions] = losses_at(target, ids, positions, start)
    return Reading(along, intact, attention, loss)


def takes_positions(target: Target) -> bool:
    """Return whether the model takes position ids; with ALiBi it has none."""
    return "position_ids" in forward_parameters(type(target.base))


@contextmanager
def other_value(target: Target, layers: Sequence[int], position: int, *, mean: bool) -> Iterator[None]:
    """Context manager: later queries keep their attention to a position, and read another value from it.

    Each head gives its attention to the position, times the change of the value, in addition.

    Args:
        target: The model.
        layers: The layers.
        position: The position.
        mean: Whether they read the mean value of ordinary tokens of the rows of the pass; else zero.
    """
    kept: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(rows: AttentionRows) -> None:
        assert rows.call is not None
        heads = rows.call.query.shape[1]  # those that this process holds
        here = per_query_head(rows.call.value, heads).expand(-1, heads, -1, -1)
        values = target.shards.gather(here, target.n_heads, 1)
        new = values[:, :, ORDINARY:].mean((0, 2)) if mean else values.new_zeros(())
        given = rows.probs[..., position].clone()
        given[..., : position + 1] = 0
        kept[rows.layer] = given, new - values[:, :, position]

    def edited(layer: int, heads: Float[Tensor, "row query d"]) -> Float[Tensor, "row query d"]:
        given, change = kept.pop(layer)
        by_head = given.to(change).transpose(1, 2)[..., None] * change[:, None]  # "row query head d"
        return heads + by_head.reshape(heads.shape).to(heads)

    hooks = [heads_point(target, layer).hook(partial(edited, layer)) for layer in layers]
    with attention_rows(target, keep, layers=[*layers]), target.hooks(*hooks):
        yield


# --- losses ---


@torch.no_grad()
def losses_at(
    target: Target, ids: TokenRows, positions: Tensor, start: LayerInput | None = None
) -> Float[Tensor, "row some"]:
    """Measure the loss of the tokens after some positions, in nats."""
    logits = target.logits_at(ids, positions, start).flatten(0, 1)
    following = ids[:, positions + 1].to(logits.device)
    losses = list[Tensor]()
    for rows, tokens in zip(logits.split(AT_ONCE), following.flatten().split(AT_ONCE), strict=True):
        losses.append(cross_entropy(rows.float(), tokens, reduction="none"))
    return torch.cat(losses).reshape(following.shape).cpu()


def intact_losses(spike: Spike) -> Float[Tensor, "text following"]:
    """Return the loss of the next tokens of a survey without an edit, which is read once; NaN where it is not read."""
    survey = spike.survey
    if not survey.losses:
        batch = Batch((spike,), survey.ids, spike.place.mask[:, None], texts=torch.arange(len(survey.ids)))
        survey.losses.append(read(batch, loss=True).loss)
    return survey.losses[0]


# --- what is left of a spike ---


def batch_of(
    spike: Spike,
    edits: Sequence[Parts],
    texts: Int[Tensor, " row"],
    edit_of: Int[Tensor, " row"],
    others: Sequence[Spike] = (),
) -> Batch:
    """Return rows that read some texts, by their numbers in the survey of spikes, each under an edit."""
    spikes = (spike, *others)
    places = list[Mask]()
    for own in spikes:
        places.append(own.place.mask[texts])
    ids = spike.survey.ids[texts]
    values = means_of(spike, dict.fromkeys(chain(*edits)))
    return Batch(spikes, ids, torch.stack(places, 1), edits, edit_of=edit_of, values=values, texts=texts)


def left_at_place(
    spike: Spike, edits: Sequence[Parts], others: Sequence[Spike] = ()
) -> Float[Tensor, "edit spike text"]:
    """Measure what is left of a spike, and of others, in each text that has its place, with parts removed there.

    The passes end at their peaks and at the place. Texts that are alike up to the place, such as BOS alone, are read
    once.
    """
    mask, rows = spike.place.mask, spike.texts
    end = int(mask[rows].any(0).nonzero().max()) + 1
    ids, place = spike.survey.ids[rows, :end], mask[rows, :end]
    if bool((ids == ids[0]).all() & (place == place[0]).all()):
        rows = rows[:1]
    edit_of = torch.arange(len(edits)).repeat_interleave(len(rows))
    batch = batch_of(spike, edits, rows.repeat(len(edits)), edit_of, others).until_place()
    seen = read(batch)
    along = seen.along.reshape(len(edits), len(rows), -1)
    return share_left(along.transpose(1, 2), seen.intact[: len(rows)].T)


def left_of(spike: Spike, sets: Sequence[Some], others: Sequence[Spike] = ()) -> dict[Some, list[float]]:
    """Return what is left of a spike, and of others, without each set at the place; strongest effect first."""
    if not sets:
        return {}
    left = left_at_place(spike, sets, others).nanmean(-1).nan_to_num(1.0)
    ordered = dict[Some, list[float]]()
    for number in left[:, 0].abs().argsort(stable=True).tolist():
        ordered[sets[number]] = left[number].tolist()
    return ordered


def share_left(
    edited: Float[Tensor, "*edit text"], intact: Float[Tensor, "*intact text"]
) -> Float[Tensor, "*edit text"]:
    """Divide the mean over texts under each edit by the intact one, and add how far each text moves that ratio."""
    mean = intact.nanmean(-1, keepdim=True)
    left = edited.nanmean(-1, keepdim=True) / mean
    return left + (edited - left * intact) / mean


def means_of(spike: Spike, parts: Collection[Part]) -> dict[Part, Tensor]:
    """Return what components and heads write on average at ordinary positions, in the units of what writes it."""
    survey = spike.survey
    site = "blocks.{}.attn.hook_z"
    sites = dict[str, None]()
    means = dict[Part, Tensor]()
    for part in parts:
        if isinstance(part, Head):
            sites[site.format(part.layer)] = None
    outputs = trace(survey.target, survey.ids, [*sites]) if sites else {}
    factors: dict[str, float] = dict.fromkeys(("mlp", "attention"), survey.target.adapter.write_factor)
    for part in parts:
        if isinstance(part, Head):
            means[part] = outputs[site.format(part.layer)][survey.ordinary][:, part.head].float().mean(0)
        elif not isinstance(part, Neuron):
            means[part] = survey.added(part)[survey.ordinary].mean(0) / factors.get(part.kind, 1)
    return means
