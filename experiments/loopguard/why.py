"""What `sinkscope why` says of planted causes, and of models that others trained.

    python -m experiments.loopguard.why [--models FOLDER ...] [--count 12] [--out figures]

The organisms of the tests loop for causes that their weights were written for, one or two at once. The models are the
one in the package and folders, on story openings.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from experiments.record import Row, record
from experiments.script import run
from sinkscope.bench.prompt import Prompt
from sinkscope.bench.tasks.loops import Loops
from sinkscope.files.output import write_atomic
from sinkscope.loops.why import Why, why
from sinkscope.measure import Setup
from sinkscope.opening.live import target_of
from sinkscope.opening.load import load
from sinkscope.results.console import ProgressBar
from tests.organisms.kept_loops import KeptLoop, kept_loops

CUTS = 4
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


def row_of(found: Why) -> Row:
    """A measurement in a row."""
    said = NO_LOOP
    if found.period is not None:
        said = verdict(found.kept_by)
    tried = {}
    for each in found.tried:
        tried[each.without] = {"goes_on": each.goes_on, "control": each.control, "other_loop": each.other_loop}
    return {"found": said, "period": found.period, "goes_on": found.goes_on, "tried": tried}


def main(*, models: Sequence[Path] = (), count: int = 12, out: Path = Path("figures")) -> None:
    """Make what the module describes.

    Args:
        models: Folders of further models.
        count: Story openings for each model.
    """
    started = time.perf_counter()
    organisms, trained = list[Row](), list[Row]()
    made = kept_loops()
    with ProgressBar() as progress:
        for number, organism in enumerate(made):
            found = row_of(asked(organism))
            organisms.append({"name": organism.name, "planted": verdict(organism.causes), **found})
            progress("organisms", number + 1, len(made))
        for folder in (None, *map(str, models)):
            setup = Setup.open(load(folder), loading="whole")
            prompts = Loops(source="stories").prompts(target_of(setup.target))[:count]
            for number, prompt in enumerate(prompts):
                trained.append(asked_of_model(setup, prompt))
                progress(setup.target.name, number + 1, len(prompts))
    result = {"organisms": organisms, "models": trained}
    settings = {"cuts": CUTS, "draws": 3, "count": count, "sampling": "greedy"}
    write_atomic(out / "loopguard_why.json", record("loopguard-why", result, settings, started=started))


if __name__ == "__main__":
    run(main)
