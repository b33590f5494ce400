"""Everything that is measured on a GPU, by one command that may be cut off at any time and given again.

    python -m experiments.gpu.all --out DIR [--total 9] [--models FILE ...] [--teacher MODEL] [--only NAME ...] [--dry]

Two calls of nine minutes on one card measure what no page has yet. What is timed runs alone, in the first; the others
together, in the second, on as many cores as there are:

    python -m experiments.gpu.all --out DIR --only bands overhead
    python -m experiments.gpu.all --out DIR --only fault net suite family-48m family-120m loops-gemma3-270m
        --models real/gemma3-270m.gguf

- `bands`: whole prompts along bands, the choice, and FlexAttention, from 8,192 to 131,072 tokens.
- `overhead`: a token under each method over stock, one row and 16, after 4,096 and 32,768 tokens.
- `fault`: tests of the last token of a row, which some cards misread, and which `load` then reads rightly.
- `net-DTYPE`, `suite-kernels`, `suite`: drawn ways of using a model (`tests.ways`); the tests.
- `family-SIZE`: larger members of the bundled model's family, their sink, and their loops with and without the guard,
  on stories that a teacher writes: a small story model with a context of a few hundred tokens does so in half a
  minute, the model in the package takes longer.
- `loops-MODEL`: answers of 2,500 tokens of each model that is given, with and without the guard.

Without `--only` these are made in this order. By name alone: `adapters` (models of true widths), `shape` (a checkpoint
of Llama-2-7B's shape with a planted circuit), the package's commands on it (`find-sinks-shape`, `why-sink-shape`,
`patch-shape`; DIR/shape/circuit.json has the answer), and these on the models that are given.
`--only` takes all parts whose names begin so.

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
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from experiments.bundled.stories import marked
from experiments.script import run
from sinkscope.errors import SinkscopeError

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "sinkscope/models/text/typical.txt"
AT_MOST = {"bands": 240.0, "overhead": 290.0}  # seconds
LATE = 40  # seconds before it would be ended at which a part ends itself
COMMANDS = {  # of the package, on every model
    "find-sinks": "find-sinks {model} --json {out}/find-sinks-{name}.json",
    "why-sink": "why-sink {model} --json {out}/why-sink-{name}.json",
    "patch": "patch {model} --out {out}/patch-{name}.json",
}
OF_REAL = {  # on models that have an unembedding
    "loops": "bench --model {model} --task loops:source=text:count={count} --batch-size {count} --max-new-tokens {new} "
    "--methods loopguard,full,loopguard:paper --out {out}/loops-{name}",
}
SCRIPTS = {  # of this folder: what is measured, and what makes it small
    "bands": (
        "--only prompt choice flex --layers 8 --seconds {seconds}",
        "--only prompt flex --shape lines-128 --heads 2 --layers 1 --lengths 128 --prompts 130 --alphas .9 --rounds 1",
    ),
    "overhead": (
        "--seconds {seconds}",
        "--shape lines-128 --contexts 96 --batches 1 2 --new 4 --rounds 2 --budget 72",
    ),
}
PYTEST = "python -m pytest -q -p no:cacheprovider -o addopts="
KERNELS = "tests/sparse/test_loopserve_triton.py"
ROOMS = "sparse kv engine hooks opening generation sinks loops measure models conformance bench ways".split()
STORIES = (
    "python -m experiments.bundled.stories --teacher {teacher} --out {stories} --tokens 5000000 --rows 512 "
    "--device {device} && "
)
FAMILY = (
    "python -m experiments.train_bundled --size {size} --stories {stories} --out {out}/{name} --resume "
    "--steps {steps} --tokens-per-step {tokens} --device {device} && "
    "python -m sinkscope find-sinks {out}/{name} --device {device} --dtype float32 --json {out}/{name}.json && "
    "python -m sinkscope bench --model {out}/{name} --task loops:source=text --methods full,loopguard --batch-size 16 "
    "--max-new-tokens {new} --device {device} --dtype float32 --out {out}/{name}-answers"
)


@dataclass(frozen=True)
class Part:
    """A part of the measurement.

    Attributes:
        words: Its command line, with `{seconds}` for the time that it has.
        alone: Whether nothing may run beside it.
        by_name: Whether it is made only if it is named.
    """

    words: str
    alone: bool = False
    by_name: bool = False

    def command(self, seconds: float) -> list[str]:
        """The command when so much time is left."""
        line = self.words.replace("{seconds}", f"{seconds:.0f}")
        return ["sh", "-c", line.replace("python -m", f"{sys.executable} -m")]


def parts_of(out: Path, models: Sequence[Path], teacher: Path, dry: bool) -> dict[str, Part]:
    """Each part by its name, in order of value."""
    shape, dtype, device = ("tiny", "float32", "cpu") if dry else ("llama-2-7b", "bfloat16", "cuda")
    parts: dict[str, Part] = {}
    for name, (words, small) in SCRIPTS.items():
        script = f"python -m experiments.gpu.{name} --out {out / name}.json --device {device} --dtype {dtype}"
        parts[name] = Part(f"{script} {small if dry else words}", alone=True)
    parts["fault"] = Part(f"{PYTEST} tests/opening/test_device_attention.py")
    parts["adapters"] = Part(f"{PYTEST} tests/opening/test_true_widths.py", by_name=True)
    for drawn in ("float32", "bfloat16"):
        seconds = "60" if dry else "{seconds}"
        parts[f"net-{drawn}"] = Part(f"python -m tests.ways --seconds {seconds} --only device={device} dtype={drawn}")
    rooms = " ".join(f"tests/{room}" for room in ROOMS)
    suite = "tests/engine/test_tokens.py" if dry else f"-n 6 --dist loadfile -m 'not slow' {rooms}"
    parts["suite-kernels"] = Part(f"{PYTEST} {KERNELS}", by_name=dry)
    parts["suite"] = Part(f"{PYTEST} {suite}")
    for size in ("tiny", "small") if dry else ("48m", "120m"):
        name = f"family-{size}"
        sizes = {"steps": 70, "tokens": 1024, "new": 40} if dry else {"steps": 1250, "tokens": 16384, "new": 1000}
        about = {"size": size, "name": name, "out": out, "teacher": teacher, "device": device, **sizes}
        stories = out / ("stories.txt" if dry else f"{name}.txt")
        parts[name] = Part((FAMILY if dry else STORIES + FAMILY).format(stories=stories, **about))
    planted = out / "shape"
    make = f"python -m experiments.make_shape --shape {shape} --dtype {dtype} --out {planted}"
    parts["shape"] = Part(make, alone=True, by_name=True)
    for model in (planted, *models):
        commands = COMMANDS if model == planted else {**COMMANDS, **OF_REAL}
        for name, words in commands.items():
            sizes = {"count": 2, "new": 20} if dry else {"count": 32, "new": 2500}
            filled = words.format(model=model, name=model.stem, out=out, **sizes)
            where = f"--device {device} --dtype {dtype if model == planted else 'float32'}"
            parts[f"{name}-{model.stem}"] = Part(f"python -m sinkscope {filled} {where}", by_name=name != "loops")
    return parts


def started(command: Sequence[str], log: Path, dry: bool) -> subprocess.Popen[bytes]:
    """Start a part in a process of its own; what it says goes into a file."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"} if dry else None
    with log.open("ab") as said:
        return subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True, env=environment
        )


def problem_of(process: subprocess.Popen[bytes], log: Path, seconds: float) -> str:
    """Wait at most so long, and end a part with all that it started; why it is not done, or nothing."""
    try:
        code = process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return "not done in time; give the command again to go on"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code == 0:
        return ""
    lines = log.read_text(errors="replace").split("\n")
    return f"exit code {code}: {next(filter(None, reversed(lines)), 'it said nothing')}"


def make(parts: dict[str, Part], out: Path, end: float, dry: bool) -> list[str]:
    """Make parts at the same time, until the end on the monotonic clock; returns the problems."""
    began = time.monotonic()
    left = end - began
    if len(parts) == 1:
        left = min(left, *(AT_MOST.get(name, left) for name in parts))
    running: dict[str, subprocess.Popen[bytes]] = {}
    problems: dict[str, str] = {}
    for name, part in parts.items():
        done = out / f"{name}.done"
        if done.is_file() and done.read_text() == part.words:
            print(f"{name}: done before", flush=True)
        elif left <= 0:
            problems[name] = "no time left; give the command again"
        else:
            running[name] = started(part.command(max(1.0, left - LATE)), out / f"{name}.log", dry)
    for name, process in running.items():
        problems[name] = problem_of(process, out / f"{name}.log", began + left - time.monotonic())
    for name, problem in problems.items():
        print(f"{name}: {problem or 'done'}", flush=True)
        if not problem:
            (out / f"{name}.done").write_text(parts[name].words)
    return list(filter(None, problems.values()))


def main(
    *,
    out: Path,
    models: Sequence[Path] = (),
    teacher: Path = ROOT / "sinkscope/models/bundled",
    only: Sequence[str] = (),
    total: float = 9.0,
    dry: bool = False,
) -> None:
    """Make what the module describes.

    Args:
        out: Folder for results and logs.
        models: Files or folders of real models.
        teacher: Folder of a model that writes the stories which the family learns.
        only: Parts whose names begin so, alone.
        total: Limit of this call, in minutes. The next call goes on from there.
        dry: Tiny shapes on a CPU, to see that everything runs.
    """
    if not dry:
        import torch

        if not torch.cuda.is_available():
            raise SinkscopeError("there is no CUDA device here: --dry rehearses on a CPU")
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    parts = parts_of(out, models, teacher.resolve(), dry)
    names = [name for name, part in parts.items() if not part.by_name]
    if only:
        names = [name for name in parts if name.startswith(tuple(only))]
    if not names:
        raise SinkscopeError(f"--only {' '.join(only)}: expected one of {', '.join(parts)}")
    if dry:
        (out / "stories.txt").write_text(marked(TEXT.read_text().split("\n\n") * 20))
        if "bands" in names and find_spec("triton") is None:
            names.remove("bands")
            print("bands: not rehearsed, because triton is not installed", flush=True)
    end = time.monotonic() + 60 * total
    alone = [name for name in names if parts[name].alone or dry]
    together = {name: parts[name] for name in names if name not in alone}
    problems: list[str] = []
    for each in [*({name: parts[name]} for name in alone), together]:
        problems += make(each, out, end, dry)
    if problems:
        raise SystemExit(1)


if __name__ == "__main__":
    run(main)
