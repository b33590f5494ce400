"""The experiments on LoopServe: methods, tables of pages, dialogues on one cache."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch
from bench_kit import dialogues as prompts
from bench_kit import tiny
from repository import ROOT

from experiments.drawn import put_table
from experiments.loopserve import dialogues, real, runs
from sinkscope.bench.benchmark import run as run_bench
from sinkscope.bench.methods import make_method, read_method
from sinkscope.bench.task import PromptFile
from sinkscope.sparse.serve import LoopServe


def test_every_method_of_the_experiments_can_be_made():
    for panels in dialogues.FIGURES.values():
        assert len({panel.title for panel in panels}) == len(panels)
        for panel in panels:
            for spec in panel.specs.values():
                assert read_method(spec) == spec and (make_method(spec) is not None or spec == "full")


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


@dataclass(frozen=True, kw_only=True)
class OnOneCache(runs.OneCache, PromptFile):
    """The user's own prompts, on one cache."""


@pytest.mark.slow
def test_on_one_cache_what_was_evicted_stays_away():
    model, tokenizer = tiny()
    fresh, grown = (
        run_bench(model, kind(given=prompts(), new=6), ["full", "snapkv:12:window=4"], tokenizer=tokenizer)
        for kind in (PromptFile, OnOneCache)
    )
    changed = 0
    for record, other in zip(grown, fresh, strict=True):
        assert record.metrics["prompt_tokens"] == other.metrics["prompt_tokens"]
        if record.method == "full" or record.turn == 0:
            assert record.tokens == other.tokens
        else:
            changed += record.tokens != other.tokens
    assert changed
