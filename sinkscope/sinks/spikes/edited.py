"""Edits of one spike side by side: one batch, one edit per row; and the texts of a survey in which a spike is edited.

1. A batch has all texts under the first edit, then all under the second, and so on; a hook edits the rows of its part.
2. It starts at the first layer at which an edit differs, from what the survey kept there.
3. It ends at the spike's peak, whose projection is read; or, for attention and loss, after the layers that read it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple, TypeVar

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from sinkscope.engine.tap import visible_rows
from sinkscope.files.progress import report_progress
from sinkscope.hooks.trace import trace
from sinkscope.measure.setup import rows_at_once
from sinkscope.models.hooks import Hook, LayerInput, on_hidden
from sinkscope.models.neurons import groups_of, neurons_point
from sinkscope.models.target import Target
from sinkscope.results.parts import Component, Head, Neuron
from sinkscope.sinks.spikes.places import per_text
from sinkscope.sinks.spikes.spike import Part, Parts, Spike
from sinkscope.sinks.spikes.survey import given_later, to_place
from sinkscope.sinks.spikes.writers import hook_points_of
from sinkscope.sinks.thresholds import READS
from sinkscope.sinks.tokens import Mask, TokenRows

LOGITS = 1 << 21  # logits of a text at most: of large vocabularies, every second position is read, or fewer
FEW = 4  # texts in which a set is searched

Written = Mapping[Part, Float[Tensor, " d"]]
"""What a component or a head writes at the place instead: its mean over ordinary positions."""
P = TypeVar("P", bound=Parts)
Begin = Callable[[int], LayerInput | None]
"""Gives what enters a layer, at which a pass over texts may then start; None: it starts at the first."""


class Effects(NamedTuple):
    """What is read under each edit.

    Attributes:
        projection: Projection of each position of the place on the spike's direction after the peak, as a share of the
            spike.
        attention: Attention to the place in the layers that read the spike, mean over the later queries that see it.
        loss: Loss of the next tokens, in nats; NaN where it is not read.
    """

    projection: Float[Tensor, "edit case"]
    attention: Float[Tensor, "edit layer head text"]
    loss: Float[Tensor, "edit text pos"]


@torch.no_grad()
def run_edits(
    spike: Spike,
    ids: TokenRows,
    place: Mask,
    edits: Sequence[Parts],
    means: Written | None = None,
    begin: Begin | None = None,
    *,
    whole: bool = False,
    every_loss: bool | None = None,
    paired: bool = False,
) -> Effects:
    """Run texts under edits. Edits of a streamed model are rows of one pass, because it is read from disk once.

    Args:
        spike: The spike whose projection is read.
        ids: The texts.
        place: The positions of the spike in them.
        edits: The parts that each edit removes: neurons are zeroed everywhere, other parts are replaced at the place.
        means: What replaced parts write instead.
        begin: What the pass may start with. None: it starts at the first layer.
        whole: Whether the attention of the layers that can read the spike is read; else the pass ends at the peak.
        every_loss: Whether the loss of every token is read, however large the vocabulary is. None: no loss is read.
        paired: Whether each text is read under the edit of its number alone, as one edit.
    """
    target, texts, size, passes = spike.survey.target, len(ids), len(edits), list[tuple[Tensor, ...]]()
    if target.resident and not paired:
        size = rows_at_once(ids.numel(), max(target.d_mlp, target.d_model))
    starts = range(0, len(edits), size)
    for number, first in enumerate(starts, 1):
        some = edits[first : first + size]
        times = 1 if paired else len(some)
        edit_of = torch.arange(len(some)).repeat_interleave(times * texts // len(some))
        batch = spike, ids.repeat(times, 1), place.repeat(times, 1), some, edit_of
        passes.append(_run_rows(*batch, means or {}, begin, whole=whole, every_loss=every_loss))
        if len(starts) > 1:
            report_progress("removals", number, len(starts))
    projection, attention, loss = map(torch.cat, zip(*passes, strict=True))
    return Effects(
        projection.reshape(len(attention) // texts, -1),
        rearrange(attention, "(edit text) layer head -> edit layer head text", text=texts).contiguous(),
        rearrange(loss, "(edit text) pos -> edit text pos", text=texts),
    )


def _run_rows(
    spike: Spike,
    ids: TokenRows,
    place: Mask,
    edits: Sequence[Parts],
    edit_of: Int[Tensor, " row"],
    means: Written,
    begin: Begin | None,
    *,
    whole: bool,
    every_loss: bool | None,
) -> tuple[Float[Tensor, " case"], Float[Tensor, "row layer head"], Float[Tensor, "row following"]]:
    """Run rows in one pass, each under the edit of a number, and return what is read.

    Before the layer at which it starts, no edit differs and nothing is read.
    """
    target, peak, reading = spike.survey.target, spike.result.peak, spike.reading_layers
    projection = torch.zeros(int(place.sum()))
    attention = torch.zeros(len(ids), len(reading), target.n_heads)
    loss = torch.full((len(ids), ids.shape[1] - 1), torch.nan)

    def at_peak(hidden: Tensor) -> None:
        projection[:] = spike.along(hidden.reshape(*place.shape, -1)[place.to(hidden.device)].float().cpu())

    def attend(layer: int, _first: int, probs: Tensor, visible: Tensor) -> None:
        given, seen = given_later(probs, visible)
        attention[:, layer - reading.start] = to_place(given.cpu(), seen, place[:, None])

    layers = [layer for layer in target.attending if layer in reading] if whole else []
    firsts = [reading.start if whole else peak, peak, *(part.layer or 0 for edit in edits for part in edit)]
    start = None if begin is None else begin(min(firsts))
    if start is not None:
        start = replace(start, hidden=start.hidden.repeat(len(ids) // len(start.hidden), 1, 1))
    listening = visible_rows(target, attend, layers=layers, rows_per_chunk=ids.shape[1]) if layers else nullcontext()
    hooks = [*_hooks(target, place, edits, edit_of, means), (target.layers[peak], "post", on_hidden(at_peak))]
    with listening, target.hooks(*hooks):
        if every_loss is not None and target.resident:
            step = 1 if every_loss else -(-loss.shape[1] * int(target.config.vocab_size) // LOGITS)
            positions = torch.arange(step - 1, loss.shape[1], step)
            loss[:, positions] = losses_at(target, ids, positions, start)
        else:
            target.forward(ids, last_layer=max([peak, *layers]), start=start)
    return projection, attention, loss


def _hooks(
    target: Target, place: Mask, edits: Sequence[Parts], edit_of: Int[Tensor, " row"], means: Written
) -> list[Hook]:
    """The hooks that zero neurons in the rows of their edits, and replace other parts at the place there."""
    hooks, rows_of = list[Hook](), dict[Part, Bool[Tensor, "row 1 1"]]()
    for part in dict.fromkeys(part for edit in edits for part in edit):
        rows_of[part] = torch.tensor([part in edit for edit in edits])[edit_of, None, None]
    for group in groups_of([part for part in rows_of if isinstance(part, Neuron)]):
        where = torch.cat([rows_of[site] for site in group.sites], -1)
        hooks.append(neurons_point(target, group).rows(where, torch.zeros_like))
    for part, rows in rows_of.items():
        if not isinstance(part, Neuron):
            for point in hook_points_of(target, part):
                hooks.append(point.rows(rows & place[..., None], means[part].to))
    return hooks


@dataclass(frozen=True, eq=False)
class SpikeTexts:
    """The texts of a survey that have a spike's place.

    Attributes:
        spike: The spike.
        rows: Numbers of the texts.
        means: What components and heads write when they are replaced, as far as it is known.
    """

    spike: Spike
    rows: Int[Tensor, " text"]
    means: dict[Part, Float[Tensor, " d"]] = field(default_factory=dict)

    @classmethod
    def of(cls, spike: Spike) -> SpikeTexts:
        """Return all texts that have the place."""
        return cls(spike, spike.place.mask.any(1).nonzero().flatten())

    def few(self) -> SpikeTexts:
        """Return the first texts that have the place most often."""
        number = self.spike.place.mask[self.rows].sum(1)
        most = number.argsort(descending=True, stable=True)[:FEW].sort().values
        return replace(self, rows=self.rows[most])

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

    def along(self, edits: Sequence[Parts], *, paired: bool = False) -> Float[Tensor, "edit text"]:
        """Measure what is left of the spike in each text, in passes that end at the peak and at the place.

        Args:
            edits: The parts that each edit removes.
            paired: Whether each text is read under the edit of its number alone.
        """
        mask, rows = self.spike.place.mask, self.rows
        end = int(mask[rows].any(0).nonzero().max()) + 1
        ids, place = self.spike.survey.ids[rows, :end], mask[rows, :end]
        if not paired and bool((ids == ids[0]).all() & (place == place[0]).all()):  # such as BOS alone
            rows = rows[:1]
        return self._left(self._run(rows, end, edits, paired=paired), rows)

    def left(self, sets: Sequence[P]) -> dict[P, float]:
        """Return what is left of the spike without each set, mean over texts; strongest effect first."""
        if not sets:
            return {}
        left = dict(zip(sets, self.along(sets).mean(1).tolist(), strict=True))
        return dict(sorted(left.items(), key=lambda item: abs(item[1])))

    def effects(
        self, edits: Sequence[Parts], *, every_loss: bool | None, paired: bool = False
    ) -> tuple[Float[Tensor, "edit text"], Float[Tensor, "edit layer head text"] | None, Float[Tensor, "edit text"]]:
        """Measure what each edit leaves of the spike, the attention to the place, and by how much the loss rises.

        If the spike is not at the first token and no head reads it, only what is left of the spike is measured.
        """
        if not bool(self.readers.any()) and not self.spike.place.is_first:
            left = self.along(edits, paired=paired)
            return left, None, torch.full_like(left, torch.nan)
        effects = self._run(self.rows, None, edits, whole=True, every_loss=every_loss, paired=paired)
        return self._left(effects, self.rows), effects.attention, (effects.loss - self._loss()).nanmean(-1)

    def _run(self, rows: Tensor, end: int | None, edits: Sequence[Parts], **reading: bool | None) -> Effects:
        """Run some of the texts up to a position."""
        spike, survey = self.spike, self.spike.survey
        self.means.update(means_of(spike, {part for edit in edits for part in edit} - self.means.keys()))
        texts = survey.ids[rows, :end], spike.place.mask[rows, :end]
        begin = partial(survey.start, texts=rows, length=end)
        return run_edits(spike, *texts, edits, self.means, begin, **reading)  # pyright: ignore[reportArgumentType]

    def _left(self, effects: Effects, rows: Int[Tensor, " text"]) -> Float[Tensor, "edit text"]:
        """What is left in these texts: a ratio of means over texts, and how far each text moves it."""
        spike, place = self.spike, self.spike.place.mask[rows]
        intact = spike.along(spike.survey.entered[spike.result.peak + 1, rows][place])
        return left_of(per_text(torch.cat([intact[None], effects.projection]), place))

    def _loss(self) -> Float[Tensor, "*text_pos"]:
        """Loss of the next tokens without an edit; NaN for a streamed model, which is read without its unembedding."""
        survey, key = self.spike.survey, tuple(self.rows.tolist())
        target, ids = survey.target, survey.ids[self.rows]
        if not target.resident:
            return torch.tensor(torch.nan)
        if key not in survey.losses:  # other spikes stand in the same texts
            start = survey.start(target.n_layers - 1, self.rows)
            survey.losses[key] = losses_at(target, ids, torch.arange(ids.shape[1] - 1), start)
        return survey.losses[key]


def left_of(along: Float[Tensor, "state case"]) -> Float[Tensor, "edit case"]:
    """Divide the mean over cases under each edit by the intact one, and add how far each case moves that ratio."""
    intact, edited = along[:1], along[1:]
    left = edited.mean(1, keepdim=True) / intact.mean()
    return left + (edited - left * intact) / intact.mean()


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


@torch.no_grad()
def losses_at(target: Target, ids: TokenRows, positions: Tensor, start: LayerInput | None) -> Float[Tensor, "row some"]:
    """Measure the loss of the tokens after some positions, in nats.

    Args:
        target: The model.
        ids: The texts.
        positions: The positions.
        start: Where the pass begins. None: at the first layer.
    """
    logits = target.logits_at(ids, positions, start)
    following = ids[:, positions + 1].to(logits.device)
    loss = cross_entropy(logits.float().flatten(0, 1), following.flatten(), reduction="none")
    return loss.reshape(following.shape).cpu()
