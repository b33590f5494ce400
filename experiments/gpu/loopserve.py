"""LoopServe on a GPU: sparse prompts, the choice of lines, whole prompts, decoding from a part of the cache, latency.

    python -m experiments.gpu.loopserve [--model NAME|FOLDER] [--out figures/gpu_loopserve.json] [--device cuda]
        [--sections prefill selection prompt decoding latency] [--minutes 9]

Without `--model` the model has the shape of a 7B one, random bfloat16 weights, and planted lines in every layer (half
of the heads attend to one offset, half to marked tokens, a tenth of the text).

- `prefill`: one layer, random lines (70 % of the cells vertical and scattered, one band at the diagonal, two
  lone offsets; at a density of 0, up to a hundred of these alone) by density and length: times faster than
  causal `scaled_dot_product_attention` (on CUDA in half precision: its flash kernel), everything counted that
  depends on the lines; `kernel` says what computed them, `dense_heads` where plain attention was taken instead, since
  the lines fill too many blocks. `same` compares with PyTorch under the same mask, at a short length.
- `selection`: queries and keys of the model's middle layer: the choice of lines (alpha 0.955) and attention along
  them, over causal attention, and the mass that the lines hold on 64 drawn rows (`mass`, by head the least).
- `prompt`: the whole model reads a prompt, with `LoopServe()` and with its own attention (`sdpa`); `mass` is
  what the events say about held-out rows, over layers and heads.
- `decoding`: one token at a time behind a prompt, from the whole cache and from 1,024 chosen tokens; steps that choose
  and steps between them apart.
- `latency`: `experiments.loopserve.latency` on this model: arms by context and by length of the answer.

Pairs are interleaved; ratios are medians over pairs. The JSON is written after every row, a section begins nothing new
after `--minutes`, and a second call keeps the sections that it does not run. Needs torch, transformers, accelerate,
jaxtyping; no network, no TransformerLens, no nnsight.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from experiments.bench_lines import SHAPES
from experiments.loopserve.latency import OUTPUTS, arms, rows_of, shape_of, text, turn
from experiments.record import record
from sinkscope.files.console import note
from sinkscope.files.output import write_atomic
from sinkscope.interventions.base import Intervention, Run
from sinkscope.kv.loopserve import LoopServe, Progressive
from sinkscope.kv.session import Session
from sinkscope.lines import Sparsity, select_lines, sparse_attention
from sinkscope.lines.attention import recovered
from sinkscope.lines.head_lines import HeadLines
from sinkscope.models.target import Target
from sinkscope.opening.live import target_of
from sinkscope.opening.load import load
from sinkscope.tap.call import Attention

SECTIONS = ("prefill", "selection", "prompt", "decoding", "latency")
DENSITIES = (0, 0.02, 0.05, 0.1, 0.2, 0.5)
LONE = 100  # lone offsets where the density is 0
DECODED = 32768  # longest prompt behind which tokens are decoded, for batches of four
Rows = Iterator[dict[str, Any]]


def clock() -> float:
    """Seconds, when the device has done everything it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(fn: Callable[[], Any]) -> float:
    start = clock()
    fn()
    return clock() - start


def pairs_of(base: Callable[[], Any], other: Callable[[], Any], rounds: int) -> list[tuple[float, float]]:
    """Seconds of both, interleaved; once before, for kernels that are chosen or compiled at first use."""
    base(), other()
    return [(seconds(base), seconds(other)) for _ in range(rounds)]


def faster(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    return {
        "times_faster": statistics.median(a / b for a, b in pairs),
        "ms": 1e3 * statistics.median(b for _, b in pairs),
        "dense_ms": 1e3 * statistics.median(a for a, _ in pairs),
        "pairs": [a / b for a, b in pairs],
    }


def dense(query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None) -> Tensor:
    grouped = query.shape[0] != key.shape[0]
    flash = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
    only: AbstractContextManager[Any] = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if flash else nullcontext()
    with only:
        return scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, enable_gqa=grouped, scale=scaling
        )[0]


def said(work: Sparsity) -> dict[str, Any]:
    cells, computed = statistics.fmean(work.cells), statistics.fmean(work.computed)
    return {"cells": cells, "computed": computed, "dense_heads": sum(work.dense), "kernel": work.kernel}


def scattered(heads: int, n: int, density: float, device: torch.device) -> HeadLines:
    """Lines of about this share of the cells, others in every head; with a density of 0, lone offsets alone."""
    generator = torch.Generator().manual_seed(0)
    vertical = torch.rand(heads, n, generator=generator) < density * 0.7
    slash = torch.zeros(heads, n, dtype=torch.bool)
    slash[:, : max(1, int(n * density * 0.1))] = True
    lone = min(LONE, n // 80) if not density else 2
    slash[:, torch.randint(0, n, (lone,), generator=generator)] = True
    vertical[:, 0] = True
    return HeadLines(vertical.to(device), slash.to(device), n)


def same(heads: int, width: int, args: argparse.Namespace) -> float:
    """Largest difference from PyTorch's attention under the same mask, over the largest output."""
    n, device, dtype = min(512, min(args.lengths)), torch.device(args.device), getattr(torch, args.dtype)
    query, key, value = (torch.randn(heads, n, width, device=device, dtype=dtype) for _ in range(3))
    lines = scattered(heads, n, 0.1, device)
    mask = lines.rows(torch.arange(n, device=device))
    wanted = scaled_dot_product_attention(query[None].float(), key[None].float(), value[None].float(), mask[None])[0]
    found, _ = sparse_attention(query, key, value, lines, dense_above=torch.inf)
    return float((found.float() - wanted).abs().max() / wanted.abs().max())


@torch.no_grad()
def prefill(target: Target, args: argparse.Namespace) -> Rows:
    """The curve over density and length."""
    config, device, dtype = target.config, torch.device(args.device), getattr(torch, args.dtype)
    heads, kv = config.num_attention_heads, target.n_kv_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    torch.manual_seed(0)
    yield {"same": same(heads, width, args)}
    for n in args.lengths:
        query = torch.randn(heads, n, width, device=device, dtype=dtype)
        key, value = (torch.randn(kv, n, width, device=device, dtype=dtype) for _ in range(2))
        for density in DENSITIES:
            lines = scattered(heads, n, density, device)
            along = partial(sparse_attention, query, key, value, lines)
            work = along()[1]
            pairs = pairs_of(partial(dense, query, key, value), along, args.rounds)
            yield {"n": n, "density": density, **said(work), **faster(pairs)}


@dataclass(frozen=True, eq=False)
class Seen(Intervention):
    """Keeps queries, keys and values of one layer's prompt."""

    layer: int
    found: list[tuple[Tensor, Tensor, Tensor, float | None]] = field(default_factory=list)

    def enter(self, run: Run, key: int) -> None:
        """Look on; attention stays the model's own."""

        def see(prompt: Attention, _kv: object) -> None:
            if prompt.layer == self.layer:
                held = (prompt.query[0].clone(), prompt.key[0].clone(), prompt.value[0].clone())
                self.found.append((*held, prompt.scaling))

        Session.of(run).replace_prefill(see)


@torch.no_grad()
def selection(target: Target, args: argparse.Namespace) -> Rows:
    """Choice of lines, and attention along them, over dense attention."""
    for n in args.lengths:
        seen = Seen(target.n_layers // 2)
        with seen.on(target):
            target.base(input_ids=args.ids[:, :n], use_cache=False)
        ((query, key, value, scaling),) = seen.found

        attend = partial(dense, query, key, value, scaling)
        choose = partial(select_lines, query, key, 0.955, scaling=scaling)
        lines, choice = choose(), pairs_of(attend, choose, args.rounds)
        rows = torch.randperm(n, generator=torch.Generator().manual_seed(0))[:64]
        held = recovered(query, key, lines, scaling, rows)
        along = partial(sparse_attention, query, key, value, scaling=scaling)
        work, alone = along(lines)[1], pairs_of(attend, partial(along, lines), args.rounds)
        both = pairs_of(attend, lambda along=along, choose=choose: along(choose()), args.rounds)
        yield {
            "n": n,
            "layer": seen.layer,
            **said(work),
            "mass": {"mean": float(held.mean()), "least": float(held.min())},
            "selection_over_dense": statistics.median(b / a for a, b in choice),
            "selection_ms": 1e3 * statistics.median(b for _, b in choice),
            "attention": faster(alone),
            "with_selection": faster(both),
        }


@torch.no_grad()
def prompt(target: Target, args: argparse.Namespace) -> Rows:
    """Whole prompts, with `LoopServe()` and with the model's own attention."""
    for n in args.lengths:
        ids = args.ids[:, :n]
        own = partial(target.base, input_ids=ids, use_cache=False)
        edit, events = LoopServe(decode=False, shortest=0), list[dict[str, Any]]()

        def sparse(ids: Tensor = ids, edit: LoopServe = edit, events: list[dict[str, Any]] = events) -> None:
            with edit.on(target) as run:
                target.base(input_ids=ids, use_cache=False)
            events[:] = [dict(event.data) for event in run.events if event.kind == "prefill"]

        pairs = pairs_of(own, sparse, args.rounds)
        held = [share for data in events for share in data.get("recovered", ())]
        yield {
            "n": n,
            "kernel": sorted({data["kernel"] for data in events if "kernel" in data}),
            "model_s_own": sorted({data["dense"] for data in events if "dense" in data}),
            "attended": statistics.fmean(data.get("attended", 1.0) for data in events),
            "mass": {"mean": statistics.fmean(held), "least": min(held)} if held else None,
            **faster(pairs),
        }


def steps(found: dict[str, Any], interval: int | None) -> dict[str, float]:
    """Milliseconds of a decoding step: all, those that choose, those between."""
    each = [1e3 * s for s in found["seconds"][1:]]
    if interval is None:
        return {"median_ms": statistics.median(each), "mean_ms": statistics.fmean(each)}
    between = [ms for i, ms in enumerate(each) if i % interval]
    return {
        "mean_ms": statistics.fmean(each),
        "between_ms": statistics.median(between),
        "choosing_ms": statistics.median(each[::interval]),
        "tokens_read": found["read"],
    }


def decoding(target: Target, args: argparse.Namespace) -> Rows:
    """The whole cache against chosen tokens, by context and rows of the batch."""
    for rows in args.rows:
        for context in (n for n in args.lengths if n <= DECODED):
            ids = args.ids[:, : context + args.steps].expand(rows, -1)
            part = Progressive(budget=args.budget, after=0)
            turn(target, part, ids[:, : context + 2], context, clock)  # kernels, and room for the cache
            found = [
                (turn(target, None, ids, context, clock), turn(target, part, ids, context, clock))
                for _ in range(args.rounds)
            ]
            ratios = [sum(a["seconds"][1:]) / sum(b["seconds"][1:]) for a, b in found]
            whole, some = found[len(found) // 2]
            yield {
                "context": context,
                "rows": rows,
                "budget": args.budget,
                "steps": args.steps,
                "times_faster": statistics.median(ratios),
                "pairs": ratios,
                "whole": steps(whole, None),
                "part": steps(some, part.interval),
                "logical": some["logical"],
                "physical": some["physical"],
            }


def latency(target: Target, args: argparse.Namespace) -> Rows:
    """Arms by context, interleaved; every run is a row, `rows_of` makes the table of them."""
    choices = {arm: edit for arm, edit in arms(args.budget, args.shortest).items() if arm in args.arms}
    longest, cuda = args.outputs[-1], args.device.startswith("cuda")
    for context in args.contexts:
        for arm in ("full", "loopserve"):  # kernels
            turn(target, choices[arm], args.ids[:, : context + 2], context, clock)
        for number in range(args.rounds):
            for arm, edit in choices.items():
                before = torch.cuda.memory_allocated() if cuda else 0
                if cuda:
                    torch.cuda.reset_peak_memory_stats()
                found = turn(target, edit, args.ids[:, : context + longest], context, clock)
                peak = torch.cuda.max_memory_allocated() - before if cuda else None
                yield {"context": context, "round": number, "arm": arm, "peak": peak, **found}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.gpu.loopserve", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", help="short name, hub id or folder; default: a 7B shape with planted lines")
    parser.add_argument("--shape", default="lines-7b", choices=sorted(SHAPES), help="without --model")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--out", type=Path, default=Path("figures/gpu_loopserve.json"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--minutes", type=float, default=9, help="of a section")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768, 65536, 131072])
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768], help="of latency")
    parser.add_argument("--outputs", type=int, nargs="+", default=list(OUTPUTS))
    parser.add_argument(
        "--arms",
        nargs="+",
        default=["full", "loopserve", "loopserve-p", "loopserve-d", "snapkv", "adakv", "minference"],
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4], help="of the batch, decoding")
    parser.add_argument("--steps", type=int, default=64, help="decoding")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--shortest", type=int, default=2048)
    parser.add_argument("--quick", action="store_true", help="tiny lengths, to see that it works")
    args = parser.parse_args(argv)
    if args.quick:
        args.lengths, args.contexts, args.outputs, args.rows, args.steps = [128, 256], [128, 192], [4, 8], [1, 2], 20
        args.budget, args.shortest, args.rounds = 80, 0, 1
    args.outputs = sorted(set(args.outputs))
    return args


def model_of(args: argparse.Namespace) -> Target:
    """The model in memory, on the device."""
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    if args.model is not None:
        return target_of(load(args.model, backend="hf", device=device, dtype=args.dtype))
    with device:
        target = shape_of(args.shape, 0)
    for parameter in target.hf.parameters():  # buffers stay as they are: positions need float32
        parameter.data = parameter.data.to(dtype)
    return target


def ids_of(target: Target, length: int, made: bool) -> Tensor:
    """The text that all sections read, over and over if it is short: `[1 pos]`."""
    if made:
        return text(length, 0, 0.1).to(target.device)
    from sinkscope.models.text import typical_text

    tokens = target.tokenizer(typical_text(), return_tensors="pt").input_ids
    return tokens.repeat(1, -(-length // tokens.shape[1]))[:, :length].to(target.device)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    args = parse(argv)
    started, device = time.perf_counter(), torch.device(args.device)
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "sections", "minutes")}
    settings["hardware"] = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    target = model_of(args)
    settings["model"] = target.name
    longest = max(max(args.lengths) + args.steps, max(args.contexts) + args.outputs[-1])
    if target.max_positions is not None and target.max_positions < longest:
        room = target.max_positions - max(args.steps, args.outputs[-1])
        args.lengths, args.contexts = ([n for n in ns if n <= room] for ns in (args.lengths, args.contexts))
        note(f"{target.name} reads {target.max_positions} tokens: lengths above {room} are left out")
    args.ids = ids_of(target, longest, args.model is None)
    result = _earlier(args.out, settings)

    def write() -> None:
        text = record("gpu-loopserve", result, settings, started=started, device=device, dtype=args.dtype)
        write_atomic(args.out, text)

    work = {"prefill": prefill, "selection": selection, "prompt": prompt, "decoding": decoding, "latency": latency}
    for section in args.sections:
        began, rows = time.perf_counter(), list[dict[str, Any]]()
        result[section] = {"rows": rows, "complete": False}
        for row in work[section](target, args):
            rows.append(row)
            spent = time.perf_counter() - began
            result[section]["seconds"] = round(spent, 1)
            write()
            note(f"{section} {spent:.0f} s: {json.dumps({k: v for k, v in row.items() if not isinstance(v, list)})}")
            if spent > 60 * args.minutes:
                break
        else:
            result[section]["complete"] = True
        if section == "latency":
            result[section] |= {"runs": rows, "rows": rows_of(rows, args.outputs)}
        write()
    print(args.out.read_text(), end="")


def _earlier(file: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Sections of an earlier call with the same settings."""
    try:
        held = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return held["result"] if held.get("settings") == json.loads(json.dumps(settings)) else {}


if __name__ == "__main__":
    main()
