"""Files of prompts, scores, and tasks as they are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from refusals import refused

from sinkscope.bench.record import read_prompts
from sinkscope.bench.scores import score
from sinkscope.bench.task import read_task


def written(path: Path, *rows) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1], "line 2 is [1]: expected an object: give JSON lines with"),
        ({"text": "a"}, "line 2: turns[0].prompt is missing: give JSON lines with"),
        ({"prompt": " "}, "line 2: turns[0].prompt is ' ': expected a text: give JSON lines with"),
        ({"prompt": "a", "answers": "b"}, "line 2: turns[0].answers is 'b': expected a valid array"),
        ({"turns": [3]}, "line 2: turns[0] is 3: expected an object"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, row, message):
    file = written(tmp_path / "x.jsonl", {"prompt": "fine"}, row)
    with refused(words=[message]):
        read_prompts(file)


@pytest.mark.parametrize(
    ("metric", "text", "answers", "wanted"),
    [
        ("f1", "the red Fox!", ["red fox", "x"], 1.0),
        ("f1", "red fox ran", ["a red cat"], 0.4),  # one word of three, and of two
        ("f1", "red red", ["red"], 2 / 3),
        ("f1", "", ["red"], 0.0),
        ("contains", "It is 42 or 43", ["7", "43"], 1.0),
        ("experiments.loopserve.scores:accuracy", "a cat", ["cat", "dog"], 1.0),
        ("experiments.loopserve.scores:accuracy", "cat and dog", ["cat", "dog"], 0.5),
    ],
)
def test_scores_of_each_metric(metric, text, answers, wanted):
    assert score(metric, text, answers) == pytest.approx(wanted)


def test_unknown_metrics_are_refused():
    for metric in ("bleu", "no.such:thing", "math:thing"):
        with refused("expected f1, contains or"):
            score(metric, "a", ["a"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recal", "--task 'recal': expected file, loops, recall, text, or a path of prompts"),
        ("recall:turn=3", "'turn=3' is no setting, or is given twice: it has chat, kinds, lengths"),
        ("recall:positions=front", "'front'"),
        ("recall:depths=1.5", "--task recall: depths=1.5: expected a number from 0 to 1"),
        ("needle:depths=0.5", "--task 'needle': expected file, loops"),
    ],
)
def test_wrong_task_descriptions_are_refused(text, message):
    with refused(words=[message]):
        read_task(text)
