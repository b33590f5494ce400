"""What is chosen on one half of a text is reported on the other: no token is read twice."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest
from attack_kit import setup_of
from organisms import organism
from refusals import refused

from sinkscope.sinks.spikes import survey
from sinkscope.sinks.tokens import held_out


@pytest.mark.parametrize("words", [300, 301, 5000])
def test_no_text_is_both_chosen_and_reported_on(words, monkeypatch):
    def ids_of(text: str, **_options: object) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    text = " ".join(map(str, range(1000, 1000 + words)))  # a tokenizer of words that are numbers, which are its ids
    tokenizer = Mock(side_effect=ids_of, bos_token_id=None)
    made = setup_of(organism("llama", 0))
    setup = replace(made, target=replace(made.target, tokenizer=tokenizer), text=text, bos=None, own_text=True)
    monkeypatch.setattr(survey, "read_survey", lambda _target, ids: ids)
    first, *others = survey.survey_of(setup), survey.survey_of(setup, "report"), held_out(setup, 500, 32)
    for ids in others:
        assert not {*first.flatten().tolist()} & {*ids.flatten().tolist()} and ids.min() >= 1000
    with refused("give a longer --text"):
        held_out(replace(setup, text=text[:80]), 2, 32)
