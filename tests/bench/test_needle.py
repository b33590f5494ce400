"""The needle map: prompts hold what they say at the depth they say, and the map shows what methods lose."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from refusals import refused

import sinkscope as ss
from experiments import make_two_hops
from sinkscope.bench.benchmark import run as run_bench
from sinkscope.bench.tasks.needles import needle_prompt
from sinkscope.bench.tasks.recall import NEEDLES, Recall
from sinkscope.opening.live import target_of

WRITTEN = [*((True, kind) for kind in NEEDLES), *((False, kind) for kind in NEEDLES[:3])]


@cache
def model(name: str = "recall"):
    return ss.load(name)


def place_of(prompt) -> float:
    """Where the answer is first stated, as a share of the text."""
    text = prompt.turns[0].text
    return text.index(prompt.turns[0].answers[0]) / len(text)


@pytest.mark.parametrize(("facts", "task"), WRITTEN)
def test_prompts_are_as_long_and_as_deep_as_asked(facts, task):
    tokenizer = model("recall" if facts else "bundled").tokenizer
    before = -1.0
    for depth in (0.0, 0.5, 1.0):
        prompt = needle_prompt(tokenizer, facts, task, 1200, depth)
        assert 1100 <= len(tokenizer(prompt.turns[0].text)["input_ids"]) <= 1200, "with BOS"
        assert place_of(prompt) > before
        before = place_of(prompt)
        if task == NEEDLES[0]:
            assert place_of(prompt) == pytest.approx(depth, abs=0.12)
    assert needle_prompt(tokenizer, facts, task, 1200, 1.0) == prompt
    for other in ({"number": 1}, {"seed": 1}):
        assert needle_prompt(tokenizer, facts, task, 1200, 1.0, **other).turns[0].text != prompt.turns[0].text


def said(hf, text: str) -> str:
    """What plain greedy `generate` says: nothing of this package takes part."""
    inputs = hf.tokenizer(text, return_tensors="pt")
    output = hf.generate(**inputs, do_sample=False, max_new_tokens=8)
    return hf.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


@pytest.mark.parametrize("name", ["recall", "recall-2hop"])
@pytest.mark.parametrize("task", NEEDLES)
def test_recall_models_answer_every_task(name, task):
    """Seeds from the system, so that nothing can have been tuned to them."""
    seed = int(torch.empty((), dtype=torch.int64).random_(10**9).item())
    turn = NEEDLES.index(task) + (name == "recall")  # another depth and length in every task and model
    length, depth = (150, 300, 600)[turn % 3], (0.0, 0.5, 1.0)[turn // 2 % 3]
    prompt = needle_prompt(model(name).tokenizer, True, task, length, depth, seed)
    assert prompt.turns[0].answers[0] in said(model(name), prompt.turns[0].text), (seed, prompt)


def test_script_makes_the_numbers_of_the_package():
    made = make_two_hops.changes()
    with np.load(make_two_hops.RECALL / "two_hops.npz") as kept:
        assert made.keys() == {*kept.keys()}
        assert all(np.array_equal(made[name], kept[name], equal_nan=True) for name in made)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": (10,), "kinds": ("needle",)}, "length 10: needle needs .* tokens at least; give longer prompts"),
        ({"lengths": (40000,), "kinds": ("needle",)}, "but the context of recall is"),
    ],
)
def test_impossible_needle_settings_are_refused(settings, message):
    with refused(message):
        run_bench(model(), Recall(**settings), ["full"])
    with refused("kinds=tracking: for bundled there are dialogue, needle, multi-key"):
        Recall(kinds=("tracking",)).prompts(target_of(model("bundled")))
