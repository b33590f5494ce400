"""LoopServe's Tables 1 and 8 beside our values, and the same comparison on dialogues of the recall model.

    python -m experiments.loopserve.table1 [--runs FOLDER ...] [--work runs] [--out figures]

`--runs` are folders of `sinkscope bench` on LongBench's dialogues (`experiments.loopserve.build`) by the paper's
models; without them "not run" stands there. The recall model answers dialogues of three turns at an eighth of the
context for every method, once with one fact an answer (the prompt's last token looks for it) and once with a chain of
eight (each found only when the one before is written), and longer ones at the sizes of Table 7. Controls: everything,
and a random part.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.drawn import at_place, error_bars, save
from experiments.loopserve import paper
from experiments.loopserve.build import SETS
from experiments.loopserve.runs import (
    CHAIN,
    KEPT,
    LONG,
    LONGBENCH,
    SHARE,
    TABLE7,
    answers,
    rows_of,
    seconds_of,
    settings_of,
    specs,
)
from experiments.record import Row, record
from experiments.script import run
from sinkscope.bench.methods import name_of
from sinkscope.bench.table import bench_table
from sinkscope.bench.tasks.recall import POSITIONS
from sinkscope.results.style import BLUE, GREEN, ORANGE, figure_of

COLOURS = dict(zip(POSITIONS, (BLUE, ORANGE, GREEN), strict=True))
NOT_RUN = "not run"
TOLD = {
    "full": "with the full cache",
    "loopserve": "by LoopServe's default",
    "loopserve, paper": "as printed",
}
"""What the figure's title says, by `short` name."""
OWN = (
    "full",
    "h2o",
    f"snapkv:{LONGBENCH}",
    f"adakv:{LONGBENCH}",
    "streaming",
    "tova",
    "a-shape",
    "tri-shape",
    "minference",
    "loopserve",
    "loopserve-0",
    "loopserve-p",
    "loopserve:paper",
    "loopserve-p:paper",
    "loopserve-p:paper:variant=exact",
    "loopserve-d",
    "loopserve-d:first=0",
    "random:window=32",
)
LONGER = (
    *TABLE7.values(),
    "loopserve-p",
    "loopserve:paper:1024",
    "loopserve-p:paper:variant=exact",
    "loopserve-d:1024",
    "random:1024:window=32",
)


def paper_rows(folders: Sequence[Path] = ()) -> list[Row]:
    """Table 1, a row per model, position, task and method: the paper's number and ours, percent, None for none."""
    ours = measured(folders)
    return [
        {
            "model": model,
            "position": place,
            "task": task,
            "method": method,
            "paper": number,
            "ours": ours.get((model, place, task, method)),
        }
        for model, places in paper.TABLE1.items()
        for place, tasks in places.items()
        for task, numbers in tasks.items()
        for method, number in numbers.items()
    ]


def table8_rows(folders: Sequence[Path] = ()) -> list[Row]:
    """Table 8: Llama-3.2-3B-Instruct, questions at the end."""
    ours = measured(folders)
    return [
        {
            "model": "llama-3.2",
            "position": "end",
            "task": task,
            "method": method,
            "paper": number,
            "ours": ours.get(("llama-3.2", "end", task, method)),
        }
        for method, numbers in paper.TABLE8.items()
        for task, number in numbers.items()
    ]


def measured(folders: Sequence[Path]) -> dict[tuple[str, str, str, str], float]:
    """Percent by the paper's name of the model, position, task and method, from finished runs.

    Where one method was run with several settings, the last one counts, and the printed one before the default.
    """
    found: dict[tuple[str, str, str, str], float] = {}
    groups = ()
    if folders:
        groups = bench_table([Path(folder) for folder in folders]).groups
    for group in sorted(groups, key=lambda group: ":paper" in group.method):
        model = next((key for key, name in paper.MODELS.items() if name.lower() in group.model.lower()), None)
        if model is not None and group.set in SETS:
            for place, score in group.parts.items():
                found[model, place, group.set, name_of(group.method)] = 100 * score
    return found


def table(rows: Sequence[Row]) -> str:
    """Markdown: a line per position and task; "paper / ours" for each method."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lines = ["| model | question | task | " + " | ".join(methods) + " |", "|---" * (3 + len(methods)) + "|"]
    places = dict.fromkeys((row["model"], row["position"], row["task"]) for row in rows)
    by = {}
    for row in rows:
        by[(row["model"], row["position"], row["task"], row["method"])] = row
    for place in places:
        cells = []
        for method in methods:
            cells.append(by[(*place, method)])
        said = []
        for row in cells:
            said.append(f"{_number(row['paper'], 'lost')} / {_number(row['ours'], NOT_RUN)}")
        lines.append(f"| {' | '.join(place)} | {' | '.join(said)} |")
    return "\n".join(lines)


def _number(value: float | None, none: str) -> str:
    if value is None:
        return none
    return f"{value:.2f}"


def own_table(rows: Sequence[Row]) -> str:
    """Markdown: a line per suite and method; exact answers, and the share before the first mistake, by position."""
    head = "| suite | method | " + " | ".join(POSITIONS) + " | all (95 %) | before the first mistake | read | cells |"
    lines = [head, "|---" * 9 + "|"]
    for suite, method in dict.fromkeys((row["suite"], row["method"]) for row in rows):
        by = {}
        for row in rows:
            if (row["suite"], row["method"]) == (suite, method):
                by[row["position"]] = row
        all_ = by["all"]
        parts = []
        for place in POSITIONS:
            parts.append(f"{by[place]['score']:.0%}")
        lines.append(
            f"| {suite} | {short(method)} | "
            + " | ".join(parts)
            + f" | {all_['score']:.0%} ({all_['low']:.0%} to {all_['high']:.0%}) | {all_['prefix']:.0%} | "
            + f"{_share(all_['read'], all_['prompt_tokens'])} | {_share(all_['cells'], 1)} |"
        )
    return "\n".join(lines)


def _share(value: float | None, of: float) -> str:
    if value is None:
        return "all"
    return f"{value / of:.0%}"


def short(spec: str) -> str:
    """The method's name, and what tells it from others of that name."""
    written = spec.removeprefix("experiments.loopserve.runs:").replace("RandomKeep", "random")
    name, *given = written.split(":")
    shown = []
    for part in given:
        if part.split("=")[0] in ("alpha", "first", "paper", "seed", "variant"):
            shown.append(part)
    return ", ".join([name, *(shown if name.startswith("loopserve") else [])])


def figure(data: Row) -> Any:
    """Bars by method and position: the paper's means, and ours."""
    rows = data["result"]["recall"]
    from plotly.subplots import make_subplots

    titles = [
        "paper, Llama-3.1-8B: mean of ten sets, of the full cache's",
        "one fact, 12.5 %: answers that are right",
        "chain of eight, 12.5 %: of an answer, before its first mistake",
        "chain of eight, Table 7's sizes: the same",
    ]
    fig: Any = make_subplots(rows=2, cols=2, subplot_titles=titles, horizontal_spacing=0.06, vertical_spacing=0.2)
    for place in POSITIONS:
        full = paper.mean("llama-3.1", place, "full")
        shown = [
            ([*paper.METHODS], [paper.mean("llama-3.1", place, name) / full for name in paper.METHODS], None),
            *(
                _bars(rows, suite, place, key)
                for suite, key in ((KEPT.name, "score"), (CHAIN.name, "prefix"), (LONG.name, "prefix"))
            ),
        ]
        for number, (names, values, error) in enumerate(shown):
            fig.add_bar(
                x=names,
                y=values,
                name=f"question {at_place(place)}",
                marker_color=COLOURS[place],
                legendgroup=place,
                showlegend=not number,
                error_y=error,
                row=number // 2 + 1,
                col=number % 2 + 1,
            )
    fig.update_yaxes(range=[0, 1.06], tickformat=".0%")
    mine = []
    for row in rows:
        if (row["suite"], row["position"]) == (KEPT.name, "begin"):
            mine.append(row)
    ours = {}
    for row in mine:
        ours[short(row["method"])] = row["score"]
    parts = []
    for name, said in TOLD.items():
        if name in ours:
            parts.append(f"{ours[name]:.0%} {said}")
    told = ", ".join(parts)
    found = f"One fact at 12.5 %, question at the beginning: the recall model is right in {told}"
    return figure_of(fig, None, found, width=1500, height=950, barmode="group", legend=-0.2, bottom=170)


def _bars(rows: Sequence[Row], suite: str, place: str, key: str) -> tuple[list[str], list[float], Any]:
    mine = []
    for row in rows:
        if (row["suite"], row["position"]) == (suite, place):
            mine.append(row)
    error = None
    if key == "score":
        error = error_bars(mine, key, width=2, color="#888")
    return [short(row["method"]).replace(", ", "<br>") for row in mine], [row[key] for row in mine], error


def main(*, work: Path = Path("runs"), out: Path = Path("figures"), runs: Sequence[Path] = ()) -> None:
    """Make what the module describes.

    Args:
        work: Folder of the answers.
        runs: Folders of `sinkscope bench`.
    """
    started = time.perf_counter()
    table1 = paper_rows(runs)
    table8 = table8_rows(runs)
    rows = list[Row]()
    seconds = 0.0
    plan = [(KEPT, specs(OWN)), (CHAIN, specs(OWN)), (LONG, specs(LONGER))]
    for suite, methods in plan:
        said = answers(suite, methods, work)
        seconds += seconds_of(said)
        rows += [row for method in methods for row in rows_of(suite, said, method)]
    print(table(table1), table(table8), own_table(rows), sep="\n\n")
    settings = settings_of([suite for suite, _ in plan], seconds) | {"share": SHARE, "runs": len(runs)}
    result = {"table1": table1, "table8": table8, "recall": rows}
    save("loopserve_table1", record("loopserve-table1", result, settings, started=started), figure, out)


if __name__ == "__main__":
    run(main)
