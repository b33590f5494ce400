"""The drawing of the circuit of a sink: a graph from the first token to the heads that read it."""

from __future__ import annotations

import html
from typing import Any, NamedTuple

import plotly.graph_objects as go

from sinkscope.files.tables import percent
from sinkscope.measure.style import BLUE, GREEN, GREY, ORANGE, RED, finished

_WIDEST = 9.0  # pixels of an edge whose share is one
_CARRIES = 0.5  # share from which on a component is taken to carry what others write
_THIN = 0.05
_ROLES = ("text", "mark", "factor", "neuron", "spike", "head")
_FILLED = {"text": "white", "mark": BLUE, "factor": GREY, "neuron": ORANGE, "spike": RED, "head": GREEN}


def draw_circuit(result: Any) -> go.Figure:
    """Nodes from left to right by layer, shares on the edges, the proofs when one points at a share."""
    edges = _edges(result)
    places, roles = _places(edges)
    fig = go.Figure([*(_line(places, edge) for edge in edges), _nodes(places, roles)])
    told = "blue: first token, orange: repetition; numbers: share of the input (point at one for its proof)"
    note = {"text": told if edges else "no circuit", "font": {"color": GREY}, "showarrow": False}
    here = {"xref": "paper", "yref": "paper", "x": 0, "y": -0.1, "xanchor": "left"}
    columns, rows = ({place[axis] for place in places.values()} for axis in (0, 1))
    return finished(
        fig,
        result,
        bottom=60,
        showlegend=False,
        width=max(800, 150 * len(columns)),
        height=max(360, 160 + 42 * len(rows)),
        annotations=[*(_label(places, edge) for edge in edges if edge.step is not None), note | here],
        xaxis={"visible": False},
        yaxis={"visible": False},
    )


class _Edge(NamedTuple):
    source: str
    target: str
    step: Any  # None: from the text to what marks it
    repeated: bool
    via: bool = False  # the source is needed, and writes nothing there itself: it acts through the target


def _edges(result: Any) -> list[_Edge]:
    starts = {
        "first token": f"first token {result.first_token!r}",
        "repetition": f"{result.repeats} x {result.repeated!r}",
    }
    found: dict[tuple[str, str, bool], _Edge] = {}
    for step in result.steps:
        repeated, marks = step.step == "repetition", step.step in starts
        if step.source == "all of them" or (marks and (step.share or 0.0) < 0 and (step.necessity or 0.0) <= 0):
            continue
        target, via = step.target, False
        if marks:
            found.setdefault((s := starts[step.step], step.source, repeated), _Edge(s, step.source, None, repeated))
            through = [o.source for o in result.steps if o.step == step.step and (o.share or 0.0) >= _CARRIES]
            via = step.share is not None and abs(step.share) < _THIN and bool(through)
            target = through[-1] if via else target
        found[step.source, target, repeated] = _Edge(step.source, target, step, repeated, via)
    return list(found.values())


def _places(edges: list[_Edge]) -> tuple[dict[str, tuple[float, float]], dict[str, str]]:
    """Where each node is, and what it is: columns by role and layer, and within a role a row for each node."""
    column: dict[str, tuple[int, int]] = {}
    for source, target, step, _, via in edges:
        if step is None:
            column.setdefault(source, (0, 0))
            continue
        ends = {"gate and up": (2, 3), "column": (3, 4), "keys": (4, 5)}.get(step.step, (1, 2))
        ends = (1, 4) if target in ("keys", "spike") and ends == (1, 2) else ends
        ends = (1, 5) if step.step == "keys" and source not in ("keys", "spike") else ends
        layer = -1 if step.layer is None else step.layer
        # An MLP comes behind the heads of its layer.
        own = -1 if "embedding" in source else layer
        column.setdefault(source, (ends[0], 2 * own + source.startswith("MLP") if ends[0] in (1, 3) else 0))
        if not via:
            column.setdefault(target, (ends[1], 2 * layer if ends[1] in (3, 5) else 0))
    order = sorted(set(column.values()))
    places: dict[str, tuple[float, float]] = {}
    for role in range(len(_ROLES)):
        names = [name for name, where in column.items() if where[0] == role]
        for i, name in enumerate(names):
            places[name] = float(order.index(column[name])), (len(names) - 1) / 2 - i
    return places, {name: _ROLES[where[0]] for name, where in column.items()}


def _line(places: dict[str, tuple[float, float]], edge: _Edge) -> go.Scatter:
    share = 0.0 if edge.step is None or edge.step.share is None else edge.step.share
    first = edge.step is None or edge.step.step == "first token"
    dash = "dash" if edge.via else "dot" if share < 0 else "solid"
    return go.Scatter(
        x=[places[edge.source][0], places[edge.target][0]],
        y=[places[edge.source][1], places[edge.target][1]],
        mode="lines",
        line={"color": ORANGE if edge.repeated else BLUE if first else GREY, "width": 1 + _WIDEST * min(1, abs(share))},
        line_dash=dash,
        opacity=0.45,
        hoverinfo="skip",
    )


def _label(places: dict[str, tuple[float, float]], edge: _Edge) -> dict[str, Any]:
    step = edge.step
    (x0, y0), (x1, y1) = places[edge.source], places[edge.target]
    at = 0.7 if step.step == "keys" else 0.5 if edge.via or edge.repeated or step.step == "gate and up" else 0.3
    proof = (
        f"{edge.source} \u2192 {edge.target}, share {percent(step.share)}",
        f"necessity {percent(step.necessity)}, random control {percent(step.necessity_control)}",
        f"sufficiency {percent(step.sufficiency)}, random control {percent(step.sufficiency_control)}",
    )
    return {
        "x": x0 + at * (x1 - x0),
        "y": y0 + at * (y1 - y0),
        "text": f"needed {percent(step.necessity)}" if edge.via else percent(step.share),
        "hovertext": "<br>".join(map(html.escape, proof)),
        "font": {"size": 11},
        "bgcolor": "rgba(255,255,255,0.8)",
        "borderpad": 0,
        "showarrow": False,
    }


def _nodes(places: dict[str, tuple[float, float]], roles: dict[str, str]) -> go.Scatter:
    names = list(places)
    return go.Scatter(
        x=[places[name][0] for name in names],
        y=[places[name][1] for name in names],
        mode="markers+text",
        marker={"size": 16, "color": [_FILLED[roles[name]] for name in names], "line": {"width": 1, "color": GREY}},
        text=[html.escape(name) for name in names],
        textposition="top center",
        textfont={"size": 12},
        cliponaxis=False,
        hoverinfo="skip",
    )
