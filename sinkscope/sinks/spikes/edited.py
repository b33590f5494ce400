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
from itertools import chain
from typing import NamedTuple

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import cross_entropy

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
from sinkscope.sinks.tokens import Mask, TokenRows
from sinkscope.tap.tap import visible_rows

LOGITS = 1 << 21  # logits of a text at most: of large vocabularies, every second position is read, or fewer
FEW = 4  # texts in which a set is searched

Written = Mapping[Part, Float[Tensor, " d"]]
"""What a component or a head writes at the place instead: its mean over ordinary positions."""


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


@dataclass(frozen=True, eq=False)
class EditedTexts:
    """Texts, their edits, and what is read.

    Attributes:
        spike: The spike whose projection is read.
        ids: The texts.
        place: The positions of the spike in them.
        edits: The parts that each edit removes: neurons are zeroed everywhere, other parts are replaced at the place.
        means: What replaced parts write instead.
        begin: Gives what enters a layer, at which the pass may then start. None: it starts at the first.
        whole: Whether the attention of the layers that can read the spike is read; else the pass ends at the peak.
        every_loss: Whether the loss of every token is read, however large the vocabulary is. None: no loss is read.
        paired: Whether each text is read under the edit of its number alone, as one edit.
    """

    spike: Spike
    ids: TokenRows
    place: Mask
    edits: Sequence[Parts]
    means: Written = field(default_factory=dict)
    begin: Callable[[int], LayerInput | None] | None = None
    whole: bool = False
    every_loss: bool | None = None
    paired: bool = False

    @torch.no_grad()
    def run(self) -> Effects:
        """Run the texts. Edits of a streamed model are rows of one pass, because it is read from disk once."""
        if self.paired:
            return self._run_once()
        target, size = self.spike.survey.target, len(self.edits)
        if target.resident:
            size = rows_at_once(self.ids.numel(), max(target.d_mlp, target.d_model))
        passes, starts = list[Effects](), range(0, len(self.edits), size)
        for number, start in enumerate(starts, 1):
            passes.append(replace(self, edits=self.edits[start : start + size])._run_once())
            if len(starts) > 1:
                report_progress("removals", number, len(starts))
        return Effects(*map(torch.cat, zip(*passes, strict=True)))

    def _run_once(self) -> Effects:
        """Run all edits in one pass."""
        target, peak, reading = self.spike.survey.target, self.spike.result.peak, self.spike.reading_layers
        heads, edits, texts = target.n_heads, self._times, len(self.ids)
        effects = Effects(
            projection=torch.zeros(edits, int(self.place.sum())),
            attention=torch.zeros(edits, len(reading), heads, texts),
            loss=torch.full((edits, texts, self.ids.shape[1] - 1), torch.nan),
        )
        ids, place, start = self._of_edits(self.ids), self._of_edits(self.place), self._start(reading)

        def at_peak(hidden: Tensor) -> None:
            states = hidden.reshape(*place.shape, -1)[place.to(hidden.device)].float().cpu()
            effects.projection[:] = self.spike.along(states).reshape(effects.projection.shape)

        def attend(layer: int, _first: int, probs: Tensor, visible: Tensor) -> None:
            given, seen = given_later(probs, visible)
            received = to_place(given.cpu(), seen, place[:, None])
            received = rearrange(received, "(edit text) head -> edit head text", text=texts)
            effects.attention[:, layer - reading.start] = received

        listening, last = nullcontext(), peak
        layers = [layer for layer in target.attending if layer in reading]
        if self.whole and layers:
            listening = visible_rows(target, attend, layers=layers, rows_per_chunk=ids.shape[1])
            last = max(last, *layers)
        with listening, target.hooks(*self._hooks(), (target.layers[peak], "post", on_hidden(at_peak))):
            if self.every_loss is not None and target.resident:
                positions = positions_read(target, ids.shape[1], every=self.every_loss)
                effects.loss[:, :, positions] = losses_at(target, ids, positions, start).unflatten(0, (edits, texts))
            else:
                target.forward(ids, last_layer=last, start=start)
        return effects

    def _start(self, reading: range) -> LayerInput | None:
        """Where the pass starts: before it, no edit differs and nothing is read."""
        layers = [self.spike.result.peak, *(part.layer or 0 for edit in self.edits for part in edit)]
        if self.whole:
            layers.append(reading.start)
        start = None if self.begin is None else self.begin(min(layers))
        return None if start is None else replace(start, hidden=self._of_edits(start.hidden))

    @property
    def _times(self) -> int:
        """How often each text is read."""
        return 1 if self.paired else len(self.edits)

    def _of_edits(self, values: Shaped[Tensor, "text ..."]) -> Shaped[Tensor, "row ..."]:
        """The same values for each edit."""
        return values.repeat(self._times, *[1] * (values.dim() - 1))

    def _hooks(self) -> list[Hook]:
        """The hooks that carry out the edits."""
        parts, target = dict.fromkeys(chain.from_iterable(self.edits)), self.spike.survey.target
        hooks: list[Hook] = []
        for group in groups_of([part for part in parts if isinstance(part, Neuron)]):
            where = torch.cat([self._rows_with(site) for site in group.sites], -1)
            hooks.append(neurons_point(target, group).rows(where, torch.zeros_like))
        for part in parts:
            if not isinstance(part, Neuron):
                hooks += self._replaced(part)
        return hooks

    def _rows_with(self, part: Part) -> Bool[Tensor, "row 1 1"]:
        """The rows whose edit has this part."""
        having = torch.tensor([part in edit for edit in self.edits])
        if self.paired:
            return having[:, None, None]
        return repeat(having, "edit -> (edit text) 1 1", text=len(self.ids))

    def _replaced(self, part: Part) -> list[Hook]:
        """The hooks by which a component or a head writes its mean over ordinary positions at the place."""
        where = self._rows_with(part) & self._of_edits(self.place)[..., None]
        mean = self.means[part]
        points = hook_points_of(self.spike.survey.target, part)
        return [point.rows(where, lambda values: mean.to(values)) for point in points]


@dataclass(frozen=True, eq=False)
class SpikeTexts:
    """The texts of a survey that have a spike's place.

    Attributes:
        spike: The spike.
        rows: Numbers of the texts.
    """

    spike: Spike
    rows: Int[Tensor, " text"]

    @classmethod
    def of(cls, spike: Spike) -> SpikeTexts:
        """Return all texts that have the place."""
        return cls(spike, spike.place.mask.any(1).nonzero().flatten())

    def rows_of(self, some: Int[Tensor, " number"]) -> SpikeTexts:
        """Return the texts of these numbers, which may name a text several times."""
        return replace(self, rows=self.rows[some])

    def few(self) -> SpikeTexts:
        """Return the first texts that have the place most often."""
        number = self.spike.place.mask[self.rows].sum(1)
        return self.rows_of(number.argsort(descending=True, stable=True)[:FEW].sort().values)

    @cached_property
    def attention(self) -> Float[Tensor, "layer head text"]:
        """Attention to the place of each head in the layers that can read it, without an edit."""
        reading = self.spike.reading_layers
        received = self.spike.survey.received(self.spike.place.mask)
        return received[reading.start : reading.stop, :, self.rows]

    @cached_property
    def loss(self) -> Float[Tensor, "*text_pos"]:
        """Loss of the next tokens without an edit; NaN for a streamed model, which is read without its unembedding."""
        survey, key = self.spike.survey, tuple(self.rows.tolist())
        target, ids = survey.target, survey.ids[self.rows]
        if not target.resident:
            return torch.tensor(torch.nan)
        if key not in survey.losses:  # other spikes stand in the same texts
            start = survey.start(target.n_layers - 1, self.rows)
            survey.losses[key] = losses_at(target, ids, torch.arange(ids.shape[1] - 1), start)
        return survey.losses[key]

    def along(
        self, edits: Sequence[Parts], means: Written | None = None, *, paired: bool = False
    ) -> Float[Tensor, "edit text"]:
        """Measure what is left of the spike in each text, in passes that end at the peak and at the place.

        Args:
            edits: The parts that each edit removes.
            means: What removed components and heads write instead.
            paired: Whether each text is read under the edit of its number alone.
        """
        mask, rows = self.spike.place.mask, self.rows
        end = int(mask[rows].any(0).nonzero().max()) + 1
        ids, place = self.spike.survey.ids[rows, :end], mask[rows, :end]
        if not paired and bool((ids == ids[0]).all() & (place == place[0]).all()):  # such as BOS alone
            rows = rows[:1]
        return self.left(replace(self._edited(rows, end, edits, means), paired=paired).run().projection, rows)

    def effects(
        self, edits: Sequence[Parts], means: Written | None, *, every_loss: bool | None, paired: bool = False
    ) -> Effects:
        """Measure all effects of each edit, in whole passes."""
        edited = self._edited(self.rows, None, edits, means)
        return replace(edited, whole=True, every_loss=every_loss, paired=paired).run()

    def _edited(self, rows: Tensor, end: int | None, edits: Sequence[Parts], means: Written | None) -> EditedTexts:
        """Some of the texts up to a position, with their edits."""
        survey, place = self.spike.survey, self.spike.place.mask[rows, :end]
        begin = partial(survey.start, texts=rows, length=end)
        return EditedTexts(self.spike, survey.ids[rows, :end], place, edits, means or {}, begin)

    def left(self, projection: Float[Tensor, "edit case"], rows: Int[Tensor, " text"]) -> Float[Tensor, "edit text"]:
        """Return what is left in these texts: a ratio of means over texts, and how far each text moves it."""
        spike, place = self.spike, self.spike.place.mask[rows]
        intact = spike.along(spike.survey.entered[spike.result.peak + 1, rows][place])
        return left_of(per_text(torch.cat([intact[None], projection]), place))


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


def positions_read(target: Target, length: int, *, every: bool) -> Tensor:
    """Return the positions of a text whose loss is read: each, or as many as a large vocabulary allows."""
    positions = torch.arange(length - 1)
    if every:
        return positions
    step = -(-len(positions) * int(target.config.vocab_size) // LOGITS)
    return positions[step - 1 :: step]


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
