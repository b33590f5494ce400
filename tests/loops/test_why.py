"""What keeps a loop going: planted causes, and what is removed how."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from organisms.kept_loops import CASES, kept_loop
from refusals import refused

from sinkscope.hooks.edit import Knockout
from sinkscope.loops.text.signals import Tail
from sinkscope.loops.why import Cause, LoopedText, Tried, WhyLoop, causes_of, why_loop
from sinkscope.opening.load import load
from sinkscope.results.mean import Mean

CYCLE = [5, 6, 7]
CONTINUED = 18  # three periods of the planted loops
SETUP: Any = SimpleNamespace(edit=None, seed=0)


def looped(before: int = 40) -> LoopedText:
    """A loop of period 3 behind so many other tokens."""
    return LoopedText(SETUP, [*range(100, 100 + before), *CYCLE * 9], 1, Tail(3, before, 9.0))


@pytest.mark.slow
@pytest.mark.parametrize(("causes", "seed"), CASES)
def test_every_planted_cause_is_reported(causes: tuple[str, ...], seed: int):
    made = kept_loop(causes, seed)
    found = why_loop(made.model, made.turn, tokenizer=made.tokenizer, max_new_tokens=48, cuts=6)
    assert (set(found.kept_by), found.goes_on) == (set(causes), 1.0)


@pytest.fixture
def _few_tokens(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sinkscope.loops.why.CONTINUED", CONTINUED)


@pytest.mark.usefixtures("_few_tokens")
def test_planted_causes_are_found():
    made = kept_loop(("copies", "sink"))
    found = why_loop(made.model, made.turn, tokenizer=made.tokenizer, max_new_tokens=32)
    assert (found.kept_by, found.goes_on) == (("copies", "sink"), 1.0)
    assert list(found.ids[found.prompt_tokens :][4:10]) == made.cycle
    assert [row.share.value for row in found.tried[:3]] == [0, 0, 0]


@pytest.mark.usefixtures("_few_tokens")
def test_why_explains_a_given_answer():
    made = kept_loop(("sink",))
    explain = partial(why_loop, made.model, tokenizer=made.tokenizer, cuts=3)
    given = explain(made.turn, answer=made.cycle * 4)
    assert given.kept_by == ("sink",) and len(given.ids) == given.prompt_tokens + 24
    (hidden,) = (row for row in given.tried if row.key == "sink_from_start")
    text, written = LoopedText(SETUP, list(given.ids), 1, Tail(6, 40, 9.0)), list[bool]()
    for cut in given.cuts:  # by `generate` with the first token hidden from the start
        with Knockout([0]).on(made.model):
            out = made.model.generate(torch.tensor([given.ids[:cut]]), max_new_tokens=CONTINUED, do_sample=False)
        written.append(text.goes_on(out[0, cut:].tolist()))
    assert hidden.share.value == sum(written) / 3
    # The model does not write this loop: nothing is concluded of what it does without a cause.
    other = explain(made.turn, answer=[300, 301, 302, 303, 304, 305] * 6)
    assert other.kept_by == () and other.conclusion().startswith("Undecided: the loop of 6 tokens goes on in 0 of 3")
    walk = explain(made.turn[:20], answer=made.turn[:20])
    assert walk.conclusion() == "The 20 tokens after the prompt end in no loop." and walk.rows() == []
    with refused(r"text up to a cut has \d+ tokens and 18 more are to come"):
        explain(made.cycle * 169, answer=made.cycle)


@pytest.mark.usefixtures("_few_tokens")
def test_white_space_after_a_given_answer_is_no_part_of_the_loop():
    assert why_loop(load(), "One day", answer=f"{' the bird said the bird.' * 20} \n\n", cuts=3).period == 6


@pytest.mark.usefixtures("_few_tokens")
def test_a_loop_at_the_beginning_of_the_prompt_has_its_control_in_ordinary_text():
    made = kept_loop(("copies",))
    found = why_loop(made.model, [made.turn[0], *made.cycle * 4], tokenizer=made.tokenizer, max_new_tokens=24)
    copies = found.tried[0]
    assert (found.goes_on, copies.key, copies.share.value) == (1.0, "copies", 0.0)
    assert copies.control is not None
    assert found.added > 0
    assert len(found.ids) == 25 + 24, "the text stays as it was"
    assert found.details() == [f"{found.added} tokens of ordinary text stand before the prompt here, for a control."]


@pytest.mark.usefixtures("_few_tokens")
def test_a_cause_whose_control_ends_the_loop_as_often_is_not_needed(monkeypatch: pytest.MonkeyPatch):
    """Here what is removed at random are the copies themselves; the sink keeps its control."""
    made = kept_loop(("copies", "sink"))
    removals = LoopedText.removals

    def with_a_control_that_wins(looped: LoopedText, cut: int) -> dict[str, list[int]]:
        taken = removals(looped, cut)
        return {**taken, "random copies": taken["copies"]}

    monkeypatch.setattr(LoopedText, "removals", with_a_control_that_wins)
    found = why_loop(made.model, made.turn, tokenizer=made.tokenizer, max_new_tokens=32)
    assert [row.share.value for row in found.tried[:2]] == [0, 0]
    assert found.kept_by == ("sink",)
    assert found.conclusion().startswith("Without the sink (the first token), the loop of 6 tokens goes on in 0 of 3")


def without(cause: Cause, share: float, control: float | None = None, other_loop: float = 0.0) -> Tried:
    """The row of a cause: the share that goes on without it, and under its control."""
    of_control = None if control is None else Mean(control)
    return Tried(key=cause, share=Mean(share), control=of_control, other_loop=Mean(other_loop))


def tried(copies: tuple[float, float | None], sink: tuple[float, float | None], context: float) -> list[Tried]:
    """Rows of the causes, each the share that goes on and its control, and of the context."""
    return [without("copies", *copies), without("sink", *sink), without("context", context)]


@pytest.mark.parametrize(
    ("goes_on", "rows", "causes"),
    [
        (1.0, tried((0.5, 0.6), (0.9, 1.0), 0.0), ("copies",)),
        (1.0, tried((0.6, 0.9), (0.0, 1.0), 0.0), ("sink",)),  # more than half of the loops go on without the copies
        (0.6, tried((0.3, 0.4), (0.4, 0.6), 0.0), ("copies",)),
        (0.4, tried((0.0, 0.4), (0.0, 0.4), 0.9), ()),  # the loop hardly goes on by itself
        (1.0, tried((0.0, 0.0), (0.4, 0.4), 0.0), ()),  # the controls end it as often
        (1.0, tried((0.0, 0.0), (0.4, 0.3), 0.0), ()),
        (1.0, tried((0.0, None), (0.9, 1.0), 0.0), ()),  # there was no room for a control
        (1.0, tried((0.9, 1.0), (0.9, 1.0), 0.5), ("weights",)),
        (1.0, tried((0.9, 1.0), (0.9, 1.0), 0.4), ()),
        (1.0, tried((0.2, 1.0), (0.9, 1.0), 1.0), ("copies",)),
    ],
)
def test_causes_are_needed_only_beside_their_controls(goes_on, rows, causes):
    assert causes_of(goes_on, rows) == causes


def test_a_cause_without_room_for_a_control_is_said():
    rows = tried((0.0, None), (0.9, 1.0), 0.0)
    found = WhyLoop(prompt_tokens=1, period=3, cuts=(9, 10, 11), goes_on=1.0, tried=tuple(rows))
    assert found.conclusion().startswith("Undecided, try another prompt")
    (line,) = found.details()
    assert line.startswith("The copies had no control, because fewer random tokens stand before the loop")


@pytest.mark.parametrize(
    ("before", "controlled"), [(1, []), (9, ["sink"]), (10, ["copies", "sink"]), (40, ["copies", "sink"])]
)
def test_removals_are_the_named_tokens_or_as_many_random_ones_before_the_loop(before: int, controlled: list[str]):
    removals, earlier = (looped(before).removals(before + more) for more in (9, 8))
    wanted = {"sink": [0], "copies": [*range(max(1, before), before + 9)], "context": [*range(1, before + 9)]}
    for name, places in (wanted | {"nothing": []}).items():
        assert removals.pop(name) == places
    assert list(removals) == [f"random {one}" for one in controlled]
    for name, places in removals.items():
        assert len({*places}) == len(wanted[name.split()[1]]) and {*places} <= {*range(1, before)}
    assert before < 40 or removals["random copies"][:6] != earlier["random copies"][:6], "others at each cut"


def test_effects_and_what_the_conclusion_says_of_them():
    loop, other = CYCLE * 22, [5, 7, 6] * 22
    written = {"nothing": [loop, loop[1:]], "copies": [other, loop[2:]], "random copies": [loop, loop]}
    found = looped().effect_of("copies", written)
    numbers = (found.share, found.control, found.other_loop)
    assert [number.value for number in numbers] == [0.5, 1.0, 0.5]
    assert not looped().goes_on(CYCLE * 2), "too short"


@pytest.mark.parametrize(
    ("kept_by", "words"),
    [
        (
            ("copies",),
            "Without its copies in the cache, the loop of 3 tokens goes on in 0 of 3 continuations (without as many "
            "random tokens in 1 of 3); another loop follows in 3 of 3.",
        ),
        (
            ("copies", "sink"),
            "Without its copies in the cache or without the sink (the first token), the loop of 3 tokens goes on in 1 "
            "of 3 continuations (without as many random tokens in 2 of 3); another loop follows in 3 of 3.",
        ),
        (
            (),
            "Undecided, try another prompt: the loop of 3 tokens goes on in 0 of 3 without its copies in the cache, 1 "
            "of 3 without the sink (the first token) and 0 of 3 without all tokens but the first.",
        ),
    ],
)
def test_what_the_conclusion_says_of_effects(kept_by, words):
    rows = (without("copies", 0.0, 1 / 3, 1.0), without("sink", 1 / 3, 2 / 3, 1.0), without("context", 0.0))
    found = WhyLoop(prompt_tokens=1, period=3, cuts=(9, 10, 11), goes_on=1.0, tried=rows, kept_by=kept_by)
    assert found.conclusion() == words
