"""Further kinds of `planted_places.py`: sinks at some tokens, behind a token, or at most first tokens."""

from __future__ import annotations

from dataclasses import replace

import torch

from .hard import Build, HardTruth, calm, kinds, textbook
from .places import Group, Places
from .placing import flag, placed, sharpen
from .plant import MARK

TOKEN_PLACES: dict[str, tuple[str, ...]] = {}
"""Every kind, and the families that it is built in."""
_kind = kinds(TOKEN_PLACES, "places ")


@_kind("bloom", "mpt", count=1)
def _alibi_no_bos(b: Build) -> HardTruth:
    """ALiBi, no BOS: heads of layer 0 mark most first tokens, and a few more tokens early in a text."""
    truth = textbook(b)
    sharpen(b, truth.reading)
    return placed(b, truth, before=(), has_bos=False, agreement=0.55)


@_kind("lfm2", count=1, layers=(6, 8), behind=(2, 3))
def _conv_bigram(b: Build) -> HardTruth:
    """A token is a sink only straight behind another one: a convolution sees the bigram."""
    before, behind = pair = b.delimiter, b.delimiter + 30
    b.views.embed[before] += MARK * b.flag
    b.views.embed[behind] += MARK * b.side
    rows = b.tokens.clone()
    rows[(rows == before) | (rows == behind)] = 41
    rows[:, 5], rows[:, 6], rows[:, 12], rows[:, 15] = before, behind, behind, before
    b.measure_on(rows)
    at = torch.zeros_like(rows, dtype=torch.bool)
    at[:, 6] = True
    is_before = rows == before
    block = b.views.layers[1].block
    seen = b.probe(b.views.layers[1].attn_norm)
    const = b.space.const / float((seen @ b.space.const).median())
    of_a = b.flag / float((seen[is_before] @ b.flag).mean())
    of_b = b.side / float((seen[at] @ b.side).mean())
    parts = block.conv.in_proj.weight.chunk(3)
    channel = 3
    parts[0][channel], parts[1][channel], parts[2][channel] = of_a, of_b, const
    block.conv.conv.weight[channel] = torch.tensor([[0.0, 1.0, 0.0]])
    block.conv.out_proj.weight[:, channel] = MARK * b.mark2
    calm(b)
    site = b.fire(b.plan.sink_layer, b.plan.neurons[0], b.mark2, b.space.sinks[0], where=at)
    reading = b.read(b.behind, b.space.sinks[0], where=at)
    where = (("behind", *pair),)
    about = Places(where, where, (frozenset({site}),), (Group(reading, ("spike",)),))
    return replace(HardTruth(False, False, None), about=(about, pair))


@_kind("llama", "gpt2", count=1, layers=(6, 8), behind=(3, 3))
def _three_delimiters(b: Build) -> HardTruth:
    """Three delimiters; one neuron makes the spike of two, another one of the third; all heads read all."""
    one, two, three = b.delimiter, b.delimiter + 25, b.delimiter + 30
    flag(b, (one, two))
    b.views.embed[three] += MARK * b.mark2
    rows = b.tokens.clone()
    every = (one, two, three)
    rows[torch.isin(rows, torch.tensor(every))] = 40
    for number, token in enumerate(every):
        rows[:, 4 + 3 * number] = token
    b.measure_on(rows)
    calm(b)
    at = b.plan.sink_layer
    first = torch.isin(b.tokens, torch.tensor([one, two]))
    third = b.tokens == three
    of_two = b.fire(at, b.plan.neurons[0], b.flag, b.side, where=first)
    of_third = b.fire(at, b.spare[0], b.mark2, b.side, where=third)
    reading = b.read(b.behind, b.side, where=first)
    groups = (Group(reading, (of_two,), at=(one, two)), Group(reading, (of_third,), at=three))
    about = Places(every, every, (frozenset({of_two}), frozenset({of_third})), groups, often=1)
    return replace(HardTruth(False, False, None), about=(about, every))
