"""Variants of LoopGuard's intervention on loops that return after an intervention on the cache alone.

    python -m experiments.loopguard.variants [--prompts 12] [--max-new-tokens 1000] [--out figures]

The model in the package continues prompts of LoopBench's small set greedily. Compared are no guard; LoopGuard as in the
paper; the same with `clean="repeats"`, which takes older copies out of the cache as well; LoopGuard with a *ban*: from
an intervention on, the three-grams of every block that was taken out may not be written again; and the controls: the
ban alone, at the same alarms but with the cache left as it is, and no-repeat-4-gram without any guard.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, NoRepeatNGramLogitsProcessor

from experiments.loopguard.drawn import save
from experiments.record import record
from sinkscope.bench.loopbench.prompts import load_prompts
from sinkscope.console import ProgressBar
from sinkscope.figures.style import BLUE, GREEN, ORANGE
from sinkscope.kv.loopguard import LoopGuard, LoopReporter
from sinkscope.loops import compression_ratio, ends_in_loop, tail_period, type_token_ratio
from sinkscope.loops.signals import WINDOW
from sinkscope.models.load import load
from sinkscope.text import typical_text

BUDGET, N = 256, 3


class Ban(LogitsProcessor):
    """N-grams of blocks that repeated at an alarm are not written again.

    Args:
        width: columns of the prompts.
        alarms: called at every step: (row, number of the generated token) of all alarms so far.
    """

    def __init__(self, width: int, alarms: Any) -> None:
        self._width, self._alarms = width, alarms
        self._seen = 0
        self._next: dict[int, dict[tuple[int, ...], set[int]]] = {}

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Take what continues a removed three-gram out of the scores."""
        alarms = self._alarms()
        for row, generated in alarms[self._seen :]:
            block = input_ids[row, self._width : self._width + generated][-WINDOW:].tolist()
            tail = tail_period(block, repeats=2)
            block = block if tail is None else block[tail.start :]
            known = self._next.setdefault(row, {})
            for i in range(len(block) - N + 1):
                known.setdefault(tuple(block[i : i + N - 1]), set()).add(block[i + N - 1])
        self._seen = len(alarms)
        for row, known in self._next.items():
            for token in known.get(tuple(input_ids[row, 1 - N :].tolist()), ()):
                scores[row, token] = -torch.inf
        return scores


@torch.no_grad()
def run(model: Any, ids: Tensor, mask: Tensor, new: int, name: str) -> tuple[list[list[int]], int]:
    """New tokens of every row by one variant, and how many interventions there were."""
    guard = {
        "LoopGuard": LoopGuard(budget=BUDGET),
        "LoopGuard, clean=repeats": LoopGuard(budget=BUDGET, clean="repeats"),
        "LoopGuard + ban": LoopGuard(budget=BUDGET),
    }.get(name)
    width = ids.shape[1]
    session: Any
    with guard.on(model) if guard is not None else nullcontext() as session:
        processors: list[Any] = []
        if name == "LoopGuard + ban":
            processors = [Ban(width, lambda: [(e.row, e.data["generated"]) for e in session.events])]
        elif name == "ban alone":
            reporter = LoopReporter(eos_token_id=model.generation_config.eos_token_id)
            processors = [reporter, Ban(width, lambda: [(e.row, e.step) for e in reporter.events])]
        elif name == "no-repeat-4-gram":
            processors = [NoRepeatNGramLogitsProcessor(4)]
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            logits_processor=processors,
        )[:, width:].tolist()
        events = 0 if session is None else len(session.events)
    return out, events


NAMES = ("no guard", "LoopGuard", "LoopGuard, clean=repeats", "LoopGuard + ban", "ban alone", "no-repeat-4-gram")


def row_of(name: str, rows: Sequence[Sequence[int]], events: int) -> dict[str, Any]:
    """Means over the outputs of a variant."""
    return {
        "name": name,
        "runs": len(rows),
        "ttr": fmean(map(type_token_ratio, rows)),
        "cr": fmean(map(compression_ratio, rows)),
        "loop": fmean(type_token_ratio(r) <= 0.2 and compression_ratio(r) <= 0.12 for r in rows),
        "tail_loop": fmean(map(ends_in_loop, rows)),
        "interventions": events / len(rows),
    }


def figure(rows: list[dict[str, Any]]) -> Any:
    """Diversity, compressibility and loop rates, a group of bars per variant."""
    from plotly.subplots import make_subplots

    fig: Any = make_subplots(
        rows=1, cols=2, horizontal_spacing=0.08, subplot_titles=["type-token and compression ratio", "runs in a loop"]
    )
    names = [row["name"] for row in rows]
    for key, label, colour, col in (
        ("ttr", "type-token ratio", BLUE, 1),
        ("cr", "compression ratio", GREEN, 1),
        ("loop", "whole output", BLUE, 2),
        ("tail_loop", "last 256 tokens", ORANGE, 2),
    ):
        fig.add_bar(x=names, y=[row[key] for row in rows], name=label, marker_color=colour, row=1, col=col)
    fig.update_yaxes(range=[0, 1.03], tickformat=".0%", row=1, col=2)
    return fig.update_layout(
        title={"text": "Variants of the intervention on the model in the package", "x": 0.01, "xanchor": "left"},
        template="plotly_white",
        width=1400,
        height=520,
        font={"size": 13},
        barmode="group",
        margin={"l": 60, "r": 20, "t": 90, "b": 110},
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.loopguard.variants", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("figures"))
    args = parser.parse_args(argv)
    started = time.perf_counter()
    model = load(None, backend="hf")
    prompts = load_prompts("small")
    prompts = prompts[:: max(1, len(prompts) // args.prompts)][: args.prompts]
    read = [model.tokenizer(p.prompt, verbose=False)["input_ids"] for p in prompts]
    width = max(map(len, read))
    ids = torch.tensor([[0] * (width - len(r)) + r for r in read])
    mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in read])
    rows: list[dict[str, Any]] = []
    with ProgressBar() as progress:
        for i, name in enumerate(NAMES):
            progress("variants", i, len(NAMES))
            rows.append(row_of(name, *run(model, ids, mask, args.max_new_tokens, name)))
            print(rows[-1], flush=True)
    text = model.tokenizer(typical_text(), add_special_tokens=False, verbose=False)["input_ids"]
    n = args.max_new_tokens
    pieces = [text[i : i + n] for i in range(0, len(text) - n + 1, n)][: len(prompts)]
    rows.append(row_of("ordinary text", pieces, 0))
    settings = {
        "prompts": [p.id for p in prompts],
        "max_new_tokens": n,
        "budget": BUDGET,
        "ban": N,
        "sampling": "greedy",
    }
    save(
        "loopguard_variants",
        record("loopguard-variants", {"rows": rows}, settings, started=started),
        figure(rows),
        args.out,
    )


if __name__ == "__main__":
    main()
