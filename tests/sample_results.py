"""A result made by hand, with a value in every field, for tests of what is done with results."""

from __future__ import annotations

from dataclasses import replace

from sinkscope.files.provenance import ModelInfo, Provenance
from sinkscope.results.claims import Claim, Contrast, Outcome, Search
from sinkscope.results.parts import Head, Neuron
from sinkscope.sinks.spikes.places import Place, Rule
from sinkscope.sinks.find.records import (
    Candidate,
    Readers,
    RepeatedToken,
    RepeatsNeeded,
    Sink,
    SinkRate,
    Spike,
)
from sinkscope.sinks.find.result import FindSinks

FIRST = Place(((0, 0), (1, 0)), Rule("the first token", position=0), 0.8, 1.0, ("<s>",))
STOP = Place(((0, 9),), Rule("'.' wherever it stands", tokens=(13,)), 0.2, 0.5, ())

NEURONS = (
    Candidate(2, None, 412, 905.0, 0.97, 0.93, 0.004, True, 0.01),
    Candidate(2, None, 77, 130.0, 0.14, 0.12, 0.004, True, 0.02),
    Candidate(2, None, 3, 4.0, 0.004, -0.01, 0.004, False, 0.03),
)
PAIR = (Neuron(2, None, 412), Neuron(2, None, 77))
TRIED = Search("sets of neurons", 9)


def claim(role: str, kind: str, place: str, left: float) -> Claim:
    """What is left without both neurons."""
    contrasts = Contrast("intact", 1.0), Contrast("random", 0.98, 20)
    return Claim(role, PAIR, Outcome(kind, (2,)), place, left, contrasts, 4, TRIED, 0.01)


MADE = claim("makes", "spike", FIRST.words, 0.02)
CARRIED = claim("carries", "attention", FIRST.words, 0.1)
HEADS = Readers((Head(3, 0), Head(3, 1)), (0.8, 0.6), (0.1, 0.04), TRIED, True, CARRIED)


def spike(place: Place, ratio: float) -> Spike:
    """A spike that both neurons make."""
    return Spike(place, ((2, 3),), (1, 2), (), ratio, 1.5, (MADE,))


def sample_find_sinks(**changes) -> FindSinks:
    """Six layers, four of them read, a sink in layer 2."""
    made = FindSinks(
        model=ModelInfo("tiny", "llama", 6, 64, 512, "abc"),
        settings={"seed": 0, "text": None},
        provenance=Provenance(("sinkscope",), {"python": "3"}, "cpu", "float32", "sdpa", True, 0, 1.5),
        spikes=(spike(FIRST, 232.0), spike(STOP, 12.0)),
        sinks=(Sink(FIRST, 32, (HEADS,)),),
        other_spikes=Place(((0, 9), (3, 12)), None, 0.02, 0.1, (".",)),
        most_attended=Search("positions", 48, 1.0, "position 0"),
        shared_dims=(7,),
        sink_layer=2,
        neurons=NEURONS,
        spike_norm=(3.0, 20.0, 930.0, 931.0),
        typical_norm=(2.0, 3.0, 4.0, 5.0),
        layers_read=4,
        repeats=RepeatsNeeded((RepeatedToken(" the", 5, 300), RepeatedToken(" a", 6, None)), 300.0, 1024),
        sink_rate=SinkRate(64, 100, 0.4),
    )
    return replace(made, **changes)
