"""The neurons that a circuit names: their activations on text, and what is left of each spike without them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.app.view.column import shown_neurons
from sinkscope.app.view.model_sink import ModelSink
from sinkscope.app.view.result import Activation, NeuronPage, NeuronSpike, Remaining
from sinkscope.hooks.edit.sites import site_of
from sinkscope.hooks.trace.layer_view import flat_number, view_layer
from sinkscope.measure import Setup
from sinkscope.models.passes.batch import rows_at_once
from sinkscope.models.target import Target
from sinkscope.results.parts import Neuron
from sinkscope.sinks.spikes.controls import random_neurons
from sinkscope.sinks.spikes.records import SpikeResult
from sinkscope.sinks.spikes.removal import removals_of
from sinkscope.sinks.spikes.spike import Measured
from sinkscope.sinks.spikes.texts import SpikeTexts

SHOWN_ACTIVATIONS = 10  # activations that are listed
TOKENS_BEFORE, TOKENS_AFTER = 12, 4  # tokens that are shown around one


def named_neurons(sink: ModelSink) -> tuple[Neuron, ...]:
    """Return the neurons that the circuit names, each once."""
    names = [part.name for spike in sink.circuit.spikes for part in shown_neurons(spike)]
    return tuple(map(site_of, dict.fromkeys(names)))


def pages_of(sink: ModelSink) -> tuple[NeuronPage, ...]:
    """Return what a page says of each neuron that the circuit names."""
    neurons, ids = named_neurons(sink), sink.sinks.survey.ids
    values = activations(sink.setup.target, ids, neurons)
    of_spikes: list[dict[str, NeuronSpike]] = []
    for number, (spike, one) in enumerate(zip(sink.circuit.spikes, sink.sinks.spikes, strict=True)):
        of_spikes.append(as_writers(sink.setup, number, spike, one))
    pages: list[NeuronPage] = []
    for neuron, own in zip(neurons, values, strict=True):
        name = str(neuron)
        page = NeuronPage(
            name=name,
            spikes=tuple(of_spike[name] for of_spike in of_spikes if name in of_spike),
            median=_four_digits(float(own.median())),
            positions=own.numel(),
            largest=largest(sink.setup, ids, own),
        )
        pages.append(page)
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
    found: list[Activation] = []
    begun: set[tuple[int, ...]] = set()
    for number in values.abs().flatten().argsort(descending=True, stable=True).tolist():
        text, position = divmod(number, ids.shape[1])
        beginning = tuple(ids[text, : position + 1].tolist())
        if beginning in begun:
            continue
        begun.add(beginning)
        tokens = [setup.tokenizer.decode([token]) for token in ids[text, : position + 1 + TOKENS_AFTER].tolist()]
        one = Activation(
            value=_four_digits(float(values[text, position])),
            before="".join(tokens[max(0, position - TOKENS_BEFORE) : position]),
            token=tokens[position],
            after="".join(tokens[position + 1 :]),
            texts=int((ids[:, : position + 1] == ids[text, : position + 1]).all(1).sum()),
        )
        found.append(one)
        if len(found) == SHOWN_ACTIVATIONS:
            break
    return tuple(found)


def as_writers(setup: Setup, number: int, spike: SpikeResult, one: Measured) -> dict[str, NeuronSpike]:
    """Return the named neurons of a spike: what each writes, and what is left without it, beside a random one.

    Args:
        setup: The model.
        number: Number of the spike.
        spike: The spike as a result.
        one: The same with what was measured of it.
    """
    alone: dict[str, Remaining] = {}
    for left in spike.alone:
        name = str(left.address)
        alone[name] = Remaining((name,), left.left, left.heads, left.perplexity)
    named = shown_neurons(spike)
    random = random_alone(setup, one, [site_of(part.name) for part in named if part.name in alone])
    writers: dict[str, NeuronSpike] = {}
    for part in named:
        neuron = site_of(part.name)
        control = random.get((neuron.layer, neuron.expert)) if part.name in alone else None
        writers[part.name] = NeuronSpike(number, part.share, alone.get(part.name), control)
    return writers


def random_alone(setup: Setup, one: Measured, neurons: Sequence[Neuron]) -> dict[tuple[int, int | None], Remaining]:
    """Return what is left of a spike without a random neuron of each layer (and expert) of these neurons.

    Args:
        setup: The model.
        one: The spike.
        neurons: Neurons that were removed alone.
    """
    known = [neuron.address for neuron in one.result.neurons]
    drawn: dict[tuple[int, int | None], Neuron] = {}
    for neuron in neurons:
        if (neuron.layer, neuron.expert) not in drawn:
            (other,) = random_neurons(setup.target, [neuron], setup.seed, excluded=[*neurons, *known])
            drawn[neuron.layer, neuron.expert] = other
    texts = SpikeTexts.of(one.survey, one.spike)
    removals = removals_of(texts, [(neuron,) for neuron in drawn.values()], every_loss=False)
    left: dict[tuple[int, int | None], Remaining] = {}
    for (place, neuron), removal in zip(drawn.items(), removals, strict=True):
        left[place] = Remaining((str(neuron),), removal.left, removal.heads, removal.perplexity)
    return left


def _four_digits(value: float) -> float:
    return float(f"{value:.4g}")
