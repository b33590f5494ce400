"""What `sinkscope why-loop` says of loops of real models.

    python -m experiments.loopguard.real WORK --model FILE                      # for each real model
    python -m experiments.loopguard.why --runs WORK --real FOLDER [--out figures]

The outputs are those that `experiments.loopguard.real` has written without a remedy: of those that end in a loop, four
on which the rule was chosen and ten others, spread over the kinds of openings. Given again, the command goes on with
those that are not measured yet.
"""

from __future__ import annotations

import time
from pathlib import Path

from experiments.loopguard.real import FULL, outputs_of
from experiments.loopguard.real_openings import openings_of
from experiments.record import Row, earlier, write_record
from experiments.script import run
from sinkscope.loops.text.signals import end_loop
from sinkscope.loops.why import WhyLoop, why_loop
from sinkscope.measure import Setup
from sinkscope.opening.load import load
from sinkscope.results.console import ProgressBar

CUTS = 3
COUNTS = {"choose": 4, "report": 10}
"""Loops of each half of the openings."""
NAME = "loopguard_why.json"
UNDECIDED, NO_LOOP = "undecided", "no loop"


def loops_of(work: Path, model: str, half: str) -> list[Row]:
    """The outputs of a real model that end in a loop, with their openings: as many as are asked for, evenly spread."""
    openings = openings_of(half)
    outputs = outputs_of([work], model=model, arm=FULL, half=half)
    ended = [row for row in outputs if end_loop(row["tokens"]) is not None]
    looping = [{**row, "opening": openings[row["number"]][1]} for row in ended]
    count = min(COUNTS[half], len(looping))
    return [looping[(2 * number + 1) * len(looping) // (2 * count)] for number in range(count)]


def asked_of_output(setup: Setup, output: Row) -> Row:
    """What keeps a loop going in which an output of a real model ends."""
    started = time.process_time()
    found = why_loop.on(setup, prompt=output["opening"], answer=output["tokens"], cuts=CUTS)
    about = {key: output[key] for key in ("model", "half", "kind", "number")}
    return {**about, **row_of(found), "cpu_seconds": round(time.process_time() - started, 1)}


def row_of(found: WhyLoop) -> Row:
    """A measurement in a row."""
    said = NO_LOOP
    if found.period is not None:
        said = " and ".join(sorted(found.kept_by)) or UNDECIDED
    fields = "goes_on", "control", "other_loop", "from_start"
    tried = {each.without: {name: getattr(each, name) for name in fields} for each in found.tried}
    return {"found": said, "period": found.period, "added": found.added, "goes_on": found.goes_on, "tried": tried}


def main(*, runs: Path, real: Path, out: Path = Path("figures")) -> None:
    """Make what the module describes.

    Args:
        runs: Folder of the outputs of real models.
        real: Folder of the files of real models.
    """
    of_real: list[Row] = earlier(out / NAME).get("real", [])
    settings = {"cuts": CUTS, "sampling": "greedy", "counts": COUNTS}
    known = {(row["model"], row["half"], row["number"]) for row in of_real}
    with ProgressBar() as progress:
        for file in sorted(real.glob("*.gguf")):
            setup = Setup.open(load(str(file)), loading="whole")
            outputs: list[Row] = []
            for half in COUNTS:
                outputs += loops_of(runs, file.stem, half)
            for number, output in enumerate(outputs):
                if (file.stem, output["half"], output["number"]) not in known:
                    of_real.append(asked_of_output(setup, output))
                    write_record(out / NAME, "loopguard-why", {"real": of_real}, settings)
                progress(file.stem, number + 1, len(outputs))


if __name__ == "__main__":
    run(main)
