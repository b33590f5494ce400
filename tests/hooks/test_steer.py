"""Heads switched off, vectors added: against edited weights and other libraries."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from covering import every_nth
from intervention_kit import KINDS, bridge_of, count_hooks, generated, greedy, listing_1, logits, loud_model
from organisms import MODEL_TYPES, tiny_model
from refusals import refused
from torch.testing import assert_close

from sinkscope.errors import UnsupportedError
from sinkscope.hooks.edit import Ablate, Add, SinkPatch
from sinkscope.models.modules.linear import is_transposed
from sinkscope.opening.live import target_of

IDS = torch.tensor([[1, 5, 6, 7, 8, 9], [1, 20, 21, 22, 23, 24]])
OLDER = {"falcon": {"new_decoder_architecture": False, "multi_query": True}}  # what a bridge can take apart
SITES = ("hook_resid_pre", "hook_attn_out", "hook_resid_mid", "hook_mlp_out", "hook_resid_post")
CLOSE = {"atol": 1e-4, "rtol": 1e-3}


@cache
def bridged(model_type: str) -> tuple[Any, Any]:
    windows = {"layer_types": ["sliding_attention", "full_attention"]} if model_type == "gemma3_text" else {}
    model, tokenizer = tiny_model(model_type, num_hidden_layers=2, **windows, **OLDER.get(model_type, {}))
    return model, bridge_of(model, tokenizer)


def without_heads(model, heads: list[tuple[int, int]]):
    """The same model with these heads' columns of the output projection set to zero: no hook involved."""
    edited = copy.deepcopy(model)
    target = target_of(edited)
    for layer, head in heads:
        module = target.sub(layer, "o")
        weight = module.weight.data
        weight = weight if is_transposed(module) else weight.T
        width = weight.shape[0] // target.n_heads
        weight[head * width : (head + 1) * width] = 0
    return edited


def vector_of(model) -> torch.Tensor:
    return torch.randn(target_of(model).d_model, generator=torch.Generator().manual_seed(1))


@contextmanager
def added(model, layer: int, vector: torch.Tensor) -> Iterator[None]:
    """By hand: after a layer of a plain model."""

    def hook(_module, _args, output):
        return (output[0] + vector, *output[1:]) if isinstance(output, tuple) else output + vector

    handle = target_of(model).layers[layer].register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("model_type", every_nth(MODEL_TYPES, 5, 2))
def test_a_vector_as_transformer_lens_adds_it(model_type):
    model, bridge = bridged(model_type)
    vector, target, plain = vector_of(model), target_of(model), logits(model, IDS)
    # The two ends of a layer are the same in every family: each meets one of them.
    for site in SITES[MODEL_TYPES.index(model_type) % 2 :][: len(SITES) - 1]:
        name = f"blocks.1.{site}"
        if site == "hook_resid_mid" and (target.adapter.mid is None or getattr(model.config, "parallel_attn", False)):
            with pytest.raises(UnsupportedError, match="no separate place"), Add(vector, name).on(model):
                pass
            continue
        # Its hook of that name stands before the norm of the MLP, so what it adds there does not stay in the stream.
        theirs = name.replace("hook_resid_mid", "hook_attn_out")
        want = bridge.run_with_hooks(IDS, fwd_hooks=[(theirs, lambda tensor, hook: tensor + 2 * vector)])
        edit = Add(vector, name, scale=2)
        with edit.on(model):
            assert_close(logits(model, IDS), want, **CLOSE)
        with edit.on(bridge):
            assert_close(bridge(IDS), want, **CLOSE)
        assert (want - plain).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_in_generation_and_nothing_stays(kind):
    """Token by token with a cache, against the whole sequence again for every token, edited by hand."""
    model, tokenizer, sites = loud_model()
    model.generation_config.eos_token_id = None
    ids, vector, heads = IDS[:1], 3 * vector_of(model), [(1, 2), (2, 0), (2, 1)]
    cases = [
        (Add(vector, "blocks.1.hook_resid_post"), greedy(model, ids, 8, lambda: added(model, 1, vector))),
        (Ablate(heads=heads), without_heads(model, heads).generate(ids, max_new_tokens=8, do_sample=False)),
        (SinkPatch(sites=sites), greedy(model, ids, 8, lambda: listing_1(model, sites))),
    ]
    other = KINDS[kind](model, tokenizer)
    hf = target_of(other).hf
    plain = generated(hf, ids, max_new_tokens=8)
    before = count_hooks(hf)
    for edit, want in cases:
        with edit.on(other) as run:
            got = generated(hf, ids, max_new_tokens=8)
        assert torch.equal(got, want) and not torch.equal(got, plain), edit
        positions = {e.position for e in run.events}
        assert positions == (set(range(5, 13)) if isinstance(edit, Add) else set(range(13))) or edit is cases[2][0]
        if isinstance(edit, Ablate):
            assert {(e.layer, e.head, e.kind) for e in run.events} == {(*head, "ablated") for head in heads}
        with edit.on(other):
            assert torch.equal(generated(other, ids, max_new_tokens=8), want)
            if kind == "hf":
                for extra in ({"use_cache": False}, {"cache_implementation": "static"}):
                    assert torch.equal(generated(hf, ids, max_new_tokens=8, **extra), want)
    assert count_hooks(hf) == before and torch.equal(generated(hf, ids, max_new_tokens=8), plain)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SinkPatch(layer=-1, neurons=[3]), ["(-1, 3)", "from 0"]),
        (lambda: Add([1.0, 2.0], "blocks.1.hook_resid_post"), ["2 numbers", "has 32"]),
        (lambda: Add([float("nan")] * 32, "hook_embed"), ["finite"]),
        (lambda: Add([1.0] * 32, "hook_embed", scale=float("inf")), ["scale", "inf"]),
        (lambda: Add([1.0] * 32, "blocks.1.mlp.hook_post"), ["blocks.1.mlp.hook_post", "hook_resid_post"]),
    ],
)
def test_bad_arguments(make, words):
    model, _ = tiny_model("llama")
    with refused(words=words), make().on(model):
        pass
