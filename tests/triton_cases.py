"""Triton's kernel interpreted on a CPU, in a process of its own, because triton reads the variable when it is imported.

Prints one JSON object: for every case what `sparse_attention` said, and its differences from the same by a mask.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any
from unittest.mock import MagicMock, patch

os.environ["TRITON_INTERPRET"] = "1"

import torch
from lines_kit import along, drawn
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from sinkscope.lines import triton as kernel
from sinkscope.lines.attention import Scores
from sinkscope.lines.head_lines import HeadLines
from sinkscope.lines.sparse import sparse_attention


def lines_of(keys: int, queries: int, kind: str) -> HeadLines:
    """Lines of four heads."""
    lines = drawn(4, keys, queries, 0.0, 0.0)
    generator = torch.Generator().manual_seed(7)
    lone = torch.randperm(keys - 1, generator=generator)[:5] + 1
    few = torch.rand(keys, generator=generator) < 0.1
    match kind:
        case "mixed":  # columns and lone lines; a band with a hole and lone lines beside it; columns; both kinds dense
            lines.vertical[0] = few
            lines.slash[0, lone] = True
            lines.slash[1, 70:150] = True
            lines.slash[1, 100] = False
            lines.slash[1, [40, 220]] = True
            lines.vertical[1] = few.flip(0)
            lines.vertical[2] = few
            lines.slash[3], lines.vertical[3] = True, few
        case "lone":
            lines.slash[:, lone] = True
        case "band":
            for head in range(4):
                lines.slash[head, : 50 * head + 1] = True
            lines.slash[:, -1] = True
        case "columns":
            lines.vertical[:] = few
            lines.vertical[1] = True
    return lines


def case(kind: str, queries: int, past: int, width: int, kv: int, limit: float, dtype: torch.dtype) -> dict[str, Any]:
    """One case; the values have two thirds of the width, so that both are padded."""
    keys, generator = queries + past, torch.Generator().manual_seed(0)

    def normal(heads: int, rows: int, wide: int) -> Tensor:
        return torch.randn(heads, rows, wide, generator=generator).to(dtype)

    query, key = normal(4, queries, width), normal(kv, keys, width)
    value = normal(keys, kv, 2 * width // 3).transpose(0, 1)  # as a model gives them: not contiguous
    lines = lines_of(keys, queries, kind)
    scores = Scores(query, key, 0.25)
    found, what = sparse_attention(scores, value, lines, dense_above=limit)
    lines.slash[torch.tensor(what.dense)] = True  # all cells
    wanted = along(scores, value, lines)
    return {**vars(what), "type": str(found.dtype), "off": float((found - wanted).norm() / wanted.norm())}


def failure(kind: type[Exception]) -> list[str]:
    """What becomes of an error of this kind, and what is said."""
    error = type(kind.__name__, (kind,), {"__init__": lambda _: None, "__str__": lambda _: "no"})()
    fails = MagicMock()
    fails.__getitem__.return_value.side_effect = error
    lines = drawn(2, 64, 64, 0.1, 0.1)
    query = torch.zeros(2, 64, 16)
    scores = Scores(query, query, 1.0)
    index = kernel.index_of(lines, 64)
    with patch.object(kernel, "_attend", fails), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            kernel.triton_heads(scores, query, lines, index, torch.arange(2), torch.zeros(2, 64, 16))
        except Exception as raised:
            return ["raised", str(raised)]
    return ["left", str(said[0].message)]


FAILURES = (ValueError, CompilationError, OutOfResources, torch.AcceleratorError)

if __name__ == "__main__":
    told = [case(*words, limit, getattr(torch, dtype)) for *words, limit, dtype in json.loads(sys.argv[1])]
    failures = {kind.__name__: failure(kind) for kind in FAILURES}
    json.dump({"cases": told, "failures": failures}, sys.stdout)
