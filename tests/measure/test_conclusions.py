"""Whatever the numbers of a result are, its conclusion has at most 30 words, and one number with its control."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conclusion_kit import check_size
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkscope.app.card import CardChange, SinkCard
from sinkscope.files.provenance import ModelInfo
from sinkscope.results.result import Result

FIGURES = Path(__file__).parents[2] / "figures"
MEASURED = (
    *("heads", "repeat", "repeat-ablate", "repeat-attention", "converge", "divergence", "atlas", "clusters", "attack"),
    *("patch-make", "patch-eval", "barcode", "why", "precision", "lines"),
)
SITES = ("neurons", "sites")
MODEL = ModelInfo("tiny", "llama", 6, 64, 512, "abc")
LABELS = ("norm lost without the neurons", "AUROC of a plane, first against later", "neurons that make the spike")
Rng = np.random.Generator


@cache
def stored(name: str) -> Any:
    data = json.loads((FIGURES / f"{name}.json").read_text())
    if name == "barcode":
        data["result"] |= {"attention": [], "control_attention": None}  # large, and no conclusion reads them
    return data


def redrawn(value: Any, rng: Rng, name: str = "") -> Any:
    """The same data with other numbers, and any number of neurons."""
    if isinstance(value, dict):
        return {name: redrawn(inside, rng, name) for name, inside in value.items()}
    if (
        isinstance(value, list)
        and name in SITES
        and value
        and isinstance(value[0], list)
        and isinstance(value[0][0], int)
    ):
        return [[3, 1, int(neuron)] for neuron in rng.choice(4000, rng.integers(1, 13), replace=False)]
    if isinstance(value, list):
        return [redrawn(one, rng, name) for one in value]
    if isinstance(value, float):
        least = -0.2 if name.endswith(("drop", "regained", "random")) else 0.01
        most = 1.0 if abs(value) <= 1 else 2.0
        return value * float(rng.choice([0.01, 1.0, rng.uniform(least, most)]))
    return value


@pytest.mark.parametrize("name", MEASURED)
@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**9))
def test_a_conclusion_is_short_and_has_one_number(name, seed):
    """Of every measurement that is committed, with its numbers drawn anew."""
    result = redrawn(stored(name)["result"], np.random.default_rng(seed))
    check_size(Result.from_dict({**stored(name), "result": result}).conclusion())


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**9))
def test_the_conclusion_about_two_cards_is_short(seed):
    rng = np.random.default_rng(seed)
    changes = []
    for _ in range(rng.integers(1, 9)):
        before, after = (f"{value:.3g}" for value in rng.random(2))
        changed = [True, False, None][rng.integers(3)]
        changes.append(CardChange(LABELS[rng.integers(3)], before, after, 0.1, changed))
    card = SinkCard(model=MODEL, quick=False, parts=(), against="llama-2-7b (0a1b2c3d)", changes=tuple(changes))
    check_size(card.conclusion())
