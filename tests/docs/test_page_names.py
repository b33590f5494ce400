"""Names on pages, in notebooks and in docstrings exist: what is removed anywhere fails here in a second."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

import sinkscope
from sinkscope.app.cli import COMMANDS

NAME = re.compile(r"(?<![\w/.\"'-])(?:ss|sinkscope)(?:\.[A-Za-z_]\w*)+")
FROM = re.compile(r"^\s*from (sinkscope[\w.]*) import \(?([\w, \n]+?)\)?\s*(?:#.*)?$", re.M)
COMMAND = re.compile(r"(?:^|[`|(;&]|\$ )\s*(?:\w+=\S+ )*sinkscope ([a-z][a-z-]+)((?: [^`\n|&;#)]*)?)", re.M)
OPTION = re.compile(r"(?<!\S)--[a-z][a-z-]+")
TYPES = {"json", "html", "py", "txt", "md", "jsonl", "slurm", "csv"}
"""Endings of files, which look like names: `sinkscope.json`."""
INVENTED = ("sinkscope.attention_entropy", "ss.attention_entropy", "sinkscope.kv.Name")
"""Names of examples on pages about extending, which are added there."""
GROUPS = ("sinkscope.measurements", "sinkscope.policies")
"""Groups of entry points."""
PROSE = ("requires",)
"""Words of messages that follow the name of the package."""
NEEDS_A_GPU = "sinkscope.sparse.triton"


def notebook_code(path: Path) -> str:
    """The text of a notebook's cells."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells)


def texts() -> Iterator[tuple[str, str]]:
    """What users read: pages, notebooks, and the code of the package with its docstrings."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md", *(ROOT / "docs").rglob("*.md")]
    for page in sorted(pages):
        yield page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8")
    for notebook in sorted((ROOT / "docs").rglob("*.ipynb")):
        yield notebook.relative_to(ROOT).as_posix(), notebook_code(notebook)
    for module in sorted((ROOT / "sinkscope").rglob("*.py")):
        yield module.relative_to(ROOT).as_posix(), module.read_text(encoding="utf-8")


TEXTS = list(texts())


def found(name: str) -> bool:
    """Whether a dotted name of the package can be resolved."""
    first, *rest = name.split(".")
    thing: Any = sinkscope
    path = "sinkscope"
    for part in rest:
        path = f"{path}.{part}"
        try:
            thing = getattr(thing, part)
        except (AttributeError, sinkscope.SinkscopeError):
            try:
                thing = import_module(path)
            except ImportError:
                return False
        if not isinstance(thing, type(sinkscope)) and part != rest[-1]:
            return True  # an attribute of an object, such as a result, which only measuring has
    return first in ("ss", "sinkscope")


def imported(module: str, name: str) -> bool:
    """Whether a module has a name, or a module below it."""
    try:
        return hasattr(import_module(module), name) or import_module(f"{module}.{name}") is not None
    except ImportError:
        return False


@pytest.mark.parametrize(("file", "text"), TEXTS, ids=[file for file, _ in TEXTS])
def test_names_resolve(file, text):
    missing: list[str] = []
    for name in sorted({*NAME.findall(text)}):
        is_known = name.startswith((*INVENTED, *GROUPS, NEEDS_A_GPU)) or name.rpartition(".")[2] in TYPES
        if not is_known and not found(name):
            missing.append(name)
    for module, names in FROM.findall(text):
        for name in re.findall(r"(\w+)(?: as \w+)?", names):
            if not module.startswith(NEEDS_A_GPU) and not imported(module, name):
                missing.append(f"from {module} import {name}")
    assert not missing, f"{file} names what is not there: {', '.join(missing)}. Give the name that it has now"


def test_commands_and_their_options_exist():
    missing: list[str] = []
    for file, text in TEXTS:
        for name, arguments in COMMAND.findall(text):
            command = COMMANDS.get(name)
            if name in PROSE:
                continue
            if command is None:
                missing.append(f"{file}: sinkscope {name}")
                continue
            known = {option for parameter in command.params for option in parameter.opts} | {"--help", "--version"}
            missing += [
                f"{file}: sinkscope {name} {option}" for option in OPTION.findall(arguments) if option not in known
            ]
    assert not missing, "no such command or option:\n" + "\n".join(missing)


LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(text: str) -> set[str]:
    """The anchors of a page: those of its headings, and its own."""
    made = {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", text, re.M)
    }
    return made | set(re.findall(r'id="([\w-]+)"', text))


def test_links_lead_somewhere():
    missing: list[str] = []
    for file, text in TEXTS:
        if not file.endswith(".md"):
            continue
        for link in LINK.findall(text):
            target, _, anchor = link.partition("#")
            if "://" in link or link.startswith("mailto:"):
                continue
            page = (ROOT / file).parent / target if target else ROOT / file
            if not page.exists():
                missing.append(f"{file}: {link}")
            elif anchor and page.suffix == ".md" and anchor not in anchors(page.read_text(encoding="utf-8")):
                missing.append(f"{file}: {link}")
    assert not missing, "links that lead nowhere:\n" + "\n".join(missing)
