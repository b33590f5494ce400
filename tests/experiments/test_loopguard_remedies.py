"""What remedies did: the counts of outputs written by hand, and the choices of the guard."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch

from experiments.loopguard import outcome
from experiments.loopguard.remedies import PRINTED, surprise

FRESH, LOOP = list(range(40)), [*range(10), *[7] * 30]


def output(number: int, tokens: list[int], acts: list[list[int]], nll: float, counted: int, **more):
    told = {"alarm": None, "ended": False, "streak": 0, "family": "scenes", "number": number}
    return {"tokens": tokens, "acts": acts, "nll": nll, "counted": counted, **told, **more}


def test_a_row_counts_what_was_planted():
    """Two outputs alarm without a guard; one of them still loops. The healthy one is changed."""
    full = {
        ("scenes", 0): output(0, FRESH, [], 8.0, 8),
        ("scenes", 1): output(1, LOOP, [], 9.0, 9, alarm=20, streak=6),
        ("scenes", 2): output(2, LOOP, [], 9.0, 9, alarm=20),
    }
    guarded = [
        output(0, FRESH[:-1], [], 8.0, 8),
        output(1, FRESH, [[20, 5], [31, 3]], 20.0, 10, ended=True),
        output(2, LOOP, [[20, 6]], 1.0, 10),
    ]
    row = outcome.summary("LoopGuard", guarded, full)
    assert (row["loops"], row["outputs"], row["healthy"], row["changed"]) == (1, 3, 1, 1)
    assert row["acts"] == 1.5
    assert (row["looping"], row["met"], row["sure"]) == (2, 2, 1)
    assert row["perplexity"] == pytest.approx(math.exp(2)), "without the output that loops"
    assert row["own"] == pytest.approx(math.e) and row["ratio"] == pytest.approx(math.e)
    assert outcome.summary("full", list(full.values()), full)["perplexity"] is None


def test_the_streak_counts_confident_tokens_in_a_row():
    def model(ids, use_cache):
        logits = torch.zeros(1, ids.shape[1], 9)
        logits[0, [2, 3, 5, 6, 7], 4] = 9.0
        return SimpleNamespace(logits=logits)

    found = surprise(model, [1, 2], [4] * 8, 1)
    assert (found["counted"], found["streak"]) == (7, 3), "the third of them is sure again, after one that is not"


def test_the_rows_are_those_of_a_folder_of_outputs(tmp_path):
    setting = {"model": "m", "new": 40, "temperature": 0.0}
    with (tmp_path / "runs.jsonl").open("w") as file:
        for method, tokens, acts in (("full", LOOP, []), (PRINTED, LOOP, [[20, 0]]), ("LoopGuard", FRESH, [[20, 4]])):
            file.write(json.dumps(output(0, tokens, acts, 8.0, 8, alarm=20, method=method, **setting)) + "\n")
    outcome.main(tmp_path, out=tmp_path)
    made = json.loads((tmp_path / "loopguard_choices.json").read_text())
    assert [row["method"] for row in made["result"]["settings"][0]["rows"]] == ["full", PRINTED]
