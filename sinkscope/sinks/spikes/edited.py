"""Edits of a spike side by side: rows of one pass, each a text under an edit of its own.

1. A hook edits the rows of its part: neurons are zeroed at the place, or everywhere; a component or a head writes its
   mean over ordinary positions at the place.
2. A pass starts at the first layer at which an edit acts, from what the survey kept there.
3. It ends at the peak of the spikes whose projections are read; or, for attention and loss, at the end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from sinkscope.engine.tap import visible_rows
from sinkscope.files.progress import report_progress
from sinkscope.hooks.edit.base import under
from sinkscope.hooks.edit.knockout import HideCells
from sinkscope.hooks.trace import trace
from sinkscope.measure.setup import MOST_NUMBERS, rows_at_once
from sinkscope.models.hook_points import groups_of, neurons_point
from sinkscope.models.hooks import Hook, on_hidden
from sinkscope.models.partial_pass import LayerInput
from sinkscope.models.target import Target
from sinkscope.results.parts import Component, Head, Neuron
from sinkscope.sinks.spikes.spike import Part, Parts, Spike
from sinkscope.sinks.spikes.survey import Survey, given_later, to_place
from sinkscope.sinks.spikes.writers import hook_points_of
from sinkscope.sinks.thresholds import READS
from sinkscope.sinks.tokens import Mask, TokenRows

LOGITS = 1 << 23  # logits of a text at most: of very large vocabularies, every second token is read, or fewer
AT_ONCE = 16  # tokens whose logits become losses together: of more, each time new memory would be taken

Written = Mapping[Part, Float[Tensor, " d"]]
"""What a component or a head writes at the place instead: its mean over ordinary positions."""


@dataclass(frozen=True)
class Edit:
    """Parts that are removed.

    Attributes:
        parts: The parts. Components and heads are replaced at the place alone.
        everywhere: Whether neurons are zeroed at every position; else at the place alone.
    """

    parts: Parts = ()
    everywhere: bool = False

    @cached_property
    def first_layer(self) -> int:
        """The first layer in which it acts."""
        return min((part.layer or 0 for part in self.parts), default=1 << 30)


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of a pass.

    Attributes:
        spikes: The spikes whose projections are read; edits act at the place of the first.
        ids: The tokens of each row.
        places: The place of each spike in them.
        edits: The edits.
        edit_of: Number of each row's edit.
        values: What replaced parts write instead.
        texts: Number of each row's text in the survey, from whose states a pass may start. None: it is in none.
        hidden: Layers in which later tokens do not see the place. None: they do.
    """

    spikes: tuple[Spike, ...]
    ids: TokenRows
    places: tuple[Mask, ...]
    edits: tuple[Edit, ...]
    edit_of: Int[Tensor, " row"]
    values: Written = field(default_factory=dict)
    texts: Int[Tensor, " row"] | None = None
    hidden: range | None = None

    @property
    def target(self) -> Target:
        """The model."""
        return self.spikes[0].survey.target

    @property
    def acts_at(self) -> int:
        """The first layer in which an edit acts, or the place is hidden."""
        first = min((edit.first_layer for edit in self.edits), default=1 << 30)
        return first if self.hidden is None else min(first, self.hidden.start)

    def some(self, rows: slice) -> Batch:
        """Return some of the rows."""
        places = tuple(place[rows] for place in self.places)
        texts = None if self.texts is None else self.texts[rows]
        return replace(self, ids=self.ids[rows], places=places, edit_of=self.edit_of[rows], texts=texts)

    def start(self, layer: int) -> LayerInput | None:
        """Return what a pass may start with at a layer; None: it starts at the first."""
        if self.texts is None:
            return None
        return self.spikes[0].survey.start(layer, self.texts, self.ids.shape[1])

    def hiding(self) -> AbstractContextManager[object]:
        """Return a `with` block in which later tokens do not see the place."""
        if self.hidden is None or not len(self.hidden):
            return nullcontext()
        place = self.places[0]
        return under(HideCells(place[:, None].expand(-1, place.shape[1], -1), list(self.hidden)), self.target)

    def hooks(self) -> list[Hook]:
        """Return the hooks that edit each row."""
        hooks, members = list[Hook](), [frozenset(edit.parts) for edit in self.edits]
        parts = list(dict.fromkeys(part for edit in self.edits for part in edit.parts))
        place, everywhere = self.places[0][..., None], torch.tensor([edit.everywhere for edit in self.edits])
        for group in groups_of([part for part in parts if isinstance(part, Neuron)]):
            member = torch.tensor([[site in own for site in group.sites] for own in members])[self.edit_of, None]
            where = member & (place | everywhere[self.edit_of, None, None])
            hooks.append(neurons_point(self.target, group).rows(where, torch.zeros_like))
        for part in parts:
            if not isinstance(part, Neuron):
                rows = torch.tensor([part in own for own in members])[self.edit_of, None, None]
                for point in hook_points_of(self.target, part):
                    hooks.append(point.rows(rows & place, partial(_expanded, self.values[part])))
        return hooks


def _expanded(new: Float[Tensor, " d"], values: Float[Tensor, "row pos d"]) -> Float[Tensor, "row pos d"]:
    return new.to(values).expand_as(values)


@dataclass(frozen=True)
class RowReading:
    """What is read of each row.

    Attributes:
        along: Projection of the place on the direction of each spike after its peak, as a share of the spike, mean over
            the place; NaN where the row does not have the place, or the pass ended before.
        attention: Attention to the place of the first spike in the layers that read it, mean over the later queries
            that see it.
        loss: Loss of the next tokens, in nats; NaN where it is not read.
    """

    along: Float[Tensor, "spike row"]
    attention: Float[Tensor, "row layer head"]
    loss: Float[Tensor, "row following"]


@torch.no_grad()
def read_batch(batch: Batch, *, whole: bool = False, losses: bool = False, peaks: int | None = None) -> RowReading:
    """Read rows under their edits, in a single pass if the model is streamed: it is then read from disk once.

    Args:
        batch: The rows.
        whole: Whether the attention of the layers that can read the first spike is read; else a pass ends at a peak.
        losses: Whether the loss is read, of a model in memory.
        peaks: Number of spikes, from the first on, whose projections are read. None: all.
    """
    target, size, passes = batch.target, len(batch.ids), list[RowReading]()
    if target.resident:
        size = rows_at_once(batch.ids.shape[1], max(target.d_mlp, target.d_model))
        if losses:
            positions = read_positions(target, batch.ids.shape[1])
            size = min(size, rows_of_logits(target, len(positions)))
    starts = range(0, len(batch.ids), size)
    for number, first in enumerate(starts, 1):
        some = batch.some(slice(first, first + size))
        with some.hiding():
            passes.append(_read_rows(some, whole, losses, peaks))
        if len(starts) > 1:
            report_progress("removals", number, len(starts))
    return RowReading(
        torch.cat([reading.along for reading in passes], 1),
        torch.cat([reading.attention for reading in passes]),
        torch.cat([reading.loss for reading in passes]),
    )


def _read_rows(batch: Batch, whole: bool, losses: bool, peaks: int | None) -> RowReading:
    """Read rows in one pass. Before the layer at which it starts, no edit acts and nothing is read."""
    target, ids, spikes = batch.target, batch.ids, batch.spikes[:peaks]
    reading, place = spikes[0].reading_layers, batch.places[0]
    along = torch.full((len(batch.spikes), len(ids)), torch.nan)
    attention = torch.zeros(len(ids), len(reading), target.n_heads)
    loss = torch.full((len(ids), max(ids.shape[1] - 1, 0)), torch.nan)

    def at_peak(number: int, hidden: Tensor) -> None:
        own = batch.places[number]
        states = hidden.reshape(*own.shape, -1)[own.to(hidden.device)].float().cpu()
        along[number] = mean_by_row(spikes[number].along(states), own)

    def attend(layer: int, _first: int, probs: Tensor, visible: Tensor) -> None:
        received, seen = given_later(probs, visible)
        attention[:, layer - reading.start] = to_place(received.cpu(), seen, place[:, None])

    layers = [layer for layer in target.attending if layer in reading] if whole else []
    begins = min(batch.acts_at, target.n_layers - 1)
    if whole:
        begins = min(begins, reading.start)
    start, hooks = batch.start(begins), batch.hooks()
    for number, spike in enumerate(spikes):
        if start is None or spike.peak >= begins:
            hooks.append((target.layers[spike.peak], "post", on_hidden(partial(at_peak, number))))
        else:  # it is as the survey saw it: nothing acts up to there
            at_peak(number, spike.survey.entered[spike.peak + 1, batch.texts, : ids.shape[1]])
    with ExitStack() as stack:
        if layers:
            stack.enter_context(visible_rows(target, attend, layers=layers, rows_per_chunk=ids.shape[1]))
        stack.enter_context(target.hooks(*hooks))
        if losses and target.resident:
            positions = read_positions(target, ids.shape[1])
            loss[:, positions] = losses_at(target, ids, positions, start)
        else:
            target.forward(ids, last_layer=max([*layers, *(spike.peak for spike in spikes)]), start=start)
    return RowReading(along, attention, loss)


def mean_by_row(cases: Float[Tensor, " case"], place: Mask) -> Float[Tensor, " row"]:
    """Return the mean over the positions of a place in each row; NaN in a row without."""
    rows = place.nonzero()[:, 0]
    total = torch.zeros(len(place)).index_add_(0, rows, cases.float())
    return total / place.sum(1)


def read_positions(target: Target, length: int) -> Int[Tensor, " some"]:
    """Return the positions whose next tokens have their loss read: all, of a very large vocabulary fewer."""
    step = -(-length * int(target.config.vocab_size) // LOGITS)
    return torch.arange(step - 1, length - 1, step)


def rows_of_logits(target: Target, positions: int) -> int:
    """Return how many texts have logits of so many positions that memory allows."""
    return max(1, 2 * MOST_NUMBERS // (positions * int(target.config.vocab_size)))


@torch.no_grad()
def losses_at(target: Target, ids: TokenRows, positions: Tensor, start: LayerInput | None) -> Float[Tensor, "row some"]:
    """Measure the loss of the tokens after some positions, in nats.

    Args:
        target: The model.
        ids: The texts.
        positions: The positions.
        start: Where the pass begins. None: at the first layer.
    """
    logits = target.logits_at(ids, positions, start).flatten(0, 1)
    following = ids[:, positions + 1].to(logits.device)
    losses = list[Tensor]()
    for rows, tokens in zip(logits.split(AT_ONCE), following.flatten().split(AT_ONCE), strict=True):
        losses.append(cross_entropy(rows.float(), tokens, reduction="none"))
    return torch.cat(losses).reshape(following.shape).cpu()


def intact_losses(survey: Survey) -> Float[Tensor, "text following"]:
    """Return the loss of the next tokens of a survey without an edit; NaN where it is not read."""
    target, ids = survey.target, survey.ids
    if not survey.losses:
        loss = torch.full((len(ids), ids.shape[1] - 1), torch.nan)
        if target.resident:
            positions = read_positions(target, ids.shape[1])
            for rows in torch.arange(len(ids)).split(rows_of_logits(target, len(positions))):
                start = survey.start(target.n_layers - 1, rows)
                loss[rows[:, None], positions] = losses_at(target, ids[rows], positions, start)
        survey.losses.append(loss)
    return survey.losses[0]


@dataclass(frozen=True, eq=False)
class SpikeTexts:
    """The texts of a survey that have a spike's place.

    Attributes:
        spike: The spike.
        rows: Numbers of the texts.
        others: Other spikes in the same survey whose projections are read beside.
        values: What replaced parts write instead, as far as it is known.
    """

    spike: Spike
    rows: Int[Tensor, " text"]
    others: tuple[Spike, ...] = ()
    values: dict[Part, Float[Tensor, " d"]] = field(default_factory=dict)

    @classmethod
    def of(cls, spike: Spike, others: Sequence[Spike] = ()) -> SpikeTexts:
        """Return all texts that have the place.

        Args:
            spike: The spike.
            others: Other spikes whose projections are read beside.
        """
        return cls(spike, spike.place.mask.any(1).nonzero().flatten(), tuple(others))

    @cached_property
    def attention(self) -> Float[Tensor, "layer head text"]:
        """Attention to the place of each head in the layers that can read it, without an edit."""
        reading = self.spike.reading_layers
        received = self.spike.survey.received(self.spike.place.mask)
        return received[reading.start : reading.stop, :, self.rows]

    @cached_property
    def readers(self) -> Bool[Tensor, "layer head"]:
        """The heads in these layers that attend to the place without an edit."""
        return self.attention.mean(-1) > READS

    @cached_property
    def counted(self) -> Bool[Tensor, "text following"]:
        """The next tokens whose loss counts: those of queries after the first position of the place."""
        place = self.spike.place.mask[self.rows]
        return (place.int().cumsum(1) - place.int() > 0)[:, :-1]

    def batch(self, edits: Sequence[Edit], texts: Tensor, edit_of: Tensor, end: int | None = None) -> Batch:
        """Return rows that read some texts, by their numbers in the survey, each under an edit."""
        survey, spikes = self.spike.survey, (self.spike, *self.others)
        parts = {part for edit in edits for part in edit.parts if not isinstance(part, Neuron)}
        self.values.update(means_of(self.spike, parts - self.values.keys()))
        places = tuple(spike.place.mask[texts, :end] for spike in spikes)
        return Batch(spikes, survey.ids[texts, :end], places, tuple(edits), edit_of, self.values, texts)

    def at_place(self, edits: Sequence[Edit], *, read_others: bool = False) -> Float[Tensor, "edit spike text"]:
        """Measure what is left of spikes in each text, in passes that end at their peaks and at the place.

        Args:
            edits: The edits.
            read_others: Whether other spikes are read beside, where their places are not behind this.
        """
        mask, rows = self.spike.place.mask, self.rows
        end = int(mask[rows].any(0).nonzero().max()) + 1
        ids, place = self.spike.survey.ids[rows, :end], mask[rows, :end]
        if bool((ids == ids[0]).all() & (place == place[0]).all()):  # such as BOS alone
            rows = rows[:1]
        edit_of = torch.arange(len(edits)).repeat_interleave(len(rows))
        batch = self.batch(edits, rows.repeat(len(edits)), edit_of, end)
        along = read_batch(batch, peaks=None if read_others else 1).along
        return self.left_of(along.reshape(len(along), len(edits), -1).transpose(0, 1), rows)

    def along(self, sets: Sequence[Parts]) -> Float[Tensor, "edit text"]:
        """Measure what is left of the spike in each text, with parts removed at the place."""
        return self.at_place([Edit(parts) for parts in sets])[:, 0]

    def left(self, sets: Sequence[Parts]) -> dict[Parts, float]:
        """Return what is left of the spike without each set at the place, mean over texts; strongest effect first."""
        if not sets:
            return {}
        left = dict(zip(sets, self.along(sets).mean(1).tolist(), strict=True))
        return dict(sorted(left.items(), key=lambda item: abs(item[1])))

    def left_of(self, along: Float[Tensor, "edit spike text"], rows: Tensor) -> Float[Tensor, "edit spike text"]:
        """What is left in these texts: a ratio of means over texts, and how far each text moves it."""
        intact: list[Tensor] = []
        for spike in (self.spike, *self.others):
            place = spike.place.mask[rows]
            states = spike.survey.entered[spike.peak + 1, rows][place]
            intact.append(mean_by_row(spike.along(states), place))
        return share_left(along, torch.stack(intact))


def share_left(
    edited: Float[Tensor, "*edit text"], intact: Float[Tensor, "*intact text"]
) -> Float[Tensor, "*edit text"]:
    """Divide the mean over texts under each edit by the intact one, and add how far each text moves that ratio."""
    mean = intact.nanmean(-1, keepdim=True)
    left = edited.nanmean(-1, keepdim=True) / mean
    return left + (edited - left * intact) / mean


def left_of(along: Float[Tensor, "state case"]) -> Float[Tensor, "edit case"]:
    """Return what is left under each edit, from projections of the intact state and the edited states."""
    return share_left(along[1:], along[:1])


def means_of(spike: Spike, parts: Collection[Part]) -> dict[Part, Tensor]:
    """Return what components and heads write on average at ordinary positions, in the units of what writes it.

    Args:
        spike: Its ordinary positions count.
        parts: The parts.
    """
    survey, site, means = spike.survey, "blocks.{}.attn.hook_z", dict[Part, Tensor]()
    sites = [site.format(layer) for layer in {part.layer for part in parts if isinstance(part, Head)}]
    outputs = trace(survey.target, survey.ids, sites) if sites else {}
    factors = {"mlp": survey.target.adapter.write_factor, "attention": survey.target.adapter.attn_factor}
    for part in parts:
        if isinstance(part, Head):
            means[part] = outputs[site.format(part.layer)][spike.ordinary][:, part.head].float().mean(0)
        elif isinstance(part, Component):
            means[part] = survey.added(part)[spike.ordinary].mean(0) / factors.get(part.kind, 1)
    return means
