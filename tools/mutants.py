"""Applies small wrong changes (mutants) to the code, and checks that the tests named for each of them fail.

`mutants.txt` lists the mutants: a fragment of the source and its replacement. The fragment is searched in all files of
the package, so code may move, and all white space is equal. A fragment that is not found exactly once is reported as
stale. The tests run in a copy of the tree:

    python -m tools.mutants --list
    python -m tools.mutants causal-without-control
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import click
import pytest
from hypothesis import Phase, settings

TREE = Path(__file__).resolve().parents[1]
TIMEOUT = 120  # seconds of one test
LIMITS = ("--timeout", str(TIMEOUT), "--hypothesis-profile", "mutants")
LIBRARIES = (
    "torch",
    "transformers.modeling_utils",
    "transformers.models.llama",
    "hypothesis",
    "pandas",
    "plotly",
    "click",
)


class Mutant(NamedTuple):
    """A wrong change and the test files, names with spaces between, that must notice it."""

    name: str
    tests: str
    fragment: str
    replacement: str


def mutants() -> list[Mutant]:
    """The mutants of `mutants.txt`. In each, three lines stand for `name: tests`, the fragment and the replacement."""
    text = Path(__file__).with_suffix(".txt").read_text()
    found = re.findall(r"^(\S+): (.+)\n- (.+)\n\+ ?(.*)$", text, re.M)
    return [Mutant(*parts) for parts in found]


@cache
def sources(tree: Path) -> dict[Path, str]:
    """The files of the package, without any mutant: each is undone before the next one is looked for."""
    return {file: file.read_text() for file in sorted((tree / "sinkscope").rglob("*.py"))}


def place_of(fragment: str, tree: Path) -> tuple[Path, re.Match[str]] | None:
    """The only place of a fragment in the package; None if there is none, or more than one."""
    words = fragment.split()
    pattern, longest = re.compile(r"\s+".join(map(re.escape, words))), max(words, key=len)
    texts = sources(tree).items()
    found = [(file, match) for file, text in texts if longest in text for match in pattern.finditer(text)]
    return found[0] if len(found) == 1 else None


def changed(mutant: Mutant, tree: Path) -> tuple[Path, str, str] | None:
    """The file of a mutant, its text as it is, and its text with the change; None if the mutant is stale."""
    place = place_of(mutant.fragment, tree)
    if place is None:
        return None
    file, match = place
    text = match.string
    return file, text, text[: match.start()] + mutant.replacement + text[match.end() :]


def where(mutant: Mutant) -> str:
    """Say which file a mutant changes; stale, if its fragment is not found once, or a test that it names is missing."""
    place = place_of(mutant.fragment, TREE)
    for name in mutant.tests.split():
        file, _, test = name.partition("::")
        if not any(f"def {test}" in found.read_text() for found in (TREE / "tests").rglob(file)):
            return "stale"
    return "stale" if place is None else f"in {place[0].relative_to(TREE)}"


def tried(mutant: Mutant, tree: Path) -> str:
    """Apply a mutant in `tree`, run its tests, and undo it: killed, survived, hung, stale, or what went wrong."""
    change = changed(mutant, tree)
    if change is None:
        return "stale"
    file, before, after = change
    file.write_text(after)
    names = []
    for name in mutant.tests.split():
        test_file, _, test = name.partition("::")
        (place,) = (tree / "tests").rglob(test_file)
        names.append(f"{place}::{test}".removesuffix("::"))
    try:
        code, text = passed(["-q", "-x", "-n", "0", "-p", "no:cacheprovider", *LIMITS, *names], tree)
    finally:
        file.write_text(before)
    if "Timeout (>" in text:
        return "hung"
    return {0: "survived", 1: "killed"}.get(code, f"pytest failed: {text.strip()[-300:]}")


def passed(arguments: list[str], tree: Path) -> tuple[int, str]:
    """Exit code and output of pytest in a fork of this process, which has loaded the libraries but not the package."""
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            code = 70
            try:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                os.chdir(tree)
                os.environ["PYTHONPATH"] = str(tree)
                sys.dont_write_bytecode = True
                elsewhere = [path for path in sys.path if Path(path).resolve() not in (TREE, TREE / "tests")]
                sys.path[:] = [str(tree), *elsewhere]
                for name in [name for name in sys.modules if name.partition(".")[0] in ("experiments", "tools")]:
                    del sys.modules[name]
                code = int(pytest.main(arguments))
                sys.stdout.flush()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read()


def load_libraries() -> None:
    """Import once what every test would import again for each mutant."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", NO_COLOR="1")  # they read this when imported
    for name in LIBRARIES:
        importlib.import_module(name)
    # One failing example is enough: making it smaller takes minutes.
    settings.register_profile("mutants", deadline=None, database=None, phases=(Phase.explicit, Phase.generate))
    sys.stdout.flush()


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...", help="These mutants. By default all.")
@click.option("--list", "listed", is_flag=True, help="Say what there is and what is stale, and run nothing.")
def main(names: tuple[str, ...], listed: bool) -> None:
    """Show that the tests notice wrong code: each mutant is tried against its tests."""
    chosen = [mutant for mutant in mutants() if not names or mutant.name in names]
    results: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        if not listed:
            shutil.copytree(TREE, copy, ignore=shutil.ignore_patterns(".git", "__pycache__", ".venv"))
            load_libraries()
        for mutant in chosen:
            if listed:
                results.append(where(mutant))
            else:
                results.append(tried(mutant, copy))
            print(f"{mutant.name}: {results[-1]}", flush=True)
    good = sum(result.startswith("in ") or result == "killed" for result in results)
    print(f"{good} of {len(results)} are {'found' if listed else 'killed'}.")
    sys.exit(int(good < len(results) or not results))


if __name__ == "__main__":
    main()
