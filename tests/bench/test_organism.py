"""The loop organism that ships is that of the tests, with two reaches and an end."""

from __future__ import annotations

import torch
from organisms import loop_organism

import sinkscope as ss
from sinkscope.bench.prompt import read_prompts
from sinkscope.bench.tasks.loops import DATA


def test_the_weights_are_those_of_the_organism():
    shipped, made = (
        ss.load("organism", device="cpu"),
        loop_organism(0, reach=(64, 512), vocab_size=1028, n_layers=2, noise=False, end=1.2),
    )
    weights = shipped.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in made.model.state_dict().items())
    text = read_prompts(DATA / "organism.jsonl")[0].turns[0].text
    assert shipped.tokenizer(text)["input_ids"] == made.tokenizer(text)["input_ids"]
