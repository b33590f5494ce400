"""LoopServe on a GPU: sparse prompts, the choice of lines, whole prompts, latency.

    python -m experiments.gpu.loopserve [--model NAME|FOLDER] [--out figures/gpu_loopserve.json] [--device cuda]

Without `--model` the model has the shape of a 7B one, random bfloat16 weights, and planted lines in every layer (half
of the heads attend to one offset, half to marked tokens, a tenth of the text). A step that is done is not done again.

- `prefill`: one layer, random lines (70 % of the cells vertical and scattered, one band at the diagonal, two
  lone offsets) by density and length: times faster than
  causal `scaled_dot_product_attention` (on CUDA in half precision: its flash kernel), everything counted that
  depends on the lines; `kernel` says what computed them, `dense_heads` where plain attention was taken instead, since
  the lines fill too many blocks. A slow test compares the kernel with PyTorch under the same mask.
- `lone lines`: one layer on 1,000 random columns and this number of lone offsets, over dense attention; and
  FlexAttention with a block mask of the same lines, which computes every block that a line touches.
- `selection`: queries and keys of the model's middle layer: the choice of lines, with LoopServe's settings and with
  the paper's alpha (`selection 0.955`), and attention along them, over causal attention, and the mass that the lines
  hold on 64 drawn rows (`mass`, by head the least).
- `prompt`: the whole model reads a prompt, along lines whatever that costs (`shortest=0`) and with its own attention
  (`sdpa`); `mass` is what the events say about held-out rows, over layers and heads.
- `usual prompt`: the same with `LoopServe()` as users have it, which leaves short prompts to the model's own attention.
- latency: `experiments.loopserve.latency` on this model: a step for each arm and context. `experiments.gpu.overhead`
  measures decoding alone, in pairs.

Needs torch, transformers, accelerate, jaxtyping; no network, no TransformerLens, no nnsight.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from experiments.gpu.steps import Steps, model_of
from experiments.loopserve.latency import arms, turn
from experiments.planted_lines import text
from experiments.record import Row
from experiments.script import run
from experiments.timing import clock, faster, pairs_of, seconds_of
from sinkscope.hooks.edit.base import Intervention, Run
from sinkscope.kv.session import Session
from sinkscope.lines import Sparsity, sparse_attention
from sinkscope.lines.attention import Scores, recovered
from sinkscope.lines.head_lines import HeadLines
from sinkscope.lines.serve import LoopServe
from sinkscope.models.target import Target
from sinkscope.models.text import typical_text
from sinkscope.results.console import note
from sinkscope.tap.call import Attention

DENSITIES = (0.02, 0.05, 0.1, 0.2, 0.5)
COLUMNS = 1000  # beside lone lines
Ids = Int[Tensor, "1 pos"]


def dense(scores: Scores, value: Tensor) -> Tensor:
    """Causal attention as PyTorch computes it fastest."""
    query, key = scores.query, scores.key
    grouped = query.shape[0] != key.shape[0]
    flash = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if flash else nullcontext():
        return scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, enable_gqa=grouped, scale=scores.scaling
        )[0]


def said(work: Sparsity) -> Row:
    """What is kept of the work along lines."""
    cells = statistics.fmean(work.cells)
    computed = statistics.fmean(work.computed)
    return {"cells": cells, "computed": computed, "dense_heads": sum(work.dense), "kernel": work.kernel}


def scattered(heads: int, n: int, density: float, device: torch.device) -> HeadLines:
    """Lines of about this share of the cells, others in every head."""
    generator = torch.Generator().manual_seed(0)
    vertical = torch.rand(heads, n, generator=generator) < density * 0.7
    slash = torch.zeros(heads, n, dtype=torch.bool)
    slash[:, : max(1, int(n * density * 0.1))] = True
    slash[:, torch.randint(0, n, (2,), generator=generator)] = True
    vertical[:, 0] = True
    return HeadLines.of(vertical.to(device), slash.to(device), n)


def columns_and_lone(heads: int, n: int, columns: int, lone: int, device: torch.device) -> HeadLines:
    """So many random columns and lone offsets in every head, and the main diagonal."""
    generator = torch.Generator().manual_seed(0)
    vertical = torch.rand(heads, n, generator=generator).argsort(1) < columns
    slash = torch.rand(heads, n, generator=generator).argsort(1) < lone
    vertical[:, 0] = slash[:, 0] = True
    return HeadLines.of(vertical.to(device), slash.to(device), n)


def drawn(target: Target, n: int, dtype: str) -> tuple[Scores, Tensor]:
    """Random queries and keys of a layer, and values."""
    config = target.config
    heads = int(config.num_attention_heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    made = {"device": target.device, "dtype": getattr(torch, dtype)}
    query = torch.randn(heads, n, width, **made)
    key, value = (torch.randn(target.n_kv_heads, n, width, **made) for _ in range(2))
    return Scores(query, key, width**-0.5), value


@torch.no_grad()
def prefill(target: Target, n: int, density: float, rounds: int, dtype: str) -> Row:
    """One layer on random lines, over dense attention."""
    scores, value = drawn(target, n, dtype)
    along = partial(sparse_attention, scores, value, scattered(scores.heads, n, density, target.device))
    work = along()[1]
    pairs = pairs_of(partial(dense, scores, value), along, rounds, partial(clock, target.device))
    return {"n": n, "density": density, **said(work), **faster(pairs)}


@torch.no_grad()
def lone_lines(target: Target, n: int, lone: int, rounds: int, dtype: str) -> Row:
    """One layer on columns and lone lines, over dense attention, and FlexAttention on the same lines."""
    scores, value = drawn(target, n, dtype)
    query, key = scores.query, scores.key
    lines = columns_and_lone(len(query), n, min(COLUMNS, n // 8), min(lone, n // 2), target.device)
    along = partial(sparse_attention, scores, value, lines, dense_above=torch.inf)
    now, on_cuda = partial(clock, target.device), target.device.type == "cuda"
    output, work = along()
    pairs = pairs_of(partial(dense, scores, value), along, rounds, now)

    def is_seen(_batch: Tensor, head: Tensor, at: Tensor, own: Tensor) -> Tensor:
        return (at >= own) & (lines.vertical[head, own] | lines.slash[head, (at - own).clamp(min=0)])

    attend = torch.compile(flex_attention) if on_cuda else flex_attention
    masked = partial(create_block_mask, is_seen, None, len(query), n, n, device=target.device, _compile=on_cuda)
    flex = partial(attend, query[None], key[None], value[None], block_mask=masked(), enable_gqa=len(query) != len(key))
    flexed = pairs_of(partial(dense, scores, value), flex, rounds, now)
    difference = (flex()[0] - output).float().abs().max() / output.float().abs().max()
    seconds = {**faster(flexed), "mask_ms": 1e3 * seconds_of(masked, now)[0], "difference": float(difference)}
    return {"n": n, "lone": lone, **said(work), **faster(pairs), "flex": seconds}


@dataclass(frozen=True, eq=False)
class Seen(Intervention):
    """Keeps queries, keys and values of one layer's prompt."""

    layer: int
    found: list[tuple[Scores, Tensor]] = field(default_factory=list)

    def enter(self, run: Run, key: int) -> None:
        """Look on; attention stays the model's own."""

        def see(prompt: Attention, _kv: object) -> None:
            if prompt.layer == self.layer:
                scores = Scores(prompt.query[0].clone(), prompt.key[0].clone(), prompt.scaling)
                self.found.append((scores, prompt.value[0].clone()))

        Session.of(run).watching.replacement = see


@torch.no_grad()
def selection(target: Target, ids: Ids, edit: LoopServe, rounds: int) -> Row:
    """Choice of lines, and attention along them, over dense attention."""
    now = partial(clock, target.device)
    seen = Seen(target.n_layers // 2)
    with seen.on(target):
        target.base(input_ids=ids, use_cache=False)
    ((scores, value),) = seen.found
    attend = partial(dense, scores, value)
    choose = partial(edit.lines, scores, seen.layer)
    along = partial(sparse_attention, scores, value)
    lines = choose()
    rows = torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0))[:64]
    held = recovered(scores, lines, rows)
    choice = pairs_of(attend, choose, rounds, now)
    return {
        "n": ids.shape[1],
        "layer": seen.layer,
        **said(along(lines)[1]),
        "mass": {"mean": float(held.mean()), "least": float(held.min())},
        "selection_over_dense": statistics.median(b / a for a, b in choice),
        "attention": faster(pairs_of(attend, partial(along, lines), rounds, now)),
        "with_selection": faster(pairs_of(attend, lambda: along(choose()), rounds, now)),
    }


@torch.no_grad()
def prompt(target: Target, ids: Ids, edit: LoopServe, rounds: int) -> Row:
    """A whole prompt, with LoopServe and with the model's own attention."""
    own = partial(target.base, input_ids=ids, use_cache=False)
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
    return {
        "n": ids.shape[1],
        "kernel": sorted(kernels),
        "attended": statistics.fmean(each.get("attended", 1.0) for each in events),
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
        return text(length, 0.1).to(target.device)
    tokens = target.tokenizer(typical_text(), return_tensors="pt").input_ids
    return tokens.repeat(1, -(-length // tokens.shape[1]))[:, :length].to(target.device)


def main(
    *,
    model: str | None = None,
    shape: str = "lines-7b",
    lengths: Sequence[int] = (8192, 16384, 32768, 65536, 131072),
    prompts: Sequence[int] = (8192, 16384, 32768, 65536, 131072),
    lone_lengths: Sequence[int] = (8192, 32768),
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
        lengths: Of one layer.
        prompts: Of whole prompts.
        lone_lengths: Of the lone lines.
        contexts: Of the latency.
        new: Tokens of an answer, for the latency.
        names: Arms of the latency.
        shortest: Prompts below are dense under LoopServe.
    """
    settings = {"model": model, "shape": shape, "new": new, "rounds": rounds, "budget": budget, "dtype": dtype}
    steps = Steps("gpu-loopserve", out, {**settings, "shortest": shortest}, device, dtype)
    target = model_of(model, shape, device, dtype)
    room = (target.max_positions or sys.maxsize) - new
    ids = ids_of(target, min(room, max(*lengths, *prompts, *contexts)) + new, model is None)
    for length in lone_lengths:
        for lone in (0, 8, 64, 200, 1000):
            steps.do(f"lone lines, {lone} of {length}", partial(lone_lines, target, length, lone, rounds, dtype))
    edits = arms(budget, shortest)
    for context in contexts:
        for name in names:
            if context <= room:
                part = ids[:, : context + new]
                steps.do(f"{name} at {context}", partial(latency, target, part, name, edits[name], context, rounds))
    for length in lengths:
        if length > room:
            note(f"{target.name} reads {target.max_positions} tokens: {length} is left out")
            continue
        for density in DENSITIES:
            steps.do(f"prefill, {density} of {length}", partial(prefill, target, length, density, rounds, dtype))
        for name, alpha in (("", LoopServe.alpha), ("0.955 ", 0.955)):
            edit = LoopServe(alpha=alpha, shortest=0)
            steps.do(f"selection {name}of {length}", partial(selection, target, ids[:, :length], edit, rounds))
    for length in prompts:
        for name, edit in (("", LoopServe(decode=False, shortest=0)), ("usual ", LoopServe(decode=False))):
            if length <= room:
                steps.do(f"{name}prompt of {length}", partial(prompt, target, ids[:, :length], edit, rounds))
    steps.end()


if __name__ == "__main__":
    run(main)
