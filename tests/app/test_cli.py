from __future__ import annotations

import errno
import io
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_results import sample_find_sinks
from sinkscope.files.registry import entries

import sinkscope.models.load
import sinkscope.serving.generate
import sinkscope.sinks.first_token.find
from sinkscope.app import cli
from sinkscope.app.cli import main, read_text
from sinkscope.errors import SinkscopeError
from sinkscope.files.result import Result
from sinkscope.interventions import SinkPatch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, dict[str, Any]]]:
    """`find_sinks` gives a made-up result at once, and what it was called with is kept."""
    made: list[tuple[Any, dict[str, Any]]] = []

    def fake(model: Any = None, **arguments: Any) -> Any:
        made.append((model, arguments))
        return sample_find_sinks()

    monkeypatch.setattr(sinkscope.sinks.first_token.find, "find_sinks", fake)
    monkeypatch.chdir(tmp_path)
    return made


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def _run(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sinkscope", *words], env=_environment(), capture_output=True, text=True, **options
    )


HEAVY = "{'torch', 'transformers', 'transformer_lens', 'nnsight', 'plotly', 'pandas', 'sklearn', 'numpy'}"


def test_help_and_names_load_no_torch() -> None:
    """One process answers all of them; a library that one of them imports is named in its line and those after it."""
    asked = [["--help"], ["find-sinks", "--help"], ["models", "--help"], ["--version"], ["models"]]
    code = (
        "import contextlib, io, sys\nfrom sinkscope.app.cli import main\n"
        f"for words in {asked}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "        code = main(words)\n"
        f"    print(words, sorted({HEAVY} & set(sys.modules)), code, bool(out.getvalue()))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=_environment(), capture_output=True, text=True)
    assert done.stdout == "".join(f"{words} [] 0 True\n" for words in asked), done.stderr
    assert done.stderr == ""


def test_every_command_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("find-sinks", "models", "generate", "--version"))


def test_arguments_arrive(calls: list[Any]) -> None:
    assert main(["find-sinks"]) == 0
    model, arguments = calls.pop()
    assert model is None
    assert set(arguments) == {"progress"}  # the function's own defaults are the command's
    words = "find-sinks --model m --revision r --device cpu --dtype float16 --no-bos --all-layers --top-k 3 --seed 5"
    assert main([*words.split(), "--max-repeats", "9", "--text", "t.txt", "--token", "cat", "--token", "dog"]) == 0
    model, arguments = calls.pop()
    del arguments["progress"]
    assert model == "m"
    assert arguments == {
        "revision": "r",
        "device": "cpu",
        "dtype": "float16",
        "bos": False,
        "all_layers": True,
        "top_k": 3,
        "seed": 5,
        "max_repeats": 9,
        "text": "t.txt",
        "tokens": ["cat", "dog"],
    }


def test_backend_loads_that_kind_of_object(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(sinkscope.models.load, "load", lambda *a, **k: asked.append((a, k)) or "object")
    assert main(["find-sinks", "--model", "m", "--backend", "bridge", "--dtype", "float16"]) == 0
    assert asked == [(("m",), {"backend": "bridge", "dtype": "float16"})]
    assert calls[0][0] == "object"


def test_piped_output_is_plain_text_and_silent(calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["find-sinks"]) == 0
    out, err = capsys.readouterr()
    assert out == sample_find_sinks().text() + "\n"
    assert err == ""
    assert out.isascii()


def test_json_on_standard_output_is_all_there_is(calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["find-sinks", "--json", "-"]) == 0
    out, _ = capsys.readouterr()
    assert Result.from_dict(json.loads(out)) == sample_find_sinks()


def test_files_are_written_beside_the_table(calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["find-sinks", "--json", "a/x.json", "--html", "x.html"]) == 0
    assert Result.load("a/x.json") == sample_find_sinks()
    assert 'class="plot"' in Path("x.html").read_text(encoding="utf-8")
    assert "sink layer is layer 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--top-k 0", "'--top-k': Input should be greater than or equal to 1; it is '0' (see sinkscope find-sinks"),
        ("--top-k x", "'--top-k'"),
        ("--seed -1", "'--seed': Input should be greater than or equal to 0"),
        ("--max-repeats 0", "'--max-repeats'"),
        ("--backend jax", "'jax' is not one of 'bridge', 'hf', 'nnsight'"),
        ("--wat", "No such option: --wat"),
        ("--json", "'--json' requires an argument"),
        ("extra", "unexpected extra argument"),
        ("--json folder", "folder is a folder"),
        ("--html folder/", "folder/ is a folder"),
        ("--png file/x.png", "a part of the path is a file"),
        ("--html -", "only --json writes to standard output"),
        ("--json x --html ./x", "x is given for two outputs"),
    ],
)
def test_refused_before_any_model_is_loaded(
    calls: list[Any], capsys: pytest.CaptureFixture[str], words: str, says: str
) -> None:
    Path("folder").mkdir()
    Path("file").touch()
    assert main(["find-sinks", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert says in err
    assert not calls
    assert sorted(os.listdir()) == ["file", "folder"]


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["find-sink"]) == 2
    assert capsys.readouterr().err.startswith("error: No such command 'find-sink'")


def _raising(error: BaseException) -> Any:
    def fake(*_: Any, **__: Any) -> Any:
        raise error

    return fake


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (SinkscopeError("no such\nmodel"), 2, "error: no such model\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (MemoryError(), 2, "error: out of memory: try --dtype bfloat16"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), 2, "--device cpu"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), 2, "--dtype bfloat16"),
    ],
)
def test_errors_are_one_line(
    calls: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    says: str,
) -> None:
    monkeypatch.setattr(sinkscope.sinks.first_token.find, "find_sinks", _raising(error))
    assert main(["find-sinks", "--json", "x.json"]) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert says in err
    assert not os.listdir()


def test_our_own_mistakes_keep_their_traceback(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinkscope.sinks.first_token.find, "find_sinks", _raising(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        main(["find-sinks"])


def test_full_disk_after_the_work(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = '{"schema": 1, "kind": "find-sinks"}'
    Path("x.json").write_text(old)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main(["find-sinks", "--json", "x.json"]) == 2
    out, err = capsys.readouterr()
    assert "sink layer is layer 2" in out  # what was found is seen all the same
    assert err == "error: cannot write x.json: the disk is full; make room or choose another place\n"
    assert (os.listdir(), Path("x.json").read_text()) == (["x.json"], old)


def test_full_standard_output() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "sinkscope", "models"],
            env=_environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot write to standard output: the disk is full")
    assert done.stderr.count("\n") == 1


def test_a_reader_that_stops_early_is_no_error_and_the_files_are_written(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two " * 40)
    words = f"{sys.executable} -m sinkscope loops {tmp_path / 'a.txt'} --json {tmp_path / 'a.json'}"
    done = subprocess.run(
        f"{words} | true; echo ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        env={**_environment(), "PYTHONUNBUFFERED": "1"},  # the first line already has no reader
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("0\n", "")
    assert json.loads((tmp_path / "a.json").read_text())["kind"] == "loops"


def test_models_agree_in_both_forms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main(["models", "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["schema"], data["kind"]) == (1, "models")
    assert [line.split()[0] for line in lines[3:]] == [entry["name"] for entry in data["result"]]
    row = next(line for line in lines if line.startswith("llama-2-7b "))
    assert main(["models", "--wide"]) == 0
    assert "meta-llama/Llama-2-7b-hf  L1.N7890, L1.N10411" in re.sub("   +", "  ", capsys.readouterr().out)
    assert "meta-llama/Llama-2-7b-hf" in row


@dataclass
class _Event:
    kind: str = "patched"
    step: int = 3
    position: int = 4
    layer: int = 1
    data: dict[str, Any] = field(default_factory=lambda: {"neuron": 7})


@dataclass
class _Made:
    events: list[_Event]


def test_generate_text_on_stdout_events_on_stderr(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}

    def fake(model: Any, prompt: str, *, on_text: Any, **arguments: Any) -> list[_Made]:
        asked.update(arguments, model=model, prompt=prompt)
        on_text(0, "one ")
        on_text(0, "two")
        return [_Made([_Event()])]

    monkeypatch.setattr(sinkscope.serving.generate, "generate", fake)
    monkeypatch.setattr(sinkscope.models.load, "load", lambda *a, **k: (a, k))
    Path("p.txt").write_text("the prompt\n")
    SinkPatch(layer=1, neurons=[7]).save("patch.json")
    assert main("generate --prompt-file p.txt --patch patch.json --max-new-tokens 2 --no-bos".split()) == 0
    assert capsys.readouterr() == ("one two\n", "patched: step 3, position 4, layer 1, neuron 7\n")
    assert asked == {
        "model": ((None,), {"backend": "hf"}),
        "prompt": "the prompt\n",
        "interventions": SinkPatch(layer=1, neurons=[7]),
        "max_new_tokens": 2,
        "temperature": 0.0,
        "seed": 0,
        "bos": False,
    }


def test_interrupted_generation_keeps_its_text(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fake(model: Any, prompt: str, *, on_text: Any, **_: Any) -> Any:
        on_text(0, "so far")
        raise KeyboardInterrupt

    monkeypatch.setattr(sinkscope.serving.generate, "generate", fake)
    monkeypatch.setattr(sinkscope.models.load, "load", lambda *a, **k: None)
    Path("p.txt").write_text("x")
    assert main(["generate", "--prompt-file", "p.txt"]) == 130
    assert capsys.readouterr() == ("so far", "interrupted\n")


@pytest.mark.parametrize("closed", [False, True])
def test_standard_input_is_utf8_whatever_the_terminal_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    content = "\ufeffgr\u00fc\u00dfe\r\nan alle\n"
    given = io.TextIOWrapper(io.BytesIO(content.encode()), encoding="ascii", errors="surrogateescape")
    monkeypatch.setattr(sys, "stdin", None if closed else given)
    Path("same.txt").write_bytes(content.encode())
    assert read_text("-") == ("" if closed else read_text("same.txt"))
    assert read_text("same.txt") == "gr\u00fc\u00dfe\nan alle\n"


@pytest.mark.parametrize(
    ("words", "content", "says"),
    [
        ("--prompt-file none.txt", b"", "cannot read none.txt: no such file"),
        ("--prompt-file p.txt", b"", "the prompt is empty"),
        ("--prompt-file p.txt", b" \n", "the prompt is empty"),
        ("--prompt-file p.txt", b"\xff\xfe\x00", "p.txt is not UTF-8"),
        ("--prompt-file -", b"", "the prompt is empty"),
        ("--prompt-file -", b"\xff\xfe\x00", "standard input is not UTF-8 text"),
        ("--prompt-file .", b"", "cannot read .: is a directory"),
        ("--prompt-file p.txt --patch none.json", b"x", "cannot read none.json"),
        ("--prompt-file p.txt --patch p.txt", b"x", "p.txt is not JSON"),
        ("--prompt-file p.txt --policy lru", b"x", "policy 'lru': expected one of adakv, full, h2o"),
        ("--prompt-file p.txt --policy h2o:0", b"x", "budget=0"),
        ("--prompt-file p.txt --policy h2o:many", b"x", "budget='many': expected a number of tokens"),
        ("--prompt-file p.txt --max-new-tokens 0", b"x", "'--max-new-tokens'"),
        ("--prompt-file p.txt --temperature -1", b"x", "'--temperature'"),
        ("", b"x", "Missing option '--prompt-file'"),
    ],
)
def test_generate_refuses_before_any_model_is_loaded(
    calls: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    content: bytes,
    says: str,
) -> None:
    monkeypatch.setattr(sinkscope.models.load, "load", _raising(AssertionError("loaded")))
    Path("p.txt").write_bytes(content)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="ascii"))
    assert main(["generate", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert says in err


def test_progress_only_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from sinkscope.files.console import ProgressBar

    with ProgressBar() as progress:
        progress("layers", 1, 2)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with ProgressBar() as progress:
        progress("layers", 1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert "layers" in err
    assert "1/2" in err


def test_tokens_that_the_terminal_cannot_show(calls: list[Any]) -> None:
    code = "import sys; from sinkscope.app.cli import _quiet; _quiet(); print('\\u0120the \\ud800')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**_environment(), "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "\\u0120the \\ud800\n"


@pytest.mark.slow
def test_bundled_model_end_to_end(tmp_path: Path) -> None:
    done = _run("find-sinks", "--json", "x.json", "--html", "x.html", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    found = Result.load(tmp_path / "x.json")
    assert isinstance(found, sinkscope.sinks.first_token.find.FindSinks)
    assert found.sink_layer is not None
    assert found.causal
    assert done.stdout == found.text() + "\n"


def test_module_and_console_script_share_one_entry() -> None:
    assert cli.command_line().info.name == "sinkscope"
    assert _run("--version").stdout == f"sinkscope {sinkscope.__version__}\n"


EVERY_COMMAND = pytest.mark.parametrize("command", sorted({entry.command for entry in entries().values()}))


@EVERY_COMMAND
def test_help_fits_80_columns_and_has_examples(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An example of every function that shares the command, whose options exist, and where to read on."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    assert main([*command.split(), "--help"]) == 0
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= 80
    assert f"Documentation: docs/cli.md#sinkscope-{command.replace(' ', '-')}" in told
    for entry in entries().values():
        if entry.command != command:
            continue
        assert entry.examples, f"{entry.name} has no section Example in its docstring"
        for line in entry.examples:
            assert f"  {line}\n" in told
            words = shlex.split(line.rpartition("| ")[2])
            assert words[: 1 + len(command.split())] == ["sinkscope", *command.split()]
            assert f"--{entry.marks['flag']}" in words if "flag" in entry.marks else True
            assert all(f"{word} " in told or f"{word}\n" in told for word in words if word.startswith("--"))


def test_the_help_shows_the_groups_in_their_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    groups = [line[:-1] for line in told.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert groups == ["Options", "Sinks", "Repetition", "Loops", "Dialogues", "Look"]
    assert max(map(len, told.splitlines())) <= 80 and "--install-completion" in told and "sinkscope demo" in told


@pytest.mark.parametrize(("typed", "says"), [("sinkscope find-s", "find-sinks"), ("sinkscope scan --qu", "--quick")])
def test_the_shell_completes(typed: str, says: str) -> None:
    """Without what a measurement needs: a shell waits for the answer."""
    asked = {"_SINKSCOPE_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    code = (
        f"import atexit, sys\natexit.register(lambda: print(sorted({HEAVY} & set(sys.modules)), file=sys.stderr))\n"
        "sys.argv = ['sinkscope']\nfrom sinkscope.__main__ import main\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [says] and done.stderr == "[]\n"
