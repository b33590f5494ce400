"""Triton's kernels interpreted on a CPU, in a process of its own, because triton reads the variable when imported.

Prints one JSON list: for every case how far the kernels are from the same under masks.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"

import torch
from lines_kit import dense, per_head
from test_bands import random_bands
from test_sparse_attention import inputs
from torch import Tensor

from sinkscope.sparse import choice, line_attention, select_bands
from sinkscope.sparse import triton as kernel
from sinkscope.sparse.attention import sample_queries
from sinkscope.sparse.bands import BAND
from sinkscope.sparse.choice import StoredRows
from sinkscope.sparse.triton_sums import ComputedRows


def off(found: Tensor, wanted: Tensor) -> float:
    """The relative error."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-9))


def case(queries: int, past: int, width: int, kv: int, dtype: str) -> dict[str, Any]:
    """One case: a dense head among others, one without columns, dense rows, and values narrower than keys."""
    scores, value = inputs(4, kv, queries, queries + past, 0, getattr(torch, dtype), width)
    chosen = random_bands(4, queries, queries + past, 0, min(16, queries // 20))
    chosen.columns[2] = False
    wanted = dense(scores, chosen.rows(torch.arange(queries) + past)) @ per_head(value, 4)
    found = {"attention": off(line_attention(scores, value, chosen), wanted)}
    found["narrow"] = off(kernel.attention_on(scores, value, chosen, kernel.TILINGS[-1:]).transpose(0, 1), wanted)
    rows = sample_queries(chosen.grid.sparse_queries(chosen.dense_rows), 70, 0)
    if len(rows):
        ours, plain = ComputedRows(scores, rows), StoredRows(scores, rows)
        for name, a, b in zip(("columns", "bands"), ours.sums(chosen), plain.sums(chosen), strict=True):
            found[name] = off(a, b)
        sizes = (past + queries, chosen.grid.blocks, 32)
        columns, bands, least = (torch.rand(4, size, generator=torch.Generator().manual_seed(1)) for size in sizes)
        limits = columns, bands, least.sort().values
        found["held"] = off(ours.held(*limits), plain.held(*limits))
        picked = select_bands(scores, 0.8, sample=70)
        with patch.object(choice, "triton_module", lambda *_: None):
            same = select_bands(scores, 0.8, sample=70)
        found["cells"] = float((picked.cells() - same.cells()).abs().max()) / (BAND * queries)
    return found


if __name__ == "__main__":
    json.dump([case(*words) for words in json.loads(sys.argv[1])], sys.stdout)
