"""Random draws: each has a generator of its own, so that no result depends on what was drawn before."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

Item = TypeVar("Item")


def draws(seed: int, purpose: str) -> torch.Generator:
    """Return the random numbers of one draw, the same in every process.

    Args:
        seed: Seed that the caller chose.
        purpose: What is drawn, with every number that distinguishes this draw, such as "controls of layer 3".
    """
    number = int.from_bytes(hashlib.sha256(f"{seed}/{purpose}".encode()).digest()[:7])
    return torch.Generator().manual_seed(number)


def gumbel(size: int, dtype: torch.dtype, generator: torch.Generator) -> Float[Tensor, " size"]:
    """Return Gumbel noise: argmax(logits + t * noise) samples softmax(logits / t)."""
    return -torch.empty(size, dtype=dtype).exponential_(generator=generator).log()


def some_of(items: Sequence[Item], count: int, generator: torch.Generator) -> list[Item]:
    """Draw `count` items in random order; all of them if there are fewer."""
    order = torch.randperm(len(items), generator=generator).tolist()
    return [items[number] for number in order[:count]]
