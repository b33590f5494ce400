"""The norm spike at each place, and what makes it: neurons of MLPs or, if these do not, a component."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.measure import Setup
from sinkscope.measure.margin import margin_of
from sinkscope.results.claims import NEEDED, Claim, Contrast, Outcome, Search
from sinkscope.results.parts import Part, Parts, in_words
from sinkscope.sinks.find.layer_scan import STEP_SHARE, LayerScan
from sinkscope.sinks.find.left import INTACT, claim_of
from sinkscope.sinks.find.places import Place, stands_out
from sinkscope.sinks.find.records import Candidate, Candidates, Spike
from sinkscope.sinks.find.sentences import layers_in_words
from sinkscope.sinks.find.sets import FoundSet, causal_set, dependence
from sinkscope.sinks.find.survey import Survey
from sinkscope.sinks.removal.components import Heads, heads_of, one_by_one, writers
from sinkscope.sinks.removal.effects import Trial, side_by_side

MAKER_TEXTS = 2
MAKER_LENGTH = 32  # typical text in which the maker of a spike is searched
ALONG = 0.5  # a spike that comes back is the same one if the cosine of the directions is at least this
SAME = 0.05  # what is left without parts that do the same


@dataclass(frozen=True, eq=False)
class MadeSpike:
    """The spike at one place.

    Attributes:
        scan: The model at this place.
        words: The words for the place and, if it has several spikes, for the layers of this one.
        found: The smallest set of neurons that makes the spike; none if no set that was tried does.
        spike: Its layers and its height, and what makes it.
    """

    scan: LayerScan
    words: str
    found: FoundSet
    spike: Spike

    @property
    def neurons(self) -> Candidates:
        """The neurons that every measurement edits or reads: the smallest set, or else those that are causal alone."""
        return self.found.members or self.found.adding


def made_spikes(setup: Setup, survey: Survey) -> list[MadeSpike]:
    """The spike at each place, and what makes it; they are searched once for a survey.

    Args:
        setup: The model and its text.
        survey: Where the spikes are.
    """
    return setup.once((made_spikes, survey), lambda: _made(setup, survey))


def spike_runs(scan: LayerScan) -> list[tuple[int, int]]:
    """The first and last layer of each run of layers after which the norm stands out."""
    runs: list[tuple[int, int]] = []
    for layer in scan.spike_layers:
        if layer - 1 in scan.spike_layers:
            runs[-1] = (runs[-1][0], layer)
        else:
            runs.append((layer, layer))
    return runs


def apart(scan: LayerScan) -> list[LayerScan]:
    """The scan for each spike of the place: what comes back in another direction is another spike.

    If there is a single one, or none, it is this scan.
    """
    groups: list[tuple[int, int]] = []  # the first and last layer of the runs in one direction
    before: Float[Tensor, " d_model"] | None = None
    for first, last in spike_runs(scan):
        largest = max(range(first, last + 1), key=lambda layer: scan.spike_norm[layer])
        direction = scan.directions[largest]
        if before is None or abs(float(direction @ before)) < ALONG:
            groups.append((first, last))
        else:
            groups[-1] = (groups[-1][0], last)
        before = direction
    if len(groups) < 2:
        return [scan]
    scans: list[LayerScan] = []
    for first, last in groups:
        since = 0 if first == groups[0][0] else first
        until = last + 2  # with the layer that takes it away
        if last == groups[-1][1]:
            until = len(scan.layers)
        scans.append(replace(scan, layers=scan.layers[:until], since=since))
    return scans


def _made(setup: Setup, survey: Survey) -> list[MadeSpike]:
    made: list[MadeSpike] = []
    for place in survey.spikes:
        heads, scans = survey.readers(place), apart(survey.scan(place))
        for scan in sorted(scans, key=lambda scan: (_reading(scan, heads), float(scan.ratios.max())), reverse=True):
            words = place.words
            if len(scans) > 1:
                words += f" after {layers_in_words(spike_runs(scan))}"
            if scan.spike_layers:
                found = causal_set(scan, words, setup.seed, heads)
                made.append(MadeSpike(scan, words, found, _spike(scan, place, words, found)))
    return [_with_dependence(setup, one, made) for one in made]


def _reading(scan: LayerScan, heads: Heads) -> int:
    """How many heads can read a spike: those that attend after it has begun, and before another one does."""
    return sum(scan.since < layer < len(scan.layers) for layer, _ in heads)


def _with_dependence(setup: Setup, spike: MadeSpike, made: Sequence[MadeSpike]) -> MadeSpike:
    """A spike, and whether it needs the neurons of another one."""
    own = {*spike.found.set}
    others = [other.found.set for other in made if other.found.set and own.isdisjoint(other.found.set)]
    if not spike.scan.stages or not others:
        return spike
    claims = dependence(spike.scan, spike.words, setup.seed, others)
    return replace(spike, spike=replace(spike.spike, claims=(*spike.spike.claims, *claims)))


def surveyed(setup: Setup, *, all_layers: bool = False) -> tuple[Survey, list[MadeSpike]]:
    """Where the sinks and the spikes are, and what makes the spike of each kind of place.

    Of a model that is read layer by layer, only the lower layers are read, unless these are too few: its neurons do not
    carry the attention to the first kind of place.

    Args:
        setup: The model and its text.
        all_layers: Read every layer.
    """
    whole = all_layers or setup.target.resident
    survey = Survey.of(setup, whole=whole)
    made = made_spikes(setup, survey)
    carried = bool(made) and (made[0].found.heads_lost or 0.0) >= NEEDED
    if whole or carried or len(survey.first.layers) == setup.target.n_layers:
        return survey, made
    return surveyed(setup, all_layers=True)


def sink_spike(setup: Setup) -> MadeSpike | None:
    """The first spike that MLPs make: its neurons are what every measurement edits or reads. None: there is none."""
    for made in surveyed(setup)[1]:
        if made.scan.stages:
            return made
    return None


def instead_of_spike(setup: Setup) -> str:
    """What there is if no MLP makes a spike, as a clause."""
    survey, _ = surveyed(setup)
    if survey.sinks:
        return f"heads attend to {survey.sinks[0].words}, see `circuit`"
    if survey.received.learned_heads:
        return "heads attend to learned sink logits"
    if survey.spikes:
        return f"the norm at {survey.spikes[0].words} stands out, see `circuit`"
    return f"no attention sink was found either ({survey.received.most_attended})"


def without_spike(setup: Setup, consequence: str) -> str:
    """Why something cannot be measured if no MLP makes a spike, and what there is; `consequence` is a clause."""
    return f"No MLP makes a norm spike, so {consequence}; {instead_of_spike(setup)}."


def _spike(scan: LayerScan, place: Place, words: str, found: FoundSet) -> Spike:
    """The place whose norm stands out, and what makes the spike that these words mean."""
    maker: Parts = ()
    claims = [*found.claims]
    search = Search("neurons", found.tried, max((n.ablation_drop for n in found.neurons), default=0.0))
    if not found.set or scan.norm_before:
        maker, made, search = spike_maker(scan, words, () if found.set else found.adding)
        claims += made
    norms = scan.typical.norms[scan.ratios.argmax(), :, 1:].flatten()
    ordinary = norms[~stands_out(norms, norms.median())]
    return Spike(
        place=place,
        layers=tuple(spike_runs(scan)),
        step_up=tuple(scan.stages or (scan.growth >= STEP_SHARE).nonzero().flatten().tolist()),
        step_down=tuple((scan.growth <= -STEP_SHARE).nonzero().flatten().tolist()),
        ratio=float(scan.ratios.max()),
        usual=float(ordinary.quantile(0.95) / norms.median().clamp(min=1e-9)),
        maker=maker,
        by_mlp=bool(scan.stages),
        set=found.set,
        claims=tuple(claims),
        search=search,
        margin=margin_of(scan.ratios_by_text.numpy()),
    )


def spike_maker(scan: LayerScan, place: str, neurons: Sequence[Candidate]) -> tuple[Parts, list[Claim], Search]:
    """The part without which the spike is gone, if there is one, with the claim about it, and what was searched.

    Each component, or head, writes at the place what it writes at a typical position, and neurons are zeroed; what is
    left without the other ones is the random contrast. Of parts that leave as little, a head or a neuron is taken. An
    embedding tells the place from others, so all of it needs that: it is named if nothing that reads it is needed.

    Args:
        scan: The model at the places of the spike.
        place: The words for them.
        neurons: Neurons that are causal alone.
    """
    target, layer = scan.target, scan.spike_layers[0]
    ids = scan.ids[:MAKER_TEXTS, : max(MAKER_LENGTH, scan.up_to_place + 4)]
    written = writers(target, layer + 1)
    parts: list[Part] = []
    for number in filter(target.has_attention, range(layer + 1)):
        parts += heads_of(target, number)
    parts += [*(neuron.address for neuron in neurons), *(one for one in written if one.layer is not None)]
    count = len(parts)
    parts += [one for one in written if one.layer is None]
    trial = Trial(
        ids,
        one_by_one(parts),
        at=scan.at[:MAKER_TEXTS],
        source=scan.ordinary(layer, ids.shape[1])[:MAKER_TEXTS],
        upto=layer,
        without=scan.shared_dims,
        directions=scan.directions,
    )
    (edited,) = side_by_side(target, [trial])
    along = edited.along[..., layer]
    kept = (along[1:] / along[0]).clamp(min=0)
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
