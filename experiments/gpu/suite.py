"""The tests on a machine with a GPU, where models are opened on it by default: a step for each folder of `tests`.

    python -m experiments.gpu.suite [--rooms sparse kv ...] [--processes 6] [--seconds 600] [--out FILE]

The Triton kernels come first, with the tests that need a GPU. What is missing on the machine is skipped or said. No
step begins after `--seconds`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from experiments.gpu.steps import Steps
from experiments.record import Row
from experiments.script import run

ROOT = Path(__file__).parents[2]
KERNELS = "sparse/test_loopserve_triton.py"
ROOMS = f"{KERNELS} sparse kv tap hooks opening generation sinks loops measure models conformance bench ways".split()
"""Folders of `tests` in which models run, those of kernels and caches first; of the kernels also what is slow."""


def tested(path: str, marks: str, processes: int, left: float) -> Row:
    """How many tests pass, and which do not, with their reasons."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.xml")
        words = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "-m", marks, f"--junitxml={file}", f"tests/{path}"]
        words += ["-n", str(processes), "--dist", "loadfile"] if processes > 1 else []
        try:
            subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, timeout=left, check=False)
        except subprocess.TimeoutExpired:
            return {"error": f"tests/{path} did not end in {left:.0f} s"}
        if not file.exists():
            return {"error": f"pytest did not begin with tests/{path}"}
        cases = list(ElementTree.parse(file).getroot().iter("testcase"))
    row: Row = {"passed": 0, "skipped": 0, "failed": []}
    for case in cases:
        bad = [child for child in case if child.tag in ("failure", "error")]
        if bad:
            row["failed"].append([f"{case.get('classname')}::{case.get('name')}", (bad[0].get("message") or "")[:300]])
        elif case.find("skipped") is not None:
            row["skipped"] += 1
        else:
            row["passed"] += 1
    return {**row, "right": not row["failed"]}


def main(
    *,
    rooms: Sequence[str] = ROOMS,
    processes: int = 6,
    seconds: float = 600.0,
    device: str = "cuda",
    out: Path = Path("figures/gpu_suite.json"),
) -> None:
    """Make what the module describes.

    Args:
        rooms: Folders or files of `tests`.
        processes: That run tests at the same time.
        seconds: No step begins after so many, and none goes on.
        device: What the record says; models are opened on the first device that torch has.
    """
    steps = Steps("gpu-suite", out, {"processes": processes}, device, "", seconds)
    for path in rooms:
        one = path == KERNELS
        marks = "slow or not slow" if one else "not slow"
        steps.do(path, partial(tested, path, marks, 1 if one else processes, steps.left()))
    steps.end()


if __name__ == "__main__":
    run(main)
