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

import pytest
from covering import slow
from repository import ROOT

from experiments import drawn
from experiments.bench_figures import BenchFigure
from experiments.loopserve import runs
from experiments.loopserve.dialogues import Panel
from experiments.loopset.compare import texts_of
from experiments.script import run
from sinkscope.bench.tasks.recall import Recall
from sinkscope.files.arguments import parameters_of


@dataclass(frozen=True)
class Case:
    """How a script runs here.

    Attributes:
        words: Its command line; `{out}` is a folder.
        right: Whether what it wrote is right: the content of `file`, of a record its result, or
            what it printed.
        file: What it writes in the folder; empty if it prints.
        patch: Constants of the module that are smaller here; `{out}` as in its words.
        quick: Whether it runs by default.
    """

    words: str
    right: Callable[[Any], bool]
    file: str = ""
    patch: dict[str, Any] | None = None
    quick: bool = False


def small(name: str, task: Recall, methods: dict[str, str]) -> Panel:
    """Dialogues of the recall model, as few and as short as they can be."""
    return Panel(name, runs.Suite(name, task), "score", methods)


SHORT: dict[str, Any] = {"samples": 3, "turns": 1, "lengths": (320,), "least": 256, "hops": 1}
BESIDE = {"whole cache": "full", "LoopServe": "loopserve", "random part": "random:window=32"}


def rate_of(made: Any, label: str) -> float:
    """Right answers of a method over all positions of the question."""
    (row,) = [row for row in made["rows"] if (row["label"], row["at"]) == (label, "all")]
    return row["score"]


def finds_loops_and_no_honest_text(made: Any) -> bool:
    """Ours has no false alarm on these texts, also with what is suspicious, and no rival finds more without one."""
    ours, suspicious, *others = made["detectors"]
    rivals = [one["recall"] for one in others if one["false_alarms"] == 0]
    honest = ours["false_alarms"] == suspicious["false_alarms"] == 0
    return len(rivals) == 4 and honest and suspicious["recall"] >= ours["recall"] >= max(rivals) > 0


def right_everywhere(made: Any) -> bool:
    return {row["score"] for row in made["rows"] if row.get("label", row["method"]) == "full"} == {1.0}


def as_committed(made: Any) -> bool:
    """Two tokens take as many copies as in the figure of all."""
    whole = json.loads((ROOT / "figures/atlas.json").read_text())["result"]
    at = whole["ids"].index(made["ids"][0])
    return made["repeats"] == [counts[at : at + 2] for counts in whole["repeats"]]


def packaged_recall() -> Any:
    """The configuration of the recall model in the package, which the script makes."""
    return json.loads((ROOT / "sinkscope/models/recall/config.json").read_text())


CASES = {
    "bench_figures": Case(
        "tiny --work {out}/w --out {out}",
        lambda made: {row["set"] for row in made["rows"]} == {"begin", "middle", "end"} and right_everywhere(made),
        "tiny.json",
        {"RUNS": {"tiny": BenchFigure("score", "recall:samples=1:turns=1:lengths=200:hops=1", "full", "recall")}},
    ),
    "model_types": Case(
        "llama",
        lambda page: "In full, in all layers: `llama`." in page,
        "p.md",
        {"DATA": "{out}/d.json", "PAGE": "{out}/other.md", "TYPES_PAGE": "{out}/p.md"},
    ),
    "loopserve.build": Case(
        "multi_news experiments/loopbench/news.jsonl --count 2 --out {out}/x.jsonl",
        lambda lines: [json.loads(line)["part"] for line in lines] == ["begin", "middle", "end"] * 2,
        "x.jsonl",
        quick=True,
    ),
    "loopserve.dialogues": Case(
        "table1 --work {out}/w --out {out}",
        lambda made: rate_of(made, "whole cache") == rate_of(made, "LoopServe") == 1 > rate_of(made, "random part"),
        "loopserve_table1.json",
        {"FIGURES": {"table1": (small("kept", Recall(**SHORT), BESIDE),)}},
    ),
    "loopserve.real": Case(
        "bundled --lengths 900 --kinds tables --alphas 0.3 1 --positions 20 --out {out}/x.json",
        lambda made: made["bundled, tables, 900, 4"]["0.3"]["kl"] > 0,
        "x.json",
    ),
    "gpu.overhead": Case(
        "--shape lines-128 --contexts 96 --batches 1 --new 4 --rounds 2 --budget 72 --device cpu --dtype float32 "
        "--out {out}/x.json",
        lambda made: {"full", "h2o"} <= {*made["96 tokens, batch 1"]},
        "x.json",
    ),
    "repeated_token.atlas": Case(
        "--out {out}", as_committed, "atlas.json", {"vocabulary": lambda _: [300, 301], "MAX_REPEATS": 300}, quick=True
    ),
    "make_recall": Case("--out {out}/m", lambda config: config == packaged_recall(), "m/config.json"),
    "loopbench.build": Case(
        "dc experiments/loopbench/news.jsonl --count 4 --target-tokens 200 --out {out}/x.jsonl",
        lambda lines: len(lines) == 4 and {json.loads(line)["set"] for line in lines} == {"dc"},
        "x.jsonl",
        quick=True,
    ),
    "loopset.compare": Case(
        "--out {out}/loops_compare.json",
        finds_loops_and_no_honest_text,
        "loops_compare.json",
        {"texts_of": lambda half: texts_of(half)[::24]},
        quick=True,
    ),
}


@pytest.mark.parametrize("name", [name if case.quick else slow(name) for name, case in CASES.items()])
def test_a_script_writes_what_it_should(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, module = CASES[name], import_module(f"experiments.{name}")
    monkeypatch.setattr(drawn, "write_png", lambda *_: None)  # a browser takes longer than the scripts
    out = tmp_path / "out"
    out.mkdir()
    for constant, value in (case.patch or {}).items():
        placed = Path(value.format(out=out)) if isinstance(value, str) else value
        monkeypatch.setattr(module, constant, placed)
    parameters_of.cache_clear()  # of the constants that were patched before
    monkeypatch.chdir(ROOT)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        run(module.main, case.words.format(out=out).split())
    if not case.file:
        assert case.right(said.getvalue()), said.getvalue()[:2000]
        return
    text = (out / case.file).read_text()
    read: Any = text
    if case.file.endswith(".json"):
        read = json.loads(text)
        read = read.get("result", read)
    elif case.file.endswith(".jsonl"):
        read = text.splitlines()
    assert case.right(read), text[:2000]
