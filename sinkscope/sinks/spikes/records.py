"""The parts of a `find_sinks` result as JSON holds them (schema 3)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sinkscope.results.claims import Claim, Contrast, Outcome, SearchSpace
from sinkscope.results.parts import Component, Neuron
from sinkscope.sinks.spikes.controls import INTACT
from sinkscope.sinks.spikes.places import Place
from sinkscope.sinks.spikes.spike import Copies, Measured, Part, Removal, Share


@dataclass(frozen=True)
class PlaceWords:
    """Where a spike is.

    Attributes:
        words: The words.
        token: The token that stands there most often.
        share: Share of the texts that have such a position.
    """

    words: str
    token: str
    share: float


@dataclass(frozen=True)
class PartShare:
    """What a component adds along a spike's direction, as a share of the spike.

    Attributes:
        part: The component, such as "mlp 11", "attention 3" or "embedding".
        share: The share; below zero it is written against the spike.
        margin: Two standard errors over texts. None: too few texts.
    """

    part: str
    share: float
    margin: float | None


@dataclass(frozen=True)
class NeuronShare(Neuron):
    """What a neuron adds along a spike's direction, as a share of the spike.

    Attributes:
        share: The share.
        margin: Two standard errors over texts. None: too few texts.
    """

    share: float
    margin: float | None


@dataclass(frozen=True)
class Chance:
    """What is left without random sets, of each outcome the one nearest to that of the needed set."""

    left: float
    heads: int
    perplexity: float | None


@dataclass(frozen=True)
class Needed:
    """The smallest set found without which less than a quarter of a spike is left.

    Attributes:
        neurons: The neurons; empty if components are needed.
        neutral: Median value of each on ordinary text, which a patch writes.
        parts: The set, as names.
        left: Share of the spike that is left.
        left_margin: Two standard errors over texts.
        heads: Heads in the spike's layers that attend to the place, before and after.
        heads_margin: Two standard errors of each over texts.
        attention: What is left of the attention of the heads that attend there before.
        perplexity: Perplexity over that of the intact model. None: it was not measured.
        perplexity_margin: Two standard errors over texts.
        random: The same without random sets.
        texts: Number of texts.
    """

    neurons: tuple[Neuron, ...]
    neutral: tuple[float, ...]
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
    """A part, or a set that is judged as one, that marks a place, and the share of the spike left with it replaced.

    Attributes:
        part: The part; a set's parts are joined by "and".
        left: The share.
        margin: Two standard errors over texts. None: too few texts.
        others: Median share left with as many other components replaced that were tried. None: of heads, or no others.
    """

    part: str
    left: float
    margin: float | None
    others: float | None = None


@dataclass(frozen=True)
class SpikeResult:
    """A spike as a result says it.

    Attributes:
        place: Where it is.
        layers: First and last layer of the run in which it stands out.
        peak: The layer after which it is largest.
        norm: Norm there after the peak.
        before: Norm there before the run.
        ratio: Norm there over the typical one after the peak, without what dimensions that are massive at all positions
            have everywhere.
        ratio_margin: Two standard errors over texts.
        dims: Residual dimensions that hold at least a tenth of its direction's square.
        writers: What wrote it, largest share first; the shares of all components up to the peak sum to 1.
        neurons: The neurons that wrote it.
        erasers: What is written against it after the peak.
        needed: The smallest set found that it needs. None: no set that was tried leaves less than a quarter.
        alone: What is left without single neurons, in the order of that.
        backups: Neurons that write it only when others are gone.
        marks: What marks the place.
        copies: What copies of tokens reach.
        like: Number of an earlier spike that is the same at another place. None: there is none.
        heads: Heads in its layers that attend to the place.
    """

    place: PlaceWords
    layers: tuple[int, int]
    peak: int
    norm: float
    before: float
    ratio: float
    ratio_margin: float | None
    dims: tuple[int, ...]
    writers: tuple[PartShare, ...]
    neurons: tuple[NeuronShare, ...]
    erasers: tuple[PartShare, ...]
    needed: Needed | None
    alone: tuple[Alone, ...]
    backups: tuple[Neuron, ...]
    marks: tuple[MarkLeft, ...]
    copies: tuple[Copies, ...]
    like: int | None
    heads: int


@dataclass(frozen=True)
class Readers:
    """Heads that give the place of the most read spike, or the first token, more than 0.3 of their attention.

    Attributes:
        place: The words for the place.
        heads: Their number, of the mean attention over texts.
        total: Number of heads of the layers that attend.
        margin: Two standard errors of the number over texts.
        texts: Number of texts.
    """

    place: str
    heads: int
    total: int
    margin: float | None
    texts: int


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


LISTED = 0.005  # share of a component from which it is listed


def part_name(part: Part) -> str:
    """Return how JSON names a part: "mlp 11", "attention 3", "embedding", "L0.H4"."""
    if not isinstance(part, Component):
        return str(part)
    if part.layer is None:
        return "embedding"
    return f"{part.kind} {part.layer}"


def spike_result(measured: Measured) -> SpikeResult:
    """Return the record of a spike."""
    spike, needs = measured.spike, measured.needs
    shares = {one.part: one for one in measured.neurons}
    alone: list[Alone] = []
    for one in needs.alone if needs is not None else ():
        (neuron,) = one.parts
        share = shares[neuron].share if neuron in shares else 0.0
        alone.append(Alone(**vars(neuron), left=one.left, heads=one.heads, perplexity=one.perplexity, share=share))
    marks: list[MarkLeft] = []
    for mark in measured.marks:
        marks.append(MarkLeft(" and ".join(map(part_name, mark.parts)), mark.left, mark.margin, mark.others))
    return SpikeResult(
        place=words_of(spike.place),
        layers=(spike.first, spike.last),
        peak=spike.peak,
        norm=spike.norm,
        before=spike.before,
        ratio=spike.ratio,
        ratio_margin=spike.ratio_margin,
        dims=spike.dims,
        writers=part_shares(one for one in measured.writers if abs(one.share) >= LISTED),
        neurons=tuple(NeuronShare(**vars(one.part), share=one.share, margin=one.margin) for one in measured.neurons),
        erasers=part_shares(measured.erasers),
        needed=needed_record(measured),
        alone=tuple(alone),
        backups=needs.backups if needs is not None else (),
        marks=tuple(marks),
        copies=measured.copies,
        like=measured.like,
        heads=needs.heads if needs is not None else 0,
    )


def part_shares(shares: Iterable[Share]) -> tuple[PartShare, ...]:
    """Return the records of components' shares."""
    return tuple(PartShare(part_name(one.part), one.share, one.margin) for one in shares)


def words_of(place: Place) -> PlaceWords:
    """Return the record of a place."""
    return PlaceWords(place.words, place.common[0], place.share)


def needed_record(measured: Measured) -> Needed | None:
    """Return the record of what a spike needs."""
    needs = measured.needs
    if needs is None or needs.needed is None:
        return None
    removal = needs.needed
    return Needed(
        neurons=measured.needed_neurons,
        neutral=tuple(measured.neutral[neuron] for neuron in measured.needed_neurons),
        parts=tuple(map(part_name, removal.parts)),
        left=removal.left,
        left_margin=removal.left_margin,
        heads=(needs.heads, removal.heads),
        heads_margin=(needs.heads_margin, removal.heads_margin),
        attention=removal.attention,
        perplexity=removal.perplexity,
        perplexity_margin=removal.perplexity_margin,
        random=chance_of(needs.random, removal),
        texts=needs.texts,
    )


def chance_of(random: tuple[Removal, ...], removal: Removal) -> Chance | None:
    """Return what is left without random sets, of each outcome the one nearest to that of the needed set."""
    if not random:
        return None
    ratios = [one.perplexity for one in random if one.perplexity is not None]
    nearest = min(ratios, key=lambda ratio: abs(ratio - (removal.perplexity or 1)), default=None)
    heads = min((one.heads for one in random), key=lambda count: abs(count - removal.heads))
    return Chance(min(one.left for one in random), heads, nearest)


def claims_of(measured: Measured) -> tuple[Claim, ...]:
    """The typed claims about what a spike needs: what is left of it, and of the attention of the heads that read it."""
    spike, needs = measured.spike, measured.needs
    if needs is None or needs.needed is None or not needs.random:
        return ()
    removal, place = needs.needed, spike.place.words
    search = SearchSpace("neurons alone", len(needs.alone))
    name = "" if all(isinstance(part, Neuron) for part in removal.parts) else "other components, each alone"
    random = min(needs.random, key=lambda one: one.left)
    of_spike = Claim(
        "makes",
        removal.parts,
        Outcome("spike", tuple(range(spike.first, spike.last + 1))),
        place,
        removal.left,
        (INTACT, Contrast("random", random.left, len(needs.random), name)),
        needs.texts,
        search,
        removal.left_margin,
    )
    if not needs.heads:
        return (of_spike,)
    random = min(needs.random, key=lambda one: one.attention)
    attention = Claim(
        "carries",
        removal.parts,
        Outcome("attention", tuple(spike.reading_layers)),
        place,
        removal.attention,
        (INTACT, Contrast("random", random.attention, len(needs.random), name)),
        needs.texts,
        search,
    )
    return of_spike, attention
