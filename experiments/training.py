"""The sink over training: `find_sinks` on each checkpoint in turn, of one model or of several folders.

    python -m experiments.training --model pythia-1.4b --revision step512 --revision step1000 --keep pythia
    python -m experiments.training --model runs/epoch1 --model runs/epoch2 [--out figures]

Every layer of each checkpoint is read. With --keep, the result of each checkpoint is saved in that folder, and the same
command continues from there after an interruption.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

import sinkscope as ss
from experiments.drawn import save
from experiments.record import record
from experiments.script import run
from sinkscope.display.notation import neuron_names
from sinkscope.display.style import BLUE, GREEN, ORANGE, finished
from sinkscope.errors import SinkscopeError


def checkpoint(model: str, revision: str | None, keep: Path | None, **options: Any) -> dict[str, Any]:
    """One row: the result of `find_sinks`, or why there is none."""
    name = Path(model).name if revision is None else revision
    file = None if keep is None else keep / f"{Path(model).name}-{revision}.json"
    try:
        if file is not None and file.exists():
            found = ss.Result.load(file)
        else:
            found = ss.find_sinks(model, revision=revision, all_layers=True, **options)
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                found.save(file)
    except (ss.SinkscopeError, OSError) as error:  # the next checkpoint may be readable
        return {"checkpoint": name, "failed": str(error).splitlines()[0]}
    return {"checkpoint": name, "failed": None, **row_of(found)}


def row_of(found: Any) -> dict[str, Any]:
    """What is compared between checkpoints."""
    ratios = []
    for first, typical in zip(found.first_token_norm, found.typical_norm, strict=True):
        if first and typical:
            ratios.append(first / typical)
    smallest_set = found.minimal
    return {
        "norm_spike": found.norm_spike is not None,
        "spike": max(ratios) if found.norm_spike is None else found.norm_spike.ratio,
        "attention_sink": found.attention_sink is not None,
        "rate": None if found.sink_rate is None else found.sink_rate.value,
        "carried_by": None if found.attention_sink is None else found.attention_sink.carried_by,
        "sink_layer": found.sink_layer,
        "neurons": "" if smallest_set is None else neuron_names(smallest_set.edit_sites),
        "set_drop": None if smallest_set is None else smallest_set.drop_sink_layer,
        "control_drop": None if smallest_set is None else smallest_set.control,
    }


def figure(data: dict[str, Any]) -> go.Figure:
    """Sink rate, largest norm of the first token, and layer of the sink, checkpoint by checkpoint."""
    rows = [row for row in data["result"]["checkpoints"] if row["failed"] is None]
    names = [row["checkpoint"] for row in rows]
    mode = "lines+markers"
    if data["settings"]["revisions"] is None:
        mode = "markers"  # a line between different models would mean nothing
    fig = make_subplots(cols=3, subplot_titles=["Sink rate", "First token's norm over the typical one", "Sink layer"])
    for col, (field, color) in enumerate((("rate", ORANGE), ("spike", BLUE), ("sink_layer", GREEN)), start=1):
        labels = [row["neurons"] for row in rows]
        fig.add_scatter(
            x=names,
            y=[row[field] for row in rows],
            text=labels,
            mode=mode,
            line_color=color,
            marker_size=9,
            row=1,
            col=col,
        )
    fig.update_xaxes(type="category")
    fig.update_yaxes(tickformat=".0%", rangemode="tozero", row=1, col=1)
    fig.update_yaxes(type="log", row=1, col=2)
    fig.update_yaxes(autorange="reversed", dtick=1, row=1, col=3)
    sinks = sum(row["attention_sink"] for row in rows)
    spikes = sum(row["norm_spike"] for row in rows)
    title = f"Norm spike in {spikes} and attention sink in {sinks} of {len(rows)} checkpoints"
    return finished(fig, None, title, width=1400, height=460, showlegend=False)


def main(
    *,
    model: Sequence[str],
    revision: Sequence[str] | None = None,
    text: str | None = None,
    keep: Path | None = None,
    out: Path = Path("figures"),
) -> None:
    """Make what the module describes.

    Args:
        model: Several make a series.
        revision: Of one model; several make a series.
        keep: Folder for the result of each checkpoint.
    """
    if len(model) > 1 and revision:
        raise SinkscopeError("several models and revisions are given: give one model, or no revision")
    started = time.perf_counter()
    options = {} if text is None else {"text": text}
    rows = [checkpoint(name, number, keep, **options) for name in model for number in revision or [None]]
    for row in rows:
        print(row)
    settings = {"models": [Path(name).name for name in model], "revisions": revision}
    save("training", record("training", {"checkpoints": rows}, settings, started=started), figure, out)


if __name__ == "__main__":
    run(main)
