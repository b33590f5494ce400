"""What a token costs under cache policies and the guard, over that of the plain model.

    python -m experiments.bench_kv [--out figures/bench_kv.json] [--page figures/bench_kv.md]

`generate` samples, so that nothing loops; plain over plain shows the noise. One model is a Llama with random weights
that takes at least 20 ms a token, under `Full` and an untriggered `LoopGuard`; the other is that in the package, there
under evicting policies, too. The arms are interleaved in rotating order. A ratio is the median over rounds of arm over
plain in the same round, with a 95 % bootstrap interval. Time is the processor time of the thread that does all the
work, because other programs on the machine disturb it less than wall-clock time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sinkscope as ss
from experiments.drawn import markdown, put_table
from experiments.record import Row, write_record
from experiments.script import run
from experiments.timing import interleaved, ratio, token_seconds

SHAPE = {
    "num_hidden_layers": 12,
    "vocab_size": 8192,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
}
ALWAYS = {"plain": None, "plain_again": None, "full": ss.kv.Full(), "guard": ss.LoopGuard()}
EVICTING = {
    "streaming": ss.kv.StreamingLLM(budget=64),
    "snapkv": ss.kv.SnapKV(budget=96),
    "tova": ss.kv.TOVA(budget=64),
    "h2o": ss.kv.H2O(budget=64),
}


def llama() -> Any:
    """Random weights."""
    torch.manual_seed(0)
    return LlamaForCausalLM._from_config(LlamaConfig(**SHAPE), attn_implementation="sdpa").eval()


def measured(model: Any, policies: Row, new: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a token under each policy in each round, after a prompt of as many tokens."""
    model.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 2048, (1, new), generator=generator)

    def arm(policy: Any) -> Callable[[], float]:
        seeds = count()  # in each round another text, the same for all arms

        def once() -> float:
            torch.manual_seed(next(seeds))
            return token_seconds(model, policy, {"input_ids": ids}, new)[0]

        return once

    return interleaved({name: arm(policy) for name, policy in policies.items()}, rounds)


def ratios(seconds: dict[str, list[float]]) -> Row:
    """Each arm over the plain model in the same round."""
    return {name: ratio(own, seconds["plain"]) for name, own in seconds.items() if name != "plain"}


def table(result: Row) -> str:
    """Times over those of the plain model."""

    def shown(one: Row | None) -> str:
        if one is None:
            return "-"
        low, high = one["interval"]
        return f"{one['median']:.2f} ({low:.2f} to {high:.2f})"

    plain, big = result["bundled_microseconds_per_token"]["plain"] / 1000, result["milliseconds_per_token"]
    head = ["", f"model in the package, {plain:.1f} ms a token", f"random weights, {big:.0f} ms a token"]
    rows = [[name, shown(one), shown(result["ratio"].get(name))] for name, one in result["bundled_ratio"].items()]
    return markdown(head, rows)


def main(*, rounds: int = 36, out: Path = Path("figures/bench_kv.json"), page: Path | None = None) -> None:
    """Make what the module describes.

    Args:
        page: Replace the table in this page.
    """
    torch.set_num_threads(1)
    big = measured(llama(), ALWAYS, 32, rounds)
    small = measured(ss.load(), ALWAYS | EVICTING, 128, rounds)
    result = {
        "milliseconds_per_token": statistics.median(big["plain"]) * 1e3,
        "ratio": ratios(big),
        "bundled_microseconds_per_token": {name: statistics.median(own) * 1e6 for name, own in small.items()},
        "bundled_ratio": ratios(small),
    }
    write_record(out, "bench-kv", result, {"shape": SHAPE})
    if page is not None:
        put_table(page, "bench_kv", table(result))


if __name__ == "__main__":
    run(main)
