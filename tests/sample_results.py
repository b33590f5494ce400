"""A result made by hand, with a value in every field, for tests of what is done with results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sinkscope.files.provenance import ModelInfo, Provenance
from sinkscope.results.row import Mean, Row, row_of
from sinkscope.sinks.spikes.records import SpikeResult
from sinkscope.sinks.spikes.result import FindSinks
from sinkscope.sinks.spikes.spike import PlaceWords

FIRST = PlaceWords("the first token", "<s>")
STOP = PlaceWords("'.' wherever it stands", ".")
NEEDED = ("L2.N412", "L2.N77")


def share(value: float, margin: float | None = None, by_text: tuple[float, ...] = ()) -> Mean:
    return Mean(value, margin, by_text, "share")


def count(value: float, margin: float | None = None) -> Mean:
    return Mean(value, margin, (), "count")


def outcome(table: str, name: str, left: float = 0.02, heads: int = 1, loss: float | None = 0.34, **more) -> Row:
    """What comes of an edit."""
    numbers = {"left": share(left, 0.01), "heads": count(heads, 1.0), "intact": count(32, 2.0)}
    nats = None if loss is None else Mean(loss, 0.14)
    return row_of(table, name, **numbers, loss=nats, tokens=992, **more)


def control(name: str, sets: int | None = None, reached: int | None = None, loss: float | None = 0.01) -> Row:
    """What others do."""
    return outcome("controls", name, 0.98, 32, loss, sets=sets, reached=reached, size=count(40), norm=share(1.0))


def writer(name: str, value: float, left: float, role: str, margin: float | None = None) -> Row:
    """A neuron that writes the spike."""
    return row_of("writers", name, role, share=share(value, margin), left=share(left), neutral=0.01)


ROWS = (
    row_of("spike", "norm", norm_before=20.0, norm_after=930.0, ratio=Mean(232.0, 1.5)),
    row_of("spike", "needed", left=share(0.02, 0.01)),
    row_of("spike", "read by", heads=count(32, 2.0)),
    writer("L2.N412", 0.83, 0.3, "needed", 0.01),
    writer("L2.N77", 0.14, 0.9, "needed"),
    writer("L2.N3", 0.001, 1.0, "backup"),
    row_of("components", "mlp 2", share=share(0.97, 0.01)),
    row_of("components", "attention 1", share=share(0.03)),
    row_of("erasers", "mlp 5", share=share(-0.4, 0.02)),
    row_of("marks", "attention 0", left=share(0.01, 0.001), others=share(0.97), sets=5),
    row_of("marks", "mlp 0 and embedding", left=share(0.02)),
    outcome("effects", "at place"),
    outcome("effects", "everywhere"),
    replace(outcome("effects", "hidden", 1.0, 0), note="from layer 3 on"),
    control("busiest"),
    control("random", 8, 1),
    row_of("alone", "L2.N412", left=share(0.3), heads=20, loss=Mean(0.2, 0.1)),
    row_of("alone", "L2.N77", left=share(0.9), heads=31, loss=0.01),
)


def with_rows(one: SpikeResult, *rows: Row, without: tuple[str, ...] = ()) -> SpikeResult:
    """A spike with other rows of the same names, and without some tables."""
    new = {(row.table, row.name): row for row in rows}
    kept = {(row.table, row.name): row for row in one.rows if row.table not in without}
    return replace(one, rows=tuple((kept | new).values()))


def spike(place: PlaceWords, ratio: float, like: int | None = None) -> SpikeResult:
    """A spike that both neurons make."""
    made = SpikeResult(
        place=place,
        layers=(2, 4),
        peak=3,
        highest=2,
        dims=(7,),
        needed=NEEDED,
        like=like,
        held_out=True,
        texts=tuple(range(16)),
        rows=ROWS,
    )
    norm = made.named("spike", "norm")
    return with_rows(made, replace(norm, numbers=norm.numbers | {"ratio": Mean(ratio, 1.5)}))


def sample_find_sinks(**changes) -> FindSinks:
    """Six layers, and a sink at the first token."""
    heads = np.array([*((0.1, 0.9) * 4 for _ in range(5)), (np.nan,) * 8])
    by_text = (30.0, 34.0, 32.0, 32.0)
    made = FindSinks(
        model=ModelInfo("tiny", "llama", 6, 64, 512, "abc"),
        settings={"seed": 0, "text": None},
        provenance=Provenance(("sinkscope",), {"python": "3"}, "cpu", "float32", "sdpa", True, 0, 1.5),
        spikes=(spike(FIRST, 232.0), spike(STOP, 12.0, 0)),
        attention=(
            row_of("attention", FIRST.words, heads=Mean(32, 2.0, by_text, "count"), total=48),
            row_of("attention", "sink rate", share=share(0.4, 0.05, (0.3, 0.5, 0.4, 0.4)), length=64, eps=0.3),
            row_of("attention", "learned sink logits", heads=2, total=48),
            row_of("attention without a spike", "'(' wherever it stands", "no spike", heads=3, total=48),
            row_of("norm", "largest", "at '<s>' after layer 3", ratio=240.0),
        ),
        heads=heads,
        typical_norm=(2.0, 3.0, 4.0, 5.0, 5.0, 5.0),
        first_token_norm=(3.0, 20.0, 930.0, 931.0, 930.0, 400.0),
    )
    return replace(made, **changes)
