"""Scripts about one verdict: their sums against plain ones."""

from __future__ import annotations

from typing import Any

import pytest
from repository import ROOT
from transformers import AutoTokenizer

from experiments.loopguard import verdicts
from sinkscope.loops import check

WAITING = verdicts.SETTINGS["data waits for 512 tokens"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(ROOT / "sinkscope/models/bundled")


def test_honest_texts_are_counted_by_checker_and_guard(tokenizer: Any) -> None:
    halves = {half: verdicts.honest_texts(half) for half in ("choose", "report")}
    assert [len(texts) for texts in halves.values()] == [64, 64]
    assert not {text.form for text in halves["choose"]} & {text.form for text in halves["report"]}
    row = verdicts.of_honest(WAITING, {"bundled": tokenizer}, "choose")
    looping: list[str] = []
    for text in halves["choose"]:
        if check(text.answer, prompt=text.prompt).exit_code == 3:
            looping.append(text.form)
    assert row["texts"] == 64 and row["checker"] == looping
    assert {one.removeprefix("bundled: ") for one in row["disagree"]} == {*row["bundled"]} ^ {*looping}


def test_outputs_that_come_later_or_no_more_are_counted(tokenizer: Any) -> None:
    prose, code = ("the bird and the stone, " * 60).strip(), "x_1 = x_1 + y_1;\n" * 12
    outputs = [{"tokens": tokenizer(text)["input_ids"]} for text in (prose, code, code * 8, "A bird sang.")]
    row = verdicts.of_loops(WAITING, tokenizer, outputs)
    assert (row["outputs"], row["later"], row["no_more"], row["reported"]) == (4, 1, 1, 1)
    assert row["cut"] == 2 and row["delay_most"] > 100 and row["checker_disagrees"] == 0
