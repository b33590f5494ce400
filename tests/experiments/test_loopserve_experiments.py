"""The experiments on LoopServe: the paper's numbers, how answers are counted, the controls, the page."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pytest
from bench_kit import MODEL, SETTINGS, made_record, tiny
from bench_kit import dialogues as prompts
from repository import ROOT

from experiments.drawn import put_table
from experiments.loopserve import arms, dialogues, longeval, real, runs, table1
from sinkscope.bench.methods import read_method
from sinkscope.bench.record import open_run
from sinkscope.bench.run import run_bench
from sinkscope.bench.task import PromptFile


def test_ours_comes_from_finished_folders_and_the_rest_is_not_run(tmp_path):
    folder = _qasper_run(tmp_path / "run", "meta-llama/Llama-3.1-8B-Instruct")
    rows = table1.rows_of([folder])
    ours = {(r["position"], r["task"], r["method"]): r["ours"] for r in rows if r["ours"] is not None}
    # One token of F1 in two answers: 100 % and, of "Ellen" for "Ellen Varga", 2/3.
    assert ours == {("end", "qasper", "snapkv"): pytest.approx(100 * fmean([1, 2 / 3]))}
    assert all(row["ours"] is None for row in rows if row["model"] != "llama-3.1")
    line = next(line for line in table1.table(rows).splitlines() if line.startswith("| llama-3.1 | end | qasper |"))
    assert line.count("not run") == 8 and "35.95 / 83.33" in line
    small = _qasper_run(tmp_path / "small", "meta-llama/Llama-3.2-3B-Instruct")
    eight = {r["method"]: r["ours"] for r in table1.rows_of([small])[-12:] if r["task"] == "qasper"}
    assert eight == {"adakv": None, "snapkv": pytest.approx(500 / 6), "minference": None, "loopserve": None}


def _qasper_run(folder: Path, name: str) -> Path:
    settings = {**SETTINGS, "model": {**MODEL, "name": name}}
    with open_run(folder, settings, []) as store:
        for turn, score in enumerate([1.0, 2 / 3]):
            about = {"metrics": {"score": score, "prefix": 0.0}, "settings": {"set": "qasper", "part": "end"}}
            store.append([made_record("snapkv:1024", "q end", turn=turn, **about)])
    return folder


def test_every_method_of_the_experiments_can_be_made():
    for panels in dialogues.FIGURES.values():
        assert len({panel.title for panel in panels}) == len(panels)
        for panel in panels:
            assert len(panel.methods) == sum(len(values) for *_, values in panel.curves), (
                "two curves have the same name"
            )
            for spec in panel.methods.values():
                method = read_method(spec)
                assert method.spec == spec and (method.make() is not None or spec == "full")


def test_the_page_shows_the_committed_numbers(tmp_path):
    page = tmp_path / "page.md"
    page.write_text((ROOT / "docs/papers/loopserve.md").read_text())
    before = page.read_text()
    record = json.loads((ROOT / "figures/loopserve_longeval.json").read_text())
    put_table(page, "loopserve.longeval", longeval.table(record["result"]["sources"]))
    assert page.read_text() == before
    page.write_text((ROOT / "docs/serve.md").read_text())
    before = page.read_text()
    record = json.loads((ROOT / "figures/loopserve_real.json").read_text())
    put_table(page, "loopserve.real", real.table(record["result"]))
    record = json.loads((ROOT / "figures/loopserve_arms.json").read_text())
    put_table(page, "loopserve.arms", arms.table(record["result"]))
    assert page.read_text() == before


@dataclass(frozen=True, kw_only=True)
class OnOneCache(runs.OneCache, PromptFile):
    """The user's own prompts, on one cache."""


@pytest.mark.slow
def test_on_one_cache_what_was_evicted_stays_away():
    model, tokenizer = tiny()
    fresh, grown = (
        run_bench(model, kind(given=prompts(), new=6), ["full", "snapkv:24:window=4"], tokenizer=tokenizer)
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
