"""The loop organism that ships: it is what the generator makes, its prompts are true, and LoopBench finds the truth."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from organisms import LoopOrganism

import sinkscope as ss
from experiments.make_organism import LOOPS, loop, made, prompts, refrain
from sinkscope.app.cli import main
from sinkscope.bench.loopbench.metrics import ONSETS, PERIODS, read_run
from sinkscope.bench.loopbench.prompts import DATA, BenchPrompt, load_prompts
from sinkscope.bench.loopbench.run import run_loopbench
from sinkscope.bench.loopbench.tables import tabulate


@cache
def organism() -> LoopOrganism:
    return made()


def by_id() -> dict[str, BenchPrompt]:
    return {prompt.id: prompt for prompt in load_prompts("organism")}


def test_the_weights_are_what_the_generator_makes() -> None:
    shipped: Any = ss.load("organism", backend="hf")
    weights = shipped.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in organism().model.state_dict().items())
    text = next(iter(by_id().values())).prompt
    assert shipped.tokenizer(text)["input_ids"] == organism().tokenizer(text)["input_ids"]


def test_the_prompts_cover_periods_onsets_reaches_and_honest_repetition() -> None:
    found = by_id()
    loops = [p for p in found.values() if p.period is not None and p.onset is not None]
    assert (len(found), len(loops)) == (40, 32)
    assert {p.period for p in loops} == {period for period, *_ in LOOPS} and {p.onset for p in loops} == {*ONSETS}
    assert all(any(low <= (p.period or 0) <= high for low, high in PERIODS) for p in loops)
    for words in ("near", "far", "older", "honest-walk", "honest-quote", "honest-refrain"):
        assert 2 <= sum(words in name for name in found) < 40
    for prompt in loops:  # its copies are there, the older ones before a stretch of the ring
        ids = organism().tokenizer(prompt.prompt)["input_ids"]
        assert len(ids) == prompt.tokens
        assert max(ids.count(token) for token in ids) >= 3 + 3 * prompt.id.endswith("older")


def test_a_prompt_is_what_its_parts_say() -> None:
    planned = loop(organism(), 5, 30, False, "near", 3)
    found = by_id()["loop-p005-o030-near"]
    assert organism().tokenizer(found.prompt)["input_ids"] == planned.ids
    assert (found.period, found.onset) == (5, 30) and planned.expected[30:] == planned.expected[30:35] * 4
    assert len({*planned.expected[:35]}) == 35
    said = refrain(organism(), 52, 4).expected
    assert said[10:62] == said[62:114] and said[114:123] == said[10:19] and len({*said[122:]}) == len(said[122:])


@pytest.mark.slow
def test_the_prompts_are_what_the_generator_makes() -> None:
    lines = "".join(prompt.to_json() + "\n" for prompt in prompts(organism()))
    assert (DATA / "organism.jsonl").read_text() == lines


def test_the_full_cache_loops_the_guard_ends_the_loop_and_honest_repetition_stays(tmp_path: Path) -> None:
    names = ("loop-p002-o000-near", "loop-p012-o030-near-older", "honest-refrain-52")
    some, new = [by_id()[name] for name in names], 300
    model = ss.load("organism", backend="hf")
    run_loopbench(model, some, ["full", "loopguard"], out=tmp_path / "r", max_new_tokens=new, batch_size=3)
    records = {(r.method, r.prompt): r for r in read_run(tmp_path / "r").records}
    for name, prompt in zip(names[:2], some[:2], strict=True):
        period, onset, tokens = prompt.period or 0, prompt.onset or 0, records["full", name].tokens
        assert len(tokens) == new and len({*tokens[: onset + period]}) == onset + period
        assert all(tokens[i] == tokens[i + period] for i in range(onset, new - period)), "from the onset to the cap"
    full, guard = tabulate([tmp_path / "r"]).planted
    assert (full.loop, full.eos, full.honest_cut) == (1.0, 0.0, 0.0)
    assert (guard.loop, guard.honest_cut, guard.honest_same) == (0.0, 0.0, 1.0)
    for name in names[:2]:  # the ring to the end of sequence or to the cap, without a token twice
        record = records["loopguard", name]
        after = record.tokens[(record.cut or 0) + 1 :]
        assert list(after[:20]) == organism().walk(record.tokens[record.cut or 0], 20) and len({*after}) == len(after)


def test_the_organisms_prompts_are_for_the_organism_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in (["--model", "bundled"], ["--bench", "small"]):
        assert main(["loopbench", "run", "--bench", "organism", *more, "--out", str(tmp_path / "r")]) == 2
        assert "words of the model organism alone" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_story_openings_ship(tmp_path: Path) -> None:
    openings = load_prompts("stories")
    assert len(openings) == len({p.prompt for p in openings}) == 24 and {p.bench for p in openings} == {"stories"}
