"""Neurons and sets of neurons that make a spike, as results hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sinkscope.measure.evidence import NEEDED, Evidence
from sinkscope.results.notation import neuron_name, word_list
from sinkscope.sinks.removal.components import Sites

ATTENTION_LENGTH = 32  # least length of the texts in which attention with and without neurons is compared
RATE_EPS = 0.3  # mean attention above which a head attends to a position (Gu et al. 2024)


@dataclass(frozen=True)
class Member:
    """A neuron. `expert` is None if the layer is not a mixture, and for a neuron of a shared expert."""

    layer: int
    expert: int | None
    neuron: int

    @classmethod
    def of(cls, site: Sequence[int]) -> Member:
        """The neuron that interventions take as (layer, neuron) or (layer, expert, neuron)."""
        if len(site) == 2:
            return cls(site[0], None, site[1])
        return cls(site[0], site[1], site[2])

    @property
    def site(self) -> tuple[int, ...]:
        """(layer, neuron) or (layer, expert, neuron), as interventions take it."""
        if self.expert is None:
            return (self.layer, self.neuron)
        return (self.layer, self.expert, self.neuron)

    def __str__(self) -> str:
        return neuron_name(self.layer, self.expert, self.neuron)


def members_of(sites: Sites) -> tuple[Member, ...]:
    """The neurons that interventions take in this form."""
    return tuple(Member.of(site) for site in sites)


def sites_of(members: Sequence[Member]) -> Sites:
    """Neurons in the form that interventions take."""
    return tuple(member.site for member in members)


@dataclass(frozen=True)
class Neuron(Member):
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


@dataclass(frozen=True)
class CausalSet:
    """Neurons that together make the spike, and the effect of zeroing all of them.

    Attributes:
        sites: The neurons of the set.
        drop_sink_layer: Share of the spike's norm that is lost when the set is zeroed, at the layer that builds most of
            it.
        drop_last_layer: The same share at the last layer after which the norm stands out.
        drop_attention: Share of the attention to the place that is lost, over the heads of the sink after this layer.
            None if there are no such heads among the layers read.
        heads_lost: Share of these heads that lose at least half of that attention.
        control: The largest of these drops among 20 random sets of the same number of neurons from the same layers.
        margin_norm: Two standard errors of the drop at the sink layer over texts; None for too few texts.
        margin_attention: The same of the drop in attention.
        equals: Neurons any one of which removes the spike as well, if the set is a single neuron.
        layers: The first and last layer after which the norm stands out, if the spike falls and rises again: the set
            makes this part of it.
    """

    sites: tuple[Member, ...]
    drop_sink_layer: float
    drop_last_layer: float
    drop_attention: float | None
    heads_lost: float | None
    control: float
    margin_norm: float | None = None
    margin_attention: float | None = None
    equals: tuple[Member, ...] = ()
    layers: tuple[int, int] | None = None

    @property
    def edit_sites(self) -> Sites:
        """The neurons in the form that interventions take."""
        return sites_of(self.sites)

    @property
    def names(self) -> str:
        """The neurons in words, such as "L1.N3 and L1.N4"."""
        return word_list(self.sites)

    @property
    def makes_the_spike(self) -> bool:
        """Whether the set takes away at least half of the norm, and more than random neurons do."""
        return Evidence(self.drop_sink_layer, self.control).holds

    @property
    def carries_attention(self) -> bool:
        """Whether at least half of the heads lose the sink without these neurons."""
        return self.heads_lost is not None and self.heads_lost >= NEEDED
