"""The verdicts on files that people and programs wrote, drawn at random from the packages that are installed here.

    python -m experiments.loopset.files [--count 120] [--out figures/loops_files.json]

None of them is the output of a model, so nearly every verdict but clean is a false alarm. Which files are there depends
on what is installed.
"""

from __future__ import annotations

import random
import sysconfig
import time
from collections import Counter
from pathlib import Path

from experiments.record import Row, record
from experiments.script import run
from sinkscope.files.output import write_atomic
from sinkscope.loops import check

KINDS = {
    "programs": (".py",),
    "texts": (".md", ".rst", ".txt"),
    "data": (".json", ".csv", ".js", ".css", ".yaml", ".toml", ".html"),
}
SMALLEST, LARGEST = 3000, 60_000  # bytes
READ = 12_000  # characters


def verdicts(kind: str, count: int, seed: int) -> Row:
    """How many files of a kind have each verdict, and which are not clean."""
    home = Path(sysconfig.get_paths()["purelib"])
    files = []
    for each in sorted(home.rglob("*")):
        if each.suffix in KINDS[kind] and each.is_file():
            files.append(each)
    random.Random(f"{seed} {kind}").shuffle(files)
    counts: Counter[str] = Counter()
    others: list[str] = []
    for path in files:
        if counts.total() == count:
            break
        if not SMALLEST < path.stat().st_size < LARGEST:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        verdict = check(text[:READ]).records[0].verdict
        counts[verdict] += 1
        if verdict != "clean":
            others.append(f"{verdict}: {path.relative_to(home)}")
    return {"files": counts.total(), **counts, "not clean": others}


def main(*, count: int = 120, seed: int = 0, out: Path = Path("figures/loops_files.json")) -> None:
    """Make what the module describes.

    Args:
        count: Files of each kind.
    """
    started = time.perf_counter()
    result = {}
    for each in KINDS:
        result[each] = verdicts(each, count, seed)
    settings = {"count": count, "read": READ}
    write_atomic(out, record("loops-files", result, settings, started=started, dtype="text", seed=seed))
    for kind, counts in result.items():
        print(kind, {name: value for name, value in counts.items() if name != "not clean"})


if __name__ == "__main__":
    run(main)
