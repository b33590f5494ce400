"""What the parts share: steps that are written as each ends, told if they fail, and not done again."""

from __future__ import annotations

import gc
import json
import math
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from experiments.planted_lines import made
from experiments.record import Row, write_record
from experiments.timing import clock
from sinkscope.models.target import Target
from sinkscope.opening.load import load, target_of
from sinkscope.results.console import note

SHOWN = 400  # characters of a row that are printed


class Steps:
    """The steps of one part, in one JSON that is written after each.

    A step that has a result is not done again; a step that fails says why, and the next begins.

    Args:
        kind: Kind of the JSON.
        out: Its file.
        settings: What was asked for; results of other settings are not taken over.
        device: Where the work is done.
        dtype: Type of the model's numbers.
        seconds: No step begins after so many.
    """

    def __init__(self, kind: str, out: Path, settings: Row, device: str, dtype: str, seconds: float = math.inf) -> None:
        self._kind = kind
        self._out = out
        self._device = torch.device(device)
        self._dtype = dtype
        hardware = str(device) if self._device.type != "cuda" else torch.cuda.get_device_name(self._device)
        self._settings = {**settings, "hardware": hardware}
        self._end = time.perf_counter() + seconds
        self.rows: Row = {}
        if out.is_file():
            earlier = json.loads(out.read_text())
            if earlier.get("settings") == json.loads(json.dumps(self._settings)):
                self.rows = {name: row for name, row in earlier["result"].items() if "error" not in row}

    def do(self, name: str, work: Callable[[], Row]) -> None:
        """Do a step, and write what came out with its seconds and its peak of memory on the device."""
        if name in self.rows:
            return
        if time.perf_counter() > self._end:
            note(f"{name}: no time left")
            return
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
        began = clock(self._device)
        row: Row
        try:
            row = work()
        except Exception as error:  # whatever it is, the next step begins
            row = {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
            traceback.print_exc(file=sys.stderr)
        row["seconds"] = round(clock(self._device) - began, 3)
        row["peak_device_bytes"] = torch.cuda.max_memory_allocated(self._device) if on_gpu else 0
        self.rows[name] = row
        note(f"{name}: {json.dumps(row)}"[:SHOWN])
        write_record(self._out, self._kind, self.rows, self._settings, device=self._device, dtype=self._dtype)

    def end(self) -> None:
        """Leave with an error if a step failed."""
        for name, row in self.rows.items():
            if "error" in row:
                raise SystemExit(f"error: {name}: {row['error']}")


def model_of(model: str | None, shape: str, device: str, dtype: str) -> Target:
    """The model on the device; None: random weights of a shape, with planted lines in every layer."""
    if model is not None:
        return target_of(load(model, device=device, dtype=dtype))
    with torch.device(device):
        target = made(shape)
    for parameter in target.hf.parameters():  # buffers stay as they are: positions need float32
        parameter.data = parameter.data.to(getattr(torch, dtype))
    return target
