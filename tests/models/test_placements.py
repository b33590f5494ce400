"""Calls on a model whose weights accelerate keeps on disk, beside the whole model."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from calls_kit import MEASURED, calls
from covering import slow
from same_kit import differences, plain
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import sinkscope as ss
from sinkscope.kv.registry import policies

BUNDLED = Path(ss.__file__).parent / "models/bundled"
LAYERS = 6
OFFLOADED = TemporaryDirectory(prefix="sinkscope-offloaded-")
CALLS = calls(AutoConfig.from_pretrained(BUNDLED))
ALIKE = {*MEASURED, *policies(), "generate", "LoopGuard", "Ablate, heads"} - {"h2o"}
"""Calls that read the weights as others do that run by default."""


@cache
def on_disk() -> Any:
    """The embedding, the unembedding, and every layer but the first on disk, that of the sink among them."""
    places = {f"model.layers.{layer}": "disk" if layer else "cpu" for layer in range(LAYERS)}
    places |= {"model.embed_tokens": "disk", "lm_head": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    model: Any = AutoModelForCausalLM.from_pretrained(
        BUNDLED, device_map=places, offload_folder=OFFLOADED.name, dtype=torch.float32
    )
    model.tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    assert model.model.layers[LAYERS - 1].mlp.down_proj.weight.is_meta
    return model


@cache
def whole() -> Any:
    return ss.load(BUNDLED, device="cpu")


@pytest.mark.filterwarnings("ignore:the second token's value is itself like a sink's")
@pytest.mark.parametrize("name", [slow(name) if name in ALIKE else name for name in CALLS])
def test_a_call_gives_the_numbers_of_the_whole_model(name):
    wanted, found = (plain(CALLS[name](model, model.tokenizer)) for model in (whole(), on_disk()))
    assert differences(wanted, found) == []
