"""A bench and a scan that are killed at any moment, even twice, are carried on to the same table."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from bench_kit import task, tiny, untimed
from covering import slow
from organisms import organism

from sinkscope.app import scan
from sinkscope.bench.run import run_bench

MOMENTS = [0, *map(slow, range(1, 30))]


def killed(work: Callable[[], object], after: float):
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


def bench(folder: Path):
    model, tokenizer = tiny()
    records = run_bench(
        model, task(), ["full", "h2o:16", "loopguard:48"], tokenizer=tokenizer, out=folder, batch_size=2
    )
    return untimed(records)


def scanned(folder: Path):
    """A scan of a planted model by three of its parts; what its card holds of them."""
    with pytest.MonkeyPatch.context() as patch:
        parts = [part for part in scan.scan_parts() if part.name in ("find_sinks", "circuit", "repeat")]
        patch.setattr(scan, "scan_parts", lambda: parts)
        card = scan.scan(planted(), out=folder, quick=True)
    return [(part.name, part.conclusion, part.problem, part.numbers) for part in card.parts]


@cache
def planted():
    made = organism("llama", 3)
    made.model.tokenizer = made.tokenizer
    return made.model


def carried_on(work: Callable[[Path], Any], tmp_path: Path, number: int):
    began = time.monotonic()
    want = work(tmp_path / "whole")
    seconds = time.monotonic() - began
    draw = random.Random(number)
    for _ in range(2):
        killed(lambda: work(tmp_path / "killed"), draw.uniform(0, 1.2 * seconds))
    assert work(tmp_path / "killed") == want
    assert not [path for path in tmp_path.rglob("*.tmp") if not path.name.startswith(".sinkscope-")]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(5))
def test_a_killed_scan(tmp_path, number):
    carried_on(scanned, tmp_path, number)


@pytest.mark.parametrize("number", MOMENTS)
def test_a_killed_bench(tmp_path, number):
    carried_on(bench, tmp_path, number)
