"""What users write, and what becomes of it: methods, tasks, files of prompts, scores, and policies of their own."""

from __future__ import annotations

import json

import pytest
from refusals import refused

from sinkscope.bench.methods import make_method, read_method, read_methods
from sinkscope.bench.record import read_prompts
from sinkscope.bench.scores import score
from sinkscope.bench.task import PromptFile, read_task, task_class
from sinkscope.bench.tasks.recall import Recall
from sinkscope.kv import StreamingLLM

MINE = """
from transformers import DynamicCache
from sinkscope.kv import StreamingLLM

class Mine(StreamingLLM):
    pass

def policy(budget):
    return Mine(budget)

def whole():
    return DynamicCache()

def needs(x):
    return policy(x)

three = 3
"""


@pytest.fixture(autouse=True)
def _mine(tmp_path, monkeypatch):
    (tmp_path / "mine_policies.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)


def made(text: str) -> object:
    return [make_method(method) for method in read_methods([text] if text else [])]


def bleu(metric: str) -> float:
    return score(metric, "a", ["a"])


@pytest.mark.parametrize(
    ("read", "text", "says"),
    [
        (made, "h20", "method 'h20': expected one of adakv, full"),
        (made, "streaming:sinks=3", "method 'streaming:sinks=3': unknown setting 'sinks'; known: budget"),
        (made, "full:0.5", "method 'full:0.5': unknown setting 'budget'; known: none"),
        (made, "", "no method is given: choose from adakv, full"),
        (made, "mine_policies:needs:3", "method mine_policies:needs:3 cannot be made: needs() got an unexpected"),
        (made, "mine_policies:three", "method mine_policies:three cannot be made: 'int' object is not callable"),
        (made, "mine_policies:whole", "method mine_policies:whole is a DynamicCache, no policy: check-cache"),
        (read_task, "recal", "--task 'recal': expected file, loops, recall, text, or a path of prompts"),
        (read_task, "recall:turn=3", "--task recall: unknown setting 'turn'; known: chat, lengths"),
        (read_task, "recall:turns=3:turns=4", "--task recall: setting 'turns' is given twice"),
        (read_task, "recall:samples=0", "--task recall: samples=0: expected a whole number from 1"),
        (bleu, "bleu", "expected f1, contains or"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(read, text, says):
    with refused(words=[says]):
        read(text)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ([1], "line 2: [1]: expected an object: give JSON lines with"),
        ({"answers": ["a"]}, "line 2: turns[0].prompt is missing: give JSON lines with"),
        ({"text": "a"}, "line 2: unknown field 'text'; known: id, set, part, turns, prompt, answers, metric, score"),
        ({"prompt": " "}, "line 2: turns[0].prompt=' ': expected a text: give JSON lines with"),
    ],
)
def test_a_damaged_line_of_prompts_is_named(tmp_path, row, says):
    file = tmp_path / "x.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n{json.dumps(row)}')
    with refused(words=[says]):
        read_prompts(file)


def test_a_class_and_a_function_of_the_budget_are_methods():
    one, other = (make_method(f"mine_policies:{name}:6") for name in ("policy", "Mine"))
    assert one == other and isinstance(one, StreamingLLM) and one.budget == 6
    assert read_method("mine_policies:policy", 0.5) == "mine_policies:policy:0.5"
    assert read_methods(["tova:8", "full", "tova:8"]) == ("tova:8", "full")


@pytest.mark.parametrize(
    ("metric", "text", "answers", "wanted"),
    [
        ("f1", "the red Fox!", ["red fox", "x"], 1.0),
        ("f1", "red fox ran", ["a red cat"], 0.4),  # one word of three, and of two
        ("f1", "", ["red"], 0.0),
        ("contains", "It is 42 or 43", ["7", "43"], 1.0),
        ("experiments.papers.loopserve.scores:accuracy", "cat and dog", ["cat", "dog"], 0.5),
    ],
)
def test_scores_of_each_metric(metric, text, answers, wanted):
    assert score(metric, text, answers) == pytest.approx(wanted)


def test_a_task_is_found_by_its_name():
    assert task_class("recall") is Recall and task_class("a name in old records") is PromptFile
    with refused("two tasks are called 'recall'"):
        type("Other", (PromptFile,), {"name": "recall"})
