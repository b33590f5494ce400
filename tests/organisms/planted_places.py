"""Models whose sinks are sets of places, in many parts of the field, built with the tools of `build.py`."""

from __future__ import annotations

from torch import Tensor

from .build import SYSTEM, USER, HardBuild, kinds
from .hard import calm, sink, textbook
from .organism import FIRST, SECOND, Place, Truth
from .tokens import BOS

_places = kinds({}, "places ")
_circuit = kinds({}, "circuit ")


def tripped(b: HardBuild, where: Tensor, at: tuple[Place, ...], times: float = 1.0, **more) -> Truth:
    """The flag trips the neuron of the sink layer; heads read the spike, with scores as many times as strong."""
    site = b.fire(b.feature, b.side, where=where)
    reading = b.read(b.behind, b.side, where=where)
    for layer, head in reading:
        b.views.layers[layer].q[head] *= times
    return Truth(spike=at, sink=at, sets=(frozenset({site}),), **more)


# --- architectures --------------------------------------------------------------------------------------------------


@_places(count=1)
def _hybrid(b: HardBuild) -> Truth:
    """Layers without attention between those with it; a head of layer 0 marks the first token."""
    return textbook(b)


# --- what stands before a text --------------------------------------------------------------------------------------


@_places(count=1)
def _second_special(b: HardBuild) -> Truth:
    """The tokenizer puts two tokens before a text; the second one's embedding trips the neuron."""
    where = b.flag(USER, 1)
    calm(b)
    return tripped(b, where, (SECOND,), before=(BOS, USER))


@_places(count=1)
def _all_specials(b: HardBuild) -> Truth:
    """Each of the three tokens that are put before a text has the feature, and one neuron makes their spikes."""
    every = (BOS, SYSTEM, USER)
    where = b.flag(BOS) | b.flag(SYSTEM, 1) | b.flag(USER, 2)
    return tripped(b, where, every, 1.6, before=every)  # three places share the attention, a third for each and more


# --- delimiters -----------------------------------------------------------------------------------------------------


@_places(count=1, layers=(6, 8), behind=(2, 3))
def _two_delimiters(b: HardBuild) -> Truth:
    """Two delimiters whose embeddings trip one neuron; the first token is no sink."""
    two = (b.delimiter, b.delimiter + 30)
    where = b.flag(two[0]) | b.flag(two[1], 7)
    calm(b)
    return tripped(b, where, two, delimiters=two)


@_circuit(count=1)
def _two_sinks(b: HardBuild) -> Truth:
    """The first token by a head (in GPT-2 by its position), a delimiter by its embedding, each with its own neuron."""
    where = b.flag(b.delimiter)
    b.mark()
    one = b.fire(b.space.mark, b.way)
    two = b.fire(b.feature, b.side, neuron=b.spare[0], where=where)
    b.read(b.behind, b.way)
    b.read(b.behind, b.side, where=where, other=True)
    at = (FIRST, b.delimiter)
    return Truth(sink=at, spike=at, sets=(frozenset({one}), frozenset({two})), delimiters=(b.delimiter,))


# --- decoys ---------------------------------------------------------------------------------------------------------


@_places(count=1, layers=(7, 8), at=1)
def _decoy_spike(b: HardBuild) -> Truth:
    """A neuron makes a spike of BOS, the next layer takes it away, and heads read BOS's embedding."""
    where = b.flag(BOS)
    b.fire(b.feature, b.way, where=where)
    b.take_away(2)
    b.read(range(3, b.plan.n_layers), b.feature, where=where)
    return Truth(spike=(FIRST,), sink=(FIRST,), sets=(b.sites(),))


@_circuit(count=1)
def _decorative_head(b: HardBuild) -> Truth:
    """A head marks the first token, and nothing reads it: the neuron reads BOS's embedding."""
    b.mark()
    b.flag(BOS)
    b.fire(b.feature, b.way)
    return sink(b, b.way)
