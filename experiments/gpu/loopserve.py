"""LoopServe on a GPU: the latency of turns. `experiments.gpu.bands` measures the choice, attention and prompts.

    python -m experiments.gpu.loopserve [--model NAME|FOLDER] [--out figures/gpu_loopserve.json] [--device cuda]

Without `--model` the model has the shape of a 7B one, random bfloat16 weights, and planted lines in every layer (half
of the heads attend to one offset, half to marked tokens, a tenth of the text). What is measured is
`experiments.loopserve.latency` on this model: a step for each arm and context. A step that is done is not done again.
`experiments.gpu.overhead` measures decoding alone, in pairs.

Needs torch, transformers, accelerate, jaxtyping; no network, no TransformerLens, no nnsight.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from experiments.gpu.steps import Steps, model_of
from experiments.loopserve.latency import arms, turn
from experiments.planted_lines import text
from experiments.record import Row
from experiments.script import run
from experiments.timing import clock
from sinkscope.hooks.edit.base import Intervention
from sinkscope.models.target import Target
from sinkscope.models.text import typical_text

Ids = Int[Tensor, "1 pos"]


@torch.no_grad()
def latency(target: Target, ids: Ids, arm: str, edit: Intervention | None, context: int, rounds: int) -> Row:
    """Runs of an arm after a context; `experiments.loopserve.latency` says what a run holds."""
    now = partial(clock, target.device)
    turn(target, edit, ids[:, : context + 2], context, now)  # kernels
    runs: list[Row] = []
    for number in range(rounds):
        runs.append({"context": context, "round": number, "arm": arm, **turn(target, edit, ids, context, now)})
    return {"runs": runs}


def ids_of(target: Target, length: int, made: bool) -> Ids:
    """The text that all steps read, over and over if it is short."""
    if made:
        return text(length, 0.1).to(target.device)
    tokens = target.tokenizer(typical_text(), return_tensors="pt").input_ids
    return tokens.repeat(1, -(-length // tokens.shape[1]))[:, :length].to(target.device)


def main(
    *,
    model: str | None = None,
    shape: str = "lines-7b",
    contexts: Sequence[int] = (2048, 4096, 8192, 16384, 32768),
    new: int = 120,
    names: Sequence[str] = ("full", "loopserve", "loopserve-p", "loopserve-d", "snapkv", "adakv", "minference"),
    rounds: int = 3,
    budget: int = 1024,
    shortest: int = 2048,
    device: str = "cuda",
    dtype: str = "bfloat16",
    out: Path = Path("figures/gpu_loopserve.json"),
) -> None:
    """Make what the module describes.

    Args:
        model: Short name, hub id or folder; default: a 7B shape with planted lines.
        contexts: Lengths of the prompt.
        new: Tokens of an answer.
        names: Arms.
        shortest: Prompts below are dense under LoopServe.
    """
    settings = {"model": model, "shape": shape, "new": new, "rounds": rounds, "budget": budget, "dtype": dtype}
    steps = Steps("gpu-loopserve", out, {**settings, "shortest": shortest}, device, dtype)
    target = model_of(model, shape, device, dtype)
    room = (target.max_positions or sys.maxsize) - new
    ids = ids_of(target, min(room, max(contexts)) + new, model is None)
    edits = arms(budget, shortest)
    for context in contexts:
        for name in names:
            if context <= room:
                part = ids[:, : context + new]
                steps.do(f"{name} at {context}", partial(latency, target, part, name, edits[name], context, rounds))
    steps.end()


if __name__ == "__main__":
    run(main)
