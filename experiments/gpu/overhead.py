"""What a token costs on a GPU under guard and policies, over stock attention, by context.

    python -m experiments.gpu.overhead [--model NAME] [--contexts 4096 32768 131072] [--out FILE]

Without `--model`, random weights of 7B shape. Each method decodes the same tokens after the same prompt as the stock
model, in pairs whose order alternates; the ratio is the median over pairs with a 95 % bootstrap interval. Full, an
untriggered LoopGuard, StreamingLLM, SnapKV, TOVA, H2O and LoopServe's decoding. A step is a method at a context and a
batch. Needs torch, transformers, accelerate, jaxtyping.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from experiments.gpu.steps import Steps, model_of
from experiments.loopserve.latency import turn
from experiments.planted_lines import text
from experiments.record import Row
from experiments.script import run
from experiments.timing import clock, interleaved, ratio
from sinkscope.hooks.edit.base import Intervention
from sinkscope.kv import H2O, TOVA, Full, SnapKV, StreamingLLM
from sinkscope.lines.serve import LoopServe
from sinkscope.loops.guard import LoopGuard
from sinkscope.models.target import Target


def methods(budget: int) -> dict[str, Intervention]:
    """What is measured, by name."""
    return {
        "full": Full(),
        "loopguard, untriggered": LoopGuard(budget),
        "loopserve, decoding": LoopServe(budget, prefill=False),
        "streaming_llm": StreamingLLM(budget),
        "snapkv": SnapKV(budget),
        "tova": TOVA(budget),
        "h2o": H2O(budget),
    }


def paired(target: Target, ids: Int[Tensor, "batch pos"], context: int, edit: Intervention, pairs: int) -> Row:
    """The method over stock: milliseconds of a token, their ratio, and what the cache holds."""
    read = partial(turn, target, ids=ids, context=context, clock=partial(clock, target.device))
    runs = interleaved({"stock": partial(read, None), "edited": partial(read, edit)}, pairs)
    seconds: dict[str, list[float]] = {}
    for arm, made in runs.items():
        seconds[arm] = [sum(one["seconds"][1:]) for one in made]
    stock = 1000 * statistics.median(seconds["stock"]) / (ids.shape[1] - context)
    row: Row = {"context": context, "ratio": ratio(seconds["edited"], seconds["stock"]), "stock_ms_per_token": stock}
    for name in ("tokens", "logical", "physical", "read"):
        row[name] = runs["edited"][-1][name]
    return row


def main(
    *,
    model: str | None = None,
    shape: str = "lines-7b",
    contexts: Sequence[int] = (4096, 32768, 131072),
    batches: Sequence[int] = (1, 16),
    tokens: int = 1 << 17,
    new: int = 64,
    pairs: int = 5,
    budget: int = 1024,
    device: str = "cuda",
    dtype: str = "bfloat16",
    out: Path = Path("figures/gpu_overhead.json"),
) -> None:
    """Make what the module describes.

    Args:
        model: Short name, hub id or folder; default: random weights of a shape.
        batches: Numbers of texts at once.
        tokens: Most tokens of all contexts of a batch, for the memory.
        new: Tokens that are decoded.
        budget: Of guard and policies.
    """
    settings = {"model": model, "shape": shape, "new": new, "pairs": pairs, "budget": budget, "dtype": dtype}
    steps = Steps("gpu-overhead", out, settings, device, dtype)
    target = model_of(model, shape, device, dtype)
    for context, batch in itertools.product(contexts, batches):
        if context * batch > tokens:
            continue
        ids = text(context + new, 0.1).remainder(int(target.config.vocab_size)).to(torch.device(device))
        rows = ids.expand(batch, -1)
        for name, edit in methods(budget).items():
            label = f"{name} at {context}"
            if batch > 1:
                label += f", batch {batch}"
            steps.do(label, partial(paired, target, rows, context, edit, pairs))
    steps.end()


if __name__ == "__main__":
    run(main)
