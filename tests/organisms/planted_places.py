"""Models whose sinks are sets of places, in many parts of the field, built with the tools of `build.py`.

`places.py` says what a truth is.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from .build import Build, HardTruth, kinds
from .hard import calm, hard, key_bias, sink, textbook
from .places import FIRST, SECOND, SYSTEM, USER, Group, Places, PlacesModel, put_before
from .tokens import BOS

PLACES: dict[str, tuple[str, ...]] = {}
"""Every kind, and the families that it is built in."""
_places = kinds(PLACES, "places ")
_circuit = kinds(PLACES, "circuit ")
_readers = kinds(PLACES, "readers ")


def places(name: str, family: str | None = None) -> PlacesModel:
    """Build a model: the same call gives the same weights."""
    family = PLACES[name][0] if family is None else family
    made = hard(name, family)
    put_before(made.tokenizer, made.truth.places.before)
    return PlacesModel(made.model, made.tokenizer, made.truth.places)


def placed(truth: HardTruth | None = None, **more) -> HardTruth:
    """The truth, from that about the first token: all its readers need the spike, and all makers are one set."""
    truth = HardTruth(False, False, None) if truth is None else truth
    about = {"makers": truth.sets, "groups": (Group(truth.reading, ("spike",)),)} | more
    return replace(truth, places=Places(**about))


def tripped(b: Build, where: Tensor, at: tuple, times: float = 1.0, **more) -> HardTruth:
    """The flag trips the neuron of the sink layer; heads read the spike, with scores as many times as strong."""
    site = b.fire(b.feature, b.side, where=where)
    reading = b.read(b.behind, b.side, where=where)
    for layer, head in reading:
        b.views.layers[layer].q[head] *= times
    groups = (Group(reading, ("spike",)),)
    return placed(sink=at, spike=at, makers=(frozenset({site}),), groups=groups, **more)


# --- architectures --------------------------------------------------------------------------------------------------


@_places("lfm2", count=1)
def _hybrid(b: Build) -> HardTruth:
    """Layers without attention between those with it; a head of layer 0 marks the first token."""
    return placed(textbook(b))


# --- what stands before a text --------------------------------------------------------------------------------------


@_places("llama", "mistral", count=1)
def _second_special(b: Build) -> HardTruth:
    """The tokenizer puts two tokens before a text; the second one's embedding trips the neuron."""
    where = b.flag(USER, 1)
    calm(b)
    return tripped(b, where, (SECOND,), before=(BOS, USER))


@_places("qwen3", "neox", count=1)
def _all_specials(b: Build) -> HardTruth:
    """Each of the three tokens that are put before a text has the feature, and one neuron makes their spikes."""
    every = (BOS, SYSTEM, USER)
    where = b.flag(BOS) | b.flag(SYSTEM, 1) | b.flag(USER, 2)
    return tripped(b, where, every, 1.6, before=every)  # three places share the attention, a third for each and more


# --- delimiters -----------------------------------------------------------------------------------------------------


@_places("llama", "gpt2", count=1, layers=(6, 8), behind=(2, 3))
def _two_delimiters(b: Build) -> HardTruth:
    """Two delimiters whose embeddings trip one neuron; the first token is no sink."""
    two = (b.delimiter, b.delimiter + 30)
    where = b.flag(two[0]) | b.flag(two[1], 7)
    calm(b)
    return tripped(b, where, two, delimiters=two)


@_circuit("llama", "gemma2", "neox", "gpt2", "mixtral", count=1)
def _two_sinks(b: Build) -> HardTruth:
    """The first token by a head (in GPT-2 by its position), a delimiter by its embedding, each with its own neuron."""
    where = b.flag(b.delimiter)
    b.mark()
    one = b.fire(b.space.mark, b.way)
    two = b.fire(b.feature, b.side, neuron=b.spare[0], where=where)
    first = b.read(b.behind, b.way)
    other = b.read(b.behind, b.side, where=where, other=True)
    at = b.delimiter
    return placed(
        sink=(FIRST, at),
        spike=(FIRST, at),
        makers=(frozenset({one}), frozenset({two})),
        groups=(Group(first, (one,), at=(FIRST,)), Group(other, (two,), at=(at,))),
        marks={FIRST: b.markers() if b.plan.by_heads else ("position embedding",), at: ("token embedding",)},
        delimiters=(at,),
    )


# --- decoys ---------------------------------------------------------------------------------------------------------


@_places("llama", "neox", count=1, layers=(7, 8), at=1)
def _decoy_spike(b: Build) -> HardTruth:
    """A neuron makes a spike of BOS, the next layer takes it away, and heads read BOS's embedding."""
    where = b.flag(BOS)
    b.fire(b.feature, b.way, where=where)
    b.take_away(2)
    reading = b.read(range(3, b.plan.n_layers), b.feature, where=where)
    return placed(makers=(b.sites(),), groups=(Group(reading, ("token embedding",)),))


@_circuit("llama", "gemma2", "neox", "mixtral", count=1)
def _decorative_head(b: Build) -> HardTruth:
    """A head marks the first token, and nothing reads it: the neuron reads BOS's embedding."""
    b.mark()
    b.flag(BOS)
    b.fire(b.feature, b.way)
    return placed(sink(b, b.way), marks={FIRST: ("token embedding",)}, decoys=b.markers())


@_readers("neox", count=1)
def _silent_twin(b: Build) -> HardTruth:
    """One head of layer 0 marks BOS; another attends in the same way and writes nothing."""
    b.mark()
    layer, ratio = b.views.layers[0], b.plan.n_heads // b.plan.n_kv
    (head,) = b.of_bos()
    other = next(one for one in range(b.plan.n_heads) if one // ratio != head // ratio)
    for rows in (layer.q, layer.q_bias):
        rows[other] = rows[head].clone()
    for rows in (layer.k, layer.v, layer.k_bias, layer.v_bias):
        rows[other // ratio] = rows[head // ratio].clone()
    layer.o[other] = 0.0
    b.fire(b.space.mark, b.way)
    return placed(sink(b, b.way), marks={FIRST: b.markers()}, decoys=(f"L0.H{other}",))


# --- keys -----------------------------------------------------------------------------------------------------------


@_circuit("neox", "qwen2")
def _farthest_key(b: Build) -> HardTruth:
    """Heads attend to the farthest key by a bias of their keys."""
    return placed(spike=(), groups=(Group(key_bias(b).reading, ("key bias",)),))


@_readers("llama", count=1, layers=(7, 8), at=2)
def _two_directions(b: Build) -> HardTruth:
    """Two neurons make spikes of the first token in two directions, and each is read by heads of its own."""
    b.mark()
    size, const, last = b.surgeon.size(2), b.const(4), range(5, b.plan.n_layers)
    one = b.fire(b.space.mark, b.way, size)
    rows = b.surgeon.steady(4, b.surgeon.on(4, b.space.mark), b.way, const)
    other = b.write(rows, b.side, 1.5 * size, layer=4, neuron=b.spare[0])
    groups = (Group(b.read(last, b.way), (one,)), Group(b.read(last, b.side, other=True), (other,)))
    return placed(makers=(frozenset({one, other}),), groups=groups)
