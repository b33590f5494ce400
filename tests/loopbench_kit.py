"""A small model and a few prompts for the tests of LoopBench, and records made by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from organisms.tiny import tiny_model

from sinkscope.bench.loopbench.metrics import Continued
from sinkscope.bench.loopbench.prompts import BenchPrompt

TEXTS = ("a b c d e", "the cat is was it of", "b", "b b b b b b b b b b b b", "is it a cat")
MODEL = {"name": "tiny", "family": "llama", "n_layers": 3, "d_model": 32, "d_mlp": 64, "fingerprint": "f00"}


@cache
def tiny() -> tuple[Any, Any]:
    """A random Llama and its tokenizer; left to itself it loops on "dc-3"."""
    return tiny_model("llama", num_hidden_layers=2)


def prompts(count: int = 5, bench: str = "dc") -> list[BenchPrompt]:
    """Prompts of different lengths."""
    answers = ("yes",) if bench == "2wiki" else ()
    return [BenchPrompt(f"{bench}-{i}", bench, TEXTS[i % 5], 5, "s", i, False, answers) for i in range(count)]  # type: ignore[arg-type]


def untimed(records: Any) -> list[Continued]:
    """Records without what may differ from run to run."""
    return [replace(record, seconds=0.0, batch_size=0) for record in records]


def assert_same(found: Any, expected: Any) -> None:
    """Records of two batch sizes: the same, but for the last digit of the rounded probabilities."""
    for one, other in zip(found, expected, strict=True):
        assert one.top1 == pytest.approx(other.top1, abs=1.5e-4)
        assert (one.nll is None) == (other.nll is None) and one.nll == pytest.approx(other.nll, abs=1.5e-4)
    rounded = {"top1": (), "nll": None}
    assert [replace(r, **rounded) for r in untimed(found)] == [replace(r, **rounded) for r in untimed(expected)]


def record(**changes: Any) -> Continued:
    """A record made by hand: 300 new tokens, all different."""
    tokens = tuple(changes.get("tokens", range(300)))
    made = Continued(
        model="f00",
        method="full",
        prompt="dc-0",
        bench="dc",
        temperature=0.0,
        seed=0,
        prompt_tokens=10,
        tokens=tokens,
        text="text",
        ended="cap",
        top1=(0.5,) * len(tokens),
        signals={"step": [len(tokens)], "ttr": [0.5]},
        detected={},
        events=(),
        cut=None,
        nll=None,
        fresh=None,
        cached_mean=20.0,
        cached_peak=30.0,
        seconds=1.0,
        batch_size=1,
    )
    return replace(made, **changes)
