"""Sparse prefill against PyTorch's causal attention, and progressive decoding against the whole cache.

    python -m experiments.bench_loopserve [--lengths 2048 4096 8192] [--contexts 8192 32768] [--rounds 3]
        [--out figures/bench_loopserve.json]

Pairs are interleaved, times are CPU time of one thread, and what counts is the median of their ratios. Prefill: one
layer of 8 heads, d_head 64, lines 70 % vertical and scattered, one band at the diagonal, two lone offsets; the choice
of lines is timed apart, on planted columns and periods. Decoding: random weights (2 layers, 8 heads, width 512).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from experiments.record import record
from sinkscope.kv.loopserve import Progressive, select_lines
from sinkscope.kv.loopserve.lines import HeadLines
from sinkscope.kv.loopserve.sparse import sparse_attention
from sinkscope.output import write_atomic

HEADS, D_HEAD = 8, 64
DENSITIES = (0.02, 0.05, 0.1, 0.2, 0.5)


def seconds(fn: Callable[[], Any]) -> tuple[float, Any]:
    """CPU time of this thread, and what came out."""
    start = time.thread_time()
    out = fn()
    return time.thread_time() - start, out


def scattered(n: int, density: float, generator: torch.Generator) -> HeadLines:
    """Lines of about this share of the cells."""
    vertical = torch.rand(HEADS, n, generator=generator) < density * 0.7
    slash = torch.zeros(HEADS, n, dtype=torch.bool)
    slash[:, : max(1, int(n * density * 0.1))] = True
    slash[:, torch.randint(0, n, (2,), generator=generator)] = True
    vertical[:, 0] = True
    return HeadLines(vertical, slash, n)


def planted(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Queries and keys with 20 heavy columns and a local pattern."""
    query, key = (torch.randn(HEADS, n, D_HEAD, generator=generator) * 0.5 for _ in range(2))
    columns, direction = torch.randperm(n, generator=generator)[:20], torch.randn(D_HEAD, generator=generator)
    query += direction * 0.55
    key[:, columns] += direction * 0.9
    turn = torch.arange(n)[:, None] * torch.arange(1, 17) / 40.0
    wave = torch.cat([turn.cos(), turn.sin()], 1) * 1.9
    query[..., :32] += wave
    key[..., :32] += wave
    return query, key


def prefill(lengths: list[int], rounds: int, console: Console) -> list[dict[str, Any]]:
    """Times faster than dense, by length and density; selection as a share of dense."""
    rows: list[dict[str, Any]] = []
    for n in lengths:
        generator = torch.Generator().manual_seed(0)
        query, key, value = (torch.randn(HEADS, n, D_HEAD, generator=generator) for _ in range(3))
        q, k = planted(n, generator)

        def dense(q: Tensor = query, k: Tensor = key, v: Tensor = value) -> Tensor:
            return functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)

        choice = [seconds(lambda: select_lines(q, k, 0.955))[0] / seconds(dense)[0] for _ in range(rounds)]  # noqa: B023
        rows.append({"n": n, "selection_over_dense": median(choice), "pairs": choice})
        for density in DENSITIES:
            lines, pairs, work = scattered(n, density, generator), [], None
            for _ in range(rounds):
                base, _out = seconds(dense)
                ours, (_out, work) = seconds(lambda: sparse_attention(query, key, value, lines))  # noqa: B023
                pairs.append(base / ours)
            assert work is not None
            rows.append({
                "n": n, "cells": sum(work.cells) / HEADS, "computed": sum(work.computed) / HEADS,
                "dense_heads": sum(work.dense), "times_faster": median(pairs), "pairs": pairs,
            })  # fmt: skip
            console.print(f"{n}: {rows[-1]['cells']:.1%} of cells, {median(pairs):.2f} times faster than dense")
    return rows


def decoding(contexts: list[int], rounds: int, console: Console) -> list[dict[str, Any]]:
    """Milliseconds a step, everything against 1,024 chosen tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, vocab_size=256, max_position_embeddings=max(contexts) + 100,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    token = torch.zeros(1, 1, dtype=torch.long)

    def steps(n: int, policy: Progressive | None) -> list[float]:
        cache = DynamicCache(config=model.config)
        for layer in range(2):
            cache.update(torch.randn(1, HEADS, n, D_HEAD), torch.randn(1, HEADS, n, D_HEAD), layer)
        with nullcontext() if policy is None else policy.on(model), torch.no_grad():
            model(input_ids=token.expand(1, 20), past_key_values=cache, use_cache=True)
            return [
                1e3 * seconds(lambda: model(input_ids=token, past_key_values=cache, use_cache=True))[0]
                for _ in range(33)
            ]

    rows: list[dict[str, Any]] = []
    for n in contexts:
        whole, part = [], []
        for _ in range(rounds):
            whole.append(steps(n, None))
            part.append(steps(n, Progressive(budget=1024, after=0)))
        ratios = [sum(a) / sum(b) for a, b in zip(whole, part, strict=True)]
        rows.append({
            "context": n, "budget": 1024, "whole_ms": median(median(a) for a in whole),
            "between_selections_ms": median(median(a) for a in part),
            "mean_ms": median(sum(a) / len(a) for a in part), "times_faster": median(ratios), "pairs": ratios,
        })  # fmt: skip
        console.print(f"context {n}: {rows[-1]['times_faster']:.2f} times faster over all steps")
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("figures/bench_loopserve.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    console, started = Console(stderr=True), time.perf_counter()
    result = {
        "prefill": prefill(args.lengths, args.rounds, console),
        "decoding": decoding(args.contexts, args.rounds, console),
    }
    settings = {"lengths": args.lengths, "contexts": args.contexts, "rounds": args.rounds, "threads": 1}
    write_atomic(args.out, record("bench-loopserve", result, settings, started=started))


if __name__ == "__main__":
    main()
