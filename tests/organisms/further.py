"""Models of which a report easily says too much: neurons that cancel or take turns, sinks that few heads or texts have.

They are built with the tools of `hard.py`. The truth has what is said of it by which command.
"""

from __future__ import annotations

from dataclasses import replace

from .hard import Build, HardTruth, calm, kinds, sink, spike, textbook, unit
from .plant import clear
from .tokens import BOS, N_SPECIAL

FURTHER = {}
"""Every kind, and the families that it is built in."""
_further = kinds(FURTHER, "further ")


# --- few heads, other positions --------------------------------------------------------------------------------------


@_further("neox", "llama", "gemma2")
def _one_reader(b: Build) -> HardTruth:
    """One head reads the spike."""
    truth = textbook(b)
    *others, reader = truth.reading
    for layer, head in others:
        clear(b.views.layers[layer].q, b.views.layers[layer].q_bias, head)
    calm(b, (*truth.marking, (reader[0], (reader[1],))))
    says = {
        "find_sinks": (r"^Norm spike without an attention sink: {set} make", "Too few heads attend"),
        "circuit": (r"1 of \d+ heads attends to the first token",),
        "attack": ("make spikes at",),
    }
    never = ("no head attends", "Fewer than", r"\bmakes? sinks", "sink fire")
    return replace(truth, reading=(reader,), says=says, never=never)


@_further("gpt2")
def _far_position(b: Build) -> HardTruth:
    """Heads read the embedding of position 100."""
    b.mark()
    reading = b.read(b.later_layers, b.space.mark)
    positions = b.views.positions
    positions[[0, 100]] = positions[[100, 0]]
    says = {
        "find_sinks": (r"^Attention sink without a norm spike: .* position 100 \(any token\)",),
        "circuit": (r"^\d+ of \d+ heads attend to position 100 \(any token\); without the position embedding",),
    }
    never = ("^Neither", "^No circuit")
    return HardTruth(False, False, "position embedding", reading=reading, says=says, never=never)


@_further("llama", "gemma2", layers=(6, 7))
def _spike_here_sink_there(b: Build) -> HardTruth:
    where = b.flag_delimiter()
    marking = b.mark()
    b.surgeon().make_sink()
    calm(b, marking)
    b.read(b.later_layers, b.flag, where=where)
    says = {"find_sinks": ("^Norm spike at the first token, attention sink elsewhere",)}
    never = (r"\bmakes? sinks", "spike that the heads attend to")
    return replace(spike(b, marking), later={b.delimiter: ()}, says=says, never=never)


# --- neurons that cancel, take turns, or fire for one token ----------------------------------------------------------


@_further("neox", "llama", count=2)
def _opposed(b: Build) -> HardTruth:
    """One neuron writes twice the spike, another takes half of it away; without the first it points the other way."""
    marking = b.mark()
    b.fire(b.space.mark, b.way, 2 * b.size(b.at))
    b.copy(*b.plan.neurons, -0.5)
    says = {
        "find_sinks": (
            "^Norm spike and attention sink: {set} make the spike",
            "None of these neurons alone takes away",
        ),
        "circuit": ("100% is lost without {set}",),
    }
    return sink(b, b.way, marking, says=says, never=("because the others make",))


@_further("llama", "mixtral", count=2, marked=1.0, layers=(5, 6), behind=(2, 2))
def _turns(b: Build) -> HardTruth:
    """Where a token of one half of the vocabulary stands first, one neuron makes the spike; else another does."""
    cut = (N_SPECIAL + b.plan.vocab_size) // 2
    b.views.embed[N_SPECIAL:cut] += b.flag
    b.views.embed[cut:] += b.side
    b.tokens[0, 0] = N_SPECIAL
    b.tokens[1, 0] = b.plan.vocab_size - 1
    b.measure_on(b.tokens)
    in_half = (b.tokens[:, 0] < cut)[:, None] & b.first
    marking, size = b.mark(), b.size(b.at)
    for neuron, own, where in zip(b.plan.neurons, (b.flag, b.side), (in_half, b.first & ~in_half), strict=True):
        seen = b.mlp_input(b.at, where)
        const = unit(b.space.const, seen)
        both = unit(b.space.mark, seen) + unit(own, seen)
        rows = b.plan.sharpness * (both / 2 - 0.8 * const), const
        b.write(rows, b.way, size, neuron=neuron, where=where)
    says = {
        "find_sinks": (r"^Norm spike and attention sink( in \d+% of texts)?: {set} make the spike",),
        "circuit": ("100% is lost without {set}",),
    }
    return sink(b, b.way, marking, bos=False, says=says)


@_further("llama", "neox", layers=(6, 7), behind=(2, 3))
def _half_and_half(b: Build) -> HardTruth:
    """Half of the heads read the spike, the others BOS's embedding."""
    b.flag_delimiter(BOS)
    truth = textbook(b)
    other = b.read(b.behind, b.flag, other=True)
    says = {"find_sinks": (r"^Norm spike and attention sink.*(half of the|most) heads (need|do not need the spike)",)}
    return replace(truth, reading=truth.reading + other, says=says, never=("spike that the heads attend to",))


@_further("gpt_oss", "mixtral", count=1)
def _bos_expert(b: Build) -> HardTruth:
    """An expert that BOS alone chooses makes the spike; heads mark the first token, and nothing reads that."""
    b.flag_delimiter(BOS)
    view = b.views.layers[b.at]
    view.router[b.plan.expert] -= 8.0 * b.space.const / float((b.probe(view.mlp_norm) @ b.space.const).mean())
    b.mark()
    b.fire(b.flag, b.way, route=3 * b.flag)
    says = {
        "find_sinks": ("^Norm spike and attention sink: {set} makes the spike",),
        "circuit": ("the token embedding is needed",),
        "heads": ("^The heads of no single layer mark the first token",),
        "attack": ("^No single head of layer 0 is enough",),
    }
    return sink(b, b.way, (), says=says)


@_further("gpt2", "llama", layers=(7, 8), behind=(4, 5))
def _turned(b: Build) -> HardTruth:
    """A late neuron writes the spike twice with the other sign: the norm stays, and the direction turns round."""
    truth, fall = textbook(b), b.plan.n_layers - 2
    b.take_away(fall, 2.0)
    reading = tuple(place for place in truth.reading if place[0] <= fall)
    sink_layer = f"The sink layer is layer {truth.sink_layer}"
    says = {"find_sinks": ("^Norm spike and attention sink: {set} makes? the spike", sink_layer)}
    return replace(truth, reading=reading, says=says, never=("Before them", "It falls in"))


@_further("neox", "llama", "gpt2")
def _delimiter_alone(b: Build) -> HardTruth:
    """Only a delimiter has a spike; the first token is nothing."""
    where = b.flag_delimiter()
    calm(b)
    site = b.fire(b.flag, b.side, neuron=b.spare[0], where=where)
    b.read(b.behind, b.side, where=where)
    says = {
        "find_sinks": (rf"^Norm spike and attention sink: L{b.at}\.N{site[-1]} makes the spike of '",),
        "circuit": ("^For the spike of '.*' wherever it stands, the token embedding is needed",),
        "heads": ("^No MLP makes a norm spike at the first token, .* its norm spike is at '.*' wherever it stands",),
        "patch_make": ("^No patch was made",),
    }
    return HardTruth(False, False, None, later={b.delimiter: (site,)}, says=says)
