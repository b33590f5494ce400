"""Everything that is measured on a GPU, by one command that may be cut off at any time and given again.

    python -m experiments.gpu.all --out DIR [--only NAME ...] [--minutes 9] [--total MINUTES] [--stories FILE] [--dry]

Parts, in order of value: `users` (everything that users do, right or wrong), `overhead` (of a token), `loopserve`
(sparse prompts), `scale` (line sums, barcode, atlas), `train` (the embedded model; without `--stories` it is skipped),
`throughput` (batches), and `find_sinks`, `circuits`, `loopguard`. Each runs in a process of its own. After `--minutes`
it is ended with everything that it started; what it had written stays, and the next call goes on from there. A part
that fails says why and the next begins. `--total` ends the whole call, for machines that are lent by the minute.

DIR gets NAME.json (versions, device, memory and clock are in "machine"), NAME.log, and state.json; parts that are done
there are not done again. `--dry` runs all parts with tiny shapes on a CPU.

What the machine needs: Python 3.11 or newer, torch >= 2.11, transformers >= 5.17 (with huggingface-hub below 2, as
5.17 asks for), triton, accelerate, and of this package's other requirements those that are imported without
TransformerLens and nnsight. Where there is no network, carry these as wheels, in a folder that git ignores
(`pip download --no-deps --dest wheels ...`), and install them with `pip install --no-index --find-links wheels
--no-deps ...`: einops, jaxtyping, wadler-lindig, pydantic, pydantic-core, annotated-types, typing-inspection, plotly,
narwhals, pandas, python-dateutil, scikit-learn, joblib, threadpoolctl, scipy, rich, markdown-it-py, mdurl, pygments,
typer, shellingham, click. The package itself runs from its tree.
"""

from __future__ import annotations

import argparse
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
from pathlib import Path
from typing import Any

from sinkscope.output import write_atomic

ROOT = Path(__file__).parents[2]
GRACE = 10  # seconds between the request to end and the end
_TINY = "--device cpu --dtype float32".split()
# The training of the embedded model, small enough for a rehearsal. Measuring it takes minutes, and has its own test.
_TRAIN = """
import sys
from pathlib import Path
from experiments import train_bundled
from experiments.gpu import train_bundled as script
train_bundled.PASSAGES, script.card.main = 100, print
tale = "Once there was a {0} dog. The {0} dog had a {1} ball. One day the ball rolled into the river. He was sad. "
told = Path(sys.argv[1]) / "told.txt"
told.parent.mkdir(parents=True, exist_ok=True)
told.write_text("".join(tale.format(n, n % 7) * 6 + "The end.\\n<|end|>\\n" for n in range(150)))
words = f"--out {sys.argv[1]} --stories {told} --steps 2 --tokens-per-step 512 --size tiny --device cpu --no-loops"
script.main(words.split())
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


def _part(name: str, dry: str, words: str = "", minutes: bool = False, dtype: bool = True) -> Part:
    """A part that is a module of this package."""
    run = (sys.executable, "-m", f"experiments.gpu.{name}", "--out", "{json}")
    more = tuple("--minutes {minutes}".split()) if minutes else ()
    return Part(name, (*run, *words.split(), *more), (*run, *dry.split(), *(_TINY if dtype else _TINY[:2])))


PARTS = (
    _part(
        "users", "--shape tiny --rows 2 --prompt 128 --new 40 --repeats 200 --steps 8 --budget 96 --folder {dir}/shape"
    ),
    _part("overhead", "--shape lines-128 --contexts 128 --new 6 --pairs 2 --budget 72"),
    _part("loopserve", "--quick --shape lines-128", minutes=True),
    _part("scale", "--shape tiny --lengths 256 --prompt 64 --steps 8 --max-repeats 64 --folder {dir}/shape"),
    Part(
        "train",
        tuple("{python} -m experiments.gpu.train_bundled --out {dir}/train --stories {stories}".split()),
        (sys.executable, "-c", _TRAIN, "{dir}/train"),
        ("{dir}/train/planted/measured.json", "{dir}/train/unplanted/measured.json"),
        needs="stories",
    ),
    _part("throughput", "--shape lines-128 --rows 1 2 --prompt 96 --new 8 --budget 72"),
    _part("find_sinks", "--shape tiny", dtype=False),
    _part("circuits", "--shape tiny --length 24 --sequences 16 --max-repeats 64", dtype=False),
    _part(
        "loopguard",
        "--shape tiny --pairs 2 --prompt-tokens 96 --new-tokens 20 --budget 64 --prompts 2 --max-new-tokens 256 "
        "--batch-size 2 --methods full,loopguard",
    ),
)


def machine() -> dict[str, Any]:
    """Versions, device and memory."""
    import torch

    packages = ("torch", "transformers", "triton", "accelerate", "numpy", "safetensors", "tokenizers")
    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    found: dict[str, Any] = {"versions": versions, "cuda": torch.version.cuda, "cpus": os.cpu_count()}
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
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:400] if lines else "it said nothing"


def run_part(command: Sequence[str], log: Path, seconds: float) -> tuple[str, str]:
    """Run a part for at most so long: how it ended ("done", "failed", "ended"), and why."""
    with log.open("ab") as out:
        out.write(f"\n$ {' '.join(command)}\n".encode()[:2000])
        out.flush()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")]))}
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            finish(process)
            return "ended", f"not done after {seconds / 60:.1f} minutes; give the command again to go on"
        except BaseException:
            finish(process)
            raise
    return ("done", "") if code == 0 else ("failed", f"exit code {code}: {why(log)}")


def stamp(files: Sequence[Path], about: Mapping[str, Any]) -> None:
    """Put the machine and the clock into the JSON files of a part, as far as it wrote any."""
    for file in files:
        try:
            found = json.loads(file.read_text())
        except (OSError, ValueError):
            continue
        write_atomic(file, json.dumps({**found, "machine": dict(about)}, indent=1) + "\n")


def run_all(
    parts: Sequence[Part], out: Path, minutes: float, total: float | None, given: Mapping[str, str | None], dry: bool
) -> dict[str, Any]:
    """Run the parts that are not done yet; what became of each is in the file state.json, and comes back.

    Args:
        parts: in order.
        out: the folder.
        minutes: limit of a part.
        total: limit of all together; None: there is none.
        given: what is filled into commands, by name; None: not given.
        dry: whether it is a rehearsal.
    """
    out.mkdir(parents=True, exist_ok=True)
    state_file, here, began = out / "state.json", machine(), time.monotonic()
    state: dict[str, Any] = json.loads(state_file.read_text()) if state_file.is_file() else {}
    for part in parts:
        if state.get(part.name, {}).get("state") == "done" and state[part.name]["dry"] == dry:
            print(f"{part.name}: done before", flush=True)
            continue
        left = 60 * minutes if total is None else min(60 * minutes, 60 * total - (time.monotonic() - began))
        if left < 1:
            print(f"{part.name}: no time left; give the command again", flush=True)
            break
        log, at, start = out / f"{part.name}.log", now(), time.monotonic()
        names = {"json": str(out / f"{part.name}.json"), "dir": str(out), "python": sys.executable}
        names |= {"minutes": f"{0.9 * left / 60:.3f}", **{key: value for key, value in given.items() if value}}
        if part.needs and not dry and not given.get(part.needs):
            became, reason = "skipped", f"it needs --{part.needs}"
        else:
            command = [word if word == _TRAIN else word.format(**names) for word in (part.dry if dry else part.command)]
            became, reason = run_part(command, log, left)
        about = {**here, "began": at, "ended": now(), "seconds": round(time.monotonic() - start, 1)}
        stamp([Path(name.format(**names)) for name in part.results], about)
        state[part.name] = {"state": became, "why": reason, "dry": dry, **about}
        write_atomic(state_file, json.dumps(state, indent=1) + "\n")
        print(f"{part.name}: {became} after {about['seconds']} s{f' ({reason})' if reason else ''}", flush=True)
    return state


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 0 if every part that was asked for is done, else 1."""
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu.all", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for results, logs and state.json")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="these parts alone")
    parser.add_argument("--minutes", type=float, default=9.0, help="limit of a part")
    parser.add_argument("--total", type=float, help="limit of all parts together, in minutes")
    parser.add_argument("--stories", help="file of stories for the training of the embedded model")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on a CPU, to see that everything runs")
    args = parser.parse_args(argv)
    if not args.dry:
        import torch

        if not torch.cuda.is_available():
            parser.error("there is no CUDA device here: --dry rehearses on a CPU")
    parts = [part for part in PARTS if args.only is None or part.name in args.only]
    given = {"stories": None if args.stories is None else str(Path(args.stories).resolve())}
    state = run_all(parts, args.out.resolve(), args.minutes, args.total, given, args.dry)
    return 0 if all(state.get(part.name, {}).get("state") in ("done", "skipped") for part in parts) else 1


if __name__ == "__main__":
    sys.exit(main())
