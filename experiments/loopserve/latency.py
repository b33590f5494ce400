"""Latency and memory of a turn by length of context and answer: full attention, LoopServe, its halves, other methods.

    python -m experiments.loopserve.latency [--contexts 2048 4096 ...] [--rounds 3] [--long 32768] [--out figures]

After Figs. 5 a, 9 a and 13 of Li et al. 2025 (LoopServe). The model has random weights and planted lines (half of the
heads attend to one offset, half to marked tokens, a tenth of the text), so attention is as sparse as it is in trained
models; `cells` says how many cells were chosen. It is narrow: at width 512 attention has the share of the time that it
has at eight times the context at width 4,096.

A run reads the prompt, then the same given tokens one by one in every arm, and every call is timed: the prompt is the
time to the first token, and answers of 40, 80 and 120 tokens are the beginnings of one run. The work of a policy on the
cache after the prompt belongs to the first step. Arms are interleaved in rotating order; a ratio is the median over
rounds of full over arm in the same round. Time is the processor time of the one thread that does all the work. Each run
is a fresh copy of the process, and `peak` is the rise of its memory. The process keeps freed memory, because otherwise
glibc requests fresh pages at some steps, depending on what was freed before, and a step from a long cache then takes up
to twice as long in one arm and not in another. Bytes of keys and values are those of `run.usage`.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from experiments.bench_lines import MARKED, SHAPES, VOCAB, made
from experiments.drawn import save
from experiments.loopserve import paper
from experiments.record import Row, record, value_of_each
from experiments.script import run as run_script
from experiments.timing import memory_growth
from sinkscope.hooks.edit.base import Intervention
from sinkscope.kv import H2O, AdaKV, SnapKV
from sinkscope.lines.serve import LoopServe, tokens_read
from sinkscope.lines.shapes import MInference
from sinkscope.models.target import Target
from sinkscope.results.console import note
from sinkscope.results.style import BLUE, GREEN, GREY, ORANGE, RED, figure_of

NAME = "loopserve_latency"
OUTPUTS = paper.LENGTHS
SMALL = 3e-4
WARM = 164
LIMITS = {"h2o": 4096, "minference": 16384}  # longest context: the slowest prompts
STYLES = {
    "full": (GREY, "solid"),
    "loopserve": (BLUE, "solid"),
    "loopserve-p": (BLUE, "dot"),
    "loopserve-d": (BLUE, "dash"),
    "snapkv": (ORANGE, "solid"),
    "adakv": (ORANGE, "dash"),
    "h2o": (GREEN, "solid"),
    "minference": (RED, "solid"),
}
NOTED = ("tokens", "logical", "physical", "answering", "read", "cells", "computed", "dense_heads", "kernel")
TICKS = [0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 15, 20, 30]
Clock = Callable[[], float]
Run = Row


class Planned(NamedTuple):
    """A run: an arm behind a context, in a round."""

    context: int
    round: int
    arm: str


def arms(budget: int, shortest: int, dense_above: float | None = None) -> dict[str, Intervention | None]:
    """At the settings of the paper's table 7 where `budget` is 1,024."""
    serve: Row = {"budget": budget, "shortest": shortest, "dense_above": dense_above}
    return {
        "full": None,
        "loopserve": LoopServe(**serve),
        "loopserve-p": LoopServe(decode=False, **serve),
        "loopserve-d": LoopServe(prefill=False, **serve),
        "snapkv": SnapKV(budget=budget),
        "adakv": AdaKV(budget=budget),
        "h2o": H2O(budget=budget),
        "minference": MInference(),
    }


def shape_of(name: str, seed: int) -> Target:
    """Planted lines in every layer: what layers write is small beside what the lines are made of."""
    target = made(name, seed)
    with torch.no_grad():
        for layer in target.hf.model.layers:
            layer.self_attn.o_proj.weight *= SMALL
            layer.mlp.down_proj.weight *= SMALL
    return target


def text(length: int, seed: int, marked: float) -> Tensor:
    """Random tokens, a share of them marked: `[1 pos]`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(MARKED, VOCAB, (1, length), generator=generator)
    ids[:, torch.rand(length, generator=generator) < marked] = MARKED - 1
    return ids


@torch.no_grad()
def turn(target: Target, edit: Intervention | None, ids: Tensor, context: int, clock: Clock) -> Run:
    """Read `context` tokens at once and the others one by one.

    Returns:
        "seconds" of every call, the prompt first; the most cached "tokens" there were after a call, their "logical" and
        "physical" bytes, and "answering", physical bytes at the end; "read" tokens per decoding step; shares of "cells"
        attended to and "computed" in the prompt, and "dense_heads", mean over layers, and "kernel" (None: plain
        attention).
    """
    cache = DynamicCache(config=target.hf.config)
    seconds = list[float]()
    with edit.on(target) if edit is not None else nullcontext() as run:
        for begin, end in [(0, context), *((i, i + 1) for i in range(context, ids.shape[1]))]:
            start = clock()
            target.hf(input_ids=ids[:, begin:end], past_key_values=cache, use_cache=True, logits_to_keep=1)
            seconds.append(round(clock() - start, 7))
        parts = [part for layer in cache.layers for part in (layer, getattr(layer, "aside", None)) if part is not None]
        held = 0
        for part in parts:
            held += part.keys.nbytes + part.values.nbytes  # pyright: ignore[reportOptionalMemberAccess]
        found: Row = {"tokens": ids.shape[1], "logical": held, "physical": held, "read": None}
        events: list[Row] = []
        if run is not None:
            for used in run.usage[:1]:
                found |= {"tokens": used.peak_tokens[0], "logical": used.logical_bytes, "physical": used.physical_bytes}
            for read in tokens_read(run)[:1]:
                found["read"] = read[0]
            for event in run.events:
                if event.kind == "prefill" and "cells" in event.data:
                    events.append(event.data)
    found |= {"answering": held, "kernel": events[0]["kernel"] if events else None}
    for name, key in (("cells", "attended"), ("computed", "computed"), ("dense_heads", "dense_heads")):
        found[name] = statistics.fmean(value_of_each(events, key)) if events else None
    return {"seconds": seconds, **found}


def _keep_pages() -> None:
    """Let glibc give back what is free now, and keep what is freed from here on; other libraries are left alone."""
    library = ctypes.CDLL(None)
    mallopt = getattr(library, "mallopt", None)
    trim = getattr(library, "malloc_trim", None)
    if trim is not None:
        trim(0)  # else a run would use pages of its parent, and its memory would not rise
    if mallopt is not None:
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        mallopt(-4, 0)  # M_MMAP_MAX


def fresh(work: Callable[[], Run]) -> Run:
    """Do it in a copy of this process; "peak": bytes by which its memory rose (None where nothing tells)."""

    def child(pipe: Any) -> None:
        _keep_pages()
        peak, found = memory_growth(work)
        pipe.send({**found, "peak": peak})

    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(there,))
    process.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        raise SystemExit("error: a run ended without a result (see above; was there enough memory?)") from None
    except KeyboardInterrupt:
        process.terminate()
        raise
    finally:
        process.join()


def plan(contexts: Sequence[int], long: Sequence[int], names: Sequence[str], rounds: int) -> list[Planned]:
    """The runs in their order; the first arm of a round changes."""
    runs: list[Planned] = []
    for context in [*contexts, *long]:
        those = []
        for each in names:
            if context <= LIMITS.get(each, context):
                those.append(each)
        for number in range(1 if context in long else rounds):
            turned = number % len(those)
            for name in those[turned:] + those[:turned]:
                runs.append(Planned(context, number, name))
    return runs


def rows_of(runs: Sequence[Run], outputs: Sequence[int]) -> list[Row]:
    """A row per context and arm: medians over rounds, and ratios to full attention in the same round."""
    rows: list[Row] = []
    full = {}
    for r in runs:
        if r["arm"] == "full":
            full[(r["context"], r["round"])] = r
    for context, arm in dict.fromkeys((r["context"], r["arm"]) for r in runs):
        mine = []
        for r in runs:
            if (r["context"], r["arm"]) == (context, arm) and (context, r["round"]) in full:
                mine.append(r)
        if not mine:
            continue
        pairs = []
        for r in mine:
            pairs.append((full[context, r["round"]]["seconds"], r["seconds"]))

        def faster(part: slice, pairs: list[tuple[list[float], list[float]]] = pairs) -> float:
            values = []
            for a, b in pairs:
                values.append(sum(a[part]) / sum(b[part]))
            return statistics.median(values)

        seconds = {}
        for n in outputs:
            seconds[str(n)] = statistics.median(sum(r["seconds"][: 1 + n]) for r in mine)
        times_faster = {}
        for n in outputs:
            times_faster[str(n)] = faster(slice(1 + n))
        rows.append(
            {
                "context": context,
                "arm": arm,
                "rounds": len(mine),
                "first_seconds": statistics.median(r["seconds"][0] for r in mine),
                "ms_per_token": statistics.median(1e3 * statistics.fmean(r["seconds"][1:]) for r in mine),
                "seconds": seconds,
                "first_times_faster": faster(slice(1)),
                "per_token_times_faster": faster(slice(1, None)),
                "times_faster": times_faster,
                **{k: mine[-1][k] for k in NOTED},
                "peak": max((r["peak"] for r in mine if r["peak"] is not None), default=None),
            }
        )
    return rows


def figure(data: Row) -> Any:
    """Times and ratios by context, by length of the answer, and memory."""
    rows = data["result"]["rows"]
    outputs = data["settings"]["outputs"]
    from plotly.subplots import make_subplots

    values = value_of_each(rows, "rounds")
    most = max(values)
    values = []
    for each in rows:
        if each["rounds"] == most:
            values.append(each["context"])
    shown = max(values)
    last = str(outputs[-1])
    titles = (
        f"prompt and {last} tokens, against full",
        "prompt alone, against full",
        "a token of the answer, against full",
        f"by length of the answer at {shown:,}",
        "keys and values while answering",
        "peak of memory above the model",
    )
    fig = make_subplots(2, 3, subplot_titles=titles, horizontal_spacing=0.07, vertical_spacing=0.16)
    for arm, (color, dash) in STYLES.items():
        mine = []
        for r in rows:
            if r["arm"] == arm:
                mine.append(r)
        if not mine:
            continue
        line = {"color": color, "dash": dash}
        x = [r["context"] for r in mine]

        def draw(at: tuple[int, int], x: Sequence[Any], y: Sequence[Any], arm: str = arm, line: Row = line) -> None:
            fig.add_scatter(
                x=x,
                y=y,
                name=arm,
                legendgroup=arm,
                mode="lines+markers",
                line=line,
                row=at[0],
                col=at[1],
                showlegend=at == (1, 1),
            )

        draw((1, 1), x, [r["times_faster"][last] for r in mine])
        draw((1, 2), x, [r["first_times_faster"] for r in mine])
        draw((1, 3), x, [r["per_token_times_faster"] for r in mine])
        by_output = []
        for r in mine:
            if r["context"] == shown:
                by_output.append(r)
        draw((2, 1), outputs, [by_output[0]["seconds"][str(n)] for n in outputs] if by_output else [])
        draw((2, 2), x, [r["answering"] / 2**20 for r in mine])
        draw((2, 3), x, [None if r["peak"] is None else r["peak"] / 2**20 for r in mine])
    ticks = sorted({r["context"] for r in rows})
    for row, col in ((1, 1), (1, 2), (1, 3), (2, 2), (2, 3)):
        ticktext = []
        for n in ticks:
            ticktext.append(f"{n:,}")
        fig.update_xaxes(type="log", tickvals=ticks, ticktext=ticktext, title="tokens of context", row=row, col=col)
    for col in (1, 2, 3):
        fig.update_yaxes(title="times faster", type="log", tickvals=TICKS, row=1, col=col)
        fig.add_hline(1, line={"color": GREY, "width": 1}, row=1, col=col)
    fig.update_xaxes(title="tokens of the answer", tickvals=list(outputs), row=2, col=1)
    fig.update_yaxes(title="seconds", rangemode="tozero", row=2, col=1)
    for col in (2, 3):
        fig.update_yaxes(
            title="MiB", type="log", tickvals=[b * 10**e for e in range(5) for b in (1, 2, 5)], row=2, col=col
        )
    faster = {}
    for r in rows:
        if r["context"] == shown and r["arm"] != "full":
            faster[r["arm"]] = r["times_faster"][last]
    best = max(faster, key=lambda arm: faster[arm])
    title = f"A turn of {last} tokens after {shown:,} is {faster[best]:.1f} times faster with {best} than without"
    return figure_of(fig, None, title, width=1500, height=900, legend=-0.1, top=100)


def main(
    *,
    contexts: Sequence[int] = (2048, 4096, 8192, 16384),
    long: Sequence[int] = (),
    outputs: Sequence[int] = OUTPUTS,
    names: Sequence[Literal[*STYLES]] = tuple(STYLES),
    rounds: int = 3,
    budget: int = 1024,
    shortest: int = 2048,
    shape: Literal[*SHAPES] = "lines-512",
    marked: float = 0.1,
    seed: int = 0,
    out: Path = Path("figures"),
) -> None:
    """Make what the module describes.

    Args:
        long: Contexts with a single round.
        outputs: Tokens of an answer.
        names: Arms; `full` must be among them.
        shortest: Prompts below are dense under LoopServe.
        marked: Share of marked tokens.
        out: Folder of the figure.
    """
    started = time.perf_counter()
    torch.set_num_threads(1)
    outputs = sorted(set(outputs))
    runs = plan(contexts, long, names, rounds)
    target = shape_of(shape, seed)
    ids = text(max([*contexts, *long]) + outputs[-1], seed, marked)
    for name, edit in arms(budget, 0).items():  # libraries are loaded, loops compiled
        if name in names:
            turn(target, edit, ids[:, :WARM], WARM - 4, time.thread_time)
    edits = arms(budget, shortest)
    measured: list[Run] = []
    for number, planned in enumerate(runs):
        part = ids[:, : planned.context + outputs[-1]]
        made = fresh(partial(turn, target, edits[planned.arm], part, planned.context, time.thread_time))
        measured.append({**planned._asdict(), **made})
        note(f"{number + 1}/{len(runs)} {planned.arm} at {planned.context}: first token {made['seconds'][0]:.2f} s")
    rows = rows_of(measured, outputs)
    settings = {
        "contexts": contexts,
        "long": long,
        "outputs": outputs,
        "arms": names,
        "rounds": rounds,
        "budget": budget,
        "shortest": shortest,
        "shape": shape,
        "marked": marked,
        "seed": seed,
        "threads": 1,
    }
    result = {"rows": rows, "runs": measured}
    save(NAME, record("loopserve-latency", result, settings, started=started, seed=seed), figure, out)
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    run_script(main)
