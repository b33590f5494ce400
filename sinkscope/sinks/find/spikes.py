"""The norm spike at each place, and what makes it: neurons of MLPs or, if these do not, a component."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sinkscope.measure import Setup
from sinkscope.results.claims import NEEDED, NOTHING, Claims, Contrast, Outcome, Search
from sinkscope.results.parts import Part, in_words
from sinkscope.sinks.find.layer_scan import SMALLEST_NORM, LayerScan
from sinkscope.sinks.find.left import INTACT, claim_of
from sinkscope.sinks.find.neurons import verify_neurons
from sinkscope.sinks.find.places import Place, stands_out
from sinkscope.sinks.find.records import Candidates, Spike
from sinkscope.sinks.find.sets import causal_set
from sinkscope.sinks.find.survey import Survey
from sinkscope.sinks.removal.components import heads_of, one_by_one, writers
from sinkscope.sinks.removal.effects import Trial, side_by_side

NO_FIRST_SPIKE = "No neurons are known that make a norm spike at the first token"
CANDIDATES = 8  # candidates of the sink layer
STEP_SHARE = 0.05  # a step down changes the spike's norm by at least this share of the largest
MAKER_TEXTS = 3  # the fewest that give a margin
MAKER_LENGTH = 32  # typical text in which the maker of a spike is searched


@dataclass(frozen=True, eq=False)
class MadeSpike:
    """The spike at one place.

    Attributes:
        scan: The model at this place.
        candidates: The neurons that were zeroed one by one; none if no MLP makes the spike.
        spike: Its layers and its height, and what makes it.
    """

    scan: LayerScan
    candidates: Candidates
    spike: Spike

    @property
    def neurons(self) -> Candidates:
        """The neurons that every measurement edits or reads: the smallest set, or else those that are causal alone."""
        members = tuple(neuron for neuron in self.candidates if neuron.address in self.spike.set)
        return members or tuple(neuron for neuron in self.candidates if neuron.causal)


def spike_runs(scan: LayerScan) -> list[tuple[int, int]]:
    """The first and last layer of each run of layers after which the norm stands out."""
    runs: list[tuple[int, int]] = []
    for layer in scan.spike_layers:
        if layer - 1 in scan.spike_layers:
            runs[-1] = (runs[-1][0], layer)
        else:
            runs.append((layer, layer))
    return runs


def surveyed(setup: Setup, *, all_layers: bool = False) -> tuple[Survey, list[MadeSpike]]:
    """Where the sinks and the spikes are, and what makes the spike of each kind of place; searched once for a setup.

    Of a model that is read layer by layer, only the lower layers are read, unless these show no spike or no sink.

    Args:
        setup: The model and its text.
        all_layers: Read every layer.
    """
    survey = Survey.of(setup, whole=all_layers or setup.target.resident)
    if not survey.spikes or not survey.sinks:
        if len(survey.first.layers) < setup.target.n_layers:
            return surveyed(setup, all_layers=True)

    def made() -> list[MadeSpike]:
        scans = [(place, survey.scan(place)) for place in survey.spikes]
        return [_made(scan, place, setup.seed) for place, scan in scans if scan.spike_layers]

    return survey, setup.once((surveyed, survey), made)


def sink_spike(setup: Setup) -> MadeSpike | None:
    """The first spike that MLPs make: its neurons are what every measurement edits or reads. None: there is none."""
    for made in surveyed(setup)[1]:
        if made.scan.stages:
            return made
    return None


def first_spike(setup: Setup) -> MadeSpike | None:
    """The spike that known neurons make at the first token, of all texts or of some. None: there is none."""
    for made in surveyed(setup)[1]:
        if made.neurons and made.spike.place.is_first:
            return made
    return None


def _made(scan: LayerScan, place: Place, seed: int) -> MadeSpike:
    """The spike at a place where the norm stands out, and what makes it."""
    candidates: Candidates = ()
    claims, search = Claims(), None
    if scan.stages:
        candidates = verify_neurons(scan, CANDIDATES, seed)
        neurons = tuple(neuron.address for neuron in candidates)
        claims = causal_set(scan, _words(scan, place, scan.layer), neurons, seed)
    if not claims:
        claims, search = spike_maker(scan, _words(scan, place, scan.spike_layers[0]))
    norms = scan.typical.norms[scan.ratios.argmax(), :, 1:].flatten()
    ordinary = norms[~stands_out(norms, norms.median())]
    heights = torch.tensor(scan.spike_norm)
    falls = heights.diff(prepend=heights[:1]) <= -STEP_SHARE * heights.max()
    spike = Spike(
        place=place,
        layers=tuple(spike_runs(scan)),
        step_up=tuple(scan.stages),
        step_down=tuple(falls.nonzero().flatten().tolist()),
        ratio=float(scan.ratios.max()),
        usual=float(ordinary.quantile(0.95) / norms.median().clamp(min=SMALLEST_NORM)),
        claims=claims,
        search=None if claims else search,
    )
    return MadeSpike(scan, candidates, spike)


def _words(scan: LayerScan, place: Place, layer: int) -> str:
    """The words for a place and, if the norm stands out after several runs of layers, for a layer of one of them."""
    if len(spike_runs(scan)) < 2:
        return place.words
    return f"{place.words} after layer {layer}"


def spike_maker(scan: LayerScan, place: str) -> tuple[Claims, Search]:
    """The claim about the part without which the spike is gone, if there is one, and what was searched.

    Each component, or head, writes at the place what it writes at a typical position; what is left without the other
    ones is the contrast. Of parts that leave as little, within a fifth, a head is taken. An embedding tells the place
    from others, so all of it needs that: it is named if nothing that reads it is needed as much.

    Args:
        scan: The model at the places of the spike.
        place: The words for them.
    """
    target, layer = scan.target, scan.spike_layers[0]
    ids = scan.ids[:MAKER_TEXTS, : max(MAKER_LENGTH, scan.up_to_place + 4)]
    parts: list[Part] = []
    for number in filter(target.has_attention, range(layer + 1)):
        parts += heads_of(target, number)
    parts += sorted(writers(target, layer + 1), key=lambda one: one.layer is None)
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
    least = left.min()
    best = int((left <= (least + NOTHING).clamp(max=1 - NEEDED)).int().argmax())
    search = Search("parts alone", len(parts), 1 - float(least), in_words((parts[int(left.argmin())],)))
    if float(left[best]) > 1 - NEEDED:
        return (), search
    others = left[torch.arange(len(parts)) != best]
    contrasts = [INTACT, Contrast("random", float(others.median()), len(others), "the median of other parts")]
    claim = claim_of("makes", (parts[best],), Outcome("spike", layers=(layer,)), place, kept[best], contrasts, search)
    return (claim,), search
