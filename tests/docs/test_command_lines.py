"""Every command on a page or in the docstring of a script is there with its options, and so is every name."""

from __future__ import annotations

import inspect
import re
import shlex
from importlib import import_module
from pkgutil import resolve_name

from repository import FIGURES, ROOT

from experiments.papers.__main__ import PAPERS
from sinkscope.app.commands import COMMANDS

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *FIGURES.glob("*.md")]
SCRIPTS = [*(ROOT / "experiments").rglob("*.py")]
COMMAND = r"sinkscope [a-z]|python -m experiments\."


def typed(text: str) -> set[str]:
    """The commands that a page shows, in its blocks, its lines and its tables."""
    text = text.replace("\\\n", " ").replace("\\|", "|")
    lines = "\n".join(re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S)).splitlines()
    lines += re.findall(rf"`((?:{COMMAND})[^`]*)`", text.replace("\n", " "))
    parts = [part.strip() for line in lines for part in re.split(r" [|&;<>]+ *", line.partition("  #")[0])]
    return {part for part in parts if re.match(COMMAND, part)}


def used(script: str) -> set[str]:
    """How the docstring of a script says that it is run, without the brackets around what may be left out."""
    text = re.sub(r"\n {8}", " ", script.split('"""')[1])
    return {re.sub(r"[\[\]]|\.\.\.", "", line) for line in re.findall(r"python -m experiments\.[^\n`]+", text)}


def options_of(words: list[str]) -> tuple[str, set[str]]:
    """The name of a command, and the options that it has."""
    if words[2:3] == ["experiments.papers"]:
        named = [paper.command_of(one) for paper in PAPERS for one in paper.measured if one.name in words]
        return words[2], {"--model", "--out", *(option for one in named for read in one.params for option in read.opts)}
    if words[0] == "python":
        parameters = inspect.signature(import_module(words[2]).main).parameters
        return words[2], {f"--{name}".replace("_", "-") for name in parameters}
    return words[1], {"--help", *(option for one in COMMANDS[words[1]].params for option in one.opts)}


def test_commands_have_these_options_and_every_command_is_shown():
    lines = {(page.name, line) for page in PAGES for line in typed(page.read_text())}
    lines |= {(script.name, line) for script in SCRIPTS for line in used(script.read_text())}
    shown, wrong = set(), []
    for file, line in lines:
        words = shlex.split(line, comments=True)
        name, options = options_of(words)
        shown.add(name)
        unknown = {word.partition("=")[0] for word in words if word.startswith("--")} - options
        wrong += [f"{file}: {line}: {option}" for option in unknown]
    assert wrong == [] and set(COMMANDS) <= shown


def test_names_are_there():
    pages = " ".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    names = re.findall(r"`(sinkscope(?:\.\w+){2,}(?::[\w.]+)?)`", pages)
    assert len(names) > 20 and all(resolve_name(name) is not None for name in names)
