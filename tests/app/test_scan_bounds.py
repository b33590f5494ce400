"""What a scan says while it runs, and when it is broken off."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from organisms.tiny import tiny_model
from scan_kit import few_parts

from sinkscope.app import scan as scanning
from sinkscope.app.scan import Work
from sinkscope.opening.live import target_of

pytestmark = pytest.mark.few_texts
IDS = torch.tensor([[1, 5, 6, 7]])


def test_passes_are_counted_and_nothing_stays():
    model, _ = tiny_model("llama")
    work = Work(target_of(model))
    with work.counted():
        model(IDS)
        model(IDS)
    assert str(work) == "2 passes over 8 tokens"
    model(IDS)
    assert str(work) == "2 passes over 8 tokens"
    assert not any(module._forward_pre_hooks for module in model.modules())


def work(printed: str) -> list[tuple[str, str]]:
    """The passes of each part, and the tokens that they read."""
    return re.findall(r"done, ([\d,]+) passes over ([\d,]+) tokens", printed)


def tokens(done: tuple[str, str]) -> int:
    return int(done[1].replace(",", ""))


def small_parts(patch):
    """Scan two parts, at sizes that take a moment."""
    few_parts(patch, ("attack", "lines"))
    attack, lines = scanning.PARTS
    sizes = {"quick": {"count": 2, "length": 48}, "full": {"count": 4, "length": 96}}
    patch.setattr(
        scanning,
        "PARTS",
        [replace(attack, quick={"n_tokens": 12, "sequences": 2, "length": 2}), replace(lines, **sizes)],
    )


def test_quick_is_less_work(model, tmp_path, monkeypatch, typed):
    small_parts(monkeypatch)
    monkeypatch.chdir(tmp_path)
    quick = work(typed(f"scan {model} --quick --out a").err)
    whole = work(typed(f"scan {model} --only lines --out b").err)
    assert len(quick) == 2 and tokens(whole[0]) > 3 * tokens(quick[1])
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
