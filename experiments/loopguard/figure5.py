"""Figure 5 of the paper: barcodes of a loop compared with ordinary text, and before and after interventions.

    python -m experiments.loopguard.figure5 [--model NAME|FOLDER] [--head LAYER.HEAD ...] [--out figures]

The model continues a prompt of LoopBench's small set greedily, without a guard and with `LoopGuard.paper()`. The figure
shows heads of four layers, by default those that the loop changes most (the paper shows layers 16 and 20 to 22 of an
unnamed model). In the control, the model reads ordinary text of the same length, token by token. Darkness is the share
of a head's attention; steps run downwards and positions to the right, averaged over bins. `sinkscope barcode` makes
such pictures for other texts.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.drawn import save
from experiments.record import record
from sinkscope.attention.barcode import Barcode, HeadBarcode, Picture, barcode
from sinkscope.bench.prompt import read_prompts
from sinkscope.bench.tasks.loops import DATA
from sinkscope.files.console import ProgressBar
from sinkscope.files.records import build
from sinkscope.kv.loopguard import LoopGuard
from sinkscope.measure.style import ORANGE, finished
from sinkscope.models.load import load

PANELS = {
    "whole": "a loop",
    "late": "the loop, last steps",
    "healthy_late": "ordinary text, last steps",
    "guarded": "with LoopGuard as printed",
}


def figure(data: dict[str, Any]) -> Any:
    """A row per head: the loop, its last steps, ordinary text, and the run with LoopGuard."""
    from plotly.subplots import make_subplots

    loop, guarded, shown = (data["result"][name] for name in ("loop", "guarded", "shown"))
    titles = [f"L{head.replace('.', '.H')}: {name}" for head in shown for name in PANELS.values()]
    fig: Any = make_subplots(
        rows=len(shown), cols=len(PANELS), subplot_titles=titles, horizontal_spacing=0.04, vertical_spacing=0.07
    )
    for row, own in enumerate(shown.values(), 1):
        pictures = [None if own[name] is None else build(Picture, own[name], name) for name in PANELS]
        top = max([0.05, *(_high(p) for p in pictures if p is not None)])
        for col, one in enumerate(pictures, 1):
            if one is None:
                continue
            values = one.values()
            fig.add_heatmap(
                x=[one.first_position + (i + 0.5) * one.positions - 0.5 for i in range(len(values[0]))],
                y=[one.first_step + (i + 0.5) * one.steps - 0.5 for i in range(len(values))],
                z=[[math.sqrt(min(v, top)) for v in line] for line in values],
                zmin=0,
                zmax=math.sqrt(top),
                colorscale=[[0, "#ffffff"], [1, "#000000"]],
                showscale=False,
                row=row,
                col=col,
            )
            fig.update_yaxes(autorange="reversed", row=row, col=col)
        for step in guarded["interventions"][:40]:
            fig.add_hline(step, line={"color": ORANGE, "width": 1}, row=row, col=len(PANELS))
        if loop["onset"] is not None:
            fig.add_vline(loop["onset"], line={"color": ORANGE, "width": 1, "dash": "dot"}, row=row, col=1)
    fig.update_xaxes(title_text="position", row=len(shown))
    fig.update_yaxes(title_text="step", col=1)
    ends = ["no loop" if one["period"] is None else f"a loop of period {one['period']}" for one in (loop, guarded)]
    found = (
        f"{loop['steps']} new tokens end in {ends[0]}, with LoopGuard as printed in {ends[1]} after "
        f"{len(guarded['interventions'])} interventions (dotted: the loop begins; lines: interventions)"
    )
    return finished(fig, None, found, width=1560, height=130 + 260 * len(shown), font={"size": 12}, bottom=60)


def _steps(guarded: Barcode) -> list[int]:
    return [mark.step for mark in guarded.marks if mark.kind == "guard"]


def picture(plain: HeadBarcode, guarded: HeadBarcode | None, name: str) -> Any:
    """One panel of a head."""
    if name == "guarded":
        return None if guarded is None else guarded.whole
    return getattr(plain, name)


def _high(one: Any) -> float:
    """A share that one cell in fifty exceeds."""
    cells = sorted(v for line in one.values() for v in line)
    return cells[-1 - len(cells) // 50]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.loopguard.figure5", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", help="short name, hub id or folder; default: the model in the package")
    parser.add_argument("--head", action="append", metavar="LAYER.HEAD", help="may be given again")
    parser.add_argument("--prompt", default="dc-0003", help="id in LoopBench's small set")
    parser.add_argument("--max-new-tokens", type=int, default=400)
    parser.add_argument("--budget", type=int, default=256, help="of LoopGuard")
    parser.add_argument("--out", type=Path, default=Path("figures"))
    args = parser.parse_args(argv)
    started = time.perf_counter()
    rows = [*read_prompts(DATA / "small-dc.jsonl"), *read_prompts(DATA / "small-ri.jsonl")]
    prompt = next(row for row in rows if row.id == args.prompt).turns[0].text
    model = load(args.model, backend="hf")
    heads = None if not args.head else [(int(a), int(b)) for a, b in (name.split(".") for name in args.head)]
    with ProgressBar() as progress:
        loop = barcode(model, prompt, heads=heads, max_new_tokens=args.max_new_tokens, progress=progress)
        named = [(h.layer, h.head) for h in loop.heads if h.whole is not None]
        guarded = barcode(
            model,
            prompt,
            heads=named,
            max_new_tokens=args.max_new_tokens,
            control=False,
            interventions=LoopGuard.paper(budget=args.budget),
            progress=progress,
        )
    near = {
        f"{h.layer}.{h.head}": {"near": h.near, "overlap": h.overlap, "healthy_overlap": h.healthy_overlap}
        for h in loop.heads
    }
    result = {
        "loop": {"period": loop.period, "onset": loop.onset, "prompt_tokens": loop.prompt_tokens, "steps": loop.steps},
        "guarded": {"period": guarded.period, "onset": guarded.onset, "interventions": _steps(guarded)},
        "heads": near,
        "shown": {
            f"{h.layer}.{h.head}": {
                name: None if (one := picture(h, g, name)) is None else asdict(one) for name in PANELS
            }
            for h in loop.heads
            if h.whole is not None
            for g in guarded.heads
            if (g.layer, g.head) == (h.layer, h.head)
        },
    }
    settings = {
        "model": loop.model.name,
        "prompt": args.prompt,
        "max_new_tokens": args.max_new_tokens,
        "budget": args.budget,
        "heads": named,
        "sampling": "greedy",
    }
    save("loopguard_fig5", record("loopguard-fig5", result, settings, started=started), figure, args.out)
    print(loop.summary())
    print(guarded.summary())


if __name__ == "__main__":
    main()
