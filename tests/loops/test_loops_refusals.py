"""Calls about loops that make no sense, refused in one line that says what was expected."""

from __future__ import annotations

import pytest
from organisms import tiny_model
from refusals import refused

import sinkscope as ss
from sinkscope.loops import Monitor, MonitorSettings, PaperSettings, check, compression_ratio, tail_period


def generate(prompts, **settings):
    model, tokenizer = tiny_model("llama")
    ss.generate(model, prompts, **{"tokenizer": tokenizer, **settings})


CALLED = {
    one.__name__: one
    for one in (Monitor, MonitorSettings, PaperSettings, check, compression_ratio, tail_period, generate)
}
CALLED["ss"] = ss
TOKEN = "expected a whole number from 0 to 2**32 - 1"
REFUSED = {
    "ss.loops.DRY(multiplier=0.0)": ["multiplier"],
    "ss.loops.DRY(base=0.5)": ["base"],
    "ss.loops.DRY(allowed_length=0)": ["allowed_length"],
    "Monitor().update(-1)": ["the token is -1", TOKEN],
    "Monitor().update(1 << 32)": ["the token is 4294967296", TOKEN],
    "Monitor().update('a')": ["the token is 'a'", TOKEN],
    "PaperSettings(votes=4)": ["votes=4: expected less than or equal to 3"],
    "compression_ratio([1, -2])": ["the token is -2: expected a whole number"],
    "compression_ratio([1 << 32])": ["the token is 4294967296: expected a whole number"],
    "tail_period([1, 1], repeats=1)": ["at least 2 copies"],
    "check([])": ["cannot be checked"],
    "check([[1], [2.5]])": ["cannot be checked"],
    "check([True, False])": ["cannot be checked"],
    "generate(['the dog', ' \\n'])": ["prompt 2 is empty"],
    "generate('the ' * 1024)": ["1025 tokens", "1024", "shorten"],
    "generate('the ' * 1000, max_new_tokens=50)": ["1001 tokens and 50 more", "context", "1024", "at most 23"],
    "generate('the', temperature=-0.5)": ["temperature=-0.5"],
    "generate('the', tokenizer=None)": ["no tokenizer"],
}


@pytest.mark.parametrize(("call", "says"), REFUSED.items())
def test_calls_about_loops_are_refused(call, says):
    with refused(words=says):
        eval(call, CALLED)
