"""The most memory that `find-sinks` holds, of each of several models.

    python -m experiments.bench_memory real/smollm2-135m.gguf real/gemma3-270m.gguf [--out FILE]

Each model is measured in a process of its own; the peak is that of its resident memory, as the kernel counts it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from experiments.drawn import markdown
from experiments.record import Row, write_record
from experiments.script import run

MEASURED = """
import json, resource, sys
import sinkscope as ss
found = ss.find_sinks(sys.argv[1])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(json.dumps({"model": found.model.name, "peak_bytes": peak, "seconds": found.provenance.seconds}))
"""


def peak_of(model: str) -> Row:
    """The peak of memory of one model, in bytes, and the seconds."""
    command = [sys.executable, "-c", MEASURED, model]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(printed.splitlines()[-1])


def main(models: list[str], *, out: Path | None = None) -> None:
    """Make what the module describes, and print it.

    Args:
        models: Names, folders or files of models.
        out: File for the numbers.
    """
    rows = [peak_of(model) for model in models]
    cells = [[row["model"], f"{row['peak_bytes'] / 1e9:.2f}", f"{row['seconds']:.0f}"] for row in rows]
    print(markdown(["model", "GB at the peak", "seconds"], cells))
    if out is not None:
        write_record(out, "bench-memory", {"rows": rows}, {"models": models})


if __name__ == "__main__":
    run(main)
