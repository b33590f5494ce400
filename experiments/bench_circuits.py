"""What one pass saves over many: atlas, clusters and convergence, each against the direct way, in one run.

    python -m experiments.bench_circuits --out figures/bench_circuits.json [--model NAME] [--rounds 3] [--tokens 256]

Rows, with the same threads and the model loaded once:
- `atlas`: first number of repetitions that makes a sink. Arm A is the direct way: token by token, the whole model on
  BOS and `--max-repeats` repetitions, eight tokens in a batch, hidden states of every layer returned. Arm B is what
  `repeat --tokens all` runs: passes that end at the sink layer, keep one norm, and are as long as the tokens need.
- `clusters`: activation of the sink neuron for every (token, head of layer 0). Arm A runs a forward pass for each, with
  the other heads replaced by a hook; `batched` is the same with all tokens of a head in one batch. Arm B is what
  `cluster_attack` runs first.
- `converge`: distance of the first attention's output to the single token's, for every n. Arm A is N forward passes of
  1 to N repetitions, with hooks on every layer. Arm B is `repeat --read distance`, with text and bounds.

The slow arms take a sample of the tokens, and seconds are per token. Every row says whether both arms gave the same.
Ratios are medians over interleaved rounds; machines are noisy, absolute times are only there to be divided.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.record import record
from sinkscope.files.output import write_atomic
from sinkscope.measure import Setup
from sinkscope.models.target import Target, first_tensor
from sinkscope.sinks.attack.clusters import head_activations, later_mean, neuron_at
from sinkscope.sinks.first_token.sets import sink_neurons
from sinkscope.sinks.repetition.atlas import first_length, repeats_needed
from sinkscope.sinks.tokens import prefixes, sample_tokens, vocabulary


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    out = run()
    return time.perf_counter() - start, out


def atlas(made: Setup, layer: int, tokens: list[int], sample: int, limit: int, rounds: int) -> dict[str, Any]:
    """Whole passes token by token against `repeats_needed`."""
    target, some = made.target, sample_tokens(tokens, sample, made.seed + 1)
    length = first_length(made, layer, tokens, limit)
    first = dict(zip(some, prefixes(made, some), strict=True))

    @torch.no_grad()
    def direct() -> list[int | None]:
        found: list[int | None] = []
        for start in range(0, len(some), 8):
            ids = torch.tensor([[first[t], *[t] * limit] for t in some[start : start + 8]])
            states = target.hf(ids.to(target.device), output_hidden_states=True, use_cache=False).hidden_states
            norm = states[layer + 1].float().norm(dim=-1)
            for row in norm[:, 1:] >= norm[:, :1] / 2:
                hits = row.nonzero().flatten().tolist()
                found.append(hits[0] + 1 if hits else None)
        return found

    def ours() -> dict[int, int | None]:
        size = 64
        chunks = [tokens[i : i + size] for i in range(0, len(tokens), size)]
        parts = [repeats_needed(made, layer, length, limit, chunk)["repeats"] for chunk in chunks]
        return dict(zip(tokens, [n for part in parts for n in part], strict=True))

    pairs = [(timed(direct), timed(ours)) for _ in range(rounds)]
    same = all(a == [b[t] for t in some] for (_, a), (_, b) in pairs)
    return {
        "ratio": statistics.median((a / len(some)) / (b / len(tokens)) for (a, _), (b, _) in pairs),
        "same": same,
        "max_repeats": limit,
        "first_pass": length,
        "tokens": len(tokens),
        "sample": len(some),
        "seconds_per_token": [[a / len(some), b / len(tokens)] for (a, _), (b, _) in pairs],
        "resisting": sum(n is None for n in pairs[0][1][1].values()),
    }


def clusters(made: Setup, layer: int, site: Any, tokens: list[int], sample: int, rounds: int) -> dict[str, Any]:
    """A forward pass per (token, head) against `head_activations`."""
    target, some, heads = made.target, sample_tokens(tokens, sample, made.seed + 2), made.target.n_heads
    flat = site.neuron + (site.expert or 0) * target.d_mlp
    reference = float(neuron_at(target, layer, flat, made.ids[:, :1]).median())
    mean = later_mean(target, made.ids)
    width = len(mean) // heads

    @torch.no_grad()
    def direct(ids: list[list[int]]) -> Tensor:
        """`[token head]`; `ids` are the batches."""
        columns: list[Tensor] = []
        for h in range(heads):

            def ablate(_m: object, args: tuple[Tensor, ...], kwargs: dict[str, Any], h: int = h) -> Any:
                z = mean.to(args[0]).expand_as(args[0]).clone()
                part = slice(h * width, (h + 1) * width)
                z[..., part] = args[0][..., part]
                return (z, *args[1:]), kwargs

            kept: list[Tensor] = []

            def read(_m: object, args: tuple[Tensor, ...], _k: object, kept: list[Tensor] = kept) -> None:
                kept.append(args[0].reshape(-1, args[0].shape[-1])[:, flat].float().cpu())

            hooks = (
                (target.output_projection(0), "pre", ablate),
                (target.sub(layer, target.adapter.down), "pre", read),
            )
            with target.hooks(*hooks):
                for batch in ids:
                    target.hf(torch.tensor(batch, device=target.device)[:, None], use_cache=False)
            columns.append(torch.cat(kept))
        return torch.stack(columns, 1) / reference

    def ours() -> Tensor:
        size = max(1, 2048 // (heads + 2))
        chunks = [tokens[i : i + size] for i in range(0, len(tokens), size)]
        shares = [head_activations(target, layer, flat, mean, chunk) / reference for chunk in chunks]
        return torch.cat(shares)[:, 2:]

    rows = [tokens.index(t) for t in some]
    runs = [
        (timed(lambda: direct([[t] for t in some])), timed(lambda: direct([tokens])), timed(ours))
        for _ in range(rounds)
    ]
    gap = max(float((a - b[rows]).abs().max()) for (_, a), _, (_, b) in runs)
    seconds = [[a / len(some), c / len(tokens), b / len(tokens)] for (a, _), (c, _), (b, _) in runs]
    return {
        "ratio": statistics.median(a / b for a, _, b in seconds),
        "ratio_batched": statistics.median(c / b for _, c, b in seconds),
        "same": gap < 1e-3,
        "largest_difference": gap,
        "heads": heads,
        "tokens": len(tokens),
        "sample": len(some),
        "seconds_per_token": seconds,
    }


def converge(made: Setup, limit: int, rounds: int) -> dict[str, Any]:
    """N forward passes against `repeat --read distance`."""
    from sinkscope.sinks.repetition.repeat import repeat

    target: Target = made.target
    word = sample_tokens(sorted(set(made.ids[:, 1:].flatten().tolist())), 64, made.seed)
    texts = [t for t in map(target.tokenizer.decode, word) if len(target.tokenizer.tokenize(t)) == 1 and t.strip()]

    def ours() -> Any:
        return repeat(target, read="distance", tokens=texts[:1], max_repeats=limit)

    first = ours()
    token = first.reading.sweep.ids[0][0]
    text = target.tokenizer(first.settings["prefix"], add_special_tokens=False)["input_ids"]
    before = ([] if made.bos is None else [made.bos]) + text

    @torch.no_grad()
    def last(ids: list[int]) -> Tensor:
        kept: list[Tensor] = []
        hooks = [
            (
                target.output_projection(i),
                "post",
                lambda _m, _a, _k, out: kept.append(first_tensor(out)[0, -1].float()),
            )
            for i in range(target.n_layers)
        ]
        with target.hooks(*hooks):
            target.forward(torch.tensor([ids]))
        return kept[0].cpu()

    def direct() -> Tensor:
        alone = last([token])
        return torch.stack([(last([*before, *[token] * n]) - alone).norm() for n in range(1, limit + 1)])

    runs = [(timed(direct), timed(ours)) for _ in range(rounds)]
    by_hand = runs[0][0][1][torch.tensor(first.reading.sweep.counts) - 1]
    gap = float((by_hand - torch.tensor(first.reading.distance[0, 0])).abs().max() / by_hand.max())
    return {
        "ratio": statistics.median(a / b for (a, _), (b, _) in runs),
        "same": gap < 1e-3,
        "largest_difference": gap,
        "repeats": limit,
        "seconds": [[a, b] for (a, _), (b, _) in runs],
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", help="default: the model in the package")
    parser.add_argument("--device")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, help="of the vocabulary, drawn at random; default: all")
    parser.add_argument("--sample", type=int, default=16, help="tokens of the slow arms")
    parser.add_argument("--max-repeats", type=int, default=1024)
    parser.add_argument("--only", nargs="*", choices=["atlas", "clusters", "converge"])
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    from sinkscope.models.load import load

    started = time.perf_counter()
    model = load(args.model, backend="hf", device=args.device)
    made = Setup.open(model)
    sink = sink_neurons(made)
    layer, neurons = sink.layer, sink.neurons
    if layer is None or not neurons:
        raise SystemExit(f"{made.target.name} has no sink neuron: there is nothing to compare")
    every = vocabulary(made.target, None)
    tokens = every if args.tokens is None else sample_tokens(every, args.tokens, 0)
    site = max(neurons, key=lambda n: n.contribution_norm)
    rows: dict[str, Callable[[], dict[str, Any]]] = {
        "atlas": lambda: atlas(made, layer, tokens, args.sample, args.max_repeats, args.rounds),
        "clusters": lambda: clusters(made, layer, site, tokens, args.sample, args.rounds),
        "converge": lambda: converge(made, 500, args.rounds),
    }
    results: dict[str, Any] = {"model": made.info()}
    for name, row in rows.items():
        if not args.only or name in args.only:
            print(f"{name} ...", file=sys.stderr, flush=True)
            results[name] = row()
    text = record(
        "bench-circuits",
        results,
        {"rounds": args.rounds, "threads": args.threads},
        started=started,
        device=made.target.device,
        dtype=made.target.dtype,
    )
    if args.out is None:
        print(text)
    else:
        write_atomic(args.out, text)


if __name__ == "__main__":
    main()
