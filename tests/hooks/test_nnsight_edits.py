"""Edits that users write inside their own nnsight trace, together with interventions, on models made by name."""

from __future__ import annotations

import nnsight
import pytest
import torch
from organisms import organism
from refusals import refused
from torch.testing import assert_close

import sinkscope as ss

IDS = torch.arange(5, 25)[None]
GENERATE = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
ABLATE = ss.Ablate(layer=2, neurons=[28, 179])


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted")
    organism("llama", 3).save(folder)
    return nnsight.LanguageModel(str(folder), dispatch=True)


@torch.no_grad()
def test_an_edit_inside_the_block_and_an_intervention_both_act(traced):
    """At every generated token; the user's edit adds 1 to the output of an MLP, by a plain hook in the plain model."""
    edit, model = ABLATE | ss.kv.H2O(12), organism("llama", 3).model
    unedited = torch.stack(model.generate(IDS, **GENERATE).logits)
    with edit.on(model), model.model.layers[1].mlp.register_forward_hook(lambda _module, _args, output: output + 1):
        wanted = torch.stack(model.generate(IDS, **GENERATE).logits)
    with edit.on(traced), traced.generate(IDS, **GENERATE) as tracer:
        for _step in tracer.iter[0:4]:
            traced.model.layers[1].mlp.output = traced.model.layers[1].mlp.output + 1
        both = tracer.result.save()
    with traced.generate(IDS, **GENERATE) as tracer:
        plain = tracer.result.save()  # nothing stays
    assert_close(torch.stack(both.logits), wanted, atol=1e-4, rtol=1e-4)
    assert_close(torch.stack(plain.logits), unedited, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_remote_trace_cannot_take_an_edit_along(traced):
    """Inside one block and inside two, of which either may end first; afterwards nothing is left on the model."""
    before = dict(vars(traced))
    blocks = [ABLATE.on(traced), ss.Ablate("L1.N3").on(traced)]
    for block in blocks:
        block.__enter__()
    for block, remote in zip(blocks, (True, "local"), strict=True):
        with refused("a remote trace leaves this intervention behind, .* trace without remote="):
            with traced.trace(IDS, remote=remote):
                traced.output.logits.save()
        block.__exit__(None, None, None)
    assert vars(traced) == before
