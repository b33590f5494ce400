"""Several models are scanned as each would be alone, whatever goes wrong."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from organisms import organism
from refusals import refused
from scan_kit import DIES_ONCE, HANGS, few_parts, plant, results

import sinkscope as ss
from sinkscope.app import scan as scanning
from sinkscope.app.many import scan_many
from sinkscope.app.scan import scan

pytestmark = pytest.mark.few_texts


@pytest.fixture(autouse=True)
def start(monkeypatch, tmp_path_factory) -> Path:
    """The tests are about what runs the scans, and not about all their parts."""
    folder = tmp_path_factory.mktemp("start")
    few_parts(monkeypatch, folder)
    return folder


def compare(out: Path, alone: Path, models: list[Path]):
    """All files of these scans are equal to those of scans one by one."""
    for model in models:
        assert results(out / model.name) == results(alone / model.name)


@pytest.mark.slow
def test_processes_side_by_side_give_the_cards_of_scans_one_by_one(models, alone, tmp_path):
    table = scan_many(models, tmp_path, workers=2, quick=True)
    assert table.exit_code == 0 and [row["scan"] for row in table.scans] == ["gpt2", "llama"]
    compare(tmp_path, alone, models)


def test_a_model_that_cannot_be_opened_is_a_line(models, alone, tmp_path, typed):
    out = Path(shutil.copytree(alone, tmp_path / "out"))
    table = scan_many([tmp_path / "absent"], out, quick=True)
    with refused() as said:
        scan(tmp_path / "absent", out=tmp_path / "other")
    assert table.exit_code == 1 and f"absent has no card: {said.value}" in table.details()
    compare(out, alone, models)
    said = typed(f"scan table {out} --csv -", 1).out
    assert "absent" in said and "run the same command again" in said


@pytest.mark.slow
def test_a_killed_run_resumes_with_equal_numbers(models, alone, start, tmp_path, typed):
    plant(start, models[1], HANGS)
    third = Path(organism("qwen2", 2).save(tmp_path / "models/qwen2"))
    words = ["scan", *map(str, [*models, third]), "--quick", "--out", str(tmp_path)]
    driver = subprocess.Popen([sys.executable, "-m", "sinkscope", *words], start_new_session=True)
    part = tmp_path / "gpt2/find-sinks.json"
    end = time.monotonic() + 200
    while not part.exists() and time.monotonic() < end:
        time.sleep(0.2)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    finished = [tmp_path / "llama/find-sinks.json", tmp_path / "llama/repeat.json", part]
    before = list(map(os.path.getmtime, finished))
    assert not (tmp_path / "gpt2/card.json").exists() and not (tmp_path / "qwen2/card.json").exists()
    plant(start, models[1], DIES_ONCE)  # this time its process alone is killed, and the others go on
    assert "gpt2 has no card: its process ended with status 9" in typed([*words, "--workers", "2"], 1).out
    assert typed(words).err.splitlines()[-1] == f"Cards: {tmp_path}"
    assert not list(start.glob("*.planted"))
    compare(tmp_path, alone, models)
    assert before == list(map(os.path.getmtime, finished))


def test_a_card_of_other_settings_is_no_answer(models, alone):
    """The card of an earlier sweep stays, and the table does not show it as if it were of this one."""
    before = (alone / "gpt2/card.json").read_text()
    (row,) = scan_many(models[1:2], alone, quick=True, seed=1).scans
    assert "begun with other settings (seed was 0, now 1)" in row["problem"] and row["heads"] is None
    assert (alone / "gpt2/card.json").read_text() == before


@pytest.fixture
def asked(alone, monkeypatch) -> list[list[str]]:
    """What would be typed; every model's scan is that of the same one, as it was."""
    asked: list[list[str]] = []

    def recorded(words: list[str], **_: Any) -> SimpleNamespace:
        assert words[1:5] == ["-m", "sinkscope", "scan", "--out"]
        asked.append([Path(words[5]).name, *words[6:]])
        shutil.copytree(alone / "gpt2", words[5], dirs_exist_ok=True)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr("sinkscope.app.many.subprocess.run", recorded)
    return asked


def test_shards_scan_every_model_once(asked, tmp_path):
    models = ["a/x", "b/y", "c/z"]
    first = scan_many(models, tmp_path, shard="1/2")
    assert [words[-1] for words in asked] == ["a/x", "c/z"] and [row["scan"] for row in first.scans] == ["x", "z"]
    second = scan_many(models, tmp_path, shard="2/2")
    assert [words[-1] for words in asked[2:]] == ["b/y"] and [row["scan"] for row in second.scans] == ["y"]


def test_revisions_have_folders_of_their_own_and_settings_become_options(asked, tmp_path):
    (tmp_path / "a@b").mkdir()
    models = ["someone/name@step10", "someone/name@refs/pr/2", tmp_path / "a@b"]
    table = ss.scan_many(models, tmp_path / "out", quick=True, seed=3, bos=False, device=None)
    options = ["--quick", "--seed", "3", "--no-bos"]
    assert asked == [
        ["name@step10", *options, "--revision", "step10", "--", "someone/name"],
        ["name@refs-pr-2", *options, "--revision", "refs/pr/2", "--", "someone/name"],
        ["a@b", *options, "--", str(tmp_path / "a@b")],
    ]
    assert [row["scan"] for row in table.scans] == ["a@b", "name@refs-pr-2", "name@step10"]


def test_what_would_fail_for_every_model_is_refused_at_once(models, alone, tmp_path, typed, asked):
    same = [models[0], tmp_path / models[0].name]
    for given, settings, said in (
        (models, {"sed": 1}, "no setting sed: it takes quick, "),
        (models, {"seed": -1}, "seed=-1"),
        (models, {"shard": "0/2"}, "expected I/N"),
        ([], {}, "there is no model"),
        (same, {}, "two models go to the folder llama"),
        ([organism("llama", 2)], {}, "expected names, folders or files"),
    ):
        with refused(said):
            scan_many(given, tmp_path / "out", **settings)
    with refused("is the folder of another run"):
        scan_many(models, alone / "llama")
    assert "give --out DIR" in typed(f"scan {models[0]} {models[1]}", 2).err
    assert not (tmp_path / "out").exists() and not asked
    assert "holds no scans" in typed(f"scan table {tmp_path}", 2).err


def test_on_a_full_disk_finished_parts_are_kept(models, monkeypatch, tmp_path):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    measured = scanning._measured
    fill = lambda part: part.name == "repeat" and monkeypatch.setattr(os, "fsync", full)  # noqa: E731
    monkeypatch.setattr(scanning, "_measured", lambda part, *rest: (fill(part), measured(part, *rest))[1])
    with refused("no space left on device"):
        scan(models[1], out=tmp_path / "gpt2", quick=True)
    assert (tmp_path / "gpt2/find-sinks.json").exists() and not (tmp_path / "gpt2/repeat.json").exists()
