"""Attention knockout: queries do not see some keys (Geva et al. 2023, section 5).

What is hidden goes through `Attention.hide`, as do the tokens that a policy evicts, so a knockout composes with
policies, guards, observers and edits. Keys and queries are looked up among the columns of a call; a query always sees
itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad

from sinkscope.engine.actor import Actor
from sinkscope.engine.attention import Attention
from sinkscope.engine.run import Run
from sinkscope.engine.step import Step
from sinkscope.engine.tap import Listener, check_attention_visible, tapped
from sinkscope.engine.visible import Cells
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.records import Whole, check_values
from sinkscope.hooks.edit.base import Intervention
from sinkscope.hooks.edit.sites import checked_positions, chosen_positions, heads_of, listed
from sinkscope.models.inputs import attending_layers, check_site
from sinkscope.models.layers import layers_with_states
from sinkscope.models.target import Target
from sinkscope.results.notation import count_of


@dataclass(frozen=True, eq=False)
class Knockout(Intervention):
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
        heads = heads_of(self.heads)
        self.store(keys=checked_positions(self.keys, "keys"), heads=heads)
        self.store(queries=checked_positions(self.queries, "queries"))
        if self.layers is not None:
            layers = tuple(listed("layers", self.layers))
            check_values(tuple[Whole, ...], layers=layers)
            if heads:
                raise SinkscopeError(f"layers={layers} with heads={heads}: heads name their layers; give one of both")
            self.store(layers=layers)

    def summary(self, run: Run) -> str:
        """Return how many cells of attention were hidden: a query, a key and a head of a layer each."""
        return f"Knockout hid {count_of(run.counts['hidden'], 'cell')} of attention." if run.passes else ""

    def enter(self, run: Run, key: int) -> None:
        """Hide the keys in the attention of every call.

        Raises:
            UnsupportedError: A hidden key would still be seen in a state, or the attention cannot be edited.
        """
        heads: dict[int, list[int]] = {}
        for layer, head in self.heads:
            check_site(run.target, layer, head=head)
            heads.setdefault(layer, []).append(head)
        layers = attending_layers(run.target, list(heads) or self.layers)
        check_keys_hidable(run.target)
        run.act(_KnockoutActor(self, run, {layer: heads.get(layer, []) for layer in layers}))


@dataclass(frozen=True, eq=False)
class _KnockoutActor(Actor):
    """Hides keys in the attention of a run.

    Attributes:
        knockout: What is hidden.
        run: The run, which counts hidden cells.
        heads: Heads of each layer in which it is; an empty list stands for all of them.
    """

    knockout: Knockout
    run: Run
    heads: dict[int, list[int]]

    def attends(self, step: Step) -> bool:
        """Return True: every call has queries."""
        return True

    def attend(self, step: Step, attention: Attention) -> None:
        """Hide the keys in a layer, which are looked up among the columns of the call; never a query's own."""
        chosen = self.heads.get(attention.layer)
        if chosen is None:
            return
        device, n_heads = attention.key.device, attention.query.shape[1]
        keys = chosen_positions(step.tokens.pos, self.knockout.keys).to(device)
        queries = chosen_positions(step.tokens.pos, self.knockout.queries).to(device)
        hidden = HiddenCells(keys, None if self.knockout.queries is None else queries)

        def cells(query: Int[Tensor, "batch query"], key: Int[Tensor, "batch _ key"]) -> Cells:
            of_heads = hidden(query, key)
            if chosen:
                in_head = torch.zeros(n_heads, dtype=torch.bool, device=device)
                in_head[chosen] = True
                of_heads = of_heads & in_head[None, :, None, None]
            return of_heads

        attention.hide(cells)
        hidden_before = keys.cumsum(-1) - keys.int()
        of_new_queries = (hidden_before * queries)[:, -step.new :]
        self.run.count("hidden", of_new_queries.sum() * (len(chosen) or n_heads))


@dataclass(frozen=True, eq=False)
class HiddenCells:
    """Cells of attention that are hidden, given columns of queries and keys; never a query's own key.

    Attributes:
        keys: The columns whose keys are hidden.
        queries: The columns whose queries do not see them. None: all after the key.
    """

    keys: Bool[Tensor, "batch column"]
    queries: Bool[Tensor, "batch column"] | None = None

    def __call__(self, query: Int[Tensor, "batch query"], key: Int[Tensor, "batch _ key"]) -> Cells:
        """Return which cells of these queries and keys are hidden."""
        query_column = query[:, None, :, None]
        key_column = key[:, :, None]
        of_keys = _at(self.keys, key.flatten(1)).view_as(key)[:, :, None]
        if self.queries is None:
            return of_keys & (key_column < query_column)
        return of_keys & _at(self.queries, query)[:, None, :, None] & (key_column != query_column)


def _at(marked: Bool[Tensor, "batch column"], columns: Int[Tensor, "batch n"]) -> Bool[Tensor, "batch n"]:
    """Whether columns are marked; False where there is none."""
    row = torch.arange(len(columns), device=columns.device)[:, None]
    with_none = pad(marked.to(columns.device), (0, 1))  # -1 is the last place
    return with_none[row, columns.clamp(max=marked.shape[1])]


@contextmanager
def keys_hidden(target: Target, layers: Sequence[int], cells: HiddenCells) -> Iterator[None]:
    """Context manager: queries do not see some keys in passes without a cache.

    Args:
        target: The model.
        layers: The layers.
        cells: Which queries do not see which keys.

    Raises:
        UnsupportedError: No key can be hidden in the model.
    """
    check_keys_hidable(target)

    def hide(call: Attention) -> None:
        if call.layer in layers:
            call.hide(cells)

    with tapped(target, Listener(hide)):
        yield


def check_keys_hidable(target: Target) -> None:
    """Refuse a model in which no key can be hidden.

    Raises:
        UnsupportedError: A hidden key would still be seen in a state, or the attention cannot be edited.
    """
    check_attention_visible(target)
    states = layers_with_states(target)
    if states:
        raise UnsupportedError(
            f"layer {states[0]} of {target.name} keeps a state that carries every earlier token, so that a hidden key "
            "would still be seen: use a model whose layers all attend"
        )
