"""Sink layer, sink neurons and repetitions by the paper's own protocol, beside what it publishes (Table 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from experiments.papers.repeated_token.circuit import norms
from sinkscope.hooks.edit.edits import Ablate
from sinkscope.hooks.trace import trace
from sinkscope.measure import Mean, Natural, Neuron, Result, Row, Setup, column, measurement, optional
from sinkscope.models.neurons import columns
from sinkscope.results.notation import word_list
from sinkscope.results.style import BLUE, GREY, figure_of
from sinkscope.sinks.tokens import pick_tokens, prefix_of, repeated

CANDIDATES = 5  # the paper's K is not given
HALF = 0.5
PUBLISHED = {
    "LLaMa-1-7b-HF": (450, 2, (7003,)),
    "LLaMa-2-7b-HF": (1000, 1, (7890, 10411)),
    "Meta-Llama-3-8B-Instruct": (4000, 1, (198, 2427)),
    "Mistral-7B-Instruct-v0.1": (1200, 1, (7310, 8572)),
}
"""Table 1 of the paper: repeats, sink layer, neurons."""


@dataclass(frozen=True)
class Model:
    """A model, by its name; the paper's are published records and were not measured."""

    name: str
    is_published: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, kw_only=True)
class Record(
    Row,
    table="records",
    title="model",
    note="Neurons: the fewest of the five that write most at BOS, in norm, without which BOS keeps less than half of "
    "its norm. Repeats: the first number of copies with half of the norm of BOS, median of the words that reach it "
    "(the paper states no criterion). Left: norm of BOS with the neurons zeroed.",
):
    """A row of Table 1."""

    key: Model

    repeats: Mean | None = optional("repeats", "count", "Copies after which a word has half of the norm of BOS.")
    layer: Mean | None = optional("sink\nlayer", "count", "The layer whose MLP raises the norm of BOS most.")
    neurons: str = column("sink neurons", "word", "The neurons.")
    left: Mean | None = optional("left of\nBOS", "share", "Norm of BOS with the neurons zeroed, over that without.")
    control: Mean | None = optional("control: next\nneurons", "share", "The same with as many of the next largest.")

    @property
    def group(self) -> str:
        """The heading under which it stands."""
        return "as the paper publishes them" if self.key.is_published else ""


@dataclass(frozen=True, kw_only=True)
class SinkNeuronsTable(Result):
    """Table 1 of the paper for a model, found as the paper describes it.

    Attributes:
        records: This model, then the paper's.
        norms: Norm of BOS and the median of later tokens after each layer, of the first text.
        found: The sink neurons.
        words: Number of words that were repeated.
        reached: How many of them reach half of the norm of BOS.
    """

    records: tuple[Record, ...]
    norms: Float[np.ndarray, "token layer"]
    found: tuple[str, ...]
    words: int
    reached: int

    def conclusion(self) -> str:
        """Return the neurons, what is left without them, and what the next ones leave."""
        row = self.records[0]
        repeats = f"none of {self.words} words reaches half of it"
        if row.repeats is not None:
            reached = f"{self.reached} of {self.words} words"
            repeats = f"{reached} have half of it, after {row.text('repeats')} copies (median)"
        left = f"without {word_list(self.found, 3)} BOS keeps {row.text('left')} of its norm"
        return f"In layer {row.text('layer')}, {left} (as a control, without as many others that write next most: " + (
            f"{row.text('control')}); {repeats}."
        )

    def figure(self) -> Any:
        """Draw the norm of BOS and of later tokens after each layer."""
        fig: Any = go.Figure()
        for curve, name, colour in zip(self.norms, ("BOS", "later tokens (median)"), (BLUE, GREY), strict=True):
            fig.add_scatter(y=curve, name=name, line={"color": colour})
        fig.update_xaxes(title_text="layer")
        fig.update_yaxes(type="log", title_text="norm after the layer")
        return figure_of(fig, self, width=900, height=460)


@measurement(loading="whole")
def sink_neurons(setup: Setup, *, copies: Natural = 1024) -> SinkNeuronsTable:
    """Find the sink layer and its neurons by the paper's protocol: the largest outputs at BOS, then zeroing them.

    Args:
        copies: Largest number of copies of a word.
    """
    rows = setup.ids[:1]
    by_layer = trace(setup.target, rows, "blocks.*.hook_resid_post", lambda states: states.float().norm(dim=-1))
    grown = torch.stack([*by_layer.values()])[:, 0]  # layer pos
    ratio = grown[:, 0] / grown[:, 1:].median(1).values
    steps = ratio.diff(prepend=torch.ones(1))
    layer = int(steps.argmax())
    site = f"blocks.{layer}.hook_resid_post"
    written = written_norms(setup, layer)
    order = [Neuron(layer, None, int(number)) for number in written.argsort(descending=True)[: 2 * CANDIDATES]]
    whole = float(grown[layer, 0])
    left = 1.0
    found = 0
    while left >= HALF and found < CANDIDATES:
        found += 1
        left = float(norms(setup, rows, site, Ablate(sites=order[:found]))[0, 0]) / whole
    control = float(norms(setup, rows, site, Ablate(sites=order[found : 2 * found]))[0, 0]) / whole
    words = pick_tokens(setup)
    copies = min(copies, (setup.target.max_positions or copies + 1) - 1)
    read = norms(setup, repeated(prefix_of(setup, words), words, copies), site)
    reached = (read[:, 1:] >= HALF * read[:, :1]).float()
    first = [int(of_word.argmax()) + 1 for of_word in reached if of_word.any()]
    row = Record(
        key=Model(setup.info().name),
        repeats=Mean(float(np.median(first)), kind="count") if first else None,
        layer=Mean(float(layer), kind="count"),
        neurons=", ".join(str(neuron.neuron) for neuron in order[:found]),
        left=Mean(left),
        control=Mean(control),
    )
    published: list[Record] = []
    for name, (repeats, sink_layer, neurons) in PUBLISHED.items():
        count, at = Mean(float(repeats), kind="count"), Mean(float(sink_layer), kind="count")
        numbers = ", ".join(map(str, neurons))
        published.append(Record(key=Model(name, is_published=True), repeats=count, layer=at, neurons=numbers))
    curves = torch.stack([grown[:, 0], grown[:, 1:].median(1).values]).numpy()
    names = tuple(map(str, order[:found]))
    return SinkNeuronsTable(records=(row, *published), norms=curves, found=names, words=len(words), reached=len(first))


def written_norms(setup: Setup, layer: int) -> Float[Tensor, " neuron"]:
    """Return the norm that each neuron of a layer's MLP writes at BOS: its value times its output column."""
    site = f"blocks.{layer}.mlp.hook_post"
    values = trace(setup.target, setup.ids[:1], site)[site][0, 0].float().abs()
    return values * columns(setup.target, layer, torch.arange(len(values))).norm(dim=-1).cpu()
