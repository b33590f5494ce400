"""The readings that pages quote are those of the models."""

from __future__ import annotations

import pytest
from covering import slow
from repository import FIGURES

from experiments.real import readings
from experiments.record import earlier

QUICK = ("spike", "attention", "mark")
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


CASES = [("smollm2", part) for part in QUICK]
CASES += [slow("smollm2", part) for part in SLOW] + [slow("gemma3", part) for part in QUICK]


@pytest.mark.parametrize(("name", "part"), CASES)
def test_what_is_recorded_is_read_again(name, part, request):
    model = request.getfixturevalue(name).model
    same(readings.PARTS[part](model, RECORDED[name]), RECORDED[name][part])
