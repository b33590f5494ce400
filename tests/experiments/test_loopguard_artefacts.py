"""What the artefacts of the LoopGuard paper are made of."""

from __future__ import annotations

import json

import torch

from experiments.longbench import read_longbench
from experiments.papers.__main__ import main
from experiments.papers.loopguard.collapse import collapse_point
from experiments.papers.loopguard.lemma import Layer
from experiments.papers.loopguard.two_wiki import MADE_UP, prompt_of, two_wiki
from sinkscope.models.draws import draws


def layer(period: int | None, length: int = 96) -> Layer:
    """A layer whose queries and keys repeat, behind rotary with frequencies of its own."""
    made = [torch.randn(2, length, 8, generator=draws(0, name)) for name in ("queries", "keys")]
    if period is not None:
        made = [vectors[:, torch.arange(length) % period] for vectors in made]
    query, key = (torch.complex(*vectors.chunk(2, -1)) for vectors in made)
    turn = torch.tensor([1.0, 0.5, 0.1, 0.01])
    turned = torch.polar(torch.ones(length, 4), torch.arange(length)[:, None] * turn)
    after_query, after_key = query * turned, key * turned
    scores = torch.einsum("htb,hib->hti", after_query.conj(), after_key).real
    return Layer(query, key, scores, torch.zeros(2, length, 8), turn)


def test_eq_13_has_the_other_sign():
    assert layer(None).error(-1).max() < 1e-4
    assert layer(None).error(1).min() > 0.3


def test_the_bound_of_lemma_1_holds_and_is_nothing_at_the_period_alone():
    for period in (None, 6):
        change, bound, _ = layer(period).shifted(6)
        assert (change <= bound + 1e-5).all()
        assert bool(bound.max() < 1e-3) == (period == 6)
    assert layer(6).shifted(7)[0].min() > 0.3


def test_a_run_collapses_where_its_ratio_stays_low():
    healthy = [*range(300)]
    assert collapse_point(healthy) is None
    assert collapse_point([*healthy, *[1, 2, 3] * 200]) == 300 + 256 - 50 + 3 - 1
    assert collapse_point([*healthy, *[1, 2, 3] * 200, *range(300)]) is None


def test_prompts_are_longbenchs():
    (record, *_) = read_longbench(MADE_UP)
    text = prompt_of(record).turns[0].text
    assert text.startswith("Answer the question based on the given passages. Only give me the answer")
    assert f"words.\n\nThe following are given passages.\n{record.context}\n\nAnswer the question" in text
    assert text.endswith(f"words.\n\nQuestion: {record.question}\nAnswer:")


def test_the_guard_answers_as_the_whole_cache(tmp_path):
    rows = [json.loads(line) for line in MADE_UP.read_text().splitlines()[:2]]
    for row in rows:
        row["context"] = row["context"][:600]
    file = tmp_path / "2wikimqa.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = two_wiki(records=file, budget=64)
    _, streaming, _, guard = found.methods
    assert guard.same.value == 1 and streaming.same.value < 1
    assert found.conclusion().startswith("Of 2 records, 100% of the guard's answers are the whole cache's")


def test_openings_are_of_all_kinds_alike(tmp_path, capsys):
    assert main(["loopguard", "table3", "--count", "5", "--out", str(tmp_path)]) == 2
    assert "--count 5: give a multiple of 4 from 4 to 48" in capsys.readouterr().err
