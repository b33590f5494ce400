"""However a model is wrapped, converted, compiled, called or interrupted, an edit acts as on the plain model, or is
refused. It never does nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
from covering import covering, each_other
from edit_kit import EDITS, IDS, MASK
from kv_kit import decode, model_of
from refusals import refused
from torch import nn
from ways.settings import Around

from sinkscope.errors import SinkscopeError
from sinkscope.opening.live import target_of

DOWN = "model.layers.1.mlp.down_proj"


def put(model: nn.Module, path: str, made: Callable[[nn.Module], nn.Module]) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, made(model.get_submodule(path)))


def run(model: nn.Module, call: Callable | None = None) -> torch.Tensor:
    return decode(model, IDS, MASK, 9, call=call)


def before(change: Callable[[nn.Module], object]):
    """A change of the model before the `with`."""

    def way(model, edit):
        change(model)
        with edit.on(model):
            return run(model)

    return way


def inside(change: Callable[[nn.Module], object]):
    """A change of the model inside the `with`, after a first call."""

    def way(model, edit):
        with edit.on(model):
            run(model)
            change(model)
            return run(model)

    return way


def copied_inside(model, edit):
    with edit.on(model):
        return run(copy.deepcopy(model))


class Backend:
    """A compiler that counts how often what it made is run."""

    def __init__(self):
        self.runs = 0

    def __call__(self, graph, _inputs):
        def counted(*args):
            self.runs += 1
            return graph.forward(*args)

        return counted


def compiled(change: Callable[[nn.Module, Callable], Callable | None]):
    """A model of which something is compiled: nothing of it runs under an edit, and all of it before and after."""

    def way(model, edit):
        torch.compiler.reset()  # or it gives up after some variants of the same code
        backend = Backend()
        call = change(model, partial(torch.compile, backend=backend))
        plain = run(model, call)
        runs = backend.runs
        assert runs and torch.allclose(plain, PLAIN["logits"], atol=1e-5)
        with edit.on(model):
            found = run(model, call)
        assert backend.runs == runs
        assert torch.equal(run(model, call), plain) and backend.runs > runs
        return found

    return way


def compiled_inside(model, edit):
    torch.compiler.reset()
    backend = Backend()
    with edit.on(model):
        call = torch.compile(model, backend=backend)
        found = run(model, call)
    assert torch.allclose(run(model, call), PLAIN["logits"], atol=1e-5) and backend.runs
    return found


WAYS = {
    "wrapped attention": before(lambda model: put(model, "model.layers.0.self_attn", Around)),
    "weights assigned inside": inside(
        lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    ),
    "another attention inside": inside(lambda model: model.set_attn_implementation("sdpa")),
    "copied inside": copied_inside,
    "compiled MLP": compiled(lambda model, compile: put(model, "model.layers.1.mlp", compile)),
    "compiled, but inside": compiled_inside,
}
REFUSED = {way for way in WAYS if way.endswith(" inside")}
"""Ways in which some edit is refused."""
PLAIN: dict[str, torch.Tensor] = {}


@pytest.fixture(scope="module")
def plain():
    model = model_of("llama", num_hidden_layers=2).requires_grad_(False)
    PLAIN["logits"] = run(model)
    return model


@pytest.fixture(scope="module")
def expected(plain):
    found = {}
    for name, edit in EDITS.items():
        with edit.on(plain):
            found[name] = run(plain)
    return found


COMPILED = [way for way in WAYS if "compiled" in way]
CASES = each_other([way for way in WAYS if way not in COMPILED], EDITS, len(EDITS))
CASES += covering(product(COMPILED, EDITS), {("compiled MLP", "patch and h2o")})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("way", "name"), CASES)
def test_an_edit_acts_as_on_the_plain_model_or_is_refused(way, name, plain, expected):
    model = copy.deepcopy(plain)
    try:
        found = WAYS[way](model, EDITS[name])
    except SinkscopeError as error:
        assert "\n" not in str(error)
        found = None
        assert way in REFUSED
    if found is not None:
        assert torch.allclose(found.float(), expected[name], atol=1e-5)


@pytest.mark.parametrize("path", [DOWN, "model.layers.1"])
def test_a_module_replaced_inside_the_with_is_refused(path, plain):
    with refused(rf"{DOWN} of .* was replaced inside the `with`"):
        inside(lambda model: put(model, path, copy.deepcopy))(copy.deepcopy(plain), EDITS["patch and h2o"])


def test_an_edit_whose_module_never_runs_is_an_error_at_the_end(plain):
    model = copy.deepcopy(plain)
    mlp = model.model.layers[1].mlp

    def fused(hidden):
        gated = mlp.act_fn(nn.functional.linear(hidden, mlp.gate_proj.weight)) * mlp.up_proj(hidden)
        return nn.functional.linear(gated, mlp.down_proj.weight)

    edit = EDITS["ablate"]
    target = target_of(model)
    mlp.forward = fused  # after the adapter was proposed
    with refused("model.layers.1.mlp.down_proj of .* never ran while the model did"), edit.on(target):
        run(model)
    with edit.on(target):  # the model did not run
        pass
    with pytest.raises(ZeroDivisionError), edit.on(target):  # what the caller's code raises comes first
        run(model)
        raise ZeroDivisionError
