"""Does `sinkscope check-cache` catch faults, and leave right caches alone? Some of both under all checks.

    python -m experiments.check_cache.table [--kvpress KVPRESS/bin/python] [--out figures/check_cache.json]

29 caches have one planted fault each, and a check is named beforehand that has to catch it; the control is the same
check on the same cache without the fault. Twelve are right: four of transformers, three policies of sinkscope and five
presses of kvpress, which run in an environment of their own (`presses`). What fails of these is listed, too.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from experiments.check_cache.faulty import FAULTS
from experiments.check_cache.right import RIGHT, ROUNDING
from experiments.check_cache.verdicts import row_of
from experiments.drawn import save
from experiments.record import Row, record
from experiments.script import run
from experiments.timing import child
from sinkscope.conformance.checks import CHECKS
from sinkscope.conformance.kit import TOLERANCE, Kit
from sinkscope.results.style import BLUE, GREY, RED, figure_of

VALUES = {"does not apply": 0, "passes": 1, "fails": 2}


def faulty_row(name: str) -> Row:
    """A faulty cache, the check that has to catch it, and that check on the right cache."""
    fault = FAULTS[name]
    row = row_of(name, fault.factory)
    verdicts = {one["check"]: one["verdict"] for one in row["checks"]}
    control = Kit(fault.right).checked(CHECKS[fault.check])
    more = {"named": fault.check, "thread": fault.thread, "control": control.verdict}
    return {**row, **more, "caught": verdicts[fault.check] == "fails"}


def figure(data: Row) -> Any:
    """Caches by checks; a cross marks the check that has to catch a fault."""
    import plotly.graph_objects as go

    result = data["result"]
    rows = [*result["right"], *result["faulty"]]
    names = [one["check"].replace("_", " ") for one in rows[0]["checks"]]
    verdicts: list[list[int]] = []
    crosses: list[tuple[str, str]] = []
    caches: list[str] = []
    for row in rows:
        caches.append(row["cache"].replace("_", " "))
        verdicts.append([VALUES[one["verdict"]] for one in row["checks"]])
        if "named" in row:
            crosses.append((row["named"].replace("_", " "), caches[-1]))
    colours = [(0, "#eeeeee"), (1 / 3, "#eeeeee"), (1 / 3, BLUE), (2 / 3, BLUE), (2 / 3, RED), (1, RED)]
    ticks = {"tickvals": [1 / 3, 1, 5 / 3], "ticktext": ["does not apply", "passes", "fails"]}
    heat = go.Heatmap(x=names, y=caches, z=verdicts, zmin=0, zmax=2, colorscale=colours, colorbar=ticks, xgap=1, ygap=1)
    fig = go.Figure(heat)
    marker = {"symbol": "x", "color": "white", "size": 7}
    fig.add_scatter(x=[x for x, _ in crosses], y=[y for _, y in crosses], mode="markers", marker=marker)
    fig.add_hline(y=len(result["right"]) - 0.5, line={"color": GREY, "width": 2})
    fig.update_yaxes(autorange="reversed")
    fig.update_xaxes(tickangle=-45)
    title = (
        f"{result['caught']} of {len(result['faulty'])} planted faults are caught by the check named beforehand "
        "(crosses); "
        f"{result['controls']} of the same caches without the fault pass it"
    )
    return figure_of(fig, None, title, width=1250, height=1250, bottom=330, showlegend=False)


def main(*, kvpress: Path | None = None, out: Path = Path("figures/check_cache.json")) -> None:
    """Check all caches.

    Args:
        kvpress: Python of an environment with kvpress. Without it, the presses are left out.
        out: The record.
    """
    started = time.perf_counter()
    right: list[Row] = []
    for factory in RIGHT:
        right.append(row_of(factory.__name__, factory, ROUNDING.get(factory.__name__, TOLERANCE)))
    versions: Row = {}
    if kvpress is not None:
        presses = child("check_cache.presses", python=str(kvpress))
        versions = presses["versions"]
        right += presses["rows"]
    faulty: list[Row] = []
    for name in FAULTS:
        faulty.append(faulty_row(name))
        print(name, faulty[-1]["caught"], faulty[-1]["control"], flush=True)
    result: Row = {
        "right": right,
        "faulty": faulty,
        "caught": sum(row["caught"] for row in faulty),
        "controls": sum(row["control"] == "passes" for row in faulty),
    }
    text = record("caches-checked", result, {"rounding": ROUNDING, "kvpress": versions}, started=started)
    save(out.stem, text, figure, out.parent)
    for row in right:
        for one in row["checks"]:
            if one["verdict"] == "fails":
                print(f"{row['cache']}: {one['check']}: {one['seen']}")


if __name__ == "__main__":
    run(main)
