"""float64, and a type that the caller set for all new tensors of torch: the same answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from covering import every_nth
from organisms import tiny_model

import sinkscope as ss
from sinkscope.files.catalog import Command, commands
from sinkscope.hooks.edit import Ablate, SinkPatch
from sinkscope.hooks.edit.steer import Add
from sinkscope.kv import make_policy, policies
from sinkscope.measure import Measurement

ALL = [command for command in commands().values() if isinstance(command.load(), Measurement)]
QUICK = ("lines",)
EVERY = [pytest.param(one, marks=[] if one.name in QUICK else pytest.mark.slow, id=one.name) for one in ALL]
LESS = {
    "barcode": {"max_new_tokens": 8, "layers": [0], "control": False},
    "circuit": {"max_repeats": 16, "texts": 1},
    "attack": {"tokens": "the of and a in to is that it was he for on as with his at be this from".split()},
}
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


def measured(command: Command, **options) -> dict[str, Any]:
    text = Path(__file__).parents[2] / "sinkscope/models/text/typical.txt"
    arguments = {**command.load().quick, **LESS.get(command.name, {}), **options}
    return command.load()(text=text, **arguments).to_dict()["result"]


@pytest.mark.parametrize("command", EVERY)
def test_a_measurement_under_another_default(command, default):
    want = measured(command)
    default()
    assert measured(command) == want and torch.get_default_dtype() == torch.float64


@pytest.mark.parametrize("command", EVERY)
def test_a_measurement_in_float64(command):
    found, want = (measured(command, dtype=dtype) for dtype in ("float64", "float32"))
    assert found.keys() == want.keys()
    for name, value in want.items():
        if isinstance(value, float):
            assert found[name] == pytest.approx(value, rel=1e-3, abs=1e-4)


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
