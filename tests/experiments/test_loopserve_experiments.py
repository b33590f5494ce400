"""What LoopServe was measured to cost real models: its table, and the length that follows from it."""

from __future__ import annotations

import json

import torch
from repository import ROOT

from experiments.drawn import put_table
from experiments.loopserve import real
from sinkscope.sparse.serve import LoopServe

REAL = json.loads((ROOT / "figures/loopserve_real.json").read_text())["result"]


def test_the_page_shows_the_committed_numbers(tmp_path):
    before = (ROOT / "figures/loopserve.md").read_text()
    page = tmp_path / "page.md"
    page.write_text(before)
    put_table(page, "loopserve.real", real.table(REAL))
    assert page.read_text() == before


def test_on_a_cpu_prompts_are_read_along_bands_from_the_length_on_at_which_that_was_measured_to_be_faster():
    for name, row in REAL.items():
        length = int(name.split(", ")[2])
        if name.startswith("smollm2"):
            is_read = LoopServe().too_short(length, length, torch.device("cpu")) is None
            assert is_read == (row["0.99"]["time"] < 1), name
    assert any(", 8192, " in name for name in REAL)
