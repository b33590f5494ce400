"""Edits act on compiled models as on plain ones, or are refused: they are never lost in silence."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from edit_kit import EDITS, IDS, MASK, PATCH, decode
from kv_kit import model_of
from refusals import refused
from torch import nn

from sinkscope import trace
from sinkscope.kv import H2O
from sinkscope.opening.live import target_of


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()  # or it gives up after some variants of the same code


class Backend:
    """A compiler that counts how often what it made is run."""

    def __init__(self):
        self.runs = 0

    def __call__(self, graph, _inputs):
        def run(*args):
            self.runs += 1
            return graph.forward(*args)

        return run


def _part(path: str):
    def compiled(model, compile):
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, compile(model.get_submodule(path)))
        return model

    return compiled


def _forward(path: str):
    def compiled(model, compile):
        part = model.get_submodule(path)
        part.forward = compile(part.forward)
        return model

    return compiled


def _in_place(path: str):
    def compiled(model, compile):
        model.get_submodule(path).compile(**compile.keywords)
        return model

    return compiled


class Outside(nn.Module):
    """A function around a model, called as the model is."""

    def __init__(self, model, compile):
        super().__init__()
        self.config = model.config
        self.called = compile(lambda **options: model(**options))

    def forward(self, **options):
        return self.called(**options)


WAYS = {
    "forward": _forward(""),
    "the model": lambda model, compile: compile(model),
    "a function around it": Outside,
    "a layer's forward": _forward("model.layers.1"),
    "a layer in place": _in_place("model.layers.1"),
    "an MLP": _part("model.layers.1.mlp"),
}


@pytest.fixture(scope="module")
def plain():
    return model_of("llama", num_hidden_layers=2).requires_grad_(False)


@pytest.fixture(scope="module")
def expected(plain):
    found = {}
    for name, edit in EDITS.items():
        with edit.on(plain):
            found[name] = decode(plain, IDS, MASK, 9)
    return found


QUICK = ("an MLP",)


@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way in QUICK else pytest.mark.slow) for way in WAYS])
def test_edits_of_a_compiled_model_act_as_on_a_plain_one(way, plain, expected):
    backend = Backend()
    model = copy.deepcopy(plain)
    call = WAYS[way](model, partial(torch.compile, backend=backend))
    stock = decode(call, IDS, MASK, 9)
    assert torch.allclose(stock, decode(plain, IDS, MASK, 9), atol=1e-5)
    compiled_runs = backend.runs
    assert compiled_runs
    for name, edit in EDITS.items():
        with edit.on(model):
            got = decode(call, IDS, MASK, 9)
        assert torch.allclose(got, expected[name], atol=1e-5), name
        assert name in ("observe", "guard") or (got - stock).abs().max() > 1e-4, name
    norms = trace(model, IDS[:1], ["blocks.*.hook_resid_post"], reduce="norm")
    for site, values in trace(plain, IDS[:1], ["blocks.*.hook_resid_post"], reduce="norm").items():
        assert torch.allclose(norms[site], values)
    assert backend.runs == compiled_runs  # nothing compiled ran meanwhile
    assert torch.equal(decode(call, IDS, MASK, 9), stock) and backend.runs > compiled_runs


def test_a_compiled_model_itself_can_be_given(plain, expected):
    compiled = torch.compile(copy.deepcopy(plain), backend=Backend())
    with EDITS["ablate"].on(compiled):
        assert torch.allclose(decode(compiled, IDS, MASK, 9), expected["ablate"], atol=1e-5)


@pytest.mark.slow
def test_what_is_compiled_inside_the_with_is_the_plain_model_after_it(plain, expected):
    backend = Backend()
    model = copy.deepcopy(plain)
    stock = decode(plain, IDS, MASK, 9)
    with EDITS["ablate"].on(model):
        compiled = torch.compile(model, backend=backend)
        assert torch.allclose(decode(compiled, IDS, MASK, 9), expected["ablate"], atol=1e-5)
    assert torch.allclose(decode(compiled, IDS, MASK, 9), stock, atol=1e-5) and backend.runs


class Wrapper(nn.Module):
    """As adapters do it: a branch beside what it wraps."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        return self.inner(hidden) + 0.1 * self.inner.weight.sum(0).mean() * hidden.mean()


@pytest.mark.parametrize("path", ["model.layers.1.mlp.down_proj", "model.layers.1.mlp", "model.layers.1"])
@pytest.mark.parametrize("edit", [EDITS["ablate"], PATCH, PATCH | H2O(budget=6)])
def test_a_module_replaced_inside_the_with_is_refused(path, edit, plain):
    model = copy.deepcopy(plain)
    other = copy.deepcopy(model.get_submodule(path))
    new = Wrapper(model.get_submodule(path)) if path.endswith("down_proj") else other
    with refused(r"model.layers.1.mlp.down_proj of .* was replaced inside the `with`"), edit.on(model):
        decode(model, IDS, MASK, 9)
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, new)
        decode(model, IDS, MASK, 9)


def test_an_edit_whose_module_never_runs_is_an_error_at_the_end(plain):
    model = copy.deepcopy(plain)
    mlp = model.model.layers[1].mlp

    def fused(hidden):
        gated = mlp.act_fn(nn.functional.linear(hidden, mlp.gate_proj.weight)) * mlp.up_proj(hidden)
        return nn.functional.linear(gated, mlp.down_proj.weight)

    edit = EDITS["ablate"]
    target = target_of(model)
    mlp.forward = fused  # after the adapter was inferred
    with refused("model.layers.1.mlp.down_proj of .* never ran while the model did"), edit.on(target):
        decode(model, IDS, MASK, 9)
    with edit.on(target):  # the model did not run
        pass
    with pytest.raises(ZeroDivisionError), edit.on(target):  # what the caller's code raises comes first
        decode(model, IDS, MASK, 9)
        raise ZeroDivisionError
