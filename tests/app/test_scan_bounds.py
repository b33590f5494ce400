"""What a scan says while it runs, when it is broken off, and of parts that took all of their time."""

from __future__ import annotations

import itertools
import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from organisms.tiny import tiny_model
from scan_kit import few_parts

from sinkscope.app import scan as scanning
from sinkscope.app.scan import Limit
from sinkscope.errors import CutShortError
from sinkscope.files.store import Folder
from sinkscope.opening.live import target_of
from sinkscope.results.result import Result
from sinkscope.sinks.spikes.effects import effects_of

pytestmark = pytest.mark.few_texts
IDS = torch.tensor([[1, 5, 6, 7]])


def test_passes_are_counted_and_end_when_the_time_is_over_and_nothing_stays():
    model, _ = tiny_model("llama")
    target = target_of(model)
    limit = Limit(target, 60)
    with limit.on():
        model(IDS)
        model(IDS)
    assert limit.work == "2 passes over 8 tokens"
    over = Limit(target, 0.0)
    with pytest.raises(CutShortError, match="cut short after 0 s"), over.on():
        model(IDS)
    with over.on():
        over.lift()
        model(IDS)
    model(IDS)
    assert not any(module._forward_pre_hooks for module in model.modules())


def work(printed: str) -> list[tuple[str, str]]:
    """The passes of each part, and the tokens that they read."""
    return re.findall(r"done, ([\d,]+) passes over ([\d,]+) tokens", printed)


def tokens(done: tuple[str, str]) -> int:
    return int(done[1].replace(",", ""))


def small_parts(patch):
    """Scan two parts, at sizes that take a moment."""
    few_parts(patch, ("heads", "lines"))
    heads, lines = scanning.PARTS
    sizes = {"quick": {"count": 2, "length": 48}, "full": {"count": 4, "length": 96}}
    patch.setattr(scanning, "PARTS", [replace(heads, quick={"n_tokens": 2}), replace(lines, **sizes)])


def test_quick_is_the_same_work_on_a_slow_machine_and_less_than_without(model, tmp_path, monkeypatch, typed):
    """The clock runs a thousand times as fast, as where the machine is busy."""
    small_parts(monkeypatch)
    monkeypatch.chdir(tmp_path)
    free = work(typed(f"scan {model} --quick --out a").err)
    began = scanning.clock()
    monkeypatch.setattr(scanning, "clock", lambda: began + 1000 * (time.perf_counter() - began))
    busy = work(typed(f"scan {model} --quick --out b").err)
    whole = work(typed(f"scan {model} --only lines --out c").err)
    assert len(free) == 2 and free == busy and tokens(whole[0]) > 3 * tokens(free[1])
    cards = [json.loads(Path(f"{name}/card.json").read_text())["result"]["parts"] for name in "ab"]
    assert cards[0] == cards[1] and [part["name"] for part in cards[0]] == ["heads", "lines"]


def test_a_part_that_is_cut_keeps_its_finished_steps_and_the_same_command_goes_on(model, tmp_path, monkeypatch, typed):
    """The time of find-sinks ends in its effects: spikes and their neurons are there, the rest is named."""
    few_parts(monkeypatch, ("find_sinks",))
    monkeypatch.chdir(tmp_path)
    whole = effects_of
    now = [0.0]
    monkeypatch.setattr(scanning, "clock", lambda: now[0])

    def slow(*arguments, **settings):
        now[0] += 1000
        return whole(*arguments, **settings)

    monkeypatch.setattr("sinkscope.sinks.spikes.find.effects_of", slow)
    printed = typed(f"scan {model} --within 10m --out s")
    assert "1 of 1: find-sinks: cut short, " in printed.err
    found = Result.load("s/find-sinks.json")
    (spike,) = found.spikes
    assert found.needed and spike.effect is None and found.readers.heads
    missing = "The time ended before all was measured. Missing: effects of spike 0, the other choice of BOS."
    assert missing in found.text() and found.bos is None
    monkeypatch.setattr("sinkscope.sinks.spikes.find.effects_of", whole)
    typed(f"scan {model} --out s")
    again = Result.load("s/find-sinks.json")
    assert again.spikes[0].effect is not None and "cut" not in again.settings and again.needed == found.needed


def test_a_benchmark_that_is_cut_keeps_the_answered_prompts(model, tmp_path, monkeypatch, typed):
    few_parts(monkeypatch, ("policies",))
    monkeypatch.chdir(tmp_path)
    now, answered = [0.0], []
    monkeypatch.setattr(scanning, "clock", lambda: now[0])

    def watched(folder, records):
        append(folder, records)
        answered.append(records)
        now[0] += 1000 * (len(answered) == 3)

    append = Folder.append
    monkeypatch.setattr(Folder, "append", watched)
    (part,) = scanning.PARTS
    few = {"task": "text:count=12:prompt=40:answer=4", "methods": ("full", "streaming:16")}
    monkeypatch.setattr(scanning, "PARTS", [replace(part, full=few)])
    assert "cut short" in typed(f"scan {model} --within 10m --out s").err
    table = Result.load("s/policies.json")
    assert 0 < len(table.groups[0].scores) < 12 and table.settings["cut"]


def test_if_nothing_was_measured_the_status_says_so(model, tmp_path, monkeypatch, typed):
    few_parts(monkeypatch, ("find_sinks", "heads"))
    monkeypatch.chdir(tmp_path)
    ticks = itertools.count()
    monkeypatch.setattr(scanning, "clock", lambda: 1000.0 * next(ticks))
    typed(f"scan {model} --within 1s --out s", 1)
    parts = json.loads(Path("s/card.json").read_text())["result"]["parts"]
    assert all(part["conclusion"].startswith("not measured, because it was cut short after") for part in parts)
    assert "`sinkscope heads` alone has no limit" in parts[1]["conclusion"]
    assert "expected a time such as 90s, 10m or 1h" in typed(f"scan {model} --within soon --out t", 2).err
    assert "--only" in typed(f"scan {model} --only finds --out t", 2).err


def test_a_scan_that_is_broken_off_says_how_it_goes_on(model, tmp_path, monkeypatch, typed):
    small_parts(monkeypatch)
    monkeypatch.chdir(tmp_path)
    whole = scanning.PARTS

    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(scanning, "PARTS", [whole[0], replace(whole[1], measure=stopped)])
    printed = typed(f"scan {model} --quick --out all/s", 130)
    assert "s keeps 1 finished part: the same command goes on from there\n" in printed.err
    typed("report all --out report.html")
    page = Path("report.html").read_text()
    assert "s: a scan that has not ended; its command goes on with it" in page and "no folder of bench" not in page
    monkeypatch.setattr(scanning, "PARTS", [replace(whole[0], measure=stopped), whole[1]])  # it is not measured again
    assert typed(f"scan {model} --quick --out all/s").err.endswith("Card: all/s/card.html\n")
