"""The readings that pages quote are those of the models."""

from __future__ import annotations

import pytest
from repository import FIGURES

from experiments.real import readings
from experiments.record import earlier

SLOW = ("ablation", "patch", "repetition_attention")
RECORDED = earlier(FIGURES / "real_readings.json")


def same(made, recorded):
    """Numbers within 1e-3, everything else equal."""
    if isinstance(made, dict):
        assert made.keys() == recorded.keys()
        for name, value in made.items():
            same(value, recorded[name])
    elif isinstance(made, list | tuple):
        assert len(made) == len(recorded)
        for value, other in zip(made, recorded, strict=True):
            same(value, other)
    else:
        assert made == pytest.approx(recorded, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    "part",
    ["spike", "attention", "mark", *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)],
)
def test_what_is_recorded_of_smollm2_is_read_again(smollm2, part):
    same(readings.PARTS[part](smollm2.model, RECORDED["smollm2"]), RECORDED["smollm2"][part])


@pytest.mark.slow
@pytest.mark.parametrize("part", ["spike", "attention", "mark"])
def test_what_is_recorded_of_gemma_is_read_again(gemma3, part):
    same(readings.PARTS[part](gemma3.model, RECORDED["gemma3"]), RECORDED["gemma3"][part])
