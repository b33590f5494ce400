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
    assert len(entries) >= 40
    assert len({e.name for e in entries}) == len({e.hub_id.lower() for e in entries}) == len(entries)
    for e in entries:
        assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*", e.name) and re.fullmatch(r"[\w.-]+/[\w.-]+", e.hub_id), e
        assert hub_id_of(e.name) == e.hub_id
    families = {e.family for e in entries}
    assert families >= set(MODEL_TYPES)
    for family in families:
        assert decodes_text(family), family


def decodes_text(model_type: str) -> bool:
    """Whether transformers has a causal language model of a type, alone or behind an image tower."""
    return model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or reads_images(model_type)


@pytest.mark.parametrize(
    "spelling",
    [
        "llama-2-7b",
        "meta-llama/Llama-2-7b-hf",
        "Llama-2-7b-hf",
        "a/b/Llama-2-7b-hf/",
    ],
)
def test_a_model_is_found_by_every_spelling_and_no_other_is(spelling):
    assert find(spelling) == find("llama-2-7b") != find("my-own-model") is None


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("llama2-7b", "llama-2-7b"),
        ("qwen3-235b", "qwen3-235b-a22b"),
    ],
)
def test_unknown_name_suggests_the_nearest(typed, meant):
    with refused(rf"unknown model '{typed}': expected a short name such as .*{meant}[, ]"):
        hub_id_of(typed)


def test_hopeless_name_says_what_to_give():
    with refused("unknown model", words=("sinkscope.list_models()", "org/name", "./my-model", ".gguf")):
        hub_id_of("qqqqqqqq")
