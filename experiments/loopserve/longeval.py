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

from experiments.drawn import at_place, put_table, save
from experiments.loopserve import tokens
from experiments.record import Row, record
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


WEIGHTS, AGREEMENT = ("mass", "random_mass", "cells"), ("inputs", "inputs_random", "segments", "segments_relative")


def measure(model: Any, name: str, data: Path | None, *, count: int, length: int, new: int) -> Row:
    """All numbers of one source: as measured, and those of the table."""
    setup = Setup.open(model, loading="whole")
    if data is None:
        prompts = []
    else:
        prompts = tokens.prompts_of(data, count)
    texts = [context + question for context, question in prompts] or None
    weights = lines.on(setup, texts=texts, count=count, length=length)
    asked = tokens.questions(setup, prompts, count, length, new)
    found = tokens.token_overlap(setup.target, asked, new, 8)
    i = weights.etas.index(0.1)
    k = found["budgets"].index(0.1)
    blocks = {}
    for each in found["blocks"]:
        blocks[each["block"]] = each
    first = blocks[0]["apart"]
    near = found["distances"]
    shown: dict[str, float | None] = {}
    for each in (*WEIGHTS, *AGREEMENT):
        shown[each] = float(weights.mean(each)[i])
    shown |= {each["position"]: each["overlap"][k] for each in found["positions"]}
    shown |= {"last": blocks[-1]["overlap"][k], "first": None if first is None else first[k]}
    far = None
    if near:
        far = near[-1]["overlap"][k]
    shown |= {"near": near[0]["overlap"][k] if near else None, "far": far}
    return {
        "name": name,
        "shown": shown,
        "weights": {"etas": weights.etas, **{each: weights.mean(each).tolist() for each in WEIGHTS}},
        "overlap": {
            "etas": weights.etas,
            **{each: weights.mean(each).tolist() for each in (*AGREEMENT, "segments_random")},
        },
        "tokens": found,
    }


def table(sources: Sequence[Row]) -> str:
    """Markdown: a row per number, a column per source."""
    lines = ["| part | quantity | " + " | ".join(each["name"] for each in sources) + " |"]
    lines.append("|---" * (2 + len(sources)) + "|")
    for part, said, name in ROWS:
        numbers = []
        for each in sources:
            numbers.append(each["shown"][name])
        parts = []
        for n in numbers:
            parts.append("-" if n is None else f"{n:.0%}")
        lines.append(f"| {part} | {said} | " + " | ".join(parts) + " |")
    return "\n".join(lines)


def title(sources: Sequence[Row]) -> str:
    """What the last window finds in each source, with the question at the end and at the beginning."""
    found = []
    for each in sources:
        found.append(f"{each['name']} {each['shown']['end']:.0%} and {each['shown']['begin']:.0%}")
    return f"Found by the last window, question at the end and at the beginning: {'; '.join(found)}"


def figure(data: Row) -> Any:
    """Six panels: Figs. 1, 1 d, 2 b, 2 c, 4 a and 4 b, a colour for each source, random choices dotted."""
    sources = data["result"]["sources"]
    from plotly.subplots import make_subplots

    titles = [
        "Fig. 1: attention on the heaviest lines",
        "Fig. 1 d: lines shared by two inputs",
        "Fig. 2 b: lines of the second half that are the first's",
        "Fig. 2 c: important tokens that the last window finds",
        "Fig. 4 a: found by blocks (0: first of the answer)",
        "Fig. 4 b: shared by blocks of the answer",
    ]
    fig: Any = make_subplots(rows=2, cols=3, subplot_titles=titles, horizontal_spacing=0.06, vertical_spacing=0.16)

    def curve(at: int, x: Any, y: Any, source: Row, colour: str, dash: str = "solid") -> None:
        row, column = divmod(at, 3)
        name = html.escape(source["name"])
        first = at == 0 and dash == "solid"
        line = {"color": colour, "dash": dash}
        fig.add_scatter(x=x, y=y, name=name, legendgroup=name, showlegend=first, line=line, row=row + 1, col=column + 1)

    for source, colour in zip(sources, COLOURS, strict=False):
        lines = source["weights"]
        agree = source["overlap"]
        found = source["tokens"]
        k = found["budgets"].index(0.1)
        curve(0, lines["etas"], lines["mass"], source, colour)
        curve(0, lines["etas"], lines["random_mass"], source, colour, "dot")
        for at, name in ((1, "inputs"), (2, "segments")):
            curve(at, agree["etas"], agree[name], source, colour)
            curve(at, agree["etas"], agree[f"{name}_random"], source, colour, "dot")
        places = found["positions"]
        name = html.escape(source["name"])
        shares = []
        for p in places:
            shares.append(p["overlap"][k])
        x = []
        for p in places:
            x.append(at_place(p["position"]))
        fig.add_bar(x=x, y=shares, name=name, legendgroup=name, showlegend=False, marker_color=colour, row=2, col=1)
        blocks = []
        for each in found["blocks"]:
            if each["overlap"]:
                blocks.append(each)
        curve(4, [b["block"] for b in blocks], [b["overlap"][k] for b in blocks], source, colour)
        apart = []
        for b in blocks:
            if b["apart"]:
                apart.append(b)
        curve(4, [b["block"] for b in apart], [b["apart"][k] for b in apart], source, colour, "dash")
        curve(
            5,
            [d["blocks"] for d in found["distances"]],
            [d["overlap"][k] for d in found["distances"]],
            source,
            colour,
        )
    for at, said in enumerate(("eta", "eta", "eta", "question", "block", "blocks apart")):
        fig.update_xaxes(title_text=said, row=at // 3 + 1, col=at % 3 + 1)
    fig.update_yaxes(range=[0, 1.02], tickformat=".0%")
    return figure_of(fig, None, title(sources), width=1500, height=900, legend=-0.1)


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
    loaded = load(model, backend="hf")
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
