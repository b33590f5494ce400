"""Models of which a report easily says too much: neurons that cancel or take turns, sinks that few heads or texts have.

They are built with the tools of `hard.py`. `Further` holds the truth, and what is said of it by which command.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .hard import Build, HardModel, HardTruth, calm, hard, kinds, sink, spike, textbook
from .tokens import BOS, N_SPECIAL

FURTHER = {}
"""Every kind, and the families that it is built in."""
_further = kinds(FURTHER, "further ")


@dataclass(frozen=True)
class Further:
    """What is so, and how it is said.

    Attributes:
        bos: Whether texts begin with BOS.
        repeats: How often tokens have to be repeated.
        says: For each command, patterns that its text has. {set} stands for the names of the neurons.
        never: Patterns that no command's text has.
    """

    bos: bool = True
    repeats: int = 4
    says: dict[str, tuple[str, ...]] = field(default_factory=dict)
    never: tuple[str, ...] = ()


def further(name: str, family: str, seed: int = 0) -> tuple[HardModel, Further]:
    """Build a model: the same call gives the same weights."""
    model = hard(f"further {name}", family, seed)
    return model, model.truth.about


def _silent(b: Build, places: tuple[tuple[int, int], ...]):
    for layer, head in places:
        view = b.views.layers[layer]
        view.q[head] = 0.0
        if view.q_bias is not None:
            view.q_bias[head] = 0.0


# --- few heads, other positions --------------------------------------------------------------------------------------


@_further("neox", "llama", "gemma2")
def _one_reader(b: Build) -> HardTruth:
    """One head reads the spike."""
    truth = textbook(b)
    *others, reader = truth.reading
    _silent(b, tuple(others))
    calm(b, (*truth.marking, (reader[0], (reader[1],))))
    says = {
        "find_sinks": (r"^Norm spike without an attention sink: {set} make", "Too few heads attend"),
        "circuit": (r"1 of \d+ heads attends to the first token",),
        "attack": ("make spikes at",),
    }
    never = ("no head attends", "Fewer than", r"\bmakes? sinks", "sink fire")
    return replace(truth, reading=(reader,), about=Further(says=says, never=never))


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
    about = Further(says=says, never=("^Neither", "^No circuit"))
    return HardTruth(False, False, "position embedding", reading=reading, about=about)


@_further("llama", "gemma2", layers=(6, 7))
def _spike_here_sink_there(b: Build) -> HardTruth:
    where = b.flag_delimiter()
    marking = b.mark()
    b.surgeon().make_sink()
    calm(b, marking)
    b.read(b.later_layers, b.flag, where=where)
    says = {"find_sinks": ("^Norm spike at the first token, attention sink elsewhere",)}
    about = Further(says=says, never=(r"\bmakes? sinks", "spike that the heads attend to"))
    return replace(spike(b, marking), later={b.delimiter: ()}, about=about)


# --- neurons that cancel, take turns, or fire for one token ----------------------------------------------------------


@_further("neox", "llama", count=2)
def _opposed(b: Build) -> HardTruth:
    """One neuron writes twice the spike, another takes half of it away; without the first it points the other way."""
    marking, layer, way = b.begin()
    strong, weak = b.plan.neurons
    b.fire(layer, strong, b.space.mark, way, 2 * b.size(layer))
    b.copy(strong, weak, -0.5)
    says = {
        "find_sinks": (
            "^Norm spike and attention sink: {set} make the spike",
            "None of these neurons alone takes away",
        ),
        "circuit": ("100% is lost without {set}",),
    }
    about = Further(says=says, never=("because the others make",))
    return sink(b, way, marking, about=about)


@_further("llama", "mixtral", count=2, marked=1.0, layers=(5, 6), behind=(2, 2))
def _turns(b: Build) -> HardTruth:
    """Where a token of one half of the vocabulary stands first, one neuron makes the spike; else another does."""
    cut = (N_SPECIAL + b.plan.vocab_size) // 2
    b.views.embed[N_SPECIAL:cut] += b.flag
    b.views.embed[cut:] += b.side
    in_half = b.tokens[:, 0] < cut
    b.tokens[0, 0] = next(token for token in range(N_SPECIAL, cut))
    b.tokens[1, 0] = b.plan.vocab_size - 1
    b.measure_on(b.tokens)
    in_half = (b.tokens[:, 0] < cut)[:, None] & b.first
    marking, layer, way = b.begin()
    size, sites = b.size(layer), []
    for neuron, own, where in zip(b.plan.neurons, (b.flag, b.side), (in_half, b.first & ~in_half), strict=True):
        seen = b.mlp_input(layer, where)
        const = b.space.const / (seen @ b.space.const)
        both = b.space.mark / (seen @ b.space.mark) + own / (seen @ own)
        rows = b.plan.sharpness * (both / 2 - 0.8 * const), const
        sites.append(b.write(layer, neuron, rows, way, size, where=where, route=b.space.mark))
    says = {
        "find_sinks": (r"^Norm spike and attention sink( in \d+% of texts)?: {set} make the spike",),
        "circuit": ("100% is lost without {set}",),
    }
    return sink(b, way, marking, sets=(frozenset(sites),), about=Further(bos=False, says=says))


@_further("llama", "neox", layers=(6, 7), behind=(2, 3))
def _half_and_half(b: Build) -> HardTruth:
    """Half of the heads read the spike, the others BOS's embedding."""
    b.flag_delimiter(BOS)
    truth = textbook(b)
    other = b.read(b.behind, b.flag, other=True)
    says = {"find_sinks": (r"^Norm spike and attention sink.*(half of the|most) heads (need|do not need the spike)",)}
    about = Further(says=says, never=("spike that the heads attend to",))
    return replace(truth, reading=truth.reading + other, about=about)


@_further("gpt_oss", "mixtral")
def _bos_expert(b: Build) -> HardTruth:
    """An expert that BOS alone chooses makes the spike; heads mark the first token, and nothing reads that."""
    b.flag_delimiter(BOS)
    layer, way = b.plan.sink_layer, b.space.sinks[0]
    view = b.views.layers[layer]
    view.router[b.plan.expert] -= 8.0 * b.space.const / float((b.probe(view.mlp_norm) @ b.space.const).mean())
    b.mark()
    site = b.fire(layer, b.plan.neurons[0], b.flag, way, route=3 * b.flag)
    says = {
        "find_sinks": ("^Norm spike and attention sink: {set} makes the spike",),
        "circuit": ("the token embedding is needed",),
        "heads": ("^The heads of no single layer mark the first token",),
        "attack": ("^No single head of layer 0 is enough",),
    }
    return sink(b, way, (), sets=(frozenset({site}),), about=Further(says=says))


@_further("gpt2", "llama", layers=(7, 8), behind=(4, 5))
def _turned(b: Build) -> HardTruth:
    """A late neuron writes the spike twice with the other sign: the norm stays, and the direction turns round."""
    truth, fall = textbook(b), b.plan.n_layers - 2
    b.take_away(fall, 2.0)
    reading = tuple(place for place in truth.reading if place[0] <= fall)
    sink_layer = f"The sink layer is layer {truth.sink_layer}"
    says = {"find_sinks": ("^Norm spike and attention sink: {set} makes? the spike", sink_layer)}
    return replace(truth, reading=reading, about=Further(says=says, never=("Before them", "It falls in")))


@_further("neox", "llama", "gpt2")
def _delimiter_alone(b: Build) -> HardTruth:
    """Only a delimiter has a spike; the first token is nothing."""
    where = b.flag_delimiter()
    calm(b)
    layer = b.plan.sink_layer
    site = b.fire(layer, b.spare[0], b.flag, b.side, where=where)
    b.read(b.behind, b.side, where=where)
    says = {
        "find_sinks": (rf"^Norm spike and attention sink: L{layer}\.N{site[-1]} makes the spike of '",),
        "circuit": ("^For the spike of '.*' wherever it stands, the token embedding is needed",),
        "heads": ("^No MLP makes a norm spike at the first token, .* its norm spike is at '.*' wherever it stands",),
        "patch_make": ("^No patch was made",),
    }
    return HardTruth(False, False, None, later={b.delimiter: (site,)}, about=Further(says=says))
