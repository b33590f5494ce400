"""Drawings of measurements over a vocabulary: clusters, atlas, and attacks that are made from them."""

from __future__ import annotations

import html
import math
from bisect import bisect_right
from typing import Any

import plotly.graph_objects as go

from sinkscope.figures.style import (
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    ORANGE,
    RED,
    axes,
    finished,
    intervals,
    panels,
    shares,
)
from sinkscope.notation import head_name

_BINS = 24
_POINTS = 4000  # more would only make the file large
_CONTEXTS = {"BOS": "after BOS", "no BOS": "without BOS", "chat": "behind a chat prefix"}
_SOURCES = {  # name, colour, width: lines that lie on each other can be told apart
    "cluster": ("drawn from one cluster", BLUE, 7),
    "random": ("random tokens", GREY, 3),
    "repeated": ("one token repeated", GREEN, 4.5),
    "greedy": ("greedy search in a cluster", ORANGE, 3),
    "coordinate": ("coordinate search in a cluster", RED, 1.2),
}
_DASHES = ("dot", "solid", "dash", "dashdot")
_LOWEST = 3e-4  # where a rate of zero is drawn on the logarithmic axis
_ALARMS = {
    "type": "log",
    "range": [math.log10(_LOWEST) - 0.15, 0.1],
    "tickvals": [_LOWEST, 1e-3, 1e-2, 0.1, 1],
    "ticktext": ["0", "0.1%", "1%", "10%", "100%"],
}
_SUCCESS = [
    "share of sequences above half<br>of BOS's norm, by position",
    "sequences above it at half of<br>their positions or more",
    "sequences above a threshold<br>somewhere, longest",
]


def clusters(result: Any) -> go.Figure:
    """Tokens per head, how strongly the best head fires the sink neuron, and the norms of pairs of tokens."""
    titles = ["Tokens that one head serves", "Sink neuron with one head of layer 0 intact", "Two tokens, no BOS"]
    shown = 3 if result.pairs is not None else 2
    fig = panels(titles[:shown])
    if result.ids:
        _bars(fig, result)
        _strengths(fig, result)
    if result.pairs is not None:
        _pairs(fig, result.pairs)
    width = 1400 if shown == 3 else 1000
    return finished(fig, result, width=width, height=480, legend=-0.22, barmode="overlay")


def _bars(fig: Any, result: Any) -> None:
    bars = [
        (head_name(0, c.head), c.tokens, COLOURS[i % len(COLOURS)], html.escape(" ".join(map(repr, c.examples))))
        for i, c in enumerate(result.clusters[:16])
    ]
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
    axes(fig, x={"type": "category", "tickangle": -40}, y="tokens")


def _strengths(fig: Any, result: Any) -> None:
    series = (
        ("best head alone", result.best, BLUE),
        ("nothing replaced", result.intact, ORANGE),
        ("every head at its mean", result.background, GREY),
    )
    values = [v for _, column, _ in series for v in column]
    low, high = min([0.0, *values]), max([1.0, *values])
    bins = {"start": low, "end": high + (high - low) / 50, "size": (high - low) / 50}
    for name, column, colour in series:
        fig.add_histogram(x=column, name=name, marker_color=colour, opacity=0.6, xbins=bins, row=1, col=2)
    fig.add_vline(result.threshold, line={"color": RED, "dash": "dash"}, row=1, col=2)
    axes(fig, 1, 2, x="activation over that at the first token of text", y="tokens")


def _pairs(fig: Any, pairs: Any) -> None:
    names = [f"{html.escape(repr(t))}, {head_name(0, h)}" for t, h in zip(pairs.tokens, pairs.heads, strict=True)]
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
    ticks = {"tickvals": [sum(m) / len(m) for m in middles.values()], "ticktext": [head_name(0, h) for h in middles]}
    first = {"title_text": "first token", "autorange": "reversed", **ticks}
    axes(fig, 1, 3, x={"title_text": "second token", **ticks}, y=first)


def atlas(result: Any) -> go.Figure:
    """Repetitions until a sink by head, and frequency against the embedding's norm with resisting tokens marked."""
    fig = panels(["Repetitions until a sink", "What resisting tokens share"], spacing=0.08)
    if result.ids:
        _histogram(fig, result)
        _shared(fig, result)
    more: dict[str, Any] = {"legend": -0.3, "bottom": 130, "barmode": "stack", "bargap": 0.05}
    return finished(fig, result, width=1300, height=520, **more)


def _histogram(fig: Any, result: Any) -> None:
    """Equal bins (of the logarithm, where it spans much); what is far off or never gets there has its own."""
    got = sorted(n for n in result.repeats if n is not None) or [1]
    low, high = got[len(got) // 50], got[-1 - len(got) // 50]
    edges = list(range(low, high + 1, -(-(high + 1 - low) // _BINS)))
    if high >= 4 * low:
        edges = sorted({round(low * (high / low) ** (i / _BINS)) for i in range(_BINS)})
    labels = [f"under {low:,}", *(f"{n:,}" for n in edges), f"over {high:,}", "never"]
    for i, head in enumerate(r.head for r in result.by_head):  # the largest first, no head last
        counts = [0] * len(labels)
        for h, n in zip(result.head, result.repeats, strict=True):
            if h == head:
                counts[-1 if n is None else -2 if n > high else bisect_right(edges, n)] += 1
        name = "no single head" if head is None else head_name(0, head)
        fig.add_bar(
            x=list(range(len(labels))),
            y=counts,
            name=name,
            marker_color=GREY if head is None else COLOURS[i % len(COLOURS)],
            customdata=labels,
            row=1,
            col=1,
            hovertemplate="%{customdata} repetitions: %{y} tokens<extra>" + name + "</extra>",
        )
    inner = list(range(1, len(labels) - 2))
    ticks = [0, *inner[2 :: max(1, len(inner) // 5)], len(labels) - 2, len(labels) - 1]
    until = f"repetitions until half of the first token's norm in layer {result.sink_layer}"
    named = {"title_text": until, "tickvals": ticks, "ticktext": [labels[i] for i in ticks], "tickangle": -40}
    axes(fig, x=named, y="tokens")


def _shared(fig: Any, result: Any) -> None:
    every = max(1, math.ceil(len(result.ids) / _POINTS))
    rows = list(zip(result.frequency, result.embedding_norm, result.tokens, result.repeats, strict=True))
    for wanted, name, colour in ((False, "becomes a sink", GREY), (True, "resists", RED)):
        chosen = [r for r in rows if (r[3] is None) == wanted]
        chosen = chosen if wanted and len(chosen) < _POINTS else chosen[::every]
        fig.add_scatter(
            x=[max(f, 0.5) for f, *_ in chosen],
            y=[n for _, n, *_ in chosen],
            mode="markers",
            name=name,
            marker={"color": colour, "size": 5, "opacity": 0.6},
            row=1,
            col=2,
            text=[f"{html.escape(repr(t))}, {'never' if n is None else n} repetitions" for _, _, t, n in chosen],
            hovertemplate="%{text}<br>%{x} in the text, norm %{y:.3g}<extra></extra>",
        )
    title = f"times in the neutral text ({result.text_tokens:,} tokens; 0 drawn at 0.5)"
    axes(fig, 1, 2, x={"title_text": title, "type": "log", "dtick": 1}, y="norm of the embedding")


def attack(result: Any) -> go.Figure:
    """A column for each context: success at each position, sequences that succeed by length, and by threshold."""
    contexts = list(dict.fromkeys(a.context for a in result.attacks))
    if not contexts:
        return _nothing(result)
    fig = _columns(contexts, rows=3, vertical_spacing=0.11)
    for column, context in enumerate(contexts, 1):
        mine = sorted((a for a in result.attacks if a.context == context), key=lambda a: a.length)
        longest = mine[-1].length
        for source in _SOURCES:
            _source(fig, [a for a in mine if a.source == source], longest, result.thresholds, column)
        lengths = {"title_text": "tokens of a sequence", "type": "log", "tickvals": sorted({a.length for a in mine})}
        below = (f"token of a sequence of {longest}", lengths, "threshold, of BOS's norm")
        for row, (x, y) in enumerate(zip(below, _SUCCESS, strict=True), 1):
            axes(fig, row, column, x=x, y=shares(y if column == 1 else None, -0.03, 1.03))
        fig.add_vline(result.success, line={"color": GREY, "dash": "dot", "width": 1}, row=3, col=column)
    return finished(fig, result, width=420 * len(contexts) + 120, height=960, legend=-0.09)


def _columns(contexts: list[str], **more: Any) -> Any:
    """A column of panels for each context."""
    titles = [_CONTEXTS.get(c, html.escape(c)) for c in contexts]
    return panels(titles, cols=len(titles), spacing=0.05, shared_yaxes=True, **more)


def _source(fig: Any, ours: list[Any], longest: int, thresholds: Any, column: int) -> None:
    """One way to make sequences, in the three panels of a context."""
    if not ours:
        return
    last = ours[-1]
    name, color, width = _SOURCES[last.source]
    style: dict[str, Any] = {"name": name, "legendgroup": last.source, "col": column}
    style |= {"line": {"color": color, "width": width}, "marker": {"size": 4 + width}}
    if last.length == longest:
        at = list(range(longest - len(last.by_position) + 1, longest + 1))
        fig.add_scatter(x=at, y=last.by_position, mode="lines", showlegend=column == 1, row=1, **style)
        style |= {"mode": "lines+markers", "showlegend": False}
        fig.add_scatter(x=thresholds, y=last.any_swept, row=3, **style)
    style |= {"mode": "lines+markers", "showlegend": False, "error_y": intervals([a.most for a in ours])}
    fig.add_scatter(x=[a.length for a in ours], y=[a.most.share for a in ours], row=2, **style)


def _nothing(result: Any) -> go.Figure:
    """A picture that says why there is nothing to draw."""
    fig = go.Figure()
    fig.add_annotation(text=html.escape(result.conclusion()), showarrow=False, font={"size": 16})
    fig.update_xaxes(visible=False)
    fig.update_yaxes(visible=False)
    return finished(fig, result, width=900, height=260)


def detection(result: Any) -> go.Figure:
    """Curves of the rules against all harmless text, and false alarms of each text at the fixed threshold."""
    rows = result.detections
    contexts = list(dict.fromkeys(d.context for d in rows))
    if not contexts:
        return _nothing(result)
    fig = _columns(contexts, rows=2, vertical_spacing=0.14)
    rules = list(dict.fromkeys((d.hits, d.window) for d in rows))
    for column, context in enumerate(contexts, 1):
        mine = [d for d in rows if d.context == context]
        longest = max((d.length for d in mine if d.roc), default=None)
        if longest is None:
            place = {"row": 1, "col": column}
            middle = {"x": 0.5, "y": 0.5, "xref": "x domain", "yref": "y domain", "showarrow": False}
            fig.add_annotation(text="no attack made a sink", **middle, **place)
            fig.add_scatter(x=[_LOWEST], y=[None], showlegend=False, **place)  # else no axes are drawn
        everything = result.only_harmless or "all"
        drawn = [d for d in mine if d.length == longest and d.harmless == everything and d.roc]
        _detected(fig, result, drawn, rules, column)
        _alarms(fig, [d for d in mine if d.attack == "cluster"], rules, column)
        tokens = f", {longest} tokens" if longest else ""
        axes(fig, 1, column, x={"title_text": f"false alarms{tokens} (left end: none)", **_ALARMS})
        axes(fig, 2, column, x="harmless text")
    highest = max(d.false_alarms.high for d in rows)
    axes(fig, 1, None, y=shares(None, -0.03, 1.03))
    axes(fig, 2, None, y=shares(None, 0, min(1.0, 1.1 * highest)))
    axes(fig, 1, 1, y="attacks detected")
    axes(fig, 2, 1, y=f"pieces that raise the alarm<br>at threshold {result.threshold:g}")
    more: dict[str, Any] = {"legend": -0.12, "bottom": 120, "barmode": "group"}
    return finished(fig, result, width=420 * len(contexts) + 120, height=760, **more)


def _detected(fig: Any, result: Any, drawn: list[Any], rules: list[tuple[int, int]], column: int) -> None:
    rates = [max(rate, _LOWEST) for rate in result.false_rates]
    for d in drawn:
        name = f"{html.escape(d.attack)}, {d.hits} of {d.window}"
        dash = _DASHES[rules.index((d.hits, d.window)) % len(_DASHES)]
        fig.add_scatter(
            x=rates,
            y=d.roc,
            mode="lines+markers",
            name=name,
            legendgroup=name,
            line={"color": BLUE if d.attack == "cluster" else GREEN, "dash": dash},
            showlegend=not any(t.name == name for t in fig.data),
            hovertemplate=f"{name}: %{{y:.1%}} of {d.attacks} attacks, AUROC {d.auroc:.4f}<extra></extra>",
            row=1,
            col=column,
        )


def _alarms(fig: Any, mine: list[Any], rules: list[tuple[int, int]], column: int) -> None:
    longest = max((d.length for d in mine), default=0)
    for rule, color in zip(rules, (GREY, BLUE, ORANGE, GREEN), strict=False):
        ours = [d for d in mine if d.length == longest and (d.hits, d.window) == rule and d.harmless != "all"]
        name = f"false alarms, {rule[0]} of {rule[1]}"
        fig.add_bar(
            x=[html.escape(d.harmless) for d in ours],
            y=[d.false_alarms.share for d in ours],
            name=name,
            legendgroup=name,
            marker_color=color,
            showlegend=not any(t.name == name for t in fig.data),
            error_y=intervals([d.false_alarms for d in ours]),
            row=2,
            col=column,
        )
