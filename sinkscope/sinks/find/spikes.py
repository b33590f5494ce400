"""The norm spike at each place, and what makes it: neurons of MLPs or, if these do not, a component."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.hooks.edit import Ablate
from sinkscope.measure import Setup
from sinkscope.measure.margin import margin_of
from sinkscope.results.claims import NEEDED, Claim, Contrast, Outcome, Search
from sinkscope.results.parts import Component, Part, Parts, in_words, sites_of
from sinkscope.sinks.find.layer_scan import STEP_SHARE, norms_after
from sinkscope.sinks.find.places import LEAST_CASES, Decode, Place, Places, stands_out
from sinkscope.sinks.find.records import Candidate, Spike
from sinkscope.sinks.find.sets import CANDIDATES, CausalSets, causal_sets
from sinkscope.sinks.find.survey import SinkContext, Survey
from sinkscope.sinks.removal.components import Sites, edit_of, heads_of, writers
from sinkscope.sinks.removal.effects import effects
from sinkscope.sinks.removal.search import random_sites

MAKER_TEXTS = 2
MAKER_LENGTH = 32  # typical text in which the maker of a spike is searched
AT_ONCE = 8  # texts of the survey in one pass
SAME = 0.05  # what is left without parts that do the same
PAIRED = 6  # parts that are removed in pairs if none makes the spike alone
MOST_APART = 8  # neurons of a set that are asked one by one whether they make the spike of different places


@dataclass(frozen=True, eq=False)
class MadeSpike:
    """The spike at one place.

    Attributes:
        context: The model at this place.
        sets: The smallest sets of neurons that make the spike; none if no set that was tried does.
        spike: Its layers and its height, and what makes it.
    """

    context: SinkContext
    sets: CausalSets
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
        setup.memory[key] = _made(survey, setup.tokenizer.decode, top_k)
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
            neurons = made.sets.members or tuple(neuron for neuron in made.sets.neurons if neuron.causal)
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


def _made(survey: Survey, decode: Decode, top_k: int) -> list[MadeSpike]:
    made: list[MadeSpike] = []
    waiting = list(survey.spikes)
    while waiting:
        place = waiting.pop(0)
        context = survey.context(place)
        if not context.scan.spike_layers:
            continue
        sets = causal_sets(context, place.words, survey.readers(place), top_k)
        parts = _apart(survey, place, sets, decode)
        if parts:
            waiting = parts + waiting
        else:
            made.append(MadeSpike(context, sets, _spike(context, place, sets)))
    return made


def _apart(survey: Survey, place: Place, sets: CausalSets, decode: Decode) -> list[Place]:
    """The parts of a place whose spikes different neurons of a set make; empty if all of it needs the same."""
    if sets.minimal is None or not 1 < len(sets.minimal.neurons) <= MOST_APART or (place.share < 1 and place.is_first):
        return []
    ids, norms = survey.norms.ids, survey.norms
    there = place.there(ids)
    layer = max(neuron.layer for neuron in sets.minimal.neurons)
    typical = norms.norms[layer].median()
    lost: list[Tensor] = []
    for neuron in sets.minimal.neurons:
        with Ablate(sites=[neuron.site]).on(survey.first.target):
            after = norms_after(survey.first.target, layer, ids, AT_ONCE)
        gone = there & ~stands_out(after, typical) & stands_out(norms.norms[layer], typical)
        if not any(bool((gone == other).all()) for other in lost):
            lost.append(gone)
    lost = [gone for gone in lost if int(gone.sum()) >= LEAST_CASES]
    together = torch.stack(lost).int().sum(0) if lost else there
    if len(lost) < 2 or bool((together > 1).any()) or float((together > 0)[there].float().mean()) < NEEDED:
        return []
    parts = []
    for gone in lost:
        tokens = ids[gone].unique()
        rule = place.rule
        if rule is not None:
            names = ", ".join(repr(decode([token])) for token in tokens.tolist()[:3])
            words = names + (" and more" if len(tokens) > 3 else "") + " wherever it stands"
            rule = replace(rule, words=words, tokens=tuple(tokens.tolist()))
        parts.append(Place.of(Places(ids, there), gone, rule, decode))
    return parts


def _spike(context: SinkContext, place: Place, sets: CausalSets) -> Spike:
    """The place whose norm stands out, and what makes its spike."""
    scan = context.scan
    stages = scan.stages
    maker: Parts = ()
    made: list[Claim] = []
    search = Search("neurons", sets.tried, max((n.ablation_drop for n in sets.neurons), default=0.0))
    first = min([each.layers[0] for each in sets.sets if each.layers is not None], default=0)
    if not sets.sets or scan.norm_before or (scan.spike_runs[0][1] < first):
        maker, made, search = spike_maker(context, place.words, () if sets.sets else sets.neurons)
    claims = [*[one for each in sets.sets for one in each.claims], *made]
    top = int(scan.ratios.argmax())
    norms = scan.typical.norms[top, :, 1:].flatten()
    ordinary = norms[~stands_out(norms, norms.median())]
    return Spike(
        place=place,
        layers=tuple(scan.spike_runs),
        step_up=tuple(stages or (scan.growth >= STEP_SHARE).nonzero().flatten().tolist()),
        step_down=tuple((scan.growth <= -STEP_SHARE).nonzero().flatten().tolist()),
        ratio=float(scan.ratios.max()),
        usual=float(ordinary.quantile(0.95) / norms.median().clamp(min=1e-9)),
        maker=() if sets.sets else maker,
        begun_by=maker if sets.sets else (),
        by_mlp=bool(stages),
        sets=sets.sets,
        claims=tuple(claims),
        search=search,
        margin=margin_of(scan.ratios_by_text.numpy()),
    )


def _breadth(part: Part) -> int:
    """0 for neurons and heads, 1 for what is made of them."""
    return int(isinstance(part, Component))


def _narrowest(subjects: Sequence[Parts], values: Float[Tensor, " subject"], embeddings: set[Part]) -> int:
    """Of the subjects that leave least, the narrowest; one without embeddings if it ends the spike."""
    rest = [number for number, parts in enumerate(subjects) if not {*parts} & embeddings]
    least = min([float(values[number]) for number in rest], default=1.0)
    if least > 1 - NEEDED:
        return int(values.argmin())
    near = [number for number in rest if float(values[number]) <= least + SAME]
    return min(near, key=lambda number: (len(subjects[number]), *map(_breadth, subjects[number])))


def spike_maker(context: SinkContext, place: str, neurons: Sequence[Candidate]) -> tuple[Parts, list[Claim], Search]:
    """The component without which the spike is gone or, if there is none, two parts; and what was searched.

    Each component, or head, writes at the place what it writes at a typical position, and neurons are zeroed; what is
    left without the other ones is the random contrast.

    Args:
        context: The model at the places of the spike.
        place: The words for them.
        neurons: Candidate neurons, which are tried in pairs with components.
    """
    scan = context.scan
    layer = scan.spike_layers[0]
    at = context.at[:MAKER_TEXTS]
    ids = context.ids[:MAKER_TEXTS, : max(MAKER_LENGTH, context.up_to_place + 4)]
    target = context.target
    written = writers(target, layer + 1)
    candidates: list[Part] = [one for one in written if one.layer is not None]
    for number in filter(target.has_attention, range(layer + 1)):
        candidates += heads_of(target, number)
    candidates += [neuron.address for neuron in neurons if neuron.causal]
    source = context.ordinary(layer, ids.shape[1])[:MAKER_TEXTS]

    def left(subjects: Sequence[Parts]) -> Float[Tensor, "subject text"]:
        edits = [edit_of(parts) for parts in subjects]
        reading = {"upto": layer, "without": scan.shared_dims, "directions": context.directions}
        edited = effects(target, ids, edits, at=at, source=source, **reading)
        return (edited.along / edited.intact_along)[..., layer].clamp(min=0)

    # An embedding tells the place from others, so all of it needs that: it is named if nothing that reads it is.
    embeddings: list[Part] = [one for one in written if one.layer is None]
    subjects: list[Parts] = [(one,) for one in (*candidates, *embeddings)]
    kept = left(subjects)
    order = kept[: len(candidates)].mean(1).argsort(stable=True).tolist()
    pairs: list[Parts] = list(combinations([candidates[number] for number in order[:PAIRED]], 2))
    if not order or float(kept[order[0]].mean()) > 1 - NEEDED:
        subjects, kept = [*subjects, *pairs], torch.cat([kept, left(pairs)]) if pairs else kept
    values = kept.mean(1)
    search = Search(
        "parts alone and in pairs", len(subjects), 1 - float(values.min()), in_words(subjects[int(values.argmin())])
    )
    best = _narrowest(subjects, values, {*embeddings})
    if float(values[best]) > 1 - NEEDED:
        return (), [], search
    others = kept.mean(1)[[number for number, parts in enumerate(subjects) if not {*parts} & {*subjects[best]}]]
    control = Contrast("random", float(others.median()), len(others), "the median of other parts")
    alone: list[Parts] = [(one,) for one in subjects[best]] if len(subjects[best]) > 1 else []
    claims = []
    for parts in (subjects[best], *alone):
        number = subjects.index(parts)
        claims.append(
            Claim(
                role="makes alone" if parts in alone else "makes",
                subject=parts,
                outcome=Outcome("spike", layers=(layer,)),
                place=place,
                value=float(kept[number].mean()),
                contrasts=(Contrast("intact", 1.0), control),
                draws=len(ids),
                search=search,
                margin=margin_of(kept[number].numpy()),
            )
        )
    return subjects[best], claims, search
