"""LoopServe beside other methods on a real model: two samples for the choice, nine turns, and where time goes.

    python -m experiments.loopserve.arms MODEL [--dialogue-files FILE ...]

- `sample`: what columns and bands hold of the attention of queries that did not choose them, by head, where `--alpha`
  is asked: of 64 drawn queries, as in LoopServe, and of the last 64, as in MInference.
- `turns` (Fig. 12): nine turns on one cache, each 160 tokens of a prompt and the 32 that follow as its answer; KL of
  the answers' tokens to the whole cache, in nats. SnapKV, AdaKV and LoopServe's decoding half have 128 tokens.
- `stages` (Fig. 9): processor time of the parts of a prompt's attention, and of whole prompts and steps by arm.

Texts are those of `experiments.loopserve.real`. Steps that are done are not done again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from experiments.gpu.steps import Steps
from experiments.loopserve.real import TEXTS, piece
from experiments.record import Row
from experiments.script import run
from experiments.timing import seconds_of
from sinkscope.hooks.edit.base import Intervention, under
from sinkscope.kv import AdaKV, SnapKV
from sinkscope.lines.attention import Scores
from sinkscope.lines.bands import BlockGrid, StoredRows, choose_bands
from sinkscope.lines.choice import sampled_rows
from sinkscope.lines.sample import draw_of, held_out
from sinkscope.lines.serve import LoopServe
from sinkscope.lines.shapes import MInference
from sinkscope.lines.sparse import band_attention
from sinkscope.lines.sums import recovered, scores_of
from sinkscope.models.target import Target
from sinkscope.opening.live import target_of
from sinkscope.opening.load import load

LAST = 16  # dense rows
TURNS, PROMPT, ANSWER, BUDGET = 9, 160, 32, 128
ARMS: dict[str, Intervention | None] = {
    "whole cache": None,
    "LoopServe": LoopServe(budget=BUDGET, shortest=0),
    "LoopServe-P": LoopServe(decode=False, shortest=0),
    "LoopServe-D": LoopServe(prefill=False, budget=BUDGET),
    "SnapKV": SnapKV(budget=BUDGET),
    "AdaKV": AdaKV(budget=BUDGET),
    "MInference": MInference(),
}


@torch.no_grad()
def sample(target: Target, ids: Tensor, alpha: float) -> Row:
    """Shares that the choice from either sample holds of the attention of held-out queries, layer by layer."""
    found: dict[str, list[float]] = {"drawn": [], "last": [], "drawn_cells": [], "last_cells": []}

    def see(layer: int, scores: Scores) -> None:
        grid, seed = BlockGrid(scores.queries, scores.keys), draw_of(0, layer, scores.queries, scores.keys)
        sparse = grid.sparse_queries(LAST)
        rows = {"drawn": sampled_rows(grid, 64, seed, LAST), "last": torch.arange(sparse - 64, sparse)}
        tested = held_out(sparse - 64, 64, seed)
        for name, own in rows.items():
            chosen = choose_bands(StoredRows(scores, own), alpha, 4, float("inf"), LAST)
            found[name] += recovered(scores, chosen, tested).tolist()
            found[f"{name}_cells"] += chosen.attended().tolist()

    with scores_of(target, see, list(range(target.n_layers))):
        target.forward(ids)
    return {"heads": found, **{f"mean_{name}": fmean(values) for name, values in found.items()}}


@torch.no_grad()
def answered(target: Target, ids: Tensor, edit: Intervention | None) -> tuple[Tensor, list[float], list[float]]:
    """Next-token distributions after the tokens of all answers, and seconds of each prompt and of each step."""
    cache = DynamicCache(config=target.hf.config)
    after: list[Tensor] = []
    prompts, steps = list[float](), list[float]()
    with under(edit, target):
        for start in range(0, ids.shape[1], PROMPT + ANSWER):
            begin = start + PROMPT
            for part in (ids[:, start:begin], *ids[:, begin : begin + ANSWER].split(1, 1)):
                call = partial(target.hf, input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1)
                seconds, output = seconds_of(call)
                (prompts if part.shape[1] > 1 else steps).append(seconds)
                if part.shape[1] == 1:
                    after.append(output.logits[0, -1].log_softmax(-1))
    return torch.stack(after), prompts, steps


def turns(target: Target, ids: Tensor) -> Row:
    """KL of each turn's answer to that of the whole cache, by arm, and seconds."""
    rows: Row = {}
    whole = torch.empty(0)
    for name, edit in ARMS.items():
        logits, prompts, steps = answered(target, ids, edit)
        if edit is None:
            whole = logits
        kl = (whole.exp() * (whole - logits)).sum(1).view(TURNS, ANSWER).mean(1)
        rows[name] = {"kl": kl.tolist(), "mean": float(kl.mean()), "prompt": fmean(prompts), "step": fmean(steps)}
    return rows


@torch.no_grad()
def stages(target: Target, ids: Tensor, alpha: float) -> Row:
    """Seconds of the parts of LoopServe's attention over all layers, beside dense attention of the same layers."""
    spent = dict.fromkeys(("dense", "rows", "search", "sparse"), 0.0)

    def timed(name: str, work: Any) -> Any:
        seconds, made = seconds_of(work)
        spent[name] += seconds
        return made

    def see(layer: int, scores: Scores) -> None:
        rows = sampled_rows(BlockGrid(scores.queries, scores.keys), 64, layer, LAST)
        own = timed("rows", partial(StoredRows, scores, rows))
        chosen = timed("search", partial(choose_bands, own, alpha, 4, LoopServe.dense_above, LAST))
        timed("sparse", partial(band_attention, scores, scores.key, chosen))
        query, key = scores.query[None], scores.key[None]
        dense = partial(torch.nn.functional.scaled_dot_product_attention, query, key, key)
        timed("dense", partial(dense, is_causal=True, enable_gqa=True))

    with scores_of(target, see, list(range(target.n_layers))):
        whole, _ = seconds_of(partial(target.forward, ids))
    return {**spent, "prompt": whole - sum(spent.values()) + spent["dense"]}


def main(
    model: str,
    *,
    alpha: float = 0.955,
    lengths: Sequence[int] = (2048, 4096),
    kinds: Sequence[str] = tuple(TEXTS),
    dialogue_files: Sequence[Path] = (),
    out: Path = Path("figures/loopserve_arms.json"),
) -> None:
    """Make what the module describes.

    Args:
        model: Name, folder or file.
        alpha: What is asked of both samples.
        lengths: Lengths of the prompts of `stages`; the others' have the first.
        kinds: Kinds of text.
        dialogue_files: JSON lines of dialogues.
    """
    torch.set_num_threads(1)
    steps = Steps("loopserve-arms", out, {"alpha": alpha, "budget": BUDGET}, "cpu", "float32")
    target = target_of(load(model))
    for kind in kinds:
        text = TEXTS[kind](dialogue_files)
        steps.do(f"sample, {kind}", partial(sample, target, piece(target, text, lengths[0], 1), alpha))
        steps.do(f"turns, {kind}", partial(turns, target, piece(target, text, TURNS * (PROMPT + ANSWER), 1)))
    for length in lengths:
        prompt = piece(target, TEXTS["code"](()), length, 1)
        steps.do(f"stages, {length}", partial(stages, target, prompt, LoopServe.alpha))
    steps.end()


if __name__ == "__main__":
    run(main)
