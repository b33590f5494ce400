"""What LoopServe's bands cost a real model: cells, time, KL and loss by alpha, kind of text and length.

    python -m experiments.papers.loopserve.real MODEL ... [--dialogue-files FILE ...] [--page figures/loopserve.md]

A piece of each text is read once by the model's own attention and once under
`LoopServe(alpha, decode=False, shortest=0)`; distributions of the next token are compared at `--positions` places of
its second half, and processor seconds. Steps that are done are not done again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from experiments.drawn import markdown, put_table
from experiments.gpu.steps import Steps
from experiments.papers.loopserve.texts import TEXTS, piece
from experiments.record import Row
from experiments.script import run
from sinkscope.measure.margin import margin_of
from sinkscope.models.target import Target
from sinkscope.opening.load import load, target_of
from sinkscope.sparse.serve import LoopServe

PART = 256  # places at a time
PLACES = ("alpha", "text", "tokens")


@torch.no_grad()
def measured(target: Target, ids: Tensor, alphas: Sequence[float], positions: int) -> Row:
    """All alphas on one prompt, beside what the model's own attention gives."""
    length = ids.shape[1]
    at = torch.linspace(length // 2, length - 2, min(positions, length // 2 - 1)).long().to(ids.device)

    def states() -> tuple[Tensor, float]:
        began = time.process_time()
        found = target.base(input_ids=ids, use_cache=False).last_hidden_state[0, at]
        return found, time.process_time() - began

    dense, dense_seconds = states()
    rows: Row = {"positions": len(at)}
    for alpha in alphas:
        with LoopServe(alpha=alpha, decode=False, shortest=0).on(target) as told:
            own, seconds = states()
        shares = [event.data.get("attended", 1.0) for event in told.events if event.kind == "prefill"]
        cost = {"attended": float(np.mean(shares)), "time": seconds / dense_seconds}
        rows[str(alpha)] = {**compared(target, own, dense, ids[0, at + 1]), **cost}
    return rows


def compared(target: Target, own: Tensor, dense: Tensor, following: Tensor) -> Row:
    """Distributions of the next token beside those of the model's own attention, from hidden states."""
    head = target.hf.get_output_embeddings()
    parts: list[Tensor] = []
    for ours, plain, token in zip(own.split(PART), dense.split(PART), following.split(PART), strict=True):
        found, wanted = (head(states).float().log_softmax(-1) for states in (ours, plain))
        kl = (wanted.exp() * (wanted - found)).sum(1)
        nll, dense_nll = (-logs.gather(1, token[:, None])[:, 0] for logs in (found, wanted))
        parts.append(torch.stack([kl, nll, dense_nll, (wanted.argmax(1) == found.argmax(1)).float()]))
    means = torch.cat(parts, 1).double().mean(1).tolist()
    return dict(zip(("kl", "nll", "dense_nll", "same"), means, strict=True))


def with_margin(values: Any, shown: str) -> str:
    """The mean of values, with two standard errors from three values on."""
    margin = margin_of(np.asarray(values))
    return f"{values.mean():{shown}}" + ("" if margin is None else f" ± {margin:{shown.strip('+')}}")


def table(rows: Row) -> str:
    """A line for each alpha, kind of text and length: means over texts."""
    lines: list[Row] = []
    for name, row in rows.items():
        model, kind, length, _ = name.split(", ")
        for alpha, found in row.items():
            if isinstance(found, dict):
                place = dict(zip(PLACES, (alpha, f"{model}, {kind}", length), strict=True))
                lines.append({**place, **found, "change": found["nll"] - found["dense_nll"]})
    said: list[list[str]] = []
    for place, own in pd.DataFrame(lines).groupby(list(PLACES), sort=False):
        at: Any = place
        said.append(
            [
                *at,
                str(len(own)),
                f"{own['attended'].mean():.0%}",
                f"{own['time'].mean():.2f}",
                f"{own['kl'].mean():.4f}",
                with_margin(own["change"], "+.4f"),
                f"{own['change'].max():+.4f}",
                with_margin(own["same"], ".1%"),
            ]
        )
    return markdown([*PLACES, "texts", "cells", "time", "KL", "loss", "largest", "top-1 same"], said)


def main(
    models: Sequence[str],
    *,
    alphas: Sequence[float] = (LoopServe.alpha,),
    lengths: Sequence[int] = (4096, 8192),
    kinds: Sequence[Literal[*TEXTS]] = tuple(TEXTS),
    dialogue_files: Sequence[Path] = (),
    pieces: Sequence[int] = (4,),
    positions: int = 4096,
    device: str = "cpu",
    page: Path | None = None,
    out: Path = Path("figures/loopserve_real.json"),
) -> None:
    """Make what the module describes.

    Args:
        models: Names, folders or files.
        kinds: Kinds of text.
        dialogue_files: JSON lines of dialogues.
        pieces: Which pieces of each text.
        positions: Places of the second half, at most, at which distributions are compared.
        page: Page whose table is replaced.
    """
    steps = Steps("loopserve-real", out, {"dense_above": LoopServe.dense_above}, device, "float32")
    for model in models:
        target = target_of(load(model, device=device))
        for number, length, kind in product(pieces, lengths, kinds):
            ids = piece(target, kind, dialogue_files, length, number).to(device)
            work = partial(measured, target, ids, alphas, positions)
            steps.do(f"{Path(model).stem}, {kind}, {length}, {number}", work)
    if page is not None:
        put_table(page, "papers.loopserve.real", table(steps.rows))
    steps.end()


if __name__ == "__main__":
    run(main)
