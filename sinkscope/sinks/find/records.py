"""The parts of a `find_sinks` result: where the spikes and the sinks are, what makes them, and what heads need."""

from __future__ import annotations

from dataclasses import dataclass

from sinkscope.results.claims import Claim, Claims, Search
from sinkscope.results.parts import Head, Neuron, Parts
from sinkscope.sinks.find.places import Place
from sinkscope.sinks.removal.components import Neurons

PerLayer = tuple[float, ...]
"""A number for each layer that was read."""
SHORT = 64  # length of the texts in which attention is read first (Gu et al. 2024)
RATE_EPS = 0.3  # mean attention above which a head attends to a position (Gu et al. 2024)


@dataclass(frozen=True)
class Candidate(Neuron):
    """A candidate neuron. Drops are the share of the norm at the sink layer that is lost when the neuron is zeroed.

    Attributes:
        contribution_norm: Norm of what the neuron writes at the place of the spike, `hook_post[j] * W_out[j]`.
        share: Contribution norm divided by the norm of the MLP's output at this place.
        ablation_drop: Share of the spike's norm that is lost when the neuron is zeroed.
        control_drop: Largest loss when a random neuron of the layer is zeroed instead, over 20 draws.
        causal: Whether the ablation drop exceeds the control drop and is at least 0.1.
        neutral_post: Median `hook_post` on typical text, the value that SinkPatch writes instead.
    """

    contribution_norm: float
    share: float
    ablation_drop: float
    control_drop: float
    causal: bool
    neutral_post: float


Candidates = tuple[Candidate, ...]


@dataclass(frozen=True)
class Spike:
    """Positions whose norm stands out (massive activations).

    Attributes:
        place: The positions.
        layers: The first and last layer of each run of layers after which the norm stands out.
        step_up: Layers whose MLP builds the spike; empty if no MLP does.
        step_down: Layers that reduce it by at least 5 %.
        ratio: The largest ratio of the spike's norm to the typical norm.
        usual: The 95 % quantile of that ratio over ordinary positions.
        claims: What is left of it without the smallest set of neurons found that removes it or, if there is none,
            without the component that makes it; empty if none was found.
        search: What was searched in vain. None: something makes it.
    """

    place: Place
    layers: tuple[tuple[int, int], ...]
    step_up: tuple[int, ...]
    step_down: tuple[int, ...]
    ratio: float
    usual: float
    claims: Claims
    search: Search | None = None

    @property
    def makers(self) -> Parts:
        """The parts that make the spike; empty if none were found."""
        return self.claims[0].subject if self.claims else ()

    @property
    def set(self) -> Neurons:
        """The smallest set of neurons found whose ablation removes the spike; empty if none was found."""
        return tuple(part for part in self.makers if isinstance(part, Neuron))


@dataclass(frozen=True)
class Readers:
    """Heads that give a place at least 0.3 of their attention and need the same.

    Attributes:
        heads: The heads.
        attention: Mean attention of each to the place.
        left: The same without what they need; the same as `attention` if nothing was found.
        search: What was tried.
        by_spike: Whether what they need is what makes the spike of the place.
        claim: What is left of the attention without what they need. None if nothing was found.
    """

    heads: tuple[Head, ...]
    attention: tuple[float, ...]
    left: tuple[float, ...]
    search: Search
    by_spike: bool = False
    claim: Claim | None = None


@dataclass(frozen=True)
class Sink:
    """Positions that heads attend to.

    Attributes:
        place: The positions. None: the learned sink logits of the heads.
        n_heads: Number of heads of the layers that were read.
        groups: The heads that give it more than 0.3 of their attention in most cases (Gu et al. 2024), by what they
            need, the largest group first.
    """

    place: Place | None
    n_heads: int
    groups: tuple[Readers, ...]

    @property
    def readers(self) -> int:
        """How many heads attend to it."""
        return sum(len(group.heads) for group in self.groups)

    @property
    def attention(self) -> float:
        """Mean attention of these heads."""
        return sum(sum(group.attention) for group in self.groups) / self.readers

    @property
    def claims(self) -> Claims:
        """What its heads need, of the largest group first."""
        return tuple(group.claim for group in self.groups if group.claim is not None)

    @property
    def words(self) -> str:
        """Where it is."""
        return "learned sink logits" if self.place is None else self.place.words


@dataclass(frozen=True)
class RepeatedToken:
    """A token and the first number of repetitions whose norm reaches half of the spike's; None if never."""

    token: str
    id: int
    repeats: int | None

    @property
    def by_repetition(self) -> bool:
        """Whether it takes several copies."""
        return self.repeats is not None and self.repeats > 1


@dataclass(frozen=True)
class RepeatsNeeded:
    """Repetitions until a token becomes a sink: the median over the tokens that did."""

    tokens: tuple[RepeatedToken, ...]
    median: float | None
    max_repeats: int


@dataclass(frozen=True)
class RepetitionSpike:
    """What makes the norm of a repeated token.

    Attributes:
        token: The repeated token.
        id: Its id.
        repeats: Number of repetitions; the last one was examined.
        claims: What of the norm is there with these copies, beside one copy and other tokens at that position; and what
            is left of it without the neurons that make the model's spike, if any do.
    """

    token: str
    id: int
    repeats: int
    claims: Claims

    @property
    def other_neurons(self) -> bool:
        """Whether copies make a norm that does not need the neurons of the model's spike."""
        copies, *same = self.claims
        return copies.verdict == "sufficient" and not any(claim.verdict == "needed" for claim in same)


@dataclass(frozen=True)
class SinkRate:
    """Share of (layer, head) pairs whose mean attention to position 0 exceeds 0.3 (Gu et al. 2024).

    Layers without softmax attention do not count.
    """

    length: int
    samples: int
    value: float
