"""The parts of a `find_sinks` result: where the spikes and the sinks are, what makes them, and what heads need."""

from __future__ import annotations

from dataclasses import dataclass

from sinkscope.results.claims import Claim, Claims, Search
from sinkscope.results.parts import Component, Head, Neuron, Parts
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
        neutral_up: Median output of the up projection on typical text; None if the MLP has no such factor.
    """

    contribution_norm: float
    share: float
    ablation_drop: float
    control_drop: float
    causal: bool
    neutral_post: float
    neutral_up: float | None


Candidates = tuple[Candidate, ...]


@dataclass(frozen=True)
class Spike:
    """Positions whose norm stands out (massive activations).

    Attributes:
        place: The positions.
        layers: The first and last layer of each run of layers after which the norm stands out.
        step_up: Layers that build the spike.
        step_down: Layers that reduce it by at least 5 %.
        ratio: The largest ratio of the spike's norm to the typical norm.
        usual: The 95 % quantile of that ratio over ordinary positions.
        maker: The parts without which the spike is gone, if no set of neurons makes it. If one does, the parts that
            make a norm which stands out before the neurons amplify it. Empty if none were found, or there is no such
            norm.
        by_mlp: Whether MLPs make it.
        set: The smallest set of neurons found whose ablation removes the spike; empty if none was found.
        claims: Of its makers, and of those of other spikes without which this one is gone (role "depends").
        search: What was searched.
        margin: Two standard errors of the ratio over texts; None for too few texts.
    """

    place: Place
    layers: tuple[tuple[int, int], ...]
    step_up: tuple[int, ...]
    step_down: tuple[int, ...]
    ratio: float
    usual: float
    maker: Parts
    by_mlp: bool
    set: Neurons
    claims: Claims
    search: Search
    margin: float | None = None

    @property
    def makers(self) -> Parts:
        """The parts that make the spike."""
        made = [*self.maker]
        if self.by_mlp and (self.set or not self.maker):
            made += [Component("mlp", layer) for layer in self.step_up]
        return tuple(made)


@dataclass(frozen=True)
class Readers:
    """Heads that give a place at least 0.3 of their attention and need the same, those with most attention first.

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

    @property
    def found(self) -> bool:
        """Whether something was found that they need; of the position, that it is enough has to be shown."""
        return self.claim is not None and (not self.claim.brings or self.claim.verdict == "sufficient")


@dataclass(frozen=True)
class Sink:
    """Positions that heads attend to.

    Attributes:
        place: The positions. None: the learned sink logits of the heads.
        rate: Share of the (layer, head) pairs whose mean attention to the place exceeds 0.3 (Gu et al. 2024).
        n_heads: Number of heads of the layers that were read.
        readers: Number of heads that attend in most cases.
        attention: Mean attention of these heads.
        rate_margin: Two standard errors of the rate over texts; None for too few texts.
        attention_margin: The same of the attention.
        groups: The heads that attend in most cases, by what they need, the largest group first.
        spike: Number of the spike of `FindSinks.spikes` that stands at most of these positions. None: there is none.
        length: Length of the texts, in tokens.
        window: Positions that the attending heads see, if a window hides others.
    """

    place: Place | None
    rate: float
    n_heads: int
    readers: int
    attention: float
    rate_margin: float | None = None
    attention_margin: float | None = None
    groups: tuple[Readers, ...] = ()
    spike: int | None = None
    length: int = SHORT
    window: int | None = None

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
    """What makes the spike of repeated tokens.

    Attributes:
        token: The repeated token.
        repeats: Number of repetitions; the last one was examined.
        claims: What of the norm is there with these copies, beside one copy and other tokens at that position; what is
            left of it without the neurons that make the model's spike, if any do; and without other neurons.
        others: Other neurons that make it, as they are on the last repetition; empty if these do, or none were found.
    """

    token: str
    repeats: int
    claims: Claims
    others: Candidates = ()

    @property
    def other_neurons(self) -> bool:
        """Whether copies make a spike that does not need the neurons of the model's spike."""
        copies, *same = self.claims[:2]
        return copies.verdict == "sufficient" and not any(claim.verdict == "needed" for claim in same)


@dataclass(frozen=True)
class SinkRate:
    """Share of (layer, head) pairs whose mean attention to position 0 exceeds 0.3 (Gu et al. 2024).

    Layers without softmax attention do not count.
    """

    length: int
    samples: int
    value: float
