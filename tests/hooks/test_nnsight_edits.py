"""Edits that users write inside their own nnsight trace, together with interventions, on models made by name."""

from __future__ import annotations

from functools import cache

import nnsight
import pytest
import torch
from organisms import Organism, organism
from refusals import refused
from torch.testing import assert_close

import sinkscope as ss

IDS = torch.arange(5, 25)[None]
GENERATE = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}


@cache
def planted() -> Organism:
    return organism("llama", 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted")
    planted().save(folder)
    return folder


@pytest.fixture(scope="module")
def traced(folder):
    return nnsight.LanguageModel(str(folder), dispatch=True)


def edits():
    """One intervention of each kind."""
    width = planted().model.config.hidden_size
    return {
        "ablate": ss.Ablate(layer=2, neurons=[28, 179]),
        "add": ss.Add(torch.linspace(-1, 1, width), "blocks.1.hook_resid_post"),
        "h2o": ss.kv.H2O(12),
    }


@pytest.mark.parametrize("name", edits())
@torch.no_grad()
def test_an_edit_inside_the_block_and_an_intervention_both_act(traced, name):
    """At every generated token; the user's edit adds 1 to the output of an MLP, by a plain hook in the plain model."""
    edit, model = edits()[name], planted().model
    unedited = torch.stack(model.generate(IDS, **GENERATE).logits)
    handle = model.model.layers[1].mlp.register_forward_hook(lambda _module, _args, output: output + 1)
    with edit.on(model):
        wanted = torch.stack(model.generate(IDS, **GENERATE).logits)
    handle.remove()
    with edit.on(traced):
        with traced.generate(IDS, **GENERATE) as tracer:
            for _step in tracer.iter[0:4]:
                traced.model.layers[1].mlp.output = traced.model.layers[1].mlp.output + 1
            both = tracer.result.save()
    with traced.generate(IDS, **GENERATE) as tracer:
        plain = tracer.result.save()  # nothing stays
    assert_close(torch.stack(both.logits), wanted, atol=1e-4, rtol=1e-4)
    assert_close(torch.stack(plain.logits), unedited, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(wanted, unedited, atol=1e-3)


@pytest.mark.parametrize("remote", [True, "local"])
@torch.no_grad()
def test_a_remote_trace_cannot_take_an_edit_along(traced, remote):
    """Inside one block and inside two, of which either may end first; afterwards nothing is left on the model."""
    before = dict(vars(traced))
    first, second = edits()["ablate"].on(traced), edits()["add"].on(traced)
    first.__enter__()
    second.__enter__()
    for block in (first, second):
        with refused("a remote trace leaves this intervention behind, .* trace without remote="):
            with traced.trace(IDS, remote=remote):
                traced.output.logits.save()
        block.__exit__(None, None, None)
    assert vars(traced) == before
