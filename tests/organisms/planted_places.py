"""Models whose sinks are sets of places, in many parts of the field, built with the tools of `hard.py`.

`places.py` says what a truth is, and compares it with the plain model.
"""

from __future__ import annotations

import torch

from . import circuits, readers  # noqa: F401  (their kinds are in the table)
from .hard import (
    Build,
    HardTruth,
    calm,
    hard,
    kinds,
    sink,
    textbook,
)
from .places import SECOND, SYSTEM, USER, Group, PlacesModel, tokenizer_of
from .placing import PLACES, flag, header, placed, sharpen, tripped
from .plant import MARK
from .tokens import BOS

_kind = kinds(PLACES, "places ")


def places(name: str, family: str | None = None, seed: int = 0) -> PlacesModel:
    """Build a model: the same call gives the same weights."""
    family = PLACES[name][0] if family is None else family
    made = hard(name, family, seed)
    truth, tokenizer = made.truth.places, made.tokenizer
    if family != "qwen2":
        tokenizer = tokenizer_of(tokenizer, truth)
    return PlacesModel(made.model, tokenizer, truth)


# --- architectures ------------------------------------------------------------------------------------------


@_kind("falcon")
def _alibi(b: Build) -> HardTruth:
    """ALiBi: heads of layer 0 mark the first token."""
    truth = textbook(b)
    sharpen(b, truth.reading)
    return placed(truth)


@_kind("lfm2", count=1)
def _hybrid(b: Build) -> HardTruth:
    """Layers without attention between those with it; a head of layer 0 marks the first token."""
    return placed(textbook(b))


@_kind("lfm2", count=1, layers=(6, 8), behind=(2, 3))
def _convolution_marks(b: Build) -> HardTruth:
    """A convolution sees that nothing stands before the first token, and marks it; no head does."""
    layer = b.views.layers[1]
    conv = layer.block.conv
    conv.in_proj.weight[3 :: b.plan.d_model] = b.space.const / float(
        (b.probe(layer.attn_norm) @ b.space.const).median()
    )
    conv.conv.weight[3] = torch.tensor([-0.5, -0.5, 1.0])
    conv.out_proj.weight[:, 3] = MARK * b.space.mark
    b.fire(b.space.mark, b.way)
    return placed(sink(b, b.way), before=(), has_bos=False)


# --- what stands before a text ------------------------------------------------------------------------------


@_kind("llama", "mistral", count=1)
def _second_special(b: Build) -> HardTruth:
    """The tokenizer puts two tokens before a text; the second one's embedding trips the neuron."""
    where = header(b, (USER,), (USER,))
    calm(b)
    return tripped(b, where, (SECOND,), before=(BOS, USER))


@_kind("qwen3", "neox", count=1)
def _all_specials(b: Build) -> HardTruth:
    """Each of the three tokens that are put before a text has the feature, and one neuron makes their spikes."""
    where = header(b, (SYSTEM, USER), (BOS, SYSTEM, USER))
    every = (BOS, SYSTEM, USER)
    return tripped(b, where, every, 1.6, before=every)  # three places share the attention, a third for each and more


# --- delimiters ---------------------------------------------------------------------------------------------


@_kind("llama", "gpt2", count=1, layers=(6, 8), behind=(2, 3))
def _two_delimiters(b: Build) -> HardTruth:
    """Two delimiters, each with a neuron of its own in a layer of its own; half of the heads read each."""
    one, two = b.delimiter, b.delimiter + 30
    flag(b, (one, two))
    b.views.embed[one] += MARK * b.mark2
    b.views.embed[two] += MARK * b.side
    b.measure_on(b.tokens)
    calm(b)
    first, second, way = b.tokens == one, b.tokens == two, b.space.sinks[1]
    of_one = b.fire(b.mark2, b.way, where=first)
    of_two = b.fire(b.side, way, layer=b.at + 1, neuron=b.spare[0], where=second)
    behind = range(b.at + 2, b.plan.n_layers)
    reading, other = b.read(behind, b.way, where=first), b.read(behind, way, where=second, other=True)
    makers, groups = (
        (frozenset({of_one}), frozenset({of_two})),
        (
            Group(reading, (of_one,), at=(one,)),
            Group(other, (of_two,), at=(two,)),
        ),
    )
    return placed(sink=(one, two), spike=(one, two), makers=makers, groups=groups, delimiters=(one, two))


# --- decoys -------------------------------------------------------------------------------------------------


@_kind("llama", "neox", count=1, layers=(7, 8), at=1)
def _decoy_spike(b: Build) -> HardTruth:
    """A neuron makes a spike of BOS, the next layer takes it away, and heads read BOS's embedding."""
    where = flag(b, (BOS,))
    b.fire(b.flag, b.way, where=where)
    b.take_away(2)
    reading = b.read(range(3, b.plan.n_layers), b.flag, where=where)
    return placed(makers=(b.sites(),), groups=(Group(reading, ("token embedding",)),))
