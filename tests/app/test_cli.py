"""The command line: what arrives, what is printed, what is refused, and what is left when something goes wrong."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shlex
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
from sinkscope.engine.run import Event
from sinkscope.errors import SinkscopeError
from sinkscope.files.output import read_text
from sinkscope.generation.generate import Generated
from sinkscope.hooks.edit import SinkPatch
from sinkscope.measure import Measurement
from sinkscope.results.result import Result


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


@pytest.mark.parametrize("words", list(COMMANDS))
def test_help_has_a_text_for_every_option_and_examples_that_exist(words, monkeypatch, typed):
    monkeypatch.setenv("COLUMNS", "80")
    text = typed([*words.split(), "--help"]).out
    assert max(map(len, text.splitlines())) <= 80
    assert f"Documentation: docs/cli.md#sinkscope-{words.replace(' ', '-')}" in text
    COMMANDS[words].describe()
    for option in COMMANDS[words].params:
        assert option.help and "." in option.help, option.name
    assert COMMANDS[words].examples
    for line in COMMANDS[words].examples:
        assert f"  {line}\n" in text
        typed = shlex.split(line.rpartition("| ")[2])
        assert typed[: 1 + len(words.split())] == ["sinkscope", *words.split()]
        for word in typed:
            assert not word.startswith("--") or f"{word} " in text or f"{word}\n" in text


@pytest.mark.parametrize(("typed", "word"), [("sinkscope find-s", "find-sinks"), ("sinkscope bench --bes", "--beside")])
def test_the_shell_completes(typed, word):
    question = {"_SINKSCOPE_COMPLETE": "bash_complete", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    code = "import sys; sys.argv = ['sinkscope']; from sinkscope.__main__ import main; main()"
    done = python(code, **question)
    assert done.stdout.split() == [f"plain,{word}"] and done.stderr == ""


# What arrives and what comes back


def test_options_reach_the_function_as_they_are_typed(calls, typed):
    typed("find-sinks")
    assert set(calls.pop()) == {"progress", "seed"}  # what has no default is left to the function
    for model in ("m", "--model m"):
        typed(f"repeat {model} --dtype float16 --no-bos --max-repeats 3 --text t --tokens cat,dog")
        arguments = calls.pop()
        del arguments["progress"]
        given = {"model": "m", "dtype": "float16", "bos": False, "max_repeats": 3, "text": "t"}
        assert arguments == {**given, "tokens": ["cat", "dog"], "seed": 0, "quantity": "norm"}


def test_the_result_goes_to_standard_output_and_into_files(calls, typed):
    typed("find-sinks --json a/x.json --html x.html")
    shown = typed("find-sinks --json a/x.json --html x.html")  # in place of an earlier output
    assert shown == (sample_find_sinks().text(brief=True) + "\n", "JSON: a/x.json\nPage: x.html\n")
    assert Result.load("a/x.json") == sample_find_sinks()
    assert 'class="plot"' in Path("x.html").read_text() and 'class="plot"' in typed("find-sinks --html -").out
    assert Result.from_dict(json.loads(typed("find-sinks --json -").out)) == sample_find_sinks()


def test_generate_prints_text_on_stdout_and_events_on_stderr(monkeypatch, tmp_path, typed):
    arguments = {}

    def fake(model, prompt, *, on_text, **given):
        arguments.update(given, model=model, prompt=prompt)
        on_text(0, "one ")
        on_text(0, "two")
        event = Event(row=0, step=3, position=4, layer=1, head=None, kind="patched", data={"neuron": 7})
        return [Generated("", [1, 2], 3, [event], summary="It acted.")]

    monkeypatch.setattr(sinkscope.app.generate, "generate", fake)
    monkeypatch.setattr(sinkscope.app.generate, "load", lambda model, **_: model)
    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_text("the prompt\n")
    patch = SinkPatch(layer=1, neurons=[7])
    patch.save("patch.json")
    shown = typed("generate --prompt-file p.txt --patch patch.json --max-new-tokens 2 --no-bos")
    assert shown == ("one two\n", "It acted.\n")
    given = {"model": None, "prompt": "the prompt\n", "interventions": patch, "max_new_tokens": 2, "bos": False}
    assert arguments == {**given, "temperature": 0.0, "seed": 0, "chat": "auto"}


def test_interrupted_generation_keeps_its_text(monkeypatch, tmp_path, typed):
    def fake(_, __, *, on_text, **___):
        on_text(0, "so far")
        raise KeyboardInterrupt

    monkeypatch.setattr(sinkscope.app.generate, "generate", fake)
    monkeypatch.setattr(sinkscope.app.generate, "load", lambda *_, **__: None)
    (tmp_path / "p.txt").write_text("x")
    assert typed(["generate", "--prompt-file", str(tmp_path / "p.txt")], 130) == ("so far", "\ninterrupted\n")


# What goes wrong


class Panic(BaseException):
    """What libraries in Rust raise."""


OURS = (RuntimeError("a bug\nin two lines"), Panic("a bug"), AssertionError())


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (SinkscopeError("no such\nmodel"), "error: no such model\n"),
        (MemoryError(), "error: out of memory: try --dtype bfloat16"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "--device cpu"),
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


@pytest.mark.parametrize("closed", [False, True])
def test_standard_input_is_utf8_whatever_the_terminal_is(tmp_path, monkeypatch, closed):
    content = "\ufeffgr\u00fc\u00dfe\r\nan alle\n".encode()
    stream = io.TextIOWrapper(io.BytesIO(content), encoding="ascii", errors="surrogateescape")
    monkeypatch.setattr(sys, "stdin", None if closed else stream)
    (tmp_path / "same.txt").write_bytes(content)
    expected = "gr\u00fc\u00dfe\nan alle\n"
    assert read_text(str(tmp_path / "same.txt")) == expected
    assert read_text("-") == ("" if closed else expected)


def test_tokens_that_the_terminal_cannot_show():
    code = "from sinkscope.app import cli; cli._prepare_streams(); print('\\u0120the \\ud800')"
    assert python(code, PYTHONIOENCODING="ascii").stdout == "\\u0120the \\ud800\n"
