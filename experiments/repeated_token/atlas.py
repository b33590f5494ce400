"""How often each token of a vocabulary must be repeated until it has half of the first token's spike (Yona, Fig. 6).

python -m experiments.repeated_token.atlas [--model NAME|FOLDER] [--max-repeats 1024] [--name atlas]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plotly.express as px

from experiments.drawn import draw
from experiments.record import Row, write_record
from experiments.script import run
from sinkscope.measure import Setup
from sinkscope.results.style import figure_of
from sinkscope.sinks.spikes.copies import copies_of
from sinkscope.sinks.spikes.find import sinks_of
from sinkscope.sinks.tokens import hold_layers, prefix_of, vocabulary

TOKENS = 64  # tokens of one pass


def measure(setup: Setup, limit: int) -> Row:
    """Count the repetitions that every token needs, by spike of the first token; None if it never gets there."""
    spikes, ids = [circuit.spike for circuit in sinks_of(setup).at_first], vocabulary(setup.target)
    hold_layers(setup.target, max(spike.peak for spike in spikes))
    repeats: list[list[int | None]] = [[] for _ in spikes]
    for start in range(0, len(ids), TOKENS):
        some = ids[start : start + TOKENS]
        each = copies_of(setup.target, spikes, some, prefix_of(setup, some), limit)
        for counts, copies in zip(repeats, each, strict=True):
            counts += [one.half for one in copies]
    return {"spikes": [spike.name for spike in spikes], "ids": ids, "repeats": repeats}


def figure(data: Row) -> Any:
    """Draw tokens by the repetitions that they need."""
    counts = [count for count in data["result"]["repeats"][0] if count is not None]
    fig = px.histogram(x=counts, nbins=48, labels={"x": "repetitions until a sink"}).update_yaxes(title_text="tokens")
    return figure_of(fig, None, f"{len(counts)} tokens reach half of the first token's spike", width=1200, height=480)


def main(
    *, model: str | None = None, max_repeats: int = 1024, name: str = "atlas", out: Path = Path("figures")
) -> None:
    """Make what the module describes.

    Args:
        model: Short name, hub id or folder; default: the model in the package.
        max_repeats: Largest number of repetitions.
        name: Name of the files.
    """
    setup = Setup.open(model)
    result, settings = measure(setup, max_repeats), {"model": setup.target.name, "max_repeats": max_repeats}
    draw(write_record(out / f"{name}.json", "atlas", result, settings), figure)


if __name__ == "__main__":
    run(main)
