"""Every option of every command changes what is printed or written, is refused, or is said to be without effect.

Each command runs once as it is and once with each of its options. What is compared is the result without its settings,
or what is printed.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import click
import pytest

from sinkscope.app.cli import main
from sinkscope.app.commands import COMMANDS
from sinkscope.app.commands.command import out_of_memory
from sinkscope.hooks.edit.sink_patch import SinkPatch

WITHOUT_EFFECT = {
    "device": "the machine has one",
    "revision": "of a model on the hub, see tests/models/test_hub.py",
    "progress": "nothing is printed where no terminal is",
    "port": "of a server that waits, see tests/app/test_view_server.py and tests/loops/test_proxy.py",
    "host": "of a server that waits, see tests/loops/test_proxy.py",
    "proxy": "a server that waits, see tests/loops/test_proxy.py",
    "batch_size": "how many prompts run together, by its help",
    "resume": "where finished parts are kept, by its help",
    "only": "which checks run, see tests/conformance",
    "tolerance": "how much is forgiven: of a right cache nothing is",
}
"""Options that are not tried here, and why."""
SHARED = ("model_word", "json", "html", "csv", "explain")
"""Options of every result, which have tests of their own."""
COMMON = {
    "model": "--model recall",
    "dtype": "--dtype bfloat16",
    "bos": "--no-bos",
    "text": "--text {text}",
    "seed": "--seed 7",
    "patch": "--patch {patch}",
    "policy": "--policy streaming:16",
    "guard": "--guard",
    "spike": "--spike 9",
    "pieces": "--pieces 3",
}
BASES: dict[str, tuple[str, dict[str, str]]] = {
    "loops": (
        "{answers}",
        {
            "files": "{other}",
            "field": "--field text",
            "fail_on": "--fail-on suspicious",
            "follow": "--follow",
            "form": "--format text",
            "settings": "--settings {settings}",
            "variant": "--variant full",
            "cut": "--cut none",
            "prompt": "--prompt 'Write the words No more of it 40 times.'",
            "first": "--first",
        },
    ),
    "bench": (
        "--task loops:source=text:count=3 --methods full,h2o:8 --max-new-tokens 6",
        {
            "task": "--task text:count=3:prompt=24:answer=4",
            "methods": "--methods full,h2o:4",
            "out": "--out {run}",
            "max_new_tokens": "--max-new-tokens 4",
            "temperature": "--temperature 1.5",
        },
    ),
    "bench table": ("{done}", {"folders": "{run}", "by": "--by turn", "beside": "--beside streaming:8"}),
    "barcode": (
        "--max-new-tokens 24",
        {"prompt": "--prompt-file {prompt}", "max_new_tokens": "--max-new-tokens 30", "heads": "--heads L0.H1"},
    ),
    "why": (
        "--prompt-file {prompt} --answer-file {looping} --cuts 3",
        {
            "prompt": "--prompt-file {prompt2}",
            "answer": "--answer-file {looping2}",
            "max_new_tokens": "--max-new-tokens 30",
            "cuts": "--cuts 4",
        },
    ),
    "lines": (
        "--count 2 --length 64",
        {
            "data": "--data {data}",
            "count": "--count 3",
            "length": "--length 48",
            "etas": "--etas 0.2",
            "layers": "--layers 1",
        },
    ),
    "generate": (
        "Once --max-new-tokens 160",
        {
            "prompt": "Another",
            "prompt_file": "--prompt-file {prompt}",
            "chat": "--chat",
            "max_new_tokens": "--max-new-tokens 6",
            "temperature": "--temperature 1.5",
        },
    ),
    "find-sinks": ("", {"tokens": "--tokens cat", "max_repeats": "--max-repeats 8"}),
    "circuit": ("--max-repeats 8", {"tokens": "--tokens cat", "max_repeats": "--max-repeats 40"}),
    "heads": ("--n-tokens 4", {"tokens": "--tokens cat,dog", "n_tokens": "--n-tokens 6"}),
    "repeat": (
        "--tokens cat --max-repeats 8",
        {
            "quantity": "--quantity probability",
            "tokens": "--tokens dog",
            "prefix": "--prefix the",
            "max_repeats": "--max-repeats 12",
            "sample": "--sample 3",
        },
    ),
    "attack": (
        "--n-tokens 12 --sequences 2 --length 2",
        {
            "tokens": "--tokens cat,dog",
            "n_tokens": "--n-tokens 16",
            "length": "--length 3",
            "sequences": "--sequences 4",
        },
    ),
    "precision": ("--schemes kv4 --pieces 2 --length 16", {"schemes": "--schemes kv8", "length": "--length 12"}),
    "patch make": (
        "--max-repeats 200 --pieces 3 --length 32 --out {made}",
        {"max_repeats": "--max-repeats 12", "limit": "--limit -1", "length": "--length 12", "out": "--out {made2}"},
    ),
    "patch eval": (
        "{patch} --max-repeats 8 --pieces 2 --length 16",
        {"patch": "{patch2}", "max_repeats": "--max-repeats 12", "length": "--length 12"},
    ),
    "models": ("", {"word": "--model llama", "check": "--check bundled"}),
}
ELSEWHERE = {"demo", "scan", "scan table", "view", "check-cache", "report"}
"""Commands whose options have tests of their own, each in tests/app or the folder of its room."""
NO_RESULT = "--json - printed no result"
SAID = {
    "loops --field text": "By default under one of the",
    "loops --fail-on suspicious": "From which verdict on",
    "seed": "without effect where nothing is drawn",
    "lines --policy streaming:16": "changes nothing here",
    "lines --guard": "changes nothing here",
}
"""Options that change nothing, and where their help, or that of their command, says so."""


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
            if "--follow" in typed:  # a line for each alarm
                return code, [plain_numbers(json.loads(line)) for line in printed.out.splitlines()], written
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
    known = {**COMMON, **BASES[command][1]}
    missing = {*names} - known.keys() - WITHOUT_EFFECT.keys()
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
    base, changes = BASES[command]
    options = {one.name: one for one in COMMANDS[command].params}
    before = outcome(command, base.format(**files), files, capsys)
    assert before != "refused"
    without = []
    for name in tried(command):
        changed = changes.get(name) or COMMON[name]
        words = f"{base} {changed}"
        if isinstance(options[name], click.Argument):  # it takes the place of the first word
            words = " ".join([changed, *base.split()[1:]])
        if outcome(command, words.format(**files), files, capsys) in (before, NO_RESULT):
            said = SAID.get(name) or SAID.get(f"{command} {changed}", "-")
            if said not in str(options[name].help) and said not in " ".join(str(COMMANDS[command].help).split()):
                without.append(changed)
    assert not without


def test_what_to_try_without_memory_is_an_option_of_the_command():
    for command in COMMANDS.values():
        said = out_of_memory(command)
        flags = {flag for one in command.params for flag in one.opts}
        assert said.startswith("out of memory: try ")
        assert {word.strip(",") for word in said.split() if word.startswith("--")} <= flags, command.words
