"""What `precision` says of models whose answer is known: what is regained with activations of 8 bits per tensor.

    python -m experiments.precision_truth [--times 100] [--out figures]

Four models: the one in the package; one with a planted sink at the first token; one with planted sinks at two
delimiters after it; and one without a sink. Each is read as it is, and with the values of its sink neurons times
`times` and their columns divided by it, so that it computes the same. Random ones are the control.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.express as px
import torch

import sinkscope as ss
from experiments.drawn import save
from experiments.record import Row, record
from experiments.script import run
from sinkscope.results.style import figure_of
from tests.organisms import organism
from tests.organisms.planted_places import places

SCHEME = "a8-tensor"
KEPT = ("sink places", "first tokens", "prefix", "sink neurons", "down projections")
MODELS = ("bundled", "first token", "two delimiters", "no sink")


@dataclass(frozen=True)
class Known:
    """A model with its tokenizer and text, and the neurons that make its sinks; text None: that of the package."""

    model: Any
    tokenizer: Any
    text: str | None
    neurons: tuple[tuple[int, int], ...]


def known(name: str) -> Known:
    """One of `MODELS`."""
    if name == "bundled":
        model = ss.load()
        return Known(model, model.tokenizer, None, ((1, 338),))
    if name == "two delimiters":
        made = places("two_delimiters", "llama")
        sites = sorted(set().union(*made.truth.makers))
        return Known(made.model, made.tokenizer, made.text(), tuple(sites))
    planted = organism("llama", 2, kind="none" if name == "no sink" else "sink")
    rows = planted.natural(60, 64)
    text = " ".join(planted.tokenizer.decode(row[1:]) for row in rows)
    return Known(planted.model, planted.tokenizer, text, planted.truth.neurons)


@torch.no_grad()
def enlarge(model: Any, neurons: tuple[tuple[int, int], ...], times: float) -> None:
    """Make the values of neurons larger and their columns smaller; the model computes the same."""
    for layer, neuron in neurons:
        mlp = model.model.layers[layer].mlp
        mlp.up_proj.weight[neuron] *= times
        mlp.down_proj.weight[:, neuron] /= times


def rows_of(name: str, times: float, pieces: int) -> list[Row]:
    """What is measured of a model whose values are so many times larger, one row for each thing that stays exact."""
    one = known(name)
    enlarge(one.model, one.neurons, times)
    with tempfile.TemporaryDirectory() as folder:
        text = None
        if one.text is not None:
            text = Path(folder) / "text.txt"
            text.write_text(one.text)
        found = ss.precision(one.model, tokenizer=one.tokenizer, text=text, schemes=[SCHEME], pieces=pieces)
    (cost,) = found.costs
    label = f"{name}, values x {times:g}: {cost.kl:.2g} nats"
    rows: list[Row] = []
    for kept in found.rounded:
        if kept.kept in KEPT:
            rows.append({"model": label, "nats": cost.kl, **vars(kept), "neurons": [*map(list, found.neurons)]})
    return rows


def figure(data: Row) -> Any:
    """Shares that are regained, a panel per model."""
    axes: dict[str, Any] = {"x": "kept", "y": ["regained", "random"], "facet_col": "model", "facet_col_wrap": 4}
    labels = {"value": "regained", "kept": "", "variable": ""}
    fig = px.scatter(data["result"]["rows"], **axes, range_y=(-0.55, 1.05), labels=labels, facet_row_spacing=0.12)
    title = "What is regained of the cost of 8 bits per tensor, where the answer is known"
    return figure_of(fig.update_yaxes(tickformat=".0%"), None, title, width=1400, height=760, legend=-0.25, bottom=170)


def main(*, times: float = 100.0, pieces: int = 8, out: Path = Path("figures")) -> None:
    """Make what the module describes.

    Args:
        times: Factor of the values.
        pieces: Pieces of text.
    """
    started = time.perf_counter()
    rows: list[Row] = []
    for factor in (1.0, times):
        for name in MODELS:
            rows += rows_of(name, factor, pieces)
            print(rows[-1]["model"], flush=True)
    settings = {"times": times, "pieces": pieces, "scheme": SCHEME}
    save("precision_truth", record("precision-truth", {"rows": rows}, settings, started=started), figure, out)


if __name__ == "__main__":
    run(main)
