"""The command line: what arrives, what is printed, what is refused, and what is left when something goes wrong."""

from __future__ import annotations

import errno
import os
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from repository import python, ran
from sample_results import sample_find_sinks

import sinkscope
from sinkscope.app.cli import main
from sinkscope.app.commands import COMMANDS
from sinkscope.errors import SinkscopeError
from sinkscope.measure import Measurement


@pytest.fixture
def at_once(monkeypatch, tmp_path):
    """Measurements give a kept result at once."""
    monkeypatch.setattr(Measurement, "__call__", lambda _, **given: sample_find_sinks())
    monkeypatch.chdir(tmp_path)


# Help


def test_help_and_typing_errors_come_at_once():
    """And what is waited for is said before torch is imported."""
    code = """
import sys, sinkscope
print({'torch', 'transformers', 'numpy', 'click', 'rich', 'pydantic'} & set(sys.modules))
from sinkscope.app.cli import main
from sinkscope.results.console import ProgressBar
def announce(bar, words, done, total):
    print(words)
    raise KeyboardInterrupt
ProgressBar.__call__ = announce
for words in ('', '--version', 'heads', 'find-sinks --help', 'find-sinks --modle x', 'find-sinks --text none'):
    print(main(words.split()))
print({'torch', 'transformers', 'plotly', 'pandas', 'numpy', 'pydantic'} & set(sys.modules))
"""
    lines = python(code).stdout.splitlines()
    codes = [line for line in lines if re.fullmatch(r"\d+|set\(\)|Loading.*|sinkscope \d.*", line)]
    version = f"sinkscope {sinkscope.__version__}"
    assert codes == ["set()", "0", version, "0", "2", "0", "2", "Loading bundled ...", "130", "set()"]
    for words in COMMANDS:
        assert any(line.startswith(f"  {words} ") for line in lines)


def test_the_shell_completes():
    words = {"_SINKSCOPE_COMPLETE": "bash_complete", "COMP_WORDS": "sinkscope bench --bes", "COMP_CWORD": "2"}
    done = python("import sys; sys.argv = ['sinkscope']; from sinkscope.__main__ import main; main()", **words)
    assert (done.stdout, done.stderr) == ("plain,--beside\n", "")


# What goes wrong


class Panic(BaseException):
    """What libraries in Rust raise."""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (SinkscopeError("no such\nmodel"), "error: no such model\n"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "--dtype bfloat16"),
        (OSError(12, "Cannot allocate memory"), "out of memory"),
        (KeyboardInterrupt(), "\ninterrupted\n"),
        (RuntimeError("a bug\nin two lines"), "error: RuntimeError: a bug (an unexpected error: SINKSCOPE_DEBUG=1"),
        (SystemExit(0), "error: code that sinkscope find-sinks runs has called sys.exit(0) before there was a result"),
        (Panic("a bug"), "error: Panic: a bug (an unexpected error: SINKSCOPE_DEBUG=1"),
    ],
)
def test_errors_are_one_line(at_once, monkeypatch, capsys, error, message):
    """Our own mistakes, too, whose traceback can be seen; an interruption is none."""
    monkeypatch.setattr(Measurement, "__call__", mock.Mock(side_effect=error))
    assert main(["find-sinks", "--json", "x.json"]) == (130 if isinstance(error, KeyboardInterrupt) else 2)
    out, err = capsys.readouterr()
    assert (out, err.strip().count("\n"), os.listdir()) == ("", 0, []) and message in err
    monkeypatch.setenv("SINKSCOPE_DEBUG", "1")
    if "DEBUG" in message:
        with pytest.raises(type(error)):
            main(["find-sinks"])


def test_a_full_disk_loses_no_printed_result(at_once, monkeypatch, typed):
    Path("x.json").write_text('{"schema": 1, "kind": "find-sinks"}')
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    out, err = typed("find-sinks --json x.json", 2)
    assert "L1.N338 100%" in out  # the result is seen all the same
    assert err == "error: cannot write x.json: no space left on device; choose another place\n"
    assert os.listdir() == ["x.json"] and Path("x.json").read_text().endswith('"find-sinks"}')


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("--help >/dev/full", 2, "error: cannot write all of the output: no space left on device; make room"),
        ("loops - <&-", 2, "error: "),
        ("loops loop.txt --json a.json | true; exit ${PIPESTATUS[0]}", 0, "JSON: a.json"),  # it is written all the same
    ],
)
def test_streams_without_listeners_and_odd_words(tmp_path, words, code, message):
    (tmp_path / "loop.txt").write_text("one two three four\n" * 300)
    line = f"{sys.executable} -m sinkscope {words}"
    done = ran(["bash", "-c", line], tmp_path, PYTHONUNBUFFERED="1")  # the first line already has no reader
    said = re.sub(r"^loop in .*\n", "", done.stderr, flags=re.M)  # what is found comes while the file is read
    assert (done.returncode, said.count("\n")) == (code, 1) and said.startswith(message), done.stderr
    assert (tmp_path / "a.json").exists() == ("--json" in words)


def test_tokens_that_the_terminal_cannot_show():
    code = "from sinkscope.app import cli; cli._prepare_streams(); print('\\u0120the \\ud800')"
    assert python(code, PYTHONIOENCODING="ascii").stdout == "\\u0120the \\ud800\n"
