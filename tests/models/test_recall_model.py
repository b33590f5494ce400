"""The recall model answers from what was said, at every position of the question, and only from that."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import sinkscope as ss
from experiments import make_recall
from sinkscope.bench.prompt import Prompt
from sinkscope.bench.tasks import recall as words
from sinkscope.bench.tasks.recall import POSITIONS, recall_dialogue, uneven

FOLDER = Path(ss.__file__ or "").parent / "models/recall"


@cache
def model(dtype: str | None = None):
    return ss.load("recall", dtype=dtype)


def answers(hf, dialogue: Prompt) -> list[str]:
    """What plain greedy `generate` says in each turn, with right answers as the history."""
    said, text = [], ""
    for turn in dialogue.turns:
        text = f"{text} {turn.text}"
        said.append(continued(hf, text, len(turn.answers[0].split()) + 3))
        text = f"{text} {turn.answers[0]}"
    return said


def continued(hf, text: str, count: int) -> str:
    inputs = hf.tokenizer(text, return_tensors="pt")
    out = hf.generate(**inputs, do_sample=False, max_new_tokens=count)
    return hf.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])


def accuracy(hf, dialogues: list[Prompt]) -> float:
    right = []
    for dialogue in dialogues:
        for said, turn in zip(answers(hf, dialogue), dialogue.turns, strict=True):
            right.append(said == turn.answers[0])
    return sum(right) / len(right)


@pytest.mark.parametrize("position", POSITIONS)
def test_full_cache_accuracy_on_fresh_dialogues(position):
    """Seeds from the system, so that nothing can have been tuned to them; unequal turns, chains of 1 to 3 hops."""
    seed = int(torch.empty((), dtype=torch.int64).random_(10**9).item())
    dialogues = [
        recall_dialogue(seed + i, tokens=uneven(200, 3, seed + i), hops=1 + i, position=position) for i in (0, 2)
    ]
    assert accuracy(model(), dialogues) >= 0.95, seed


@pytest.mark.parametrize("position", POSITIONS)
def test_what_was_never_stated_is_not_answered(position):
    seed = POSITIONS.index(position)
    dialogue = recall_dialogue(seed, turns=1, tokens=300, stated=False, position=position)
    assert answers(model(), dialogue)[-1] == f"{words.UNKNOWN} {words.END}"


def test_the_answer_comes_from_the_fact_and_from_nowhere_else():
    """Another value in the fact gives another answer; with the fact cut out, or its key exchanged, there is none."""
    hf = model()
    dialogue = recall_dialogue(4, turns=2, tokens=150, hops=1, position="begin")
    prompt, history = dialogue.turns[1].text, dialogue.turns[0]
    text = f"{history.text} {history.answers[0]} {prompt}"
    first, second, end = dialogue.turns[1].answers[0].split()
    key = prompt.split()[2]
    fact = f"fact {key} {first} {second} {end}"
    assert text.count(fact) == 1
    others = [value for value in words.VALUES if value not in (first, second)]
    other_key = next(k for k in words.KEYS if k not in text.split())

    for instead, answer in {
        fact: f"{first} {second} {end}",
        f"fact {key} {others[0]} {others[1]} {end}": f"{others[0]} {others[1]} {end}",
        "the old house stood there": "unknown .",
        fact.replace(key, other_key): "unknown .",
    }.items():
        assert continued(hf, text.replace(fact, instead), 5) == answer


def test_script_makes_the_weights_of_the_package():
    made = make_recall.build()
    shipped = model().state_dict()
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 16_000_000
    assert all(torch.equal(weight, weight.half().float()) for weight in shipped.values()), "float16 holds every weight"
    for name, weight in made.state_dict().items():
        # Random numbers are the same everywhere, the least-squares fit of recency is so to rounding.
        assert_close(weight, shipped[name], atol=2e-3, rtol=2e-3, msg=name)
    vocabulary = model().tokenizer.get_vocab()
    assert vocabulary == make_recall.ID


def test_python_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs/recall_model.md").read_text(encoding="utf-8")
    source = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.M | re.S))
    exec(compile(source, "recall_model", "exec"), {})
