"""The loop organism that ships: it is what the generator makes, its prompts are true, and LoopBench finds the truth."""

from __future__ import annotations

from functools import cache

import torch
from organisms import LoopOrganism

import sinkscope as ss
from experiments.make_organism import made
from sinkscope.bench.prompt import Prompt, read_prompts
from sinkscope.bench.tasks.loops import DATA


@cache
def organism() -> LoopOrganism:
    return made()


def by_id() -> dict[str, Prompt]:
    return {prompt.id: prompt for prompt in read_prompts(DATA / "organism.jsonl")}


def test_the_weights_are_what_the_generator_makes():
    shipped = ss.load("organism", device="cpu")
    weights = shipped.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in organism().model.state_dict().items())
    text = next(iter(by_id().values())).turns[0].text
    assert shipped.tokenizer(text)["input_ids"] == organism().tokenizer(text)["input_ids"]
