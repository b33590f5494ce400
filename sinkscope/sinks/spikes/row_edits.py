"""Edits of rows: what is done in a pass to texts that are read together, to each row on its own.

Neurons are zeroed, and components or heads write a mean instead (`Zeroed`, `Replaced`): each row is without one of
several sets of parts. Keys are hidden (`Hidden`), later tokens read another value from the place (`OtherValue`), or
tokens have other position ids (`Positions`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.engine.attention import AttentionRows
from sinkscope.engine.tap import attention_rows
from sinkscope.hooks.edit.knockout import HiddenCells, keys_hidden
from sinkscope.hooks.trace import trace
from sinkscope.models.hooks import Hook, forward_parameters
from sinkscope.models.layers import per_query_head
from sinkscope.models.neurons import groups_of, heads_point, neurons_point
from sinkscope.models.target import Target
from sinkscope.results.notation import Head, Neuron
from sinkscope.sinks.spikes.spike import Part, Parts, Spike
from sinkscope.sinks.spikes.writers import hook_points_of
from sinkscope.sinks.tokens import Mask

ORDINARY = 8  # from here on values are averaged
PartMeans = Mapping[Part, Float[Tensor, " d"]]
"""What a component or a head writes at the place instead: its mean over ordinary positions."""
NEVER = 1 << 30  # the first layer of an edit without layers


class RowEdit(ABC):
    """What is done to rows in a pass."""

    @property
    @abstractmethod
    def first_layer(self) -> int:
        """The first layer at which it changes anything: a pass may start there."""

    def hooks(self, target: Target, place: Mask) -> list[Hook]:
        """Return the hooks by which it acts on modules, given the place of the rows."""
        return []

    @contextmanager
    def acting(self, target: Target, place: Mask) -> Iterator[None]:
        """Context manager in which it acts."""
        with target.hooks(*self.hooks(target, place)):
            yield

    def inputs(self, target: Target) -> dict[str, Any]:
        """Return what else the model is given."""
        return {}

    def take(self, rows: Int[Tensor, " row"], length: int | None = None) -> RowEdit:
        """Return the edit of some of the rows, or of their first tokens."""
        return self


@dataclass(frozen=True, eq=False)
class WithoutSets(RowEdit):
    """Base of edits under which each row is without one of several sets of parts.

    Attributes:
        sets: The sets.
        set_of: Number of the set that each row is without.
    """

    sets: Sequence[Parts]
    set_of: Int[Tensor, " row"]

    @property
    def first_layer(self) -> int:
        """The first layer of a part; that of the embedding is the first of all."""
        return min(part.layer or 0 for part in chain(*self.sets))

    def take(self, rows: Int[Tensor, " row"], length: int | None = None) -> RowEdit:
        """Return the edit of some of the rows."""
        return replace(self, set_of=self.set_of[rows])

    def rows_by_part(self) -> dict[Part, Bool[Tensor, " row"]]:
        """Return the rows that are without each part."""
        rows: dict[Part, Tensor] = {}
        for number, members in enumerate(self.sets):
            for part in members:
                rows[part] = rows.get(part, False) | (self.set_of == number)
        return rows


@dataclass(frozen=True, eq=False)
class Zeroed(WithoutSets):
    """Neurons give zero.

    Attributes:
        everywhere: Whether they give zero at every position; else at the place alone.
    """

    everywhere: bool = False

    def hooks(self, target: Target, place: Mask) -> list[Hook]:
        """Return a hook for the neurons of each MLP or expert."""
        rows_without = self.rows_by_part()
        hooks: list[Hook] = []
        for neurons in groups_of(part for part in rows_without if isinstance(part, Neuron)):
            where = torch.stack([rows_without[neuron] for neuron in neurons], -1)[:, None]
            if not self.everywhere:
                where = where & place[..., None]
            hooks.append(neurons_point(target, neurons).rows(where, torch.zeros(())))
        return hooks


@dataclass(frozen=True, eq=False)
class Replaced(WithoutSets):
    """Components and heads write their mean over ordinary positions at the place.

    Attributes:
        means: What each part writes instead.
    """

    means: PartMeans

    def hooks(self, target: Target, place: Mask) -> list[Hook]:
        """Return the hooks of each part, where what it writes passes."""
        hooks: list[Hook] = []
        for part, rows in self.rows_by_part().items():
            if not isinstance(part, Neuron):
                where = (rows[:, None] & place)[..., None]
                for point in hook_points_of(target, part):
                    hooks.append(point.rows(where, self.means[part]))
        return hooks


@dataclass(frozen=True, eq=False)
class Hidden(RowEdit):
    """Queries do not see some keys; each sees itself.

    Attributes:
        keys: Positions of the keys.
        queries: Positions of the queries that do not see them. None: all later ones.
        layers: Layers in which they are hidden. None: all.
    """

    keys: Mask
    queries: Mask | None = None
    layers: Sequence[int] | None = None

    @property
    def first_layer(self) -> int:
        """The first of its layers."""
        return first_of(self.layers)

    @contextmanager
    def acting(self, target: Target, place: Mask) -> Iterator[None]:
        """Context manager in which attention does not see the keys.

        Raises:
            UnsupportedError: No key can be hidden in the model.
        """
        layers = attending_among(target, self.layers)
        if not layers:
            yield
            return
        with keys_hidden(target, layers, HiddenCells(self.keys, self.queries)):
            yield

    def take(self, rows: Int[Tensor, " row"], length: int | None = None) -> Hidden:
        """Return the edit of some of the rows, or of their first tokens."""
        queries = None if self.queries is None else self.queries[rows, :length]
        return replace(self, keys=self.keys[rows, :length], queries=queries)


@dataclass(frozen=True, eq=False)
class OtherValue(RowEdit):
    """Later queries keep their attention to the place, and read another value from it.

    The place is one position, the same in all rows. Each head gives its attention to it, times the change of the value,
    in addition.

    Attributes:
        value: "zero", or "mean": the mean value of ordinary tokens of the rows that are read in one pass.
        layers: Layers in which it is read. None: all.
    """

    value: Literal["zero", "mean"]
    layers: Sequence[int] | None = None

    @property
    def first_layer(self) -> int:
        """The first of its layers."""
        return first_of(self.layers)

    @contextmanager
    def acting(self, target: Target, place: Mask) -> Iterator[None]:
        """Context manager in which another value is read."""
        layers = attending_among(target, self.layers)
        position = int(place[0].nonzero()[0])
        changes: dict[int, tuple[Tensor, Tensor]] = {}  # of each layer, until its heads are put together

        def keep(rows: AttentionRows) -> None:
            changes[rows.layer] = self.change(target, rows, position)

        def edited(layer: int, heads: Float[Tensor, "row query d"]) -> Float[Tensor, "row query d"]:
            received, change = changes.pop(layer)
            by_head = received.to(change).transpose(1, 2)[..., None] * change[:, None]  # "row query head d"
            return heads + by_head.reshape(heads.shape).to(heads)

        hooks = [heads_point(target, layer).hook(partial(edited, layer)) for layer in layers]
        with attention_rows(target, keep, layers=layers), target.hooks(*hooks):
            yield

    def change(self, target: Target, rows: AttentionRows, position: int) -> tuple[Tensor, Tensor]:
        """Return the attention of later queries to a position, and the change of its value, by head."""
        assert rows.call is not None
        n_heads = rows.call.query.shape[1]  # those that this process holds
        by_head = per_query_head(rows.call.value, n_heads).expand(-1, n_heads, -1, -1)
        values = target.shards.gather(by_head, target.n_heads, 1)
        new = values.new_zeros(())
        if self.value == "mean":
            new = values[:, :, ORDINARY:].mean((0, 2))
        received = rows.probs[..., position].clone()
        received[..., : position + 1] = 0
        return received, new - values[:, :, position]


@dataclass(frozen=True, eq=False)
class Positions(RowEdit):
    """Tokens have other position ids, in models that take any.

    Attributes:
        ids: The position ids.
    """

    ids: Int[Tensor, "row pos"]

    @property
    def first_layer(self) -> int:
        """The first layer."""
        return 0

    def inputs(self, target: Target) -> dict[str, Any]:
        """Return the ids, and a mask, without which ids that jump would be read as those of packed texts."""
        if not takes_positions(target):
            return {}
        ids = self.ids.to(target.device)
        return {"attention_mask": torch.ones_like(ids), "position_ids": ids}

    def take(self, rows: Int[Tensor, " row"], length: int | None = None) -> Positions:
        """Return the edit of some of the rows, or of their first tokens."""
        return replace(self, ids=self.ids[rows, :length])


def removal(
    sets: Sequence[Parts], set_of: Int[Tensor, " row"], means: PartMeans, *, everywhere: bool = False
) -> tuple[RowEdit, ...]:
    """Return the edits by which each row is without one set of parts.

    Args:
        sets: Sets of neurons, and sets of components and heads; some of them may be empty.
        set_of: Number of each row's set.
        means: What components and heads write instead.
        everywhere: Whether neurons give zero at every position; else at the place alone.
    """
    edits: list[RowEdit] = []
    are_neurons = {isinstance(part, Neuron) for part in chain(*sets)}
    if True in are_neurons:
        edits.append(Zeroed(sets, set_of, everywhere))
    if False in are_neurons:
        edits.append(Replaced(sets, set_of, means))
    return tuple(edits)


def means_of(spike: Spike, parts: Collection[Part]) -> dict[Part, Tensor]:
    """Return what components and heads write on average at ordinary positions, in the units of what writes it."""
    survey = spike.survey
    site = "blocks.{}.attn.hook_z"
    sites: dict[str, None] = {}
    means: dict[Part, Tensor] = {}
    for part in parts:
        if isinstance(part, Head):
            sites[site.format(part.layer)] = None
    outputs = trace(survey.target, survey.ids, [*sites]) if sites else {}
    factors: dict[str, float] = dict.fromkeys(("mlp", "attention"), survey.target.adapter.write_factor)
    for part in parts:
        if isinstance(part, Head):
            means[part] = outputs[site.format(part.layer)][survey.ordinary][:, part.head].float().mean(0)
        elif not isinstance(part, Neuron):
            means[part] = survey.added(part)[survey.ordinary].mean(0) / factors.get(part.kind, 1)
    return means


def first_of(layers: Sequence[int] | None) -> int:
    """Return the first of some layers; None stands for all."""
    return 0 if layers is None else min(layers, default=NEVER)


def attending_among(target: Target, layers: Sequence[int] | None) -> list[int]:
    """Return those of some layers that attend; None stands for all."""
    return [layer for layer in target.attending if layers is None or layer in layers]


def takes_positions(target: Target) -> bool:
    """Return whether the model takes position ids; with ALiBi it has none."""
    return "position_ids" in forward_parameters(type(target.base))
