"""Figure 2 (a) of the LoopServe paper: the heaviest lines of a text's two halves, over the attention map of one head.

    python -m experiments.loopserve.figure2a [--tokens 192] [--head 3.2] [--out figures]

The lines of the first half are the heaviest 5 % for its queries. Those of the second half are the heaviest for the
queries and keys of the second half alone, so vertical lines appear at their place in the text. `sinkscope lines`
measures how many lines the halves share, over texts, heads and shares (Fig. 2 b).
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch

from experiments.drawn import save
from experiments.record import Row, record
from experiments.script import run
from sinkscope.display.style import BLUE, ORANGE, figure_of
from sinkscope.lines.attention import attention_of
from sinkscope.lines.sums import Scores, line_sums, scores_of
from sinkscope.lines.votes import top_lines
from sinkscope.models.text import text_rows, typical_text
from sinkscope.opening.live import target_of
from sinkscope.opening.load import load

ETA = 0.05


def halves(scores: Scores) -> tuple[list[dict[str, list[int]]], torch.Tensor]:
    """By head the lines of the first and the second half, vertical ones by position in the text; and the map."""
    keys = scores.key.shape[1]
    half = keys // 2
    first = top_lines(*line_sums(scores.part(0, half)), [ETA])
    vertical, slash = line_sums(scores.part(half, keys), since=half)
    second = top_lines(vertical[:, half:], slash[:, : keys - half], [ETA])
    found = []
    for head in range(scores.query.shape[0]):
        found.append(
            {
                "first_vertical": first.vertical[0, head].nonzero().flatten().tolist(),
                "first_slash": first.slash[0, head].nonzero().flatten().tolist(),
                "second_vertical": (second.vertical[0, head].nonzero().flatten() + half).tolist(),
                "second_slash": second.slash[0, head].nonzero().flatten().tolist(),
            }
        )
    return found, attention_of(scores.query, scores.key, torch.arange(keys), scores.scaling)


def apart(lines: dict[str, list[int]]) -> float:
    """Share of the slash lines of the second half that are not among those of the first."""
    second = set(lines["second_slash"])
    return len(second - set(lines["first_slash"])) / max(1, len(second))


def telling(lines: dict[str, list[int]], probs: torch.Tensor) -> float:
    """How well a head shows what the figure is about: what slash lines of the second half alone carry there."""
    half = len(probs) // 2
    inside = probs[half:, half:]
    new = set(lines["second_slash"]) - set(lines["first_slash"])
    counts = []
    for offset in new:
        counts.append(float(inside.diagonal(-offset).sum()))
    return sum(counts) * bool(lines["first_slash"])


def figure(data: Row) -> Any:
    """The map, darker where a query attends more, and the lines of both halves over their part of it."""
    import plotly.graph_objects as go

    lines, layer, head = (data["result"][name] for name in ("lines", "layer", "head"))
    shown = []
    for line in data["result"]["map"]:
        shown.append([math.sqrt(int(word) / 1000) for word in line.split()])
    keys = len(shown)
    half = keys // 2
    found = f"Layer {layer}, head {head}: {apart(lines):.0%} of the second half's slash lines are new"
    z = []
    for row in shown:
        z.append([*row, *[None] * (keys - len(row))])
    fig: Any = go.Figure(
        go.Heatmap(
            z=z,
            colorscale="Greys",
            showscale=False,
            hoverinfo="skip",
        )
    )
    for name, colour, (begin, end) in (("first", BLUE, (0, half)), ("second", ORANGE, (half, keys))):
        x = list[float | None]()
        y = list[float | None]()
        for key in lines[f"{name}_vertical"]:
            x += [key, key, None]
            y += [max(key, begin), end - 1, None]
        for offset in lines[f"{name}_slash"]:
            x += [begin, end - 1 - offset, None]
            y += [begin + offset, end - 1, None]
        label = f"heaviest {ETA:.0%} of the lines of the {name} half"
        fig.add_scatter(x=x, y=y, mode="lines", line={"color": colour, "width": 1.2}, name=label)
    fig.add_shape(type="rect", x0=-0.5, x1=half - 0.5, y0=-0.5, y1=half - 0.5, line={"color": BLUE, "dash": "dot"})
    corner = {"x0": half - 0.5, "x1": keys - 0.5, "y0": half - 0.5, "y1": keys - 0.5}
    fig.add_shape(type="rect", **corner, line={"color": ORANGE, "dash": "dot"})
    fig.update_yaxes(range=[keys - 0.5, -0.5], title="query", scaleanchor="x", constrain="domain", showgrid=False)
    fig.update_xaxes(title="key", range=[-0.5, keys - 0.5], constrain="domain", showgrid=False)
    return figure_of(fig, None, found, width=900, height=940, legend=-0.08, bottom=60, top=70)


def main(*, tokens: int = 192, head: str = "", out: Path = Path("figures")) -> None:
    """Make what the module describes.

    Args:
        head: LAYER.HEAD; by default the one with the heaviest new slash lines.
    """
    started = time.perf_counter()
    torch.set_num_threads(1)
    target = target_of(load(None, backend="hf"))
    ids = text_rows(target.tokenizer, typical_text(None), 1, tokens, None)[0]
    found: dict[tuple[int, int], tuple[dict[str, list[int]], torch.Tensor]] = {}

    def see(layer: int, scores: Scores) -> None:
        lines, probs = halves(scores)
        found.update({(layer, head): (own, probs[head]) for head, own in enumerate(lines)})

    with scores_of(target, see, list(range(target.n_layers))):
        target.forward(ids[None])
    layer, head = (int(n) for n in head.split(".")) if head else max(found, key=lambda k: telling(*found[k]))
    lines, probs = found[layer, head]
    shares = []
    for i, row in enumerate(probs.tolist()):
        parts = []
        for share in row[: i + 1]:
            parts.append(str(round(1000 * share)))
        shares.append(" ".join(parts))
    every = {}
    for (a, b), (own, _) in found.items():
        every[f"{a}.{b}"] = apart(own)
    result = {"layer": layer, "head": head, "lines": lines, "slash_lines_that_are_new": every, "map": shares}
    settings = {"model": "bundled", "tokens": tokens, "eta": ETA}
    save(
        "loopserve_fig2a",
        record("loopserve-fig2a", result, settings, started=started),
        figure,
        out,
    )


if __name__ == "__main__":
    run(main)
