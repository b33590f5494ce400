"""What a token costs on a GPU under guard and policies, over stock attention, by context.

    python -m experiments.gpu.overhead [--shape lines-7b] [--contexts 4096 32768 131072] [--out FILE]

Random weights of 7B shape. Each method decodes the same tokens behind the same prompt as the stock model, in pairs
whose order alternates; the ratio is the median over pairs with a 95 % bootstrap interval. Full, an untriggered
LoopGuard, H2O, SnapKV and LoopServe's decoding. A step is a method at a context. Needs torch, transformers,
accelerate, jaxtyping.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from experiments.bench_lines import SHAPES
from experiments.gpu.loopguard import decode, median_ratio
from experiments.gpu.loopserve import model_of
from experiments.gpu.steps import Steps, options
from experiments.loopserve.latency import text
from sinkscope.interventions.base import Intervention
from sinkscope.kv import H2O, Full, SnapKV
from sinkscope.kv.loopguard import LoopGuard
from sinkscope.kv.loopserve import LoopServe
from sinkscope.models.target import Target


def methods(budget: int) -> dict[str, Intervention]:
    """What is measured, by name."""
    return {
        "full": Full(),
        "loopguard, untriggered": LoopGuard(budget),
        "loopserve, decoding": LoopServe(budget, prefill=False),
        "snapkv": SnapKV(budget),
        "h2o": H2O(budget),
    }


def paired(target: Any, ids: torch.Tensor, context: int, edit: Intervention, pairs: int) -> dict[str, Any]:
    """The method over stock."""
    decode(target, ids[:, : context + 4], context, None)  # the first ones choose kernels and grow the allocator
    decode(target, ids[:, : context + 4], context, edit)
    found = []
    for i in range(pairs):
        order = (None, edit) if i % 2 == 0 else (edit, None)
        made = {one is None: decode(target, ids, context, one) for one in order}
        found.append((made[True], made[False]))
    new = ids.shape[1] - context
    return {
        "context": context,
        "ratio": median_ratio([(a["seconds"], b["seconds"]) for a, b in found]),
        "stock_ms_per_token": 1000 * sorted(a["seconds"] for a, _ in found)[pairs // 2] / new,
        "same_logits": all(torch.equal(a["logits"], b["logits"]) for a, b in found),
        "peak": found[0][1]["peak_device_bytes"],
    }


def opened(
    about: str | None, argv: Sequence[str] | None, name: str, varied: str, values: Sequence[int], **numbers: int
) -> tuple[argparse.Namespace, Steps, Target]:
    """The command line of a part on random weights of a shape, its steps, and the model.

    Args:
        about: text of the module.
        argv: the words; None: those of the process.
        name: of the part.
        varied: an option that takes several numbers; results of other numbers are taken over.
        values: its defaults.
        numbers: the other options, with their defaults.
    """

    def add(option: Any) -> None:
        option("--shape", default="lines-7b", choices=sorted(SHAPES))
        option(f"--{varied}", type=int, nargs="+", default=list(values))
        for word, default in numbers.items():
            option(f"--{word}", type=int, default=default)

    args = options(about, argv, name, add)
    args.model = None
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "model", varied)}
    return args, Steps(f"gpu-{name}", args.out, settings, torch.device(args.device), args.dtype), model_of(args)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    contexts = [4096, 32768, 131072]
    args, steps, target = opened(__doc__, argv, "overhead", "contexts", contexts, new=64, pairs=5, budget=1024)
    for context in args.contexts:
        ids = text(context + args.new, 0, 0.1).to(target.device)
        for name, edit in methods(args.budget).items():
            steps.do(
                f"{name} at {context}",
                lambda ids=ids, edit=edit, context=context: paired(target, ids, context, edit, args.pairs),
            )
    steps.end()


if __name__ == "__main__":
    main()
