"""Everything that is measured on a GPU, by one command that may be cut off at any time and given again.

    python -m experiments.gpu.all --out DIR [--only NAME ...] [--minutes 9] [--total 9] [--stories FILE] [--dry]

Parts, in order of value: `users` (everything that users do, right or wrong), `overhead` (of a token), `loopserve`
(sparse prompts), `scale` (line sums, barcode, atlas, attack), `train` (the embedded model; without `--stories` it is
skipped), and `exactness` (rounding, and the checks of caches). Each runs in a process of its
own. After `--minutes` it is ended with everything that it started; what it had written stays, and the next call goes
on from there. A part that fails says why and the next begins. After `--total` minutes the whole call is ended in the
same way.

DIR gets NAME.json (versions, device, memory and clock are in "machine"), NAME.log, and state.json; parts that are done
there are not done again. `--dry` runs all parts with tiny shapes on a CPU, one after the other, in about two minutes.

What the machine needs: Python 3.11 or newer, torch >= 2.11, transformers >= 5.17 (with huggingface-hub below 2, as
5.17 asks for), triton, accelerate, and of this package's other requirements those that are imported without
TransformerLens and nnsight. Where there is no network, carry these as wheels, in a folder that git ignores
(`pip download --no-deps --dest wheels ...`), and install them with `pip install --no-index --find-links wheels
--no-deps ...`: einops, jaxtyping, wadler-lindig, pydantic, pydantic-core, annotated-types, typing-inspection, plotly,
narwhals, pandas, python-dateutil, rich, markdown-it-py, mdurl, pygments, click, lazy-loader.  The package
itself runs from its tree.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from experiments.record import Row
from experiments.script import run
from sinkscope.errors import SinkscopeError
from sinkscope.files.output import write_atomic

ROOT = Path(__file__).parents[2]
GRACE = 10  # seconds between the request to end and the end
_TINY = "--device cpu --dtype float32".split()
# The training of the embedded model, small enough for a rehearsal. Measuring it takes minutes, and has its own test.
_TRAIN = """
import sys
from pathlib import Path
from experiments import train_bundled
from experiments.gpu import train_bundled as script
train_bundled.PASSAGES, script.card.main = 100, lambda **_: None
tale = "Once there was a {0} dog. The {0} dog had a {1} ball. One day the ball rolled into the river. He was sad. "
told = Path(sys.argv[1]) / "told.txt"
told.parent.mkdir(parents=True, exist_ok=True)
told.write_text("".join(tale.format(n, n % 7) * 6 + "The end.\\n<|end|>\\n" for n in range(150)))
folder = Path(sys.argv[1])
script.main(out=folder, stories=told, steps=2, tokens_per_step=512, size="tiny", device="cpu", no_loops=True)
"""


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        name: of its files.
        command: what runs it; `{json}`, `{dir}` and `{stories}` are filled in.
        dry: the same for a rehearsal.
        results: which files hold its results, if not `{json}` alone.
        needs: an option of this command without which it cannot run.
    """

    name: str
    command: tuple[str, ...]
    dry: tuple[str, ...]
    results: tuple[str, ...] = ("{json}",)
    needs: str = ""


def _part(name: str, dry: str, words: str = "") -> Part:
    """A part that is a module of this package: both commands have `words`."""
    run = (sys.executable, "-m", f"experiments.gpu.{name}", "--out", "{json}", *words.split())
    return Part(name, run, (*run, *dry.split(), *_TINY))


_SHARED = "--folder {dir}/shapes"  # parts that need the same checkpoint make it once
PARTS = (
    _part("users", "--shape tiny --rows 2 --prompt 112 --new 24 --repeats 200 --steps 8 --budget 96", _SHARED),
    _part("overhead", "--shape lines-128 --contexts 96 --batches 1 2 --new 4 --pairs 2 --budget 72"),
    _part(
        "loopserve",
        "--shape lines-128 --lengths 128 256 --lone-lengths 256 --contexts 128 192 --new 8 --rounds 1 --budget 80 "
        "--shortest 0",
    ),
    _part(
        "scale",
        "--shape tiny --lengths 256 --prompt 64 --steps 8 --max-repeats 64 --attack 24 --sequences 16",
        _SHARED,
    ),
    Part(
        "train",
        tuple("{python} -m experiments.gpu.train_bundled --out {dir}/train --stories {stories}".split()),
        (sys.executable, "-c", _TRAIN, "{dir}/train"),
        ("{dir}/train/planted/measured.json", "{dir}/train/unplanted/measured.json"),
        needs="stories",
    ),
    _part("exactness", "--pieces 3 --length 24 --caches streaming_llm --checks the_first_tokens_survive"),
)

NAMES = tuple(part.name for part in PARTS)


def machine() -> Row:
    """Versions, device and memory."""
    import torch

    packages = ("torch", "transformers", "triton", "accelerate", "numpy", "safetensors", "tokenizers")
    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    found: Row = {"versions": versions, "cuda": torch.version.cuda, "cpus": os.cpu_count()}
    found["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if torch.cuda.is_available():
        seen = torch.cuda.get_device_properties(0)
        found |= {"device": seen.name, "device_memory_bytes": seen.total_memory, "devices": torch.cuda.device_count()}
    else:
        found["device"] = "cpu"
    return found


def now() -> str:
    """The clock, as JSON has it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def finish(process: subprocess.Popen[bytes]) -> None:
    """End a process and everything that it started."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
            process.wait(GRACE)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def why(log: Path) -> str:
    """The last line that a part said."""
    lines = []
    for line in log.read_text(errors="replace").splitlines():
        if line.strip():
            lines.append(line.strip())
    if lines:
        return lines[-1][:400]
    return "it said nothing"


def run_part(command: Sequence[str], log: Path, seconds: float) -> tuple[str, str]:
    """Run a part for at most so long; what it says goes into a file.

    Returns:
        How it ended ("done", "failed", "ended"), and why.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")]))}
    with log.open("ab") as out:
        out.write(f"\n$ {' '.join(command)}\n".encode()[:2000])
        out.flush()
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "ended", f"not done after {seconds / 60:.1f} minutes; give the command again to go on"
        finally:
            finish(process)
    if code == 0:
        return "done", ""
    return "failed", f"exit code {code}: {why(log)}"


def stamp(files: Sequence[Path], about: Mapping[str, Any]) -> None:
    """Put the machine and the clock into the JSON files of a part, as far as it wrote any."""
    for file in files:
        try:
            found = json.loads(file.read_text())
        except (OSError, ValueError):
            continue
        write_atomic(file, json.dumps({**found, "machine": dict(about)}, indent=1) + "\n")


def run_all(
    parts: Sequence[Part], out: Path, minutes: float, total: float, given: Mapping[str, str | None], dry: bool
) -> Row:
    """Run the parts that are not done yet; what became of each is in the file state.json, and comes back.

    Args:
        parts: in order.
        out: the folder.
        minutes: limit of a part.
        total: limit of all together.
        given: what is filled into commands, by name; None: not given.
        dry: whether it is a rehearsal.
    """
    out.mkdir(parents=True, exist_ok=True)
    state_file = out / "state.json"
    here = machine()
    start = time.monotonic()
    state: Row = {}
    if state_file.is_file():
        state = json.loads(state_file.read_text())
    names = {"dir": str(out), "python": sys.executable, **{key: value for key, value in given.items() if value}}
    for part in parts:
        if state.get(part.name, {}).get("state") == "done" and state[part.name]["dry"] == dry:
            print(f"{part.name}: done before", flush=True)
            continue
        left = min(60 * minutes, 60 * total - (time.monotonic() - start))
        if left < 1:
            print(f"{part.name}: no time left; give the command again", flush=True)
            break
        began, since = now(), time.monotonic()
        if part.needs and not dry and not given.get(part.needs):
            became, reason = "skipped", f"it needs --{part.needs}"
        else:
            filled = {**names, "json": str(out / f"{part.name}.json")}
            command: list[str] = []
            for word in part.dry if dry else part.command:
                command.append(word if word == _TRAIN else word.format(**filled))
            became, reason = run_part(command, out / f"{part.name}.log", left)
        about = {**here, "began": began, "ended": now(), "seconds": round(time.monotonic() - since, 1)}
        files: list[Path] = []
        for name in part.results:
            files.append(Path(name.format(json=out / f"{part.name}.json", **names)))
        stamp(files, about)
        state[part.name] = {"state": became, "why": reason, "dry": dry, **about}
        write_atomic(state_file, json.dumps(state, indent=1) + "\n")
        print(f"{part.name}: {became} after {about['seconds']} s{f' ({reason})' if reason else ''}", flush=True)
    return state


def main(
    *,
    out: Path,
    only: Sequence[Literal[*NAMES]] = NAMES,
    minutes: float = 9.0,
    total: float = 9.0,
    stories: Path | None = None,
    dry: bool = False,
) -> None:
    """Make what the module describes.

    Args:
        out: Folder for results, logs and state.json.
        only: These parts alone.
        minutes: Limit of a part.
        total: Limit of this call, in minutes. The next call goes on from there.
        stories: File of stories for the training of the embedded model.
        dry: Tiny shapes on a CPU, to see that everything runs.
    """
    if dry and find_spec("numba") is None:
        raise SinkscopeError("--dry computes attention along lines on a CPU, which needs numba: pip install numba")
    if not dry:
        import torch

        if not torch.cuda.is_available():
            raise SinkscopeError("there is no CUDA device here: --dry rehearses on a CPU")
    parts = []
    for each in PARTS:
        if each.name in only:
            parts.append(each)
    given = {"stories": None if stories is None else str(stories.resolve())}
    state = run_all(parts, out.resolve(), minutes, total, given, dry)
    for part in parts:
        if state.get(part.name, {}).get("state") not in ("done", "skipped"):
            raise SystemExit(1)


if __name__ == "__main__":
    run(main)
