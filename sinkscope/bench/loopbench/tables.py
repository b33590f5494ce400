"""The paper's Tables 1 to 3 with its numbers next to ours, and tables that the paper does not have."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, ClassVar

from sinkscope.bench.files import Contents, envelope
from sinkscope.bench.loopbench import paper
from sinkscope.bench.loopbench.metrics import (
    TEXT,
    Continued,
    Detection,
    Ended,
    Ending,
    Group,
    Planted,
    detection,
    ending,
    group,
    planted,
    read_run,
)
from sinkscope.bench.loopbench.prompts import TITLES
from sinkscope.bench.methods import block_of, check_methods, order_of
from sinkscope.bench.scorers import best_f1
from sinkscope.errors import SinkscopeError
from sinkscope.files.options import Option, command
from sinkscope.files.plain import visible
from sinkscope.files.rate import mean_known
from sinkscope.files.result import Grid, Result, cell
from sinkscope.files.tables import WIDTH, strings

LOOPS = ("dc", "ri")  # the paper's sets
SETS = (*LOOPS, "stories")  # whose runs are judged by the loop rule
NOT_RUN = "not run"


@dataclass(frozen=True)
class Answers:
    """2WikiMultihopQA answered by one method.

    Attributes:
        model: Name of the model.
        method: Name of the method.
        questions: Number of questions.
        f1: Mean F1 in per cent, as LongBench scores it.
        same: Share of answers that equal those of "full" token for token; None if "full" was not run.
        cached_mean: Tokens in the cache, mean over steps, layers and kv heads.
        length: Number of new tokens.
    """

    model: str
    method: str
    questions: int
    f1: float
    same: float | None
    cached_mean: float
    length: float

    @property
    def runs(self) -> int:
        """Number of questions, under the name that groups use."""
        return self.questions


@dataclass(frozen=True)
class PrintedTable:
    """A printed table; all rows in `rows` have the same keys."""

    title: str
    note: str
    rows: tuple[dict[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class LoopBench(Result):
    """Summarized runs of LoopBench.

    Attributes:
        tables: Printed tables with the paper's numbers next to ours.
        groups: Results per set, model, method and temperature.
        ablation: Greedy runs with both of the paper's sets combined.
        planted: Results for the loop organism.
        answers: Results for 2WikiMultihopQA.
        detections: Results for monitors alone.
    """

    kind: ClassVar[str] = "loopbench"
    drawing: ClassVar[Any] = "sinkscope.bench.drawing:draw_loopbench"
    page: ClassVar[str] = "loopbench/results"
    table_of: ClassVar[str] = "groups"
    table_without: ClassVar[tuple[str, ...]] = ("steps", "survival", "counts", "positions")
    columns: ClassVar[tuple[str, ...]] = (
        *("set", "model", "method", "detector", "temperature", "runs", "paper_loop", "loop", "loop_low", "loop_high"),
        *("paper_f1", "f1", "same", "paper_interventions", "interventions", "detected", "lead", "text_alarms"),
        *("alarmed", "perplexity", "reached", "fresh", "honest", "honest_cut", "eos", "stopped", "cap", "collapsed"),
        *("ttr", "cr", "length", "tail_loop", "cached_mean", "cached_peak", "loops", "texts", "healthy_alarms"),
    )
    percent: ClassVar[tuple[str, ...]] = (
        *("paper_loop", "loop", "loop_low", "loop_high", "tail_loop", "eos", "stopped", "cap", "collapsed", "same"),
        *("paper_early", "early", "fresh", "reached", "honest_cut", "honest_same", "detected", "healthy_alarms"),
        "text_alarms",
    )

    tables: tuple[PrintedTable, ...]
    groups: tuple[Group, ...]
    ablation: tuple[Group, ...]
    planted: tuple[Planted, ...]
    answers: tuple[Answers, ...]
    detections: tuple[Detection, ...]

    def conclusion(self) -> str:
        """The result of the best method, compared with the full cache."""
        runs = self.ablation or [g for g in self.groups if not g.temperature] or self.groups
        runs = [g for g in runs if (g.bench, g.temperature) == (runs[0].bench, runs[0].temperature)]
        names = dict.fromkeys(g.bench for g in self.groups for one in runs[:1] if g.bench in one.bench.split("+"))
        drawn = "".join(f" at temperature {g.temperature:g}" for g in runs[:1] if g.temperature)
        told: list[tuple[str, Sequence[Any], Callable[[Any], Any], Callable[[Any], str]]] = [
            (
                " and ".join(map(title, names)) + drawn,
                runs,
                lambda g: (g.loop, -g.runs),
                lambda g: f"loops in {g.loop:.1%} of {g.runs} runs (95 %: {g.loop_low:.0%} to {g.loop_high:.0%})",
            ),
            (
                "the loop organism",
                self.planted,
                lambda p: p.loop + (p.honest_cut or 0),
                lambda p: (
                    f"leaves {p.loop:.1%} of {p.runs} loops and cuts {p.honest_cut or 0:.1%} of {p.honest} honest "
                    "repetitions"
                ),
            ),
            (
                TITLES["2wiki"],
                self.answers,
                lambda a: -a.f1,
                lambda a: f"has F1 {a.f1:.4g} on {a.questions} questions",
            ),
        ]
        for where, found, loss, said in told:
            if found:
                return f"On {where} by {found[0].model}, {_beside_full(found, loss, said)}"
        for d in self.detections:
            return (
                f"The monitor ({d.detector}) raises an alarm in {d.detected or 0:.1%} of {d.loops} outputs that loop, "
                f"and in {d.text_alarms or 0:.1%} of {d.texts} honest texts, which are the control."
            )
        return "Nothing was run, so the tables hold the paper's numbers alone."

    def details(self) -> list[str]:
        """Loop rates, one line per set and model; F1 per model; and false alarms of the complete monitor."""
        lines = [
            f"{TITLES[bench]}, {model}: loop rate "
            + ", ".join(
                g.method + (f" at {g.temperature:g}" if g.temperature else "") + f" {g.loop:.1%}"
                for g in self.groups
                if (g.bench, g.model) == (bench, model)
            )
            for bench in SETS
            for model in dict.fromkeys(g.model for g in self.groups if g.bench == bench)
        ]
        lines += [
            f"{TITLES['organism']}, {p.method}: {p.loop:.1%} of {p.runs} loops go on to the end, {p.eos:.1%} end by "
            f"themselves; {p.honest_cut or 0:.1%} of {p.honest} honest repetitions are cut"
            for p in self.planted
        ]
        lines += [
            f"{TITLES['2wiki']}, {model}: F1 "
            + ", ".join(f"{a.method} {a.f1:.4g}" for a in self.answers if a.model == model)
            for model in dict.fromkeys(a.model for a in self.answers)
        ]
        return lines + [
            f"Honest texts, {d.model}: alarms on {d.text_alarms:.1%} of {d.texts}"
            for d in self.detections
            if d.detector == "repeats" and d.text_alarms is not None
        ]

    def grids(self) -> list[Grid]:
        """One grid per printed table."""
        shown = [(table, *strings(table.rows, self.percent)) for table in self.tables]
        return [Grid(head, cells, table.title, table.note, self.columns) for table, head, cells in shown]


def _beside_full(found: Sequence[Any], loss: Callable[[Any], Any], said: Callable[[Any], str]) -> str:
    """Compare the best method of one model with the full cache.

    Args:
        found: Results on one set, by model and method; at least one.
        loss: Value of a method to minimize.
        said: Describes a method's result, as the end of a sentence.
    """
    mine = [one for one in found if one.model == found[0].model]
    full = next((one for one in mine if one.method == "full"), None)
    others = sorted((one for one in mine if one is not full and block_of(one.method) != "stopper"), key=loss)
    told = [f"{others[0].method} {said(others[0])}"] if others else []
    told += [f"the full cache {said(full)}" if full else "the full cache, which is the control, was not run"]
    return "; ".join(told) + ("." if others else "; no other method was run.")


def title(bench: str) -> str:
    """Display name of a set."""
    return next((name for key, name in TITLES.items() if key == bench), bench)


# By set, model, method and temperature.
_Parts = dict[tuple[str, str, str, float], tuple[Contents[Continued], list[Continued]]]


@command(group="Loops", command="loopbench table")
def tabulate(folders: Annotated[Sequence[str | Path], Option(argument=True, metavar="DIR...")] = ()) -> LoopBench:
    """Show the paper's Tables 1 to 3 with our numbers next to its own, and additional tables.

    Args:
        folders: Folders of runs.

    Raises:
        SinkscopeError: A folder is not of a run, or two hold the same method on the same set by the same model.

    Example:
        sinkscope loopbench table runs --html table.html
    """
    started = time.perf_counter()
    runs = [read_run(folder) for folder in folders]
    names = _names(runs)
    parts: _Parts = {}
    for run in runs:
        for record in run.records:
            key = (record.bench, names[record.model], record.method, record.temperature)
            if parts.setdefault(key, (run, []))[0] is not run:
                raise SinkscopeError(
                    f"{parts[key][0].name} and {run.name} both hold {record.method} on {record.bench} by {key[1]}: "
                    "give one of them, or make a table of each"
                )
            parts[key][1].append(record)
    keys = sorted(parts, key=lambda k: (k[0], k[1], order_of(k[2]), k[3]))
    methods = sorted({method for bench, _, method, _ in parts if bench in LOOPS}, key=order_of)
    groups = tuple(_group(*key[:3], [parts[key]]) for key in keys if key[0] in SETS)
    joined = tuple(
        _group("dc+ri", model, method, found)
        for model in names.values()
        for method in methods
        if (found := [parts[bench, model, method, 0.0] for bench in LOOPS if (bench, model, method, 0.0) in parts])
    )
    answers = tuple(_answers(*key[1:3], parts) for key in keys if key[0] == "2wiki" and not key[3])
    truths = tuple(
        planted(*key[1:3], parts[key][1], parts[key][0].prompts, _of_full("organism", key[1], parts))
        for key in keys
        if key[0] == "organism" and not key[3]
    )
    detections = tuple(d for model in names.values() for d in _detections(model, parts))
    return LoopBench(
        **envelope(runs, started, "prompts"),
        tables=_tables(groups, joined, truths, answers, detections),
        groups=groups,
        ablation=joined,
        planted=truths,
        answers=answers,
        detections=detections,
    )


def _names(runs: Sequence[Contents[Continued]]) -> dict[str, str]:
    """Name of each model by its fingerprint; with the fingerprint where two have the same name."""
    found = {run.settings["model"]["fingerprint"]: str(run.settings["model"]["name"]) for run in runs}
    shared = [name for name in found.values() if list(found.values()).count(name) > 1]
    return {mark: f"{name} ({mark[:6]})" if name in shared else name for mark, name in found.items()}


def _group(bench: str, model: str, method: str, parts: Sequence[tuple[Contents[Continued], list[Continued]]]) -> Group:
    caps = {(int(run.settings["max_new_tokens"]), int(run.settings["window"])) for run, _ in parts}
    if len(caps) > 1:
        raise SinkscopeError(
            f"{' and '.join(run.name for run, _ in parts)} differ in max_new_tokens or window: make a table of each"
        )
    cap, window = caps.pop()
    records = [record for _, part in parts for record in part]
    return group(bench, model, method, records, cap=cap, window=window, guarded=block_of(method) == "guard")


def _answers(model: str, method: str, parts: _Parts) -> Answers:
    run, records = parts["2wiki", model, method, 0.0]
    full = _of_full("2wiki", model, parts)
    return Answers(
        model=model,
        method=method,
        questions=len(records),
        f1=100 * fmean(best_f1(record.text, run.prompts[record.prompt]["answers"]) for record in records),
        same=mean_known(record.tokens == full[record.prompt] for record in records if record.prompt in full),
        cached_mean=fmean(record.cached_mean for record in records),
        length=fmean(len(record.tokens) for record in records),
    )


def _of_full(bench: str, model: str, parts: _Parts) -> dict[str, tuple[int, ...]]:
    """Tokens of the full cache by prompt, as far as it was run."""
    found = parts.get((bench, model, "full", 0.0))
    return {} if found is None else {record.prompt: record.tokens for record in found[1]}


def _detections(model: str, parts: _Parts) -> list[Detection]:
    found = [parts[key] for bench in SETS if (key := (bench, model, "full", 0.0)) in parts]
    read = [parts[key] for key in [("honest", model, TEXT, 0.0)] if key in parts]
    if not found and not read:
        return []
    window = int([*found, *read][0][0].settings["window"])
    runs, texts = ([record for _, records in part for record in records] for part in (found, read))
    return [detection(model, name, runs, texts, window=window) for name in [*runs, *texts][0].detected]


# --- Tables ----------------------------------------------------------------------------------------------------------

_PAPER1 = ("paper_cr", "paper_ttr", "paper_length", "paper_loop")
_TABLE1 = ("cr", "ttr", "length", "loop", "loop_low", "loop_high", "tail_loop")
_TABLE2 = ("f1", "same", "cached_mean")
_TABLE3 = ("loop", "interventions", "early")
_AFTER = "runs loop loop_low loop_high tail_loop eos alarmed alarm perplexity fresh reached".split()
_PLANTED = (
    *"runs loop loop_low loop_high eos period_2_16 period_24_48 period_64_128".split(),
    *"onset_0 onset_30 onset_200 onset_600 older honest honest_cut honest_same".split(),
)
_ENDED = "eos stopped cap tail_loop seq_rep_4 distinct_2 collapsed collapse_point cached_mean cached_peak".split()
_ALONE = "detector loops detected step lead healthy healthy_alarms texts text_alarms".split()


def _tables(
    every: Sequence[Group],
    joined: Sequence[Group],
    truths: Sequence[Planted],
    answers: Sequence[Answers],
    detections: Sequence[Detection],
) -> tuple[PrintedTable, ...]:
    groups = [g for g in every if not g.temperature]
    tables = [
        PrintedTable(
            "Table 1: LoopBench",
            "loop: TTR <= 0.2, CR <= 0.12, length >= 99.2 % of the cap; low, high: 95 % interval",
            tuple(_table1(groups)),
        ),
        PrintedTable(
            "Table 2: 2WikiMultihopQA, F1",
            "the paper names no model; same: answers equal to those of full",
            tuple(_beside(answers, {name: (f1,) for name, f1 in paper.TABLE2.items()}, ("paper_f1",), _TABLE2)),
        ),
        PrintedTable(
            "Table 3: variants of LoopGuard, both sets joined",
            "early: before 400 of 2,500 tokens; the paper names neither model nor set",
            tuple(
                _beside(
                    [g for g in joined if g.method in paper.TABLE3 or block_of(g.method) == "guard"],
                    paper.TABLE3,
                    ("paper_loop", "paper_interventions", "paper_early"),
                    _TABLE3,
                )
            ),
        ),
        PrintedTable(
            "After the first alarm",
            "alarmed: runs that were cut or, without a guard, would have been, and went on; perplexity, fresh (share "
            "of new sentences) and reached (end of sequence) are of the text after it",
            tuple({**_head(g), "temperature": g.temperature, **_fields(g, _AFTER)} for g in every),
        ),
        PrintedTable(
            "Loop organism: loops whose truth is known",
            "loop: three copies of a cycle at the cap; counts: looping runs of all runs; honest: prompts that repeat "
            "honestly, cut by a guard or a stopper, and with the same output as the full cache",
            tuple({"model": p.model, "method": p.method, **_fields(p, _PLANTED)} for p in truths),
        ),
        *(
            PrintedTable(title, note, tuple(_alone([g for g in groups if block_of(g.method) == block])))
            for block, title, note in (
                ("sampler", "Samplers, on the whole cache", "columns as in Table 1"),
                (
                    "stopper",
                    "Stoppers",
                    "whoever stops early is no loop by the rule; tail loop judges by the last window",
                ),
            )
        ),
        PrintedTable(
            "How runs ended, and what the cache held",
            "collapse point: median step from which the window's TTR stays below 0.2; cached: tokens per kv head",
            tuple({**_head(g), **_fields(g, _ENDED)} for g in groups),
        ),
        PrintedTable(
            "The monitor alone, looking on",
            "detected: of the outputs of full that loop; lead: steps from the first trigger to the collapse point "
            "(median); alarms: of its other outputs, and of honest texts",
            tuple({"model": d.model, **_fields(d, _ALONE)} for d in detections),
        ),
    ]
    return tuple(table for table in tables if table.rows)


def _fields(found: object, names: Sequence[str]) -> dict[str, Any]:
    return {name: round(value, 1) if name == "length" else value for name in names for value in [getattr(found, name)]}


def _head(g: Group) -> dict[str, Any]:
    return {"set": g.bench, "model": g.model, "method": g.method}


def _table1(groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """The paper's sets and models with ours among them, then what the paper has no numbers of."""
    for bench in SETS:
        mine = [g for g in groups if g.bench == bench and block_of(g.method) in ("cache", "guard")]
        for name in paper.MODELS if bench in LOOPS else ():
            known = [g for g in mine if paper.published_model(g.model) == name]
            yield from _beside(known, paper.TABLE1[bench, name], _PAPER1, _TABLE1, name, set=bench)
        rest = [g for g in mine if bench not in LOOPS or paper.published_model(g.model) is None]
        yield from _alone(rest)


def _alone(groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """Rows of Table 1 that have no numbers of the paper."""
    for g in groups:
        yield from _beside([g], {}, _PAPER1, _TABLE1, set=g.bench)


def _beside(
    ours: Sequence[Any],
    published: Mapping[str, Sequence[float | None]],
    theirs: Sequence[str],
    names: Sequence[str],
    model: str = "-",
    **head: str,
) -> Iterator[dict[str, Any]]:
    """For every method a row of each model; where the method was not run, the paper's numbers alone."""
    for method in dict.fromkeys([*published, *(g.method for g in ours)]):
        numbers = dict(zip(theirs, published.get(method, (None,) * len(theirs)), strict=True))
        mine = [g for g in ours if g.method == method]
        for g in mine or [None]:
            own = dict.fromkeys(names) | {"runs": NOT_RUN} if g is None else _fields(g, names) | {"runs": g.runs}
            yield {**head, "model": model if g is None else g.model, "method": method, **numbers, **own}


# --- One prompt by every method --------------------------------------------------------------------------------------

SHOWN = 1200  # characters of an output in a terminal: its first and last half


@dataclass(frozen=True)
class Written(Ending):
    """The output of one method.

    Attributes:
        method: Name of the method, with temperature and seed if it was sampled.
        text: The generated text.
        ended: Why it ended: by the end of sequence, a stopper, or the maximum of new tokens.
        steps: Steps at which `window_ttr` was measured.
        window_ttr: Type-token ratio of the last window.
    """

    method: str
    text: str
    ended: Ended
    steps: tuple[int, ...]
    window_ttr: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Shown(Result):
    """One prompt of a run.

    Attributes:
        prompt: Id of the prompt.
        bench: Name of its set.
        prompt_text: Text of the prompt.
        outputs: Output of each method.
    """

    page: ClassVar[str] = "loopbench/running"
    kind: ClassVar[str] = "loopbench-show"
    drawing: ClassVar[Any] = "sinkscope.bench.drawing:draw_shown"

    prompt: str
    bench: str
    prompt_text: str
    outputs: tuple[Written, ...]

    def rows(self) -> list[dict[str, Any]]:
        """One row per method, without the texts."""
        names = ("method", "ended", "length", "ttr", "cr", "loop", "tail_loop", "collapse")
        return [{n: getattr(o, n) for n in names} | {"interventions": len(o.interventions)} for o in self.outputs]

    def conclusion(self) -> str:
        """Which outputs loop, compared with that of the full cache."""
        ends = {
            o.method: "loops" if o.loop else "ends in a loop" if o.tail_loop else "does not loop" for o in self.outputs
        }
        others = [f"{method} {end}" for method, end in ends.items() if method != "full"]
        control = f"the full cache {ends['full']}" if "full" in ends else "the full cache, the control, is not shown"
        told = f"{', '.join(others)}; {control}" if others else f"{control}; no other method is shown"
        return f"On prompt {self.prompt} of {title(self.bench)} by {self.model.name}, {told}."

    def details(self) -> list[str]:
        """The end of the prompt."""
        last = visible(self.prompt_text).strip().splitlines()[-1:]
        return [f"The prompt ends {''.join(last)[-100:]!r}."]

    def text(self, width: int | None = WIDTH) -> str:
        """The outputs one below the other, and the numbers."""
        parts = [f"--- {o.method} ({_ending(o)})\n{_middle_out(visible(o.text))}" for o in self.outputs]
        return "\n\n".join([super().text(width), *parts])

    def table(self) -> Any:
        """The outputs side by side."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        grid = Table(header_style="bold", show_lines=True)
        for o in self.outputs:
            grid.add_column(Text(f"{o.method}\n{_ending(o)}"), ratio=1, overflow="fold")
        grid.add_row(*(Text(_middle_out(visible(o.text))) for o in self.outputs))
        return Group(super().table(), grid)

    def to_html(self) -> str:
        """The complete prompt and outputs side by side, with everything escaped."""
        columns = "".join(
            f'<td style="vertical-align:top;text-align:left;min-width:22em"><b>{html.escape(o.method)}</b> '
            f"({html.escape(_ending(o))})<pre>{html.escape(visible(o.text))}</pre></td>"
            for o in self.outputs
        )
        return (
            f"{super().to_html()}<details><summary>prompt</summary><pre>{html.escape(visible(self.prompt_text))}</pre>"
            f'</details><div class="figure"><table><tr>{columns}</tr></table></div>'
        )


def _ending(o: Written) -> str:
    loop = "loop" if o.loop else "ends in a loop" if o.tail_loop else "no loop"
    count = len(o.interventions)
    guard = f", {count} intervention{'s' * (count != 1)}" if count else ""
    return f"{o.length} tokens, {o.ended}, {loop}, TTR {cell(o.ttr)}, CR {cell(o.cr)}{guard}"


def _middle_out(text: str) -> str:
    if len(text) <= SHOWN:
        return text
    half = SHOWN // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


@command(group="Loops", command="loopbench show")
def show(
    run: Annotated[str | Path, Option(argument=True, metavar="DIR")],
    prompt: Annotated[str | int, Option(metavar="ID|NUMBER")] = "0",
    *,
    methods: Annotated[Sequence[str] | None, Option("--methods", reads="commas")] = None,
) -> Shown:
    """Show the outputs of all methods for one prompt side by side; the HTML holds the complete texts.

    Args:
        run: Folder of a run.
        prompt: Id or number of the prompt; numbers begin at 0.
        methods: Names separated by commas. By default all that were run.

    Raises:
        SinkscopeError: The prompt does not exist, or a method is unknown or was not run.

    Example:
        sinkscope loopbench show runs --prompt story-1 --methods full,loopguard
    """
    started = time.perf_counter()
    found = read_run(run)
    known = _prompt(found, str(prompt))
    there = {record.label: record for record in found.records if record.prompt == known}
    wanted = [m.spec for m in check_methods(methods)] if methods is not None else sorted(there, key=order_of)
    if not there:
        raise SinkscopeError(f"prompt {known!r} was not run yet in {found.name}: go on with `sinkscope loopbench run`")
    for name in wanted:
        if name not in there:
            names = ", ".join(there)
            raise SinkscopeError(f"{name} was not run on prompt {known!r} in {found.name}: there are {names}")
    cap, window = int(found.settings["max_new_tokens"]), int(found.settings["window"])
    shared: dict[str, Any] = {
        **envelope([found], started, "prompts"),
        "settings": {"folder": found.name, "prompt": known, **found.settings},
    }
    return Shown(
        **shared,
        prompt=known,
        bench=str(found.prompts[known].get("bench")),
        prompt_text=str(found.prompts[known].get("prompt")),
        outputs=tuple(_output(there[name], cap, window) for name in wanted),
    )


def _prompt(run: Contents[Continued], wanted: str) -> str:
    ids = list(run.prompts)
    if wanted in run.prompts:
        return wanted
    if wanted.isdecimal() and int(wanted) < len(ids):
        return ids[int(wanted)]
    raise SinkscopeError(
        f"prompt {wanted!r} is not in {run.name}: give a number from 0 to {len(ids) - 1}, or an id such as {ids[0]!r}"
    )


def _output(record: Continued, cap: int, window: int) -> Written:
    return Written(
        **vars(ending(record, cap, window)),
        method=record.label,
        text=record.text,
        ended=record.ended,
        steps=tuple(record.signals["step"]),
        window_ttr=tuple(record.signals["ttr"]),
    )
