"""Attention knockout: queries do not see some keys (Geva et al. 2023, section 5).

What is hidden goes through `Attention.hide`, as do the tokens that a policy evicts, so a knockout composes with
policies, guards, observers and edits. Keys and queries are looked up among the columns of a call; a query always sees
itself.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinkscope.engine.actor import Actor
from sinkscope.engine.attention import Attention
from sinkscope.engine.run import Run
from sinkscope.engine.step import Step
from sinkscope.engine.tap import check_attention_visible
from sinkscope.engine.visible import Cells, Hidden
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.records import Whole, check_values
from sinkscope.hooks.edit.base import Intervention
from sinkscope.hooks.edit.sites import checked_positions, chosen_positions, head_of, listed
from sinkscope.models.inputs import attending_layers, check_site
from sinkscope.models.layers import layers_with_states
from sinkscope.results.notation import count_of


class Hiding(Intervention):
    """Base of what hides keys, in the attention of some layers or heads."""

    layers: Any
    heads: Any = ()

    @abstractmethod
    def hidden(self, step: Step, device: torch.device) -> Hidden:
        """Return what says which cells of a call are hidden."""

    def summary(self, run: Run) -> str:
        """Return whether keys were hidden."""
        what = "keys" if run.counts["hidden"] else "nothing"
        return f"{type(self).__name__} hid {what}." if run.passes else ""

    def enter(self, run: Run, key: int) -> None:
        """Hide the keys in the attention of every call.

        Raises:
            UnsupportedError: A hidden key would still be seen in a state, or the attention cannot be edited.
        """
        target = run.target
        heads: dict[int, list[int]] = {}
        for layer, head in self.heads:
            check_site(target, layer, head=head)
            heads.setdefault(layer, []).append(head)
        layers = attending_layers(target, list(heads) or self.layers)
        check_attention_visible(target)
        states = layers_with_states(target)
        if states:
            raise UnsupportedError(
                f"{count_of(len(states), 'layer')} of {target.name} with a state that carries every earlier token, so "
                "that a hidden key would still be seen: use a model whose layers all attend"
            )
        run.act(_HidingActor(self, run, {layer: heads.get(layer, []) for layer in layers}))


@dataclass(frozen=True, eq=False)
class Knockout(Hiding):
    """Hide keys from later queries, in the prompt and in everything that is generated (Geva et al. 2023).

    A query always sees itself, so no row of attention is empty. Positions count the real tokens of each row.

    Attributes:
        keys: Positions of the keys that are hidden, or "first".
        queries: Positions of the queries that do not see them. None: all that come later than the key.
        layers: The layers in which they are hidden. None: all.
        heads: Query heads in which they are hidden, in place of whole layers: (layer, head), or names such as "L3.H5".

    Raises:
        SinkscopeError: The keys, queries, layers or heads are none of these.
        UnsupportedError: On entering: the model keeps states that carry a hidden key, or its attention cannot be
            edited.

    Example:
        >>> Knockout("first", layers=[2, 3])
        Knockout(keys='first', queries=None, layers=(2, 3), heads=())
    """

    keys: Any
    queries: Any = field(default=None, kw_only=True)
    layers: Any = field(default=None, kw_only=True)
    heads: Any = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        if self.keys is None:
            raise SinkscopeError('keys=None: expected positions or "first"; give the keys to hide')
        object.__setattr__(self, "keys", checked_positions(self.keys, "keys"))
        object.__setattr__(self, "queries", checked_positions(self.queries, "queries"))
        heads = tuple(dict.fromkeys(map(head_of, listed("heads", self.heads))))
        object.__setattr__(self, "heads", heads)
        if self.layers is not None:
            layers = tuple(listed("layers", self.layers))
            check_values(tuple[Whole, ...], layers=layers)
            if heads:
                raise SinkscopeError(f"layers={layers} with heads={heads}: heads name their layers; give one of both")
            object.__setattr__(self, "layers", layers)

    def hidden(self, step: Step, device: torch.device) -> Hidden:
        """Look keys and queries up among the columns of a call."""
        keys = chosen_positions(step.tokens.pos, self.keys).to(device)
        queries = chosen_positions(step.tokens.pos, self.queries).to(device)

        def cells(query: Int[Tensor, "batch query"], key: Int[Tensor, "batch _ key"]) -> Cells:
            gone = _at(keys, key.flatten(1)).view(len(key), key.shape[1], 1, -1)
            if self.queries is None:
                return gone & (key[:, :, None] < query[:, None, :, None])
            return gone & _at(queries, query)[:, None, :, None]

        return cells


@dataclass(frozen=True, eq=False)
class HideCells(Hiding):
    """Hide cells from each other, for measurements whose rows differ.

    Attributes:
        cells: Which queries do not see which keys, by columns, of each row or of one that stands for all; nothing
            beyond them is hidden.
        layers: The layers in which they are hidden. None: all.
    """

    cells: Bool[Tensor, "#batch query key"] = field(repr=False)
    layers: Any = None

    def hidden(self, step: Step, device: torch.device) -> Hidden:
        """Look cells up."""
        table = self.cells.to(device)

        def cells(query: Int[Tensor, "batch query"], key: Int[Tensor, "batch _ key"]) -> Cells:
            row = torch.arange(len(query), device=device)[:, None, None, None] % len(table)
            at = query[:, None, :, None]
            to = key[:, :, None]
            inside = (at < table.shape[1]) & (to >= 0) & (to < table.shape[2])
            return table[row, torch.where(inside, at, 0), torch.where(inside, to, 0)] & inside

        return cells


@dataclass(frozen=True, eq=False)
class _HidingActor(Actor):
    """Hides keys in the attention of a run.

    Attributes:
        hiding: What is hidden.
        run: The run, which counts masks in which something is hidden.
        heads: Heads of each layer in which it is; an empty list stands for all of them.
    """

    hiding: Hiding
    run: Run
    heads: dict[int, list[int]]

    def attends(self, step: Step) -> bool:
        """Return True: every call has queries."""
        return True

    def attend(self, step: Step, attention: Attention) -> None:
        """Hide the keys in a layer; never a query's own."""
        chosen = self.heads.get(attention.layer)
        if chosen is None:
            return
        device, n_heads = attention.key.device, attention.query.shape[1]
        hidden = self.hiding.hidden(step, device)

        def cells(query: Int[Tensor, "batch query"], key: Int[Tensor, "batch _ key"]) -> Cells:
            gone = hidden(query, key) & (key[:, :, None] != query[:, None, :, None])
            if chosen:
                in_head = torch.zeros(n_heads, dtype=torch.bool, device=device)
                in_head[chosen] = True
                gone = gone & in_head[None, :, None, None]
            self.run.count("hidden", gone.any().int())
            return gone

        attention.hide(cells)


def _at(columns: Bool[Tensor, "batch seen"], at: Int[Tensor, "batch n"]) -> Bool[Tensor, "batch n"]:
    """Values of columns; False where there is none."""
    inside = (at >= 0) & (at < columns.shape[1])
    return columns.gather(1, torch.where(inside, at, 0)) & inside
