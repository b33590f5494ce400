"""Drawings of measurements over a vocabulary: clusters, atlas, and attacks that are made from them."""

from __future__ import annotations

import html
import math
from bisect import bisect_right
from collections import Counter
from typing import Any

import plotly.graph_objects as go

from sinkscope.files.notation import head_name
from sinkscope.measure.style import (
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    ORANGE,
    RED,
    Panel,
    bars,
    curve,
    dots,
    drawn,
    finished,
    intervals,
    shares,
    upright,
    words,
)

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
    titles = ["Tokens that one head serves", "Sink neuron with one head of layer 0 intact"]
    parts = [_tokens(titles[0], result), _strengths(titles[1], result)] if result.ids else [*map(Panel, titles)]
    parts += [] if result.pairs is None else [_pairs("Two tokens, no BOS", result.pairs)]
    width = 1400 if len(parts) == 3 else 1000
    return drawn(result, parts, width=width, height=480, legend=-0.22, barmode="overlay")


def _tokens(title: str, result: Any) -> Panel:
    shown = [
        (head_name(0, c.head), c.tokens, COLOURS[i % len(COLOURS)], html.escape(" ".join(map(repr, c.examples))))
        for i, c in enumerate(result.clusters[:16])
    ]
    if rest := result.clusters[16:]:
        shown.append((f"{len(rest)} more", sum(c.tokens for c in rest), COLOURS[0], ""))
    shown += [
        ("several heads", result.unserved, GREY, "fires, but by no single head"),
        ("no head", result.without_heads, GREY, "fires with no head of layer 0 intact"),
        ("silent", result.silent, GREY, "does not fire at all"),
    ]
    names, counts, colour, hover = zip(*shown, strict=True)
    made = bars(
        names,
        counts,
        colour,
        customdata=hover,
        text=[f"{n:,}" for n in counts],
        hovertemplate="%{x}: %{y} tokens<br>%{customdata}<extra></extra>",
    )
    return Panel(title, [made], {"type": "category", "tickangle": -40}, "tokens")


def _strengths(title: str, result: Any) -> Panel:
    series = (
        ("best head alone", result.best, BLUE),
        ("nothing replaced", result.intact, ORANGE),
        ("every head at its mean", result.background, GREY),
    )
    values = [v for _, column, _ in series for v in column]
    low, high = min([0.0, *values]), max([1.0, *values])
    bins = {"start": low, "end": high + (high - low) / 50, "size": (high - low) / 50}
    traces = [
        go.Histogram(x=column, name=name, marker_color=colour, opacity=0.6, xbins=bins)
        for name, column, colour in series
    ]
    least = upright(result.threshold, RED, "dash")
    return Panel(title, traces, "activation over that at the first token of text", "tokens", [least])


def _pairs(title: str, pairs: Any) -> Panel:
    names = [f"{html.escape(repr(t))}, {head_name(0, h)}" for t, h in zip(pairs.tokens, pairs.heads, strict=True)]
    spots = list(range(len(names)))
    norms = go.Heatmap(
        z=pairs.norm,
        x=spots,
        y=spots,
        zmin=0,
        zmax=1,
        colorscale="Viridis",
        text=[[f"{a}<br>then {b}" for b in names] for a in names],
        hovertemplate="%{text}<br>norm %{z:.2f}<extra></extra>",
        colorbar={"title": {"text": "norm at the second,<br>over a first token's"}, "thickness": 12, "len": 0.9},
    )
    between = [
        (kind, {axis: i - 0.5, "line": {"color": "white", "width": 1}})
        for i in spots[1:]
        if pairs.heads[i] != pairs.heads[i - 1]
        for kind, axis in (("vline", "x"), ("hline", "y"))
    ]
    middles = {h: [i for i in spots if pairs.heads[i] == h] for h in dict.fromkeys(pairs.heads)}
    ticks = {"tickvals": [sum(m) / len(m) for m in middles.values()], "ticktext": [head_name(0, h) for h in middles]}
    first = {"title_text": "first token", "autorange": "reversed", **ticks}
    return Panel(title, [norms], {"title_text": "second token", **ticks}, first, between)


def atlas(result: Any) -> go.Figure:
    """Repetitions until a sink by head, and frequency against the embedding's norm with resisting tokens marked."""
    titles = ["Repetitions until a sink", "What resisting tokens share"]
    parts = [_histogram(titles[0], result), _shared(titles[1], result)] if result.ids else [*map(Panel, titles)]
    more: dict[str, Any] = {"legend": -0.3, "bottom": 130, "barmode": "stack", "bargap": 0.05}
    return drawn(result, parts, grid={"spacing": 0.08}, width=1300, height=520, **more)


def _histogram(title: str, result: Any) -> Panel:
    """Equal bins (of the logarithm, where it spans much); what is far off or never gets there has its own."""
    got = sorted(n for n in result.repeats if n is not None) or [1]
    low, high = got[len(got) // 50], got[-1 - len(got) // 50]
    edges = list(range(low, high + 1, -(-(high + 1 - low) // _BINS)))
    if high >= 4 * low:
        edges = sorted({round(low * (high / low) ** (i / _BINS)) for i in range(_BINS)})
    labels = [f"under {low:,}", *(f"{n:,}" for n in edges), f"over {high:,}", "never"]
    counts = Counter(
        (h, len(labels) - (1 if n is None else 2) if n is None or n > high else bisect_right(edges, n))
        for h, n in zip(result.head, result.repeats, strict=True)
    )
    heads = [r.head for r in result.by_head]  # the largest first, no head last
    names = ["no single head" if head is None else head_name(0, head) for head in heads]
    traces = [
        go.Bar(
            x=list(range(len(labels))),
            y=[counts[head, place] for place in range(len(labels))],
            name=name,
            marker_color=GREY if head is None else COLOURS[i % len(COLOURS)],
            customdata=labels,
            hovertemplate="%{customdata} repetitions: %{y} tokens<extra>%{fullData.name}</extra>",
        )
        for i, (head, name) in enumerate(zip(heads, names, strict=True))
    ]
    inner = list(range(1, len(labels) - 2))
    ticks = [0, *inner[2 :: max(1, len(inner) // 5)], len(labels) - 2, len(labels) - 1]
    until = f"repetitions until half of the first token's norm in layer {result.sink_layer}"
    named = {"title_text": until, "tickvals": ticks, "ticktext": [labels[i] for i in ticks], "tickangle": -40}
    return Panel(title, traces, named, "tokens")


def _shared(title: str, result: Any) -> Panel:
    every = max(1, math.ceil(len(result.ids) / _POINTS))
    rows = list(zip(result.frequency, result.embedding_norm, result.tokens, result.repeats, strict=True))
    resisting, others = ([r for r in rows if (r[3] is None) == resists] for resists in (True, False))
    traces = [
        dots(
            [max(f, 0.5) for f, *_ in chosen],
            [n for _, n, *_ in chosen],
            name,
            colour,
            5,
            marker_opacity=0.6,
            text=[f"{html.escape(repr(t))}, {'never' if n is None else n} repetitions" for _, _, t, n in chosen],
            hovertemplate="%{text}<br>%{x} in the text, norm %{y:.3g}<extra></extra>",
        )
        for chosen, name, colour in (
            (others[::every], "becomes a sink", GREY),
            (resisting if len(resisting) < _POINTS else resisting[::every], "resists", RED),
        )
    ]
    times = f"times in the neutral text ({result.text_tokens:,} tokens; 0 drawn at 0.5)"
    return Panel(title, traces, {"title_text": times, "type": "log", "dtick": 1}, "norm of the embedding")


def attack(result: Any) -> go.Figure:
    """A column for each context: success at each position, sequences that succeed by length, and by threshold."""
    contexts = list(dict.fromkeys(a.context for a in result.attacks))
    if not contexts:
        return _nothing(result)
    columns = [_success(result, context, first=context == contexts[0]) for context in contexts]
    parts = [column[row] for row in range(3) for column in columns]
    grid = {"rows": 3, "cols": len(contexts), "vertical_spacing": 0.11, "spacing": 0.05, "shared_yaxes": True}
    return drawn(result, parts, grid=grid, width=420 * len(contexts) + 120, height=960, legend=-0.09)


def _success(result: Any, context: str, *, first: bool) -> list[Panel]:
    """The three panels of a context, with a curve for each way to make sequences."""
    mine = sorted((a for a in result.attacks if a.context == context), key=lambda a: a.length)
    longest = mine[-1].length
    traces: list[list[Any]] = [[], [], []]
    for source, (name, color, width) in _SOURCES.items():
        ours = [a for a in mine if a.source == source]
        style: dict[str, Any] = {"name": name, "color": color, "width": width, "legendgroup": source}
        style |= {"marker": {"size": 4 + width}}
        if ours and (last := ours[-1]).length == longest:
            at = list(range(longest - len(last.by_position) + 1, longest + 1))
            traces[0].append(curve(at, last.by_position, mode="lines", showlegend=first, **style))
            traces[2].append(curve(result.thresholds, last.any_swept, showlegend=False, **style))
        if ours:
            shares_of, errors = [a.most.share for a in ours], intervals([a.most for a in ours])
            made = curve([a.length for a in ours], shares_of, showlegend=False, error_y=errors, **style)
            traces[1].append(made)
    lengths = {"title_text": "tokens of a sequence", "type": "log", "tickvals": sorted({a.length for a in mine})}
    below = (f"token of a sequence of {longest}", lengths, "threshold, of BOS's norm")
    half = upright(result.success, GREY, width=1)
    return [
        Panel(_titled(context) * (not row), made, x, shares(y if first else None, -0.03, 1.03), [half] * (row == 2))
        for row, (made, x, y) in enumerate(zip(traces, below, _SUCCESS, strict=True))
    ]


def _titled(context: str) -> str:
    return _CONTEXTS.get(context, html.escape(context))


def _nothing(result: Any) -> go.Figure:
    """A picture that says why there is nothing to draw."""
    fig = go.Figure()
    fig.add_annotation(text=html.escape(result.conclusion()), showarrow=False, font={"size": 16})
    fig.update_xaxes(visible=False)
    fig.update_yaxes(visible=False)
    return finished(fig, result, width=900, height=260)


def detection(result: Any) -> go.Figure:
    """Curves of the rules against all harmless text, and false alarms of each text at the fixed threshold."""
    contexts = list(dict.fromkeys(d.context for d in result.detections))
    if not contexts:
        return _nothing(result)
    parts = [_detected(result, context, first=context == contexts[0]) for context in contexts]
    parts += [_alarms(result, context, first=context == contexts[0]) for context in contexts]
    fig: Any = drawn(
        result,
        parts,
        grid={"rows": 2, "cols": len(contexts), "vertical_spacing": 0.14, "spacing": 0.05, "shared_yaxes": True},
        width=420 * len(contexts) + 120,
        height=760,
        legend=-0.12,
        bottom=120,
        barmode="group",
    )
    listed: set[str | None] = {None}
    for trace in fig.data:  # each name once
        trace.showlegend = trace.name not in listed
        listed.add(trace.name)
    return fig


def _rules(result: Any) -> list[tuple[int, int]]:
    return list(dict.fromkeys((d.hits, d.window) for d in result.detections))


def _detected(result: Any, context: str, *, first: bool) -> Panel:
    mine = [d for d in result.detections if d.context == context and d.roc]
    longest, everything = max((d.length for d in mine), default=None), result.only_harmless or "all"
    rates = [max(rate, _LOWEST) for rate in result.false_rates]
    chosen = [d for d in mine if d.length == longest and d.harmless == everything]
    names = [f"{html.escape(d.attack)}, {d.hits} of {d.window}" for d in chosen]
    traces = [
        curve(
            rates,
            d.roc,
            name,
            BLUE if d.attack == "cluster" else GREEN,
            _DASHES[_rules(result).index((d.hits, d.window)) % len(_DASHES)],
            legendgroup=name,
            hovertemplate=f"{name}: %{{y:.1%}} of {d.attacks} attacks, AUROC {d.auroc:.4f}<extra></extra>",
        )
        for d, name in zip(chosen, names, strict=True)
    ]
    none = words("no attack made a sink", 0.5, 0.5, xref="x domain")
    tokens = f", {longest} tokens" if longest else ""
    return Panel(
        _titled(context),
        traces if mine else [go.Scatter(x=[_LOWEST], y=[None])],  # else no axes are drawn
        {"title_text": f"false alarms{tokens} (left end: none)", **_ALARMS},
        shares("attacks detected" if first else None, -0.03, 1.03),
        [] if mine else [none],
    )


def _alarms(result: Any, context: str, *, first: bool) -> Panel:
    mine = [d for d in result.detections if d.context == context and d.attack == "cluster"]
    longest = max((d.length for d in mine), default=0)
    highest = max(d.false_alarms.high for d in result.detections)
    traces: list[Any] = []
    for rule, color in zip(_rules(result), (GREY, BLUE, ORANGE, GREEN), strict=False):
        ours = [d for d in mine if d.length == longest and (d.hits, d.window) == rule and d.harmless != "all"]
        name, alarms = f"false alarms, {rule[0]} of {rule[1]}", [d.false_alarms for d in ours]
        texts, raised = [html.escape(d.harmless) for d in ours], [one.share for one in alarms]
        traces.append(bars(texts, raised, color, name=name, legendgroup=name, error_y=intervals(alarms)))
    pieces = f"pieces that raise the alarm<br>at threshold {result.threshold:g}" if first else None
    return Panel("", traces, "harmless text", shares(pieces, 0, min(1.0, 1.1 * highest)))
