"""What the artefacts of this paper share: the sink neurons of a model, other neurons that write as much, and words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.hooks.edit.base import Intervention, under
from sinkscope.hooks.edit.edits import Ablate
from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.hooks.trace import trace
from sinkscope.measure import Neuron, Setup
from sinkscope.sinks.spikes.controls import OtherNeurons, other_neurons
from sinkscope.sinks.spikes.find import spike_of
from sinkscope.sinks.spikes.spike import Spike

NO_CONTROL = "There is no fair control: no other neurons of these layers write as much."
PAPERS_WORDS = ("Another", "one", "bit", "es", "the", "dust")
"""The tokens of the paper's Fig. 3."""


@dataclass(frozen=True)
class Word:
    """A word that is repeated."""

    text: str

    def __str__(self) -> str:
        return repr(self.text)


@dataclass(frozen=True)
class SinkNeurons:
    """The sink neurons of the first token's spike.

    Attributes:
        spike: The spike.
        neurons: The neurons that it needs.
        patch: The patch of all its writers, at the values of ordinary text.
        control: Other neurons of the same layers that write as much. None: no other neuron writes anything.
    """

    spike: Spike
    neurons: tuple[Neuron, ...]
    patch: SinkPatch
    control: OtherNeurons | None

    @property
    def ablated(self) -> Ablate:
        """The edit that sets the neurons to zero at all positions."""
        return Ablate(sites=self.neurons)

    @property
    def control_ablated(self) -> Ablate | None:
        """The same of the control."""
        return None if self.control is None else Ablate(sites=self.control.neurons)

    @property
    def control_words(self) -> str:
        """The control in words, for a sentence; empty if there is none, or none that writes enough."""
        return self.control.words if self.control is not None and self.control.is_fair else ""

    @property
    def site(self) -> str:
        """Where its norm is read: after its peak."""
        return f"blocks.{self.spike.peak}.hook_resid_post"


def sink_neurons_of(setup: Setup) -> SinkNeurons:
    """Find the sink neurons as `sinkscope find-sinks` does.

    Raises:
        SinkscopeError: The first token has no norm spike that needs neurons.
    """
    circuit = spike_of(setup)
    if circuit is None:
        raise SinkscopeError(
            f"{setup.target.name} has no norm spike at the first token that needs neurons: run sinkscope find-sinks, "
            "and give a model that has one"
        )
    neurons = tuple(neuron for unit in circuit.needs.units for neuron in unit)
    control = other_neurons(circuit.spike.survey, neurons, (), setup.seed)
    return SinkNeurons(circuit.spike, neurons, circuit.patch, control)


def first_tokens(setup: Setup, words: Sequence[str]) -> Int[Tensor, " word"]:
    """Return the first token of each word.

    Raises:
        SinkscopeError: A word is empty.
    """
    ids: list[int] = []
    for word in words:
        tokens = setup.tokenizer.encode(word, add_special_tokens=False)
        if not tokens:
            raise SinkscopeError(f"--words has {word!r}, which is no token: give words of at least one letter")
        ids.append(tokens[0])
    return torch.tensor(ids)


def norms(
    setup: Setup, rows: Int[Tensor, "row pos"], site: str, edit: Intervention | None = None
) -> Float[Tensor, "row pos"]:
    """Return the norm of the residual stream at a site, under an edit.

    Args:
        setup: The model.
        rows: Token ids.
        site: The site.
        edit: The edit. None: the model as it is.
    """
    with under(edit, setup.target):
        return trace(setup.target, rows, site, lambda states: states.float().norm(dim=-1), batch_size=1)[site]
