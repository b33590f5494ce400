"""The parts of a `find_sinks` result as JSON holds them (schema 5)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from sinkscope.results.notation import read_head, read_neuron
from sinkscope.results.parts import Component, Head, Neuron
from sinkscope.sinks.spikes.answer_records import Conditions, Constancy, Purpose
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
        margin: Half of the 95 % interval over texts. None: too few texts.
    """

    part: PartName
    share: float
    margin: float | None


@dataclass(frozen=True)
class NeuronShare(Neuron):
    """What a neuron adds along a spike's direction, as a share of the spike.

    Attributes:
        share: The share.
        margin: Half of the 95 % interval over texts. None: too few texts.
        neutral: Its median value on ordinary text, which a patch writes.
        by_text: The share in each text.
    """

    share: float
    margin: float | None
    neutral: float
    by_text: tuple[float, ...] = field(default=(), kw_only=True)


Role = Literal["needed", "lowers", "backup", "raises", "another spike", "nothing"]
"""What the removal of a neuron alone does to the spike that it writes; "another spike": it lowers that one more."""


@dataclass(frozen=True)
class Candidate(NeuronShare):
    """A neuron that writes a spike, by its share, and what its removal does.

    Attributes:
        left: Share of the spike that is left with this neuron and its equals zeroed at the place.
        role: "needed": it is in the smallest set that suffices. "lowers": its removal lowers the spike. "backup": it
            writes only when others are gone. "raises": the spike rises. "another spike": its removal lowers another
            spike of the place more. "nothing": its removal changes less than 2 % of the spike.
    """

    left: float
    role: Role


@dataclass(frozen=True)
class Needed:
    """The smallest set found without which less than a quarter of a spike is left: how few parts are enough.

    Attributes:
        neurons: The neurons; empty if components are needed.
        parts: The set, as names.
        left: Share of the spike that is left with it removed at the place.
        left_margin: Half of the 95 % interval over texts.
    """

    neurons: tuple[Neuron, ...]
    parts: tuple[str, ...]
    left: float
    left_margin: float | None


@dataclass(frozen=True)
class OtherLeft:
    """What is left of another spike; `spike` is its number."""

    spike: int
    left: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What is left of a spike, of the heads that attend to its place, and of the loss under an edit.

    Attributes:
        left: Share of the spike at its peak that is left.
        left_margin: Half of the 95 % interval over texts.
        heads: Heads in the spike's layers that attend to the place, before and after.
        heads_margin: Half of the 95 % interval of each count under a bootstrap over texts.
        loss: Rise of the loss of tokens after the place, in nats a token. None: it was not measured.
        interval: Its 95 % interval, from paired differences over texts. None: too few texts.
        tokens: Number of tokens whose loss was read.
        others: What is left of every other spike.
        loss_by_text: Rise of the loss in each text, if it was kept.
        left_by_text: Share of the spike that is left in each text, if it was kept.
    """

    left: float
    left_margin: float | None
    heads: tuple[int, int]
    heads_margin: tuple[float | None, float | None]
    loss: float | None
    interval: tuple[float, float] | None
    tokens: int
    others: tuple[OtherLeft, ...] = ()
    loss_by_text: tuple[float, ...] = ()
    left_by_text: tuple[float, ...] = ()

    @property
    def margin(self) -> float | None:
        """Half of the interval of the loss."""
        return None if self.interval is None else (self.interval[1] - self.interval[0]) / 2


@dataclass(frozen=True, kw_only=True)
class Control(Outcome):
    """The same with other parts removed instead.

    Attributes:
        sets: Number of sets, over which the outcome is a mean; several sets are read in different texts.
        reached: Number of sets that raise the loss as much as the needed set does in the same texts; if no loss was
            measured, that leave as little of the spike.
        norm: Mean written norm of the neurons over that of the needed set. None: components.
        count: Mean number of neurons, or components, of a set.
    """

    sets: int
    reached: int
    norm: float | None
    count: float


@dataclass(frozen=True)
class Effects:
    """What the needed set does.

    Attributes:
        at_place: It is removed at the place alone: neurons are zeroed, components write their mean over ordinary
            positions.
        everywhere: It is zeroed at all positions. None: it is of components.
        hidden: It stands, and later tokens do not see the place in the layers after its first. None: components are
            needed, or no head reads the place.
        both: It is zeroed at the place, which is hidden as well.
        elsewhere: Share of the loss that it costs everywhere and not at the place, in the same texts. None: it costs
            nothing everywhere.
    """

    at_place: Outcome
    everywhere: Outcome | None
    hidden: Outcome | None
    both: Outcome | None
    elsewhere: float | None


@dataclass(frozen=True)
class Controls:
    """What other parts do, zeroed everywhere, which write as much in norm.

    Attributes:
        busiest: The busiest other neurons of the same layers. None: components are needed, or there are no others.
        random: Random sets of other neurons; for components, other components alone. None: there are none.
    """

    busiest: Control | None
    random: Control | None

    @property
    def strongest(self) -> tuple[str, Control] | None:
        """The control that costs most, or leaves least, with its name."""
        controls: list[tuple[str, Control]] = []
        if self.busiest is not None:
            controls.append(("busiest", self.busiest))
        if self.random is not None:
            controls.append(("random", self.random))
        if not controls:
            return None
        return max(controls, key=lambda named: (named[1].loss or 0.0, -named[1].left))


@dataclass(frozen=True)
class Alone(Neuron):
    """What is left with a needed neuron and its equals zeroed at the place.

    Attributes:
        left: Share of the spike.
        heads: Heads that attend to the place.
        loss: Rise of the loss, in nats. None: it was not measured.
        interval: Its 95 % interval.
    """

    left: float
    heads: int
    loss: float | None
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class MarkLeft:
    """A part or a set that marks a place, and the share of the spike that is left with it replaced.

    Attributes:
        part: The part; a set's parts are joined by "and".
        left: The share.
        margin: Half of the 95 % interval over texts. None: too few texts.
        heads: Heads in the spike's layers that attend to the place, before and after.
        others: Median share left with as many other components replaced; of a set of heads, mean share left with as
            many random heads of the same layer replaced. None: there are too few others.
        sets: Number of such sets.
    """

    part: PartName
    left: float
    margin: float | None
    heads: tuple[int, int]
    others: float | None
    sets: int

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


@dataclass(frozen=True, kw_only=True)
class SpikeResult:
    """A spike as a result says it: what was chosen on one half of the texts, in numbers of the other half.

    Attributes:
        place: Where it is.
        layers: First and last layer of the run in which it stands out.
        peak: The layer after which it is largest.
        norm: Norm there after the peak.
        before: Norm there before the run.
        ratio: Norm there over the typical one, in the layer of the run where it is largest.
        ratio_layer: That layer.
        ratio_margin: Half of the 95 % interval over texts.
        ratio_beside: The largest ratio of the run without what dimensions that are massive at all positions have
            everywhere.
        dims: Residual dimensions that hold at least a tenth of its direction's square.
        writers: Components that wrote it, largest share first; the shares of all up to the peak sum to 1.
        neurons: Candidates: neurons that wrote at least 2 % of it, or against it, and backups, with their roles.
        backups: Candidates that write nothing while the others stand.
        erasers: What is written against it after the peak.
        needed: The smallest set found that it needs. None: no set that was tried leaves less than a quarter.
        effect: What the needed set does. None: nothing is needed, or the spike is like an earlier one.
        controls: What others do instead.
        alone: What single neurons of the needed set do.
        marks: What marks the place (`why_sink`).
        copies: What copies of tokens reach.
        like: Number of an earlier spike that this one repeats at another place. None: it repeats none.
        heads: Heads in its layers that attend to the place.
        heads_margin: Half of the 95 % interval of their number under a bootstrap over texts.
        texts: Number of texts with the place in which it was measured.
        held_out: Whether these texts did not find the spike.
        conditions: What makes a position such a place (`why_sink`). None: it was not asked.
        purpose: What the attention to the place is for (`why_sink`). None: it was not asked.
        constancy: Why heads attend to the place (`why_sink`). None: it was not asked, or none do.
        ratio_by_text: The ratio in each text.
        text_numbers: The numbers of these texts among those that were read.
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
    writers: tuple[PartShare, ...]
    neurons: tuple[Candidate, ...]
    backups: tuple[Neuron, ...]
    erasers: tuple[PartShare, ...]
    needed: Needed | None
    effect: Effects | None
    controls: Controls | None
    alone: tuple[Alone, ...]
    marks: tuple[MarkLeft, ...]
    copies: tuple[Copies, ...]
    like: int | None
    heads: int
    heads_margin: float | None
    texts: int
    held_out: bool
    conditions: Conditions | None
    purpose: Purpose | None
    constancy: Constancy | None = None
    ratio_by_text: tuple[float, ...] = ()
    text_numbers: tuple[int, ...] = ()

    @property
    def calibrated(self) -> dict[Neuron, float]:
        """The values that a patch writes: those of the neurons that write the spike, by what their removal does."""
        writing = ("needed", "lowers", "backup")
        return {neuron.address: neuron.neutral for neuron in self.neurons if neuron.role in writing}

    def has_role(self, *roles: Role) -> tuple[Candidate, ...]:
        """Return the neurons with some roles, largest share first."""
        some = [neuron for neuron in self.neurons if neuron.role in roles]
        return tuple(sorted(some, key=lambda neuron: -neuron.share))


@dataclass(frozen=True)
class OfKind:
    """Number of heads that attend to a place in texts of one kind, with its margin over these texts."""

    kind: str
    heads: int
    margin: float | None


@dataclass(frozen=True)
class Readers:
    """Heads that give the place of the most read spike, or the first token, more than 0.3 of their attention.

    Attributes:
        place: The words for the place.
        heads: Their number, by the mean attention over texts.
        total: Number of heads of the layers that attend.
        margin: Half of the 95 % interval of the number under a bootstrap over texts.
        texts: Number of texts.
        by_text: Their number in each text.
        kinds: Their number in texts of each kind; empty for texts of the user's own.
    """

    place: str
    heads: int
    total: int
    margin: float | None
    texts: int
    by_text: tuple[int, ...] = ()
    kinds: tuple[OfKind, ...] = ()


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
        margin: Half of the 95 % interval of the number over texts.
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
        margin: Half of the 95 % interval over texts.
        by_text: The share in each text.
    """

    eps: float
    length: int
    samples: int
    value: float
    margin: float | None
    by_text: tuple[float, ...] = ()


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
