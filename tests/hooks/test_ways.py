"""On a model that is compiled, changed or copied inside the `with`, an edit acts as on the plain one, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from edit_kit import EDITS, IDS, MASK
from kv_kit import decode, model_of
from refusals import refused
from torch import nn

from sinkscope.opening.load import target_of

DOWN = "model.layers.1.mlp.down_proj"
pytestmark = pytest.mark.filterwarnings("ignore")


def run(model: Any) -> torch.Tensor:
    return decode(model, IDS, MASK, 9)


def put(model: nn.Module, path: str, made: Callable[[nn.Module], nn.Module]) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, made(model.get_submodule(path)))


@pytest.fixture
def model():
    return model_of("llama", num_hidden_layers=2).requires_grad_(False)


def test_a_layer_without_attention_among_those_of_the_cache_is_refused(model):
    class Passing(nn.Module):
        def forward(self, hidden_states, *args, **kwargs):
            return hidden_states

    model.model.layers[1] = Passing()
    with refused("layer 1 of .* has no attention, and its configuration counts it"):
        EDITS["snapkv"].on(model).__enter__()


class Backend:
    """A compiler that counts how often what it made is run."""

    def __init__(self):
        self.runs = 0

    def __call__(self, graph, _inputs):
        def counted(*args):
            self.runs += 1
            return graph.forward(*args)

        return counted


@pytest.mark.parametrize("name", ["patch and h2o", "observe"])
def test_nothing_compiled_runs_under_an_edit_and_all_of_it_before_and_after(name, model):
    with EDITS[name].on(model):
        expected = run(model)
    torch.compiler.reset()  # or it gives up after some variants of the same code
    backend = Backend()
    put(model, "model.layers.1.mlp", partial(torch.compile, backend=backend))
    plain, runs = run(model), backend.runs
    with EDITS[name].on(model):
        assert torch.allclose(run(model), expected, atol=1e-5)
        inside = torch.compile(model, backend=backend)
        assert torch.allclose(run(inside), expected, atol=1e-5)
    assert 0 < runs == backend.runs and torch.equal(run(model), plain) and backend.runs > runs


REPLACED = f"{DOWN} of .* was replaced inside the `with`"
CHANGES = [
    ("was set to 'eager' inside the `with`", lambda model: model.set_attn_implementation("eager")),
    ("a model cannot be copied or pickled while interventions act", copy.deepcopy),
    (REPLACED, lambda model: put(model, DOWN, copy.deepcopy)),
    (REPLACED, lambda model: put(model, "model.layers.1", copy.deepcopy)),
]


@pytest.mark.parametrize(("says", "change"), CHANGES)
def test_what_would_lose_an_edit_is_refused(says, change, model):
    with refused(says), EDITS["patch and h2o"].on(model):
        run(model)
        change(model)
        run(model)


def test_an_edit_whose_module_never_runs_is_an_error_at_the_end(model):
    mlp, edit, target = model.model.layers[1].mlp, EDITS["ablate"], target_of(model)

    def fused(hidden):
        gated = mlp.act_fn(nn.functional.linear(hidden, mlp.gate_proj.weight)) * mlp.up_proj(hidden)
        return nn.functional.linear(gated, mlp.down_proj.weight)

    mlp.forward = fused  # after the adapter was proposed
    with refused(f"{DOWN} of .* never ran while the model did"), edit.on(target):
        run(model)
    with pytest.raises(ZeroDivisionError), edit.on(target):  # what the caller's code raises comes first
        run(model)
        raise ZeroDivisionError
