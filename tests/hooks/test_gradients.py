"""Gradients under edits are those of the edited model; gradient checkpointing is refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from organisms import tiny_model
from refusals import refused
from torch.utils.checkpoint import checkpoint

import sinkscope as ss
from sinkscope.errors import UnsupportedError
from sinkscope.hooks.edit import Ablate, SinkPatch
from sinkscope.kv.watch import Observe

IDS = torch.tensor([[1, 5, 6, 7, 8, 9], [1, 20, 21, 22, 23, 24]])
EDITS = {
    "patch": SinkPatch(layer=1, neurons=[3, 11]),
    "write": Ablate(layer=0, neurons=[5], value=3.0, positions=2),
    "heads": Ablate(layer=1, neurons=[3, 4], heads="L1.H2", value=0.5),
}


def loss_of(model) -> torch.Tensor:
    """In the model's own precision; transformers computes its losses in float32."""
    logits = model(IDS).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten())


def gradients(model) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss_of(model).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("edit", EDITS)
def test_gradients_are_those_of_the_edited_model(edit):
    """Small steps along the gradient change the loss under the edit as the gradient says (four, by Richardson)."""
    model = tiny_model("gpt2")[0].double()  # whose norms have no type of their own
    with EDITS[edit].on(model):
        found = gradients(model)
    name = max(found, key=lambda name: float(found[name].norm()))
    size = found[name].norm()

    def slope(step: float) -> float:
        loss = []
        for sign in (1, -1):
            with torch.no_grad():
                model.get_parameter(name).add_(found[name] / size, alpha=sign * step)
                with EDITS[edit].on(model):
                    loss.append(float(loss_of(model)))
                model.get_parameter(name).sub_(found[name] / size, alpha=sign * step)
        return (loss[0] - loss[1]) / (2 * step)

    assert (4 * slope(1e-3) - slope(2e-3)) / 3 == pytest.approx(float(size), rel=1e-6)


def test_layers_that_the_caller_checkpoints_are_refused():
    model = tiny_model("llama")[0].train()
    mlp = model.model.layers[1].mlp
    mlp.forward = partial(checkpoint, mlp.forward, use_reentrant=False)
    with EDITS["patch"].on(model), pytest.raises(UnsupportedError, match="recomputes a layer of"):
        model(IDS, labels=IDS).loss.backward()


@pytest.mark.parametrize(
    "what", [EDITS["patch"], ss.kv.H2O(3), ss.LoopGuard(64), ss.LoopServe(64), Observe(lambda rows: None)]
)
def test_checkpointed_layers_are_refused(what):
    model = tiny_model("llama")[0].train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with what.on(model), pytest.raises(UnsupportedError, match="runs with gradient checkpointing"):
        model(IDS)
    with what.on(model.eval()):
        model(IDS)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_vector_is_trained_through_add(frozen):
    model = tiny_model("llama")[0].requires_grad_(not frozen)
    ids = torch.arange(5, 16)[None]
    vector = torch.linspace(-0.1, 0.1, model.config.hidden_size).requires_grad_()
    layer = model.model.layers[1]
    hook = layer.register_forward_hook(
        lambda _module, _args, out: (out[0] + vector, *out[1:]) if isinstance(out, tuple) else out + vector
    )
    (want,) = torch.autograd.grad(model(ids, labels=ids).loss, vector)
    hook.remove()
    optimizer = torch.optim.SGD([vector], lr=0.5)
    with ss.Add(vector, "blocks.1.hook_resid_post").on(model):
        losses = []
        for _ in range(2):  # the second call reads what the first step made of it
            optimizer.zero_grad()
            loss = model(ids, labels=ids).loss
            loss.backward()
            losses.append(float(loss))
            if len(losses) == 1:
                torch.testing.assert_close(vector.grad, want)
            optimizer.step()
    assert losses[1] < losses[0]


def test_a_number_that_would_be_taken_for_a_constant_is_refused():
    trained = torch.tensor(0.5, requires_grad=True)
    for make in (
        lambda: ss.Ablate(layer=1, neurons=[3], value=trained),
        lambda: ss.SinkPatch(layer=1, neurons=[3], calibrated={(1, 3): trained}),
    ):
        with refused("would be taken for a constant: give a plain number; a vector trains through Add"):
            make()
