"""What a token costs on a GPU under guard and policies, over stock attention, by context.

    python -m experiments.gpu.overhead [--model NAME] [--contexts 4096 32768] [--batches 1 16] [--out FILE]

Without `--model`, random weights of 7B shape. Each method decodes the same tokens after the same prompt as the stock
model, in rounds whose order rotates; the ratio is the median over rounds with a 95 % bootstrap interval, of all tokens
and of the median token behind the first, in which a policy cuts the prompt's cache. Full, an untriggered LoopGuard,
StreamingLLM, SnapKV, TOVA, H2O and LoopServe's decoding. A step is a context and a batch, with half as many rounds
where a prompt is longer than 4,096 tokens in all; a method for which memory does not suffice says so. No step begins
after `--seconds`.
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
from transformers import DynamicCache

from experiments.gpu.steps import Steps, model_of
from experiments.planted_lines import text
from experiments.record import Row
from experiments.script import run
from experiments.timing import clock, interleaved, ratio, seconds_of
from sinkscope.hooks.edit.base import Intervention, under
from sinkscope.kv import H2O, TOVA, Full, SnapKV, StreamingLLM
from sinkscope.loops.guard import LoopGuard
from sinkscope.models.target import Target
from sinkscope.sparse.serve import LoopServe


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


@torch.no_grad()
def turn(target: Target, edit: Intervention | None, ids: Int[Tensor, "batch pos"], context: int) -> list[float]:
    """Seconds of every call that reads `context` tokens at once and the others one by one."""
    cache, seconds = DynamicCache(config=target.hf.config), list[float]()
    with under(edit, target):
        for begin, end in [(0, context), *((i, i + 1) for i in range(context, ids.shape[1]))]:
            call = partial(target.hf, input_ids=ids[:, begin:end], past_key_values=cache, use_cache=True)
            seconds.append(seconds_of(partial(call, logits_to_keep=1), partial(clock, target.device))[0])
    return seconds


def overhead(target: Target, ids: Int[Tensor, "batch pos"], context: int, budget: int, rounds: int) -> Row:
    """Each method over stock: milliseconds of a token, and their ratio."""

    def read(edit: Intervention | None) -> list[float] | str:
        try:
            return turn(target, edit, ids, context)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            return str(error).partition(". ")[0]

    arms = {"stock": partial(read, None)}
    for name, edit in methods(budget).items():
        arms[name] = partial(read, edit)
    runs = interleaved(arms, rounds)
    seconds: dict[str, list[float]] = {}
    later: dict[str, list[float]] = {}
    rows: Row = {"context": context, "batch": len(ids)}
    for name, made in runs.items():
        failed = [one for one in made if isinstance(one, str)]
        if failed:
            rows[name] = {"error": failed[0]}
        else:
            seconds[name] = [sum(one[1:]) for one in made if not isinstance(one, str)]
            later[name] = [statistics.median(one[2:]) for one in made if not isinstance(one, str)]
    stock = seconds.pop("stock")
    rows["stock_ms_per_token"] = 1000 * statistics.median(stock) / (ids.shape[1] - context)
    for name, spent in seconds.items():
        rows[name] = {**ratio(spent, stock), "later": ratio(later[name], later["stock"])}
    return rows


def main(
    *,
    model: str | None = None,
    shape: str = "lines-7b",
    contexts: Sequence[int] = (4096, 32768),
    batches: Sequence[int] = (1, 16),
    tokens: int = 1 << 16,
    new: int = 32,
    rounds: int = 4,
    budget: int = 1024,
    seconds: float = 600.0,
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
        seconds: No step begins after so many.
    """
    settings = {"model": model, "shape": shape, "new": new, "rounds": rounds, "budget": budget, "dtype": dtype}
    steps = Steps("gpu-overhead", out, settings, device, dtype, seconds)
    target = model_of(model, shape, device, dtype)
    ids = text(max(contexts) + new).remainder(int(target.config.vocab_size))
    ids = ids.to(torch.device(device))
    for context, batch in itertools.product(contexts, batches):
        if context * batch > tokens:
            continue
        few = rounds if context * batch <= min(contexts) else max(2, rounds // 2)
        given = ids[:, : context + new].expand(batch, -1)
        work = partial(overhead, target, given, context, budget, few)
        steps.do(f"{context} tokens, batch {batch}", work)
    steps.end()


if __name__ == "__main__":
    run(main)
