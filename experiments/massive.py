"""Massive activations, value-state drain and secondary sinks on typical text, with BOS and without.

    python -m experiments.massive [--model NAME] [--out figures]

A norm is high if it exceeds three times the upper quartile of later positions, the threshold of `find-sinks`.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import torch
from einops import rearrange, reduce
from jaxtyping import Bool, Float, Int
from plotly.subplots import make_subplots
from torch import Tensor

import sinkscope as ss
from experiments.drawn import save
from experiments.record import record
from experiments.script import run
from sinkscope.display.style import BLUE, GREEN, GREY, ORANGE, RED, finished
from sinkscope.errors import UnsupportedError
from sinkscope.measure import Setup
from sinkscope.models.text import text_rows

HIGH = 3.0  # a norm is high above this multiple of the upper quartile


def streams(setup: Setup, ids: Int[Tensor, "row pos"]) -> Float[Tensor, "layer row pos d_model"]:
    """The residual stream after every layer."""
    values = ss.trace(setup.target, ids, ["blocks.*.hook_resid_post"])
    return torch.stack(list(values.values())).float()


def magnitudes(stream: Float[Tensor, "row pos d_model"]) -> dict[str, Any]:
    """Largest and median magnitudes of a layer, and its massive dimensions (Sun et al. 2024), per text, averaged."""
    size = stream.abs()
    flat = rearrange(size, "row pos d_model -> row (pos d_model)")
    median = float(flat.median(1).values.mean())
    largest = reduce(size, "row pos d_model -> row d_model", "max").median(0).values
    massive = (largest > 100) & (largest > 1000 * size.median())
    dims = massive.nonzero().flatten().tolist()
    share = 0.0
    if dims:
        share = float((size[..., dims] > max(100.0, 1000 * median)).any(-1).float().mean())
    return {
        "top": flat.topk(3).values.mean(0).tolist(),
        "median": median,
        "dims": sorted(dims, key=lambda dim: -float(largest[dim])),
        "share": share,  # of positions; near 1 the dimension is massive everywhere and no sink (Owen et al. 2025)
    }


def value_drain(setup: Setup, ids: Int[Tensor, "row pos"]) -> list[float | None] | None:
    """Norm of the first token's value vectors over later ones, mean over kv heads, by layer (Guo et al. 2024)."""
    try:
        norms = ss.trace(setup.target, ids, ["blocks.*.attn.hook_v"], "norm")  # row pos kv_head
    except UnsupportedError:
        return None
    ratios: list[float | None] = []
    for norm in norms.values():
        first = norm[:, 0].mean(0)
        later = reduce(norm[:, 1:], "row pos kv_head -> kv_head", "mean")
        ratio = (first / later)[later > 0]
        ratios.append(float(ratio.mean()) if len(ratio) else None)
    return ratios


def secondary_sinks(
    norms: Float[Tensor, "layer row pos"], high: Bool[Tensor, "layer row pos"], cosine: Float[Tensor, "layer row pos"]
) -> list[dict[str, Any]]:
    """Each run of layers with a high norm at a position other than the first (Wong et al. 2025)."""
    sinks: list[dict[str, Any]] = []
    for row, pos in high.any(0).nonzero().tolist():
        if pos == 0:
            continue
        layer = 0
        while layer < len(high):
            begin = layer
            while layer < len(high) and bool(high[layer, row, pos]):
                layer += 1
            if layer > begin:
                here = norms[begin:layer, row, pos]
                sinks.append(
                    {
                        "text": row,
                        "position": pos,
                        "created": begin,
                        "lifetime": layer - begin,
                        "peak": float(here.max()),
                        "of_first": float((here / norms[begin:layer, row, 0]).max()),
                        "cosine": float(cosine[begin + int(here.argmax()), row, pos]),
                    }
                )
            layer += 1
    return sinks


def condition(setup: Setup, ids: Int[Tensor, "row pos"], bos: bool) -> dict[str, Any]:
    """The measurement on texts that begin in one way."""
    stream = streams(setup, ids)
    norms = stream.norm(dim=-1)
    upper = rearrange(norms[:, :, 1:], "layer row pos -> layer (row pos)").quantile(0.75, dim=1)
    high = norms > HIGH * rearrange(upper, "layer -> layer 1 1")
    cosine = torch.cosine_similarity(stream, stream[:, :, :1], dim=-1)
    tokens = Counter(ids[high.any(0)].tolist())
    return {
        "bos": bos,
        "layers": [magnitudes(layer) for layer in stream],
        "first_norm": norms[:, :, 0].median(1).values.tolist(),
        "upper_quartile": upper.tolist(),
        "value_ratio": value_drain(setup, ids),
        "tokens": {setup.tokenizer.decode([token]): count for token, count in tokens.most_common()},
        "secondary": secondary_sinks(norms, high, cosine),
    }


def massive(setup: Setup) -> dict[str, Any]:
    """The measurement with BOS, if the tokenizer has one, and without."""
    rows, length = setup.ids.shape
    conditions = []
    if setup.bos is not None:
        conditions.append(condition(setup, setup.ids, True))
    without = text_rows(setup.tokenizer, setup.text, rows, length, None)
    conditions.append(condition(setup, without, False))
    return {"model": setup.target.name, "texts": rows, "length": length, "conditions": conditions}


def figure(data: dict[str, Any]) -> go.Figure:
    """A row per condition: magnitudes per layer, norms of value vectors, and where secondary sinks begin."""
    conditions = data["result"]["conditions"]
    titles = []
    for one in conditions:
        start = "with BOS" if one["bos"] else "without BOS"
        titles += [f"largest activations, {start}", f"values of the first token, {start}", f"secondary sinks, {start}"]
    fig = make_subplots(rows=len(conditions), cols=3, subplot_titles=titles)
    for row, one in enumerate(conditions, start=1):
        layers = list(range(len(one["layers"])))
        for place, color in enumerate((BLUE, ORANGE, GREEN)):
            sizes = [layer["top"][place] for layer in one["layers"]]
            fig.add_scatter(x=layers, y=sizes, line_color=color, name=f"top {place + 1}", row=row, col=1)
        medians = [layer["median"] for layer in one["layers"]]
        fig.add_scatter(x=layers, y=medians, line_color=GREY, name="median", row=row, col=1)
        fig.add_scatter(x=layers, y=one["value_ratio"], line_color=RED, name="value ratio", row=row, col=2)
        created = [sink["created"] for sink in one["secondary"]]
        lifetime = [sink["lifetime"] for sink in one["secondary"]]
        marker = {"color": BLUE, "opacity": 0.5, "size": 12}
        fig.add_scatter(x=created, y=lifetime, mode="markers", marker=marker, row=row, col=3)
        fig.update_xaxes(title_text="created after layer", range=[-0.5, len(layers) - 0.5], row=row, col=3)
        fig.update_yaxes(title_text="lifetime in layers", range=[0, len(layers) + 0.5], row=row, col=3)
    fig.update_yaxes(type="log", exponentformat="power", col=1)
    fig.update_yaxes(type="log", exponentformat="power", col=2)
    layers = conditions[0]["layers"]
    peak = max(range(len(layers)), key=lambda layer: layers[layer]["top"][0])
    title = (
        f"{data['result']['model']}: largest activation {layers[peak]['top'][0]:.4g} after layer {peak}, where the "
        f"median is {layers[peak]['median']:.3g}"
    )
    return finished(fig, None, title, width=1400, height=120 + 340 * len(conditions), showlegend=False)


def main(*, model: str | None = None, text: str | None = None, out: Path = Path("figures")) -> None:
    """Make what the module describes."""
    started = time.perf_counter()
    setup = Setup.open(model, text=text)
    result = massive(setup)
    made = record("massive-activations", result, {"model": setup.target.name}, started=started)
    save("massive-activations", made, figure, out)
    for one in result["conditions"]:
        layers = [f"{layer['top'][0]:.4g} ({layer['median']:.3g})" for layer in one["layers"]]
        print(
            "with BOS:" if one["bos"] else "without BOS:", "largest and median magnitude by layer:", ", ".join(layers)
        )


if __name__ == "__main__":
    run(main)
