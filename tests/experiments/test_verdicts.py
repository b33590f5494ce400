"""Scripts about one verdict: their sums against plain ones."""

from __future__ import annotations

from typing import Any

import pytest
from repository import ROOT
from transformers import AutoTokenizer

from experiments.loopguard import verdicts
from sinkscope.loops import check

CHECKER = verdicts.RULES["checker"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(ROOT / "sinkscope/models/bundled")


def test_honest_texts_are_counted_by_checker_and_guard(tokenizer: Any) -> None:
    halves = {half: verdicts.honest_texts(half) for half in ("choose", "report")}
    assert [len(texts) for texts in halves.values()] == [64, 64]
    assert not {text["form"] for text in halves["choose"]} & {text["form"] for text in halves["report"]}
    row = verdicts.of_honest(CHECKER, {"bundled": tokenizer}, "choose")
    looping: list[str] = []
    for text in halves["choose"]:
        if check(text["answer"], prompt=text["prompt"]).exit_code == 3:
            looping.append(text["form"])
    assert row["texts"] == 64 and row["checker"] == looping
    assert {*row["bundled"]} & {*looping}
