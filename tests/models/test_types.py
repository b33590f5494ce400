"""Decoder types of transformers, small and random: planted neuron, attention, cache, live and from a folder."""

from __future__ import annotations

import json

import pytest
from organisms.examine import examine

from experiments.model_types import DATA, PAGE, page, types

COVERING = """afmoe apertus bitnet cohere2 deepseek_v2 ernie4_5_moe exaone4 gemma3_text glm4 gpt_bigcode gpt_oss granite
    granitemoe jamba lfm2 minicpm3 ministral modernbert-decoder nanochat olmo3 persimmon phimoe qwen2_moe qwen3_5_text
    qwen3_next smollm3 stablelm starcoder2""".split()
RECORDED = json.loads(DATA.read_text())


@pytest.mark.parametrize("model_type", [*COVERING, *(pytest.param(t, marks=pytest.mark.slow) for t in types())])
def test_nothing_is_wrong_and_what_is_served_stays_served(model_type: str) -> None:
    if model_type not in RECORDED["types"]:
        pytest.skip("it cannot be built small")
    report = examine(model_type, seed=1, folder=model_type not in COVERING)
    assert not report.wrong
    if RECORDED["types"][model_type]["status"] == "in full":
        assert report.status == "in full", report.parts


def test_the_page_shows_what_was_found() -> None:
    assert page(RECORDED) == PAGE.read_text()
    assert not [name for name, found in RECORDED["types"].items() if found["wrong"]]
