"""A result made by hand, with a value in every field, for tests of what is done with results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sinkscope.files.provenance import ModelInfo, Provenance
from sinkscope.results.parts import Neuron
from sinkscope.sinks.spikes.records import (
    Alone,
    Attended,
    Candidate,
    Control,
    Controls,
    Copies,
    Effects,
    Largest,
    MarkLeft,
    Needed,
    OfKind,
    OtherBos,
    OtherLeft,
    OtherSpike,
    Outcome,
    PartShare,
    PlaceWords,
    Readers,
    SinkRate,
    SpikeResult,
)
from sinkscope.sinks.spikes.result import FindSinks

FIRST = PlaceWords("the first token", "<s>", 1.0)
STOP = PlaceWords("'.' wherever it stands", ".", 0.5)
NEURONS = (Neuron(2, None, 412), Neuron(2, None, 77))
NEEDED = Needed(
    neurons=NEURONS,
    parts=tuple(map(str, NEURONS)),
    left=0.02,
    left_margin=0.01,
)
OUTCOME = Outcome(
    left=0.02,
    left_margin=0.01,
    heads=(32, 1),
    heads_margin=(2.0, 1.0),
    loss=0.34,
    interval=(0.2, 0.48),
    tokens=992,
    others=(OtherLeft(1, 0.5),),
)
CONTROL = Control(
    **{**vars(OUTCOME), "left": 0.98, "heads": (32, 32), "loss": 0.01, "interval": None, "others": ()},
    sets=1,
    reached=0,
    norm=1.0,
    count=40.0,
)
EFFECTS = Effects(OUTCOME, OUTCOME, OUTCOME, None, 0.03)
CONTROLS = Controls(CONTROL, replace(CONTROL, sets=8, reached=1, norm=0.9))


def spike(place: PlaceWords, ratio: float, like: int | None = None) -> SpikeResult:
    """A spike that both neurons make."""
    return SpikeResult(
        place=place,
        layers=(2, 4),
        peak=3,
        norm=930.0,
        before=20.0,
        ratio=ratio,
        ratio_layer=2,
        ratio_margin=1.5,
        ratio_beside=ratio,
        dims=(7,),
        writers=(PartShare("mlp 2", 0.97, 0.01), PartShare("attention 1", 0.03, None)),
        neurons=(
            Candidate(2, None, 412, 0.83, 0.01, 0.01, 0.3, "needed"),
            Candidate(2, None, 77, 0.14, None, 0.02, 0.9, "needed"),
            Candidate(2, None, 3, 0.001, None, 0.0, 1.0, "backup"),
        ),
        backups=(Neuron(2, None, 3),),
        erasers=(PartShare("mlp 5", -0.4, 0.02),),
        needed=NEEDED,
        effect=EFFECTS,
        controls=CONTROLS,
        alone=(Alone(2, None, 412, 0.3, 20, 0.2, (0.1, 0.3)), Alone(2, None, 77, 0.9, 31, 0.01, None)),
        marks=(
            MarkLeft("attention 0", 0.01, 0.001, (32, 3), 0.97, 5),
            MarkLeft("L0.H1 and L0.H2", 0.02, None, (32, 4), None, 0),
        ),
        copies=(Copies(" the", 300, 0.01, 0.9, 1024), Copies(" a", None, 0.0, 0.1, 1024)),
        like=like,
        heads=32,
        heads_margin=2.0,
        texts=16,
        held_out=True,
        conditions=None,
        purpose=None,
    )


def sample_find_sinks(**changes) -> FindSinks:
    """Six layers, and a sink at the first token."""
    heads = np.array([*((0.1, 0.9) * 4 for _ in range(5)), (np.nan,) * 8])
    made = FindSinks(
        model=ModelInfo("tiny", "llama", 6, 64, 512, "abc"),
        settings={"seed": 0, "text": None},
        provenance=Provenance(("sinkscope",), {"python": "3"}, "cpu", "float32", "sdpa", True, 0, 1.5),
        spikes=(spike(FIRST, 232.0), spike(STOP, 12.0, 0)),
        readers=Readers(
            FIRST.words, 32, 48, 2.0, 4, (30, 34, 32, 32), (OfKind("prose", 30, None), OfKind("code", 34, 1.0))
        ),
        attended=(Attended(PlaceWords("'(' wherever it stands", "(", 0.4), 3),),
        learned_heads=2,
        largest=Largest(240.0, "<s>", 0, 3),
        heads=heads,
        bos=OtherBos(False, "<s>", 30, 3.0, (OtherSpike(FIRST, (2, 4), 200.0),)),
        sink_rate=SinkRate(0.3, 64, 12, 0.4, 0.05),
        typical_norm=(2.0, 3.0, 4.0, 5.0, 5.0, 5.0),
        first_token_norm=(3.0, 20.0, 930.0, 931.0, 930.0, 400.0),
        layers_read=6,
        first_ids=(1,),
    )
    return replace(made, **changes)
