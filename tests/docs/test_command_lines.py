"""Every command that stands on a page, in the docstring of a script or beside a figure has the options of today."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
from repository import FIGURES, ROOT

from experiments import script
from experiments.script import value_of
from sinkscope.app.commands import COMMANDS
from sinkscope.app.commands.options import TextFile
from sinkscope.errors import SinkscopeError

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *FIGURES.glob("*.md")]
_COMMAND = r"sinkscope [a-z]|python -m experiments\."


def typed(page: Path) -> set[str]:
    """The commands that a page shows, in its blocks, its lines and its tables."""
    text = page.read_text().replace("\\\n", " ").replace("\\|", "|")
    lines = "\n".join(re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S)).splitlines()
    lines += re.findall(rf"`((?:{_COMMAND})[^`]*)`", text.replace("\n", " "))
    parts = [part.strip() for line in lines for part in re.split(r" [|&;<>]+ *", line.partition("  #")[0])]
    return {part for part in parts if re.match(_COMMAND, part)}


def used(file: Path) -> list[str]:
    """How the docstring of a script says that it is run, without the brackets around what may be left out."""
    text = re.sub(r"\n {8}", " ", file.read_text().split('"""')[1])
    lines = re.findall(r"python -m experiments\.[^\n`]+", text)
    return [re.sub(r"[\[\]]|\.\.\.", "", line.partition("  #")[0]) for line in lines]


def recorded(value: Any) -> Iterator[list[str]]:
    """The commands in a record."""
    if isinstance(value, dict):
        for name, held in value.items():
            if name == "argv":
                yield held
            elif name == "command" and isinstance(held, str) and "argv" not in value:
                yield held.split()
            else:
                yield from recorded(held)


def parsed(words: Sequence[str]) -> str:
    """The name of a command whose words are read as by the command itself, which does not run."""
    if "-m" in words:
        at = words.index("-m") + 1
        script.arguments_of(import_module(words[at]).main, words[at + 1 :])
        return words[at]
    name = " ".join(words[1:3])
    if name not in COMMANDS:
        name = words[1]
    COMMANDS[name].make_context(name, [*words[1 + len(name.split()) :]])
    return name


@pytest.fixture(autouse=True)
def _unread(monkeypatch):
    """Files of text that a command names are not there."""
    monkeypatch.setattr(TextFile, "convert", lambda _, value, *__: value)


@pytest.fixture
def partly(monkeypatch):
    """What a page does not write out may be missing: required options, and what a word in capitals stands for."""

    def converted(kind: click.ParamType, value: Any, param: Any = None, ctx: Any = None) -> Any:
        stands_for = isinstance(value, str) and (value.isupper() or "|" in value)
        return value if stands_for else kind.convert(value, param, ctx)

    def read(kind: Any, word: str) -> Any:
        return word if word.isupper() or "|" in word else value_of(kind, word)

    def error(parser: Any, message: str) -> None:
        if not message.startswith("the following arguments are required"):
            raise SinkscopeError(message)

    monkeypatch.setattr(click.ParamType, "__call__", converted)
    monkeypatch.setattr(click.Parameter, "value_is_missing", lambda *_: False)
    monkeypatch.setattr(script, "value_of", read)
    monkeypatch.setattr(script.Parser, "error", error)


def test_commands_of_pages_and_docstrings_are_read_and_every_command_is_shown(partly):
    lines = [(page, line) for page in PAGES for line in typed(page)]
    lines += [(file, line) for file in (ROOT / "experiments").rglob("*.py") for line in used(file)]
    shown, wrong = set(), []
    for file, line in lines:
        try:
            shown.add(parsed(shlex.split(line, comments=True)))
        except (click.exceptions.Exit, SystemExit):  # of --help
            pass
        except (click.UsageError, SinkscopeError, KeyError, ImportError) as error:
            wrong.append(f"{file.name}: {line}: {error}")
    assert wrong == []
    assert set(COMMANDS) <= shown and len(shown) > 30


LEFT = ("loopbench_small", "loopserve_alphas", "needle_recall", "needle_recall_2hop")
"""Figures on which a default rests, and whose script, or an option of it, is not kept."""
MADE = [file for file in sorted(FIGURES.glob("*.json")) if file.stem not in LEFT]


@pytest.mark.parametrize("file", MADE, ids=lambda file: file.stem)
def test_the_command_beside_a_figure_is_read(file):
    for words in recorded(json.loads(file.read_text())):
        assert parsed(words)


@pytest.mark.parametrize(
    "line", ["sinkscope lines --alphas 1", "python -m experiments.bench_kv --only speed", "sinkscope tables"]
)
def test_a_wrong_option_a_wrong_choice_and_an_unknown_command_are_not_read(line, partly):
    with pytest.raises((click.UsageError, SinkscopeError, KeyError)):
        parsed(line.split())
