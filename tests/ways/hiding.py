"""Keys that are hidden by plain means: eager attention under a mask that hides more. What a knockout has to equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .families import HEADS, LAYERS, Family
from .masks import SECOND, counted

Hidden = Callable[[int], Tensor]
"""Gives what a layer hides `[row head query key]` (or one head for all), over the columns of the whole text."""


def additive(sees: Tensor) -> Tensor:
    """The mask that is added to scores."""
    return torch.zeros(sees.shape, device=sees.device).masked_fill(~sees, torch.finfo(torch.float32).min)


def hide(model: nn.Module, family: Family, hidden: Hidden) -> None:
    """Let eager attention hide these keys, too; a call may read the last columns so far alone."""
    model.set_attn_implementation("eager")
    for layer in range(LAYERS):
        attention = family.block(model, layer).get_submodule(family.out.rpartition(".")[0])

        def cover(_module: nn.Module, args: Any, kwargs: Any, layer: int = layer) -> Any:
            mask = kwargs["attention_mask"]
            if not mask.is_floating_point():
                mask = additive(mask)
            queries, keys = mask.shape[-2:]
            more = hidden(layer)[:, :, keys - queries : keys, :keys]
            return args, {**kwargs, "attention_mask": mask.masked_fill(more, torch.finfo(mask.dtype).min)}

        attention.register_forward_pre_hook(cover, with_kwargs=True)


@dataclass(frozen=True)
class Knocked:
    """What a knockout hides.

    Attributes:
        keys: Columns that are keys of it `[row pos]`, from the place of each column in its row.
        queries: Columns that do not see them `[row pos]`, from the place in the row; None: all.
        heads: Layers and heads in which they are hidden.
    """

    keys: Callable[[Tensor], Tensor]
    queries: Callable[[Tensor], Tensor] | None = None
    heads: Sequence[tuple[int, int]] = tuple((layer, head) for layer in range(LAYERS) for head in range(HEADS))

    def of(self, real: Tensor, more: int) -> Hidden:
        """What is hidden in rows of which these columns are real, and after which so many tokens are written."""
        real = nn.functional.pad(real, (0, more), value=1).bool()
        place = counted(real)
        size = real.shape[1]
        later = torch.ones(size, size, dtype=torch.bool, device=real.device).tril(-1)
        found = (self.keys(place) & real)[:, None] & later
        if self.queries is not None:
            found = found & (self.queries(place) & real)[:, :, None]
        chosen = torch.zeros(LAYERS, HEADS, dtype=torch.bool, device=real.device)
        for layer, head in self.heads:
            chosen[layer, head] = True

        def hidden(layer: int) -> Tensor:
            return found[:, None] & chosen[layer][None, :, None, None]

        return hidden

    def only(self, *heads: tuple[int, int]) -> Knocked:
        """The same in some heads alone."""
        return replace(self, heads=heads)


@dataclass(frozen=True)
class Streamed:
    """What the tokens after the prompt do not see of a cache that keeps the first four tokens and the latest.

    Attributes:
        budget: How many it keeps.
    """

    budget: int

    def of(self, real: Tensor, _more: int) -> Hidden:
        """What is hidden in rows of which these columns are real."""
        place = counted(real)
        column = torch.arange(real.shape[1], device=real.device)
        after = (column >= len(column) - SECOND)[None, :, None]
        left = (place[:, None] >= 4) & (place[:, None] < place[:, :, None] - (self.budget - 4))
        hidden = (after & left)[:, None]
        return lambda _layer: hidden


def at(*places: int) -> Callable[[Tensor], Tensor]:
    """Columns with these places."""
    return lambda place: torch.isin(place, torch.tensor(places, device=place.device))


FIRST = Knocked(at(0))
