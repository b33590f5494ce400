"""A run killed at any point goes on and ends as one that never was; one folder has one run and one kind of settings."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loopbench_kit import MODEL, prompts, record, tiny, untimed
from organisms.tiny import tiny_model

import sinkscope.models.load
from sinkscope.app.cli import main
from sinkscope.bench.files import open_folder
from sinkscope.bench.loopbench.metrics import Continued, read_run
from sinkscope.bench.loopbench.run import run_loopbench
from sinkscope.bench.loopbench.tables import tabulate
from sinkscope.errors import SinkscopeError

SETTINGS: dict[str, Any] = {"model": MODEL, "max_new_tokens": 300, "window": 32, "budget": 64}
PROMPTS = [{"id": f"dc-{i}", "bench": "dc", "prompt": "a"} for i in range(4)]


def _run(folder: Path, **changes: Any) -> None:
    model, tokenizer = tiny()
    given = {"max_new_tokens": 20, "window": 16, "batch_size": 2, "tokenizer": tokenizer, **changes}
    run_loopbench(model, prompts(4), ["full", "presence-penalty"], out=folder, temperatures=(0.0, 0.7), **given)


def _in_child(work: Callable[[], None]) -> multiprocessing.Process:
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    return child


def _wait(until: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not until():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_killed_again_and_again_it_ends_the_same(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    _run(whole)
    tiny()  # not in the child

    for lines in (1, 5, 9):  # in the middle of the first method, of the second, of another temperature

        def enough(lines: int = lines) -> bool:
            runs = cut / "runs.jsonl"
            return runs.exists() and runs.read_bytes().count(b"\n") >= lines

        child = _in_child(lambda: _run(cut))
        _wait(enough)
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
        assert child.exitcode == -signal.SIGKILL
    before = len(read_run(cut).records)
    assert before < len(read_run(whole).records) == 16
    _run(cut)  # the lock of the dead is no obstacle
    assert untimed(read_run(cut).records) == untimed(read_run(whole).records)
    one, other = tabulate([whole]), tabulate([cut])
    assert one.text() == other.text()
    assert one.to_dict()["result"] == other.to_dict()["result"]


@settings(max_examples=20)
@given(cut=st.floats(0, 1), done=st.integers(0, 4))
def test_cut_off_at_any_byte(tmp_path_factory: pytest.TempPathFactory, cut: float, done: int) -> None:
    folder = tmp_path_factory.mktemp("cut") / "run"
    records = [record(prompt=f"dc-{i}", text=f"“é\n{i}", tokens=tuple(range(5 + i))) for i in range(4)]
    with open_folder(folder, SETTINGS, PROMPTS, Continued) as store:
        store.append(records[:done])
    runs = folder / "runs.jsonl"
    data = runs.read_bytes()
    keep = int(cut * len(data))
    os.truncate(runs, keep)
    assert [r.key for r in read_run(folder).records] == [r.key for r in records[: data[:keep].count(b"\n")]]
    with open_folder(folder, SETTINGS, PROMPTS, Continued) as store:
        assert list(store.records.values()) == records[: data[:keep].count(b"\n")]
        store.append(records)  # those that are there are not doubled
    assert list(read_run(folder).records) == records
    assert runs.read_bytes().count(b"\n") == 4


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("settings.json", b"{", "cannot be read"),
        ("settings.json", b"[]", "names no model"),
        ("settings.json", b'{"model": {"name": "x"}}', "names no model"),
        ("prompts.jsonl", b'{"id": "dc-0"}\n\xff\n', "prompts.jsonl line 2 is damaged"),
        ("runs.jsonl", b"\xff\xfe\n", "runs.jsonl line 1 is damaged"),
    ],
)
def test_damaged_folders(tmp_path: Path, file: str, content: bytes, says: str) -> None:
    with open_folder(tmp_path / "r", SETTINGS, PROMPTS, Continued) as store:
        store.append([record(prompt="dc-0")])
    assert len(read_run(tmp_path / "r").records) == 1
    (tmp_path / "r" / file).write_bytes(content)
    with pytest.raises(SinkscopeError, match=says):
        read_run(tmp_path / "r")


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    with open_folder(tmp_path / "r", SETTINGS, PROMPTS, Continued) as store:
        store.append([record(prompt="dc-0"), record(prompt="dc-1")])
    runs = tmp_path / "r" / "runs.jsonl"
    lines = runs.read_bytes().split(b"\n")
    runs.write_bytes(b"\n".join([lines[0], lines[1][:-9], b""]))
    with pytest.raises(SinkscopeError, match=r"runs\.jsonl line 2 is damaged: delete that line"):
        read_run(tmp_path / "r")
    runs.write_bytes(b"\n".join([json.dumps({"model": "x"}).encode(), lines[1], b""]))
    with (
        pytest.raises(SinkscopeError, match=r"runs\.jsonl line 1 is damaged"),
        open_folder(tmp_path / "r", SETTINGS, PROMPTS, Continued),
    ):
        pass


def test_two_runs_on_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_folder(tmp_path / "r", SETTINGS, PROMPTS, Continued):
        with pytest.raises(SinkscopeError, match="is being written by another run: wait for it, or give another"):
            with open_folder(tmp_path / "r", SETTINGS, PROMPTS, Continued):
                pass
        assert read_run(tmp_path / "r").records == ()  # looking is allowed
    with open_folder(tmp_path / "r", SETTINGS, PROMPTS, Continued):
        pass

    def hold() -> None:
        with open_folder(tmp_path / "s", SETTINGS, PROMPTS, Continued):
            (tmp_path / "held").touch()
            time.sleep(60)

    child = _in_child(hold)
    _wait((tmp_path / "held").exists)
    with (
        pytest.raises(SinkscopeError, match="is being written by another run"),
        open_folder(tmp_path / "s", SETTINGS, [], Continued),
    ):
        pass
    os.kill(child.pid or 0, signal.SIGKILL)
    child.join()
    with open_folder(tmp_path / "s", SETTINGS, PROMPTS, Continued):
        pass


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"budget": 512}, ["budget was 1024, now 512"]),
        ({"max_new_tokens": 40, "seed": 3}, ["max_new_tokens was 32, now 40", "seed was 0, now 3"]),
        ({"window": 20}, ["window was 16, now 20"]),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], says: list[str]) -> None:
    model, tokenizer = tiny()
    given = {"max_new_tokens": 32, "window": 16, "tokenizer": tokenizer}
    run_loopbench(model, prompts(1), ["full"], out=tmp_path / "r", **given)
    there = (tmp_path / "r" / "runs.jsonl").read_bytes()
    with pytest.raises(SinkscopeError) as refused:
        run_loopbench(model, prompts(1), ["full"], out=tmp_path / "r", **{**given, **changes})
    assert all(words in str(refused.value) for words in says)
    assert str(refused.value).count(" was ") == 1 + len(says)  # and "was begun"
    other, _ = tiny_model("llama", num_hidden_layers=1)
    with pytest.raises(SinkscopeError, match=r"model n_layers was 2, now 1"):  # each part of the model by itself
        run_loopbench(other, prompts(1), ["full"], out=tmp_path / "r", **given)
    with pytest.raises(SinkscopeError, match=r"begun with other settings \(prompts was"):
        run_loopbench(model, prompts(2), ["full"], out=tmp_path / "r", **given)
    assert (tmp_path / "r" / "runs.jsonl").read_bytes() == there
    run_loopbench(model, prompts(1), ["full", "dry"], out=tmp_path / "r", **given)  # more methods are welcome
    assert (tmp_path / "r" / "runs.jsonl").read_bytes().startswith(there)
    assert [r.method for r in read_run(tmp_path / "r").records] == ["dry", "full"]


def test_folders_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    (tmp_path / "file").touch()
    for name, says in (("full", "holds other files"), ("file", "is a file")):
        with pytest.raises(SinkscopeError, match=says), open_folder(tmp_path / name, SETTINGS, PROMPTS, Continued):
            pass
    assert os.listdir(tmp_path / "full") == ["thesis.tex"]
    with pytest.raises(SinkscopeError, match="is no folder of `sinkscope loopbench run`"):
        read_run(tmp_path / "full")


def test_command_runs_resumes_and_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = tiny_model("llama")
    model.tokenizer = tokenizer  # type: ignore[assignment]
    monkeypatch.setattr(sinkscope.models.load, "load", lambda *_, **__: model)
    path = tmp_path / "dc.jsonl"
    path.write_text("".join(p.to_json() + "\n" for p in prompts(2)))
    words = f"loopbench run --bench {path} --max-new-tokens 32 --window 16 --budget 64 --out {tmp_path / 'r'}".split()
    assert main([*words, "--methods", "full,streaming"]) == 0
    first = capsys.readouterr().out
    there = (tmp_path / "r" / "runs.jsonl").read_bytes()
    assert "Table 1: LoopBench" in first and "streaming" in first
    assert main([*words, "--methods", "full,streaming"]) == 0
    assert capsys.readouterr().out == first
    assert (tmp_path / "r" / "runs.jsonl").read_bytes() == there
    for more, says in (
        (["--methods", "full,loopgard"], "method 'loopgard' is unknown: did you mean 'loopguard'?"),
        (["--window", "40"], "--window 40 is more than --max-new-tokens 32"),
        (["--budget", "1.5"], "--budget 1.5: expected a number of tokens from 1, or a fraction"),
        (["--budget", "65"], "budget was 64, now 65"),
        (["--bench", "nowhere.jsonl"], "nowhere.jsonl"),
    ):
        assert main([*words, *more]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith("error: ") and says in err
