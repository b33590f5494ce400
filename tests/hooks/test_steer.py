"""Heads switched off, vectors added: against edited weights and edits by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from intervention_kit import KINDS, count_hooks, generated, greedy, loud_model
from organisms import tiny_model
from raw_kit import inputs_edited
from refusals import refused

from sinkscope.hooks.edit import Ablate, Add, SinkPatch
from sinkscope.opening.live import target_of


def without_heads(model, heads: list[tuple[int, int]]):
    """The same model with these heads' columns of the output projection set to zero: no hook involved."""
    edited = copy.deepcopy(model)
    for layer, head in heads:
        edited.model.layers[layer].self_attn.o_proj.weight.data[:, 8 * head : 8 * head + 8] = 0
    return edited


@pytest.mark.parametrize("kind", ["bridge", "nnsight"])  # plain models are drawn by the net
def test_add_acts_in_generation_and_leaves_no_trace(kind):
    """Token by token with a cache, against the whole sequence again for every token, edited by hand."""
    model, tokenizer, _ = loud_model()
    model.generation_config.eos_token_id = None
    ids, heads = torch.tensor([[1, 5, 6, 7, 8, 9]]), [(1, 2), (2, 0), (2, 1)]
    vector = 3 * torch.randn(32, generator=torch.Generator().manual_seed(1))
    cases = {
        Add(vector, "blocks.1.hook_resid_post"): greedy(
            model, ids, 8, lambda: inputs_edited(model.model.layers[2], lambda x: x + vector)
        ),
        Ablate(heads=heads): without_heads(model, heads).generate(ids, max_new_tokens=8, do_sample=False),
    }
    other = KINDS[kind](model, tokenizer)
    hf = target_of(other).hf
    plain = generated(hf, ids, max_new_tokens=8)
    before = count_hooks(hf)
    for edit, want in cases.items():
        with edit.on(other) as run:
            assert torch.equal(generated(hf, ids, max_new_tokens=8), want) and not torch.equal(want, plain), edit
            assert torch.equal(generated(other, ids, max_new_tokens=8), want)
    assert {(e.layer, e.head, e.kind) for e in run.events} == {(*head, "ablated") for head in heads}
    assert {e.position for e in run.events} == {*range(13)}
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
def test_bad_arguments_of_add_are_refused(make, words):
    model, _ = tiny_model("llama")
    with refused(words=words), make().on(model):
        pass
