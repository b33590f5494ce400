"""What `sinkscope why` says of planted causes, and of models that others trained.

    python -m experiments.loopguard.why [--models FOLDER ...] [--count 12] [--out figures]

The organisms of the tests loop for causes that their weights were written for, one or two at once. The models are the
one in the package and folders, on story openings.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.drawn import save
from experiments.record import Row, record
from experiments.script import run
from sinkscope.bench.prompt import Prompt
from sinkscope.bench.tasks.loops import Loops
from sinkscope.kv import StreamingLLM
from sinkscope.loops.why import Why, why
from sinkscope.measure import Setup
from sinkscope.opening.live import target_of
from sinkscope.opening.load import load
from sinkscope.results.console import ProgressBar
from sinkscope.results.style import COLOURS, figure_of, panels
from tests.organisms.kept_loops import KeptLoop, kept_loops

CUTS = 4
UNDECIDED, NO_LOOP = "undecided", "no loop"


def verdict(causes: Sequence[str], either: bool) -> str:
    """Causes in one order and one word between them."""
    return (" or " if either else " and ").join(sorted(causes)) or UNDECIDED


def asked(made: KeptLoop, cuts: int = CUTS) -> Why:
    """What keeps the loop of an organism going."""
    policy = None
    if made.window is not None:
        policy = StreamingLLM(budget=made.window)
    return why(
        made.model,
        made.turn,
        history=made.history,
        tokenizer=made.tokenizer,
        interventions=policy,
        bits=made.bits,
        max_new_tokens=48,
        cuts=cuts,
    )


def asked_of_model(setup: Setup, prompt: Prompt) -> Row:
    """What keeps the loop of a trained model going, after one opening."""
    found = why.on(setup, prompt=prompt.turns[0].text, cuts=CUTS)
    return {"model": setup.target.name, "prompt": prompt.id, **row_of(found)}


def row_of(found: Why) -> Row:
    """A measurement in a row."""
    said = NO_LOOP
    if found.period is not None:
        said = verdict(found.kept_by, found.either)
    tried = {}
    for each in found.tried:
        tried[each.without] = {"goes_on": each.goes_on, "control": each.control, "other_loop": each.other_loop}
    return {"found": said, "period": found.period, "goes_on": found.goes_on, "tried": tried}


def figure(data: Row) -> Any:
    """Planted causes against what was said, and what was said of trained models."""
    organisms, models = data["result"]["organisms"], data["result"]["models"]
    planted = list(dict.fromkeys(row["planted"] for row in organisms))
    said = list(dict.fromkeys([*planted, *(row["found"] for row in organisms)]))
    counts = Counter((row["planted"], row["found"]) for row in organisms)
    fig = panels(["organisms: what was said (across) of planted causes", "models: loops by what was said"], [0.6, 0.4])
    table = []
    for truth in planted:
        table.append([counts[truth, one] for one in said])
    fig.add_heatmap(
        z=table,
        x=said,
        y=planted,
        text=table,
        texttemplate="%{text}",
        colorscale="Blues",
        showscale=False,
        row=1,
        col=1,
    )
    fig.update_yaxes(autorange="reversed", row=1, col=1)
    for number, name in enumerate(dict.fromkeys(row["model"] for row in models)):
        mine = Counter(row["found"] for row in models if row["model"] == name)
        fig.add_bar(x=list(mine), y=list(mine.values()), name=name, marker_color=COLOURS[number], row=1, col=2)
    right = sum(row["found"] == row["planted"] for row in organisms)
    title = f"{right} of {len(organisms)} organisms get the causes that were planted, and no others"
    return figure_of(fig, None, title, width=1500, height=640, barmode="group", legend=-0.42, bottom=200)


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
            organisms.append({"name": organism.name, "planted": verdict(organism.causes, organism.either), **found})
            progress("organisms", number + 1, len(made))
        for folder in (None, *map(str, models)):
            setup = Setup.open(load(folder), loading="whole")
            prompts = Loops(source="stories").prompts(target_of(setup.target))[:count]
            for number, prompt in enumerate(prompts):
                trained.append(asked_of_model(setup, prompt))
                progress(setup.target.name, number + 1, len(prompts))
    result = {"organisms": organisms, "models": trained}
    settings = {"cuts": CUTS, "draws": 3, "count": count, "sampling": "greedy"}
    save("loopguard_why", record("loopguard-why", result, settings, started=started), figure, out)
    for name in dict.fromkeys(row["model"] for row in trained):
        print(name, Counter(row["found"] for row in trained if row["model"] == name))
    print(f"{sum(row['found'] == row['planted'] for row in organisms)} of {len(organisms)} organisms as planted")


if __name__ == "__main__":
    run(main)
