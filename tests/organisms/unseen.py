"""Kinds of models beside those of `hard.py`: sinks elsewhere than at the first token of every text, by other means.

They are built with the same tools.
"""

from __future__ import annotations

from .hard import Build, HardTruth, kinds, read_mark, sink, textbook
from .tokens import BOS

UNSEEN = {}
"""Every kind, and the families that it is built in."""
_unseen = kinds(UNSEEN)


@_unseen("mistral", window=24)
def _window_mark(b: Build) -> HardTruth:
    """Heads read the mark itself; no norm stands out, and no query sees farther than 24 positions."""
    return read_mark(b, window=24)


# --- some texts -----------------------------------------------------------------------------------------------------


@_unseen("llama", "neox", "qwen3", "mixtral", "gpt_oss", marked=0.4)
def _some_first_tokens(b: Build) -> HardTruth:
    """Two of five tokens are marked where they stand first; the others are no sinks."""
    return textbook(b, bos=False, share=0.4)


# --- other makers ------------------------------------------------------------------------------------------------


@_unseen("llama", "neox", "qwen3", "mixtral", marked=0.85, count=1)
def _other_neurons(b: Build) -> HardTruth:
    """BOS has a feature and a neuron of its own; repeated tokens are marked by heads, and trip another neuron."""
    size = b.surgeon.size(b.at)
    rows = b.tokens.clone()
    rows[:, 0] = BOS
    b.flag(BOS)
    b.mark()
    repeated = b.fire(b.space.mark, b.way, size, neuron=b.spare[0])
    b.measure_on(rows)
    b.fire(b.feature, b.way, size)
    return sink(b, b.way, repeated=(repeated,))
