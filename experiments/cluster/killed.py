"""Small models through each executor on two workers of this machine, of which one is killed: which have their card?

    python -m experiments.cluster.killed figures [--models 20] [--executors processes ray ...]

The models are random and have two layers. The process that scans the third of them is killed (signal 9) once its first
part is finished. Afterwards the same call is made again, which resumes; all results have to be those of the first
executor, without the times that they took.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

import sinkscope as ss
from experiments.record import Row, record
from experiments.script import run
from experiments.timing import seconds_of
from sinkscope.app.scan_table import ScanTable
from sinkscope.files.output import write_atomic
from sinkscope.files.store import OURS

SIZES = {"num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 12}
VICTIM = "m02"


def made(folder: Path, count: int) -> list[Path]:
    """The models, a folder each."""
    from transformers import AutoModelForCausalLM

    bundled: Any = ss.load()
    bundled.config.update({**SIZES, "num_key_value_heads": 2})
    for number in range(count):
        torch.manual_seed(number)
        model = AutoModelForCausalLM.from_config(bundled.config).float()
        model.save_pretrained(folder / f"m{number:02}")
        bundled.tokenizer.save_pretrained(folder / f"m{number:02}")
    return sorted(folder.iterdir())


def killed(out: Path, killings: list[int]) -> None:
    """Kill the process that holds the lock of a scan, when its first part is finished."""
    folder = out / VICTIM
    while not killings:
        time.sleep(0.05)
        if not (folder / "find-sinks.json").exists():
            continue
        for place in Path("/proc").glob("[0-9]*/fd/*"):
            try:
                holds = os.readlink(place) == str(folder / f"{OURS}lock")
            except OSError:  # it has ended meanwhile
                continue
            if holds and int(place.parts[2]) != os.getpid():
                killings.append(int(place.parts[2]))
                os.kill(killings[0], signal.SIGKILL)
                return


def executor_of(name: str, logs: Path) -> Any:
    """Two workers, or as many as the executor starts."""
    if name == "ray":
        import ray

        from experiments.cluster.on_ray import OnRay

        ray.init(num_cpus=2, log_to_driver=False)
        return OnRay()
    if name == "submitit":
        import submitit

        executor = submitit.AutoExecutor(str(logs), cluster="local")  # it starts all at once
        executor.update_parameters(timeout_min=240)
        return executor
    if name == "dask":
        from distributed import Client

        return Client(n_workers=2, threads_per_worker=1, dashboard_address=None).get_executor()
    return None


def found(out: Path) -> Row:
    """What every part of every scan found, without the time that it took."""
    kept: Row = {}
    for file in sorted(out.glob("*/*.json")):
        if file.name not in ("card.json", "settings.json"):
            content = json.loads(file.read_text(encoding="utf-8"), object_hook=without_times)
            kept[f"{file.parent.name}/{file.name}"] = content.get("result")
    return kept


def without_times(values: Row) -> Row:
    """A record of a result without what differs from run to run."""
    return {name: value for name, value in values.items() if name not in ("time", "seconds")}


def through(name: str, models: list[Path], out: Path) -> Row:
    """All models through an executor, with one killed, and once more."""
    killings: list[int] = []
    watch = threading.Thread(target=killed, args=(out, killings), daemon=True)
    watch.start()
    executor = executor_of(name, out.with_name(f"{name}-logs"))
    scanned: Callable[[], ScanTable] = partial(ss.scan_many, models, out, executor, workers=2, quick=True)
    rows: list[ScanTable] = []
    seconds: list[float] = []
    for _ in range(2):
        taken, table = seconds_of(scanned, time.perf_counter)
        seconds.append(taken)
        rows.append(table)
    failed = [[row.scan for row in table.scans if row.problem] for table in rows]
    return {
        "executor": name,
        "killed": len(killings),
        "failed": failed[0],
        "failed_again": failed[1],
        "seconds": seconds,
    }


def main(
    out: Path,
    *,
    models: int = 20,
    executors: Sequence[Literal["processes", "submitit", "ray", "dask"]] = ("processes", "submitit", "ray", "dask"),
) -> None:
    """Make what the module describes.

    Args:
        out: folder of what is written.
        models: number of models.
    """
    started = time.perf_counter()
    results: list[Row] = []
    expected: Row = {}
    with tempfile.TemporaryDirectory() as place:
        folders = made(Path(place) / "models", models)
        for name in executors:
            row = through(name, folders, Path(place) / name)
            files = found(Path(place) / name)
            expected = expected or files
            row |= {"files": len(files), "equal": sum(files.get(name) == one for name, one in expected.items())}
            print(row, file=sys.stderr, flush=True)
            results.append(row)
    write_atomic(
        out / "scan_killed.json", record("scan-killed", {"rows": results}, {"models": models}, started=started)
    )


if __name__ == "__main__":
    run(main)
