"""Decoder types of transformers, small and random: planted neuron, attention, cache, live and from a folder."""

from __future__ import annotations

import pytest
from organisms.examine import examine

from experiments.model_types import DATA, PAGE, page, types

COVERING = """afmoe apertus bitnet cohere2 deepseek_v2 ernie4_5_moe exaone4 falcon_h1 gemma3_text glm4 gpt_bigcode
    gpt_oss granite granitemoe jamba lfm2 minicpm3 ministral modernbert-decoder mpt nanochat olmo3 persimmon phimoe
    qwen2_moe qwen3_5_text qwen3_next smollm3 stablelm starcoder2""".split()


@pytest.mark.parametrize("model_type", [*COVERING, *(pytest.param(t, marks=pytest.mark.slow) for t in types())])
def test_nothing_is_wrong_and_what_is_served_stays_served(model_type: str, recorded: dict[str, str]) -> None:
    if model_type not in recorded:
        pytest.skip("it cannot be built small")
    report = examine(model_type, seed=1, folder=model_type not in COVERING)
    assert not report.wrong
    assert report.status == recorded[model_type]


@pytest.fixture(scope="module")
def recorded() -> dict[str, str]:
    """What the table of the docs says, by type."""
    import json

    data = json.loads(DATA.read_text())
    assert page(data) == PAGE.read_text()
    return {name: found["status"] for name, found in data["types"].items()}
