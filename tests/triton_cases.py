"""Triton's kernels interpreted on a CPU, in a process of its own, because triton reads the variable when imported.

Prints one JSON object: for every case how far the kernels are from the same under masks, and what becomes of errors.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any
from unittest.mock import MagicMock, patch

os.environ["TRITON_INTERPRET"] = "1"

import torch
from lines_kit import dense, per_head
from test_bands import random_bands
from test_sparse_attention import inputs
from torch import Tensor
from triton.runtime.errors import OutOfResources

from sinkscope.sparse import choice, line_attention, select_bands
from sinkscope.sparse import triton as kernel
from sinkscope.sparse.attention import Scores, sample_queries
from sinkscope.sparse.bands import BAND, Lines
from sinkscope.sparse.choice import StoredRows
from sinkscope.sparse.triton_sums import ComputedRows


def off(found: Tensor, wanted: Tensor) -> float:
    """The relative error."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-9))


def drawn(queries: int, past: int, width: int, kv: int, dtype: torch.dtype) -> tuple[Scores, Tensor, Lines]:
    """Queries, keys and values; a dense head among others, one without columns, and dense rows."""
    chosen = random_bands(4, queries, queries + past, 0, min(16, queries // 20))
    chosen.columns[2] = False
    return *inputs(4, kv, queries, queries + past, 0, dtype, width), chosen


def case(queries: int, past: int, width: int, kv: int, dtype: str) -> dict[str, Any]:
    """One case; values are narrower than keys, so that both are filled up."""
    scores, value, chosen = drawn(queries, past, width, kv, getattr(torch, dtype))
    at = torch.arange(queries) + past
    wanted = dense(scores, chosen.rows(at)) @ per_head(value, 4)
    found: dict[str, Any] = {"attention": off(line_attention(scores, value, chosen), wanted)}
    found["narrow"] = off(kernel.attention_on(scores, value, chosen, kernel.TILINGS[-1:]).transpose(0, 1), wanted)
    rows = sample_queries(chosen.grid.sparse_queries(chosen.dense_rows), 70, 0)
    if len(rows):
        ours, plain = ComputedRows(scores, rows), StoredRows(scores, rows)
        for name, a, b in zip(("columns", "bands"), ours.sums(chosen), plain.sums(chosen), strict=True):
            found[name] = off(a, b)
        generator = torch.Generator().manual_seed(1)
        sizes = (past + queries, chosen.grid.blocks, 32)
        columns, bands, least = (torch.rand(4, size, generator=generator) for size in sizes)
        least = least.sort().values
        found["held"] = off(ours.held(columns, bands, least), plain.held(columns, bands, least))
        picked = select_bands(scores, 0.8, sample=70)
        with patch.object(choice, "triton_module", lambda *_: None):
            same = select_bands(scores, 0.8, sample=70)
        found["cells"] = float((picked.cells() - same.cells()).abs().max()) / (BAND * queries)
    return found


def failure(kind: type[Exception]) -> list[Any]:
    """What becomes of an error of this kind: which tilings are tried."""
    error = type(kind.__name__, (kind,), {"__init__": lambda _: None, "__str__": lambda _: "no"})()
    fails = MagicMock()
    fails.__getitem__.return_value.side_effect = error
    scores, value, chosen = drawn(64, 0, 16, 2, torch.float32)
    with patch.object(kernel, "_attend", fails):
        try:
            kernel.attention_on(scores, value, chosen)
        except Exception as raised:
            return [type(raised).__name__, fails.__getitem__.return_value.call_count]
    return ["nothing", 0]


if __name__ == "__main__":
    told = [case(*words) for words in json.loads(sys.argv[1])]
    failures = {kind.__name__: failure(kind) for kind in (OutOfResources, torch.AcceleratorError)}
    json.dump({"cases": told, "failures": failures, "tilings": len(kernel.TILINGS)}, sys.stdout)
