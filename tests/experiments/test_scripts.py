"""The function of every script runs at its smallest size, and what it writes is right."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_kit import SETTINGS, made_record

from experiments.loopserve import runs
from experiments.script import run
from sinkscope.bench.prompt import Prompt
from sinkscope.bench.record import open_run
from sinkscope.bench.tasks.loops import Loops
from sinkscope.bench.tasks.recall import Recall

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Case:
    """How a script runs here.

    Attributes:
        words: Its command line; `{out}` is an empty folder, `{run}` a folder of `sinkscope bench`.
        right: Whether what it wrote is right: the content of `file`, or what it printed.
        file: What it writes in the folder; empty if it prints.
        patch: Constants of the module that are smaller here.
        quick: Whether it runs by default.
    """

    words: str
    right: Callable[[Any], bool]
    file: str = ""
    patch: dict[str, Any] | None = None
    quick: bool = False


SMALL = tuple(
    (runs.Suite(name, Recall(count=1, turns=1, total=320, least=256, hops=hops)), key, name)
    for name, key, hops in (("kept", "score", 1), ("chain", "prefix", 2))
)
"""Dialogues of the recall model, as few and as short as they can be."""


def half_of_the_honest(text: str) -> bool:
    return "repeats: 0 of 31" in text and "p1: " in text


CASES = {
    "bench_detect": Case(
        "--draws 1 --rounds 1 --out {out}/x.json",
        lambda made: all(row["found"] == 1 for row in made["result"]["delays"]["default"]["exact"]),
        "x.json",
        {"PERIODS": (4, 32), "HISTORIES": (200,)},
    ),
    "bench_lines": Case(
        "--shape lines-128 --length 96 --rounds 1 --out {out}/x.json", lambda made: made["result"]["same"], "x.json"
    ),
    "bench_loopserve": Case(
        "--lengths 256 --contexts 64 --rounds 1 --parts layer selection decoding --out {out}/x.json",
        lambda made: {row["kind"] for row in made["result"]["layer"]} == {"vertical", "slash", "groups", "mixed"},
        "x.json",
    ),
    "bench_proxy": Case(
        "--tokens 300 --rounds 1 --out {out}/x.json",
        lambda made: 0 < made["result"]["microseconds_per_token"]["watching"],
        "x.json",
    ),
    "gallery": Case("--out {out}/x.md", lambda page: "## find-sinks" in page, "x.md"),
    "precision_truth": Case(
        "--pieces 3 --out {out}",
        lambda made: (
            {row["kept"]: row["regained"] > 0.5 for row in made["result"]["rows"] if "x 100" in row["model"]}
            == {"sink places": True, "first tokens": True, "sink neurons": True, "down projections": True}
        ),
        "precision_truth.json",
        {"MODELS": ("first token",)},
    ),
    "make_shape": Case(
        "--shape tiny --out {out}/m", lambda truth: truth["sink_layer"] == 1, "m/truth.json", quick=True
    ),
    "make_recall": Case("--out {out}/m", lambda config: config["model_type"] == "llama", "m/config.json"),
    "loopbench.build": Case(
        "dc experiments/loopbench/news.jsonl --count 4 --target-tokens 200 --out {out}/x.jsonl",
        lambda lines: len(lines) == 4 and {json.loads(line)["set"] for line in lines} == {"dc"},
        "x.jsonl",
        quick=True,
    ),
    "loopbench.make_honest": Case(
        "--out {out}/x.jsonl",
        lambda lines: lines == (ROOT / "experiments/loopbench/honest.jsonl").read_text().splitlines(),
        "x.jsonl",
        quick=True,
    ),
    "loopguard.figure5": Case("--max-new-tokens 24 --out {out}", lambda made: made["result"], "loopguard_fig5.json"),
    "loopguard.honest": Case("", half_of_the_honest),
    "loopguard.remedies": Case(
        "{out}/d --count 1 --new 60 --only full LoopGuard stop",
        lambda text: '"method": "stop"' in text,
    ),
    "loopguard.rotary": Case(
        "--max-new-tokens 200 --layer 1 --out {out}",
        lambda made: (
            max(made["result"]["heads"]["tightness"][0]) <= 1 and max(made["result"]["heads"]["error"][0]) < 1e-4
        ),
        "rotary.json",
    ),
    "loopguard.sensitivity": Case(
        "--per-form 1 --out {out}",
        lambda made: made["result"]["sweeps"]["votes"][0]["detected_by_form"]["exact"] > 0.9,
        "loopguard_sensitivity.json",
        {"PERIODS": (1, 8), "SWEEPS": {"votes": (1,), "variant": ("repeats",)}},
    ),
    "loopguard.show": Case("{run}", lambda text: "## loopguard:256: 40 tokens" in text, quick=True),
    "loopguard.tables": Case("{run}", lambda text: "Table 1" in text and "not run; paper" in text),
    "loopserve.ablation": Case(
        "--work {out}/w --out {out}",
        lambda made: {row["score"] for row in made["result"]["rows"] if row["label"] == "whole cache"} == {1.0},
        "loopserve_ablation.json",
        {"SHOWN": SMALL, "NAMES": {"whole cache": "full", "default": "loopserve", "random part": "random:window=32"}},
    ),
    "loopserve.figure2a": Case(
        "--tokens 64 --head 1.0 --out {out}", lambda made: made["result"], "loopserve_fig2a.json"
    ),
    "loopserve.figure2d": Case(
        "--count 1 --tokens 200 --budget 48 --out {out}", lambda made: made["result"], "loopserve_fig2d.json"
    ),
    "loopserve.latency": Case(
        "--contexts 192 --outputs 4 8 --names full loopserve --rounds 1 --budget 80 --shortest 0 --shape lines-128 "
        "--out {out}",
        lambda made: [row["arm"] for row in made["result"]["rows"]] == ["full", "loopserve"],
        "loopserve_latency.json",
        quick=True,
    ),
    "loopset.files": Case("--count 2 --out {out}/x.json", lambda made: made["result"], "x.json", quick=True),
    "loopset.make": Case(
        "--half report --out {out}/x.jsonl",
        lambda lines: {json.loads(line)["half"] for line in lines} == {"report"},
        "x.jsonl",
        quick=True,
    ),
    "loopset.compare": Case(
        "--count 24 --out {out}",
        lambda made: len(made["result"]["detectors"]) == 9,
        "loops_compare.json",
        quick=True,
    ),
    "repeated_token.cosines": Case("--layers 1", lambda text: "L0" in text, quick=True),
    "repeated_token.leakage": Case(
        "figures/divergence.json --corpus docs/errors --controls 1", lambda text: "bytes" in text
    ),
    "repeated_token.separate": Case(
        "--count 256 --texts 64 --out {out}", lambda made: made["result"]["methods"][0]["auroc"] > 0.9, "separate.json"
    ),
    "repeated_token.table1": Case("", lambda text: "7003" in text, quick=True),
    "repeated_token.table2": Case("", lambda text: "no weights at hand" in text, quick=True),
}


@pytest.fixture
def bench_run(tmp_path: Path) -> Path:
    """A run of one prompt, without a guard and with one."""
    prompt: Prompt = Loops().prompts(None)[0]
    metrics = {"loop": 1.0, "loop_paper": 1.0, "ttr": 0.1, "cr": 0.1, "length": 40, "interventions": 1.0}
    guard = {"step": 20, "position": 20, "kind": "guard", "data": {"generated": 20, "period": 4}}
    with open_run(tmp_path / "run", {**SETTINGS, "max_new_tokens": 40}, [prompt]) as folder:
        for method, events in (("full", ()), ("loopguard:256", (guard,))):
            made = {"tokens": (30, 31, 32, 33) * 10, "events": events, "metrics": metrics, "settings": {"set": "dc"}}
            folder.append([made_record(method, prompt.id, task="loops", **made)])
    return tmp_path / "run"


def parameters() -> list[Any]:
    cases = []
    for name, case in CASES.items():
        cases.append(pytest.param(name, marks=() if case.quick else pytest.mark.slow))
    return cases


@pytest.mark.parametrize("name", parameters())
def test_a_script_writes_what_it_should(
    name: str, bench_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, module = CASES[name], import_module(f"experiments.{name}")
    for constant, value in (case.patch or {}).items():
        monkeypatch.setattr(module, constant, value)
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.chdir(ROOT)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        run(module.main, case.words.format(out=out, run=bench_run).split())
    if not case.file:
        assert case.right(said.getvalue()), said.getvalue()[:2000]
        return
    text = (out / case.file).read_text(encoding="utf-8")
    read: Any = text
    if case.file.endswith(".json"):
        read = json.loads(text)
    elif case.file.endswith(".jsonl"):
        read = text.splitlines()
    assert case.right(read), text[:2000]


def test_the_text_that_ships_is_what_its_script_makes(tmp_path: Path) -> None:
    import_module("experiments.bundled.typical").main(tmp_path)
    for name in ("typical.txt", "LICENSE-typical.txt"):
        made = (tmp_path / name).read_text(encoding="utf-8")
        assert made[:2000] == (ROOT / "sinkscope/models/text" / name).read_text(encoding="utf-8")[:2000]


@pytest.mark.slow
def test_the_second_hop_that_ships_is_what_its_script_makes(tmp_path: Path) -> None:
    run(import_module("experiments.make_two_hops").main, ["--out", str(tmp_path / "x.npz")])
    made, ships = np.load(tmp_path / "x.npz"), np.load(ROOT / "sinkscope/models/recall/two_hops.npz")
    assert sorted(made.files) == sorted(ships.files)
    for name in made.files:
        assert np.array_equal(made[name], ships[name], equal_nan=True)
