"""The experiments on LoopGuard: continuations after a cut, what followed an intervention, the ban, survival."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_kit import made_record
from organisms.tiny import tiny_model

from experiments.loopguard import figure2, figure4, why
from experiments.script import run
from sinkscope.bench.prompt import Prompt
from sinkscope.bench.record import BenchRecord, open_run
from sinkscope.bench.tasks.loops import Loops
from sinkscope.models.text import typical_text


def test_the_page_says_what_was_measured_of_the_same_cycle():
    found = json.loads(Path("figures/loopguard_why.json").read_text())["result"]["aftermath"]
    said = " ".join(Path("docs/papers/loopguard.md").read_text().split())
    for method, words in (("loopguard:paper", "are followed by the same cycle"), ("loopguard", "")):
        counts = found[method]["counts"]
        same, total = counts["same"], sum(counts.values())
        share = f"{same / total:.0%}".replace("%", " %")
        assert f"of {total} interventions, " in said and f"{same} ({share}) {words}".strip() in said


def test_a_cut_equals_the_same_attention_under_a_mask():
    model = tiny_model("llama")[0]
    ids, keep = [(5 * i) % 60 + 4 for i in range(30)], [0, 3, 4, 5, 17, 28]
    mask = torch.full((1, 1, 30, 30), -torch.inf).triu(1)
    mask[..., -1, :29] = -torch.inf
    mask[..., -1, keep] = 0.0
    with torch.no_grad():
        masked = model(input_ids=torch.tensor([ids]), attention_mask=mask).logits[0, -1]
    assert why.go_on(model, ids, why.read(model, ids), keep, 1) == [int(masked.argmax())]


def looped(tokens: tuple[int, ...]) -> BenchRecord:
    return made_record("loopguard:64", tokens=tokens, steps={"top1": (0.5,) * len(tokens)})


def test_what_followed_an_intervention():
    def event(step, period):
        return {"step": step, "position": step, "kind": "guard", "data": {"generated": step, "period": period}}

    tokens = ([1, 2, 3] * 34)[:100] + ([2, 3, 1] * 34)[:100] + [9] * 100 + list(range(1000, 1300))
    one = replace(looped(tuple(tokens)), events=(event(99, 3), event(198, 3), event(290, 1)))
    found = why.aftermath([one])
    assert found["counts"] == {"same": 1, "another": 1, "none": 1}
    assert found["median_gap"] == (99 + 92) / 2
    assert figure4.gaps(one) == [99, 92]
    assert not why.same_cycle([1, 2], [1, 2, 3]) and why.same_cycle([1, 2, 3], [3, 1, 2])
    assert not why.same_cycle([1, 3, 2], [1, 2, 3])


def test_survival_counts_runs_without_a_collapse():
    loop = looped((*range(300), *[1, 2] * 350))
    healthy = looped(tuple(range(1000)))
    found = figure2.survived([loop, healthy], 256, 1000)
    assert found["collapsed"] == 0.5 and found["points"][1] is None
    point = found["points"][0]
    assert 300 < point < 300 + 256
    assert figure2.collapse_point([1, 2, 3, 4, *[5] * 9], 4, 0.5) == 8, "the ratio is 0.5 at step 7"
    for step, share in zip(found["steps"], found["survival"], strict=True):
        assert share == (1.0 if step < point else 0.5)


@pytest.fixture
def guarded(tmp_path):
    """A run of one prompt: without a guard, whose answer loops before the monitor's window is full, and with one."""
    prompt: Prompt = Loops().prompts(None)[0]
    tokens = tuple([30, 31, 32, 33] * 10)
    guard = {"step": 20, "position": 20, "kind": "guard", "data": {"generated": 20, "period": 4}}
    settings = {"max_new_tokens": 40, "model": {"name": "bundled"}}
    with open_run(tmp_path / "guards", settings, [prompt]) as folder:
        for method, events in (("full", ()), ("loopguard:256", (guard,))):
            one = made_record(method, prompt.id, tokens=tokens, steps={"top1": (0.5,) * 40}, events=events)
            folder.append([one])
    return tmp_path / "guards"


@pytest.mark.slow
def test_the_cuts_are_measured_on_a_run_whose_answers_raise_no_alarm(guarded, monkeypatch, tmp_path):
    monkeypatch.setattr(why, "STARTS", [(3, 0)])
    monkeypatch.setattr(why, "NEW", 8)
    monkeypatch.setattr(why, "TEXT", 60)
    run(why.main, ["--guarded", str(guarded), "--full", str(guarded), "--prompts", "1", "--out", str(tmp_path)])
    where = json.loads((tmp_path / "loopguard_why.json").read_text())["result"]["where"]
    assert list(where) == [
        "model in the package, at three quarters",
        "loop organism (control)",
        "ordinary text (control)",
    ]
    organism = {row["cut"]: row["cycle_goes_on"] for row in where["loop organism (control)"]}
    assert organism["nothing"] == 1 and organism["all generated"] == 0, "the cycle is held by copies in the cache"
    run(why.main, ["--guarded", str(guarded), "--out", str(tmp_path)])
    assert json.loads((tmp_path / "loopguard_why.json").read_text())["result"]["where"] == where


def test_figure_4_counts_the_interventions_of_a_run_and_refuses_what_is_no_run(guarded, monkeypatch, tmp_path, capsys):
    texts = figure4.honest_texts()[:1]
    monkeypatch.setattr(figure4, "honest_texts", lambda: texts)
    monkeypatch.setattr(figure4, "typical_text", lambda: typical_text()[:8000])
    run(figure4.main, [str(guarded), "--out", str(tmp_path)])
    (row,) = json.loads((tmp_path / "loopguard_fig4.json").read_text())["result"]["guards"]
    assert (row["method"], row["counts"], row["positions"]) == ("loopguard", [1], [20])
    with pytest.raises(SystemExit) as left:
        run(figure4.main, [str(guarded), str(tmp_path / "none"), "--out", str(tmp_path)])
    assert left.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: none is no folder of `sinkscope bench`")
