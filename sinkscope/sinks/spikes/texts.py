"""The texts of a survey in which a spike is edited, and what replaced parts write there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.hooks.trace import trace
from sinkscope.results.parts import Component, Head
from sinkscope.sinks.spikes.edited import EditedTexts, Effects, Written, losses_at
from sinkscope.sinks.spikes.places import per_text
from sinkscope.sinks.spikes.spike import Part, Parts, Spike
from sinkscope.sinks.spikes.survey import Survey

FEW = 4  # texts in which a set is searched


@dataclass(frozen=True, eq=False)
class SpikeTexts:
    """The texts of a survey that have a spike's place.

    Attributes:
        survey: The survey.
        spike: The spike.
        rows: Numbers of the texts.
    """

    survey: Survey
    spike: Spike
    rows: Int[Tensor, " text"]

    @classmethod
    def of(cls, survey: Survey, spike: Spike) -> SpikeTexts:
        """Return all texts that have the place."""
        return cls(survey, spike, spike.mask.any(1).nonzero().flatten())

    def rows_of(self, some: Int[Tensor, " number"]) -> SpikeTexts:
        """Return the texts of these numbers, which may be the same several times."""
        return replace(self, rows=self.rows[some])

    def few(self) -> SpikeTexts:
        """Return the first texts that have the place most often."""
        number = self.spike.mask[self.rows].sum(1)
        return self.rows_of(number.argsort(descending=True, stable=True)[:FEW].sort().values)

    @property
    def reading_layers(self) -> list[int]:
        """The layers of the model whose heads can read the spike."""
        return [layer for layer in self.spike.reading_layers if layer < self.survey.target.n_layers]

    @cached_property
    def attention(self) -> Float[Tensor, "layer head text"]:
        """Attention to the place of each head in these layers, without an edit."""
        return self.survey.received(self.spike.mask)[self.reading_layers][:, :, self.rows]

    @cached_property
    def loss(self) -> Float[Tensor, "*text_pos"]:
        """Loss of the next tokens without an edit; NaN for a streamed model, which is read without its unembedding."""
        survey, key = self.survey, tuple(self.rows.tolist())
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
        """What is left of the spike in each text under each edit, from passes that end at the peak and at the place.

        Args:
            edits: The parts that each edit removes.
            means: What removed components and heads write instead.
            paired: Whether each text is read under the edit of its number alone.
        """
        rows, end = self.rows, int(self.spike.mask[self.rows].any(0).nonzero().max()) + 1
        ids, place = self.survey.ids[rows, :end], self.spike.mask[rows, :end]
        if not paired and bool((ids == ids[0]).all() & (place == place[0]).all()):  # such as BOS alone
            rows = rows[:1]
        return self.left(replace(self._edited(rows, end, edits, means), paired=paired).run().along, rows)

    def effects(
        self, edits: Sequence[Parts], means: Written | None, *, every_loss: bool | None, paired: bool = False
    ) -> Effects:
        """Return all effects of each edit, from whole passes."""
        edited = self._edited(self.rows, None, edits, means)
        return replace(edited, whole=True, every_loss=every_loss, paired=paired).run()

    def _edited(self, rows: Tensor, end: int | None, edits: Sequence[Parts], means: Written | None) -> EditedTexts:
        """Some of the texts up to a position, with their edits."""
        survey, place = self.survey, self.spike.mask[rows, :end]
        begin = partial(survey.start, texts=rows, length=end)
        return EditedTexts(survey.target, survey.ids[rows, :end], place, self.spike, edits, means or {}, begin)

    def left(self, along: Float[Tensor, "edit case"], rows: Int[Tensor, " text"]) -> Float[Tensor, "edit text"]:
        """Return what is left in these texts: a ratio of means over texts, and how far each text moves it."""
        place = self.spike.mask[rows]
        intact = self.spike.along(self.survey.states[self.spike.peak, rows][place])
        return left_of(per_text(torch.cat([intact[None], along]), place))


def left_of(along: Float[Tensor, "state case"]) -> Float[Tensor, "edit case"]:
    """Divide the mean over cases under each edit by the intact one, and add how far each case moves that ratio."""
    intact, edited = along[:1], along[1:]
    left = edited.mean(1, keepdim=True) / intact.mean()
    return left + (edited - left * intact) / intact.mean()


def means_of(survey: Survey, spike: Spike, parts: Collection[Part]) -> dict[Part, Tensor]:
    """Return what components and heads write on average at ordinary positions, in the units of what writes it.

    Args:
        survey: The survey.
        spike: Its ordinary positions count.
        parts: The parts.
    """
    site, means = "blocks.{}.attn.hook_z", dict[Part, Tensor]()
    sites = [site.format(layer) for layer in {part.layer for part in parts if isinstance(part, Head)}]
    outputs = trace(survey.target, survey.ids, sites) if sites else {}
    factors = {"mlp": survey.target.adapter.write_factor, "attention": survey.target.adapter.attn_factor}
    for part in parts:
        if isinstance(part, Head):
            means[part] = outputs[site.format(part.layer)][spike.ordinary][:, part.head].float().mean(0)
        elif isinstance(part, Component):
            means[part] = survey.added(part)[spike.ordinary].mean(0) / factors.get(part.kind, 1)
    return means
