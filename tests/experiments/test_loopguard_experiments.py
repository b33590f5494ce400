"""The experiments on LoopGuard: interventions and survival."""

from __future__ import annotations

import json

import pytest
from bench_kit import SETTINGS, guarded_run, made_record

from experiments.loopguard import figure2, figure4
from experiments.script import run
from sinkscope.bench.record import open_run
from sinkscope.bench.tasks.loops import Loops


def test_survival_counts_runs_without_a_collapse(tmp_path):
    loop, healthy = (*range(300), *[1, 2] * 350), tuple(range(1000))
    prompts = Loops().prompts(None)[:2]
    with open_run(tmp_path / "runs", {**SETTINGS, "max_new_tokens": 1000}, prompts) as store:
        for prompt, tokens, alarm in zip(prompts, (loop, healthy), (348, None), strict=True):
            store.append([made_record("full", prompt.id, tokens=tokens, metrics={"alarm": alarm}, task="loops")])
    found = figure2.measure(tmp_path / "runs")
    point, none = found["collapse"]["points"]
    assert 300 < point < 300 + 256 and none is None
    assert (found["collapse"]["steps"], found["collapse"]["survival"]) == ([0, point, 1000], [1.0, 0.5, 0.5])
    assert found["alarm"]["steps"] == [0, 348, 1000] and found["runs"] == 2
    assert figure2.collapse_point([1, 2, 3, 4, *[5] * 9], 4, 0.5) == 8, "the ratio is 0.5 at step 7"


def test_figure_4_counts_the_interventions_of_a_run_and_refuses_what_is_no_run(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("experiments.drawn.write_png", lambda *_: None)
    texts = figure4.honest_texts()[:1]
    monkeypatch.setattr(figure4, "honest_texts", lambda: texts)
    guarded = str(guarded_run(tmp_path / "guards"))
    run(figure4.main, [guarded, "--out", str(tmp_path)])
    (row,) = json.loads((tmp_path / "loopguard_fig4.json").read_text())["result"]["guards"]
    assert (row["method"], row["counts"], row["positions"]) == ("loopguard", [1], [20])
    with pytest.raises(SystemExit) as left:
        run(figure4.main, [guarded, str(tmp_path / "none"), "--out", str(tmp_path)])
    assert left.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: none is no folder of `sinkscope bench`")
