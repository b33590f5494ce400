"""Decoder types of transformers, small and random: planted neuron, attention, cache, live and from a folder."""

from __future__ import annotations

import json

import pytest
import transformers
from organisms.examine import examine

from experiments.model_types import DATA, PAGE, page, types

COVERING = (  # each has something that those before it do not have
    # windows, shared experts, latent attention, norms behind, factors, convolutions, linear attention, per-layer inputs
    "cohere2 afmoe deepseek_v2 exaone4 granite_swa lfm2_moe qwen3_next gemma4_text "
    # experts in other layouts or beside a shared one; chunks; layers of one part each; parts in some layers
    "gpt_oss dbrx jetmoe llama4_text granitemoeshared axk1 nemotron_h olmo_hybrid beam "
    # positions by ALiBi, by addition, or none; attention outside the interface; one module for q, k and v; norms at the
    # end of layers; attention in two halves; learned sinks in some layers
    "bloom biogpt gptj mpt gpt_bigcode gpt_neo gpt_neox_japanese git diffllama mimo_v2_flash "
    # indexers; state and keys in one layer; parallel parts; a norm inside the MLP; multipliers; a text model inside
    "deepseek_v32 minimax_m3_vl_text falcon_h1 phi bitnet minicpm3 aria_text smollm3 recurrent_gemma"
).split()
RECORDED = json.loads(DATA.read_text())["result"]


def examined(model_type: str, quick: bool):
    """Nothing is wrong, and what is served stays served, by the version of transformers of the record."""
    if model_type not in RECORDED["types"]:
        pytest.skip("it cannot be built small")
    report = examine(model_type, quick=quick)
    assert not report.wrong
    if RECORDED["transformers"] == transformers.__version__ and RECORDED["types"][model_type]["status"] == "in full":
        assert report.status == "in full", report.parts


@pytest.mark.parametrize("model_type", COVERING)
def test_a_covering_set_of_types(model_type):
    examined(model_type, quick=True)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", types())
def test_every_type(model_type):
    examined(model_type, quick=False)


def test_the_page_shows_what_was_found():
    assert page(RECORDED) == PAGE.read_text()
    assert not any(found["wrong"] for found in RECORDED["types"].values())
