"""Tables of what a GPU was measured to do, in Markdown, from the files that `experiments.gpu.all` wrote.

    python -m experiments.gpu.tables DIR

DIR holds bands.json, overhead.json and the others; a file that is not there, or a step that failed, is left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from experiments import drawn
from experiments.gpu.real import SHOWN, answers
from experiments.record import Row
from experiments.script import run


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table, or nothing if it has no lines."""
    return drawn.markdown(head, lines) + "\n\n" if lines else ""


def rows_of(file: Path, begin: str = "") -> dict[str, Row]:
    """The steps of a file whose names begin so, but for those that failed; empty if there is no file."""
    if not file.is_file():
        return {}
    steps = json.loads(file.read_text())["result"]
    return {name: row for name, row in steps.items() if name.startswith(begin) and "error" not in row}


def prompts(file: Path) -> str:
    """How many times as fast whole prompts are along bands."""
    rows = sorted(rows_of(file, "prompt").values(), key=lambda row: (-row["alpha"], row["n"]))
    lines: list[list[str]] = []
    for row in rows:
        times = f"{row['times_faster']:.2f}"
        lines.append([f"{row['n']:,}", f"{row['alpha']:g}", times, f"{row['attended']:.0%}", f"{row['ms']:.0f}"])
    return markdown(("tokens", "alpha", "times as fast", "cells", "ms"), lines)


def layers(file: Path) -> str:
    """The choice as it is launched and replayed, and FlexAttention beside the kernels."""
    chosen: list[list[str]] = []
    for row in rows_of(file, "choice").values():
        times = [f"{row[name]:.2f}" for name in ("ms", "replayed_ms", "host_ms", "host_replayed_ms")]
        chosen.append([f"{row['n']:,}", *times, str(row.get("same", ""))])
    beside: list[list[str]] = []
    for row in rows_of(file, "flex").values():
        times = [f"{row[name]:.2f}" for name in ("ms", "ours_ms")]
        beside.append([f"{row['n']:,}", f"{row['cells']:.0%}", *times, f"{row['difference']:.1e}"])
    head = ("tokens", "choice, launched (ms)", "replayed", "launched, host", "replayed, host", "the same")
    flex = ("tokens", "cells", "FlexAttention (ms)", "ours", "difference")
    return markdown(head, chosen) + markdown(flex, beside)


def tokens(file: Path) -> str:
    """A token over stock, all of them and behind the first."""
    over: list[list[str]] = []
    for step, row in rows_of(file).items():
        for name, one in row.items():
            if isinstance(one, dict) and "interval" in one:
                low, high = one["interval"]
                later = f"{one['later']['median']:.2f}"
                over.append([step, name, f"{one['median']:.2f} ({low:.2f} to {high:.2f})", later])
    return markdown(("after", "method", "over stock", "behind the first"), over)


def checks(out: Path) -> str:
    """How the net and the tests ended."""
    lines: list[list[str]] = []
    for log in sorted([*out.glob("fault.log"), *out.glob("net-*.log"), *out.glob("suite*.log")]):
        counts = [line for line in log.read_text().splitlines() if " draws, " in line or " passed" in line]
        lines.append([log.stem, "; ".join(counts)])
    return markdown(("what", ""), lines)


def models(out: Path) -> str:
    """Answers of real models and of members of the family."""
    lines: list[list[str]] = []
    for runs in sorted(out.glob("*/runs.jsonl")):
        for method, one in answers(runs.parent).items():
            shown = [f"{one[name]:.2f}" for name in SHOWN]
            lines.append([runs.parent.name, method, str(one["answers"]), *shown])
    return markdown(("model", "method", "answers", *SHOWN), lines)


def main(out: Path) -> None:
    """Make what the module describes."""
    for title, table in {
        "Sparse prompts": prompts(out / "bands.json"),
        "Choice and FlexAttention": layers(out / "bands.json"),
        "A token over stock attention": tokens(out / "overhead.json"),
        "Checks": checks(out),
        "Models": models(out),
    }.items():
        if table:
            print(f"## {title}\n\n{table.rstrip()}\n")


if __name__ == "__main__":
    run(main)
