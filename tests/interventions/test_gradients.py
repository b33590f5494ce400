"""Gradients under edits: with gradient checkpointing they are those of the edited model, or the `with` says why not."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from covering import each_other
from organisms import tiny_model
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import sinkscope as ss
from sinkscope.errors import UnsupportedError
from sinkscope.interventions import Ablate, SinkPatch
from sinkscope.interventions.steer import Add
from sinkscope.kv.session import Observe
from sinkscope.trace.internals import attention_name

IDS = torch.tensor([[1, 5, 6, 7, 8, 9], [1, 20, 21, 22, 23, 24]])
EDITS = {
    "patch": SinkPatch(layer=1, neurons=[3, 11]),
    "mean": Ablate(layer=1, neurons=[3], value="mean"),
    "head": Ablate(heads="L2.H1"),
    "write": Ablate(layer=0, neurons=[5], value=3.0, positions=2),
    "add": Add(torch.ones(32), "blocks.1.hook_attn_out"),
    "two": Ablate(layer=1, neurons=[3]) | Ablate(layer=1, neurons=[3], value=2.0, positions="first"),
}


def model_of(family: str, reentrant: bool | None):
    model = tiny_model(family)[0].train()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def gradients(model) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(IDS, labels=IDS).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("edit", "reentrant"), each_other(EDITS, [False, True]))
def test_recomputed_layers_are_edited(edit, reentrant):
    plain, checkpointed = model_of("llama", None), model_of("llama", reentrant)
    unedited = gradients(checkpointed)
    with EDITS[edit].on(plain) as want:
        expected = gradients(plain)
    with EDITS[edit].on(checkpointed) as run:
        found = gradients(checkpointed)
    assert_close(found, expected)
    assert run.events == want.events and run.events  # what is computed twice is recorded once
    assert max((found[name] - unedited[name]).abs().max() for name in found) > 1e-3
    assert gradients(checkpointed).keys() == unedited.keys()
    assert_close(gradients(checkpointed), unedited)  # and nothing stays


@pytest.mark.parametrize("family", ["mixtral", "gemma2", "gpt_neox"])
def test_in_other_families_and_in_nested_runs(family):
    plain, checkpointed = model_of(family, None), model_of(family, False)
    sites = [(1, 2, 3)] if family == "mixtral" else [(1, 3)]
    inner, outer = Ablate(sites=sites), Ablate(heads="L0.H1", value=0.5)
    with outer.on(plain), inner.on(plain):
        expected = gradients(plain)
    with outer.on(checkpointed), inner.on(checkpointed):
        found = gradients(checkpointed)
    assert_close(found, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_backward_after_the_with_is_refused(reentrant):
    model = model_of("llama", reentrant)
    with EDITS["patch"].on(model):
        loss = model(IDS, labels=IDS).loss
    with pytest.raises(UnsupportedError, match="call backward inside it"):
        loss.backward()
    before = model(IDS, labels=IDS).loss
    with EDITS["patch"].on(model), pytest.raises(UnsupportedError, match="run forward inside it"):
        before.backward()


def test_layers_that_the_caller_checkpoints_are_refused():
    model = model_of("llama", None)
    mlp = model.model.layers[1].mlp
    mlp.forward = partial(checkpoint, mlp.forward, use_reentrant=False)
    with EDITS["patch"].on(model), pytest.raises(UnsupportedError, match="recomputes a layer of"):
        model(IDS, labels=IDS).loss.backward()


@pytest.mark.parametrize("what", [ss.H2O(3), ss.LoopGuard(64), ss.LoopServe(64), Observe(lambda rows: None)])
def test_what_needs_a_cache_is_refused(what):
    model = model_of("llama", False)
    with what.on(model), pytest.raises(UnsupportedError, match="trains with gradient checkpointing"):
        model(IDS)
    with what.on(model.eval()):
        model(IDS)


@pytest.mark.parametrize("what", [ss.H2O(3), ss.LoopGuard(64), ss.LoopServe(64), Observe(lambda rows: None)])
def test_another_attention_inside_the_with_is_refused(what):
    model = tiny_model("llama")[0]
    was = attention_name(model.config)
    with what.on(model):
        model.set_attn_implementation("eager")
        with pytest.raises(UnsupportedError, match=r"was set to .eager. inside the `with`"):
            model.generate(IDS, max_new_tokens=2)
    assert attention_name(model.config) == was
