"""A measurement says the same whatever surrounds it, disturbs no other thread, and leaves everything as it was."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from calls_kit import calls, edits, measured
from covering import covering
from same_kit import differences, plain
from surroundings import SURROUNDINGS, state_of
from transformers import AutoConfig
from ways.model_copies import bundled

import sinkscope as ss
from sinkscope.hooks.edit import SinkPatch

pytestmark = [
    pytest.mark.few_texts,
    pytest.mark.filterwarnings("ignore::sinkscope.errors.SinkscopeWarning"),  # of settings that are not used
    pytest.mark.filterwarnings("ignore:`torch.compile`"),
]


def given_patch(model: Any, *, tokenizer: Any) -> Any:
    patch = SinkPatch(layer=1, neurons=[3])
    return ss.patch(model, file=patch, tokenizer=tokenizer, max_repeats=8, pieces=2, length=16)


CONFIG = AutoConfig.from_pretrained(Path(ss.__file__).parent / "models/bundled")
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    **calls(CONFIG),
    "a given patch": partial(measured, given_patch),
}
MEASUREMENTS = [name for name in CALLS if name not in {"trace", "generate", *edits(CONFIG)}]
"""Each measurement, and the guard; edits and traces are of the net of ways."""


QUICK = {
    "a thread that calls": "lines",
    "a thread that writes": "barcode",
    "a thread that edits": "find_sinks",
    "a thread that measures": "lines",
    "dropout": "attack",
    "gradient checkpointing": "a given patch",
    "no gradients": "lines",
    "eager attention": "find_sinks",
    "settings of generate": "why_loop",
    "settings of the tokenizer": "find_sinks",
    "hooks": "LoopGuard",
    "a wrapped forward": "probability",
    "other seeds": "attack",
    "inference mode": "repeat",
    "float64 by default": "repeat",
    "the meta device by default": "find_sinks",
    "deterministic algorithms": "barcode",
    "numpy raises": "find_sinks",
    "warnings are errors": "why_loop",
    "torch.compile": "lines",
    "a copy": "probability",
    "a pickled copy": "LoopGuard",
}
"""Which measurement each surrounding meets by default."""
OF_THE_CALLER = {("LoopGuard", one) for one in ("dropout", "gradient checkpointing", "the meta device by default")}
"""What acts in calls that a guard watches, and in no measurement."""
EVERY = [(name, one) for one in SURROUNDINGS for name in MEASUREMENTS if (name, one) not in OF_THE_CALLER]
CASES = covering(EVERY, {(name, one) for one, name in QUICK.items()})


def said(name: str, model: Any, tokenizer: Any) -> Any:
    """What a measurement says."""
    return plain(CALLS[name](model, tokenizer))


@cache
def alone(name: str) -> Any:
    """What a measurement says of a model that nothing surrounds."""
    model = bundled()
    return said(name, model, model.tokenizer)


@pytest.mark.parametrize(("name", "surrounding"), CASES)
def test_a_measurement_says_the_same_whatever_surrounds_it(name, surrounding):
    model = bundled()
    tokenizer = model.tokenizer
    with SURROUNDINGS[surrounding](model) as surrounded:
        before = state_of(model)
        found = said(name, surrounded, tokenizer)
        after = state_of(model)
    assert differences(alone(name), found, 2e-3) == []
    for what in before:
        assert "thread" in surrounding or before[what] == after[what], what
