"""The loop organism that ships: it is what the generator makes, its prompts are true, and LoopBench finds the truth."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from organisms import LoopOrganism

import sinkscope as ss
from experiments.make_organism import LOOPS, loop, made, prompts, refrain
from sinkscope.bench.prompt import Prompt, read_prompts
from sinkscope.bench.tasks.loops import DATA

PERIODS, ONSETS = ((2, 16), (24, 48), (64, 128)), (0, 30, 200, 600)


@cache
def organism() -> LoopOrganism:
    return made()


def by_id() -> dict[str, Prompt]:
    return {prompt.id: prompt for prompt in read_prompts(DATA / "organism.jsonl")}


def test_the_weights_are_what_the_generator_makes():
    shipped = ss.load("organism", backend="hf")
    weights = shipped.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in organism().model.state_dict().items())
    text = next(iter(by_id().values())).turns[0].text
    assert shipped.tokenizer(text)["input_ids"] == organism().tokenizer(text)["input_ids"]


def test_the_prompts_cover_periods_onsets_reaches_and_honest_repetition():
    found = by_id()
    loops = [p for p in found.values() if p.set == "organism"]
    assert (len(found), len(loops)) == (40, 32)
    assert {p.about["period"] for p in loops} == {period for period, *_ in LOOPS}
    assert {p.about["onset"] for p in loops} == {*ONSETS}
    assert all(any(low <= p.about["period"] <= high for low, high in PERIODS) for p in loops)
    for words in ("near", "far", "older", "honest-walk", "honest-quote", "honest-refrain"):
        assert 2 <= sum(words in name for name in found) < 40
    for prompt in loops:  # its copies are there, the older ones before a stretch of the ring
        ids = organism().tokenizer(prompt.turns[0].text)["input_ids"]
        assert max(ids.count(token) for token in ids) >= 3 + 3 * prompt.id.endswith("older")


def test_a_prompt_is_what_its_parts_say():
    planned = loop(organism(), 5, 30, False, "near", 3)
    found = by_id()["loop-p005-o030-near"]
    assert organism().tokenizer(found.turns[0].text)["input_ids"] == planned.ids
    assert found.about == {"period": 5, "onset": 30} and planned.expected[30:] == planned.expected[30:35] * 4
    assert len({*planned.expected[:35]}) == 35
    said = refrain(organism(), 52, 4).expected
    assert said[10:62] == said[62:114] and said[114:123] == said[10:19] and len({*said[122:]}) == len(said[122:])


@pytest.mark.slow
def test_the_prompts_are_what_the_generator_makes():
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in prompts(organism()))
    assert (DATA / "organism.jsonl").read_text() == lines


def test_sets_that_ship():
    for name, count in (("small-dc", 12), ("small-ri", 12), ("stories", 24)):
        rows = read_prompts(DATA / f"{name}.jsonl")
        assert len(rows) == len({row.turns[0].text for row in rows}) == count
        assert {row.set for row in rows} == {name.removeprefix("small-")}
