"""The norm spike at each place, and what makes it: neurons of MLPs or, if these do not, a component."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sinkscope.measure import Setup
from sinkscope.measure.margin import margin_of
from sinkscope.results.claims import NEEDED, Claim, Contrast, Outcome, Search
from sinkscope.results.parts import Part, Parts, in_words, sites_of
from sinkscope.sinks.find.layer_scan import STEP_SHARE
from sinkscope.sinks.find.left import INTACT, claim_of
from sinkscope.sinks.find.places import Place, stands_out
from sinkscope.sinks.find.records import Candidate, Spike
from sinkscope.sinks.find.sets import CANDIDATES, FoundSet, causal_set
from sinkscope.sinks.find.survey import SinkContext, Survey
from sinkscope.sinks.removal.components import Sites, heads_of, one_by_one, writers
from sinkscope.sinks.removal.effects import effects
from sinkscope.sinks.removal.search import random_sites

MAKER_TEXTS = 2
MAKER_LENGTH = 32  # typical text in which the maker of a spike is searched
SAME = 0.05  # what is left without parts that do the same


@dataclass(frozen=True, eq=False)
class MadeSpike:
    """The spike at one place.

    Attributes:
        context: The model at this place.
        found: The smallest set of neurons that makes the spike; none if no set that was tried does.
        spike: Its layers and its height, and what makes it.
    """

    context: SinkContext
    found: FoundSet
    spike: Spike


def made_spikes(setup: Setup, survey: Survey, top_k: int = CANDIDATES) -> list[MadeSpike]:
    """The spike at each place, and what makes it; they are searched once for a survey.

    Args:
        setup: The model and its text.
        survey: Where the spikes are.
        top_k: Number of candidate neurons of a sink layer.
    """
    key = (made_spikes, survey, top_k)
    if key not in setup.memory:
        made: list[MadeSpike] = []
        for place in survey.spikes:
            context = survey.context(place)
            if context.scan.spike_layers:
                found = causal_set(context, place.words, survey.readers(place), top_k)
                made.append(MadeSpike(context, found, _spike(context, place, found)))
        setup.memory[key] = made
    return setup.memory[key]


@dataclass(frozen=True, eq=False)
class SinkNeurons:
    """The neurons that every measurement of a setup edits or reads, in the words of `find_sinks`: its smallest set.

    Attributes:
        made: The first spike that MLPs make. None: there is none.
        neurons: The smallest set of neurons that makes it, largest contribution first. If no set removes the spike, the
            neurons that are causal alone.
        controls: As many random neurons of the same layers.
        instead: What there is if no MLP makes a spike, as a clause.
    """

    made: MadeSpike | None
    neurons: tuple[Candidate, ...] = ()
    controls: Sites = ()
    instead: str = ""

    @property
    def layer(self) -> int | None:
        """The sink layer."""
        return None if self.made is None else self.made.context.layer

    def absence(self, consequence: str) -> str:
        """Why something cannot be measured, and what there is.

        Args:
            consequence: What cannot be measured, as a clause.
        """
        return f"No MLP makes a norm spike, so {consequence}; {self.instead}."


def sink_neurons(setup: Setup) -> SinkNeurons:
    """The neurons that make the first spike; they are searched once for a setup."""
    survey = Survey.of(setup)
    for made in made_spikes(setup, survey):
        if made.context.scan.sink_layer is not None:
            neurons = made.found.members or made.found.adding
            sites = sites_of(neurons)
            return SinkNeurons(made, neurons, random_sites(setup.target, sites, sites, setup.seed))
    instead = f"no attention sink was found either ({survey.received.most_attended})"
    if survey.sinks:
        instead = f"heads attend to {survey.sinks[0].words}, see `circuit`"
    elif survey.received.learned_heads:
        instead = "heads attend to their learned sink logits"
    elif survey.spikes:
        instead = f"the norm at {survey.spikes[0].words} stands out, see `circuit`"
    return SinkNeurons(None, instead=instead)


def _spike(context: SinkContext, place: Place, found: FoundSet) -> Spike:
    """The place whose norm stands out, and what makes its spike."""
    scan = context.scan
    maker: Parts = ()
    claims: list[Claim] = []
    search = Search("neurons", found.tried, max((n.ablation_drop for n in found.neurons), default=0.0))
    if found.minimal is not None:
        claims += found.minimal.claims
    if found.minimal is None or scan.norm_before:
        maker, made, search = spike_maker(context, place.words, () if found.minimal else found.adding)
        claims += made
    top = int(scan.ratios.argmax())
    norms = scan.typical.norms[top, :, 1:].flatten()
    ordinary = norms[~stands_out(norms, norms.median())]
    return Spike(
        place=place,
        layers=tuple(scan.spike_runs),
        step_up=tuple(scan.stages or (scan.growth >= STEP_SHARE).nonzero().flatten().tolist()),
        step_down=tuple((scan.growth <= -STEP_SHARE).nonzero().flatten().tolist()),
        ratio=float(scan.ratios.max()),
        usual=float(ordinary.quantile(0.95) / norms.median().clamp(min=1e-9)),
        maker=maker,
        by_mlp=bool(scan.stages),
        set=found.minimal,
        claims=tuple(claims),
        search=search,
        margin=margin_of(scan.ratios_by_text.numpy()),
    )


def spike_maker(context: SinkContext, place: str, neurons: Sequence[Candidate]) -> tuple[Parts, list[Claim], Search]:
    """The part without which the spike is gone, if there is one, with the claim about it, and what was searched.

    Each component, or head, writes at the place what it writes at a typical position, and neurons are zeroed; what is
    left without the other ones is the random contrast. Of parts that leave as little, a head or a neuron is taken. An
    embedding tells the place from others, so all of it needs that: it is named if nothing that reads it is needed.

    Args:
        context: The model at the places of the spike.
        place: The words for them.
        neurons: Neurons that are causal alone.
    """
    scan, target = context.scan, context.target
    layer = scan.spike_layers[0]
    at = context.at[:MAKER_TEXTS]
    ids = context.ids[:MAKER_TEXTS, : max(MAKER_LENGTH, context.up_to_place + 4)]
    written = writers(target, layer + 1)
    parts: list[Part] = []
    for number in filter(target.has_attention, range(layer + 1)):
        parts += heads_of(target, number)
    parts += [*(neuron.address for neuron in neurons), *(one for one in written if one.layer is not None)]
    count = len(parts)
    parts += [one for one in written if one.layer is None]
    edited = effects(
        target,
        ids,
        one_by_one(parts),
        at=at,
        source=context.ordinary(layer, ids.shape[1])[:MAKER_TEXTS],
        upto=layer,
        without=scan.shared_dims,
        directions=context.directions,
    )
    kept = (edited.along / edited.intact_along)[..., layer].clamp(min=0)
    left = kept.mean(1)
    best = most = int(left.argmin())
    least = float(left[:count].min())
    if least <= 1 - NEEDED:
        best = int((left[:count] <= least + SAME).int().argmax())
    subject = (parts[best],)
    search = Search("parts alone", len(parts), 1 - float(left[most]), in_words((parts[most],)))
    if float(left[best]) > 1 - NEEDED:
        return (), [], search
    others = left[torch.arange(len(parts)) != best]
    control = Contrast("random", float(others.median()), len(others), "the median of other parts")
    outcome = Outcome("spike", layers=(layer,))
    return subject, [claim_of("makes", subject, outcome, place, kept[best], [INTACT, control], search)], search
