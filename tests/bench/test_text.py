"""How near methods stay to full attention: every number against a dense model under a mask, or the planted answer."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from bench_kit import tiny, words
from kv_kit import logits_of
from refusals import refused

from sinkscope.bench.benchmark import run as run_bench
from sinkscope.bench.record import Answer, BenchRecord
from sinkscope.bench.tasks.text import TextFidelity, mean_metrics
from sinkscope.files.store import json_lines

LENGTHS = {"a": (40, 9), "b": (25, 5), "c": (33, 1)}


def compared(folder: Path, methods: list[str], **options) -> dict[Any, BenchRecord]:
    """Records by method and prompt."""
    rows: list[dict[str, Any]] = []
    for name, (prompt, answer) in LENGTHS.items():
        rows.append({"id": name, "prompt": words(prompt), "answers": [words(answer, 3)]})
    file = folder / "prompts.jsonl"
    file.write_text(json_lines(rows))
    model, tokenizer = tiny()
    records = run_bench(model, TextFidelity(source=str(file)), methods, tokenizer=tokenizer, **options)
    return {(record.method, record.prompt): record for record in records}


SEES = {  # of the causal keys, which each query sees after a prompt of n tokens
    "streaming:16": lambda query, key, n: (query < n) | (key < 4) | (key >= query - 12),
    "a-shape:first=2:local=7": lambda query, key, n: (query >= n) | (key < 2) | (query - key < 7),
    "tri-shape:0.5": lambda query, key, n: (query >= n - 4) | (key < 4) | (query - key < n // 2 - 4),
}


@pytest.mark.parametrize("method", SEES)
def test_one_forward_call_under_a_mask_gives_the_same(tmp_path: Path, method: str):
    """What a step can read is known in closed form here, so a dense model with that mask says everything at once."""
    found = compared(tmp_path, [method], batch_size=3)
    assert max(value for record in found.values() for value in record.steps["kl"]) > 0.01
    for name, (prompt, answer) in LENGTHS.items():
        ids = torch.tensor(tiny()[1](f"{words(prompt)} {words(answer, 3)}")["input_ids"][:-1])
        n = len(ids) - answer + 1
        at = torch.arange(len(ids))
        causal = at <= at[:, None]
        seen = causal & SEES[method](at[:, None], at, n)
        full, other = (logits_of(tiny()[0], ids, sees)[n - 1 :] for sees in (causal, seen))
        terms = torch.nn.functional.kl_div(other.log_softmax(-1), full.softmax(-1), reduction="none").sum(-1)
        record = found[method, name]
        assert list(record.steps["kl"]) == pytest.approx(terms.tolist(), abs=5e-5)
        assert list(record.steps["agree"]) == (full.argmax(-1) == other.argmax(-1)).tolist()
        read = seen[n:].sum(1).tolist()
        assert record.metrics["read"] == (pytest.approx(fmean(read), abs=1e-3) if read else None)
        cells = float(seen[:n, :n].sum()) / (n * (n + 1) / 2)  # a policy hides none of the prompt, and counts none
        assert record.metrics["cells"] == (None if cells == 1 else pytest.approx(cells, abs=1e-4))


def test_prompts_without_an_answer_are_refused(tmp_path: Path):
    file = tmp_path / "p.jsonl"
    file.write_text(json_lines([{"prompt": "is it", "answers": ["a"]}, {"prompt": "is", "answers": [""]}]))
    model, tokenizer = tiny()
    with refused("prompt '1' has no answer to compare along: give a text"):
        run_bench(model, TextFidelity(source=str(file)), ["full"], tokenizer=tokenizer, batch_size=2)


@pytest.mark.parametrize(
    ("first_lossy", "cells", "expected"),
    [
        (3, None, 4.0),  # the first token and two steps read everything
        (None, None, 2.5),  # nothing was left out
        (3, 0.4, 2.5),  # the prompt was
    ],
)
def test_steps_that_read_everything_are_not_averaged(first_lossy: int | None, cells: float | None, expected: float):
    steps = {"kl": (1.0, 2.0, 3.0, 4.0)}
    metrics = {"cells": cells, "first_lossy": first_lossy}
    answer = Answer(tokens=(1, 2, 3, 4), text="", ended="cap", metrics=metrics, steps=steps)
    assert mean_metrics(answer) == {"kl": expected, "first": 1.0}
