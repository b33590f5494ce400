"""float64, and a type that the caller set for all new tensors of torch: the same answers."""

from __future__ import annotations

import pytest
import torch
from covering import every_nth
from organisms import tiny_model

import sinkscope as ss
from sinkscope.hooks.edit import Ablate, SinkPatch
from sinkscope.hooks.edit.steer import Add
from sinkscope.kv import make_policy, policies

ACTING = {
    **{name: make_policy(name, budget=80) for name in policies()},
    "guard": ss.LoopGuard(64),
    "serve": ss.LoopServe(80),
    "second": SinkPatch(layer=1, neurons=[3]),
    "mean": Ablate(layer=1, neurons=[3], value="mean"),
    "write": Ablate(layer=1, neurons=[3], value=2.0, positions=3),
    "add": Add(torch.ones(32), "blocks.1.hook_resid_post"),
}


@pytest.fixture
def default():
    yield lambda: torch.set_default_dtype(torch.float64)
    torch.set_default_dtype(torch.float32)


def test_a_measurement_under_another_default(default):
    want = ss.lines(count=2, length=64).to_dict()["result"]
    default()
    assert ss.lines(count=2, length=64).to_dict()["result"] == want and torch.get_default_dtype() == torch.float64


@pytest.mark.filterwarnings("ignore:the second token's value is itself like a sink's")
@pytest.mark.parametrize("name", every_nth(ACTING, 2))
def test_what_acts_in_generation_under_another_default(name, default):
    model = tiny_model("llama")[0]
    ids = torch.randint(5, 96, (2, 100), generator=torch.Generator().manual_seed(1))
    ask = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with ACTING[name].on(model):
        want = model.generate(ids, **ask)
    default()
    with ACTING[name].on(model):
        assert torch.equal(model.generate(ids, **ask), want)
    with ACTING[name].on(model.double()):
        model.generate(ids, **ask)
