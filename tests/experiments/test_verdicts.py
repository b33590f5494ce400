"""What the checker and the guard say of honest texts is what is committed."""

from __future__ import annotations

import pytest
from repository import FIGURES, ROOT
from transformers import AutoTokenizer

from experiments.loopguard import verdicts
from experiments.record import earlier

RECORDED = earlier(FIGURES / "loopguard_verdicts.json")


def test_the_halves_of_honest_texts_share_no_form() -> None:
    choose, report = ({text["form"] for text in verdicts.honest_texts(half)} for half in verdicts.HALVES)
    assert not choose & report


@pytest.mark.parametrize("half", verdicts.HALVES)
def test_honest_texts_are_counted_by_checker_and_guard(half: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "sinkscope/models/bundled")
    row = verdicts.of_honest(verdicts.RULES["checker"], {"bundled": tokenizer}, half)
    own = row.pop("bundled")
    assert row.items() <= RECORDED[f"checker, {half}"].items()
    assert {*own} & {*row["checker"]}
