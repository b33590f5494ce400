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
from sinkscope.bench.methods import read_method
from sinkscope.bench.task import PromptFile
from sinkscope.sparse.serve import SHORTEST, LoopServe


def test_every_method_of_the_experiments_can_be_made():
    for panels in dialogues.FIGURES.values():
        assert len({panel.title for panel in panels}) == len(panels)
        for panel in panels:
            for spec in panel.specs.values():
                method = read_method(spec)
                assert str(method) == spec and (method.make() is not None or spec == "full")


PAPER = "figures/loopserve"
TABLES = [
    (PAPER, "real", real.table),
    ("docs/serve", "real", lambda rows: real.table(rows, *real.BY_LENGTH)),
]


@pytest.mark.parametrize(("place", "name", "table"), TABLES, ids=lambda word: word if isinstance(word, str) else "")
def test_the_page_shows_the_committed_numbers(place, name, table, tmp_path):
    before = (ROOT / f"{place}.md").read_text()
    page = tmp_path / "page.md"
    page.write_text(before)
    record = json.loads((ROOT / f"figures/loopserve_{name}.json").read_text())
    put_table(page, f"loopserve.{name}", table(record["result"]))
    assert page.read_text() == before


def test_on_a_cpu_prompts_are_read_along_bands_from_the_length_on_at_which_that_was_measured_to_be_faster():
    cpu = torch.device("cpu")
    rows = json.loads((ROOT / "figures/loopserve_arms.json").read_text())["result"]
    for name, row in rows.items():
        length = int(name.rpartition(", ")[2])
        spent = {part: sum(seconds) for part, seconds in row["stages"].items()}
        faster = sum(spent.values()) < 2 * spent["dense"]
        assert (LoopServe().too_short(length, length, cpu) is None) == faster, name
    assert LoopServe().too_short(SHORTEST["cpu"], SHORTEST["cpu"], cpu) is None


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
        if record.method.name == "full" or record.turn == 0:
            assert record.tokens == other.tokens
        else:
            changed += record.tokens != other.tokens
    assert changed
