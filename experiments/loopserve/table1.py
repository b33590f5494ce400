"""LoopServe's Tables 1 and 8, with our values beside the paper's.

    python -m experiments.loopserve.table1 [--runs FOLDER ...]

`--runs` are folders of `sinkscope bench` on LongBench's dialogues (`experiments.loopserve.build`) by the paper's
models; without them "not run" stands there. The same comparison on the recall model is
`experiments.loopserve.dialogues table1`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.drawn import markdown
from experiments.loopserve import paper
from experiments.loopserve.build import SETS
from experiments.record import Row
from experiments.script import run
from sinkscope.bench.methods import name_of
from sinkscope.bench.table import bench_table

PLACE = ("model", "position", "task")


def rows_of(folders: Sequence[Path] = ()) -> list[Row]:
    """A row per model, position, task and method: the paper's number and ours, percent, None for none."""
    ours = measured(folders)
    numbers = dict(paper.TABLE1)
    numbers["llama-3.2"] = {"end": paper.TABLE8}
    rows: list[Row] = []
    for model, places in numbers.items():
        for place, tasks in places.items():
            for task, values in tasks.items():
                for method, value in values.items():
                    about = (model, place, task)
                    row = {**dict(zip(PLACE, about, strict=True)), "method": method, "paper": value}
                    rows.append({**row, "ours": ours.get((*about, method))})
    return rows


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
    """A line per position and task; "paper / ours" for each method."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        place = tuple(row[name] for name in PLACE)
        said = f"{_number(row['paper'], 'lost')} / {_number(row['ours'], 'not run')}"
        lines.setdefault(place, []).append(said)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    return markdown([*PLACE, *methods], [[*place, *cells] for place, cells in lines.items()])


def _number(value: float | None, none: str) -> str:
    if value is None:
        return none
    return f"{value:.2f}"


def main(*, runs: Sequence[Path] = ()) -> None:
    """Make what the module describes.

    Args:
        runs: Folders of `sinkscope bench`.
    """
    rows = rows_of(runs)
    first = [row for row in rows if row["model"] in paper.TABLE1]
    print(table(first), table(rows[len(first) :]), sep="\n\n")


if __name__ == "__main__":
    run(main)
