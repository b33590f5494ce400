"""Everything that is measured on a GPU, by one command that may be cut off at any time and given again.

    python -m experiments.gpu.all --out DIR [--models FILE ...] [--only NAME ...] [--total 9] [--dry]

Parts, in order of value: a checkpoint of 7B shape with a planted circuit (`shape`), the package's own commands on it
(`find-sinks`, `circuit`, `patch`; DIR/shape/truth.json has the answer) and on the models that are given, of these also
rounding and loops (`precision`, `loops`); `overhead` (of a token) and `adapters` (models of true widths).
Each runs in a process of its own. A part that fails says why and the next begins. After `--total` minutes the part that
runs is ended with everything that it started; what it had written stays, and the next call goes on from there.

DIR gets what each part writes, NAME.log, and NAME.done for a part that is not done again. `--dry` runs the parts with
tiny shapes on a CPU, one after the other, in about two minutes. `bands`, which needs triton, is a command of its own,
of about three minutes on a GPU: `python -m experiments.gpu.bands`.

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

from experiments.script import run
from sinkscope.errors import SinkscopeError

ROOT = Path(__file__).parents[2]
COMMANDS = {  # of the package, on every model
    "find-sinks": "find-sinks {model} --json {out}/find-sinks-{name}.json",
    "circuit": "circuit {model} --json {out}/circuit-{name}.json",
    "patch": "patch make {model} --out {out}/patch-{name}.json",
}
OF_REAL = {  # on models that have an unembedding
    "precision": "precision {model} --json {out}/precision-{name}.json",
    "loops": "bench --model {model} --task loops --methods full,loopguard,loopguard:paper --batch-size 32 "
    "--max-new-tokens 2500 --out {out}/loops-{name}",
}
REHEARSALS = {  # script -> what makes it small
    "overhead": "--shape lines-128 --contexts 96 --batches 1 2 --new 4 --rounds 2 --budget 72",
    "adapters": "--types gpt2 opt --layers 2",
}


def parts_of(out: Path, models: Sequence[Path], dry: bool) -> dict[str, list[str]]:
    """The command of each part, by its name."""
    shape, dtype, device = ("tiny", "float32", "cpu") if dry else ("llama-2-7b", "bfloat16", "cuda")
    planted = out / "shape"
    make = ["experiments.make_shape", "--shape", shape, "--dtype", dtype, "--out", str(planted)]
    where = ["--device", device, "--dtype", dtype]
    parts = {"shape": make}
    for model in (planted, *models):
        commands = COMMANDS if model == planted else {**COMMANDS, **OF_REAL}
        for name, words in commands.items():
            filled = [word.format(model=model, name=model.stem, out=out) for word in words.split()]
            parts[f"{name}-{model.stem}"] = ["sinkscope", *filled, *where]
    for name, small in REHEARSALS.items():
        rehearsed = small.split() if dry else []
        parts[name] = [f"experiments.gpu.{name}", "--out", str(out / f"{name}.json"), *where, *rehearsed]
    return {name: [sys.executable, "-m", *words] for name, words in parts.items()}


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
    models: Sequence[Path] = (),
    only: Sequence[str] = (),
    total: float = 9.0,
    dry: bool = False,
) -> None:
    """Make what the module describes.

    Args:
        out: Folder for results and logs.
        models: Files or folders of real models.
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
    parts = parts_of(out, models, dry)
    for part in only or parts:
        if part not in parts:
            raise SinkscopeError(f"--only {part!r}: expected one of {', '.join(parts)}")
        command = parts[part]
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
