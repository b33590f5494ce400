"""Everything that is measured on a GPU, by one command that may be cut off at any time and given again.

    python -m experiments.gpu.all --out DIR [--total 9] [--models FILE ...] [--teacher MODEL] [--only NAME ...] [--dry]

Two calls of nine minutes on one card measure what no page has yet. What is timed runs alone, in the first; the others
together, in the second, on as many cores as there are:

    python -m experiments.gpu.all --out DIR --only bands overhead
    python -m experiments.gpu.all --out DIR --only fault net suite family-48m family-120m loops-gemma3-270m
        --models real/gemma3-270m.gguf

- `bands`: whole prompts along bands, the choice, and FlexAttention, from 8,192 to 131,072 tokens.
- `overhead`: a token under each method over stock, one row and 16, after 4,096 and 32,768 tokens, and its profile.
- `fault`: whether the card misreads the last token of a row, and whether `load` avoids that.
- `net`, `suite`: drawn ways of using a model in float32 and bfloat16; the tests.
- `loops-MODEL`: answers of 2,500 tokens of each model that is given, with and without the guard.
- `family-48m`, `family-120m`: larger members of the bundled model's family, on stories that a teacher writes: a small
  story model with a context of a few hundred tokens does so in half a minute, the model in the package takes longer.

Without `--only` these are made in this order. By name alone: `adapters` (models of true widths), `shape` (a checkpoint
of Llama-2-7B's shape with a planted circuit), the package's commands on it (`find-sinks-shape`, `circuit-shape`,
`patch-shape`; DIR/shape/truth.json has the answer), and these and `precision-MODEL` on the models that are given.

Each part runs in a process of its own. A part that fails says why and the others go on. `bands` and `overhead` have
about four minutes each; after `--total` minutes everything that runs is ended with what it started. What was written
stays, and the next call goes on from there. DIR gets a JSON of each part, NAME.log, and NAME.done for a part that is
not done again. `--dry` runs the parts with tiny shapes on a CPU; `bands` then needs triton (docs/gpu.md).
`python -m experiments.gpu.tables DIR` makes the tables.

What the machine needs: Python 3.11 or newer, torch >= 2.11, transformers >= 5.17 (with huggingface-hub below 2, as
5.17 asks for), triton, accelerate, and of this package's other requirements those that are imported without
TransformerLens and nnsight; `suite` also pytest, pytest-xdist, pytest-timeout, hypothesis and beartype, and GGUF files
need gguf. Where there is no network, bring what is missing as wheels, in a folder that git ignores
(`pip download --no-deps --dest wheels ...`), and install them with `pip install --no-index --find-links wheels
--no-deps ...`: einops, jaxtyping, wadler-lindig, pydantic, pydantic-core, annotated-types, typing-inspection, plotly,
narwhals, pandas, python-dateutil, rich, markdown-it-py, mdurl, pygments, click, lazy-loader, gguf, beartype. The
package itself runs from its tree.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from experiments.bundled.stories import marked
from experiments.script import run
from sinkscope.errors import SinkscopeError

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "sinkscope/models/text/typical.txt"
AT_MOST = {"bands": 220.0, "overhead": 280.0}  # seconds
COMMANDS = {  # of the package, on every model
    "find-sinks": "find-sinks {model} --json {out}/find-sinks-{name}.json",
    "circuit": "circuit {model} --json {out}/circuit-{name}.json",
    "patch": "patch make {model} --out {out}/patch-{name}.json",
}
OF_REAL = {  # on models that have an unembedding
    "precision": "precision {model} --json {out}/precision-{name}.json",
    "loops": "bench --model {model} --task loops:source=text:count={count} --batch-size {count} --max-new-tokens {new} "
    "--methods loopguard,full,loopguard:paper --out {out}/loops-{name}",
}
ALONE = {  # script -> what is measured, and what makes it small
    "bands": (
        "--only prompt choice flex --layers 8 --dtype {dtype} --seconds {seconds}",
        "--only prompt flex --shape lines-128 --heads 2 --layers 1 --lengths 130 --prompts 130 --alphas .9 --rounds 1",
    ),
    "overhead": (
        "--dtype {dtype} --seconds {seconds}",
        "--shape lines-128 --contexts 96 --batches 1 2 --new 4 --rounds 2 --budget 72",
    ),
}
FAMILY = "--story-tokens 1000 --steps 70 --tokens-per-step 1024 --new 40 --stories {out}/stories.txt"
TOGETHER = {
    "fault": ("", "--layers 2"),
    "net": ("--seconds {seconds}", "--processes 1 --seconds 240"),
    "suite": ("--seconds {seconds}", "--rooms tap --processes 1"),
    "family-48m": ("--size 48m --seconds {seconds}", f"--size tiny {FAMILY}"),
    "family-120m": ("--size 120m --seconds {seconds}", f"--size small {FAMILY}"),
}
BY_NAME = {"adapters": ("--dtype {dtype}", "--types gpt2 opt --layers 2")}


@dataclass(frozen=True)
class Part:
    """A part of the measurement.

    Attributes:
        words: Its command line behind `python -m`, with `{seconds}` for the time that it has.
        alone: Whether nothing may run beside it.
        by_name: Whether it is made only if it is named.
    """

    words: str
    alone: bool = False
    by_name: bool = False

    def command(self, seconds: float) -> list[str]:
        """The command when so much time is left."""
        return [sys.executable, "-m", *self.words.replace("{seconds}", f"{seconds:.0f}").split()]


def scripts_of(out: Path, dry: bool) -> dict[str, Part]:
    """The parts that are scripts of this folder."""
    dtype, device = ("float32", "cpu") if dry else ("bfloat16", "cuda")
    parts: dict[str, Part] = {}
    for table in (ALONE, TOGETHER, BY_NAME):
        for name, (words, small) in table.items():
            filled = f"{words} {small if dry else ''}".replace("{dtype}", dtype).replace("{out}", str(out))
            script = f"experiments.gpu.{name.partition('-')[0]} --out {out / name}.json --device {device} {filled}"
            parts[name] = Part(" ".join(script.split()), table is ALONE, table is BY_NAME)
    return parts


def parts_of(out: Path, models: Sequence[Path], dry: bool) -> dict[str, Part]:
    """Each part by its name, in order of value."""
    shape, dtype, device = ("tiny", "float32", "cpu") if dry else ("llama-2-7b", "bfloat16", "cuda")
    parts = scripts_of(out, dry)
    planted = out / "shape"
    make = f"experiments.make_shape --shape {shape} --dtype {dtype} --out {planted}"
    parts["shape"] = Part(make, alone=True, by_name=True)
    for model in (planted, *models):
        commands = COMMANDS if model == planted else {**COMMANDS, **OF_REAL}
        for name, words in commands.items():
            sizes = {"count": 2, "new": 20} if dry else {"count": 32, "new": 2500}
            filled = words.format(model=model, name=model.stem, out=out, **sizes)
            where = f"--device {device} --dtype {dtype if model == planted else 'float32'}"
            parts[f"{name}-{model.stem}"] = Part(f"sinkscope {filled} {where}", by_name=name != "loops")
    return parts


class Running:
    """A part that runs in a process of its own; what it says goes into a file."""

    def __init__(self, command: Sequence[str], log: Path, dry: bool) -> None:
        self._log = log
        environment = {**os.environ, "TRITON_INTERPRET": "1"} if dry else None
        with log.open("ab") as said:
            self._process = subprocess.Popen(
                command, stdout=said, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True, env=environment
            )

    def problem(self, seconds: float) -> str:
        """Wait at most so long, and end it with everything that it started; why it is not done, or nothing."""
        try:
            code = self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return "not done in time; give the command again to go on"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if code == 0:
            return ""
        lines = self._log.read_text(errors="replace").split("\n")
        return f"exit code {code}: {next(filter(None, reversed(lines)), 'it said nothing')}"


class Calls:
    """The parts of one call.

    Args:
        out: Folder of results and logs.
        parts: All parts.
        end: When everything is ended, on the monotonic clock.
        dry: Whether this is a rehearsal.
    """

    def __init__(self, out: Path, parts: dict[str, Part], end: float, dry: bool) -> None:
        self._out, self._parts, self._end, self._dry = out, parts, end, dry
        self.problems: list[str] = []

    def make(self, names: Sequence[str]) -> None:
        """Make these parts at the same time."""
        began = time.monotonic()
        left = self._end - began
        if len(names) == 1:
            left = min(left, AT_MOST.get(names[0], left))
        running: dict[str, Running] = {}
        for name in names:
            done = self._out / f"{name}.done"
            if done.is_file() and done.read_text() == self._parts[name].words:
                print(f"{name}: done before", flush=True)
            elif left <= 0:
                self._tell(name, "no time left; give the command again")
            else:  # a script ends itself a little before it would be ended
                command = self._parts[name].command(max(1.0, left - 15))
                running[name] = Running(command, self._out / f"{name}.log", self._dry)
        for name, one in running.items():
            self._tell(name, one.problem(began + left - time.monotonic()))

    def _tell(self, name: str, problem: str) -> None:
        print(f"{name}: {problem or 'done'}", flush=True)
        if problem:
            self.problems.append(problem)
        else:
            (self._out / f"{name}.done").write_text(self._parts[name].words)


def main(
    *,
    out: Path,
    models: Sequence[Path] = (),
    teacher: Path | None = None,
    only: Sequence[str] = (),
    total: float = 9.0,
    dry: bool = False,
) -> None:
    """Make what the module describes.

    Args:
        out: Folder for results and logs.
        models: Files or folders of real models.
        teacher: Folder of a model that writes the stories which the family learns; by default that in the package.
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
    parts = parts_of(out, models, dry)
    if teacher is not None:
        for name, part in parts.items():
            if name.startswith("family"):
                parts[name] = replace(part, words=f"{part.words} --teacher {teacher.resolve()}")
    for name in only:
        if name not in parts:
            raise SinkscopeError(f"--only {name!r}: expected one of {', '.join(parts)}")
    names = list(only) or [name for name, part in parts.items() if not part.by_name]
    if dry:
        (out / "stories.txt").write_text(marked(TEXT.read_text().split("\n\n") * 20))
        if "bands" in names and find_spec("triton") is None:
            names.remove("bands")
            print("bands: not rehearsed, because triton is not installed", flush=True)
    calls = Calls(out, parts, time.monotonic() + 60 * total, dry)
    for name in names:
        if parts[name].alone or dry:
            calls.make([name])
    if not dry:
        calls.make([name for name in names if not parts[name].alone])
    if calls.problems:
        raise SystemExit(1)


if __name__ == "__main__":
    run(main)
