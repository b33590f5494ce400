"""Gradients under edits are those of the edited model; gradient checkpointing is refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from organisms import tiny_model
from plain_hooks import inputs_edited
from refusals import refused
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import sinkscope as ss

IDS = torch.tensor([[1, 5, 6, 7, 8, 9], [1, 20, 21, 22, 23, 24]])
PATCH = ss.SinkPatch(layer=1, neurons=[3, 11])


def gradients(model) -> list[torch.Tensor]:
    return [*torch.autograd.grad(model(IDS, labels=IDS).loss, [*model.parameters()])]


def test_gradients_flow_through_the_value_of_the_second_token():
    """Those of edits without a memory are drawn by the net (`tests/ways`)."""
    model = tiny_model("llama")[0]

    def second(values: torch.Tensor) -> torch.Tensor:
        values = values.clone()
        values[:, 1:, [3, 11]] = values[:, 1:2, [3, 11]]
        return values

    with inputs_edited(model.model.layers[1].mlp.down_proj, second):
        want = gradients(model)
    with PATCH.on(model):
        assert_close(gradients(model), want)
    assert not torch.allclose(gradients(model)[0], want[0])


def test_layers_that_the_caller_checkpoints_are_refused():
    model = tiny_model("llama")[0].train()
    mlp = model.model.layers[1].mlp
    mlp.forward = partial(checkpoint, mlp.forward, use_reentrant=False)
    with refused("recomputes a layer of"), PATCH.on(model):
        model(IDS, labels=IDS).loss.backward()


@pytest.mark.parametrize("what", [PATCH, ss.kv.H2O(3), ss.LoopServe(64)])
def test_checkpointed_layers_are_refused(what):
    model = tiny_model("llama")[0].train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with refused("runs with gradient checkpointing"), what.on(model):
        model(IDS)
    with what.on(model.eval()):
        model(IDS)


def test_a_vector_is_trained_through_add():
    model = tiny_model("llama")[0]
    vector = torch.linspace(-0.1, 0.1, model.config.hidden_size).requires_grad_()
    hook = model.model.layers[1].register_forward_hook(lambda _module, _args, out: out + vector)
    (want,) = torch.autograd.grad(model(IDS, labels=IDS).loss, vector)
    hook.remove()
    with ss.Add(vector, "blocks.1.hook_resid_post").on(model):
        first = model(IDS, labels=IDS).loss
        assert_close(torch.autograd.grad(first, vector)[0], want)
        with torch.no_grad():
            vector -= 0.5 * want
        assert model(IDS, labels=IDS).loss < first  # the second call reads what the step made of it
