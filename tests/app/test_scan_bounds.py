"""What a scan says while it runs, and when it is broken off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from scan_kit import few_parts

from sinkscope.app import scan as scanning

pytestmark = pytest.mark.few_texts


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


def test_only_takes_names_of_parts(model, tmp_path, monkeypatch, typed):
    small_parts(monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert typed(f"scan {model} --quick --only lines --out b").err.startswith("scan 1 of 1: lines: done\n")
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
