"""The protocols by which published quantities are measured: those of their sources, not the defaults of this package.

Each takes the model, its first token in typical text, and the record. Texts begin with what the tokenizer itself puts
before them, as the sources' scripts call it; they are pieces of typical text, which are not the sources' own.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import torch

from sinkscope.measure import PIECE, Setup
from sinkscope.models.checkpoints.published import Published
from sinkscope.models.checks import check_site
from sinkscope.models.text import text_rows
from sinkscope.results.notation import read_neuron
from sinkscope.sinks.find.attention_received import attention_received
from sinkscope.sinks.find.layer_scan import LayerScan
from sinkscope.sinks.find.neurons import stage_neurons
from sinkscope.sinks.find.repetitions import repeat_until_half
from sinkscope.sinks.tokens import single_token

LEAST, RATIO = 100, 1000  # a massive activation exceeds this, and this many times the median (Sun et al. 2024)
RATE_TEXTS = 100  # texts of the sink rate (Gu et al. 2024)
AT_ONCE = 50  # texts in one pass
CANDIDATES = 10  # neurons of a layer that are ablated: K in section 4.2 of Yona et al. 2025, which gives no number
REPEATED = ("cat", "dog", "the")  # words of Fig. 5 of Yona et al. 2025 that are one token almost anywhere
Protocol = Callable[[Setup, LayerScan, Published], Any]


def layers(_: Setup, first: LayerScan, __: Published) -> list[int | None]:
    """The layer whose MLP adds most to the norm of the first token."""
    return [first.sink_layer]


def neurons(setup: Setup, first: LayerScan, record: Published) -> list[str]:
    """Of the ten neurons of each layer that write most at the first token, those without which its norm falls."""
    found: list[str] = []
    for layer in sorted({read_neuron(name)[0] for name in record.value}):
        check_site(first.target, layer)
        for neuron in stage_neurons(first, layer, CANDIDATES, setup.seed, upto=layer):
            if neuron.causal:
                found.append(str(neuron.address))
    return found


def massive(_: Setup, first: LayerScan, record: Published) -> list[Any]:
    """Values at position 0 with |a| > 100 and > 1000 x the median |hidden state| of later positions, mean over texts.

    The dimensions that have one after any layer; or the first and the last layer after which there is one.
    """
    values = torch.stack([layer.residual for layer in first.layers])
    median = torch.tensor([[layer.hidden] for layer in first.layers])
    there = values.abs() > (RATIO * median).clamp(min=LEAST)
    if record.quantity == "residual_dims":
        return there.any(0).nonzero().flatten().tolist()
    after = there.any(1).nonzero().flatten().tolist()
    return [*after[:1], *after[-1:]]


def repeats(setup: Setup, first: LayerScan, record: Published) -> float:
    """Copies of "cat", "dog" or "the" until the norm is half of the first token's; median over these words."""
    if first.sink_layer is None:
        return inf
    tokens = [single_token(setup.tokenizer, word) for word in REPEATED]
    return repeat_until_half(first, tokens, first.ids[0, :1].tolist(), 2 * record.value).median or inf


def sink_rate(setup: Setup, _: LayerScan, __: Published) -> float:
    """Share of heads with mean attention to position 0 above 0.3: 100 texts, 64 long."""
    ids = text_rows(setup.tokenizer, setup.text, RATE_TEXTS, PIECE, setup.bos)
    return attention_received(setup.target, ids, batch=AT_ONCE).rate


PROTOCOLS: dict[str, Protocol] = {
    "layers": layers,
    "neurons": neurons,
    "residual_dims": massive,
    "massive_layers": massive,
    "repeats": repeats,
    "sink_rate": sink_rate,
}
"""How each quantity is measured; the docstring of a function is its protocol."""
