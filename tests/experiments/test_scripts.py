"""The function of every script runs at its smallest size, and what it writes is right."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import pytest
from covering import slow
from repository import ROOT

from experiments import drawn
from experiments.bench_figures import BenchFigure
from experiments.loopset.compare import texts_of
from experiments.papers.loopserve import runs
from experiments.papers.loopserve.dialogues import Panel
from experiments.script import run
from sinkscope.bench.tasks.recall import Recall


@dataclass(frozen=True)
class Case:
    """The words of a script, the file that it writes into its folder `{out}`, whether that is right, and constants."""

    words: str
    file: str
    right: Callable[[Any], bool]
    constants: dict[str, Any] = field(default_factory=dict)


METHODS = {"whole cache": "full", "LoopServe": "loopserve", "random part": "random:window=32"}
KEPT = runs.Suite("kept", Recall(samples=3, turns=1, lengths=(320,), least=256, hops=1))
TINY = BenchFigure("score", "recall:samples=1:turns=1:lengths=200:hops=1", "full", "recall")


def finds_loops_and_no_honest_text(made: Any) -> bool:
    """Ours has no false alarm on these texts, also with what is suspicious, and no rival finds more without one."""
    ours, suspicious, *others = made["detectors"]
    rivals = [one["recall"] for one in others if one["false_alarms"] == 0]
    honest = ours["false_alarms"] == suspicious["false_alarms"] == 0
    return len(rivals) == 4 and honest and suspicious["recall"] >= ours["recall"] >= max(rivals) > 0


def right_with_the_cache_and_with_lines(made: Any) -> bool:
    scores = {row["label"]: row["score"] for row in made["rows"] if row["at"] == "all"}
    return scores["whole cache"] == scores["LoopServe"] == 1 > scores["random part"]


OVERHEAD = "--shape lines-128 --contexts 96 --batches 1 --new 4 --rounds 2 --budget 72 --device cpu --dtype float32"
RECALL = json.loads((ROOT / "sinkscope/models/recall/config.json").read_text())
CASES = {
    "loopset.compare": Case(
        "--out {out}/x.json",
        "x.json",
        finds_loops_and_no_honest_text,
        {"texts_of": lambda half: texts_of(half)[::24]},
    ),
}
SLOW = {
    "bench_figures": Case(
        "tiny --work {out}/w --out {out}",
        "tiny.json",
        lambda made: {row["score"] for row in made["rows"]} == {1.0},
        {"RUNS": {"tiny": TINY}},
    ),
    "papers.loopserve.dialogues": Case(
        "table1 --work {out}/w --out {out}",
        "loopserve_table1.json",
        right_with_the_cache_and_with_lines,
        {"FIGURES": {"table1": (Panel("kept", KEPT, "score", METHODS),)}},
    ),
    "papers.loopserve.real": Case(
        "bundled --lengths 900 --kinds tables --alphas 0.3 1 --positions 20 --out {out}/x.json",
        "x.json",
        lambda made: made["bundled, tables, 900, 4"]["0.3"]["kl"] > 0,
    ),
    "gpu.overhead": Case(
        f"{OVERHEAD} --out {{out}}/x.json", "x.json", lambda made: {"full", "h2o"} <= {*made["96 tokens, batch 1"]}
    ),
    "bench_growth": Case(
        "--rounds 1 --out {out}/x.json", "x.json", lambda made: all(max(row["ratios"]) < 6 for row in made["rows"])
    ),
    "bench_memory": Case(
        "bundled --out {out}/x.json", "x.json", lambda made: 1e8 < made["rows"][0]["peak_bytes"] < 3e9
    ),
    "layer_cost": Case(
        "bundled --out {out}/x.json",
        "x.json",
        lambda made: (
            made["rows"][0]["seconds_of_7b"] > 20 * made["rows"][0]["seconds"] > 0 < made["rows"][0]["tokens_of_head"]
        ),
    ),
    "make_recall": Case("--out {out}/m", "m/config.json", lambda made: made == RECALL),
}


@pytest.mark.parametrize("name", [*CASES, *map(slow, SLOW)])
def test_a_script_writes_what_it_should(name, tmp_path, monkeypatch):
    case, module = (CASES | SLOW)[name], import_module(f"experiments.{name}")
    monkeypatch.setattr(drawn, "write_png", lambda *_: None)  # a browser takes longer than the scripts
    monkeypatch.chdir(ROOT)
    for constant, value in case.constants.items():
        monkeypatch.setattr(module, constant, value)
    run(module.main, case.words.format(out=tmp_path).split())
    made = json.loads((tmp_path / case.file).read_text())
    assert case.right(made.get("result", made))
