"""Each call, wherever accelerate keeps the weights, beside the whole model."""

from __future__ import annotations

from collections.abc import Callable
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


def whole() -> Any:
    return ss.load(BUNDLED, device="cpu")


def one_device() -> Any:
    return ss.load(BUNDLED, device_map={"": "cpu"})


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


def offloaded() -> Any:
    from accelerate import cpu_offload

    model = cpu_offload(whole(), execution_device=torch.device("cpu"))
    assert model.model.layers[0].mlp.down_proj.weight.is_meta
    return model


WHOLE = "whole"
PLACEMENTS: dict[str, Callable[[], Any]] = {
    WHOLE: whole,
    "`device_map`, one device": one_device,
    "`device_map`, parts on disk": on_disk,
    "`cpu_offload`": offloaded,
}
ACCELERATE = list(PLACEMENTS)[1:4]


@cache
def model_at(place: str) -> Any:
    return PLACEMENTS[place]()


CALLS = calls(AutoConfig.from_pretrained(BUNDLED))
CASES = []
ALIKE = {*MEASURED, *policies(), "generate", "LoopGuard", "Ablate, heads"} - {"h2o"}
"""Calls that read the weights as others do that run by default."""
for each_name in CALLS:
    for each_place in ACCELERATE:
        is_quick = each_name not in ALIKE and PLACEMENTS[each_place] is on_disk
        CASES.append((each_name, each_place) if is_quick else slow(each_name, each_place))


@pytest.mark.filterwarnings("ignore:the second token's value is itself like a sink's")
@pytest.mark.parametrize(("name", "place"), CASES)
def test_a_call_gives_the_numbers_of_the_whole_model(name, place):
    models = model_at(WHOLE), model_at(place)
    wanted, found = (plain(CALLS[name](model, model.tokenizer)) for model in models)
    assert differences(wanted, found) == []
