"""Every option of every command changes what is printed or written, is refused, or is said to be without effect.

Each command runs once as it is and once with each of its options. What is compared is the result without its settings,
or what is printed.
"""

from __future__ import annotations

import json
import shlex
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest

from sinkscope.app.cli import main
from sinkscope.app.commands import COMMANDS
from sinkscope.app.commands.command import out_of_memory
from sinkscope.hooks.edit.sink_patch import SinkPatch

TYPED = tomllib.loads(Path(__file__).with_name("options.toml").read_text())
BASES: dict[str, dict[str, str]] = TYPED["commands"]
SHARED = ("model_word", "json", "html", "csv")
"""Options of every result, which have tests of their own."""
ELSEWHERE = {"compare", "scan", "view", "check-cache", "report"}
"""Commands whose options have tests of their own, each in tests/app or the folder of its room."""
NO_RESULT = "--json - printed no result"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """What the commands are given, and where they write."""
    folder = tmp_path_factory.mktemp("options")
    here = {name: folder / name for name in ("made", "made2", "page", "run", "text", "other", "settings", "words")}
    text = "The little bird sang in the tree and the boy went home to his mother. "
    contents = {
        "text": "One day a girl found a small red ball near the old house by the lake. " * 120,
        "other": "All is new here, and no word of it comes twice.",
        "settings": '{"shortest": 200}',
        "prompt": "Once upon a time there was a dog",
        "prompt2": "The sun was warm",
        "looping": " The cat sat on the mat." * 30,
        "looping2": " The dog ran to the park." * 30,
        "data": "".join(json.dumps({"text": (text + str(number)) * 12}) + "\n" for number in range(3)),
        "answers": "".join(json.dumps({"text": line}) + "\n" for line in ("One two three.", "No more of it. " * 40)),
    }
    for name, content in contents.items():
        here[name] = folder / f"{name}.{'jsonl' if name in ('data', 'answers') else 'txt'}"
        here[name].write_text(content)
    for name, neurons in (("patch", range(100)), ("patch2", range(100, 200))):
        here[name] = folder / f"{name}.json"
        SinkPatch(layer=0, neurons=list(neurons)).save(here[name])
    here["done"] = folder / "done"
    words = "bench --task loops:source=text:count=3 --methods full,streaming:8 --max-new-tokens 5 --out".split()
    assert main([*words, str(here["done"])]) == 0
    return here


def outcome(command: str, words: str, files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> Any:
    """The result of a command and the files that it wrote, or that it was refused."""
    typed = [*command.split(), *shlex.split(words)]
    if COMMANDS[command].kinds:
        typed += ["--json", "-"]
    capsys.readouterr()
    code = main(typed)
    printed = capsys.readouterr()
    if code == 2:
        assert printed.err.startswith("error: ")
        return "refused"
    written = []
    for name in ("made", "made2", "page", "run"):
        place = files[name]
        for file in [place, *(sorted(place.glob("*")) if place.is_dir() else ())]:
            if file.is_file() and file.name != "settings.json" and str(place) in words:
                written.append((name, file.stat().st_size))
    if COMMANDS[command].kinds:
        try:
            return code, plain_numbers(json.loads(printed.out)["result"]), written
        except ValueError:
            return NO_RESULT
    return code, printed.out, written


def plain_numbers(value: Any) -> Any:
    """A result without times."""
    if isinstance(value, dict):
        return {name: plain_numbers(one) for name, one in value.items() if name not in ("time", "seconds")}
    if isinstance(value, list):
        return [plain_numbers(one) for one in value]
    return value


def tried(command: str) -> list[str]:
    """The options of a command that can be tried here."""
    names = [str(one.name) for one in COMMANDS[command].params if one.name not in SHARED]
    known = {**TYPED["common"], **BASES[command]}
    missing = {*names} - known.keys() - TYPED["without-effect"].keys()
    assert not missing, f"{command} has options that no test changes: {sorted(missing)}"
    return [name for name in names if name in known]


def test_every_command_has_a_test_of_its_options():
    assert COMMANDS.keys() == BASES.keys() | ELSEWHERE
    for command in BASES:
        tried(command)


@pytest.mark.slow
@pytest.mark.parametrize("command", list(BASES))
def test_every_option_has_an_effect(command, files, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    COMMANDS[command].describe()
    options = {one.name: one for one in COMMANDS[command].params}
    before: dict[str, Any] = {}
    without = []
    for name in tried(command):
        base = TYPED["beside"].get(f"{command} {name}", BASES[command]["base"])
        if base not in before:
            before[base] = outcome(command, base.format(**files), files, capsys)
            assert before[base] != "refused"
        changed = BASES[command].get(name) or TYPED["common"][name]
        words = f"{base} {changed}"
        if isinstance(options[name], click.Argument):  # it takes the place of the first word
            words = " ".join([changed, *base.split()[1:]])
        if outcome(command, words.format(**files), files, capsys) in (before[base], NO_RESULT):
            help_texts = [" ".join(str(text).split()) for text in (options[name].help, COMMANDS[command].help)]
            where = TYPED["said"].get(name) or TYPED["said"].get(f"{command} {changed}", "-")
            if f"{command} {changed}" not in TYPED["robust"] and not any(where in text for text in help_texts):
                without.append(changed)
    assert not without


def test_what_to_try_without_memory_is_an_option_of_the_command():
    for command in COMMANDS.values():
        said = out_of_memory(command)
        flags = {flag for one in command.params for flag in one.opts}
        assert said.startswith("out of memory: try ")
        assert {word.strip(",") for word in said.split() if word.startswith("--")} <= flags, command.words
