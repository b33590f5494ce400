"""Observations 1 to 4 and Figs. 1, 2 and 4 of the LoopServe paper on LongEval's files, beside ordinary text.

    python -m experiments.loopserve.longeval --topics 5_topics.jsonl --lines 200_lines.jsonl [--out figures]

The model in the package (or `--model`) reads the first prompts of LongEval's topic and line retrieval
(github.com/DachengLi1/LongChat, folder longeval/evaluation, Apache-2.0) and pieces of the text that ships, all cut to
one length, by `sinkscope lines` and `experiments.loopserve.tokens`. Numbers alone are kept, and no text of the files.
With `--page`, the table between the two comments that name this module in that page is replaced by the new one.
"""

from __future__ import annotations

import hashlib
import html
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from plotly.subplots import make_subplots

from experiments.drawn import at_place, markdown, put_table, save
from experiments.loopserve import tokens
from experiments.record import Row, record, value_of_each
from experiments.script import run
from sinkscope.lines.lines import lines
from sinkscope.measure import Setup
from sinkscope.opening.load import load
from sinkscope.results.style import BLUE, GREEN, ORANGE, figure_of

COLOURS = (BLUE, ORANGE, GREEN)
ROWS = (  # what the table says: part of the paper, name, place in the result
    ("Obs. 1, Fig. 1", "attention on the heaviest tenth of the lines", "mass"),
    ("", "on random lines of the same length", "random_mass"),
    ("", "cells that they cover", "cells"),
    ("Obs. 2, Fig. 1 d", "lines shared by two inputs", "inputs"),
    ("", "random lines", "inputs_random"),
    ("Obs. 3, Fig. 2 b", "lines of the second half that are the first half's", "segments"),
    ("", "within each half", "segments_relative"),
    ("Obs. 4, Fig. 2 c", "important tokens found, question at the beginning", "begin"),
    ("", "in the middle", "middle"),
    ("", "at the end", "end"),
    ("Fig. 4 a", "found by the last block of the prompt", "last"),
    ("", "by the first block of the answer, without its own queries", "first"),
    ("Fig. 4 b", "shared by blocks of the answer, one apart", "near"),
    ("", "farthest apart", "far"),
)


TENTH = 0.1
DRAWN = (  # panel, part of a source, curve and dash
    (0, "weights", "mass", "solid"),
    (0, "weights", "random_mass", "dot"),
    (1, "overlap", "inputs", "solid"),
    (1, "overlap", "inputs_random", "dot"),
    (2, "overlap", "segments", "solid"),
    (2, "overlap", "segments_random", "dot"),
)
WEIGHTS, AGREEMENT = ("mass", "random_mass", "cells"), ("inputs", "inputs_random", "segments", "segments_relative")


def measure(model: Any, name: str, data: Path | None, *, count: int, length: int, new: int) -> Row:
    """All numbers of one source: as measured, and those of the table."""
    setup = Setup.open(model, loading="whole")
    prompts = []
    if data is not None:
        prompts = tokens.prompts_of(data, count)
    texts = [context + question for context, question in prompts] or None
    weights = lines.on(setup, texts=texts, count=count, length=length)
    found = tokens.token_overlap(setup.target, tokens.questions(setup, prompts, count, length, new), new, 8)
    parts: Row = {}
    shown: dict[str, float | None] = dict.fromkeys(("first", "near", "far"))
    for part, names in (("weights", WEIGHTS), ("overlap", (*AGREEMENT, "segments_random"))):
        parts[part] = {"etas": weights.etas}
        for each in names:
            parts[part][each] = weights.mean(each).tolist()
            shown[each] = parts[part][each][weights.etas.index(TENTH)]
    k = found["budgets"].index(TENTH)
    for each in found["positions"]:
        shown[each["position"]] = each["overlap"][k]
    for each in found["blocks"]:
        if each["block"] == -1:
            shown["last"] = each["overlap"][k]
        if each["block"] == 0 and each["apart"]:
            shown["first"] = each["apart"][k]
    if found["distances"]:
        shown["near"] = found["distances"][0]["overlap"][k]
        shown["far"] = found["distances"][-1]["overlap"][k]
    return {"name": name, "shown": shown, **parts, "tokens": found}


def table(sources: Sequence[Row]) -> str:
    """A row per number, a column per source."""
    rows = []
    for part, said, name in ROWS:
        rows.append([part, said, *(_percent(each["shown"][name]) for each in sources)])
    return markdown(["part", "quantity", *value_of_each(sources, "name")], rows)


def figure(data: Row) -> Any:
    """Six panels: Figs. 1, 1 d, 2 b, 2 c, 4 a and 4 b, a colour for each source, random choices dotted."""
    titles = (
        "Fig. 1: attention on the heaviest lines, by eta",
        "Fig. 1 d: lines shared by two inputs, by eta",
        "Fig. 2 b: lines of the second half that are the first's, by eta",
        "Fig. 2 c: important tokens that the last window finds, by place of the question",
        "Fig. 4 a: found by blocks (0: first of the answer)",
        "Fig. 4 b: shared by blocks of the answer, by distance",
    )
    fig: Any = make_subplots(2, 3, subplot_titles=titles, horizontal_spacing=0.06, vertical_spacing=0.16)
    told = []
    for source, colour in zip(data["result"]["sources"], COLOURS, strict=False):
        name = html.escape(source["name"])
        for number, (x, y, dash) in curves_of(source):
            style: Row = {"name": name, "legendgroup": name, "line": {"color": colour, "dash": dash}}
            first = number == 0 and dash == "solid"
            fig.add_scatter(x=x, y=y, showlegend=first, row=number // 3 + 1, col=number % 3 + 1, **style)
        told.append(f"{name} {_percent(source['shown']['end'])} and {_percent(source['shown']['begin'])}")
    fig.update_yaxes(range=[0, 1.02], tickformat=".0%")
    title = f"Found by the last window, question at the end and at the beginning: {'; '.join(told)}"
    return figure_of(fig, None, title, width=1500, height=900, legend=-0.1)


def curves_of(source: Row) -> list[tuple[int, tuple[list[Any], list[float], str]]]:
    """What is drawn of a source: the panel, x, y, and the dash."""
    found = source["tokens"]
    k = found["budgets"].index(TENTH)
    curves = []
    for number, part, name, dash in DRAWN:
        curves.append((number, (source[part]["etas"], source[part][name], dash)))
    places = [at_place(each["position"]) for each in found["positions"]]
    for number, name, x, key, dash in (
        (3, "positions", places, "overlap", "solid"),
        (4, "blocks", value_of_each(found["blocks"], "block"), "overlap", "solid"),
        (4, "blocks", value_of_each(found["blocks"], "block"), "apart", "dash"),
        (5, "distances", value_of_each(found["distances"], "blocks"), "overlap", "solid"),
    ):
        y = [None if each[key] is None else each[key][k] for each in found[name]]
        curves.append((number, (x, y, dash)))
    return curves


def _percent(share: float | None) -> str:
    """A share in whole per cent; a dash for None."""
    if share is None:
        return "-"
    return f"{share:.0%}"


def main(
    *,
    topics: Path,
    lines: Path,
    model: str = "bundled",
    count: int = 12,
    length: int = 512,
    new: int = 32,
    out: Path = Path("figures"),
    page: Path | None = None,
) -> None:
    """Make what the module describes.

    Args:
        topics: LongEval's 5_topics.jsonl.
        lines: LongEval's 200_lines.jsonl.
        count: Prompts of each file, pieces of ordinary text.
        length: Most tokens of each; longer ones lose their middle.
        new: Most tokens of an answer.
        page: Replace the table in this page.
    """
    torch.set_num_threads(1)
    started = time.perf_counter()
    loaded = load(model)
    files = {"ordinary text": None, "LongEval topics": topics, "LongEval lines": lines}
    options = {"count": count, "length": length, "new": new}
    sources = []
    for name, file in files.items():
        sources.append(measure(loaded, name, file, **options))
    digests = {}
    for file in files.values():
        if file is not None:
            digests[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    origin = "LongEval, github.com/DachengLi1/LongChat, Apache-2.0"
    settings = {"model": model, **options, "window": 8, "files": digests, "origin": origin}
    text = record("loopserve-longeval", {"sources": sources}, settings, started=started)
    save("loopserve_longeval", text, figure, out)
    print(made := table(sources))
    if page is not None:
        put_table(page, "loopserve.longeval", made)


if __name__ == "__main__":
    run(main)
