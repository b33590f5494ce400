"""Figure 5 of the paper: barcodes of a loop compared with ordinary text, and before and after interventions.

    python -m experiments.loopguard.figure5 [--model NAME|FOLDER] [--head LAYER.HEAD ...] [--out figures]

The model continues a prompt of LoopBench's small set greedily, without a guard and with `LoopGuard.paper()`. The figure
shows heads of four layers, by default those that the loop changes most (the paper shows layers 16 and 20 to 22 of an
unnamed model). In the control, the model reads ordinary text of the same length. Darkness is the share of a head's
attention; steps run downwards and positions to the right, averaged over bins. `sinkscope barcode` makes such pictures
for other texts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from plotly.subplots import make_subplots

from experiments.drawn import save
from experiments.record import Row, record
from experiments.script import run
from sinkscope.attention.barcode import Barcode, barcode
from sinkscope.bench.prompt import read_prompts
from sinkscope.bench.tasks.loops import DATA
from sinkscope.display.console import ProgressBar
from sinkscope.display.style import ORANGE, figure_of
from sinkscope.kv.loopguard import LoopGuard
from sinkscope.opening.load import load

PANELS = ("a loop", "ordinary text", "with LoopGuard as printed")


def figure(data: Row) -> Any:
    """A row per head: the loop, ordinary text, and the run with LoopGuard."""
    loop = data["result"]["loop"]
    guarded = data["result"]["guarded"]
    rows = len(loop["shown"])
    titles = [f"{head}: {name}" for head in loop["shown"] for name in PANELS]
    fig: Any = make_subplots(rows=rows, cols=3, subplot_titles=titles, horizontal_spacing=0.04, vertical_spacing=0.07)
    for row in range(rows):
        pictures = [loop["attention"][row], loop["control_attention"][row], guarded["attention"][row]]
        top = max(0.05, *(float(np.quantile(picture, 0.98)) for picture in pictures))
        for col, picture in enumerate(pictures, 1):
            own = loop
            if col == 3:
                own = guarded
            steps = own["steps"]
            length = own["prompt_tokens"] + own["steps"]
            values = np.sqrt(np.minimum(picture, top))
            place = {"dx": -(-length // values.shape[1]), "dy": -(-steps // values.shape[0])}
            fig.add_heatmap(z=values, **place, zmin=0, colorscale="Greys", showscale=False, row=row + 1, col=col)
            fig.update_yaxes(autorange="reversed", row=row + 1, col=col)
        for step in guarded["interventions"][:40]:
            fig.add_hline(step, line={"color": ORANGE, "width": 1}, row=row + 1, col=3)
        if loop["onset"] is not None:
            fig.add_vline(loop["onset"], line={"color": ORANGE, "width": 1, "dash": "dot"}, row=row + 1, col=1)
    fig.update_xaxes(title_text="position", row=rows)
    fig.update_yaxes(title_text="step", col=1)
    ends = ["no loop" if own["period"] is None else f"a loop of period {own['period']}" for own in (loop, guarded)]
    title = (
        f"{loop['steps']} new tokens end in {ends[0]}, with LoopGuard as printed in {ends[1]} after "
        f"{len(guarded['interventions'])} interventions (lines)"
    )
    return figure_of(fig, None, title, width=1200, height=130 + 260 * rows, font={"size": 12}, bottom=60)


def numbers(result: Barcode) -> Row:
    """What is kept of a barcode."""
    names = ("period", "onset", "prompt_tokens", "steps", "shown", "attention", "control_attention")
    kept: Row = {}
    for name in names:
        kept[name] = getattr(result, name)
    return kept | {"interventions": result.events.get("guard", ())}


def main(
    *,
    model: str | None = None,
    head: Sequence[str] | None = None,
    prompt: str = "dc-0003",
    max_new_tokens: int = 400,
    budget: int = 256,
    out: Path = Path("figures"),
) -> None:
    """Make what the module describes.

    Args:
        model: Short name, hub id or folder; default: the model in the package.
        head: May be given again.
        prompt: Id in LoopBench's small set.
        budget: Of LoopGuard.
    """
    started = time.perf_counter()
    rows = [*read_prompts(DATA / "small-dc.jsonl"), *read_prompts(DATA / "small-ri.jsonl")]
    opening = next(row for row in rows if row.id == prompt).turns[0].text
    loaded = load(model, backend="hf")
    heads: list[tuple[int, int]] | None = None
    if head:
        heads = [(int(layer), int(head)) for layer, head in (name.split(".") for name in head)]
    with ProgressBar() as progress:
        loop = barcode(loaded, opening, heads=heads, max_new_tokens=max_new_tokens, progress=progress)
        named = [(int(layer[1:]), int(head[1:])) for layer, head in (name.split(".") for name in loop.shown)]
        guard = LoopGuard.paper(budget=budget)
        guarded = barcode(
            loaded,
            opening,
            heads=named,
            max_new_tokens=max_new_tokens,
            control=False,
            interventions=guard,
            progress=progress,
        )
    settings = {
        "model": loop.model.name,
        "prompt": prompt,
        "max_new_tokens": max_new_tokens,
        "budget": budget,
        "heads": named,
        "sampling": "greedy",
    }
    result = {"loop": numbers(loop), "guarded": numbers(guarded)}
    save("loopguard_fig5", record("loopguard-fig5", result, settings, started=started), figure, out)
    print(loop.summary())
    print(guarded.summary())


if __name__ == "__main__":
    run(main)
