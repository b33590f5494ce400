"""The circuit and its neurons as a page shows them: who reads a spike, and where the neurons that write it fire."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.app.view.readings import ModelSink, four_digits
from sinkscope.app.view.result import Activation, CircuitSpike, NeuronPage
from sinkscope.measure import Setup
from sinkscope.measure.setup import rows_at_once
from sinkscope.models.neurons import flat_number, view_layer
from sinkscope.models.target import Target
from sinkscope.results.notation import Neuron
from sinkscope.results.row import Row
from sinkscope.sinks.spikes.asked import ALONE, Case, measure
from sinkscope.sinks.spikes.controls import ordered_in, random_neurons
from sinkscope.sinks.spikes.edited import SpikeTexts
from sinkscope.sinks.spikes.needs import SpikeCircuit
from sinkscope.sinks.spikes.records import SpikeResult, neuron_of, spike_card
from sinkscope.sinks.thresholds import COUNTS

SHOWN_ACTIVATIONS = 10  # activations that are listed
TOKENS_BEFORE, TOKENS_AFTER = 12, 4  # tokens that are shown around one


def circuit_of(sink: ModelSink) -> tuple[CircuitSpike, ...]:
    """Return the spikes of the circuit, those that most heads read first."""
    circuit: list[CircuitSpike] = []
    for spike, measured in zip(sink.circuit.spikes, sink.sinks.spikes, strict=True):
        texts = measured.texts
        circuit_spike = CircuitSpike(
            found=spike,
            card=spike_card(spike),
            first_reader=measured.spike.reading_layers.start,
            attention=tuple(tuple(round(share, 5) for share in layer) for layer in texts.attention.mean(-1).tolist()),
            random=random_alone(sink.setup, spike, measured, texts),
        )
        circuit.append(circuit_spike)
    return tuple(circuit)


def random_alone(setup: Setup, spike: SpikeResult, measured: SpikeCircuit, texts: SpikeTexts) -> tuple[Row, ...]:
    """Return what is left of a spike without a random neuron of each layer (and expert) that has neurons removed alone.

    Args:
        setup: The model.
        spike: The spike.
        measured: The spike, with what it needs.
        texts: The texts in which it is.
    """
    removed, written = (list(map(neuron_of, spike.table(name))) for name in ("alone", "writers"))
    drawn: dict[tuple[int, int | None], Neuron] = {}
    orders = ordered_in(setup.target, setup.ids, removed)
    for neuron in removed:
        if (neuron.layer, neuron.expert) not in drawn:
            (other,) = random_neurons(orders, [neuron], setup.seed, excluded=[*removed, *written])
            drawn[neuron.layer, neuron.expert] = other
    layers, rows = texts.spike.reading_layers if texts.whole else (), list[Row]()
    for neuron in drawn.values():
        case = Case(table="random", name=str(neuron), sets=((neuron,),), texts=ALONE)
        rows.append(measure(case, texts, layers))
    return tuple(rows)


def named_neurons(sink: ModelSink) -> tuple[Neuron, ...]:
    """Return the neurons that a spike needs, or that write a tenth of it, each once: those that are needed first."""
    names: dict[str, None] = {}
    for spike in sink.circuit.spikes:
        writers = spike.table("writers").values()
        names |= dict.fromkeys(row.name for row in writers if row.note == "needed")
        names |= dict.fromkeys(row.name for row in writers if abs(row.get("share")) >= COUNTS)
    return tuple(map(neuron_of, names))


def pages_of(sink: ModelSink) -> tuple[NeuronPage, ...]:
    """Return what a page says of each neuron that the circuit names."""
    neurons, ids = named_neurons(sink), sink.sinks.survey.ids
    pages: list[NeuronPage] = []
    for neuron, own in zip(neurons, activations(sink.setup.target, ids, neurons), strict=True):
        median = four_digits(float(own.median()))
        pages.append(NeuronPage(str(neuron), median, own.numel(), largest(sink.setup, ids, own)))
    return tuple(pages)


def activations(
    target: Target, ids: Int[Tensor, "text pos"], neurons: Sequence[Neuron]
) -> Float[Tensor, "neuron text pos"]:
    """Return the activation of neurons on some texts: the input of the down projection.

    In a mixture it is times the weight of the expert, and 0 where that was not chosen.

    Args:
        target: The model.
        ids: The texts.
        neurons: The neurons.
    """
    values = torch.zeros(len(neurons), *ids.shape)
    for layer in sorted({neuron.layer for neuron in neurons}):
        width = target.d_mlp * max(1, target.n_experts(layer))
        texts = rows_at_once(ids.shape[1], width)
        for first in range(0, len(ids), texts):
            some = ids[first : first + texts]
            post = view_layer(target, layer, some, torch.ones_like(some, dtype=torch.bool)).post.cpu()
            for number, neuron in enumerate(neurons):
                if neuron.layer == layer:
                    column = flat_number(target, layer, neuron.expert, neuron.neuron)
                    values[number, first : first + texts] = post[:, column].reshape(some.shape)
    return values


def largest(setup: Setup, ids: Int[Tensor, "text pos"], values: Float[Tensor, "text pos"]) -> tuple[Activation, ...]:
    """Return the activations of largest magnitude, with the text around them; texts that begin alike count once."""
    by_beginning: dict[tuple[int, ...], Activation] = {}
    for number in values.abs().flatten().argsort(descending=True, stable=True).tolist():
        text, position = divmod(number, ids.shape[1])
        beginning = tuple(ids[text, : position + 1].tolist())
        if beginning not in by_beginning:
            tokens = [setup.tokenizer.decode([token]) for token in ids[text, : position + 1 + TOKENS_AFTER].tolist()]
            by_beginning[beginning] = Activation(
                value=four_digits(float(values[text, position])),
                before="".join(tokens[max(0, position - TOKENS_BEFORE) : position]),
                token=tokens[position],
                after="".join(tokens[position + 1 :]),
                texts=int((ids[:, : position + 1] == ids[text, : position + 1]).all(1).sum()),
            )
        if len(by_beginning) == SHOWN_ACTIVATIONS:
            break
    return tuple(by_beginning.values())
