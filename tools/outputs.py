"""Write what commands print into the pages that show it: python -m tools.outputs [PAGE ...]

The block below a mark `<!-- output: COMMAND -->` becomes what COMMAND prints. By default the page is the README.
Commands that read a real model name it by `$SINKSCOPE_REAL`, the folder that `python -m experiments.real.models` fills;
without that variable their blocks stay as they are. A test compares the blocks with the commands.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from experiments.script import run
from sinkscope.errors import SinkscopeError

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(<!-- output: (?P<command>[^\n]+?) -->\n```text\n)(?P<shown>.*?)(?P<end>^```$)", re.M | re.S)
REAL = "SINKSCOPE_REAL"


def main(pages: Sequence[Path] = (ROOT / "README.md",)) -> None:
    """Write the outputs again.

    Args:
        pages: The pages. By default the README.
    """
    for page in pages:
        text = page.read_text(encoding="utf-8")
        page.write_text(BLOCK.sub(renewed, text), encoding="utf-8")


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
