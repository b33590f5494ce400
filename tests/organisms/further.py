"""Models of which a report easily says too much: neurons that cancel or take turns, sinks that few heads or texts have.

They are built with the tools of `hard.py`. `Further` holds the truth, and what is said of it by which command.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from .hard import (
    _KINDS,
    HardModel,
    HardTruth,
    Site,
    _Build,
    _calm,
    _full,
    _Kind,
    _sink,
    _spike_way,
    _textbook,
    hard,
)
from .tokens import BOS, N_SPECIAL

FURTHER = {}
"""Every kind, and the families that it is built in."""


@dataclass(frozen=True)
class Further:
    """What is so, and how it is said.

    Attributes:
        bos: Whether texts begin with BOS.
        alone: Neurons whose zeroing alone takes the attention of the planted heads away.
        repeats: How often tokens have to be repeated.
        says: For each command, patterns that its text has. {set} and {alone} stand for the names of neurons.
        never: Patterns that no command's text has.
    """

    bos: bool = True
    alone: tuple[Site, ...] = ()
    repeats: int = 4
    says: dict[str, tuple[str, ...]] = field(default_factory=dict)
    never: tuple[str, ...] = ()


Made = tuple[HardTruth, Further]
_ABOUT = {}


def further(name: str, family: str, seed: int = 0) -> tuple[HardModel, Further]:
    """Build a model: the same call gives the same weights."""
    model = hard(f"further {name}", family, seed)
    return model, _ABOUT[f"further {name}"]


def _further(*families: str, **settings) -> Callable[[Callable[[_Build], Made]], Callable[[_Build], Made]]:
    def register(make: Callable[[_Build], Made]) -> Callable[[_Build], Made]:
        name = make.__name__.strip("_")

        def truth(b: _Build) -> HardTruth:
            made, _ABOUT[f"further {name}"] = make(b)
            return made

        FURTHER[name], _KINDS[f"further {name}"] = families, _Kind(truth, settings)
        return make

    return register


def _silent(b: _Build, places: tuple[tuple[int, int], ...]):
    for layer, head in places:
        view = b.views.layers[layer]
        view.q[head] = 0.0
        if view.q_bias is not None:
            view.q_bias[head] = 0.0


# --- few heads, other positions --------------------------------------------------------------------------------------


@_further("neox", "llama", "gemma2")
def _one_reader(b: _Build) -> Made:
    """One head reads the spike."""
    truth = _textbook(b)
    *others, reader = truth.reading
    _silent(b, tuple(others))
    _calm(b, (*truth.marking, (reader[0], (reader[1],))))
    says = {
        "find_sinks": (r"^Norm spike without an attention sink: {set} make", "Too few heads attend"),
        "circuit": (r"1 of \d+ heads behind layer \d+ gives the first token",),
        "cluster_attack": ("make spikes at",),
    }
    never = ("no head attends", "Fewer than", r"\bmakes? sinks", "sink fire")
    return replace(truth, reading=(reader,)), Further(says=says, never=never)


@_further("gpt2")
def _far_position(b: _Build) -> Made:
    """Heads read the embedding of position 100."""
    b.mark()
    reading = b.read(b.later_layers, b.space.mark)
    positions = b.views.positions
    positions[[0, 100]] = positions[[100, 0]]
    says = {
        "find_sinks": ("^Attention sink without a norm spike: .* position 100, whatever stands there",),
        "circuit": ("^Heads attend to position 100 without a spike; the position embedding is needed",),
    }
    truth = HardTruth(False, False, "position embedding", reading=reading)
    return truth, Further(says=says, never=("^Neither", "^No circuit"))


@_further("llama", "gemma2", layers=(6, 7))
def _spike_here_sink_there(b: _Build) -> Made:
    where = b.flag_delimiter()
    marking = b.mark()
    b.surgeon().make_sink()
    _calm(b, marking)
    b.read(b.later_layers, b.flag, where=where)
    layer = b.plan.sink_layer
    truth = HardTruth(True, False, None, layer, (b.sites(),), marking=marking, later={b.delimiter: ()})
    says = {"find_sinks": ("^Norm spike at the first token, attention sink elsewhere",)}
    return truth, Further(says=says, never=(r"\bmakes? sinks", "spike that the heads attend to"))


# --- neurons that cancel, take turns, or fire for one token ----------------------------------------------------------


@_further("neox", "llama", count=2)
def _opposed(b: _Build) -> Made:
    """One neuron writes twice the spike, another takes half of it away; without the first it points the other way."""
    marking, layer, way = b.begin()
    strong, weak = b.plan.neurons
    one = b.write(layer, strong, b.on(layer, b.space.mark), way, 2 * b.size(layer))
    b.copy(layer, strong, weak, -0.5)
    says = {
        "find_sinks": (
            "^Norm spike and attention sink: {set} make the spike",
            "None of these neurons alone takes away",
        ),
        "circuit": (r"{alone} is needed alone, L\d\S+ is not; 100% is lost without both",),
    }
    return _sink(b, way, marking), Further(alone=(one,), says=says, never=("because the others make",))


@_further("llama", "mixtral", count=2, marked=1.0, layers=(5, 6), behind=(2, 2))
def _turns(b: _Build) -> Made:
    """Where a token of one half of the vocabulary stands first, one neuron makes the spike; else another does."""
    cut = (N_SPECIAL + b.plan.vocab_size) // 2
    b.views.embed[N_SPECIAL:cut] += b.flag
    b.views.embed[cut:] += b.side
    in_half = b.tokens[:, 0] < cut
    b.tokens[0, 0] = next(token for token in range(N_SPECIAL, cut))
    b.tokens[1, 0] = b.plan.vocab_size - 1
    b.probe = type(b.probe)(b.model, b.tokens)
    in_half = (b.tokens[:, 0] < cut)[:, None] & b.first
    marking, layer, way = b.begin()
    size, sites = b.size(layer), []
    for neuron, own, where in zip(b.plan.neurons, (b.flag, b.side), (in_half, b.first & ~in_half), strict=True):
        seen = b.seen(b.views.layers[layer].mlp_norm, where)
        const = b.space.const / (seen @ b.space.const)
        both = b.space.mark / (seen @ b.space.mark) + own / (seen @ own)
        rows = b.plan.sharpness * (both / 2 - 0.8 * const), const
        sites.append(b.write(layer, neuron, rows, way, size, where=where, route=b.space.mark))
    reading = b.read(b.behind, way)
    truth = HardTruth(True, True, "spike", layer, (frozenset(sites),), reading=reading, marking=marking)
    says = {
        "find_sinks": ("^Norm spike and attention sink: {set} make the spike that the heads attend to",),
        "circuit": (r"L\d\S+N\d+ is needed alone, L\d\S+N\d+ is not",),
    }
    return truth, Further(bos=False, says=says)


@_further("llama", "neox", layers=(6, 7), behind=(2, 3))
def _half_and_half(b: _Build) -> Made:
    """Half of the heads read the spike, the others BOS's embedding."""
    b.flag_delimiter(BOS)
    truth = _textbook(b)
    other = b.read(b.behind, b.flag, other=True)
    says = {"find_sinks": (r"^Norm spike and attention sink.*(half of the|most) heads (need|do not need the spike)",)}
    return replace(truth, reading=truth.reading + other), Further(says=says, never=("spike that the heads attend to",))


@_further("gpt_oss", "mixtral")
def _bos_expert(b: _Build) -> Made:
    """An expert that BOS alone chooses makes the spike; heads mark the first token, and nothing reads that."""
    b.flag_delimiter(BOS)
    layer, way = b.plan.sink_layer, b.space.sinks[0]
    view = b.views.layers[layer]
    view.router[b.plan.expert] -= 8.0 * b.space.const / float((b.probe(view.mlp_norm) @ b.space.const).mean())
    b.mark()
    site = b.write(layer, b.plan.neurons[0], b.on(layer, b.flag), way, b.size(layer), route=3 * b.flag)
    says = {
        "find_sinks": ("^Norm spike and attention sink: {set} makes the spike",),
        "circuit": ("the token embedding is needed",),
        "marking_heads": ("^No head marks the first token",),
        "cluster_attack": ("^No single head of layer 0 is enough",),
    }
    return _sink(b, way, (), sets=(frozenset({site}),)), Further(alone=(site,), says=says)


@_further("gpt2", "llama", layers=(7, 8), behind=(4, 5))
def _turned(b: _Build) -> Made:
    """A late neuron writes the spike twice with the other sign: the norm stays, and the direction turns round."""
    truth = _textbook(b)
    fall, way = b.plan.n_layers - 2, _spike_way(b)
    end = float(b.seen(b.views.layers[fall].block) @ way)
    gate, _ = b.on(fall, way)
    b.write(fall, b.spare[0], (gate, _full(b, fall, way)), -way, 2 * end, route=way)
    reading = tuple(place for place in truth.reading if place[0] <= fall)
    sink_layer = f"The sink layer is layer {truth.sink_layer}"
    says = {"find_sinks": ("^Norm spike and attention sink: {set} makes? the spike", sink_layer)}
    return replace(truth, reading=reading), Further(says=says, never=("Before them", "It falls in"))


@_further("neox", "llama", "gpt2")
def _delimiter_alone(b: _Build) -> Made:
    """Only a delimiter has a spike; the first token is nothing."""
    where = b.flag_delimiter()
    _calm(b)
    layer = b.plan.sink_layer
    site = b.write(layer, b.spare[0], b.on(layer, b.flag, where), b.side, b.size(layer), where=where, route=b.flag)
    b.read(b.behind, b.side, where=where)
    says = {
        "find_sinks": (rf"^Norm spike and attention sink: L{layer}\.N{site[-1]} makes the spike of '",),
        "circuit": ("^For the spike of '.*', the token embedding is needed",),
        "marking_heads": ("^No MLP makes a norm spike at the first token, .* has an attention sink",),
        "make_patch": ("^No patch was made",),
    }
    return HardTruth(False, False, None, later={b.delimiter: (site,)}), Further(says=says)
