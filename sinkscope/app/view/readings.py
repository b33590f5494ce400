"""An open model, what is known of its sink, and one pass over a text: norms, attention, and what an edit changes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from sinkscope.app.view.result import codes_of
from sinkscope.engine.attention import AttentionRows
from sinkscope.engine.tap import attention_rows
from sinkscope.hooks.edit.base import Intervention, under
from sinkscope.measure import Setup
from sinkscope.models.hooks import on_hidden
from sinkscope.results.notation import Head, Neuron
from sinkscope.sinks.spikes.find import Sinks, sinks_of, why_sink
from sinkscope.sinks.spikes.result import WhySink
from sinkscope.sinks.thresholds import STANDS_OUT

SPIKE_SHARE = 0.5  # a norm spikes from this share of the first token's norm on (Yona et al. 2025, Table 1)


@dataclass
class ModelSink:
    """An open model and what is known of its sink.

    Attributes:
        setup: The model and typical text.
    """

    setup: Setup

    @cached_property
    def sinks(self) -> Sinks:
        """Its survey, and its spikes."""
        return sinks_of(self.setup)

    @cached_property
    def circuit(self) -> WhySink:
        """The circuit of the sink, as a result."""
        return why_sink.on(self.setup)

    @property
    def layer(self) -> int:
        """The peak of the spike that most heads read, or the layer after which the first token stands out most."""
        if self.sinks.spikes:
            return self.sinks.spikes[0].spike.peak
        return int(self.sinks.survey.ratios[:, :, 0].mean(1).argmax())

    @property
    def neurons(self) -> tuple[Neuron, ...]:
        """The neurons that write the spike with most readers, if it needs neurons."""
        if not self.sinks.spikes or not self.sinks.spikes[0].needs.units:
            return ()
        return self.sinks.spikes[0].patch.sites

    @property
    def marks(self) -> list[Head]:
        """The heads that mark the places of spikes."""
        return list(self.circuit.marks)


@dataclass(frozen=True)
class TextReading:
    """What one pass over a text shows.

    Attributes:
        ids: The tokens of the text.
        norm: L2 norm of the residual stream after each layer.
        rows: Attention, in the codes of `Packed`.
        received: Attention that each position receives from later queries, on average.
        following: The likeliest next tokens after the text, with their probabilities.
    """

    ids: list[int]
    norm: Float[np.ndarray, "layer pos"]
    rows: UInt8[np.ndarray, "layer head query key"]
    received: Float[Tensor, "layer head pos"]
    following: tuple[tuple[str, float], ...] = ()


@torch.no_grad()
def read_tokens(sink: ModelSink, ids: list[int], edit: Intervention | None = None) -> TextReading:
    """Read a text under an edit, or intact (None), in one pass."""
    target = sink.setup.target
    length = len(ids)
    norms = np.zeros((target.n_layers, length), np.float32)
    rows = np.zeros((target.n_layers, target.n_heads, length, length), np.uint8)
    received = torch.zeros(target.n_layers, target.n_heads, length)

    def see(chunk: AttentionRows) -> None:
        _, _, n_queries, n_keys = chunk.probs.shape
        rows[chunk.layer, :, chunk.first : chunk.first + n_queries, :n_keys] = codes_of(chunk.probs[0])
        without_own_query = chunk.probs[0].tril(chunk.first - 1)
        received[chunk.layer, :, :n_keys] += without_own_query.sum(1).cpu()

    def keep(layer: int, hidden: Tensor) -> None:
        norms[layer] = hidden[0].float().norm(dim=-1).cpu().numpy()

    hooks = [on_hidden(layer, "post", partial(keep, number)) for number, layer in enumerate(target.layers)]
    with under(edit, target), attention_rows(target, see), target.hooks(*hooks):
        logits = target.forward(torch.tensor([ids]), unembed=True).logits[0, -1].float().cpu()
    received /= torch.arange(length - 1, -1, -1).clamp(min=1)  # later queries
    return TextReading(ids, norms, rows, received, likeliest(logits, sink.setup.tokenizer))


def likeliest(logits: Float[Tensor, " vocab"], tokenizer: Any) -> tuple[tuple[str, float], ...]:
    """Return the five likeliest tokens with their probabilities."""
    best = logits.softmax(-1).topk(5)
    tokens: list[tuple[str, float]] = []
    for token_id, share in zip(best.indices.tolist(), best.values.tolist(), strict=True):
        tokens.append((tokenizer.decode([token_id]), round(share, 4)))
    return tuple(tokens)


def spikes_of(sink: ModelSink, reading: TextReading) -> tuple[int, ...]:
    """Return positions with at least half of the first token's norm and three times the typical one."""
    survey = sink.sinks.survey
    first_norm = float(survey.norms[sink.layer, :, 0].median())
    bar = max(STANDS_OUT * survey.typical_norm[sink.layer], SPIKE_SHARE * first_norm)
    return tuple(np.flatnonzero(reading.norm[sink.layer] >= bar).tolist())


def four_digits(value: float) -> float:
    """Return a number with four significant digits: more only make a file larger."""
    return float(f"{value:.4g}")


def heads_that_fit(reading: TextReading, room: int) -> tuple[tuple[int, int], ...]:
    """Return the heads with most attention to the first token, at least one, whose rows have at most `room` values."""
    _, heads, tokens = reading.received.shape
    count = max(1, room // tokens**2)
    order = reading.received[..., 0].flatten().argsort(descending=True, stable=True)
    return tuple(divmod(number, heads) for number in sorted(order[:count].tolist()))
