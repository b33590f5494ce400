"""The experiments on LoopGuard: interventions and survival."""

from __future__ import annotations

from bench_kit import SETTINGS, made_record

from experiments.loopguard import figure2
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
