"""Kinds of models beside those of `hard.py`: sinks elsewhere than at the first token of every text, by other means.

They are built with the same tools.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .hard import Build, HardTruth, kinds, read_mark, sink, textbook, write_by_heads
from .plant import MARK
from .tokens import BOS

UNSEEN = {}
"""Every kind, and the families that it is built in."""
_unseen = kinds(UNSEEN)


@_unseen("mistral", so={"window": 24}, window=24, every_window=True)
def _window_mark(b: Build) -> HardTruth:
    """Heads read the mark itself; no norm stands out, and no query sees farther than 24 positions."""
    return read_mark(b)


# --- other positions ---------------------------------------------------------------------------------------------


@_unseen("gpt2", so={"positions": (1,)}, count=2)
def _second_position(b: Build) -> HardTruth:
    """The position embedding marks position 1, and neurons make a spike of it, whatever stands there."""
    truth = textbook(b)
    b.views.positions[[0, 1]] = b.views.positions[[1, 0]]
    return truth


@_unseen("gpt2", so={"positions": (0, 1)}, count=1)
def _two_positions(b: Build) -> HardTruth:
    """Positions 0 and 1 have a mark, a neuron and a direction each."""
    positions = b.views.positions
    second = torch.zeros_like(b.first)
    second[:, 1] = True
    positions[1] += MARK * b.mark2
    site = b.fire(b.mark2, b.side, b.size(0), neuron=b.spare[0], where=second)
    truth = textbook(b)
    b.read(b.behind, b.side, where=second, other=True)
    return replace(truth, later={1: (site,)})


# --- some texts, some lengths --------------------------------------------------------------------------------------


@_unseen("llama", "neox", "qwen3", "mixtral", "gpt_oss", so={"bos": False, "share": 0.4}, marked=0.4)
def _some_first_tokens(b: Build) -> HardTruth:
    """Two of five tokens are marked where they stand first; the others are no sinks."""
    return textbook(b)


@_unseen("llama", "gemma2", "neox", so={"bos": False, "share": 0.4}, marked=0.4)
def _some_marks(b: Build) -> HardTruth:
    """Two of five tokens are marked where they stand first; heads read the mark."""
    return read_mark(b)


@_unseen("gpt2", so={"length": 200})
def _late_readers(b: Build) -> HardTruth:
    """Queries read a feature that the position embedding has from position 200 on."""
    truth = read_mark(b)
    positions = b.views.positions
    positions[200:] += MARK * b.side
    positions[20:24] += MARK * b.side  # where the rows to measure on show it
    late = torch.zeros_like(b.first)
    late[:, 20:] = True
    for layer, head in truth.reading:
        view = b.views.layers[layer]
        full = float(b.seen(view.attn_norm, late) @ b.side)
        dim = b.plan.slow_dim(0)
        const = float((b.probe(view.attn_norm)[:, 1:] @ b.space.const).median())
        score = float(view.q[head, dim] @ b.space.const) * const
        view.q[head, dim] = score * b.side / full
    positions[20:24] -= MARK * b.side
    return truth


@_unseen("gemma2", "gpt_oss", so={"window": 16}, window=16, every_window=True, layers=(6, 6), behind=(2, 2))
def _other_windows(b: Build) -> HardTruth:
    """Only layers with a window of 16 read."""
    marking = b.mark()
    way = b.surgeon().make_sink()
    even = [layer for layer in b.behind if layer % 2 == 0]
    return sink(b, way, marking, layers=even or [b.plan.n_layers - 1])


# --- other makers ------------------------------------------------------------------------------------------------


@_unseen("llama", "neox", "mixtral", odds=1e4, layers=(6, 7), behind=(2, 3), count=1, spike=9.0)
def _amplified(b: Build) -> HardTruth:
    """Heads of layer 0 write a spike, and a neuron reads it and writes four times as much."""
    size = b.size(0)
    marking = write_by_heads(b, b.way)
    b.fire(b.way, b.way, 4 * size)
    return sink(b, b.way, marking, step_up=())


@_unseen("llama", "qwen3", "gpt2", "neox")
def _embedded_delimiter(b: Build) -> HardTruth:
    """The embedding of a delimiter is its spike, and a neuron adds three percent."""
    size = b.size(0)
    b.views.embed[b.delimiter] += size * b.side / b.plan.embed_scale
    where = b.tokens == b.delimiter
    b.fire(b.side, b.side, 0.03 * size, neuron=b.spare[0], where=where)
    truth = textbook(b)
    b.read(b.behind, b.side, where=where, other=True)
    return replace(truth, later={b.delimiter: ()})


def _bos_apart(b: Build, repeated_layer: int) -> HardTruth:
    """BOS has a feature and a neuron of its own; repeated tokens are marked by heads, and trip another neuron."""
    size = b.size(b.at)
    flagged = b.tokens.clone()
    flagged[:, 0] = BOS
    b.views.embed[BOS] += MARK * b.flag / b.plan.embed_scale
    b.surgeon().mark_first()
    repeated = b.fire(b.space.mark, b.way, size, layer=repeated_layer, neuron=b.spare[0])
    b.measure_on(flagged)
    b.fire(b.flag, b.way, size)
    return sink(b, b.way, (), range(repeated_layer + 1, b.plan.n_layers), repeated=(repeated,))


@_unseen("llama", "neox", "qwen3", "mixtral", marked=0.85, count=1)
def _other_neurons(b: Build) -> HardTruth:
    return _bos_apart(b, b.at)


@_unseen("llama", "neox", marked=0.85, count=1, layers=(7, 8), behind=(4, 4))
def _other_layer(b: Build) -> HardTruth:
    return _bos_apart(b, b.at + 2)
