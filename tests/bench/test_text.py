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


def compared(folder: Path, rows: list[Any], methods: list[str]) -> list[BenchRecord]:
    (folder / "prompts.jsonl").write_text(json_lines(rows))
    model, tokenizer = tiny()
    task = TextFidelity(source=str(folder / "prompts.jsonl"))
    return run_bench(model, task, methods, tokenizer=tokenizer, batch_size=3)


SEES = {  # of the causal keys, which each query sees after a prompt of n tokens
    "streaming:16": lambda query, key, n: (query < n) | (key < 4) | (key >= query - 12),
    "tri-shape:0.5": lambda query, key, n: (query >= n - 4) | (key < 4) | (query - key < n // 2 - 4),
}


@pytest.mark.parametrize("method", SEES)
def test_one_forward_call_under_a_mask_gives_the_same(tmp_path: Path, method: str):
    """What a step can read is known in closed form here, so a dense model with that mask says everything at once."""
    texts = {name: (words(prompt), words(answer, 3)) for name, (prompt, answer) in LENGTHS.items()}
    rows = [{"id": name, "prompt": prompt, "answers": [answer]} for name, (prompt, answer) in texts.items()]
    found = compared(tmp_path, rows, [method])
    assert max(value for record in found for value in record.steps["kl"]) > 0.01
    for record in found:
        ids = torch.tensor(tiny()[1](" ".join(texts[record.prompt]))["input_ids"][:-1])
        n, at = len(ids) - LENGTHS[record.prompt][1] + 1, torch.arange(len(ids))
        causal = at <= at[:, None]
        seen = causal & SEES[method](at[:, None], at, n)
        full, other = (logits_of(tiny()[0], ids, sees)[n - 1 :] for sees in (causal, seen))
        terms = torch.nn.functional.kl_div(other.log_softmax(-1), full.softmax(-1), reduction="none").sum(-1)
        assert list(record.steps["kl"]) == pytest.approx(terms.tolist(), abs=5e-5)
        assert list(record.steps["agree"]) == (full.argmax(-1) == other.argmax(-1)).tolist()
        read, cells = seen[n:].sum(1).tolist(), float(seen[:n, :n].sum()) / (n * (n + 1) / 2)
        assert record.metrics["read"] == (pytest.approx(fmean(read), abs=1e-3) if read else None)
        # A policy hides none of the prompt, and counts none.
        assert record.metrics["cells"] == (None if cells == 1 else pytest.approx(cells, abs=1e-4))


def test_prompts_without_an_answer_are_refused(tmp_path: Path):
    with refused("prompt '1' has no answer to compare along: give a text"):
        compared(tmp_path, [{"prompt": "is it", "answers": ["a"]}, {"prompt": "is", "answers": [""]}], ["full"])


@pytest.mark.parametrize(
    ("first_lossy", "cells", "expected"),
    [
        (3, None, 4.0),  # the first token and two steps read everything
        (None, None, 2.5),  # nothing was left out
        (3, 0.4, 2.5),  # the prompt was
    ],
)
def test_steps_that_read_everything_are_not_averaged(first_lossy: int | None, cells: float | None, expected: float):
    metrics, steps = {"cells": cells, "first_lossy": first_lossy}, {"kl": (1.0, 2.0, 3.0, 4.0)}
    answer = Answer(tokens=(1, 2, 3, 4), text="", ended="cap", metrics=metrics, steps=steps)
    assert mean_metrics(answer) == {"kl": expected, "first": 1.0}
