"""A result made by hand, with a value in every field, for tests of what is done with results."""

from __future__ import annotations

from dataclasses import replace

from sinkscope.files.provenance import ModelInfo, Provenance
from sinkscope.sinks.find.find import FindSinks
from sinkscope.sinks.find.members import CausalSet, Member, Neuron
from sinkscope.sinks.find.places import Description, Rule
from sinkscope.sinks.find.records import (
    AttentionSink,
    LayerAttention,
    NormSpike,
    PlacedSpike,
    PublishedSink,
    RepeatedToken,
    RepeatsNeeded,
    SinkPosition,
    SinkRate,
    Stage,
)

FIRST = Rule("the first token", position=0, token="<s>")
STOP = Rule("'.' wherever it stands", tokens=(13,), token=".")
BOTH = Description((FIRST, STOP), 0.97, 1.0, 1.0)

NEURONS = (
    Neuron(2, None, 412, 905.0, 0.97, 0.93, 0.004, True, 0.01, -0.2),
    Neuron(2, None, 77, 130.0, 0.14, 0.12, 0.004, True, 0.02, 0.1),
    Neuron(2, None, 3, 4.0, 0.004, -0.01, 0.004, False, 0.03, None),
)


MADE = CausalSet((Member(2, None, 412), Member(2, None, 77)), 0.99, 0.98, 0.9, 1.0, 0.01)


def sample_find_sinks(**changes) -> FindSinks:
    """Six layers, four of them read, a sink in layer 2."""
    made = FindSinks(
        model=ModelInfo("tiny", "llama", 6, 64, 512, "abc"),
        settings={"top_k": 3, "seed": 0, "text": None},
        provenance=Provenance(("sinkscope",), {"python": "3"}, "cpu", "float32", "sdpa", True, 0, 1.5, 1 << 30),
        norm_spike=NormSpike(
            place=BOTH,
            positions=(0, 9),
            step_up=(1, 2),
            step_down=(3,),
            ratio=232.0,
            runs=((2, 3),),
            made_by="MLP",
        ),
        attention_sink=AttentionSink(
            rate=0.4,
            eps=0.3,
            place=BOTH,
            positions=(SinkPosition(0, "<s>", 0.4, FIRST.words), SinkPosition(9, ".", 0.1, STOP.words)),
            layers_read=4,
            carried_by="spike",
            layers=(LayerAttention(0.0), LayerAttention(0.0), *[LayerAttention(0.8, 4, 0.7, 0.02, 0.03)] * 2),
            attention=0.7,
            rate_margin=0.02,
            attention_margin=0.03,
        ),
        causal_sets=(MADE,),
        further_spikes=(PlacedSpike(STOP.words, 9, ".", 12.0, "MLP", MADE),),
        shared_dims=(7,),
        sink_layer=2,
        neurons=NEURONS,
        stages=(Stage(1, 0.02), Stage(2, 0.97)),
        residual_dims=(5,),
        first_token_norm=(3.0, 20.0, 930.0, 931.0, None, None),
        typical_norm=(2.0, 3.0, 4.0, 5.0, None, None),
        typical_low=(1.5, 2.5, 3.5, 4.5, None, None),
        typical_high=(2.5, 3.5, 4.5, 5.5, None, None),
        layers_read=4,
        repeats=RepeatsNeeded((RepeatedToken(" the", 5, 300), RepeatedToken(" a", 6, None)), 300.0, 1, 1024),
        sink_rate=SinkRate(0.3, 64, 100, 0.4),
        published=PublishedSink("a paper", True),
    )
    return replace(made, **changes)


def sample_without_sink() -> FindSinks:
    """The same model, had it no sink."""
    return sample_find_sinks(
        norm_spike=None,
        attention_sink=None,
        causal_sets=(),
        further_spikes=(),
        shared_dims=(),
        sink_layer=None,
        neurons=(),
        stages=(),
        residual_dims=(),
        first_token_norm=(2.0, 3.0, 4.0, 5.0, 6.0, 7.0),
        typical_norm=(2.0, 3.0, 4.0, 5.0, 6.0, 7.0),
        typical_low=(1.5, 2.5, 3.5, 4.5, 5.0, 6.0),
        typical_high=(2.5, 3.5, 4.5, 5.5, 7.0, 8.0),
        layers_read=6,
        repeats=RepeatsNeeded((), None, 0, 1024),
    )
