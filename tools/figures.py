"""Makes the figures again whose code has changed since they were made: python -m tools.figures [NAME ...]

    python -m tools.figures --list            # which they are, and what changed; exit code 1 if there are any
    python -m tools.figures                   # makes them again, two at a time; those of LONG only by name
    python -m tools.figures find_sinks lines

The command of each stands in `COMMANDS`. It can be interrupted: a figure that was made again is not stale, and the same
command goes on with the others. The code of a figure is the module that makes it, and what this imports of `sinkscope`
and `experiments`. A figure's JSON names its commit; where it names none, or one that is not in this repository, the
commit that wrote the JSON counts. Real models are in the folder `real` (`python -m experiments.real.models real`).
"""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock

from experiments.drawn import write_png
from experiments.papers.__main__ import PAPERS
from sinkscope.files.envelope import CODE, kinds
from sinkscope.results.result import Result

ROOT = Path(__file__).parents[1]
SMOLLM2, GEMMA = "real/smollm2-135m.gguf", "real/gemma3-270m.gguf"
BENCH = "python -m experiments.bench_figures {} --work {work}"
COMMANDS = {
    "attack": "sinkscope attack --n-tokens 4096",
    "barcode": "sinkscope barcode",
    "cache_loss": BENCH,
    "circuit": "sinkscope why-sink",
    "circuit_gemma3": f"sinkscope why-sink {GEMMA}",
    "circuit_smollm2": f"sinkscope why-sink {SMOLLM2}",
    "clusters": "sinkscope attack --n-tokens 4096 --sequences 0",
    "divergence": "sinkscope repeat --quantity probability",
    "find_sinks": "sinkscope find-sinks",
    "find_sinks_gemma3": f"sinkscope find-sinks {GEMMA}",
    "find_sinks_smollm2": f"sinkscope find-sinks {SMOLLM2}",
    "lines": "sinkscope lines",
    "lines_whole": "sinkscope lines --etas 0.1 --whole",
    "loopguard_verdicts": f"python -m experiments.papers.loopguard.verdicts --models {SMOLLM2} {GEMMA}",
    "loops_compare": "python -m experiments.loopset.compare",
    "loops_compare_again": "python -m experiments.loopset.compare --half again --out figures/loops_compare_again.json",
    "loopserve_fig2d": BENCH,
    "loopserve_table1": "python -m experiments.papers.loopserve.dialogues table1 --work {work}",
    "loopserve_turns": "python -m experiments.papers.loopserve.dialogues turns --work {work}",
    "model_types": "python -m experiments.model_types",
    "patch-make": "sinkscope patch --out {work}/patch.json",
    "recall_dialogues": BENCH,
    "repeat": "sinkscope repeat",
    "repeat-attention": "sinkscope repeat --quantity attention --tokens the",
    "why": "sinkscope why-loop",
}
for name, file in (("smollm2", SMOLLM2), ("gemma3", GEMMA)):
    COMMANDS |= {
        f"divergence_{name}": f"sinkscope repeat {file} --quantity probability --tokens ' poem, company, the'",
        f"lines_{name}": f"sinkscope lines {file} --etas 0.1",
        f"lines_whole_{name}": f"sinkscope lines {file} --etas 0.1 --whole",
        f"repeat_{name}": f"sinkscope repeat {file} --tokens ' poem, company, cat, dog, the, as, of, and, time, book'",
    }
COMMANDS["patch_smollm2"] = f"sinkscope patch {SMOLLM2} --out {{work}}/patch_smollm2.json"
LONG = {
    "bench_kv": "python -m experiments.bench_kv --page figures/bench_kv.md",
    "loopbench_small": BENCH,
}
"""Those that take more than five minutes each."""
DRAWING = Lock()


def of_papers() -> dict[str, str]:
    """The command of each file of figures/papers: that in its JSON, with the folder of the real models."""
    commands: dict[str, str] = {}
    for file in sorted((ROOT / "figures/papers").glob("*.json")):
        words = json.loads(file.read_text(encoding="utf-8"))["provenance"]["argv"]
        for at, word in enumerate(words):
            if word == "--model":
                words[at + 1] = f"real/{words[at + 1]}"
        commands[f"papers/{file.stem}"] = shlex.join(words)
    return commands


def module_of(argv: Sequence[str], kind: str) -> str:
    """The module that makes a figure."""
    if "-m" not in argv:
        return kinds()[kind].module
    module, *words = argv[argv.index("-m") + 1 :]
    for paper in PAPERS if module == "experiments.papers" else ():
        for artefact in paper.measured:
            if words[:2] == [paper.name, artefact.name]:
                return paper.place_of(artefact) or kinds()[kind].module
    return module


def git(*words: str) -> list[str]:
    """What git prints about this repository, line by line."""
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.split()


@cache
def code_of(module: str) -> list[str]:
    """The paths below the repository of a module and of all that it imports, what it imports itself first."""
    found = [module]
    files: dict[str, None] = {}
    for name in found:  # grows
        place = name.replace(".", "/")
        for path in (f"{place}.py", f"{place}/__init__.py"):
            if path not in files and name.split(".")[0] in CODE and (ROOT / path).is_file():
                files[path] = None
                for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
                    if isinstance(node, ast.ImportFrom) and node.module:
                        found += [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
    return [*files]


def stale() -> dict[str, list[str]]:
    """Files of code that changed since, for each figure that has any, the nearest first."""
    found: dict[str, list[str]] = {}
    for file in sorted((ROOT / "figures").rglob("*.json")):
        data = json.loads(file.read_text(encoding="utf-8"))
        made = data["provenance"]
        argv = made.get("argv") or made["command"].split()
        module = module_of(argv, data["kind"])
        named = (made.get("commit") or "").rstrip("+")
        known = named and git("rev-list", "--ignore-missing", "-1", named)
        (commit,) = known or git("log", "-1", "--format=%H", "--", str(file))
        changed = git("diff", "--name-only", commit, "--", *CODE)
        files = [one for one in code_of(module) if one in changed]
        if files:
            found[file.relative_to(ROOT / "figures").with_suffix("").as_posix()] = files
    return found


def make(name: str) -> str:
    """Make a figure again, with its picture where a browser can; return what went wrong, or nothing."""
    (head,) = git("rev-parse", "--short", "HEAD")
    work = ROOT / "runs" / head  # of this commit, so that no run goes on with answers of an earlier one
    work.mkdir(parents=True, exist_ok=True)
    typed = (COMMANDS | LONG | of_papers())[name].format(name, work=f"runs/{head}")
    words, file = shlex.split(typed), ROOT / f"figures/{name}.json"
    is_result = words[0] == "sinkscope"
    if is_result:
        words += ["--json", f"figures/{name}.json"]
    else:
        words[0] = sys.executable
    began = time.monotonic()
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    picture = file.with_suffix(".png")
    if is_result and done.returncode == 0 and picture.exists():
        with DRAWING, suppress(ValueError, RuntimeError):  # kaleido or the browser is missing
            write_png(Result.load(file).figure(), picture)
    error = "" if done.returncode == 0 else f"failed: {done.stderr.strip().splitlines()[-1:]}"
    print(f"{name}: {error or 'made again'} ({time.monotonic() - began:.0f} s)", flush=True)
    return error


def main(words: Sequence[str]) -> int:
    """List figures that are not those of the code, or make them again."""
    old = {} if words and "--list" not in words else stale()
    if "--list" in words:
        for name, files in old.items():
            print(f"{name}: {', '.join(files[:3])} ({len(files)} files)")
        return int(bool(old))
    known = COMMANDS | LONG | of_papers()
    names = list(words) or [name for name in known if name in old and name not in LONG]
    for name in names:
        if name not in known:
            raise SystemExit(f"{name!r} is no figure: give some of {', '.join(known)}")
    with ThreadPoolExecutor(2) as both:
        return int(any([*both.map(make, names)]))  # one that fails does not keep the others from being made


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
