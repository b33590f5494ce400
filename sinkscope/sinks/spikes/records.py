"""The parts of a `find_sinks` result as JSON holds them (schema 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from sinkscope.results.notation import read_head, read_neuron
from sinkscope.results.parts import Component, Head, Neuron
from sinkscope.sinks.spikes.places import PlaceWords

_PART = r"(embedding|(attention|mlp|mixer) \d+|L\d+(\.E\d+)?\.[NH]\d+)"
PartName = Annotated[str, Field(pattern=f"^{_PART}( and {_PART})*$")]
"""The name of a part in a file (`part_of`), or the names of a set, joined by "and"."""


@dataclass(frozen=True)
class PartShare:
    """What a component adds along a spike's direction, as a share of the spike.

    Attributes:
        part: The component, such as "mlp 11", "attention 3" or "embedding".
        share: The share; below zero it is written against the spike.
        margin: Two standard errors over texts. None: too few texts.
    """

    part: PartName
    share: float
    margin: float | None


@dataclass(frozen=True)
class NeuronShare(Neuron):
    """What a neuron adds along a spike's direction, as a share of the spike.

    Attributes:
        share: The share.
        margin: Two standard errors over texts. None: too few texts.
        neutral: Its median value on ordinary text, which a patch writes.
    """

    share: float
    margin: float | None
    neutral: float


@dataclass(frozen=True)
class Chance:
    """What is left without random sets: for each outcome, the value nearest to that of the set itself.

    Each text is read under a set of its own, so the worst text is the worst set.

    Attributes:
        left: Share of the spike.
        heads: Heads that attend to the place: of the intact model, and as many fewer or more as in the worst text.
        perplexity: Perplexity over that of the intact model. None: it was not measured.
        attention: What is left of the attention of the heads that attend there before.
        sets: Number of sets.
    """

    left: float
    heads: int
    perplexity: float | None
    attention: float = 1.0
    sets: int = 0


@dataclass(frozen=True)
class Needed:
    """The smallest set found without which less than a quarter of a spike is left: how few parts are enough.

    Attributes:
        neurons: The neurons; empty if components are needed.
        parts: The set, as names.
        left: Share of the spike that is left.
        left_margin: Two standard errors over texts.
    """

    neurons: tuple[Neuron, ...]
    parts: tuple[str, ...]
    left: float
    left_margin: float | None


@dataclass(frozen=True)
class Removal:
    """What is left of a spike, of the heads that attend to its place, and of the loss without some parts.

    Neurons are zeroed; components and heads write their mean over ordinary positions at the place.

    Attributes:
        parts: The parts, as names.
        left: Share of the spike at its peak that is left.
        left_margin: Two standard errors over texts.
        heads: Heads in the spike's layers that attend to the place, before and after.
        heads_margin: Two standard errors of each over texts.
        attention: What is left of the attention of the heads that attend there before.
        perplexity: Perplexity over that of the intact model. None: it was not measured.
        perplexity_margin: Two standard errors over texts.
        random: The same without random sets. None: it was not measured.
        texts: Number of texts.
    """

    parts: tuple[str, ...]
    left: float
    left_margin: float | None
    heads: tuple[int, int]
    heads_margin: tuple[float | None, float | None]
    attention: float
    perplexity: float | None
    perplexity_margin: float | None
    random: Chance | None
    texts: int


@dataclass(frozen=True)
class Alone(Neuron):
    """What is left without one neuron.

    Attributes:
        left: Share of the spike.
        heads: Heads that attend to the place.
        perplexity: Perplexity over that of the intact model. None: it was not measured.
        share: What it writes, as a share of the spike.
    """

    left: float
    heads: int
    perplexity: float | None
    share: float


@dataclass(frozen=True)
class MarkLeft:
    """A part or a set that marks a place, and the share of the spike that is left with it replaced.

    Attributes:
        part: The part; a set's parts are joined by "and".
        left: The share.
        margin: Two standard errors over texts. None: too few texts.
        heads: Heads in the spike's layers that attend to the place, before and after. None: of an older file.
        others: Median share left with as many other components replaced. None: it is a set of heads, or none was tried.
        random: The same with as many random heads of the same layer replaced. None: it is a set of components, or there
            are too few other heads.
    """

    part: PartName
    left: float
    margin: float | None
    heads: tuple[int, int] | None = None
    others: float | None = None
    random: Chance | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each part."""
        return tuple(self.part.split(" and "))


@dataclass(frozen=True)
class Copies:
    """What copies of a token reach, as shares of the first token's projection on a spike's direction.

    Attributes:
        token: The token.
        half: The first number of copies that reaches half. None: no number does.
        one: What one copy reaches.
        last: What the last copy reaches.
        count: Number of copies.
    """

    token: str
    half: int | None
    one: float
    last: float
    count: int


@dataclass(frozen=True)
class SpikeResult:
    """A spike as a result says it.

    Attributes:
        place: Where it is.
        layers: First and last layer of the run in which it stands out.
        peak: The layer after which it is largest.
        norm: Norm there after the peak.
        before: Norm there before the run.
        ratio: Norm there over the typical one, in the layer of the run where it is largest.
        ratio_layer: That layer.
        ratio_margin: Two standard errors over texts.
        ratio_beside: The largest ratio of the run without what dimensions that are massive at all positions have
            everywhere.
        dims: Residual dimensions that hold at least a tenth of its direction's square.
        writers: What wrote it, largest share first; the shares of all components up to the peak sum to 1.
        neurons: Its writers: every neuron that wrote at least 2 % of it, or against it, and backups.
        erasers: What is written against it after the peak.
        needed: The smallest set found that it needs. None: no set that was tried leaves less than a quarter.
        without_writers: What is left without all its writers. None: no neuron writes it, and nothing is needed.
        alone: What is left without single neurons, in the order of that.
        backups: Writers that write nothing while the others stand.
        marks: What marks the place.
        copies: What copies of tokens reach.
        like: Number of an earlier spike that this one repeats at another place. None: it repeats none.
        heads: Heads in its layers that attend to the place.
        heads_margin: Two standard errors of their number over texts.
    """

    place: PlaceWords
    layers: tuple[int, int]
    peak: int
    norm: float
    before: float
    ratio: float
    ratio_layer: int
    ratio_margin: float | None
    ratio_beside: float
    dims: tuple[int, ...]
    writers: tuple[PartShare, ...] = ()
    neurons: tuple[NeuronShare, ...] = ()
    erasers: tuple[PartShare, ...] = ()
    needed: Needed | None = None
    without_writers: Removal | None = None
    alone: tuple[Alone, ...] = ()
    backups: tuple[Neuron, ...] = ()
    marks: tuple[MarkLeft, ...] = ()
    copies: tuple[Copies, ...] = ()
    like: int | None = None
    heads: int = 0
    heads_margin: float | None = None

    @property
    def calibrated(self) -> dict[Neuron, float]:
        """The values that a patch writes."""
        return {one.address: one.neutral for one in self.neurons}


@dataclass(frozen=True)
class Readers:
    """Heads that give the place of the most read spike, or the first token, more than 0.3 of their attention.

    Attributes:
        place: The words for the place.
        heads: Their number, by the mean attention over texts.
        total: Number of heads of the layers that attend.
        margin: Two standard errors of the number over texts.
        texts: Number of texts.
        by_text: Their number in each text.
    """

    place: str
    heads: int
    total: int
    margin: float | None
    texts: int
    by_text: tuple[int, ...] = ()


@dataclass(frozen=True)
class Attended:
    """A place without a spike that heads attend to, and the number of these heads."""

    place: PlaceWords
    heads: int


@dataclass(frozen=True)
class OtherSpike:
    """A spike that is there with the other choice of BOS.

    Attributes:
        place: Where.
        layers: First and last layer.
        ratio: How far it stands out at its peak.
    """

    place: PlaceWords
    layers: tuple[int, int]
    ratio: float


@dataclass(frozen=True)
class OtherBos:
    """What the other choice of BOS gives.

    Attributes:
        bos: Whether the texts begin with it there.
        token: The token.
        heads: Heads that give the first token of these texts more than 0.3 of their attention.
        margin: Two standard errors of the number over texts.
        spikes: The spikes there.
    """

    bos: bool
    token: str
    heads: int
    margin: float | None
    spikes: tuple[OtherSpike, ...]


@dataclass(frozen=True)
class SinkRate:
    """Share of heads that give position 0 more than `eps` of their attention, mean over texts (Gu et al. 2025).

    Attributes:
        eps: The threshold.
        length: Tokens of a text.
        samples: Number of texts.
        value: The share.
        margin: Two standard errors over texts.
    """

    eps: float
    length: int
    samples: int
    value: float
    margin: float | None


@dataclass(frozen=True)
class Largest:
    """The largest norm over the typical one of its layer that was seen anywhere; and where."""

    ratio: float
    token: str
    position: int
    layer: int


def part_of(name: str) -> Neuron | Head | Component:
    """Return the part of a name: "mlp 11", "attention 3", "embedding", "L0.H4", "L1.N338"."""
    kind, _, layer = name.partition(" ")
    if kind == "embedding" or layer:
        return Component(kind, int(layer) if layer else None)  # pyright: ignore[reportArgumentType] - one of the kinds
    if "H" in name:
        return Head(*read_head(name))
    return Neuron.of(read_neuron(name))
