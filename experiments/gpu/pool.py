"""Many commands beside each other on one GPU, until all have ended or the time is up.

    python -m experiments.gpu.pool FILE --workers 12 --seconds 240 --logs DIR

FILE has one command a line, the most wanted first. Small models leave most of a GPU idle, so several share it, but each
wait for the device takes longer. Lines may be added while it runs; it ends when all have ended and the folder of logs
has a file `end`.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from experiments.script import run

TICK = 0.2  # seconds between looks


def main(file: Path, *, workers: int = 12, seconds: float = 240.0, logs: Path = Path("logs")) -> None:
    """Make what the module describes.

    Args:
        file: The commands.
        workers: Commands at once.
        seconds: After so long everything that still runs is ended.
        logs: Folder of what each says, by the number of its line.
    """
    logs.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    begun = 0
    running: dict[int, subprocess.Popen[bytes]] = {}
    while time.monotonic() < end:
        commands = file.read_text().splitlines()
        while begun < len(commands) and len(running) < workers:
            with (logs / f"{begun}.log").open("wb") as log:
                words = shlex.split(commands[begun])
                running[begun] = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
            begun += 1
        for number, process in list(running.items()):
            code = process.poll()
            if code is None:
                continue
            del running[number]
            left = end - time.monotonic()
            print(f"{left:.0f} s left, exit code {code}: {commands[number]}", flush=True)
        if not running and begun == len(commands) and (logs / "end").exists():
            break
        time.sleep(TICK)
    for number, process in running.items():
        print(f"cut off: {file.read_text().splitlines()[number]}", flush=True)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    run(main)
