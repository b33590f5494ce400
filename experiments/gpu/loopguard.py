"""LoopGuard on a GPU: what it costs while it watches, what caches hold, and LoopBench's small set.

    python -m experiments.gpu.loopguard [--model NAME|FOLDER] [--out figures/gpu_loopguard.json] [--device cuda]

Without `--model` a 7B-shaped bfloat16 checkpoint is written for cost and bytes (to a temporary folder unless `--folder`
is given), and LoopBench runs on the model in the package, the largest trained member of its family. With `--model`
everything runs on that one.

Cost: decoding one token at a time along a given random text, which sets off no alarm, with LoopGuard and without, in
interleaved pairs whose order alternates; the ratio is the median over pairs with a 95 % bootstrap interval, and the
logits must be the same. Needs torch, transformers, accelerate, jaxtyping; no network, no TransformerLens, no nnsight.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from experiments.gpu.steps import clock, planted
from experiments.record import record
from sinkscope.bench.methods import read_method
from sinkscope.bench.prompt import read_prompts
from sinkscope.bench.run import run_bench
from sinkscope.bench.table import bench_table
from sinkscope.bench.tasks.loops import DATA, Loops
from sinkscope.files.output import write_atomic
from sinkscope.interventions.base import Intervention
from sinkscope.kv import H2O, Full, SnapKV, StreamingLLM
from sinkscope.kv.loopguard import LoopGuard
from sinkscope.models.target import Target
from sinkscope.opening.live import target_of
from sinkscope.opening.load import load

METHODS = (
    "full",
    "streaming",
    "h2o",
    "snapkv",
    "loopguard",
    "loopguard:paper:variant=always",
    "loopguard:paper:variant=p1",
)


@torch.no_grad()
def decode(target: Target, ids: torch.Tensor, prompt: int, edit: Intervention | None) -> dict[str, Any]:
    """Read `ids[:, :prompt]`, then the rest token by token; seconds are of the latter.

    Args:
        target: the model.
        ids: [row pos].
        prompt: tokens read at once.
        edit: what acts meanwhile.

    Returns:
        "seconds", "logits" after the last token, "events", and "usage" under an intervention.
    """
    device = ids.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with edit.on(target) if edit is not None else nullcontext() as run:
        cache = DynamicCache(config=target.hf.config)
        out = target.hf(input_ids=ids[:, :prompt], past_key_values=cache, use_cache=True, logits_to_keep=1)
        start = clock(device)
        for i in range(prompt, ids.shape[1]):
            out = target.hf(input_ids=ids[:, i : i + 1], past_key_values=cache, use_cache=True)
        seconds = clock(device) - start
        events, usage = ([], None) if run is None else (run.events, run.usage)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {
        "seconds": seconds,
        "logits": out.logits[:, -1].float().cpu(),
        "events": len(events),
        "usage": usage[0] if usage else None,
        "peak_device_bytes": int(peak),
    }


def median_ratio(pairs: Sequence[tuple[float, float]], draws: int = 2000) -> dict[str, Any]:
    """Median of b / a over pairs (a, b), and a 95 % bootstrap interval of it."""
    ratios = [b / a for a, b in pairs]
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    low, high = medians[int(0.025 * draws)], medians[int(0.975 * draws) - 1]
    return {"median": statistics.median(ratios), "low": low, "high": high, "pairs": len(ratios)}


def cost(target: Target, ids: torch.Tensor, prompt: int, pairs: int) -> dict[str, Any]:
    """LoopGuard untriggered against no guard."""
    new = ids.shape[1] - prompt
    guard = LoopGuard(budget=1024)
    decode(target, ids, prompt, None)  # the first ones choose kernels and grow the allocator
    decode(target, ids, prompt, guard)
    seconds: list[tuple[float, float]] = []
    same, events = True, 0
    for i in range(pairs):
        order = (None, guard) if i % 2 == 0 else (guard, None)
        made = {edit is None: decode(target, ids, prompt, edit) for edit in order}
        seconds.append((made[True]["seconds"], made[False]["seconds"]))
        same &= torch.equal(made[True]["logits"], made[False]["logits"])
        events += made[False]["events"]
    stock = statistics.median(a for a, _ in seconds)
    return {
        "ratio": median_ratio(seconds),
        "stock_ms_per_token": 1000 * stock / new,
        "same_logits": same,
        "interventions": events,
        "prompt_tokens": prompt,
        "new_tokens": new,
        "rows": ids.shape[0],
    }


def held(target: Target, ids: torch.Tensor, prompt: int, budget: int) -> dict[str, Any]:
    """What the cache of each method holds on the same text, and the time of a token."""
    always = LoopGuard.paper(
        budget=budget, variant="always", monitor={"every": max(1, (ids.shape[1] - prompt) // 2), "warmup": 0}
    )
    edits: dict[str, Intervention] = {
        "full": Full(),
        "streaming": StreamingLLM(budget=budget),
        "h2o": H2O(budget=budget),
        "snapkv": SnapKV(budget=budget),
        "loopguard, untriggered": LoopGuard(budget=budget),
        "loopguard, cut twice": always,
    }
    rows: dict[str, Any] = {}
    for name, edit in edits.items():
        made = decode(target, ids, prompt, edit)
        usage = made["usage"]
        rows[name] = {
            "mean_tokens": statistics.fmean(usage.mean_tokens),
            "peak_tokens": max(usage.peak_tokens),
            "logical_bytes": usage.logical_bytes,
            "physical_bytes": usage.physical_bytes,
            "peak_device_bytes": made["peak_device_bytes"],
            "interventions": made["events"],
            "ms_per_token": 1000 * made["seconds"] / (ids.shape[1] - prompt),
        }
    return rows


def loopbench(live: Any, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """The small set: a row per set and method."""
    prompts = [*read_prompts(DATA / "small-dc.jsonl"), *read_prompts(DATA / "small-ri.jsonl")]
    prompts = prompts[:: max(1, len(prompts) // args.prompts)][: args.prompts]
    budget = args.bench_budget
    names = [read_method(name, budget).spec for name in args.methods.split(",") if name]
    options = {"max_new_tokens": args.max_new_tokens, "batch_size": args.batch_size}
    run_bench(live, Loops(given=tuple(prompts)), names, out=folder, **options)
    table = bench_table([Path(folder)])
    return {"rows": table.rows(), "text": table.text(), "prompts": len(prompts), "budget": budget}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.gpu.loopguard", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", help="short name, hub id or folder; default: a 7B shape, and the model that ships")
    parser.add_argument("--shape", default="llama-2-7b", help="shape of the checkpoint that is made")
    parser.add_argument("--out", type=Path, default=Path("figures/gpu_loopguard.json"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is kept; default: a temporary folder")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--budget", type=int, default=1024, help="of the caches that are measured")
    parser.add_argument("--bench-budget", type=int, default=256, help="of LoopBench; its small prompts have 800 tokens")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--prompts", type=int, default=24, help="of LoopBench's small set")
    parser.add_argument("--max-new-tokens", type=int, default=2500, help="of LoopBench")
    parser.add_argument("--batch-size", type=int, default=24)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    args = parse(argv)
    device, started = torch.device(args.device), time.perf_counter()
    rows: dict[str, Any] = {}
    made = args.model is None
    checkpoint = planted(args.shape, args.folder, "bfloat16") if made else nullcontext((args.model, None))
    with tempfile.TemporaryDirectory() as folder, checkpoint as (model, _):
        live = load(model, backend="hf", device=device, dtype=args.dtype, probe=not made)
        target = target_of(live)
        generator = torch.Generator().manual_seed(0)
        vocab = int(target.hf.config.get_text_config().vocab_size)
        ids = torch.randint(vocab // 8, vocab, (1, args.prompt_tokens + args.new_tokens), generator=generator)
        ids = ids.to(device)
        rows["cost"] = cost(target, ids, args.prompt_tokens, args.pairs)
        rows["caches"] = held(target, ids, args.prompt_tokens, args.budget)
        measured = target.name
        if made:
            del live, target
            if device.type == "cuda":
                torch.cuda.empty_cache()
            live = load(None, backend="hf", device=device, dtype="float32")
        began = time.perf_counter()
        rows["loopbench"] = loopbench(live, str(Path(folder) / "runs"), args)
        rows["loopbench"]["model"] = target_of(live).name
        rows["loopbench"]["seconds"] = round(time.perf_counter() - began, 1)
    print(rows["loopbench"].pop("text"))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    settings = {
        "model": measured,
        "shape": args.shape if made else None,
        "hardware": name,
        "budget": args.budget,
        "methods": args.methods,
        "max_new_tokens": args.max_new_tokens,
        "batch_size": args.batch_size,
    }
    text = record("gpu-loopguard", rows, settings, started=started, device=device, dtype=args.dtype)
    print(text)
    write_atomic(args.out, text)


if __name__ == "__main__":
    main()
