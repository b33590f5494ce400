"""Bad input to every command of the table: one line, exit 2, and no file made, changed or left."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from checkpoints import spoiled

from sinkscope.app.commands import COMMANDS
from sinkscope.files.plain import visible
from sinkscope.hooks.edit import SinkPatch

pytestmark = pytest.mark.few_texts

LONG = "x" * 5000
STEERING = "\x1b[2J\u202etxt"
WORDS = ("nonsense", "", STEERING, LONG, "\udcff")
NUMBERS = ("x", "", "1e400", "nan", "1,5", "\u00b9", "0x10", STEERING, LONG)
BAD_FILES = ("missing", "folder", "binary", "/proc/self/mem", "a\0b", "~nobody-here/x", *WORDS)
BAD_JSON = (*BAD_FILES, "empty", "brackets.json", "other.json", "list.json", "words.txt")
BAD = {  # by the name of an option, or by its type
    click.INT: ("1.5", str(2**63), "1" + "0" * 400, "-" + "9" * 30, *NUMBERS),
    click.FLOAT: ("inf", "-inf", *NUMBERS),
    "model": ("./missing", "missing.gguf", "binary", "words.txt", "llama-2-77b", "org/missing", *BAD_FILES[:-2]),
    "text": ("empty", *BAD_FILES),
    "prompt": ("empty", *BAD_FILES),
    "files": ("empty", *BAD_FILES[:-3]),
    **dict.fromkeys(("patch", "settings", "against"), BAD_JSON),
    **dict.fromkeys(("json", "html", "csv"), ("folder", "words.txt/x", "/proc/x", "n" * 300)),
    **dict.fromkeys(("device", "dtype", "policy", "task", "tokenizer", "variant"), WORDS),
    **dict.fromkeys(("methods", "budgets", "heads"), ("nonsense", "", ",", STEERING, LONG)),
}
FOREIGN = ("foreign.html", "foreign.json", "foreign.png", "words.txt", "other.json", "")
GOOD = {
    "patch": "patch.json",
    "out": "new/out",
    "task": "text",
    "methods": "full",
    "model": "zip",
    "folder": "folder",
}
Case = tuple[str, ...]
LOADED = [command.load() for command in COMMANDS.values()]  # before another test replaces what they are made of


def _values(option) -> tuple[str, ...]:
    """Values that an option has to refuse; a prompt that is no file may be any text."""
    if option.name == "prompt" and "--prompt-file" not in option.opts:
        return ()
    values = BAD.get(option.name, BAD.get(option.type, ()))
    if option.name in ("json", "html", "csv"):
        values += FOREIGN
    if isinstance(option.type, click.Choice):
        values = WORDS
    return values


def _required(words: str, without: str = "") -> list[str]:
    """A command with good values for what it requires."""
    line = words.split()
    for option in COMMANDS[words].params:
        needed = option.required or isinstance(option, click.Argument)
        if not needed or option.name == without:
            continue
        value = GOOD.get(str(option.name), "words.txt")
        if isinstance(option.type, click.Choice):
            value = option.type.choices[0]
        if isinstance(option, click.Argument):
            line.append(value)
        else:
            line += [option.opts[0], value]
    return line


def _cases(words: str) -> list[Case]:
    """Everything that a command has to refuse without a model in memory."""
    line = _required(words)
    cases = [(*line, "--nonsense"), (*line, "one", "two", "three", "--more")]
    options = {option.name: option for option in COMMANDS[words].params}
    for option in options.values():
        if isinstance(option, click.Option):
            cases += [(*_required(words, str(option.name)), option.opts[0], value) for value in _values(option)]
            cases += [(*line, f"{option.opts[0]}=x")] * option.is_flag
        else:
            cases += [(*words.split(), value) for value in _values(option)]
    return cases


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    here = tmp_path_factory.mktemp("sweep")
    (here / "folder").mkdir()
    contents = {
        "folder/mine": "mine",
        "empty": "",
        "words.txt": "hello world, this is a text.\n" * 40,
        "brackets.json": "[" * 10**6,
        "other.json": '{"mine": [1, 2, 3]}',
        "list.json": '[{"schema": 1, "kind": "sink-patch"}]',
        "foreign.json": '{"mine": 1}',
        "foreign.html": "<html>mine</html>",
    }
    for name, text in contents.items():
        (here / name).write_text(text)
    (here / "binary").write_bytes(bytes(range(256)) * 40)
    (here / "foreign.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"x" * 90)
    SinkPatch(layer=1, neurons=[3]).save(here / "patch.json")
    model = spoiled(here / "zip")
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"PK\3\4" + b"x" * 900)
    return here


def _state(folder: Path) -> dict[Path, tuple[int, ...]]:
    """What is in a folder, and of each file when it was last written and how long it is."""
    state = {}
    for path in folder.rglob("*"):
        at = path.stat()
        state[path] = () if path.is_dir() else (at.st_ino, at.st_mtime_ns, at.st_size)
    return state


@pytest.mark.slow
@pytest.mark.parametrize("words", list(COMMANDS))
def test_every_bad_input_is_refused_in_one_line(words, files, monkeypatch, refusal):
    monkeypatch.chdir(files)
    before, cases = _state(files), _cases(words)
    for case in cases:
        said = refusal([*case])
        assert len(said) <= 690 and "unexpected error" not in said and visible(said) == said, case
    assert _state(files) == before and cases
