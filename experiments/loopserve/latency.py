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
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from plotly.subplots import make_subplots
from torch import Tensor
from transformers import DynamicCache

from experiments.drawn import save
from experiments.planted_lines import SHAPES, made, text
from experiments.record import Row, record, value_of_each
from experiments.script import run as run_script
from experiments.timing import memory_growth
from sinkscope.hooks.edit.base import Intervention, under
from sinkscope.kv import H2O, AdaKV, SnapKV
from sinkscope.lines.serve import LoopServe, tokens_read
from sinkscope.lines.shapes import MInference
from sinkscope.models.target import Target
from sinkscope.results.console import note
from sinkscope.results.style import BLUE, GREEN, GREY, ORANGE, RED, figure_of

NAME = "loopserve_latency"
OUTPUTS = (40, 80, 120)  # the paper's (section A.13)
SMALL = 3e-4  # of what layers write, beside what the lines are made of
WARM = 164
TENTH = 0.1  # of the text is marked
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
NOTED = ("tokens", "logical", "physical", "answering", "read", "cells", "dense_heads", "kernel")
Clock = Callable[[], float]
Run = Row


class Planned(NamedTuple):
    """A run: an arm after a context, in a round."""

    context: int
    round: int
    arm: str


def arms(budget: int, shortest: int, dense_above: float = LoopServe.dense_above) -> dict[str, Intervention | None]:
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


@torch.no_grad()
def turn(target: Target, edit: Intervention | None, ids: Tensor, context: int, clock: Clock) -> Run:
    """Read `context` tokens at once and the others one by one.

    Returns:
        "seconds" of every call, the prompt first; the most cached "tokens" there were after a call, their "logical" and
        "physical" bytes, and "answering", physical bytes at the end; "read" tokens per decoding step; shares of "cells"
        attended to in the prompt, and "dense_heads", mean over layers, and "kernel" (None: plain attention).
    """
    cache = DynamicCache(config=target.hf.config)
    seconds = list[float]()
    with under(edit, target) as run:
        for begin, end in [(0, context), *((i, i + 1) for i in range(context, ids.shape[1]))]:
            start = clock()
            target.hf(input_ids=ids[:, begin:end], past_key_values=cache, use_cache=True, logits_to_keep=1)
            seconds.append(round(clock() - start, 7))
        parts = [
            part for layer in cache.layers for part in (layer, getattr(layer, "whole_layer", None)) if part is not None
        ]
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
    for name, key in (("cells", "attended"), ("dense_heads", "dense_heads")):
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
    full: dict[tuple[int, int], list[float]] = {}
    arms: dict[tuple[int, str], list[Run]] = {}
    for run in runs:
        arms.setdefault((run["context"], run["arm"]), []).append(run)
        if run["arm"] == "full":
            full[run["context"], run["round"]] = run["seconds"]
    rows: list[Row] = []
    for (context, arm), mine in arms.items():

        def timed(part: slice, mine: list[Run] = mine) -> tuple[float, float]:
            """Median seconds, and the median of how many times faster than full."""
            seconds = []
            ratios = []
            for run in mine:
                seconds.append(sum(run["seconds"][part]))
                ratios.append(sum(full[run["context"], run["round"]][part]) / seconds[-1])
            return statistics.median(seconds), statistics.median(ratios)

        row: Row = {"context": context, "arm": arm, "rounds": len(mine), "seconds": {}, "times_faster": {}}
        row["first_seconds"], row["first_times_faster"] = timed(slice(1))
        steps, row["per_token_times_faster"] = timed(slice(1, None))
        row["ms_per_token"] = 1e3 * steps / (len(mine[0]["seconds"]) - 1)
        for n in outputs:
            row["seconds"][str(n)], row["times_faster"][str(n)] = timed(slice(1 + n))
        for name in NOTED:
            row[name] = mine[-1][name]
        peaks = [run["peak"] for run in mine if run["peak"] is not None]
        rows.append({**row, "peak": max(peaks, default=None)})
    return rows


def figure(data: Row) -> Any:
    """Times and ratios by context, by length of the answer, and memory."""
    rows = data["result"]["rows"]
    outputs = data["settings"]["outputs"]
    last = str(outputs[-1])
    most = max(value_of_each(rows, "rounds"))
    shown = max(row["context"] for row in rows if row["rounds"] == most)
    titles = (
        f"prompt and {last} tokens, times faster than full",
        "prompt alone, times faster than full",
        "a token of the answer, times faster than full",
        f"seconds by length of the answer at {shown:,}",
        "MiB of keys and values while answering",
        "MiB of memory above the model, at the peak",
    )
    fig = make_subplots(2, 3, subplot_titles=titles, horizontal_spacing=0.07, vertical_spacing=0.16)
    faster = {}
    for arm, (color, dash) in STYLES.items():
        curves: list[tuple[list[Any], list[Any]]] = [([], []) for _ in titles]
        for row in rows:
            if row["arm"] != arm:
                continue
            peak = None
            if row["peak"] is not None:
                peak = row["peak"] / 2**20
            first, token = row["first_times_faster"], row["per_token_times_faster"]
            values = (row["times_faster"][last], first, token, None, row["answering"] / 2**20, peak)
            for (x, y), value in zip(curves, values, strict=True):
                x.append(row["context"])
                y.append(value)
            if row["context"] == shown:
                faster[arm] = row["times_faster"][last]
                curves[3] = [*outputs], [*row["seconds"].values()]
        for number, (x, y) in enumerate(curves):
            style: Row = {"name": arm, "legendgroup": arm, "showlegend": not number, "mode": "lines+markers"}
            at = {"row": number // 3 + 1, "col": number % 3 + 1}
            fig.add_scatter(x=x, y=y, line={"color": color, "dash": dash}, **style, **at)
    fig.update_xaxes(title="tokens of context", type="log", tickvals=sorted({row["context"] for row in rows}))
    fig.update_xaxes(title="tokens of the answer", type="linear", tickvals=list(outputs), row=2, col=1)
    fig.update_yaxes(type="log")
    fig.update_yaxes(type="linear", rangemode="tozero", row=2, col=1)
    del faster["full"]
    best = max(faster, key=lambda arm: faster[arm])
    title = f"A turn of {last} tokens after {shown:,} is {faster[best]:.1f} times faster with {best} than without"
    return figure_of(fig, None, title, width=1500, height=900, legend=-0.1)


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
    out: Path = Path("figures"),
) -> None:
    """Make what the module describes.

    Args:
        long: Contexts with a single round.
        outputs: Tokens of an answer.
        names: Arms; `full` must be among them.
        shortest: Prompts below are dense under LoopServe.
        out: Folder of the figure.
    """
    started = time.perf_counter()
    torch.set_num_threads(1)
    outputs = sorted(set(outputs))
    runs = plan(contexts, long, names, rounds)
    target = made(shape, 0, SMALL)
    ids = text(max([*contexts, *long]) + outputs[-1], TENTH)
    for name, edit in arms(budget, 0).items():  # libraries are loaded, loops compiled
        if name in names:
            turn(target, edit, ids[:, :WARM], WARM - 4, time.thread_time)
    edits = arms(budget, shortest)
    measured: list[Run] = []
    for number, planned in enumerate(runs):
        part = ids[:, : planned.context + outputs[-1]]
        told = fresh(partial(turn, target, edits[planned.arm], part, planned.context, time.thread_time))
        measured.append({**planned._asdict(), **told})
        note(f"{number + 1}/{len(runs)} {planned.arm} at {planned.context}: first token {told['seconds'][0]:.2f} s")
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
        "marked": TENTH,
        "threads": 1,
    }
    result = {"rows": rows, "runs": measured}
    save(NAME, record("loopserve-latency", result, settings, started=started), figure, out)


if __name__ == "__main__":
    run_script(main)
