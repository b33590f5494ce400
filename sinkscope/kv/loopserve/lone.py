"""Lone slash lines: a query meets one key on each, so there is no matrix product to be had.

A few lines of C do it at about the price of as many cells of dense attention; they are compiled by the machine's own
compiler when first needed (a third of a second, once per process and width of heads). Without one, PyTorch does it row
by row, at the price of two dozen.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

_SOURCE = Path(__file__).with_name("lone.c")
# The order of additions is free; -ffast-math would be more than that, and changes the state of the processor.
_FLAGS = ["-O3", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno", "-shared", "-fPIC"]


@dataclass(frozen=True, eq=False)
class Lone:
    """The two loops over lone lines, for float32 tensors: contiguous ones, but that rows of `[row line]` may lie apart.

    Attributes:
        compiled: they are C; else PyTorch.
        cost: columns of a matrix product that take as long as one line.
        scores: `(query [row d_head], key [key d_head], open [key], offsets, start, out [row line])` writes the scores
            of queries at positions from `start`, minus infinity where a line has no key that is `open`.
        sums: `(probs [row line], value [key d_value], offsets, start, out [row d_value])` adds weighted values.
    """

    compiled: bool
    cost: float
    scores: Callable[[Tensor, Tensor, Tensor, Tensor, int, Tensor], None]
    sums: Callable[[Tensor, Tensor, Tensor, int, Tensor], None]


def lone(width: int, values: int, device: torch.device) -> Lone:
    """The faster one of what there is for keys and values of these widths."""
    library = _library(width, values) if device.type == "cpu" else None
    return _PLAIN if library is None else _compiled(library)


def compiler() -> str | None:
    """The C compiler of this machine: $CC, cc, gcc or clang."""
    found = (shutil.which(name) for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name)
    return next((path for path in found if path), None)


@cache
def _library(width: int, values: int) -> ctypes.CDLL | None:
    why, command = "no C compiler was found", compiler()
    for native in [["-march=native"], []] if command is not None else []:
        try:
            # Windows keeps a library that is in use.
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                made = Path(folder, "lone.so")
                sizes = [f"-DWIDTH={width}", f"-DVALUES={values}"]
                line = [str(command), *_FLAGS, *native, *sizes, str(_SOURCE), "-o", str(made)]
                done = subprocess.run(line, capture_output=True, text=True, timeout=60)
                if done.returncode == 0:
                    return ctypes.CDLL(str(made))
                why = f"{command} failed: {(done.stderr.strip().splitlines() or ['it said nothing'])[0]}"
        except (OSError, subprocess.TimeoutExpired) as error:
            why = f"{command} failed: {error}"
    warnings.warn(
        f"lone slash lines are computed by PyTorch, about ten times slower, so more heads are dense: {why}; "
        "install gcc or clang, or set CC",
        stacklevel=2,
    )
    return None


def _compiled(library: ctypes.CDLL) -> Lone:
    def scores(query: Tensor, key: Tensor, opened: Tensor, offsets: Tensor, start: int, out: Tensor) -> None:
        library.lone_scores(
            *_at(query, key, opened, offsets), *_long(len(offsets), start, len(query)), *_at(out), *_long(out.stride(0))
        )

    def sums(probs: Tensor, value: Tensor, offsets: Tensor, start: int, out: Tensor) -> None:
        library.lone_sums(
            *_at(probs, value, offsets), *_long(len(offsets), start, len(probs)), *_at(out), *_long(probs.stride(0))
        )

    return Lone(True, 1.5, scores, sums)


def _at(*tensors: Tensor) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]


def _long(*numbers: int) -> list[ctypes.c_int64]:
    return [ctypes.c_int64(number) for number in numbers]


def _scores(query: Tensor, key: Tensor, opened: Tensor, offsets: Tensor, start: int, out: Tensor) -> None:
    for line, offset in enumerate(offsets.tolist()):
        begin = max(0, offset - start)  # rows before it have no such key
        at = slice(start + begin - offset, start + len(query) - offset)
        out[:begin, line] = -torch.inf
        out[begin:, line] = (query[begin:] * key[at]).sum(1).masked_fill_(~opened[at], -torch.inf)


def _sums(probs: Tensor, value: Tensor, offsets: Tensor, start: int, out: Tensor) -> None:
    for line, offset in enumerate(offsets.tolist()):
        begin = max(0, offset - start)
        out[begin:].addcmul_(probs[begin:, line, None], value[start + begin - offset : start + len(probs) - offset])


_PLAIN = Lone(False, 24.0, _scores, _sums)
