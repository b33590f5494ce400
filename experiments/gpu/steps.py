"""What the parts share: steps that are written as each ends, told if they fail, and not done again."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from filelock import FileLock

from experiments import make_shape
from experiments.record import record
from sinkscope.files.console import note
from sinkscope.files.output import write_atomic
from sinkscope.models.target import Target
from sinkscope.opening.live import target_of
from sinkscope.opening.load import load

T = TypeVar("T")


def clock(device: torch.device) -> float:
    """Seconds, when the device has done everything it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Steps:
    """The steps of one part, in one JSON that is written after each.

    A step that has a result is not done again, a step that fails says why and the next begins.

    Args:
        kind: of the JSON.
        out: its file.
        settings: what was asked for; results of other settings are not taken over.
        device: where the work is done.
        dtype: of the model.
    """

    def __init__(self, kind: str, out: Path, settings: dict[str, Any], device: torch.device, dtype: str) -> None:
        self._kind, self._out, self._device, self._dtype = kind, out, device, dtype
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        self._settings = {**settings, "hardware": name}
        self._started, self.rows = time.perf_counter(), dict[str, Any]()
        if out.is_file():
            earlier = json.loads(out.read_text())
            if earlier.get("settings") == json.loads(json.dumps(self._settings)):
                self.rows = {key: row for key, row in earlier["result"].items() if "error" not in row}

    @property
    def failed(self) -> list[str]:
        """Names of the steps without a result."""
        return [name for name, row in self.rows.items() if "error" in row]

    def do(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """Do a step, and write what came out with its seconds and its peak of memory on the device."""
        if name in self.rows:
            return
        cuda = self._device.type == "cuda"
        if cuda:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
        began = clock(self._device)
        row: dict[str, Any]
        try:
            row = work()
        except Exception as error:  # whatever it is, the next step begins
            row = {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
            traceback.print_exc(file=sys.stderr)
        row["seconds"] = round(clock(self._device) - began, 3)
        row["peak_device_bytes"] = int(torch.cuda.max_memory_allocated(self._device)) if cuda else 0
        self.rows[name] = row
        note(f"{name}: {json.dumps({k: v for k, v in row.items() if not isinstance(v, list)})}")
        write_atomic(
            self._out,
            record(
                self._kind, self.rows, self._settings, started=self._started, device=self._device, dtype=self._dtype
            ),
        )

    def end(self) -> None:
        """Leave with an error if a step failed."""
        if self.failed:
            raise SystemExit(f"error: {self.failed[0]}: {self.rows[self.failed[0]]['error']}")


def options(about: str | None, argv: Sequence[str] | None, name: str, add: Callable[..., None]) -> argparse.Namespace:
    """The command line of a part: what all of them have, and what `add` adds."""
    parser = argparse.ArgumentParser(
        prog=f"python -m experiments.gpu.{name}", description=(about or "").splitlines()[0]
    )
    parser.add_argument("--out", type=Path, default=Path(f"figures/gpu_{name}.json"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    add(parser.add_argument)
    return parser.parse_args(argv)


def kept(shape: str, folder: Path, dtype: str) -> tuple[str, dict[str, Any]]:
    """A checkpoint of this shape with a planted circuit, made where `folder` has none yet, and the answer."""
    made = folder / f"{shape}-{dtype}"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{made.name}.lock"):  # several parts may want it at once
        if not (made / "truth.json").is_file():  # the file that is written last
            make_shape.main(shape=shape, out=made, dtype=dtype)
    return str(made), json.loads((made / "truth.json").read_text())


@contextmanager
def planted(shape: str, folder: Path | None, dtype: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The same for the length of a `with`, in a temporary folder where None is given."""
    with tempfile.TemporaryDirectory() as own:
        yield kept(shape, folder or Path(own), dtype)


def loaded(folder: str, device: torch.device, dtype: str) -> Target:
    """The checkpoint in memory; it has no unembedding, so nothing reaches its logits and the probe would refuse it."""
    return target_of(load(folder, backend="hf", device=device, dtype=dtype, probe=False))


def measured(device: torch.device, run: Callable[[], T]) -> tuple[T, dict[str, float | int]]:
    """Result, seconds, and peak memory allocated on the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    start = clock(device)
    found = run()
    spent = clock(device) - start
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return found, {"seconds": round(spent, 3), "peak_device_bytes": int(peak)}
