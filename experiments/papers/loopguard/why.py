"""What `sinkscope why-loop` says of loops of real models.

    python -m experiments.papers.loopguard.real WORK --model FILE                      # for each real model
    python -m experiments.papers.loopguard.why --runs WORK --real FOLDER [--out figures]

The outputs are those that `experiments.papers.loopguard.real` has written without a remedy: of those that end in a
loop, four on which the rule was chosen and ten others, spread over the kinds of openings.
"""

from __future__ import annotations

from pathlib import Path

from experiments.papers.loopguard.real import FULL, openings_of, outputs_of
from experiments.record import Row, write_record
from experiments.script import run
from sinkscope.loops.text.signals import end_loop
from sinkscope.loops.why import WhyLoop, why_loop
from sinkscope.measure import Setup
from sinkscope.opening.load import load

CUTS = 3
COUNTS = {"choose": 4, "report": 10}
"""Loops of each half of the openings."""
NAME = "loopguard_why.json"


def loops_of(work: Path, model: str, half: str) -> list[Row]:
    """The outputs of a real model that end in a loop, with their openings: as many as are asked for, evenly spread."""
    openings, looping = openings_of(half), list[Row]()
    for row in outputs_of(work, model=model, arm=FULL, half=half):
        if end_loop(row["tokens"]) is not None:
            looping.append({**row, "opening": openings[row["number"]][1]})
    count = min(COUNTS[half], len(looping))
    return [looping[(2 * number + 1) * len(looping) // (2 * count)] for number in range(count)]


def row_of(found: WhyLoop) -> Row:
    """A measurement in a row."""
    said = "no loop"
    if found.period is not None:
        said = " and ".join(sorted(found.kept_by)) or "undecided"
    tried: Row = {}
    for row in found.tried:
        control = None if row.control is None else row.control.value
        tried[row.key] = {"goes_on": row.share.value, "control": control, "other_loop": row.other_loop.value}
    return {"found": said, "period": found.period, "added": found.added, "goes_on": found.goes_on, "tried": tried}


def main(*, runs: Path, real: Path, out: Path = Path("figures")) -> None:
    """Make what the module describes.

    Args:
        runs: Folder of the outputs of real models.
        real: Folder of the files of real models.
    """
    rows: list[Row] = []
    for file in sorted(real.glob("*.gguf")):
        setup = Setup.open(load(str(file)), loading="whole")
        for half in COUNTS:
            for output in loops_of(runs, file.stem, half):
                found = why_loop.on(setup, prompt=output["opening"], answer=output["tokens"], cuts=CUTS)
                about = {key: output[key] for key in ("model", "half", "kind", "number")}
                rows.append({**about, **row_of(found)})
    write_record(out / NAME, "loopguard-why", {"real": rows}, {"cuts": CUTS, "counts": COUNTS})


if __name__ == "__main__":
    run(main)
