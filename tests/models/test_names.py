"""Short names."""

from __future__ import annotations

import re

import pytest
from organisms import MODEL_TYPES
from refusals import refused
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sinkscope.models.checkpoints.config import reads_images
from sinkscope.models.checkpoints.locate import find, hub_id_of, list_models


def test_every_entry_is_well_formed():
    entries = list_models()
    assert len({e.name for e in entries}) == len({e.hub_id.lower() for e in entries}) == len(entries) >= 40
    for e in entries:
        assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*", e.name) and re.fullmatch(r"[\w.-]+/[\w.-]+", e.hub_id), e
        assert hub_id_of(e.name) == e.hub_id
        assert e.family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or reads_images(e.family), e
    assert {e.family for e in entries} >= set(MODEL_TYPES)


@pytest.mark.parametrize("spelling", ["meta-llama/Llama-2-7b-hf", "Llama-2-7b-hf", "a/b/Llama-2-7b-hf/"])
def test_a_model_is_found_by_every_spelling_and_no_other_is(spelling):
    assert find(spelling) == find("llama-2-7b") != find("my-own-model") is None


@pytest.mark.parametrize(
    ("typed", "meant"), [("llama2-7b", "llama-2-7b"), ("qwen3-235b", "qwen3-235b-a22b"), ("qqqqqqqq", "[a-z]")]
)
def test_an_unknown_name_suggests_the_nearest_and_says_what_to_give(typed, meant):
    with refused(
        rf"unknown model '{typed}': expected a short name such as .*{meant}",
        words=("sinkscope.list_models()", "org/name", "./my-model", ".gguf"),
    ):
        hub_id_of(typed)
