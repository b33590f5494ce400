"""What keeps a loop going: planted causes, and what is removed how."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kv_kit import close, decode, logits_of, prompts, shallow_of
from organisms.kept_loops import CASES, KeptLoop, kept_loop
from refusals import refused

from sinkscope.hooks.edit import Knockout
from sinkscope.kv.watch import RemoveTokens
from sinkscope.loops.text.signals import Tail
from sinkscope.loops.why import FROM_START, LoopedText, RemovalEffect, WhyLoop, why_loop
from sinkscope.opening.load import load

CYCLE = [5, 6, 7]
BEFORE = [*range(100, 140)]
"""A text without a loop."""
LOOPED = LoopedText(SimpleNamespace(edit=None, seed=0), [*BEFORE, *CYCLE * 9], 2, Tail(3, 40, 9.0))  # pyright: ignore


def asked(made: KeptLoop, cuts: int = 6) -> WhyLoop:
    return why_loop(made.model, made.turn, tokenizer=made.tokenizer, max_new_tokens=48, cuts=cuts)


@pytest.mark.slow
@pytest.mark.parametrize(("causes", "seed"), CASES)
def test_every_planted_cause_is_reported(causes: tuple[str, ...], seed: int):
    found = asked(kept_loop(causes, seed))
    assert (set(found.kept_by), found.goes_on) == (set(causes), 1.0)


@pytest.fixture
def _few_tokens(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sinkscope.loops.why.CONTINUED", 24)


@pytest.mark.usefixtures("_few_tokens")
def test_planted_causes_are_found():
    made = kept_loop(("copies", "sink"))
    found = asked(made, cuts=3)
    assert (found.kept_by, found.goes_on) == (("copies", "sink"), 1.0)
    assert found.conclusion().startswith(
        "Remove one of the copies and the sink, and this loop stops in 100% of 3 cases"
    )
    assert list(found.ids[found.prompt_tokens :][4:10]) == made.cycle
    alone = {tried.without: tried.goes_on for tried in found.tried if tried.without != FROM_START}
    assert alone == {"copies": 0, "sink": 0, "context": 0}


@pytest.mark.usefixtures("_few_tokens")
def test_why_explains_a_given_answer():
    made = kept_loop(("sink",))
    options = {"tokenizer": made.tokenizer, "cuts": 3}
    given = why_loop(made.model, made.turn, answer=made.cycle * 4, **options)
    assert given.kept_by == ("sink",) and len(given.ids) == given.prompt_tokens + 24
    (hidden,) = [tried for tried in given.tried if tried.without == FROM_START]
    assert hidden.goes_on == share_without_the_first(made.model, given, new=24)
    # The model does not write this loop: nothing is concluded of what it does without a cause.
    other = why_loop(made.model, made.turn, answer=[300, 301, 302, 303, 304, 305] * 6, **options)
    assert other.kept_by == () and other.conclusion().startswith("Undecided: the loop of period 6 goes on in 0% of 3")
    walk = why_loop(made.model, made.turn[:20], answer=made.turn[:20], **options)
    assert walk.conclusion() == "The 20 tokens after the prompt end in no loop." and walk.rows() == []
    with refused(r"text up to a cut has \d+ tokens and 24 more are to come"):
        why_loop(made.model, made.cycle * 169, answer=made.cycle, **options)


@pytest.mark.usefixtures("_few_tokens")
def test_white_space_after_a_given_answer_is_no_part_of_the_loop():
    model, answer = load(), " the bird said the bird." * 20
    for end in ("", " \n\n"):
        assert why_loop(model, "One day", answer=answer + end, cuts=3).period == 6


@torch.no_grad()
def test_removed_tokens_are_those_that_a_mask_hides():
    model = shallow_of("llama")
    ids, mask = prompts([20, 20], 4)
    removed = torch.zeros(2, 20, dtype=torch.bool)
    removed[0, [1, 2, 7, 18]] = True
    removed[1, 3:] = True
    with RemoveTokens(removed).on(model):
        found = decode(model, ids, mask, 20)
    for row in range(2):
        sees = torch.ones(24, 24, dtype=torch.bool).tril()
        sees[20:, :20] &= ~removed[row]
        close(found[row], logits_of(model, ids[row], sees)[19:])


def test_evictions_are_the_named_tokens_or_as_many_random_ones():
    removals = LOOPED.removals(49)
    assert (removals["sink"], removals["copies"], removals["context"]) == ([0], [*range(40, 49)], [*range(1, 49)])
    drawn = [LOOPED.removals(cut)["random copies"] for cut in range(46, 60)]
    assert len({tuple(places[:6]) for places in drawn}) == len(drawn), "others at each cut"
    for cut, places in enumerate(drawn, 46):
        assert len(set(places)) == cut - 40 and set(places) <= set(range(1, 40))


@pytest.mark.parametrize(("before", "controlled"), [(1, set()), (9, {"sink"}), (10, {"sink", "copies"})])
def test_without_enough_tokens_before_the_loop_there_is_no_control(before: int, controlled: set[str]):
    looped = LoopedText(LOOPED.setup, [*BEFORE[:before], *CYCLE * 9], 1, Tail(3, before, 9.0))
    drawn = {name: places for name, places in looped.removals(before + 9).items() if name.startswith("random")}
    assert {*drawn} == {f"random {cause}" for cause in controlled}
    assert all({*places} <= {*range(1, before)} for places in drawn.values())


@pytest.mark.usefixtures("_few_tokens")
def test_a_loop_at_the_beginning_of_the_prompt_has_its_control_in_ordinary_text():
    made = kept_loop(("copies",))
    found = why_loop(made.model, [made.turn[0], *made.cycle * 4], tokenizer=made.tokenizer, max_new_tokens=48)
    copies = found.tried[0]
    assert (found.goes_on, copies.without, copies.goes_on) == (1.0, "copies", 0.0)
    assert copies.control is not None and found.added > 0 and len(found.ids) == 25 + 48, "the text stays as it was"
    assert found.details() == [f"{found.added} tokens of ordinary text stand before the prompt here, for a control."]
    with refused("cuts 2: expected a whole number from 3"):
        why_loop(made.model, made.turn, tokenizer=made.tokenizer, cuts=2)


def test_a_loop_goes_on_from_any_of_its_tokens():
    for begin in range(3):
        assert LOOPED.goes_on([*CYCLE[begin:], *CYCLE * 22])
        assert LOOPED.goes_on([9, *(CYCLE * 22)[: 48 + begin]])
    assert not LOOPED.goes_on([5, 7, 6] * 22) and not LOOPED.goes_on(CYCLE * 2), "another loop, and too short a text"


def share_without_the_first(model: Any, found: WhyLoop, new: int) -> float:
    """By `generate` with the first token hidden from the start."""
    assert found.period is not None
    looped = LoopedText(SimpleNamespace(edit=None, seed=0), list(found.ids), 2, Tail(found.period, 40, 9.0))  # pyright: ignore
    goes_on: list[bool] = []
    for cut in found.cuts:
        with Knockout([0]).on(model):
            written = model.generate(torch.tensor([found.ids[:cut]]), max_new_tokens=new, do_sample=False)
        goes_on.append(looped.goes_on(written[0, cut:].tolist()))
    return sum(goes_on) / len(goes_on)


def test_the_control_is_the_share_under_random_changes():
    loop, other = CYCLE * 22, [8] * 66
    written = {"nothing": [loop, loop], "copies": [other, other], "random copies": [loop, other]}
    assert LOOPED.effect_of("copies", written) == RemovalEffect("copies", 0.0, 1.0, 0.5, True)


def test_the_conclusion_says_what_the_table_says():
    copies, sink = RemovalEffect("copies", 0.0, 1 / 3, 1.0, True), RemovalEffect("sink", 0.1, 1.0, 0.8, True)
    context = RemovalEffect("context", 0.0, 0.0, None, False)
    both = WhyLoop(
        prompt_tokens=1, ids=(1,) * 50, period=3, onset=5, cuts=(9, 10, 11), goes_on=1.0, tried=(copies, sink, context)
    )
    for kept_by, words in (
        (("copies",), "stops in 100% of 3 cases, but another follows in 33% (random changes: 0%)"),
        (("copies", "sink"), "stops in 90% of 3 cases, but another follows in 100% (random changes: 20%)"),
        (
            (),
            "Undecided, try another prompt: the loop of period 3 goes on in 0% without the copies, 10% without",
        ),
    ):
        said = replace(both, kept_by=kept_by).conclusion()
        assert words in said and len(said.split()) <= 30
