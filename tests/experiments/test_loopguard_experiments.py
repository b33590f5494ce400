"""The experiments on LoopGuard: interventions, the ban, survival."""

from __future__ import annotations

import json

import pytest
from bench_kit import guarded_run, made_record

from experiments.loopguard import figure2, figure4
from experiments.script import run
from sinkscope.bench.record import BenchRecord
from sinkscope.models.text import typical_text


def looped(tokens: tuple[int, ...]) -> BenchRecord:
    return made_record("loopguard:64", tokens=tokens, steps={"top1": (0.5,) * len(tokens)})


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


def test_figure_4_counts_the_interventions_of_a_run_and_refuses_what_is_no_run(monkeypatch, tmp_path, capsys):
    texts = figure4.honest_texts()[:1]
    monkeypatch.setattr(figure4, "honest_texts", lambda: texts)
    monkeypatch.setattr(figure4, "typical_text", lambda: typical_text()[:8000])
    guarded = str(guarded_run(tmp_path / "guards"))
    run(figure4.main, [guarded, "--out", str(tmp_path)])
    (row,) = json.loads((tmp_path / "loopguard_fig4.json").read_text())["result"]["guards"]
    assert (row["method"], row["counts"], row["positions"]) == ("loopguard", [1], [20])
    with pytest.raises(SystemExit) as left:
        run(figure4.main, [guarded, str(tmp_path / "none"), "--out", str(tmp_path)])
    assert left.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: none is no folder of `sinkscope bench`")
