"""Everything that is measured on a GPU, by one command that may be cut off at any time and given again.

    python -m experiments.gpu.all --out DIR [--only NAME ...] [--total 9] [--dry]

Parts, in order of value: `users` (sinks, circuit, patch and guard at 7B shape, right or wrong), `overhead` (of a
token), `loopserve` (turns), `adapters` (models of true widths) and `exactness` (rounding, and the checks of caches).
Each runs in a process of its own. A part that fails says why and the next begins. After `--total` minutes the part that
runs is ended with everything that it started; what it had written stays, and the next call goes on from there.

DIR gets NAME.json and NAME.log, and NAME.done for a part that is not done again. `--dry`
runs all parts with tiny shapes on a CPU, one after the other, in about two minutes. `bands`, which needs triton,
is a command of its own, of about three minutes on a GPU: `python -m experiments.gpu.bands`.

What the machine needs: Python 3.11 or newer, torch >= 2.11, transformers >= 5.17 (with huggingface-hub below 2, as
5.17 asks for), triton, accelerate, and of this package's other requirements those that are imported without
TransformerLens and nnsight. Where there is no network, carry these as wheels, in a folder that git ignores
(`pip download --no-deps --dest wheels ...`), and install them with `pip install --no-index --find-links wheels
--no-deps ...`: einops, jaxtyping, wadler-lindig, pydantic, pydantic-core, annotated-types, typing-inspection, plotly,
narwhals, pandas, python-dateutil, rich, markdown-it-py, mdurl, pygments, click, lazy-loader.  The package
itself runs from its tree.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from experiments.script import run
from sinkscope.errors import SinkscopeError

ROOT = Path(__file__).parents[2]
TINY = "--device cpu --dtype float32"
REHEARSALS = {  # part -> what makes it small
    "users": "--shape tiny --prompt 112 --repeats 200",
    "overhead": "--shape lines-128 --contexts 96 --batches 1 2 --new 4 --rounds 2 --budget 72",
    "loopserve": "--shape lines-128 --contexts 128 192 --new 8 --rounds 1 --budget 80 --shortest 0",
    "adapters": "--types gpt2 opt --layers 2",
    "exactness": "--pieces 3 --length 24 --caches streaming_llm --checks the_first_tokens_survive",
}


def command_of(part: str, out: Path, dry: bool) -> list[str]:
    """The command of a part."""
    words = [sys.executable, "-m", f"experiments.gpu.{part}", "--out", str(out / f"{part}.json")]
    if part == "users":
        words += ["--folder", str(out / "shapes")]
    if dry:
        words += f"{REHEARSALS[part]} {TINY}".split()
    return words


def problem_of(command: Sequence[str], log: Path, seconds: float) -> str:
    """Run a part for at most so long; what it says goes into a file. Why it is not done, or nothing."""
    with log.open("ab") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"not done after {seconds / 60:.1f} minutes; give the command again to go on"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code == 0:
        return ""
    lines = log.read_text(errors="replace").split("\n")
    return f"exit code {code}: {next(filter(None, reversed(lines)), 'it said nothing')}"


def main(
    *,
    out: Path,
    only: Sequence[Literal[*REHEARSALS]] = (),
    total: float = 9.0,
    dry: bool = False,
) -> None:
    """Make what the module describes.

    Args:
        out: Folder for results and logs.
        only: These parts alone.
        total: Limit of this call, in minutes. The next call goes on from there.
        dry: Tiny shapes on a CPU, to see that everything runs.
    """
    if not dry:
        import torch

        if not torch.cuda.is_available():
            raise SinkscopeError("there is no CUDA device here: --dry rehearses on a CPU")
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * total
    problems: list[str] = []
    for part in only or REHEARSALS:
        command = command_of(part, out, dry)
        done = out / f"{part}.done"
        if done.is_file() and done.read_text() == " ".join(command):
            print(f"{part}: done before", flush=True)
            continue
        if time.monotonic() >= end:
            problems.append("no time left")
            print(f"{part}: no time left; give the command again", flush=True)
            break
        problem = problem_of(command, out / f"{part}.log", end - time.monotonic())
        print(f"{part}: {problem or 'done'}", flush=True)
        if problem:
            problems.append(problem)
        else:
            done.write_text(" ".join(command))
    if problems:
        raise SystemExit(1)


if __name__ == "__main__":
    run(main)
