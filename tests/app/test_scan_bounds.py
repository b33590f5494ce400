"""What a scan says while it runs, when it is broken off, and of parts that took all of their time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from organisms.tiny import tiny_model
from scan_kit import few_parts

from sinkscope.app import scan as scanning
from sinkscope.app.scan import CutShortError, at_most
from sinkscope.opening.live import target_of

pytestmark = pytest.mark.few_texts
IDS = torch.tensor([[1, 5, 6, 7]])


def test_passes_end_when_the_time_is_over_and_nothing_stays():
    model, _ = tiny_model("llama")
    target = target_of(model)
    with at_most(target, 60):
        model(IDS)
    with pytest.raises(CutShortError, match="cut short after 0 s"), at_most(target, 0.0):
        model(IDS)
    model(IDS)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_part_that_takes_too_long_is_cut_short_and_the_next_one_begins(model, tmp_path, monkeypatch, typed):
    """A part that never ends, in a scan: the card says so, and so does a line for each part where there is no bar."""
    few_parts(monkeypatch, ("heads", "lines"))
    monkeypatch.chdir(tmp_path)
    began = scanning.clock()

    def endless(setup, **_):
        while scanning.clock() < began + 60:
            setup.target.hf(IDS)

    first, *others = scanning.PARTS
    monkeypatch.setattr(scanning, "PARTS", [replace(first, measure=endless, seconds=0.5), *others])
    printed = typed(f"scan {model} --quick --out s")
    lines = [line for line in printed.err.splitlines() if line.startswith("scan ")]
    assert "1 of 2: heads: it was cut short after" in lines[0] and lines[1].startswith("scan 2 of 2: lines: done (")
    parts = json.loads(Path("s/card.json").read_text())["result"]["parts"]
    assert parts[0]["conclusion"].startswith("not measured, because it was cut short after")
    assert "`sinkscope heads` alone has no bound" in parts[0]["conclusion"] and parts[1]["numbers"]
    assert "it was cut short after" in Path("s/card.html").read_text()
    monkeypatch.setattr(scanning, "PARTS", [replace(first, seconds=0.0, full={"n_tokens": 4})])
    assert "cut short" not in typed(f"scan {model} --out whole").err  # without --quick no part has a bound


def test_a_scan_that_is_broken_off_says_how_it_goes_on(model, tmp_path, monkeypatch, typed):
    few_parts(monkeypatch, ("heads", "lines"))
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
