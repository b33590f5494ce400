"""Prompts, chunks and texts of every length."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from transformers import Cache

from sinkscope.conformance.checks.registry import check
from sinkscope.conformance.flow import Flow
from sinkscope.conformance.kit import Kit

MOST = 130
"""The longest of all the lengths that are tried."""
_FEW = 20
_BLOCK_NAMES = ("block", "page", "chunk", "residual", "group", "segment", "bucket", "capacity")
_LARGEST_BLOCK = 512


@check
def no_length_makes_a_difference(kit: Kit) -> str:
    """Prompts and chunks of each length, around each power of two and each block that the cache names, are read."""
    few = _some(kit.seed)
    lengths = {*all_or(kit, few), *_around(block_sizes(kit.subject())), *_around([256])}
    flows = [Flow(lengths=(1,), acts=(("step", MOST),))]
    for length in sorted(lengths):
        flows.append(Flow(lengths=(length,), acts=(("step", 1),)))
    for length in all_or(kit, few[::3]):
        flows.append(Flow(lengths=(5,), acts=(("step", 1), ("read", length), ("step", 1))))
    if kit.own_budget is not None:
        flows = [flow for flow in flows if flow.prompt + _later(flow) < kit.own_budget]
    seen = kit.right(*flows, budget=False)
    if not kit.evicts:
        return seen
    least = kit.evicting(Flow(lengths=(1,)))
    flows = []
    for length in sorted(lengths) if kit.thorough else few:
        longer = Flow(lengths=(least.prompt + length,), acts=(("step", 2),), budget=least.budget, watched=True)
        flows.append(longer)
    return kit.right(*flows, budget=False)


def all_or(kit: Kit, few: Sequence[int]) -> Sequence[int]:
    """Return all lengths for a cache, and few for a policy, whose keys are held by a cache that is known."""
    if kit.thorough or isinstance(kit.subject(), Cache):
        return range(1, MOST + 1)
    return few


def _later(flow: Flow) -> int:
    return sum(act[1] for act in flow.acts)


def _some(seed: int) -> list[int]:
    """Lengths around the powers of two, and others that are drawn."""
    some = {length for length in (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)}
    drawn = random.Random(seed).sample(range(4, MOST), MOST - 4)
    while len(some) < _FEW:
        some.add(drawn.pop())
    return sorted(some)


def _around(sizes: list[int]) -> Iterator[int]:
    """Lengths at the first multiples of blocks, and one below and above."""
    for size in sizes:
        for times in (1, 2, 3):
            for near in (-1, 0, 1):
                if 0 < times * size + near <= 2 * _LARGEST_BLOCK - 16:
                    yield times * size + near


def block_sizes(subject: Any) -> list[int]:
    """Return the sizes of blocks that a cache or its first layer names, such as `page_size` or `residual_length`."""
    sizes: set[int] = set()
    for holder in (subject, *(getattr(subject, "layers", None) or ())[:1]):
        for name, value in {**vars(type(holder)), **vars(holder)}.items():
            named = any(part in name.lower() for part in _BLOCK_NAMES)
            if named and isinstance(value, int) and not isinstance(value, bool) and 1 < value <= _LARGEST_BLOCK:
                sizes.add(value)
    return sorted(sizes)
