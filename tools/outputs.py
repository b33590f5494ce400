"""Write what commands print, and what columns mean, into the pages that show it: python -m tools.outputs [PAGE ...]

The block below a mark `<!-- output: COMMAND -->` becomes what COMMAND prints, and the table between
`<!-- columns: MODULE: ROW, ROW -->` and `<!-- end of columns -->` what these rows declare. By default all pages.
Commands that read a real model name it by `$SINKSCOPE_REAL`, the folder that `python -m experiments.real.models` fills;
without that variable their blocks stay as they are. A test compares the blocks with the commands.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from experiments.script import run
from sinkscope.errors import SinkscopeError

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(<!-- output: (?P<command>[^\n]+?) -->\n```text\n)(?P<shown>.*?)(?P<end>^```$)", re.M | re.S)
COLUMNS = re.compile(
    r"(?P<mark><!-- columns: (?P<module>[\w.]+): (?P<rows>[\w, ]+) -->\n)(.*?)(?P<end>^<!-- end of columns -->)",
    re.M | re.S,
)
REAL = "SINKSCOPE_REAL"


def pages_of_docs() -> list[Path]:
    """Return the README and all pages."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main(pages: Sequence[Path] = ()) -> None:
    """Write the outputs and the tables of columns again.

    Args:
        pages: The pages. By default all.
    """
    for page in pages or pages_of_docs():
        text = page.read_text(encoding="utf-8")
        made = with_columns(BLOCK.sub(renewed, text))
        if made != text:
            page.write_text(made, encoding="utf-8")


def with_columns(text: str) -> str:
    """Return a page whose tables of columns are what rows declare."""
    return COLUMNS.sub(declared, text)


def declared(block: re.Match[str]) -> str:
    """A table of columns, from the declarations of rows."""
    lines = ["| table | column | what it says |", "|---|---|---|"]
    for name in block["rows"].split(", "):
        row = getattr(import_module(block["module"]), name)
        for column in row.columns():
            lines.append(f"| {row.title} | {column.name} | {column.meaning} |")
    return f"{block['mark']}{chr(10).join(lines)}\n{block['end']}"


def renewed(block: re.Match[str]) -> str:
    """A block with what its command prints now.

    Raises:
        SinkscopeError: The command fails.
    """
    command = block["command"]
    if REAL in command and REAL not in os.environ:
        print(f"left as it is, because {REAL} is not set: {command}")
        return block[0]
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SinkscopeError(f"{command} ended with status {done.returncode}: {done.stderr.strip()[-300:]}")
    return f"{block[1]}{done.stdout.rstrip()}\n{block['end']}"


if __name__ == "__main__":
    run(main)
