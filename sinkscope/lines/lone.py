"""Lone slash lines: each query meets one key on each, so a matrix product cannot compute them.

numba, without which this module cannot be imported, compiles the two loops when they are first needed (about a second,
once per process). A cell then costs about as much as one and a half cells of dense attention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, no_type_check

import numba
import numpy as np
from torch import Tensor

# The order of additions is free. The rest of -ffast-math would also change what happens to infinities.
_jit: Any = numba.njit(nogil=True, error_model="numpy", fastmath={"reassoc", "nsz", "contract"})
_index: Any = numba.uintp  # indices that cannot be negative need no check for it
_GROUP = 8  # lines that are taken together: they are sorted, so neighbours read nearly the same keys


@cache
def lone_loops(width: int, values: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """Two loops over lone lines, for float32 tensors on a CPU, with the widths of keys and values compiled in.

    The first is called with `(query [row d_head], key [key d_head], open [key], offsets, start, out [row line])`, and
    writes the scores of queries at positions from `start`, minus infinity where a line has no key that is `open`. The
    second, with `(probs [row line], value [key d_value], offsets, start, out [row d_value])`, adds weighted values.
    """

    @_jit
    @no_type_check  # tools that check types while a program runs would wrap what numba has to compile
    def scores(query: Any, key: Any, opened: Any, offsets: Any, start: Any, out: Any) -> None:
        for first in range(0, len(offsets), _GROUP):
            for r in range(len(query)):
                for line in range(first, min(len(offsets), first + _GROUP)):
                    at = start + r - offsets[line]
                    if at < 0 or not opened[_index(at)]:
                        out[r, line] = -np.inf
                    else:
                        own = _index(at)
                        product = np.float32(0)
                        for i in range(width):
                            product += query[r, i] * key[own, i]
                        out[r, line] = product

    @_jit
    @no_type_check
    def sums(probs: Any, value: Any, offsets: Any, start: Any, out: Any) -> None:
        for first in range(0, len(offsets), _GROUP):
            for r in range(len(probs)):
                for line in range(first, min(len(offsets), first + _GROUP)):
                    if start + r >= offsets[line]:
                        own, weight = _index(start + r - offsets[line]), probs[r, line]
                        for i in range(values):
                            out[r, i] += weight * value[own, i]

    return _on_arrays(scores), _on_arrays(sums)


def _on_arrays(loop: Any) -> Callable[..., None]:
    """The loop, called with tensors."""

    def call(*arguments: Any) -> None:
        loop(*[argument.numpy() if isinstance(argument, Tensor) else argument for argument in arguments])

    return call
