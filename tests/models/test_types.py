"""Decoder types of transformers, small and random: planted neuron, attention, cache, live and from a folder."""

from __future__ import annotations

import json

import pytest
from organisms.examine import examine

from experiments.model_types import DATA, PAGE, page, types

COVERING = "afmoe deepseek_v2 exaone4 granite lfm2_moe qwen3_next".split()
RECORDED = json.loads(DATA.read_text())["result"]


@pytest.mark.parametrize("model_type", [*COVERING, *(pytest.param(t, marks=pytest.mark.slow) for t in types())])
def test_nothing_is_wrong_and_what_is_served_stays_served(model_type: str) -> None:
    if model_type not in RECORDED["types"]:
        pytest.skip("it cannot be built small")
    report = examine(model_type, folder=model_type not in COVERING)
    assert not report.wrong
    if RECORDED["types"][model_type]["status"] == "in full":
        assert report.status == "in full", report.parts


def test_the_page_shows_what_was_found() -> None:
    assert page(RECORDED) == PAGE.read_text()
    assert not any(found["wrong"] for found in RECORDED["types"].values())
