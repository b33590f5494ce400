"""What `sinkscope why` says of planted causes, of the model in the package, and of the loops of real models.

    python -m experiments.loopguard.real WORK --model FILE --halves report      # for each real model
    python -m experiments.loopguard.why [--runs WORK --real FOLDER] [--count 12] [--out figures]

The organisms of the tests loop for causes that their weights were written for, one or two at once. The model in the
package continues story openings. The outputs of real models are those that `experiments.loopguard.real` has written
without a remedy; given again, the command goes on with those that are not measured yet.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from experiments.loopguard.real import FULL
from experiments.loopguard.real_openings import openings_of
from experiments.record import Row, earlier, read_rows, record
from experiments.script import run
from sinkscope.bench.prompt import Prompt
from sinkscope.bench.tasks.loops import Loops
from sinkscope.files.output import write_atomic
from sinkscope.loops.text.signals import end_loop
from sinkscope.loops.why import Why, why
from sinkscope.measure import Setup
from sinkscope.opening.live import target_of
from sinkscope.opening.load import load
from sinkscope.results.console import ProgressBar
from tests.organisms.kept_loops import KeptLoop, kept_loops

CUTS = 6
HALF = "report"
"""The openings whose outputs are looked at."""
NAME = "loopguard_why.json"
UNDECIDED, NO_LOOP = "undecided", "no loop"


def verdict(causes: Sequence[str]) -> str:
    """Causes in one order and one word between them."""
    return " and ".join(sorted(causes)) or UNDECIDED


def asked(made: KeptLoop, cuts: int = CUTS) -> Why:
    """What keeps the loop of an organism going."""
    return why(made.model, made.turn, tokenizer=made.tokenizer, max_new_tokens=48, cuts=cuts)


def asked_of_model(setup: Setup, prompt: Prompt) -> Row:
    """What keeps the loop of a trained model going, after one opening."""
    found = why.on(setup, prompt=prompt.turns[0].text, cuts=CUTS)
    return {"model": setup.target.name, "prompt": prompt.id, **row_of(found)}


def loops_of(runs: Path, model: str) -> list[Row]:
    """The outputs of a real model that end in a loop, with their openings."""
    openings = openings_of(HALF)
    looping: list[Row] = []
    for row in read_rows(runs):
        if (row["model"], row["arm"], row["half"]) != (model, FULL, HALF):
            continue
        if end_loop(row["tokens"]) is not None:
            looping.append({**row, "opening": openings[row["number"]][1]})
    return looping


def asked_of_output(setup: Setup, output: Row) -> Row:
    """What keeps a loop going in which an output of a real model ends."""
    found = why.on(setup, prompt=output["opening"], answer=output["tokens"], cuts=CUTS)
    return {"model": output["model"], "kind": output["kind"], "number": output["number"], **row_of(found)}


def row_of(found: Why) -> Row:
    """A measurement in a row."""
    said = NO_LOOP
    if found.period is not None:
        said = verdict(found.kept_by)
    tried = {}
    for each in found.tried:
        tried[each.without] = {"goes_on": each.goes_on, "control": each.control, "other_loop": each.other_loop}
    return {"found": said, "period": found.period, "goes_on": found.goes_on, "tried": tried}


def main(*, runs: Path | None = None, real: Path | None = None, count: int = 12, out: Path = Path("figures")) -> None:
    """Make what the module describes.

    Args:
        runs: Folder of the outputs of real models.
        real: Folder of the files of real models.
        count: Story openings for the model in the package.
    """
    started = time.perf_counter()
    organisms, bundled = list[Row](), list[Row]()
    of_real: list[Row] = earlier(out / NAME).get("real", [])
    result: Row = {"organisms": organisms, "models": bundled, "real": of_real}
    settings = {"cuts": CUTS, "draws": 3, "count": count, "sampling": "greedy", "half": HALF}
    made = kept_loops()
    with ProgressBar() as progress:
        for number, organism in enumerate(made):
            found = row_of(asked(organism))
            organisms.append({"name": organism.name, "planted": verdict(organism.causes), **found})
            progress("organisms", number + 1, len(made))
        setup = Setup.open(load(None), loading="whole")
        prompts = Loops(source="stories").prompts(target_of(setup.target))[:count]
        for number, prompt in enumerate(prompts):
            bundled.append(asked_of_model(setup, prompt))
            progress(setup.target.name, number + 1, len(prompts))
        write_atomic(out / NAME, record("loopguard-why", result, settings, started=started))
        for file in sorted(real.glob("*.gguf")) if real else []:
            assert runs is not None, "the outputs of real models: give --runs"
            setup = Setup.open(load(str(file)), loading="whole")
            known = {(row["model"], row["number"]) for row in of_real}
            outputs = loops_of(runs / "runs.jsonl", file.stem)
            for number, output in enumerate(outputs):
                if (file.stem, output["number"]) not in known:
                    of_real.append(asked_of_output(setup, output))
                    write_atomic(out / NAME, record("loopguard-why", result, settings, started=started))
                progress(file.stem, number + 1, len(outputs))


if __name__ == "__main__":
    run(main)
