"""The texts of a survey in which a spike is edited, and what replaced parts write there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.hooks.trace.run import trace
from sinkscope.results.parts import Component, Head
from sinkscope.sinks.spikes.edited import Effects, Reading, run_edits
from sinkscope.sinks.spikes.spike import Part, Parts, Spike
from sinkscope.sinks.spikes.survey import Mask, Survey, TokenRows

EDITED = 4  # texts of each edit


@dataclass(frozen=True, eq=False)
class SpikeTexts:
    """Some texts of a survey that have a spike's place.

    Attributes:
        survey: The survey.
        spike: The spike.
        rows: Numbers of the texts; consecutive ones, so that passes may begin where the survey was.
    """

    survey: Survey
    spike: Spike
    rows: Int[Tensor, " text"]

    @classmethod
    def of(cls, survey: Survey, spike: Spike) -> SpikeTexts:
        """Return the first texts that have the place most often."""
        return cls(survey, spike, most_often(spike.mask))

    @property
    def ids(self) -> TokenRows:
        """The texts."""
        return self.survey.ids[self.rows]

    @property
    def place(self) -> Mask:
        """The place in them."""
        return self.spike.mask[self.rows]

    def along(self, edits: list[Parts], means: dict[Part, Tensor] | None = None) -> Float[Tensor, "edit text"]:
        """What is left of the spike in each text under each edit, from passes that end at the peak and at the place."""
        end = int(self.place.any(0).nonzero().max()) + 1
        ids, place, rows = self.ids[:, :end], self.place[:, :end], self.rows
        if bool((ids == ids[0]).all() & (place == place[0]).all()):  # such as BOS alone
            ids, place, rows = ids[:1], place[:1], rows[:1]
        entering = self.survey.entering(rows, end)
        reading = Reading(ids, place, self.spike, edits, means or {}, entering)
        return left_by_text(run_edits(self.survey.target, reading), place)

    def effects(self, edits: list[Parts], means: dict[Part, Tensor] | None = None, *, every_loss: bool) -> Effects:
        """Return all effects of each edit, from whole passes."""
        entering = self.survey.entering(self.rows)
        reading = Reading(self.ids, self.place, self.spike, edits, means or {}, entering, True, every_loss)
        return run_edits(self.survey.target, reading)


def most_often(place: Mask) -> Int[Tensor, " some"]:
    """Return the numbers of the texts that have a place most often."""
    number = place.sum(1)
    order = number.argsort(descending=True, stable=True)[:EDITED]
    return order[number[order] > 0].sort().values


def left_by_text(effects: Effects, place: Mask) -> Float[Tensor, "edit text"]:
    """Return what is left of a spike under each edit: a ratio of means over texts, and how far each text moves it."""
    texts = place.nonzero()[:, 0]
    return left_of(torch.stack([effects.along[:, texts == text].mean(1) for text in texts.unique()], 1))


def left_of(along: Float[Tensor, "state case"]) -> Float[Tensor, "edit case"]:
    """Divide the mean over cases under each edit by the intact one, and add how far each case moves that ratio."""
    intact, edited = along[:1], along[1:]
    left = edited.mean(1, keepdim=True) / intact.mean()
    return left + (edited - left * intact) / intact.mean()


def means_of(survey: Survey, spike: Spike, parts: Iterable[Part]) -> dict[Part, Tensor]:
    """Return what components and heads write on average at ordinary positions, where an edit puts it.

    Args:
        survey: The survey.
        spike: Its ordinary positions count.
        parts: The parts.
    """
    target, means = survey.target, dict[Part, Tensor]()
    layers: dict[int, list[Head]] = {}
    for part in parts:
        if isinstance(part, Head):
            layers.setdefault(part.layer, []).append(part)
        elif isinstance(part, Component):
            means[part] = _mean_written(survey, spike, part)
    sites = [f"blocks.{layer}.attn.hook_z" for layer in layers]
    outputs = trace(target, survey.ids, sites, batch_size=len(survey.ids)) if sites else {}
    for layer, heads in layers.items():
        mean = outputs[f"blocks.{layer}.attn.hook_z"][spike.ordinary].float().mean(0)
        for head in heads:
            means[head] = mean[head.head]
    return means


def _mean_written(survey: Survey, spike: Spike, part: Component) -> Float[Tensor, " d_model"]:
    """What a component adds on average, in the units of the module that writes it."""
    adapter, layer = survey.target.adapter, part.layer or 0
    if part.kind == "mlp":
        return survey.mlp[layer][spike.ordinary].mean(0) / adapter.write_factor
    if part.kind == "mixer":
        return survey.attention_mix(layer)[spike.ordinary].mean(0)
    if part.kind == "attention":
        return survey.attention_mix(layer)[spike.ordinary].mean(0) / adapter.attn_factor
    return survey.entered[0][spike.ordinary].mean(0)
