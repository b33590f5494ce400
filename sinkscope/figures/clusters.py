"""The drawing of `token_clusters`."""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sinkscope.figures.style import BLUE, GREEN, GREY, ORANGE, RED

# The same colour for a head wherever it is drawn; what no head serves is grey.
COLOURS = (BLUE, ORANGE, GREEN, "#cc79a7", "#56b4e9", "#7a5c00", "#4b3f8f", RED)


def draw(result: Any) -> go.Figure:
    """Tokens per head, how strongly the best head fires the sink neuron, and the norms of pairs of tokens."""
    titles = ["Tokens that one head serves", "Sink neuron with one head of layer 0 intact", "Two tokens, no BOS"]
    shown = 3 if result.pairs is not None else 2
    fig = make_subplots(cols=shown, subplot_titles=titles[:shown], horizontal_spacing=0.09)
    if result.ids:
        _bars(fig, result)
        _strengths(fig, result)
    if result.pairs is not None:
        _pairs(fig, result.pairs)
    said = f"clusters of {len(result.ids):,} tokens" if result.ids else "no sink neuron, no clusters"
    fig.update_layout(
        title={"text": f"{html.escape(result.model.name)}: {said}", "x": 0.01, "xanchor": "left"},
        template="plotly_white",
        width=1400 if shown == 3 else 1000,
        height=480,
        margin={"l": 70, "r": 20, "t": 90, "b": 110},
        font={"size": 13},
        barmode="overlay",
        legend={"orientation": "h", "y": -0.22, "x": 0.5, "xanchor": "center", "yanchor": "top"},
    )
    return fig


def _bars(fig: Any, result: Any) -> None:
    colours = {c.head: COLOURS[i % len(COLOURS)] for i, c in enumerate(result.clusters)}
    bars = [(f"head {c.head}", c.tokens, colours[c.head], _words(c.examples)) for c in result.clusters[:16]]
    if rest := result.clusters[16:]:
        bars.append((f"{len(rest)} more", sum(c.tokens for c in rest), COLOURS[0], ""))
    bars += [
        ("several heads", result.unserved, GREY, "fires, but by no single head"),
        ("no head", result.without_heads, GREY, "fires with no head of layer 0 intact"),
        ("silent", result.silent, GREY, "does not fire at all"),
    ]
    names, counts, colour, hover = zip(*bars, strict=True)
    fig.add_bar(
        x=names,
        y=counts,
        marker_color=colour,
        customdata=hover,
        text=[f"{n:,}" for n in counts],
        textposition="outside",
        cliponaxis=False,
        showlegend=False,
        row=1,
        col=1,
        hovertemplate="%{x}: %{y} tokens<br>%{customdata}<extra></extra>",
    )
    fig.update_xaxes(type="category", tickangle=-40, row=1, col=1)
    fig.update_yaxes(title_text="tokens", row=1, col=1)


def _words(examples: Any) -> str:
    return html.escape(" ".join(repr(e) for e in examples))


def _strengths(fig: Any, result: Any) -> None:
    series = (
        ("best head alone", result.best, BLUE),
        ("nothing replaced", result.intact, ORANGE),
        ("every head at its mean", result.background, GREY),
    )
    values = [v for _, column, _ in series for v in column]
    low, high = min([0.0, *values]), max([1.0, *values])
    size = (high - low) / 50
    for name, column, colour in series:
        fig.add_histogram(
            x=column,
            name=name,
            marker_color=colour,
            opacity=0.6,
            row=1,
            col=2,
            xbins={"start": low, "end": high + size, "size": size},
        )
    fig.add_vline(result.threshold, line={"color": RED, "dash": "dash"}, row=1, col=2)
    fig.update_xaxes(title_text="activation over that at the first token of text", row=1, col=2)
    fig.update_yaxes(title_text="tokens", row=1, col=2)


def _pairs(fig: Any, pairs: Any) -> None:
    names = [f"{html.escape(repr(t))}, head {h}" for t, h in zip(pairs.tokens, pairs.heads, strict=True)]
    spots = list(range(len(names)))
    fig.add_heatmap(
        z=pairs.norm,
        x=spots,
        y=spots,
        zmin=0,
        zmax=1,
        colorscale="Viridis",
        row=1,
        col=3,
        text=[[f"{a}<br>then {b}" for b in names] for a in names],
        hovertemplate="%{text}<br>norm %{z:.2f}<extra></extra>",
        colorbar={"title": {"text": "norm at the second,<br>over a first token's"}, "thickness": 12, "len": 0.9},
    )
    for i in spots[1:]:
        if pairs.heads[i] != pairs.heads[i - 1]:
            fig.add_vline(i - 0.5, line={"color": "white", "width": 1}, row=1, col=3)
            fig.add_hline(i - 0.5, line={"color": "white", "width": 1}, row=1, col=3)
    middles = {h: [i for i in spots if pairs.heads[i] == h] for h in dict.fromkeys(pairs.heads)}
    ticks = {"tickvals": [sum(m) / len(m) for m in middles.values()], "ticktext": [f"head {h}" for h in middles]}
    fig.update_xaxes(title_text="second token", **ticks, row=1, col=3)
    fig.update_yaxes(title_text="first token", autorange="reversed", **ticks, row=1, col=3)
