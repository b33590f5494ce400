"""What real models give on a GPU beside a CPU, and which outputs loop: read from the files of the package's commands.

    python -m experiments.gpu.real CPU GPU [--out FILE]

CPU and GPU are folders of results that have the same names on both, such as find-sinks.json; GPU also holds the folders
that `sinkscope bench --out` wrote. Of each result, the largest difference of a number, absolute and over the larger of
the number and 0.001; of each method of the bench, means over its answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.record import Row, write_record
from experiments.script import run
from sinkscope.bench.record import read_run
from sinkscope.errors import SinkscopeError

SHOWN = ("loop", "eos", "ttr", "cr", "length", "interventions")
SMALLEST = 1e-3


def pairs(one: Any, other: Any, where: str = "") -> Iterator[tuple[str, float, float]]:
    """Numbers at the same place of two results.

    Raises:
        SinkscopeError: Something else differs there.
    """
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key, value in one.items():
            yield from pairs(value, other[key], f"{where}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, value in enumerate(one):
            yield from pairs(value, other[number], f"{where}[{number}]")
    elif isinstance(one, float) and isinstance(other, float):
        yield where, one, other
    elif one != other:
        raise SinkscopeError(f"{where.strip('.')} is {one!r} and {other!r}")


def compared(cpu: Path, gpu: Path) -> Row:
    """The largest difference of the numbers of two results, and where it is."""
    results = [json.loads(file.read_text())["result"] for file in (cpu, gpu)]
    absolute, relative, place, count = 0.0, 0.0, "", 0
    for where, one, other in pairs(*results):
        difference = abs(one - other)
        count += 1
        relative = max(relative, difference / max(abs(one), SMALLEST))
        if difference > absolute and abs(one) < 1:  # shares: of norms and perplexities the relative one counts
            absolute, place = difference, where
    return {"numbers": count, "relative": relative, "share": absolute, "share_at": place.strip(".")}


def answers(folder: Path) -> dict[str, Row]:
    """Means over the answers of each method."""
    rows = [{"method": str(one.method)} | {name: one.metrics[name] or 0 for name in SHOWN} for one in read_run(folder)]
    means: dict[str, Row] = {}
    for method, own in pd.DataFrame(rows).groupby("method", sort=False):
        means[str(method)] = {"answers": len(own), **own[list(SHOWN)].mean().to_dict()}
    return means


def main(cpu: Path, gpu: Path, *, out: Path = Path("experiments/gpu/measured/h100/real.json")) -> None:
    """Make what the module describes."""
    rows: Row = {}
    for file in sorted(cpu.glob("*.json")):
        if (gpu / file.name).is_file() and "result" in json.loads(file.read_text()):
            rows[file.stem] = compared(file, gpu / file.name)
    for runs in sorted(gpu.glob("*/runs.jsonl")):
        for method, means in answers(runs.parent).items():
            rows[f"{runs.parent.name}, {method}"] = means
    write_record(out, "gpu-real", rows, {"smallest": SMALLEST})


if __name__ == "__main__":
    run(main)
