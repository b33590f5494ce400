"""Kinds of planted places whose circuit a report gets wrong easily: what marks the sink, and what looks like it."""

from __future__ import annotations

from .hard import Build, HardTruth, key_bias, kinds, read_mark, sink
from .places import FIRST, Group
from .placing import PLACES, placed
from .tokens import BOS

_kind = kinds(PLACES, "circuit ")


@_kind("neox", "qwen2")
def _farthest_key(b: Build) -> HardTruth:
    """Heads attend to the farthest key by a bias of their keys."""
    return placed(spike=(), groups=(Group(key_bias(b).reading, ("key bias",)),))


@_kind("llama", "gemma2", "neox", "mixtral", count=1)
def _decorative_head(b: Build) -> HardTruth:
    """A head marks the first token, and nothing reads it: the neuron reads BOS's embedding."""
    b.mark()
    b.flag_delimiter(BOS)
    b.fire(b.flag, b.way)
    return placed(sink(b, b.way), marks={FIRST: ("token embedding",)}, decoys=b.markers())


@_kind("llama", "gemma2", "neox", "gpt2", count=1)
def _two_sinks(b: Build) -> HardTruth:
    """The first token by a head (in GPT-2 by its position), a delimiter by its embedding, each with its own neuron."""
    where = b.flag_delimiter()
    b.mark()
    one = b.fire(b.space.mark, b.way)
    two = b.fire(b.flag, b.side, neuron=b.spare[0], where=where)
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


@_kind("gpt2")
def _idle_key_bias(b: Build) -> HardTruth:
    """Large biases of keys in a fused projection; without rotary they shift all scores alike and carry nothing."""
    for layer in b.views.layers:
        layer.k_bias += 2.0
    groups = (Group(read_mark(b).reading, ("position embedding",)),)
    return placed(spike=(), groups=groups, decoys=("key bias",))
