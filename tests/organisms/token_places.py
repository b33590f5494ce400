"""Further kinds of `planted_places.py`: sinks at some tokens, behind a token, or at most first tokens."""

from __future__ import annotations

import torch

from .hard import Build, HardTruth, calm, kinds, textbook, unit
from .places import Group
from .placing import PLACES, convolve, flag, placed, sharpen, spotted, stand
from .plant import MARK

_kind = kinds(PLACES, "places ")


@_kind("bloom", "mpt", count=1)
def _alibi_no_bos(b: Build) -> HardTruth:
    """ALiBi, no BOS: heads of layer 0 mark most first tokens, and a few more tokens early in a text."""
    truth = textbook(b)
    sharpen(b, truth.reading)
    return placed(truth, before=(), has_bos=False, agreement=0.55)


@_kind("lfm2", count=1, layers=(6, 8), behind=(2, 3))
def _conv_bigram(b: Build) -> HardTruth:
    """A token is a sink only straight behind another one: a convolution sees the bigram."""
    before, behind = pair = b.delimiter, b.delimiter + 30
    b.views.embed[before] += MARK * b.flag
    b.views.embed[behind] += MARK * b.side
    stand(b, {5: before, 6: behind, 12: behind, 15: before})
    at = torch.zeros_like(b.first)
    at[:, 6] = True
    seen = b.probe(b.views.layers[1].attn_norm)
    const = b.space.const / float((seen @ b.space.const).median())
    rows = unit(b.flag, seen[b.tokens == before].mean(0)), unit(b.side, seen[at].mean(0)), const
    convolve(b, rows, (0.0, 1.0, 0.0), b.mark2)
    calm(b)
    b.fire(b.mark2, b.way, where=at)
    where = (("behind", *pair),)
    return spotted(where, b.sites(), b.read(b.behind, b.way, where=at), delimiters=pair)


@_kind("llama", "gpt2", count=1, layers=(6, 8), behind=(3, 3))
def _three_delimiters(b: Build) -> HardTruth:
    """Three delimiters; one neuron makes the spike of two, another one of the third; all heads read all."""
    one, two, three = every = b.delimiter, b.delimiter + 25, b.delimiter + 30
    flag(b, (one, two))
    b.views.embed[three] += MARK * b.mark2
    stand(b, dict(zip((4, 7, 10), every, strict=True)))
    calm(b)
    first = torch.isin(b.tokens, torch.tensor([one, two]))
    of_two = b.fire(b.flag, b.side, where=first)
    of_third = b.fire(b.mark2, b.side, neuron=b.spare[0], where=b.tokens == three)
    reading = b.read(b.behind, b.side, where=first)
    groups = (Group(reading, (of_two,), at=(one, two)), Group(reading, (of_third,), at=(three,)))
    makers = (frozenset({of_two}), frozenset({of_third}))
    return placed(sink=every, spike=every, makers=makers, groups=groups, delimiters=every, often=1)
