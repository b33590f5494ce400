"""What is chosen on one half of a text is reported on the other: no character is read twice."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

from attack_kit import setup_of
from hypothesis import given, settings
from hypothesis import strategies as st
from organisms import organism

from sinkscope.errors import SinkscopeError
from sinkscope.models.text import halves_of
from sinkscope.sinks.spikes import survey
from sinkscope.sinks.tokens import held_out

SETUP = setup_of(organism("llama", 0))
FIRST = 0x4E00  # of 20,000 characters that are all different


class Pieces:
    """A tokenizer whose tokens have some characters each, and whose ids say which."""

    bos_token_id = None

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __call__(self, text: str, **_options: object) -> dict[str, list[int]]:
        ids, at = [], 0
        while at < len(text):
            ids.append(ord(text[at]) - FIRST)
            at += self.sizes[len(ids) % len(self.sizes)]
        return {"input_ids": ids}

    def decode(self, ids: list[int]) -> str:
        return str(ids)


@settings(max_examples=50)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    length=st.integers(60, 18_000),
    words=st.integers(0, 40),
    chosen=st.integers(1, 120),
    reported=st.tuples(st.integers(2, 500), st.integers(8, 64)),
)
def test_no_text_is_both_chosen_and_reported_on(sizes, length, words, chosen, reported):
    text = "".join(" " if words and at % words == 1 else chr(FIRST + at) for at in range(length))
    halves = halves_of(text)
    assert halves.choose + halves.report == text and halves.choose and halves.report
    setup = replace(SETUP, target=replace(SETUP.target, tokenizer=Pieces(sizes)), text=text, bos=None, own_text=True)
    read = mock.Mock(side_effect=lambda _target, ids: ids)
    with mock.patch.multiple(survey, read_survey=read, SURVEYED=chosen):
        try:
            first = survey.survey_of(setup)
            second = held_out(setup, *reported)
        except SinkscopeError as error:
            assert "give a longer --text" in str(error) or "is the one token" in str(error)
            return
    spaces = {ord(" ") - FIRST}
    assert not {*first.flatten().tolist()} & {*second.flatten().tolist()} - spaces
