"""Policies by name: sinkscope's own, those of other packages, and classes by their module."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kv_kit import prompts
from refusals import refused

import sinkscope.kv.registry as registry
from sinkscope.kv import (
    H2O,
    LayerMoment,
    Policy,
    SnapKV,
    StreamingLLM,
    policies,
    policy_named,
    register_policy,
)
from sinkscope.loops.guard import LoopGuard

MODULE = """
    from dataclasses import dataclass
    from sinkscope.kv import Policy

    @dataclass(frozen=True, kw_only=True)
    class KeyNorm(Policy):
        first: int = 1
        def scores(self, at):
            return -at.kv.keys.norm(dim=-1)

    @dataclass(frozen=True, kw_only=True)
    class Unfinished(Policy):
        pass

    class Other:
        pass
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "policies_of_others.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    yield "policies_of_others"


NAMES = {
    "h2o:0.25": H2O(budget=0.25),
    "sinkscope.kv.published:StreamingLLM:12": StreamingLLM(budget=12),
    "snapkv:512:window=64:pooling=avg": SnapKV(512, window=64, pooling="avg"),
    "sinkscope.kv.published:StreamingLLM:12:first=2": StreamingLLM(budget=12, first=2),
    "loopguard:64:act=cut": LoopGuard(64, act="cut"),
    "loopguard:steer=none": LoopGuard(steer=None),
    "loopguard": LoopGuard(),
    "loopguard:paper:0.5": LoopGuard.paper(budget=0.5),
}


def test_names_modules_and_budgets(module, model):
    assert {"adakv", "full", "h2o", "progressive", "pyramid", "snapkv", "streaming", "tova"} <= {*policies()}
    for name, policy in NAMES.items():
        assert policy_named(name) == policy
    assert LoopGuard.paper() != LoopGuard()
    made = policy_named(f"{module}:KeyNorm:6")
    assert (made.budget, made.first) == (6, 1)
    ids, mask = prompts([12])
    with made.on(model) as run:
        model.generate(ids, attention_mask=mask, max_new_tokens=4)
    assert run.usage[0].decoding_tokens == [7.0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "lru",
            f"policy 'lru': expected one of {', '.join(policies())}, loopguard, or package",
        ),
        ("h2o:many", "policy 'h2o:many': budget='many': expected a number of tokens"),
        (
            "h2o:64:colour=red",
            "policy 'h2o:64:colour=red': unknown setting 'colour'; known: budget",
        ),
        ("snapkv:64:window=no", "policy 'snapkv:64:window=no': window='no': expected"),
        ("policies_of_others:Missing", "cannot be imported: AttributeError: module 'policies_of_others' has no"),
        ("policies_of_others:Other", "is no cache policy: expected a subclass of sinkscope.kv.Policy"),
        ("policies_of_others:Unfinished", "cannot be made: Can't instantiate abstract class Unfinished"),
        ("no_such_package:KeyNorm", "cannot be imported: ModuleNotFoundError: No module named 'no_such_package'"),
    ],
)
def test_wrong_policy_names_are_refused_in_one_line(text, says, module):
    with refused(words=[says]):
        policy_named(text)


def test_registering_a_name_twice_is_refused(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))  # pyright: ignore[reportPrivateUsage]
    register_policy("mine")(StreamingLLM)
    assert policy_named("mine:9") == StreamingLLM(budget=9)
    with refused(r"two policies are called 'mine', .*StreamingLLM.* and .*H2O.*: give one"):
        register_policy("mine")(H2O)


@dataclass(frozen=True, kw_only=True)
class Scored(Policy):
    """Scores positions by a function, from the given decoded token on."""

    by: Callable[[torch.Tensor], Any]
    since: int = 0

    def scores(self, at: LayerMoment):
        return self.by(at.kv.pos) if at.step.state.decoded >= self.since else at.kv.pos.float()


def without_two(pos: torch.Tensor) -> torch.Tensor:
    return pos.float().masked_fill(pos == 2, torch.nan)


@pytest.mark.parametrize(
    ("by", "since", "says"),
    [
        (
            lambda pos: pos[:, :, 1:],
            0,
            r"a Tensor of shape \(2, 2, \d+\) for layer 0: expected a tensor of shape \(2, 2",
        ),
        (lambda pos: pos.tolist(), 2, r"returned a list of shape \(\) for layer 0"),
        (without_two, 0, "returned NaN for layer 0: slots without a score cannot be compared"),
        (without_two, 2, "returned NaN for layer 0"),
        (lambda pos: pos.float().log(), 0, None),  # no number at padding, and an infinite one
    ],
)
def test_wrong_scores_of_a_policy_are_refused(by, since, says, model):
    ids, mask = prompts([12, 9])
    policy = Scored(budget=8, by=by, since=since, first=3)
    with nullcontext() if says is None else refused(says), policy.on(model):
        model.generate(ids, attention_mask=mask, max_new_tokens=5)
