"""A bench and a scan that are killed at any moment, even twice, are carried on to the same table."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_kit import task, tiny, untimed
from organisms import organism

from sinkscope.app import scan as scanning
from sinkscope.bench.run import run_bench

QUICK, ALL = 1, 30
MOMENTS = [pytest.param(n, marks=[] if n < QUICK else pytest.mark.slow) for n in range(ALL)]


def killed(work: Callable[[], object], after: float) -> None:
    """Do the work in another process, and kill it with SIGKILL after so many seconds."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def bench(folder: Path) -> Any:
    model, tokenizer = tiny()
    records = run_bench(
        model, task(), ["full", "h2o:16", "loopguard:48"], tokenizer=tokenizer, out=folder, batch_size=2
    )
    return untimed(records)


@pytest.fixture
def scan(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Any]:
    """A scan of two parts; what it found, without times and memory."""
    parts = [part for part in scanning.PARTS if part.name in ("marking_heads", "separability")]
    monkeypatch.setattr(scanning, "PARTS", tuple(parts))
    made = organism("llama", 2)

    def run(folder: Path) -> Any:
        scanning.scan(made.model, tokenizer=made.tokenizer, out=folder, quick=True)
        results = []
        for name in ("marking-heads.json", "separability.json", "card.json"):
            result = json.loads((folder / name).read_text())["result"]
            for part in result.get("parts", ()):
                part["seconds"] = part["peak_memory_bytes"] = None
            results.append(result)
        return results

    return run


def carried_on(work: Callable[[Path], Any], tmp_path: Path, number: int) -> None:
    began = time.monotonic()
    want = work(tmp_path / "whole")
    seconds = time.monotonic() - began
    draw = random.Random(number)
    for _ in range(2):
        killed(lambda: work(tmp_path / "killed"), draw.uniform(0, 1.2 * seconds))
    assert work(tmp_path / "killed") == want
    assert not [path for path in tmp_path.rglob("*.tmp") if not path.name.startswith(".sinkscope-")]


@pytest.mark.parametrize("number", MOMENTS)
def test_a_killed_bench(tmp_path: Path, number: int) -> None:
    carried_on(bench, tmp_path, number)


@pytest.mark.parametrize("number", [pytest.param(n, marks=pytest.mark.slow) for n in range(ALL)])
def test_a_killed_scan(tmp_path: Path, scan: Callable[[Path], Any], number: int) -> None:
    carried_on(scan, tmp_path, number)
