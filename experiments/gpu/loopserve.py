"""LoopServe on a GPU: whole prompts, and latency.

    python -m experiments.gpu.loopserve [--model NAME|FOLDER] [--out figures/gpu_loopserve.json] [--device cuda]

Without `--model` the model has the shape of a 7B one, random bfloat16 weights, and planted lines in every layer (half
of the heads attend to one offset, half to marked tokens, a tenth of the text). A step that is done is not done again.

- `prompt`: the whole model reads a prompt, with `LoopServe()` and with its own attention (`sdpa`); `mass` is
  what the events say about held-out rows, over layers and heads.
- latency: `experiments.loopserve.latency` on this model: a step for each arm and context. `experiments.gpu.overhead`
  measures decoding alone, in pairs.

Needs torch, transformers, accelerate, jaxtyping; no network, no TransformerLens, no nnsight.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from experiments.gpu.steps import Steps, model_of
from experiments.loopserve.latency import arms, text, turn
from experiments.record import Row
from experiments.script import run
from experiments.timing import clock, faster, pairs_of
from sinkscope.hooks.edit.base import Intervention
from sinkscope.lines.serve import LoopServe
from sinkscope.models.target import Target
from sinkscope.models.text import typical_text
from sinkscope.results.console import note

Ids = Int[Tensor, "1 pos"]


@torch.no_grad()
def prompt(target: Target, ids: Ids, rounds: int) -> Row:
    """A whole prompt, with `LoopServe()` and with the model's own attention."""
    own = partial(target.base, input_ids=ids, use_cache=False)
    edit = LoopServe(decode=False, shortest=0)
    events: list[Row] = []

    def sparse() -> None:
        with edit.on(target) as run:
            own()
        events[:] = [dict(event.data) for event in run.events if event.kind == "prefill"]

    pairs = pairs_of(own, sparse, rounds, partial(clock, target.device))
    held: list[float] = []
    kernels: set[str] = set()
    for data in events:
        held += data.get("recovered", ())
        kernels.add(data.get("kernel", "the model's own"))
    mass = None
    if held:
        mass = {"mean": statistics.fmean(held), "least": min(held)}
    values = []
    for each in events:
        values.append(each.get("attended", 1.0))
    return {
        "n": ids.shape[1],
        "kernel": sorted(kernels),
        "attended": statistics.fmean(values),
        "mass": mass,
        **faster(pairs),
    }


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
        return text(length, 0, 0.1).to(target.device)
    tokens = target.tokenizer(typical_text(), return_tensors="pt").input_ids
    return tokens.repeat(1, -(-length // tokens.shape[1]))[:, :length].to(target.device)


def main(
    *,
    model: str | None = None,
    shape: str = "lines-7b",
    lengths: Sequence[int] = (8192, 16384, 32768, 65536, 131072),
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
        contexts: Of the latency.
        new: Tokens of an answer, for the latency.
        names: Arms of the latency.
        shortest: Prompts below are dense under LoopServe.
    """
    settings = {"model": model, "shape": shape, "new": new, "rounds": rounds, "budget": budget, "dtype": dtype}
    steps = Steps("gpu-loopserve", out, {**settings, "shortest": shortest}, device, dtype)
    target = model_of(model, shape, device, dtype)
    room = (target.max_positions or sys.maxsize) - new
    ids = ids_of(target, min(room, max(*lengths, *contexts)) + new, model is None)
    for length in lengths:
        if length > room:
            note(f"{target.name} reads {target.max_positions} tokens: {length} is left out")
            continue
        steps.do(f"prompt of {length}", partial(prompt, target, ids[:, :length], rounds))
    edits = arms(budget, shortest)
    for context in contexts:
        for name in names:
            if context <= room:
                part = ids[:, : context + new]
                steps.do(f"{name} at {context}", partial(latency, target, part, name, edits[name], context, rounds))
    steps.end()


if __name__ == "__main__":
    run(main)
