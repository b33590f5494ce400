"""The paper's Tables 1 to 3 with its numbers beside ours, and what the paper has no table of."""

from __future__ import annotations

import html
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

from sinkscope.bench.loopbench import paper
from sinkscope.bench.loopbench.methods import METHODS
from sinkscope.bench.loopbench.metrics import Detection, Group, detection, group
from sinkscope.bench.loopbench.prompts import TITLES
from sinkscope.bench.loopbench.store import Record, RunFolder, read_run
from sinkscope.bench.loopbench.wiki2 import best_f1
from sinkscope.errors import SinkscopeError
from sinkscope.grid import Grid, aligned
from sinkscope.results import ModelInfo, Result, cell, provenance

LOOPS = ("dc", "ri")
NOT_RUN = "not run"


@dataclass(frozen=True)
class Answers:
    """2WikiMultihopQA by one method.

    Attributes:
        model: name of the model.
        method: name of the method.
        questions: how many.
        f1: mean F1 in per cent, as LongBench scores it.
        same: share of answers that equal those of "full" token for token; None: "full" was not run.
        cached_mean: tokens in the cache, mean over steps, layers and kv heads.
        length: new tokens.
    """

    model: str
    method: str
    questions: int
    f1: float
    same: float | None
    cached_mean: float
    length: float


@dataclass(frozen=True)
class Table:
    """A table as it is printed; in `rows` every row has the same keys."""

    title: str
    note: str
    rows: tuple[dict[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class LoopBench(Result):
    """Runs of LoopBench, added up.

    Attributes:
        tables: as printed, the paper's numbers beside ours.
        groups: per set, model and method.
        ablation: the same with both sets joined.
        answers: 2WikiMultihopQA.
        detections: monitors alone.
    """

    kind: ClassVar[str] = "loopbench"
    percent: ClassVar[tuple[str, ...]] = (
        "paper_loop",
        "loop",
        "loop_low",
        "loop_high",
        "tail_loop",
        "eos",
        "stopped",
        "cap",
        "collapsed",
        "paper_early",
        "early",
        "same",
        "detected",
        "healthy_alarms",
        "text_alarms",
    )

    tables: tuple[Table, ...]
    groups: tuple[Group, ...]
    ablation: tuple[Group, ...]
    answers: tuple[Answers, ...]
    detections: tuple[Detection, ...]

    def rows(self) -> list[dict[str, Any]]:
        """One row per set, model and method, without the lists."""
        lists = ("steps", "survival", "counts", "positions")
        return [{k: v for k, v in vars(g).items() if k not in lists} for g in self.groups]

    def summary(self) -> str:
        """Loop rates in a line per set and model, F1 per model, and false alarms of the whole monitor."""
        lines = [
            f"{TITLES[bench]}, {model}: loop rate "
            + ", ".join(f"{g.method} {g.loop:.1%}" for g in self.groups if (g.bench, g.model) == (bench, model))
            for bench in LOOPS
            for model in dict.fromkeys(g.model for g in self.groups if g.bench == bench)
        ]
        lines += [
            f"{TITLES['2wiki']}, {model}: F1 "
            + ", ".join(f"{a.method} {a.f1:.4g}" for a in self.answers if a.model == model)
            for model in dict.fromkeys(a.model for a in self.answers)
        ]
        lines += [
            f"Honest texts, {d.model}: alarms on {d.text_alarms:.1%} of {d.texts}"
            for d in self.detections
            if d.detector == "full" and d.text_alarms is not None
        ]
        return "\n".join(lines) or "no runs of LoopBench: the tables hold the paper's numbers alone"

    def text(self) -> str:
        """All tables as plain aligned text."""
        return "\n\n".join([self.summary(), *(_aligned(self, table) for table in self.tables)])

    def table(self) -> Any:
        """All tables for a terminal."""
        from rich.console import Group as Stack
        from rich.text import Text

        shown: list[Any] = [Text(self.summary())]
        for table in self.tables:
            head, cells = _strings(self, table)
            shown += [Text(""), Grid(head, cells, table.title, table.note)]
        return Stack(*shown)

    def to_html(self) -> str:
        """All tables as HTML, everything escaped."""
        parts = [f"<pre>{html.escape(self.summary())}</pre>"]
        for table in self.tables:
            head, cells = _strings(self, table)
            th = "".join(f"<th>{html.escape(name)}</th>" for name in head)
            body = "".join(f"<tr>{''.join(f'<td>{html.escape(c)}</td>' for c in line)}</tr>" for line in cells)
            parts.append(
                f"<h2>{html.escape(table.title)}</h2><p>{html.escape(table.note)}</p>"
                f"<table><thead><tr>{th}</tr></thead><tbody>{body}</tbody></table>"
            )
        return f'<div class="sinkscope">{"".join(parts)}</div>'


def title(bench: str) -> str:
    """How a set is called."""
    return next((name for key, name in TITLES.items() if key == bench), bench)


def _strings(result: LoopBench, table: Table) -> tuple[list[str], list[list[str]]]:
    names = [name for name in table.rows[0] if any(row[name] is not None for row in table.rows)]
    cells = [[cell(row[name], percent=name in result.percent) for name in names] for row in table.rows]
    return [name.replace("_", " ") for name in names], cells


def _aligned(result: LoopBench, table: Table) -> str:
    head, cells = _strings(result, table)
    return "\n".join([table.title, *aligned(head, cells), table.note])


def tabulate(folders: Sequence[str | os.PathLike[str]] = ()) -> LoopBench:
    """Add up what `run_loopbench` wrote.

    Args:
        folders: of runs; none: the paper's numbers alone.

    Raises:
        SinkscopeError: a folder is not of a run, or two hold the same method on the same set by the same model.
    """
    started = time.perf_counter()
    runs = [read_run(folder) for folder in folders]
    names = _names(runs)
    parts: dict[tuple[str, str, str], tuple[RunFolder, list[Record]]] = {}  # (bench, model, method)
    for run in runs:
        for record in run.records:
            key = (record.bench, names[record.model], record.method)
            if parts.setdefault(key, (run, []))[0] is not run:
                raise SinkscopeError(
                    f"{parts[key][0].name} and {run.name} both hold {record.method} on {record.bench} by {key[1]}: "
                    "give one of them, or make a table of each"
                )
            parts[key][1].append(record)
    order = {name: i for i, name in enumerate(METHODS)}
    keys = sorted(parts, key=lambda k: (k[0], k[1], order.get(k[2], len(order)), k[2]))
    groups = tuple(
        _group(bench, model, method, [parts[bench, model, method]]) for bench, model, method in keys if bench in LOOPS
    )
    joined = tuple(
        _group("dc+ri", model, method, [parts[b, model, method] for b in LOOPS if (b, model, method) in parts])
        for model in names.values()
        for method in METHODS
        if any((bench, model, method) in parts for bench in LOOPS)
    )
    answers = tuple(_answers(model, method, parts) for bench, model, method in keys if bench == "2wiki")
    detections = tuple(d for model in names.values() for d in _detections(model, parts))
    return LoopBench(
        model=_model(runs),
        settings={"runs": [{"folder": run.name, **run.settings, "prompts": len(run.prompts)} for run in runs]},
        provenance=provenance(
            started=started,
            device=_common(runs, "device"),
            dtype=_common(runs, "dtype"),
            attention=_common(runs, "attention"),
            bos=None,
            seed=int(runs[0].settings.get("seed", 0)) if runs else 0,
        ),
        tables=_tables(groups, joined, answers, detections),
        groups=groups,
        ablation=joined,
        answers=answers,
        detections=detections,
    )


def _names(runs: Sequence[RunFolder]) -> dict[str, str]:
    """Name of each model by its fingerprint; with the fingerprint where two have the same name."""
    found = {run.settings["model"]["fingerprint"]: str(run.settings["model"]["name"]) for run in runs}
    shared = [name for name in found.values() if list(found.values()).count(name) > 1]
    return {mark: f"{name} ({mark[:6]})" if name in shared else name for mark, name in found.items()}


def _common(runs: Sequence[RunFolder], key: str) -> str:
    return ", ".join(dict.fromkeys(str(run.settings.get(key)) for run in runs)) or "none"


def _model(runs: Sequence[RunFolder]) -> ModelInfo:
    known = {run.settings["model"]["fingerprint"]: run.settings["model"] for run in runs}
    if len(known) == 1:
        return ModelInfo(**next(iter(known.values())))
    return ModelInfo(
        ", ".join(str(m["name"]) for m in known.values()) or "no model", "several", 0, 0, 0, " ".join(known)
    )


def _group(bench: str, model: str, method: str, parts: Sequence[tuple[RunFolder, list[Record]]]) -> Group:
    caps = {(int(run.settings["max_new_tokens"]), int(run.settings["window"])) for run, _ in parts}
    if len(caps) > 1:
        raise SinkscopeError(
            f"{' and '.join(run.name for run, _ in parts)} differ in max_new_tokens or window: make a table of each"
        )
    cap, window = caps.pop()
    guarded = method in METHODS and METHODS[method].block == "guard"
    records = [record for _, part in parts for record in part]
    return group(bench, model, method, records, cap=cap, window=window, guarded=guarded)


def _answers(model: str, method: str, parts: dict[tuple[str, str, str], tuple[RunFolder, list[Record]]]) -> Answers:
    run, records = parts["2wiki", model, method]
    full = {r.prompt: r.tokens for r in parts.get(("2wiki", model, "full"), (run, []))[1]}
    same = [record.tokens == full[record.prompt] for record in records if record.prompt in full]
    return Answers(
        model=model,
        method=method,
        questions=len(records),
        f1=100 * fmean(best_f1(record.text, run.prompts[record.prompt]["answers"]) for record in records),
        same=fmean(same) if same else None,
        cached_mean=fmean(record.cached_mean for record in records),
        length=fmean(len(record.tokens) for record in records),
    )


def _detections(model: str, parts: dict[tuple[str, str, str], tuple[RunFolder, list[Record]]]) -> list[Detection]:
    found = [parts[b, model, "full"] for b in LOOPS if (b, model, "full") in parts]
    texts = parts.get(("honest", model, "text"))
    if not found and texts is None:
        return []
    window = int([*found, *([texts] if texts else [])][0][0].settings["window"])
    runs = [record for _, records in found for record in records]
    read = texts[1] if texts else []
    names = [*runs, *read][0].detected
    return [detection(model, name, runs, read, window=window) for name in names]


# --- Tables ----------------------------------------------------------------------------------------------------------


def _tables(
    groups: Sequence[Group], joined: Sequence[Group], answers: Sequence[Answers], detections: Sequence[Detection]
) -> tuple[Table, ...]:
    tables = [_table1(groups), _table2(answers), _table3(joined)]
    for block, title, note in (
        ("sampler", "Samplers, on the whole cache", "columns as in Table 1"),
        ("stopper", "Stoppers", "whoever stops early is no loop by the rule; tail loop judges by the last window"),
    ):
        tables.append(Table(title, note, tuple(_row(g) for g in groups if METHODS[g.method].block == block)))
    tables.append(
        Table(
            "How runs ended, and what the cache held",
            "collapse point: median step from which the window's TTR stays below 0.2; cached: tokens per kv head",
            tuple(
                {
                    "set": g.bench,
                    "model": g.model,
                    "method": g.method,
                    "eos": g.eos,
                    "stopped": g.stopped,
                    "cap": g.cap,
                    "tail_loop": g.tail_loop,
                    "seq_rep_4": g.seq_rep_4,
                    "distinct_2": g.distinct_2,
                    "collapsed": g.collapsed,
                    "collapse_point": g.collapse_point,
                    "cached_mean": g.cached_mean,
                    "cached_peak": g.cached_peak,
                }
                for g in groups
            ),
        )
    )
    tables.append(
        Table(
            "The monitor alone, looking on",
            "detected: of the outputs of full that loop; lead: steps from the first trigger to the collapse point "
            "(median); alarms: of its other outputs, and of honest texts",
            tuple(
                {
                    "model": d.model,
                    "detector": d.detector,
                    "loops": d.loops,
                    "detected": d.detected,
                    "step": d.step,
                    "lead": d.lead,
                    "healthy": d.healthy,
                    "healthy_alarms": d.healthy_alarms,
                    "texts": d.texts,
                    "text_alarms": d.text_alarms,
                }
                for d in detections
            ),
        )
    )
    return tuple(table for table in tables if table.rows)


def _row(g: Group, published: tuple[float, float, float, float] | None = None) -> dict[str, Any]:
    """A row of Table 1, with the paper's numbers where it has some."""
    return {
        **_published(g.bench, g.model, g.method, published),
        "cr": g.cr,
        "ttr": g.ttr,
        "length": round(g.length, 1),
        "loop": g.loop,
        "loop_low": g.loop_low,
        "loop_high": g.loop_high,
        "tail_loop": g.tail_loop,
        "runs": g.runs,
    }


def _published(bench: str, model: str, method: str, numbers: tuple[float, ...] | None) -> dict[str, Any]:
    names = ("paper_cr", "paper_ttr", "paper_length", "paper_loop")
    return {"set": bench, "model": model, "method": method, **dict(zip(names, numbers or (None,) * 4, strict=True))}


def _not_run(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {**row, **dict.fromkeys(names), "runs": NOT_RUN}


def _table1(groups: Sequence[Group]) -> Table:
    rows: list[dict[str, Any]] = []
    inside = [g for g in groups if METHODS[g.method].block in ("cache", "guard")]
    for bench in LOOPS:
        for name in paper.MODELS:
            ours = {g.method: g for g in inside if g.bench == bench and paper.published_model(g.model) == name}
            published = paper.TABLE1[bench, name]
            for method in dict.fromkeys([*published, *ours]):
                numbers = published.get(method)
                rows.append(
                    _row(ours[method], numbers)
                    if method in ours
                    else _not_run(
                        _published(bench, name, method, numbers),
                        "cr",
                        "ttr",
                        "length",
                        "loop",
                        "loop_low",
                        "loop_high",
                        "tail_loop",
                    )
                )
        rows += [_row(g) for g in inside if g.bench == bench and not paper.published_model(g.model)]
    return Table(
        "Table 1: LoopBench", "loop: TTR <= 0.2, CR <= 0.12, length >= cap - 20; low, high: 95 % interval", tuple(rows)
    )


def _table2(answers: Sequence[Answers]) -> Table:
    rows: list[dict[str, Any]] = []
    for method in dict.fromkeys([*paper.TABLE2, *(a.method for a in answers)]):
        published = {"method": method, "paper_f1": paper.TABLE2.get(method)}
        mine = [a for a in answers if a.method == method]
        rows += [
            {
                "model": a.model,
                **published,
                "f1": a.f1,
                "same": a.same,
                "cached_mean": a.cached_mean,
                "runs": a.questions,
            }
            for a in mine
        ] or [_not_run({"model": "-", **published}, "f1", "same", "cached_mean")]
    return Table(
        "Table 2: 2WikiMultihopQA, F1", "the paper names no model; same: answers equal to those of full", tuple(rows)
    )


def _table3(joined: Sequence[Group]) -> Table:
    rows: list[dict[str, Any]] = []
    guards = [g.method for g in joined if METHODS[g.method].block == "guard"]
    for method in dict.fromkeys([*paper.TABLE3, *guards]):
        loop, count, early = paper.TABLE3.get(method, (None, None, None))
        published = {"method": method, "paper_loop": loop, "paper_interventions": count, "paper_early": early}
        rows += [
            {
                "model": g.model,
                **published,
                "loop": g.loop,
                "interventions": g.interventions,
                "early": g.early,
                "runs": g.runs,
            }
            for g in joined
            if g.method == method
        ] or [_not_run({"model": "-", **published}, "loop", "interventions", "early")]
    return Table(
        "Table 3: variants of LoopGuard, both sets joined",
        "early: before 400 of 2,500 tokens; the paper names neither model nor set",
        tuple(rows),
    )
