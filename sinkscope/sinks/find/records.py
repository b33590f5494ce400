"""The parts of a `find_sinks` result: where the spike and the sink are, what makes and what carries them."""

from __future__ import annotations

from dataclasses import dataclass

from sinkscope.measure.evidence import NEEDED
from sinkscope.sinks.find.members import CausalSet, Neuron
from sinkscope.sinks.find.places import Description

SHORT = 64  # length of the texts in which attention is read first (Gu et al. 2024)


@dataclass(frozen=True)
class Stage:
    """A layer whose MLP builds the spike. `share` is what it adds, relative to the spike's largest norm."""

    layer: int
    share: float


@dataclass(frozen=True)
class RepeatedToken:
    """A token and the first number of repetitions whose norm reaches half of the spike's; None if never."""

    token: str
    id: int
    repeats: int | None


@dataclass(frozen=True)
class RepeatsNeeded:
    """Repetitions until a token becomes a sink: the median over the tokens that did, and how many never did."""

    tokens: tuple[RepeatedToken, ...]
    median: float | None
    unreached: int
    max_repeats: int

    @property
    def at_once(self) -> tuple[RepeatedToken, ...]:
        """Tokens whose first occurrence is a sink already, so that the median leaves them out."""
        return tuple(t for t in self.tokens if t.repeats == 1)


@dataclass(frozen=True)
class NormSpike:
    """Positions whose norm stands out (massive activations).

    What is said of layers and makers is so of the first of the places that the words mean.

    Attributes:
        place: The words for these positions.
        positions: Where in pieces of typical text each kind of place is seen first. Position 0 is the first token.
        step_up: Layers that build the spike.
        step_down: Layers that reduce it by at least 5 %.
        ratio: The largest ratio of the spike's norm to the typical norm.
        runs: The first and last layer of each run of layers after which the norm stands out.
        made_by: "MLP", or the component without which the spike is gone. None if there is no single one.
        begun_by: What makes a norm that stands out before an MLP amplifies it. None if there is no such norm, or no
            single component makes it.
        margin: Two standard errors of the ratio over texts; None for too few texts.
    """

    place: Description
    positions: tuple[int, ...]
    step_up: tuple[int, ...]
    step_down: tuple[int, ...]
    ratio: float
    runs: tuple[tuple[int, int], ...]
    made_by: str | None
    begun_by: str | None = None
    margin: float | None = None

    @property
    def makers(self) -> tuple[str, ...]:
        """The components that make the spike, named as carriers are."""
        makers = []
        if self.begun_by is not None:
            makers.append(self.begun_by)
        if self.made_by == "MLP":
            makers += [f"MLP of layer {layer}" for layer in self.step_up]
        elif self.made_by is not None:
            makers.append(self.made_by)
        return tuple(makers)


@dataclass(frozen=True)
class PlacedSpike:
    """The spike of one kind of place, beside that of the first kind.

    Attributes:
        words: The words for the places.
        position: Where it is seen first in typical text.
        token: The token that always stands there; empty if there is no single one.
        ratio: Its largest norm divided by the typical one.
        made_by: "MLP", or the component without which it is gone. None if there is no single one.
        set: The smallest set of neurons whose ablation removes it. None if no set that was tried does.
    """

    words: str
    position: int
    token: str
    ratio: float
    made_by: str | None
    set: CausalSet | None


@dataclass(frozen=True)
class SinkPosition:
    """A kind of place that heads attend to.

    Attributes:
        position: Where it is seen first in pieces of typical text.
        token: The token that always stands there; empty if there is no single one.
        rate: Share of (layer, head) pairs that attend to it.
        words: The words for such places.
    """

    position: int
    token: str
    rate: float
    words: str


@dataclass(frozen=True)
class LayerAttention:
    """The attention of one layer to the sink.

    Attributes:
        rate: Share of its heads that attend to the sink. None if it has no softmax attention.
        readers: Number of heads that do in most cases.
        attention: Mean attention of these to the sink. None if there are none.
        rate_margin: Two standard errors over texts; None for too few texts.
        attention_margin: The same of the mean attention.
    """

    rate: float | None
    readers: int = 0
    attention: float | None = None
    rate_margin: float | None = None
    attention_margin: float | None = None


@dataclass(frozen=True)
class AttentionSink:
    """Positions that heads attend to.

    Attributes:
        rate: Share of (layer, head) pairs whose mean attention to the first kind of place exceeds eps (Gu et al. 2024).
            If there is no place, the share for the learned sink logits.
        eps: Threshold on mean attention.
        place: The words for the positions. None if heads attend to learned sink logits only.
        positions: Each kind of place that the words mean.
        layers_read: Number of layers whose attention was read.
        carried_by: What the heads need, found by ablation: "spike", "mark" (what an attention layer or MLP writes there
            without a spike), "token embedding", "position embedding", "key bias", "position" (rotary alone), "learned
            logits". None if no single one of them.
        layers: The attention of each layer read.
        reads: What heads need in the same words, with the share of the heads that do, the largest share first. Empty if
            they need the spike.
        mark: The component that writes the mark. None if no head reads one, or if heads read those of several.
        length: Length of the texts, in tokens.
        window: Positions that the attending heads see, if a window hides others.
        learned_rate: Share of heads that attend to a learned sink logit; 0 if too few do.
        attention: Mean attention of the heads that attend in most cases. None if there is no place.
        rate_margin: Two standard errors of the rate over texts; None for too few texts.
        attention_margin: The same of the mean attention.
    """

    rate: float
    eps: float
    place: Description | None
    positions: tuple[SinkPosition, ...]
    layers_read: int
    carried_by: str | None
    layers: tuple[LayerAttention, ...] = ()
    reads: tuple[tuple[str, float], ...] = ()
    mark: str | None = None
    length: int = SHORT
    window: int | None = None
    learned_rate: float = 0.0
    attention: float | None = None
    rate_margin: float | None = None
    attention_margin: float | None = None

    @property
    def share(self) -> float:
        """Share of the texts that have the sink."""
        if self.place is None:
            return 1.0
        return self.place.share


@dataclass(frozen=True)
class RepetitionSpike:
    """What makes the spike of repeated tokens.

    Attributes:
        token: The repeated token.
        repeats: Number of repetitions; the last one was examined.
        drop: Share of its norm that is lost without the neurons that make the model's spike.
        set: Other neurons that make it. None if these do, or if no set was found.
        neurons: The neurons of this set, as they are on the last repetition.
    """

    token: str
    repeats: int
    drop: float
    set: CausalSet | None
    neurons: tuple[Neuron, ...]

    @property
    def same_neurons(self) -> bool:
        """Whether at least half of the repeated token's norm needs the same neurons."""
        return self.drop >= NEEDED


@dataclass(frozen=True)
class SinkRate:
    """Share of (layer, head) pairs whose mean attention to position 0 exceeds eps (Gu et al. 2024).

    Layers without softmax attention do not count.
    """

    eps: float
    length: int
    samples: int
    value: float


@dataclass(frozen=True)
class PublishedSink:
    """What the literature reports for this model, and whether the result agrees."""

    source: str
    matches: bool
