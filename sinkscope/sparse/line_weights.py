"""How much attention the heaviest lines of a layer and text hold, beside others, and whether two texts share them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from sinkscope.sparse.attention import Scores, line_sums
from sinkscope.sparse.bands import Lines, lengths_of
from sinkscope.sparse.head_lines import minference_lines, top_lines
from sinkscope.sparse.sparse import recovered

ByHead = Float[Tensor, "eta head"]
Chosen = Bool[Tensor, "eta head kind _"]


def mean_numbers(read: Sequence[Mapping[str, ByHead]], n_layers: int) -> dict[str, Any]:
    """Return what was measured, mean over texts; of the mass also that of each text.

    Args:
        read: What was measured of each layer, one text after the other.
        n_layers: Number of layers.
    """
    arrays: dict[str, Any] = {}
    for name in read[-1]:
        values = torch.stack([numbers[name] for numbers in read if name in numbers])  # no text is before the first
        by_text = values.unflatten(0, (-1, n_layers))
        arrays[name] = by_text.mean(0).transpose(0, 1).numpy()
        if name == "mass":
            arrays["text_mass"] = by_text.mean((1, 3)).T.numpy()
    return arrays


def agreement_by_layer(
    chosen: Sequence[Chosen], n_layers: int, count: Callable[..., Tensor]
) -> Float[np.ndarray, "eta layer head"]:
    """Return the agreement of texts in each layer, of lines that were chosen in one text after the other."""
    by_layer = [agreement(chosen[layer::n_layers], count) for layer in range(n_layers)]
    return torch.stack(by_layer, 1).numpy()


def weighed(
    scores: Scores, etas: Sequence[float], before: Chosen | None, weighs_whole: bool
) -> tuple[Chosen, dict[str, ByHead]]:
    """Weigh the heaviest lines of one layer and text, and those that were heaviest in the text before.

    Returns:
        The heaviest lines, and what is measured of them under the names of `LineWeights`.
    """
    half = scores.keys // 2
    early = scores.part(0, half)
    late = scores.part(half, scores.keys)
    early_sums = line_sums(early)
    late_sums = line_sums(late)
    sums = late_sums + pad(early_sums, (0, scores.keys - half))
    heaviest = top_lines(scores, sums, etas, weighs_whole=weighs_whole)
    numbers = masses(scores, heaviest, before)
    first = top_lines(early, early_sums, etas, weighs_whole=weighs_whole)
    second = top_lines(late, late_sums, etas, weighs_whole=weighs_whole)
    count = in_both(second, second).clamp(min=1)
    numbers["segments"] = in_both(first, second) / count
    numbers["segments_random"] = by_chance(first, second) / count
    inside = top_lines(late, line_sums(late, since=half), etas, since=half, weighs_whole=weighs_whole)
    numbers["segments_relative"] = in_both(first, inside) / in_both(inside, inside).clamp(min=1)
    return heaviest, {name: values.double().cpu() for name, values in numbers.items()}


def masses(scores: Scores, heaviest: Chosen, before: Chosen | None) -> dict[str, Tensor]:
    """Return how much attention the heaviest lines hold, beside the nearest, those of votes and of another text.

    Args:
        scores: The scores of a layer.
        heaviest: The heaviest lines.
        before: The lines that were heaviest in the text before. None: there is none.
    """
    keys = scores.keys
    by_mass = Lines.of(heaviest[..., 0, :], heaviest[..., 1, :], keys)
    as_many = (by_mass.cells() + 0.5) / by_mass.grid.cells  # whatever is rounded
    choices = {"mass": by_mass, "near_mass": nearest_of(by_mass), "last_mass": minference_lines(scores, share=as_many)}
    if before is not None:  # what a text of another length has, too
        columns, offsets = pad(before, (0, keys - before.shape[-1])).unbind(-2)
        choices["other_mass"] = Lines.of(columns, offsets, keys)
    numbers = {name: recovered(scores, chosen) for name, chosen in choices.items()}
    numbers["cells"] = by_mass.attended()
    return numbers


def nearest_of(lines: Lines) -> Lines:
    """Return the first column and the nearest offsets, as few as cover at least as many cells as the lines."""
    length, _, _ = lengths_of(lines.grid, lines.columns.device)
    with_column = len(length) + (length - 1).cumsum(0)  # each offset crosses the first column once
    number = (with_column < lines.cells()[..., None]).sum(-1, keepdim=True) + 1
    index = torch.arange(len(length), device=length.device)
    return Lines.of((index == 0).expand_as(lines.columns), index < number, lines.grid.queries)


def in_both(a: Chosen, b: Chosen) -> Int[Tensor, "eta head"]:
    """Count the lines that are in both; a line that only the longer text has is not."""
    keys = min(a.shape[-1], b.shape[-1])
    return (a[..., :keys] & b[..., :keys]).sum((-2, -1))


def by_chance(a: Chosen, b: Chosen) -> Float[Tensor, "eta head"]:
    """Return the same for random lines, as many of each kind, on average."""
    return (a.sum(-1) * b.sum(-1) / max(a.shape[-1], b.shape[-1])).sum(-1)


def agreement(texts: Sequence[Chosen], count: Callable[..., Tensor]) -> ByHead:
    """Return lines in both of two texts over lines in either, mean over pairs of different texts."""
    shares: list[Tensor] = []
    for first, other in combinations(texts, 2):
        both = count(first, other)
        either = first.sum((-2, -1)) + other.sum((-2, -1)) - both
        shares.append(both / either.clamp(min=1))
    return torch.stack(shares).double().mean(0).cpu()
