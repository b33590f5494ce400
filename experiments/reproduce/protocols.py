"""The protocols by which published quantities are measured: those of their sources, not the defaults of this package.

Each takes the model, its first token in typical text, and the record. Texts begin with what the tokenizer itself puts
before them, as the sources' scripts call it; they are pieces of typical text, which are not the sources' own.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from statistics import median
from typing import Any

import torch

from experiments.reproduce.published import Published
from sinkscope.measure import PIECE, Setup
from sinkscope.models.inputs import check_site
from sinkscope.models.text import text_rows
from sinkscope.results.notation import Component, Neuron, read_neuron
from sinkscope.results.row import of_table
from sinkscope.sinks.repeat import copies_of
from sinkscope.sinks.spikes.controls import ordered_in, random_neurons
from sinkscope.sinks.spikes.edited import left_at_place
from sinkscope.sinks.spikes.records import part_of
from sinkscope.sinks.spikes.spike import Spike, first_spikes
from sinkscope.sinks.spikes.survey import Survey, read_survey
from sinkscope.sinks.spikes.writers import components_of, neuron_at, of_layer
from sinkscope.sinks.thresholds import COUNTS, NAMED
from sinkscope.sinks.tokens import single_token

RATE_TEXTS = 100  # texts of the sink rate (Gu et al. 2024)
AT_ONCE = 10  # texts in one pass
CANDIDATES = 10  # neurons of a layer that are ablated: K in section 4.2 of Yona et al. 2025, which gives no number
CONTROLS = 20  # random neurons of the layer
LARGE, TIMES_MEDIAN = 100, 1000  # a massive activation exceeds both this and so many times the median (Sun et al. 2024)
REPEATED = ("cat", "dog", "the")  # words of Fig. 5 of Yona et al. 2025 that are one token almost anywhere
Protocol = Callable[[Setup, Survey, Published], Any]


def highest(survey: Survey, tokenizer: Any) -> Spike | None:
    """Return the spike of the first token with the largest departure; None if there is none."""
    return max(first_spikes(survey, tokenizer), key=lambda spike: spike.size, default=None)


def layers(setup: Setup, survey: Survey, __: Published) -> list[int | None]:
    """Find the layer whose MLP adds most to the first token along the direction of its highest spike."""
    spike = highest(survey, setup.tokenizer)
    if spike is None:
        return [None]
    shares: dict[int | None, float] = {}
    for name, row in of_table(components_of(spike), "components").items():
        part = part_of(name)
        if isinstance(part, Component) and part.kind == "mlp":
            shares[part.layer] = row.get("share")
    return [max(shares, key=lambda layer: shares[layer], default=None)]


def neurons(setup: Setup, survey: Survey, record: Published) -> list[str]:
    """Of the ten neurons of each layer that write most at the first token, find those without which its spike falls."""
    spike, found = highest(survey, setup.tokenizer), list[str]()
    for layer in sorted({read_neuron(name)[0] for name in record.value}):
        check_site(survey.target, layer)
        if spike is None:
            continue
        written = of_layer(spike, layer, survey.start(layer)).shares.mean(1)
        members: list[Neuron] = []
        for number in written.topk(min(CANDIDATES, len(written))).indices.tolist():
            if float(written[number]) >= NAMED:
                members.append(neuron_at(survey.target, layer, number))
        if not members:
            continue
        orders = ordered_in(survey.target, survey.ids, members[:1])
        random = [random_neurons(orders, members[:1], setup.seed, number, members) for number in range(CONTROLS)]
        left = left_at_place(spike, [*((one,) for one in members), *random])
        lost = (1 - left[:, 0].mean(1)).tolist()
        least = max(COUNTS, *lost[len(members) :])
        found += [str(one) for one, drop in zip(members, lost, strict=False) if drop > least]
    return found


def massive(_: Setup, survey: Survey, record: Published) -> list[Any]:
    """Find values at position 0 above 100 and 1000 x the median |hidden state| of later positions, mean over texts.

    The dimensions that have one after any layer; or the first and the last layer after which there is one.
    """
    values = survey.states[:, :, 0].mean(1)
    median = survey.states[:, :, 1:].abs().flatten(1).median(1, keepdim=True).values
    there = values.abs() > (TIMES_MEDIAN * median).clamp(min=LARGE)
    if record.quantity == "residual_dims":
        return there.any(0).nonzero().flatten().tolist()
    after = there.any(1).nonzero().flatten().tolist()
    return [*after[:1], *after[-1:]]


def repeats(setup: Setup, survey: Survey, record: Published) -> float:
    """Count copies of "cat", "dog" or "the" until half of the first token's projection; median over these words."""
    spike = highest(survey, setup.tokenizer)
    if spike is None:
        return inf
    tokens = [single_token(setup.tokenizer, word) for word in REPEATED]
    (copies,) = copies_of(survey.target, [spike], tokens, survey.ids[0, :1].tolist(), 2 * record.value)
    reached = [half for half in copies if half is not None]
    return median(reached) if reached else inf


def sink_rate(setup: Setup, survey: Survey, __: Published) -> float:
    """Measure the share of heads with mean attention to position 0 above 0.3: 100 texts, 64 long."""
    ids = text_rows(setup.tokenizer, setup.text, RATE_TEXTS, PIECE, setup.bos)
    rates = [read_survey(survey.target, some).sink_rate for some in ids.split(AT_ONCE)]
    return float(torch.cat(rates).mean())


PROTOCOLS: dict[str, Protocol] = {
    "layers": layers,
    "neurons": neurons,
    "residual_dims": massive,
    "massive_layers": massive,
    "repeats": repeats,
    "sink_rate": sink_rate,
}
"""How each quantity is measured; the docstring of a function is its protocol."""
