"""Speed of sparse prompts over PyTorch's causal attention, by layer and in a whole model, and the time of each stage.

    python -m experiments.bench_loopserve [--lengths 2048 4096 8192 16384 32768] [--rounds 3]
        [--parts layer model turns] [--out figures/bench_loopserve.json] [--page PAGE]

Everything is CPU time of one thread, pairs are interleaved, and what counts is the median of their ratios; above 8,192
there is one round, and layers have two heads. Writes a PNG beside the JSON.

- `layer`: attention of 8 heads, d_head 64, on drawn lines. `vertical`: single columns; `slash`: single offsets;
  `groups`: offsets in groups of four; `mixed`: 70 % columns, a band at the diagonal, two lone offsets.
- `model`: forward pass under `LoopServe` against the same model alone, and what the stages take. `half`: `lines-512` of
  `bench_lines` (random weights, 2 layers; in the first half of the heads attend to one offset and half to marked
  tokens; what it writes drowns that in the second layer, whose attention needs most cells). `lines`: the same with
  writes a tenth as large, so that both layers are on lines. `flat`: the control, queries are zero, so that attention is
  flat and every head has to be dense. All at the default's alpha, `lines` also at 0.995.
- `turns`: the time of a new turn on a context that was read before, under `LoopServe` and `LoopServe(shortest=0)`, over
  that of the model alone, for the same three models. The first has to stay within 5 % of the model alone.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Literal
from unittest.mock import patch

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from experiments.bench_lines import ids_of, made
from experiments.drawn import put_table, save
from experiments.record import Row, record, value_of_each
from experiments.script import run
from experiments.timing import seconds_of
from sinkscope.files.output import write_atomic
from sinkscope.lines import choice, sparse
from sinkscope.lines.head_lines import HeadLines
from sinkscope.lines.serve import LoopServe, serve, sparse_prompts

D_HEAD, REPEATED = 64, 8192  # the last length with several rounds
DENSITIES = (0.02, 0.05, 0.1, 0.2, 0.5)
KINDS = ("vertical", "slash", "groups", "mixed")
LENGTHS = [2048, 4096, 8192, 16384, 32768]
PARTS = ("layer", "model", "turns")
CONTEXTS = (2400, 6000)
TURNS = (48, 200, 400, 1200)
DEFAULT = LoopServe().alpha
_console = Console(stderr=True)


def scattered(kind: str, heads: int, n: int, density: float, generator: torch.Generator) -> HeadLines:
    """Lines of about this share of the cells."""

    def draw(share: float) -> Tensor:
        return torch.rand(heads, n, generator=generator) < share

    vertical, slash = (torch.zeros(heads, n, dtype=torch.bool) for _ in range(2))
    if kind == "vertical":
        vertical = draw(density)
    elif kind == "slash":
        slash = draw(density)
    elif kind == "groups":
        first = draw(1 - (1 - density) ** 0.25)
        for shift in range(4):
            slash |= first.roll(shift, 1)
    else:
        vertical = draw(density * 0.7)
        slash[:, : max(1, int(n * density * 0.1))] = True
        slash[:, torch.randint(0, n, (2,), generator=generator)] = True
    vertical[:, 0] = slash[:, 0] = True
    return HeadLines(vertical, slash, n)


def layer(lengths: list[int], rounds: int) -> list[Row]:
    """Times faster than dense attention, by length, kind of lines and share of cells."""
    rows: list[Row] = []
    for n in lengths:
        generator = torch.Generator().manual_seed(0)
        heads = 2
        if n <= REPEATED:
            heads = 8
        query, key, value = (torch.randn(heads, n, D_HEAD, generator=generator) for _ in range(3))

        def dense(q: Tensor = query, k: Tensor = key, v: Tensor = value) -> Tensor:
            return functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)

        for kind in KINDS:
            drawn = []
            for density in DENSITIES:
                drawn.append(scattered(kind, heads, n, density, generator))
            pairs: list[list[float]] = [[] for _ in drawn]
            work: list[Any] = [None] * len(drawn)
            sparse.sparse_attention(query, key, value, drawn[0])  # compiled
            for _ in range(rounds if n <= REPEATED else 1):
                base, _out = seconds_of(dense)
                for number, lines in enumerate(drawn):
                    ours, (_out, work[number]) = seconds_of(
                        lambda: sparse.sparse_attention(query, key, value, lines)  # noqa: B023
                    )
                    pairs[number].append(base / ours)
            for ratios, what in zip(pairs, work, strict=True):
                rows.append(
                    {
                        "n": n,
                        "kind": kind,
                        "kernel": what.kernel,
                        "heads": heads,
                        "cells": sum(what.cells) / heads,
                        "computed": sum(what.computed) / heads,
                        "dense_heads": sum(what.dense),
                        "times_faster": median(ratios),
                        "pairs": ratios,
                    }
                )
            parts = []
            for row in rows[-len(DENSITIES) :]:
                parts.append(f"{row['cells']:.0%}: {row['times_faster']:.1f}")
            said = ", ".join(parts)
            _console.print(f"{n} {kind}: times faster at {said}")
    return rows


@contextmanager
def stages() -> Iterator[Counter[str]]:
    """Seconds by stage while it lasts."""
    took: Counter[str] = Counter()
    places = {
        "choice": (serve, "select_lines"),
        "sample": (choice, "attention_of"),
        "sparse": (sparse_prompts, "sparse_attention"),
    }
    with ExitStack() as stack:
        for name, (module, function) in places.items():
            real = getattr(module, function)

            def timed(*args: Any, name: str = name, real: Any = real, **kwargs: Any) -> Any:
                spent, out = seconds_of(lambda: real(*args, **kwargs))
                took[name] += spent
                return out

            stack.enter_context(patch.object(module, function, timed))
        yield took
    took["greedy search"] = took.pop("choice", 0.0) - took["sample"]
    took["sparse attention"] = took.pop("sparse", 0.0)  # of flat models the model itself reads


@torch.no_grad()
def model_of(name: str) -> Any:
    """One of the three models."""
    model = made("lines-512", 0).hf
    for block in model.model.layers:
        if name == "flat":
            block.self_attn.q_proj.weight.zero_()
        elif name == "lines":
            block.self_attn.o_proj.weight.mul_(0.1)
            block.mlp.down_proj.weight.mul_(0.1)
    return model


@torch.no_grad()
def turns(_lengths: list[int], rounds: int) -> list[Row]:
    """A new turn under LoopServe over the same turn of the model alone; the context is cut back after each."""
    rows: list[Row] = []
    arms = {"ours": LoopServe(decode=False), "always": LoopServe(decode=False, shortest=0)}
    for name in ("lines", "half", "flat"):
        models = {}
        for each in ("alone", *arms):
            models[each] = model_of(name)
        for context in CONTEXTS:
            ids = ids_of(context + max(TURNS), 0)
            with ExitStack() as stack:
                caches: Row = {}
                for arm, model in models.items():
                    if arm in arms:
                        stack.enter_context(arms[arm].on(model))
                    caches[arm] = DynamicCache(config=model.config)
                    model(input_ids=ids[:, :context], past_key_values=caches[arm], logits_to_keep=1)
                for new in TURNS:
                    spent: dict[str, list[float]] = {arm: [] for arm in models}
                    for _ in range(rounds + 1):  # the first warms up
                        for arm, model in models.items():
                            part = ids[:, context : context + new]
                            took, _out = seconds_of(
                                lambda: model(input_ids=part, past_key_values=caches[arm], logits_to_keep=1)  # noqa: B023
                            )
                            spent[arm].append(took)
                            caches[arm].crop(-new)
                    over = {
                        arm: median(a / b for a, b in zip(spent[arm][1:], spent["alone"][1:], strict=True))
                        for arm in arms
                    }
                    rows.append({"model": name, "context": context, "new": new, "over_alone": over})
                    _console.print(f"{name}, {new} on {context}: {over}")
    return rows


@torch.no_grad()
def whole_model(lengths: list[int], rounds: int) -> list[Row]:
    """Forward passes under LoopServe and without."""
    rows: list[Row] = []
    for name in ("lines", "half", "flat"):
        model = model_of(name)
        for n in lengths if name == "lines" else [n for n in lengths if n <= 2 * REPEATED]:
            ids = ids_of(n, 0)

            def forward(ids: Tensor = ids, model: Any = model) -> Any:
                return model(input_ids=ids, use_cache=True, logits_to_keep=1).logits

            for alpha in (DEFAULT, 0.995) if name == "lines" else (DEFAULT,):
                pairs = []
                events = []
                drift = 0.0
                for _ in range(rounds if n <= REPEATED else 1):
                    base, alone = seconds_of(forward)
                    with LoopServe(alpha=alpha, decode=False).on(model) as run:
                        spent, ours = seconds_of(forward)
                        events = run.events
                    pairs.append(base / spent)
                    drift = float((ours - alone).norm() / alone.norm())
                with LoopServe(alpha=alpha, decode=False).on(model), stages() as took:
                    spent, _out = seconds_of(forward)
                took["rest of the model"] = spent - took.total()
                data = []
                for event in events:
                    if event.kind == "prefill":
                        data.append(event.data)
                counts = value_of_each(data, "cells")
                rows.append(
                    {
                        "model": name,
                        "n": n,
                        "alpha": alpha,
                        "times_faster": median(pairs),
                        "pairs": pairs,
                        "cells": sum(counts) / len(data),
                        "logits_change": drift,
                        "computed": sum(d["computed"] for d in data) / len(data),
                        "dense_heads": sum(d["dense_heads"] for d in data),
                        "heads": 8 * len(data),
                        "seconds": dict(took),
                    }
                )
                _console.print(f"{name} {n}, alpha {alpha}: {median(pairs):.2f} times faster in all")
    return rows


def turns_table(rows: list[Row]) -> str:
    """Times of new turns over those of the model alone; in brackets where lines are chosen whatever that costs."""
    lines = [f"| attention | context | {' | '.join(f'{new:,}' for new in TURNS)} |", "|---" * (2 + len(TURNS)) + "|"]
    for name, context in dict.fromkeys((row["model"], row["context"]) for row in rows):
        over = []
        for row in rows:
            if (row["model"], row["context"]) == (name, context):
                over.append(row["over_alone"])
        cells = []
        for one in over:
            cells.append(f"{one['ours']:.2f} ({one['always']:.2f})")
        lines.append(f"| `{name}` | {context:,} | {' | '.join(cells)} |")
    values = []
    for each in rows:
        values.append(each["over_alone"]["ours"])
    slowest = max(values)
    return "\n".join([*lines, "", f"The slowest turn takes {slowest:.2f} times as long as the model alone."])


def figure(data: Row) -> Any:
    """Four panels: layers by share of cells, for single columns and offsets; whole model by length; its stages."""
    result = data["result"]
    from plotly.subplots import make_subplots

    from sinkscope.results.style import BLUE, GREEN, GREY, ORANGE, RED, figure_of

    titles = ("single columns", "single offsets", "whole prompt, 2 layers", "stages at alpha 0.995, share of the pass")
    fig = make_subplots(1, 4, subplot_titles=titles, horizontal_spacing=0.06)
    colours = dict(zip(LENGTHS, (GREY, BLUE, GREEN, ORANGE, RED), strict=True))
    for place, kind in ((1, "vertical"), (2, "slash")):
        for n in sorted({row["n"] for row in result["layer"]}):
            some = []
            for each in result["layer"]:
                if (each["n"], each["kind"]) == (n, kind):
                    some.append(each)
            x = value_of_each(some, "cells")
            y = value_of_each(some, "times_faster")
            fig.add_scatter(
                x=x,
                y=y,
                name=f"n = {n:,}",
                mode="lines+markers",
                line_color=colours.get(n),
                showlegend=place == 1,
                row=1,
                col=place,
            )
        fig.update_xaxes(type="log", title="cells on lines", tickformat=".0%", tickvals=DENSITIES, row=1, col=place)
        fig.update_yaxes(type="log", range=[-0.3, 1.8], tickvals=[0.5, 1, 3, 10, 30], row=1, col=place)
        fig.add_hline(1, line={"color": GREY, "dash": "dot"}, row=1, col=place)  # pyright: ignore
    fig.update_yaxes(title="times faster than dense attention", row=1, col=1)
    said = {"lines": "lines", "half": "one layer of two on lines", "flat": "flat attention, all dense"}
    arms = dict.fromkeys((row["model"], row["alpha"]) for row in result["model"])
    for (model, alpha), colour in zip(arms, (BLUE, GREEN, ORANGE, RED), strict=False):
        some = []
        for each in result["model"]:
            if (each["model"], each["alpha"]) == (model, alpha):
                some.append(each)
        x = value_of_each(some, "n")
        y = value_of_each(some, "times_faster")
        fig.add_scatter(
            x=x,
            y=y,
            mode="lines+markers",
            name=f"{said[model]}, alpha {alpha}",
            line={"color": colour, "dash": "dash"},
            row=1,
            col=3,
        )
    fig.add_hline(1, line={"color": GREY, "dash": "dot"}, row=1, col=3)  # pyright: ignore
    fig.update_xaxes(type="log", tickvals=LENGTHS, ticktext=[f"{n // 1024}k" for n in LENGTHS], row=1, col=3)
    fig.update_yaxes(title="times faster than the model alone", rangemode="tozero", row=1, col=3)
    rows = []
    for each in result["model"]:
        if (each["model"], each["alpha"]) == ("lines", 0.995):
            rows.append(each)
    names = ("sample", "greedy search", "sparse attention", "rest of the model")
    for name, colour in zip(names, (BLUE, ORANGE, GREEN, "#d0d0d0"), strict=True):
        y = []
        for each in rows:
            y.append(each["seconds"].get(name, 0.0) / sum(each["seconds"].values()))
        fig.add_bar(
            x=[f"{row['n'] // 1024}k" for row in rows],
            y=y,
            name=name,
            marker_color=colour,
            row=1,
            col=4,
        )
    fig.update_yaxes(tickformat=".0%", row=1, col=4)
    values = []
    for each in result["model"]:
        if each["model"] == "lines":
            values.append(each)
    whole = max((values), key=lambda row: row["times_faster"])
    found = (
        f"Prompts of {whole['n']:,} tokens are read {whole['times_faster']:.1f} times faster on lines "
        f"(alpha {whole['alpha']}), where {whole['cells']:.1%} of the cells are needed; one core, float32"
    )
    return figure_of(
        fig,
        None,
        found,
        width=1700,
        height=540,
        barmode="stack",
        legend={"orientation": "v", "x": 1.01, "y": 1, "xanchor": "left"},
        bottom=70,
    )


def main(
    *,
    lengths: Sequence[int] = LENGTHS,
    rounds: int = 3,
    parts: Sequence[Literal[*PARTS]] = PARTS,
    out: Path = Path("figures/bench_loopserve.json"),
    page: Path | None = None,
) -> None:
    """Make what the module describes.

    Args:
        page: Replace the table of turns in this page.
    """
    torch.set_num_threads(1)
    started = time.perf_counter()
    result: Row = {part: [] for part in PARTS}
    if out.is_file():  # parts that are not run stay as they are
        result |= json.loads(out.read_text())["result"]
    made_by = {"layer": layer, "model": whole_model, "turns": turns}
    for part in parts:
        result[part] = made_by[part](lengths, rounds)
    settings = {"lengths": lengths, "rounds": rounds, "parts": parts, "threads": 1}
    if page is not None:
        put_table(page, "bench_loopserve", turns_table(result["turns"]))
    text = record("bench-loopserve", result, settings, started=started)
    if {"layer", "model"} <= set(parts):
        save(out.stem, text, figure, out.parent)
    else:
        write_atomic(out, text)


if __name__ == "__main__":
    run(main)
