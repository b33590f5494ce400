"""Which neurons could write a spike, judged by the weights alone: candidates without a forward pass.

    python -m experiments.screen [--model NAME] [--top 8] [--out figures]

A gated neuron writes `act(g x)(u x)` times its column of the down projection. Where the activation function is close to
the identity, this is a quadratic form of the normalised input `x`, whose eigenvalue of largest magnitude is
`(|g||u| + |g.u|) / 2` (Sun, Canziani, LeCun, Zhu 2026: a directional quadratic amplifier). A normalised input has
length `sqrt(d_model)`, so the largest norm that the neuron can write, its reach, is `d_model` times that eigenvalue
times the norm of its column. A neuron without a gate reaches `sqrt(d_model)` times the norms of its row and its column.
Gate and up rows include the gain of the norm before the MLP; columns include that of the norm behind it.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import torch
from einops import einsum
from jaxtyping import Float
from plotly.subplots import make_subplots
from torch import Tensor

from experiments.drawn import save
from experiments.record import record
from experiments.script import run
from sinkscope.files.notation import neuron_name
from sinkscope.measure import Setup
from sinkscope.measure.style import BLUE, GREY, ORANGE, finished
from sinkscope.models.down_projections import input_columns, w_out
from sinkscope.models.target import Target

NORMS_BEFORE_A_PARALLEL_MLP = ("post_attention_layernorm", "ln_mlp", "input_layernorm")


@dataclass(frozen=True)
class Reach:
    """Largest norm that each neuron of an MLP or an expert can write, and the cosine of its gate and up row."""

    expert: int | None
    norm: Float[Tensor, " neuron"]
    cosine: Float[Tensor, " neuron"] | None


@torch.no_grad()
def reaches(target: Target, layer: int) -> list[Reach]:
    """The reach of every neuron of a layer, expert by expert in a mixture."""
    parts: list[Reach] = []
    with target.loaded(layer):
        for expert in experts_of(target, layer):
            rows = [effective(target, layer, part.float()) for part in input_rows(target, layer, expert)]
            columns = column_norms(target, layer, expert)
            lengths = [part.norm(dim=-1) for part in rows]
            if len(rows) == 1:
                parts.append(Reach(expert, math.sqrt(target.d_model) * lengths[0] * columns, None))
                continue
            dot = einsum(rows[0], rows[1], "neuron d_model, neuron d_model -> neuron")
            product = lengths[0] * lengths[1]
            eigenvalue = (product + dot.abs()) / 2
            parts.append(Reach(expert, target.d_model * eigenvalue * columns, dot / product.clamp(min=1e-30)))
    return parts


def experts_of(target: Target, layer: int) -> list[int | None]:
    """The experts of a layer; None is its MLP without experts, or a shared expert."""
    experts: list[int | None] = list(range(target.n_experts(layer)))
    if target.has_mlp(layer, None):
        experts.append(None)
    return experts


def input_rows(target: Target, layer: int, expert: int | None) -> list[Tensor]:
    """Gate and up rows, or the rows of the only input projection, each `[neuron d_model]`."""
    adapter = target.adapter
    if expert is not None:
        return [weight for weight, _ in target.experts(layer).inputs(expert)]
    up = input_columns(target, target.mlp_part(layer, "up"), target.d_model).T
    if adapter.fused_gate_up:
        return list(up.chunk(2))
    if adapter.gate is None:
        return [up]
    return [input_columns(target, target.mlp_part(layer, "gate"), target.d_model).T, up]


def effective(target: Target, layer: int, rows: Float[Tensor, "neuron d_model"]) -> Float[Tensor, "neuron d_model"]:
    """Rows as they act on a normalised vector before the norm's gain; behind a LayerNorm they are centred, too."""
    path = target.adapter.mid
    if path == target.adapter.mlp:  # the MLP reads the residual stream itself
        return rows
    if path is None:
        path = next(name for name in NORMS_BEFORE_A_PARALLEL_MLP if hasattr(target.layers[layer], name))
    norm: Any = target.sub(layer, path)
    gain = gain_of(target, norm)
    ones = torch.ones(1, target.d_model, device=target.device, dtype=target.dtype)
    scaled = rows * gain
    lifted = norm(ones)[0].float()
    if bool((lifted - gain).abs().max() > 0.5 * gain.abs().max()):  # ones are zero once they are centred
        scaled = scaled - scaled.mean(-1, keepdim=True)
    return scaled


def gain_of(target: Target, norm: Any) -> Float[Tensor, " d_model"]:
    """The factor that a norm applies to each dimension, probed with a vector of mean 0 and square 1."""
    signs = torch.ones(target.d_model, device=target.device, dtype=target.dtype)
    signs[1::2] = -1
    difference = norm(signs[None])[0].float() - norm(-signs[None])[0].float()
    return difference / 2 * signs.float()


def column_norms(target: Target, layer: int, expert: int | None) -> Float[Tensor, " neuron"]:
    """Norms of the columns of the down projection, with the gain of a norm behind the MLP."""
    columns = w_out(target, layer, list(range(target.width(layer, expert))), expert).float()
    path = target.adapter.post_mlp_norm
    if path is not None:
        columns = columns * gain_of(target, target.sub(layer, path))
    return columns.norm(dim=-1)


def screen(target: Target, top: int = 8) -> dict[str, Any]:
    """The neurons with the largest reach, and median and largest reach of every layer."""
    layers: list[dict[str, Any]] = []
    candidates: list[dict[str, Any]] = []
    for layer in range(target.n_layers):
        parts = reaches(target, layer)
        whole = torch.cat([part.norm for part in parts])
        log = whole.clamp(min=1e-30).log()  # reaches of one layer differ by orders of magnitude
        layers.append({"layer": layer, "median": float(whole.median()), "largest": float(whole.max())})
        for part in parts:
            deviations = (part.norm.clamp(min=1e-30).log() - log.mean()) / log.std(correction=0).clamp(min=1e-12)
            for neuron in part.norm.topk(min(top, len(part.norm))).indices.tolist():
                cosine = None if part.cosine is None else float(part.cosine[neuron])
                candidates.append(
                    {
                        "neuron": neuron_name(layer, part.expert, neuron),
                        "reach": float(part.norm[neuron]),
                        "z": float(deviations[neuron]),
                        "cosine": cosine,
                    }
                )
    candidates.sort(key=lambda candidate: -candidate["reach"])
    return {"model": target.name, "candidates": candidates[:top], "layers": layers}


def figure(data: dict[str, Any]) -> go.Figure:
    """Median and largest reach of every layer, and the candidates."""
    layers, candidates = data["result"]["layers"], data["result"]["candidates"]
    numbers = [row["layer"] for row in layers]
    fig = make_subplots(cols=2, subplot_titles=["Reach by layer", "Candidates (label: z)"])
    for field, color in (("median", GREY), ("largest", BLUE)):
        fig.add_scatter(x=numbers, y=[row[field] for row in layers], name=field, line_color=color, row=1, col=1)
    names = [row["neuron"] for row in candidates]
    labels = [f"{row['z']:.1f}" for row in candidates]
    sizes = [row["reach"] for row in candidates]
    fig.add_bar(x=names, y=sizes, text=labels, marker_color=ORANGE, showlegend=False, row=1, col=2)
    fig.update_xaxes(title_text="layer", row=1, col=1)
    fig.update_yaxes(title_text="largest norm written", type="log", exponentformat="power", dtick=1, row=1, col=1)
    first = candidates[0]
    title = (
        f"{data['result']['model']}: by its weights, {first['neuron']} can write most, a norm of {first['reach']:.4g}"
    )
    return finished(fig, None, title, width=1200, height=460)


def main(*, model: str | None = None, top: int = 8, out: Path = Path("figures")) -> None:
    """Make what the module describes.

    Args:
        top: Candidates to list.
    """
    started = time.perf_counter()
    setup = Setup.open(model, texts=0)
    result = screen(setup.target, top)
    save("screen", record("screen", result, {"top": top}, started=started), figure, out)
    for row in result["candidates"]:
        print(f"{row['neuron']:>12}  reach {row['reach']:.4g}  z {row['z']:.1f}")


if __name__ == "__main__":
    run(main)
