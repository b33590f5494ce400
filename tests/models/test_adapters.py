"""Every architecture through every kind of model, from a folder."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import get_args

import pytest
import torch
from checkpoints import checkpoint, with_images
from covering import covering, every_nth
from intervention_kit import loaded, logits
from organisms.decoders import decoder
from organisms.tiny import MODEL_TYPES, tiny_model
from torch.testing import assert_close

from sinkscope.models.hooks import first_tensor
from sinkscope.models.target import ModelKind, Target
from sinkscope.opening.live import target_of
from sinkscope.opening.load import load

IDS = torch.tensor([[1, 10, 11, 12, 13, 14, 15]])
HYBRIDS = ["jamba", "bamba", "falcon_h1", "qwen3_next", "recurrent_gemma"]
UNSUPPORTED = {("falcon", "bridge")}
# Every fourth architecture in one kind of model; others are streamed by default (test_stream.py) or drawn (tests/ways).
QUICK = {(name, get_args(ModelKind)[number // 4 % 3]) for number, name in enumerate(MODEL_TYPES) if number % 4 == 1}
SUPPORTED = [pair for pair in product(MODEL_TYPES, get_args(ModelKind)) if pair not in UNSUPPORTED]
PAIRS = covering(SUPPORTED, QUICK | {("falcon", "hf")})
D_MLP = {"qwen2_moe": 32, "qwen3_moe": 32, "glm4_moe": 24}
KV_HEADS = dict.fromkeys(("gpt2", "gpt_neox", "opt", "phi", "olmo", "olmo2"), 4)


@cache
def plain(model_type: str) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Logits and the output of each layer but the last, of the model as transformers makes it, never saved."""
    with torch.no_grad():
        out = tiny_model(model_type)[0](IDS, output_hidden_states=True)
    return out.logits, out.hidden_states[1:-1]


def outputs(target: Target) -> list[torch.Tensor]:
    """Output of each layer."""
    seen = []
    hook = lambda _m, _a, _k, out: seen.append(first_tensor(out).detach())  # noqa: E731
    with target.hooks(*((layer, "post", hook) for layer in target.layers)):
        target.forward(IDS)
    return seen


@pytest.mark.parametrize(("model_type", "backend"), PAIRS)
def test_loads_from_a_folder(model_type, backend):
    model = loaded(backend, checkpoint(model_type), device="cpu")  # with the load-time probe
    target = target_of(model)
    assert target.kind == backend
    assert (target.n_layers, target.d_model, target.n_heads) == (3, 32, 4)
    assert target.d_mlp == D_MLP.get(model_type, 64)
    assert target.n_kv_heads == KV_HEADS.get(model_type, 2)
    assert target.name == model_type
    assert target.resident

    tokenizer = tiny_model(model_type)[1]
    text = "poem book company"
    assert target.tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert (target.tokenizer.bos_token, target.tokenizer.padding_side) == (tokenizer.bos_token, tokenizer.padding_side)

    expected, layers = plain(model_type)
    assert_close(logits(model, IDS), expected, atol=1e-5, rtol=0)
    for ours, theirs in zip(outputs(target)[:-1], layers, strict=True):
        assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", ["hf", "nnsight"])
def test_text_part_of_a_model_with_images(tmp_path, backend):
    model = with_images(tmp_path)
    target = target_of(loaded(backend, tmp_path, device="cpu"))
    assert (target.n_layers, target.d_mlp, target.n_heads) == (3, 64, 4)
    with torch.no_grad():
        assert_close(target.hf(IDS).logits, model(IDS).logits, atol=1e-5, rtol=0)
    assert target_of(loaded(backend, tmp_path, layers=2)).n_layers == 2


@pytest.mark.parametrize("model_type", [*every_nth(MODEL_TYPES, 8), *every_nth(HYBRIDS, 4)])
def test_first_layers_alone_compute_the_same(model_type, tmp_path):
    model = tiny_model(model_type)[0] if model_type in MODEL_TYPES else decoder(model_type)
    model.save_pretrained(tmp_path)
    target = target_of(load(tmp_path, layers=2, device="cpu"))
    assert target.n_layers == target.config.num_hidden_layers == 2
    assert len(getattr(target.config, "layer_types", None) or [0, 0]) == 2
    for ours, theirs in zip(outputs(target), outputs(target_of(model)), strict=False):
        assert_close(ours, theirs, atol=1e-5, rtol=0)
