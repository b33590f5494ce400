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
import sinkscope.app.generate
import sinkscope.opening.load
from sinkscope.app.cli import main
from sinkscope.app.commands import COMMANDS
from sinkscope.errors import SinkscopeError
from sinkscope.measure import Measurement


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Measurements give a made-up result at once, and the arguments of each call are kept."""
    arguments = []

    def fake(_, **given):
        arguments.append(given)
        return sample_find_sinks()

    monkeypatch.setattr(Measurement, "__call__", fake)
    monkeypatch.chdir(tmp_path)
    return arguments


# Help


def test_the_list_of_commands_is_there_at_once():
    code = (
        "import sys\nfrom sinkscope.app.cli import main\nfor words in ([], ['--version']):\n    main(words)\n"
        "print({'torch', 'transformers', 'plotly', 'pandas', 'numpy', 'pydantic'} & set(sys.modules))"
    )
    done = python(code)
    lines = done.stdout.splitlines()
    assert lines[-2:] == [f"sinkscope {sinkscope.__version__}", "set()"] and done.stderr == ""
    assert max(map(len, lines)) <= 80 and "    sinkscope scan" in lines
    groups = dict.fromkeys(f"{command.section}:" for command in COMMANDS.values())
    assert [line for line in lines if re.fullmatch(r"[A-Z]\w+:", line)] == ["Options:", *groups]
    for words in COMMANDS:
        assert any(line.startswith(f"  {words.split()[0]} ") for line in lines)


@pytest.mark.parametrize(("typed", "word"), [("sinkscope find-s", "find-sinks"), ("sinkscope bench --bes", "--beside")])
def test_the_shell_completes(typed, word):
    question = {"_SINKSCOPE_COMPLETE": "bash_complete", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    code = "import sys; sys.argv = ['sinkscope']; from sinkscope.__main__ import main; main()"
    done = python(code, **question)
    assert done.stdout.split() == [f"plain,{word}"] and done.stderr == ""


# What goes wrong


class Panic(BaseException):
    """What libraries in Rust raise."""


OURS = (RuntimeError("a bug\nin two lines"), Panic("a bug"), AssertionError())


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (SinkscopeError("no such\nmodel"), "error: no such model\n"),
        (MemoryError(), "error: out of memory: give a smaller model"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "--dtype bfloat16"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory"),
        (OSError(12, "Cannot allocate memory"), "out of memory"),
        (KeyboardInterrupt(), "\ninterrupted\n"),
        *((error, f"error: {type(error).__name__}: ") for error in OURS),
    ],
)
def test_errors_are_one_line(calls, monkeypatch, capsys, error, message):
    """Our own mistakes, too; an interruption is none."""
    monkeypatch.setattr(Measurement, "__call__", mock.Mock(side_effect=error))
    assert main(["find-sinks", "--json", "x.json"]) == (130 if isinstance(error, KeyboardInterrupt) else 2)
    out, err = capsys.readouterr()
    assert out == "" and err.strip().count("\n") == 0 and message in err
    assert not os.listdir() and ("SINKSCOPE_DEBUG=1" in err) == (error in OURS)
    monkeypatch.setenv("SINKSCOPE_DEBUG", "1")
    if error in OURS[:3]:
        with pytest.raises(type(error)):
            main(["find-sinks"])


def test_a_full_disk_loses_no_printed_result(calls, monkeypatch, typed):
    old = '{"schema": 1, "kind": "find-sinks"}'
    Path("x.json").write_text(old)

    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    out, err = typed("find-sinks --json x.json", 2)
    assert "L2.N412 83%" in out  # the result is seen all the same
    assert err == "error: cannot write x.json: no space left on device; choose another place\n"
    assert (os.listdir(), Path("x.json").read_text()) == (["x.json"], old)


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
    line = ["bash", "-c", f"{sys.executable} -m sinkscope {words}"]
    done = ran(line, tmp_path, PYTHONUNBUFFERED="1")  # the first line already has no reader
    said = re.sub(r"^loop in .*\n", "", done.stderr, flags=re.M)  # what is found comes while the file is read
    assert done.returncode == code and said.startswith(message), done.stderr
    assert said.count("\n") == 1 and "Traceback" not in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"loop.txt"} | {"a.json"} & set(words.split())


def test_tokens_that_the_terminal_cannot_show():
    code = "from sinkscope.app import cli; cli._prepare_streams(); print('\\u0120the \\ud800')"
    assert python(code, PYTHONIOENCODING="ascii").stdout == "\\u0120the \\ud800\n"
