"""What a spike is, and what is measured of it: records of numbers, without words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.results.parts import Component, Head, Neuron
from sinkscope.sinks.spikes.places import Place
from sinkscope.sinks.spikes.survey import Survey
from sinkscope.sinks.tokens import Mask

Part = Neuron | Head | Component
Parts = tuple[Part, ...]


@dataclass(frozen=True)
class Share:
    """What a part adds along a spike's direction, as a share of the spike at its peak; below zero it is against it.

    Attributes:
        part: The part.
        share: The share, mean over the positions of the place, beyond what the part adds at ordinary positions.
        margin: Two standard errors over texts. None: too few texts.
    """

    part: Part
    share: float
    margin: float | None = None


@dataclass(frozen=True, eq=False)
class Spike:
    """A place, a direction in the residual stream, and a run of layers in which the place's norm stands out along it.

    Attributes:
        place: Where it is, in the texts of the survey.
        mask: The same as a mask over these texts.
        ordinary: Positions at which nothing stands out.
        first: First layer of the run.
        last: Last layer of the run.
        peak: The layer of the run after which the state departs most from that of ordinary positions.
        mean: Mean state of ordinary positions after the peak.
        direction: Unit vector from there to the mean state of the place.
        size: Projection of the place's departure on it, mean over the place.
        norm: Norm of the residual stream at the place after the peak, mean over the place.
        before: The same before the run.
        ratio: Norm at the place over the typical one after the peak, mean over the place, without what dimensions
            that are massive at all positions have everywhere.
        ratio_margin: Two standard errors of the ratio over texts. None: too few texts.
    """

    place: Place
    mask: Mask
    ordinary: Mask
    first: int
    last: int
    peak: int
    mean: Float[Tensor, " d_model"]
    direction: Float[Tensor, " d_model"]
    size: float
    norm: float
    before: float
    ratio: float
    ratio_margin: float | None = None

    @property
    def dims(self) -> tuple[int, ...]:
        """The residual dimensions that hold a tenth of the direction's square or more, the largest first."""
        square = self.direction.square()
        order = square.argsort(descending=True, stable=True)
        return tuple(order[square[order] >= 0.1].tolist())

    def along(self, states: Float[Tensor, "*n d_model"]) -> Float[Tensor, "*n"]:
        """Projection of states on the direction, from the mean of ordinary positions, as a share of the spike."""
        return (states - self.mean) @ self.direction / self.size

    @property
    def reading_layers(self) -> range:
        """The layers whose heads can read it: from the second of the run to the one after the last."""
        return range(self.first + 1, self.last + 2)

    def per_text(self, values: Float[Tensor, " case"]) -> Float[Tensor, " text"]:
        """Return the mean of values of the place's positions over each text that has any."""
        texts = self.mask.nonzero()[:, 0]
        return torch.stack([values[texts == text].float().mean() for text in texts.unique()])


@dataclass(frozen=True)
class Removal:
    """What is left without some parts. Neurons are zeroed; others write at the place their mean over ordinary ones.

    Attributes:
        parts: The parts.
        left: Share of the spike at its peak that is left.
        heads: Heads in the spike's layers that attend to the place.
        attention: Mean attention to the place from the heads that read it in the intact model, as a share of theirs.
        perplexity: Over that of the intact model; None if the model is read without its unembedding.
        left_margin: Two standard errors of `left` over texts; None: too few, or all are the same.
        heads_margin: The same of `heads`.
        perplexity_margin: The same of `perplexity`.
    """

    parts: Parts
    left: float
    heads: int = 0
    attention: float = 1.0
    perplexity: float | None = None
    left_margin: float | None = None
    heads_margin: float | None = None
    perplexity_margin: float | None = None


@dataclass(frozen=True)
class Needs:
    """What a spike needs.

    Attributes:
        heads: Heads in the spike's layers that attend to the place in the intact model.
        heads_margin: Two standard errors over texts.
        texts: Number of texts in which removals were tried.
        needed: The smallest set found that leaves less than a quarter of the spike. None: no set that was tried does.
        random: Sets of as many random neurons of the same layers; or other components, each alone.
        alone: Each writer alone, in the order of what that leaves.
        backups: Neurons that write it only when the others are gone.
    """

    heads: int
    heads_margin: float | None
    texts: int
    needed: Removal | None
    random: tuple[Removal, ...] = ()
    alone: tuple[Removal, ...] = ()
    backups: tuple[Neuron, ...] = ()


@dataclass(frozen=True)
class Mark:
    """A part that marks the place, or a set that is judged as one, and the share of the spike that is left without.

    Attributes:
        parts: The set.
        left: The share.
        margin: Two standard errors over texts.
        others: Median share left without as many other components that were tried. None: there are none.
    """

    parts: Parts
    left: float
    margin: float | None = None
    others: float | None = None


@dataclass(frozen=True)
class Copies:
    """What copies of a token reach, as shares of the first token's projection on a spike's direction.

    Attributes:
        token: The token.
        half: The first number of copies of which the last reaches half. None: none does.
        one: What one copy reaches.
        last: What the last copy reaches.
        count: Number of copies.
    """

    token: str
    half: int | None
    one: float
    last: float
    count: int


@dataclass(frozen=True, eq=False)
class Measured:
    """A spike, and what is measured of it step by step.

    Attributes:
        spike: The spike.
        survey: Where it was found.
        writers: Shares of the components that write before the peak, the largest first; all sum to 1.
        erasers: Components that write against it after the peak.
        neurons: Shares of the neurons of the MLPs that write it.
        needs: What it needs.
        neutral: Median value of the needed neurons on ordinary text.
        like: Number of an earlier spike that is the same at another place.
        marks: What marks the place.
        copies: What copies of tokens reach.
    """

    spike: Spike
    survey: Survey
    writers: tuple[Share, ...] = ()
    erasers: tuple[Share, ...] = ()
    neurons: tuple[Share, ...] = ()
    needs: Needs | None = None
    neutral: Mapping[Neuron, float] = field(default_factory=dict)
    like: int | None = None
    marks: tuple[Mark, ...] = ()
    copies: tuple[Copies, ...] = ()

    @property
    def needed_neurons(self) -> tuple[Neuron, ...]:
        """The neurons of the smallest set that was found."""
        if self.needs is None or self.needs.needed is None:
            return ()
        return tuple(part for part in self.needs.needed.parts if isinstance(part, Neuron))

    @property
    def largest(self) -> Neuron:
        """The needed neuron that writes most."""
        shares = {one.part: one.share for one in self.neurons}
        return max(self.needed_neurons, key=lambda neuron: shares.get(neuron, 0.0))
