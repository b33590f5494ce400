"""Tables and the side-by-side view: every number recomputed from the records in another way."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import zlib
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loopbench_kit import MODEL, record
from rich.console import Console

from sinkscope.app.cli import main
from sinkscope.app.pages import page
from sinkscope.bench.files import open_folder
from sinkscope.bench.loopbench.metrics import Continued, survival_steps
from sinkscope.bench.loopbench.tables import LoopBench, PrintedTable, Shown, show, tabulate
from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import visible
from sinkscope.files.result import Result

CAP, WINDOW = 300, 64
LOOP = tuple([1, 2, 3] * 100)
LATE = tuple([*range(100), *([7] * 200)])  # collapses, and is diverse over all
SHORT = tuple([5] * 296)  # a loop, but for its length
FULL_LENGTH = tuple([5] * 297)  # 99.2 % of the cap


def _folder(
    path: Path, records: Sequence[Continued], prompts: Sequence[dict[str, Any]] | None = None, **settings: Any
) -> Path:
    given = {
        "model": MODEL,
        "max_new_tokens": CAP,
        "window": WINDOW,
        "budget": 64,
        "seed": 0,
        "device": "cpu",
        "dtype": "float32",
        "attention": "sdpa",
        **settings,
    }
    there = prompts or [
        {"id": name, "bench": name.split("-")[0], "prompt": f"say\n{name}"}
        for name in dict.fromkeys(r.prompt for r in records)
    ]
    with open_folder(path, given, there, Continued) as store:
        store.append(records)
    return path


def _guard(*steps: int) -> tuple[dict[str, Any], ...]:
    return tuple({"step": s, "position": 9 + s, "kind": "guard", "data": {}} for s in steps)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    quiet = {name: None for name in ("full", "p1", "ttr", "cr", "stall", "tail")}
    return _folder(
        tmp_path / "run",
        [
            record(prompt="dc-0", tokens=LOOP, detected={**quiet, "full": 70, "ttr": 64}),
            record(prompt="dc-1", tokens=LATE, detected={**quiet, "full": 170}),
            record(prompt="dc-2", tokens=tuple(range(120)), ended="eos", detected={**quiet, "ttr": 90}),
            record(prompt="ri-0", bench="ri", tokens=FULL_LENGTH, detected=quiet),
            record(prompt="dc-0", method="loopguard", tokens=tuple(range(300)), events=_guard(20, 70, 110)),
            record(prompt="dc-1", method="loopguard", tokens=LOOP, events=_guard(47, 48)),
            record(prompt="dc-2", method="loopguard", tokens=tuple(range(50)), ended="eos"),
            record(prompt="ri-0", bench="ri", method="loopguard", tokens=SHORT, events=_guard(10)),
            record(prompt="dc-0", method="stop-pattern", tokens=LOOP[:90], ended="stopped"),
            record(prompt="dc-0", method="dry", tokens=tuple(range(300)), cached_mean=30.0, cached_peak=50.0),
            record(prompt="table", bench="honest", method="text", tokens=LOOP, detected={**quiet, "tail": 5}),
            record(prompt="song", bench="honest", method="text", tokens=LOOP, detected=quiet),
        ],
    )


def _table(made: LoopBench, title: str) -> PrintedTable:
    return next(table for table in made.tables if table.title.startswith(title))


def _packed(ids: Sequence[int]) -> float:
    data = np.asarray(ids, dtype="<u4").tobytes()
    return len(zlib.compress(data, 9)) / len(data)


def _by_hand(runs: Sequence[tuple[int, ...]]) -> dict[str, float]:
    """TTR, CR, length and the loop rule of section 4.3, with nothing of sinkscope."""
    ttr, cr = [len(set(t)) / len(t) for t in runs], [_packed(t) for t in runs]
    loops = [a <= 0.2 and c <= 0.12 and len(t) / CAP > 0.9899 for a, c, t in zip(ttr, cr, runs, strict=True)]
    return {
        "ttr": np.mean(ttr),
        "cr": np.mean(cr),
        "length": round(np.mean([len(t) for t in runs]), 1),
        "loop": np.mean(loops),
    }  # type: ignore[dict-item]


def _interval(share: float, n: int) -> tuple[float, float]:
    """Where |p - share| = 1.96 standard errors at p, found by bisection."""

    def edge(inside: float, outside: float) -> float:
        for _ in range(60):
            p = (inside + outside) / 2
            within = abs(p - share) <= 1.959964 * math.sqrt(p * (1 - p) / n)
            inside, outside = (p, outside) if within else (inside, p)
        return inside

    return edge(share, 0.0) if share > 0 else 0.0, edge(share, 1.0) if share < 1 else 1.0


def test_table_1_is_recomputed_independently(folder: Path) -> None:
    rows = {(r["set"], r["model"], r["method"]): r for r in _table(tabulate([folder]), "Table 1").rows}
    runs = {
        ("dc", "full"): [LOOP, LATE, tuple(range(120))],
        ("dc", "loopguard"): [tuple(range(300)), LOOP, tuple(range(50))],
        ("ri", "full"): [FULL_LENGTH],
        ("ri", "loopguard"): [SHORT],
    }
    for (bench, method), tokens in runs.items():
        row = rows[bench, "tiny", method]
        for name, value in _by_hand(tokens).items():
            assert row[name] == pytest.approx(value), (bench, method, name)
        assert (row["loop_low"], row["loop_high"]) == pytest.approx(_interval(row["loop"], len(tokens)), abs=1e-6)
        assert row["runs"] == len(tokens)
    assert rows["ri", "tiny", "full"]["loop"] == 1.0 and rows["ri", "tiny", "loopguard"]["loop"] == 0.0  # 297 and 296
    assert rows["ri", "tiny", "loopguard"]["tail_loop"] == 1.0


def test_the_conclusion_has_the_full_cache_beside_the_best_method(folder: Path) -> None:
    assert tabulate([folder]).conclusion() == (  # dry never looped; stoppers, which end every loop, do not count
        "On LoopBench-DC and LoopBench-RI by tiny, dry loops in 0.0% of 1 runs (95 %: 0% to 79%); the full cache loops "
        "in 50.0% of 4 runs (95 %: 15% to 85%)."
    )


def test_the_papers_rows_stand_beside_and_say_not_run(folder: Path) -> None:
    rows = _table(tabulate([folder]), "Table 1").rows
    theirs = [r for r in rows if r["model"] in ("Qwen3-1.7B", "Llama-3.2-1B")]
    assert len(theirs) == 16 and all(r["runs"] == "not run" and r["loop"] is None for r in theirs)
    row = next(r for r in theirs if (r["set"], r["model"], r["method"]) == ("ri", "Llama-3.2-1B", "loopguard:paper"))
    assert (row["paper_cr"], row["paper_ttr"], row["paper_length"], row["paper_loop"]) == (0.305, 0.489, 1457, 0.023)
    assert "not run" in tabulate([folder]).text()


def test_a_published_model_gets_the_papers_numbers_in_its_own_row(tmp_path: Path) -> None:
    model = {**MODEL, "name": "qwen3-1.7b"}
    made = tabulate([_folder(tmp_path / "r", [record(tokens=LOOP)], model=model)])
    rows = [r for r in _table(made, "Table 1").rows if r["method"] == "full" and r["set"] == "dc"]
    assert [(r["model"], r["paper_loop"], r["loop"], r["runs"]) for r in rows] == [
        ("qwen3-1.7b", 1.0, 1.0, 1),
        ("Llama-3.2-1B", 1.0, None, "not run"),
    ]


def test_nothing_run_at_all() -> None:
    made = tabulate()
    assert [t.title[:7] for t in made.tables] == ["Table 1", "Table 2", "Table 3"]
    assert all(row["runs"] == "not run" for table in made.tables for row in table.rows)
    assert [len(table.rows) for table in made.tables] == [16, 4, 4]
    assert "the paper's numbers alone" in made.summary()
    for number in ("2495", "0.261", "53.61", "12.5", "57.6%", "1.3%"):
        assert number in made.text()


def test_temperatures_stand_apart_and_quality_is_of_runs_that_went_on(tmp_path: Path) -> None:
    records = [
        record(prompt="dc-0", tokens=LOOP, cut=70, nll=0.1, fresh=0.0),
        record(prompt="dc-1", tokens=LATE, cut=170, nll=0.3, fresh=None),
        record(prompt="dc-2", tokens=tuple(range(120)), ended="eos"),
        record(prompt="dc-0", method="loopguard", tokens=tuple(range(90)), ended="eos", cut=70, nll=2.0, fresh=1.0),
        record(prompt="dc-1", method="stop-monitor", tokens=LOOP[:70], ended="stopped", cut=70),
        *(record(prompt="dc-0", temperature=0.4, seed=s, tokens=LOOP if s else tuple(range(300))) for s in range(4)),
    ]
    made = tabulate([_folder(tmp_path / "t", records)])
    rows = {(r["method"], r["temperature"]): r for r in _table(made, "After the first alarm").rows}
    full = rows["full", 0.0]
    assert (full["runs"], full["alarmed"], full["alarm"]) == (3, 2, 120)
    assert full["perplexity"] == pytest.approx((math.exp(0.1) * math.exp(0.3)) ** 0.5)
    assert (full["fresh"], full["reached"], full["eos"]) == (0.0, 0.0, pytest.approx(1 / 3))
    assert [rows["loopguard", 0.0][k] for k in ("perplexity", "fresh", "reached")] == [pytest.approx(math.e**2), 1, 1]
    assert [rows["stop-monitor", 0.0][k] for k in ("alarmed", "perplexity", "reached")] == [0, None, None]
    assert (rows["full", 0.4]["runs"], rows["full", 0.4]["loop"]) == (4, 0.75)
    ours = [r for r in _table(made, "Table 1").rows if r["model"] == "tiny"]
    assert [(r["method"], r["runs"]) for r in ours] == [("full", 3), ("loopguard", 1)]
    assert {g.method: g.runs for g in made.ablation}["full"] == 3
    data = json.loads(made.figure().to_json())["data"]
    line = next(t for t in data if t["name"] == "full, LoopBench-DC, tiny")
    assert (line["x"], line["y"]) == ([0.0, 0.4], [pytest.approx(1 / 3), 0.75])
    assert [o.method for o in show(tmp_path / "t", "dc-0").outputs][:2] == ["full", "loopguard"]
    assert "full at 0.4, seed 3" in {o.method for o in show(tmp_path / "t", "dc-0").outputs}


def test_the_organisms_truth_decides(tmp_path: Path) -> None:
    truth = {"loop-a": (2, 0), "loop-b-older": (64, 30), "loop-c": (16, 600), "honest-a": (None, None)}
    prompts = [
        {"id": name, "bench": "organism", "prompt": "w"} | ({} if p is None else {"period": p, "onset": o})
        for name, (p, o) in truth.items()
    ]
    cycle, walk = tuple([*range(40), *list(range(64)) * 4][:300]), tuple(range(200))
    twice = (*range(172), *range(64), *range(64))  # two copies are no loop yet
    made = {"full": (LOOP, cycle, LATE, walk), "loopguard": (walk, twice, LATE, LOOP)}  # walks end by themselves
    records = [
        record(prompt=name, bench="organism", method=method, tokens=tokens, ended="eos" if tokens == walk else "cap")
        for method, runs in made.items()
        for name, tokens in zip(truth, runs, strict=True)
    ]
    records[-1] = replace(records[-1], events=_guard(70))
    result = tabulate([_folder(tmp_path / "o", records, prompts)])
    full, guard = _table(result, "Loop organism").rows
    names = ["runs", "loop", "eos", "period_2_16", "period_64_128", "onset_0", "onset_30", "onset_600", "older"]
    assert [full[name] for name in names] == [3, 1.0, 0.0, "2/2", "1/1", "1/1", "1/1", "1/1", "1/1"]
    third = pytest.approx(1 / 3)
    assert [guard[name] for name in names] == [3, third, third, "1/2", "0/1", "0/1", "0/1", "1/1", "0/1"]
    assert [(r["honest"], r["honest_cut"], r["honest_same"]) for r in (full, guard)] == [(1, 0.0, 1.0), (1, 1.0, 0.0)]
    bars = json.loads(result.figure().to_json())["data"][0]
    assert (bars["x"], bars["y"]) == (["full", "loopguard"], [1.0, third])
    assert "full: 100.0% of 3 loops go on to the end" in result.summary()
    assert result.conclusion() == (
        "On the loop organism by tiny, loopguard leaves 33.3% of 3 loops and cuts 100.0% of 1 honest repetitions; the "
        "full cache leaves 100.0% of 3 loops and cuts 0.0% of 1 honest repetitions."
    )


def test_table_3_counts_interventions_and_early_ones(folder: Path) -> None:
    rows = {r["method"]: r for r in _table(tabulate([folder]), "Table 3").rows}
    guard = rows["loopguard"]  # steps 20, 70, 110, 47, 48, 10; early ends before 400 * 300 / 2500 = 48
    assert guard["interventions"] == 6 / 4
    assert guard["early"] == 3 / 6
    assert guard["loop"] == 1 / 4 and guard["runs"] == 4
    theirs = ("paper_loop", "paper_interventions", "paper_early")
    assert [guard[name] for name in theirs] == [None, None, None], "the default is not what is printed"
    assert [rows["loopguard:paper"][name] for name in (*theirs, "runs")] == [0.013, 4.8, 0.017, "not run"]
    assert rows["full"]["interventions"] is None
    assert rows["loopguard-p1"]["runs"] == "not run"


def test_samplers_and_stoppers_have_blocks_of_their_own(folder: Path) -> None:
    made = tabulate([folder])
    assert [r["method"] for r in _table(made, "Samplers").rows] == ["dry"]
    (stopper,) = _table(made, "Stoppers").rows
    assert (stopper["loop"], stopper["tail_loop"]) == (0.0, 1.0)
    assert {r["method"] for r in _table(made, "Table 1").rows} == {
        *("full", "streaming", "h2o", "loopguard", "loopguard:paper")
    }
    ended = {(r["set"], r["method"]): r for r in _table(made, "How runs ended").rows}
    assert [ended["dc", "full"][k] for k in ("eos", "stopped", "cap")] == pytest.approx([1 / 3, 0, 2 / 3])
    assert ended["dc", "stop-pattern"]["stopped"] == 1.0
    assert (ended["dc", "dry"]["cached_mean"], ended["dc", "dry"]["cached_peak"]) == (30.0, 50.0)
    grams = [tuple(LOOP[:90][i : i + 4]) for i in range(87)]
    assert ended["dc", "stop-pattern"]["seq_rep_4"] == pytest.approx(1 - len(set(grams)) / 87)


def test_detection_lead_and_alarms(folder: Path) -> None:
    """LOOP collapses with its first whole window, LATE where its window has fewer than 0.2 * 64 tokens of its head."""
    late = next(
        s
        for s in range(WINDOW, CAP + 1)
        if all(len(set(LATE[t - WINDOW : t])) < 0.2 * WINDOW for t in range(s, CAP + 1))
    )
    found = {d.detector: d for d in tabulate([folder]).detections}
    full = found["full"]
    assert (full.loops, full.detected, full.step) == (3, pytest.approx(2 / 3), (70 + 170) / 2)
    assert full.lead == ((WINDOW - 70) + (late - 170)) / 2
    assert (full.healthy, full.healthy_alarms) == (1, 0.0)
    assert (full.texts, full.text_alarms) == (2, 0.0)
    assert found["ttr"].healthy_alarms == 1.0 and found["ttr"].lead == WINDOW - 64
    assert (found["tail"].text_alarms, found["tail"].alarmed) == (0.5, ("table",))
    assert (found["p1"].detected, found["p1"].step, found["p1"].lead) == (0.0, None, None)


def test_survival_falls_where_runs_collapse(folder: Path) -> None:
    group = next(g for g in tabulate([folder]).groups if (g.bench, g.method) == ("dc", "full"))
    assert group.steps == survival_steps(CAP) and group.steps[-1] == CAP
    late = group.collapse_point * 2 - WINDOW if group.collapse_point else 0  # the median of two
    for step, value in zip(group.steps, group.survival, strict=True):
        assert value == pytest.approx(1 - (step >= WINDOW) / 3 - (step >= late) / 3)
    assert group.collapsed == pytest.approx(2 / 3)


def test_table_2_scores_answers_and_compares_with_full(tmp_path: Path) -> None:
    prompts = [
        {"id": f"2wiki-{i}", "bench": "2wiki", "prompt": "?", "answers": a}
        for i, a in enumerate([["The blue whale"], ["yes", "indeed"]])
    ]
    made = tabulate(
        [
            _folder(
                tmp_path / "q",
                [
                    record(prompt=f"2wiki-{i}", bench="2wiki", method=method, text=text, tokens=tokens)
                    for method, answers in {
                        "full": [("a blue whale", (1, 2)), ("no", (3,))],
                        "h2o": [("blue fish", (1, 2)), ("Indeed.", (4,))],
                    }.items()
                    for i, (text, tokens) in enumerate(answers)
                ],
                prompts,
                max_new_tokens=32,
            )
        ]
    )
    rows = {r["method"]: r for r in _table(made, "Table 2").rows}
    assert (rows["full"]["f1"], rows["full"]["same"]) == (50.0, 1.0)
    assert rows["h2o"]["f1"] == pytest.approx(100 * (0.5 + 1) / 2)  # half of both words; an answer word for word
    assert rows["h2o"]["same"] == 0.5
    assert (rows["loopguard:paper"]["paper_f1"], rows["loopguard:paper"]["runs"]) == (53.61, "not run")
    assert not made.groups  # no loop is looked for in answers
    assert made.details() == ["2WikiMultihopQA, tiny: F1 full 50, h2o 75"]
    assert made.conclusion() == (
        "On 2WikiMultihopQA by tiny, h2o has F1 75 on 2 questions; the full cache has F1 50 on 2 questions."
    )


def test_several_folders(tmp_path: Path, folder: Path) -> None:
    other = _folder(tmp_path / "b", [record(prompt="dc-0", method="h2o", tokens=LOOP)])
    made = tabulate([folder, other])
    assert {g.method for g in made.groups if g.bench == "dc"} == {"full", "h2o", "loopguard", "dry", "stop-pattern"}
    twin = _folder(tmp_path / "c", [record(prompt="dc-5", tokens=LOOP)])
    with pytest.raises(SinkscopeError, match="both hold full on dc by tiny: give one of them"):
        tabulate([folder, twin])
    elsewhere = {**MODEL, "fingerprint": "beef00aa"}
    made = tabulate([folder, _folder(tmp_path / "d", [record(model="beef00aa", tokens=LOOP)], model=elsewhere)])
    assert {g.model for g in made.groups} == {"tiny (f00)", "tiny (beef00)"}
    capped = _folder(tmp_path / "e", [record(prompt="ri-1", bench="ri", method="h2o")], max_new_tokens=2500)
    with pytest.raises(SinkscopeError, match="differ in max_new_tokens or window"):
        tabulate([other, capped])


def test_result_comes_back_and_everything_is_escaped(tmp_path: Path) -> None:
    model = {**MODEL, "name": "<script>alert(1)</script>"}
    made = tabulate([_folder(tmp_path / "r", [record(tokens=LOOP)], model=model)])
    assert Result.from_dict(json.loads(made.to_json())) == made
    assert "<script>alert" not in made.to_html() and "&lt;script&gt;alert(1)" in made.to_html()


def test_figure_has_the_numbers(folder: Path) -> None:
    made = tabulate([folder])
    data = json.loads(made.figure().to_json())["data"]
    rates = next(t for t in data if t["type"] == "bar" and t["name"] == "LoopBench-DC, tiny")
    groups = [g for g in made.groups if g.bench == "dc"]
    assert rates["x"] == [g.method for g in groups] and rates["y"] == [g.loop for g in groups]
    lines = {t["name"]: t["y"] for t in data if t["type"] == "scatter"}
    assert lines == {g.method: [1.0, *g.survival] for g in made.ablation if g.method != "stop-pattern"}
    counts, places = [t for t in data if t["type"] == "bar" and t["name"] == "loopguard"]
    assert (counts["x"], counts["y"]) == ([0, 1, 2, 3], [0.25, 0.25, 0.25, 0.25])
    assert sum(places["y"]) == pytest.approx(1.0)
    assert sum(y for x, y in zip(places["x"], places["y"], strict=True) if x < 48) == pytest.approx(3 / 6)
    assert len(tabulate().figure().data) == 0  # nothing run, nothing drawn


def test_figure_of_several_models_has_the_full_cache_of_each(tmp_path: Path) -> None:
    models = [{**MODEL, "name": name, "fingerprint": name} for name in ("small", "large")]
    made = tabulate(
        [
            _folder(
                tmp_path / model["name"],
                [record(model=model["name"], tokens=t), record(model=model["name"], method="dry", tokens=LOOP)],
                model=model,
            )
            for model, t in zip(models, (LOOP, tuple(range(300))), strict=True)
        ]
    )
    data = json.loads(made.figure().to_json())["data"]
    ends = {t["name"]: t["y"][-1] for t in data if t["type"] == "scatter"}
    assert ends == {"small": 0.0, "large": 1.0}


# --- Side by side ----------------------------------------------------------------------------------------------------

MARKUP = 'x</td><script>alert("1")</script>[bold]no[/bold]\x1b[31mred\x07&amp;'


@pytest.fixture
def shown(tmp_path: Path) -> Path:
    return _folder(
        tmp_path / "run",
        [
            record(prompt="dc-0", text=MARKUP, tokens=LOOP),
            record(prompt="dc-0", method="loopguard", text="y" * 5000, events=_guard(20, 90)),
            record(prompt="dc-1", text="other"),
        ],
        [{"id": f"dc-{i}", "bench": "dc", "prompt": f"<b>prompt</b> {i}\nItems:"} for i in range(3)],
    )


def test_outputs_stand_side_by_side(shown: Path) -> None:
    found = show(shown, 0)
    assert [o.method for o in found.outputs] == ["full", "loopguard"]
    assert found.outputs == show(shown, "dc-0").outputs
    assert found == Result.from_dict(json.loads(found.to_json()))
    assert (
        found.conclusion() == "On prompt dc-0 of LoopBench-DC by tiny, loopguard does not loop; the full cache loops."
    )
    assert [(o.length, o.loop, o.interventions) for o in found.outputs] == [(300, True, ()), (300, False, (20, 90))]
    assert [o.method for o in show(shown, 0, methods=["loopguard"]).outputs] == ["loopguard"]
    console = Console(width=120, file=StringIO())
    console.print(found.table())
    seen = console.file.getvalue()  # type: ignore[attr-defined]
    assert any("script" in line and "yyyyyy" in line for line in seen.splitlines())
    assert "[/bold]" in seen and "\x1b" not in seen  # markup and control characters are only text


def test_what_a_model_wrote_is_only_text(shown: Path) -> None:
    found = show(shown, 0)
    for document in (found.to_html(), page(found)):
        body = document.split("<body>")[-1]
        assert 'alert("1")' not in body and "</td><script>alert" not in document
        assert "x&lt;/td&gt;&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;" in document
        assert "&lt;b&gt;prompt&lt;/b&gt;" in document and "&amp;amp;" in document
        assert "y" * 5000 in document  # whole
        assert "\x1b" not in document
    assert "\x1b" not in found.text() and "\\x1b[31mred\\x07" in found.text()
    assert "[... 3800 characters ...]" in found.text()
    assert visible("a\n\tb é\x00") == "a\n\tb é\\x00"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"prompt": 3}, "prompt '3' is not in"),
        ({"prompt": "ri-0"}, "give a number from 0 to 2, or an id such as 'dc-0'"),
        ({"prompt": 2}, "prompt 'dc-2' was not run yet"),
        ({"prompt": 1, "methods": ["loopguard"]}, "loopguard was not run on prompt 'dc-1' in"),
        ({"prompt": 1, "methods": ["guard"]}, "method 'guard' is unknown"),
        ({"prompt": 1, "methods": []}, "no method is given: choose from"),
    ],
)
def test_show_refuses_in_a_line(shown: Path, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(SinkscopeError) as refused:
        show(shown, **arguments)
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_commands(shown: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "x"
    assert main(["loopbench", "table", str(shown), "--json", f"{out}.json", "--html", f"{out}.html"]) == 0
    assert LoopBench.load(f"{out}.json").text() + "\n" == capsys.readouterr().out
    assert 'class="plot"' in Path(f"{out}.html").read_text()
    assert main(["loopbench", "show", str(shown), "--prompt", "0", "--html", f"{out}2.html", "--json", "-"]) == 0
    assert Shown.from_dict(json.loads(capsys.readouterr().out)).outputs == show(shown, 0).outputs
    for words in (["table", str(tmp_path)], ["show", str(tmp_path)], ["show", str(shown), "--prompt", "9"]):
        assert main(["loopbench", *words]) == 2
        assert capsys.readouterr().err.startswith("error: ")


def test_help_loads_no_torch() -> None:
    code = (
        "import sys; from sinkscope.app.cli import main\n"
        "for name in ('run', 'table', 'show'):\n    assert main(['loopbench', name, '--help']) == 0\n"
        "print(sorted({'torch', 'transformers', 'plotly', 'pandas', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "[]\n"
    assert all(word in done.stdout for word in ("--bench", "--methods", "--batch-size", "DIR", "--prompt"))
