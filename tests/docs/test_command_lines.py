"""Every command that stands on a page or in the docstring of a script, with its options, is there."""

from __future__ import annotations

import inspect
import re
import shlex
from importlib import import_module
from pathlib import Path

from repository import FIGURES, ROOT

from sinkscope.app.commands import COMMANDS

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *FIGURES.glob("*.md")]
COMMAND = r"sinkscope [a-z]|python -m experiments\."


def typed(page: Path) -> set[str]:
    """The commands that a page shows, in its blocks, its lines and its tables."""
    text = page.read_text().replace("\\\n", " ").replace("\\|", "|")
    lines = "\n".join(re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S)).splitlines()
    lines += re.findall(rf"`((?:{COMMAND})[^`]*)`", text.replace("\n", " "))
    parts = [part.strip() for line in lines for part in re.split(r" [|&;<>]+ *", line.partition("  #")[0])]
    return {part for part in parts if re.match(COMMAND, part)}


def used(script: Path) -> set[str]:
    """How the docstring of a script says that it is run, without the brackets around what may be left out."""
    text = re.sub(r"\n {8}", " ", script.read_text().split('"""')[1])
    return {re.sub(r"[\[\]]|\.\.\.", "", line) for line in re.findall(r"python -m experiments\.[^\n`]+", text)}


def options_of(words: list[str]) -> tuple[str, set[str]]:
    """The name of a command, and the options that it has."""
    if words[0] == "python":
        parameters = inspect.signature(import_module(words[2]).main).parameters
        return words[2], {f"--{name}".replace("_", "-") for name in parameters}
    return words[1], {"--help", *(option for one in COMMANDS[words[1]].params for option in one.opts)}


def test_commands_of_pages_and_docstrings_have_these_options_and_every_command_is_shown():
    lines = [(page, line) for page in PAGES for line in typed(page)]
    lines += [(script, line) for script in (ROOT / "experiments").rglob("*.py") for line in used(script)]
    shown, wrong = set(), []
    for file, line in lines:
        words = shlex.split(line, comments=True)
        name, options = options_of(words)
        shown.add(name)
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        wrong += [f"{file.name}: {line}: {option}" for option in given - options]
    assert wrong == []
    assert set(COMMANDS) <= shown and len(shown) > 30
