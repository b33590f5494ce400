"""Attention knockout: queries do not see some keys (Geva et al. 2023, section 5).

What is hidden goes through `Attention.hide`, as do the tokens that a policy evicts, so a knockout composes with
policies, guards, observers and edits. In each layer of a call:

1. The keys and queries are looked up among the columns of the call (`_Cells.in_call`).
2. A key is hidden from the queries that do not see it, in the chosen heads; a query always sees itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinkscope.engine.actor import Actor
from sinkscope.engine.attention import Attention
from sinkscope.engine.run import Run
from sinkscope.engine.step import Step
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.records import Whole, check_values, checked_value
from sinkscope.hooks.edit.base import Intervention
from sinkscope.hooks.edit.sites import checked_positions, chosen_positions, head_of, listed
from sinkscope.models.grouped_heads import per_query_head
from sinkscope.models.inputs import attending_layers, check_site
from sinkscope.models.target import Target
from sinkscope.models.windows import layers_with_states
from sinkscope.results.notation import count_of
from sinkscope.results.parts import Head


@dataclass(frozen=True, eq=False)
class Knockout(Intervention):
    """Hide keys from later queries, in the prompt and in everything that is generated (Geva et al. 2023).

    A query always sees itself, so no row of attention is empty. A mask names columns, as they are given to the model
    with padding; beyond its width nothing is hidden. A position counts the real tokens of a document.

    Attributes:
        keys: The keys that are hidden: positions, "first" (of each document), a bool mask `[batch pos]`, or a bool mask
            `[batch query key]`, which names the queries as well. A mask of one row is that of every row.
        queries: The queries that do not see them, in the same forms. None: all that come later than the key.
        layers: The layers in which they are hidden. None: all.
        heads: Query heads of these layers, by number, or pairs of layer and head ("L3.H5", (3, 5), `Head`). None: all.

    Raises:
        SinkscopeError: The keys, queries, layers or heads are none of these.
        UnsupportedError: On entering: the model keeps states that carry a hidden key, an indexer chooses its keys, or
            its attention cannot be edited.

    Example:
        >>> Knockout("first", layers=[2, 3])
        Knockout(keys='first', queries=None, layers=(2, 3), heads=None)
    """

    keys: Any
    queries: Any = field(default=None, kw_only=True)
    layers: Any = field(default=None, kw_only=True)
    heads: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.keys is None:
            raise SinkscopeError('keys=None: expected positions, "first", or a mask of bools; give the keys to hide')
        object.__setattr__(self, "keys", _checked(self.keys, "keys", pairs=True))
        if self.queries is not None:
            if isinstance(self.keys, Tensor) and self.keys.ndim == 3:
                raise SinkscopeError(
                    "queries with keys [batch query key]: such a mask names the queries; leave one out"
                )
            object.__setattr__(self, "queries", _checked(self.queries, "queries", pairs=False))
        if self.layers is not None:
            layers = tuple(listed("layers", self.layers))
            check_values(tuple[Whole, ...], layers=layers)
            object.__setattr__(self, "layers", layers)
        if self.heads is not None:
            object.__setattr__(self, "heads", _checked_heads(self.heads, self.layers))

    def summary(self, run: Run) -> str:
        """Return in how many calls keys were hidden."""
        return f"Knockout acted in {count_of(run.passes, 'call')}." if run.passes else ""

    def enter(self, run: Run, key: int) -> None:
        """Hide the keys in the attention of every call."""
        target = run.target
        heads = self._heads_by_layer(target)
        _check_servable(target)
        reach = run.reach(f"Knockout(keys={_named(self.keys)})", "no query was there that sees these keys")
        cells = _Cells(self.keys, self.queries)
        if target.kind != "bridge":
            run.act(_KnockoutActor(cells, heads, reach))
            return
        for layer, of_layer in heads.items():
            module = target.model.hook_dict[f"blocks.{layer}.attn.hook_attn_scores"]

            def cover(_m: Any, _a: Any, _k: Any, scores: Tensor, of_layer: list[int] | None = of_layer) -> Any:
                step = run.step
                if step is None:
                    return None
                hidden = cells.in_call(step, of_layer, scores.shape[1], scores.device)
                queries, keys = scores.shape[2:]
                column = torch.arange(keys, device=scores.device).expand(len(scores), 1, -1)
                at = torch.arange(keys - queries, keys, device=scores.device).expand(len(scores), -1)
                gone = hidden(at, column)
                reach.note(gone)
                return scores.masked_fill(gone, torch.finfo(scores.dtype).min)

            run.hook_edit(module, "post", cover)

    def _heads_by_layer(self, target: Target) -> dict[int, list[int] | None]:
        """The heads of each layer in which keys are hidden; None: all of them."""
        layers = attending_layers(target, self.layers)
        if self.heads is None:
            return dict.fromkeys(layers)
        chosen: dict[int, list[int] | None] = {}
        for layer, head in self.heads:
            for number in layers if layer is None else [layer]:
                check_site(target, number, head=head)
                if number not in target.attending:
                    attending_layers(target, [number])
                of_layer = chosen.setdefault(number, [])
                assert of_layer is not None
                of_layer.append(head)
        return chosen


@dataclass(frozen=True, eq=False)
class _Cells:
    """Which keys which queries do not see."""

    keys: Any
    queries: Any

    def in_call(self, step: Step, heads: list[int] | None, n_heads: int, device: torch.device) -> _HiddenInCall:
        """Look keys and queries up among the columns of a call."""
        chosen = None
        if heads is not None:
            chosen = torch.zeros(n_heads, dtype=torch.bool, device=device)
            chosen[heads] = True
            chosen = chosen[None, :, None, None]
        if isinstance(self.keys, Tensor) and self.keys.ndim == 3:
            pairs = _of_batch(self.keys, step.rows, "keys").to(device)
            return _HiddenInCall(None, None, pairs, chosen)
        keys = _columns(self.keys, step, "keys").to(device)
        queries = None if self.queries is None else _columns(self.queries, step, "queries").to(device)
        return _HiddenInCall(keys, queries, None, chosen)


@dataclass(frozen=True, eq=False)
class _HiddenInCall:
    """The same by columns of a call: what `Attention.hide` asks.

    Attributes:
        keys: Columns of the keys.
        queries: Columns of the queries; None: all later than the key.
        pairs: Columns of queries and keys, in place of both.
        heads: Heads in which they are hidden; None: all.
    """

    keys: Bool[Tensor, "batch seen"] | None
    queries: Bool[Tensor, "batch seen"] | None
    pairs: Bool[Tensor, "batch query key"] | None
    heads: Bool[Tensor, "1 head 1 1"] | None

    def __call__(
        self, query: Int[Tensor, "batch query"], key: Int[Tensor, "batch _ key"]
    ) -> Bool[Tensor, "batch _ query key"]:
        """Return which cells are hidden, of queries and keys at these columns."""
        at = query[:, None, :, None]
        if self.pairs is not None:
            hidden = _pairs_at(self.pairs, query, key)
        else:
            assert self.keys is not None
            heads = key.shape[1]
            hidden = _at(self.keys, key.flatten(1)).view(len(key), heads, 1, -1)
            if self.queries is not None:
                hidden = hidden & _at(self.queries, query)[:, None, :, None]
            else:
                hidden = hidden & (key[:, :, None] < at)
        hidden = hidden & (key[:, :, None] != at)
        if self.heads is None:
            return hidden
        return per_query_head(hidden, self.heads.shape[1]) & self.heads


@dataclass(frozen=True, eq=False)
class _KnockoutActor(Actor):
    """Hides keys in the attention of a block."""

    cells: _Cells
    heads: dict[int, list[int] | None]
    reach: Any

    def attends(self, step: Step) -> bool:
        """Return True: every call has queries."""
        return True

    def attend(self, step: Step, attention: Attention) -> None:
        """Hide the keys in a layer."""
        if attention.layer not in self.heads:
            return
        of_layer = self.heads[attention.layer]
        hidden = self.cells.in_call(step, of_layer, attention.query.shape[1], attention.key.device)
        attention.hide(hidden)
        if not self.reach.is_certain:
            visible = attention.visible
            at = torch.arange(visible.query.start, visible.query.stop, device=visible.device)
            self.reach.note(hidden(at.expand(visible.batch, -1), visible.key_columns()))


def _at(columns: Bool[Tensor, "batch seen"], at: Int[Tensor, "batch n"]) -> Bool[Tensor, "batch n"]:
    """Values of columns; False where there is none."""
    inside = (at >= 0) & (at < columns.shape[1])
    return columns.gather(1, torch.where(inside, at, 0)) & inside


def _pairs_at(
    pairs: Bool[Tensor, "batch query key"], query: Int[Tensor, "batch n"], key: Int[Tensor, "batch _ m"]
) -> Bool[Tensor, "batch _ n m"]:
    """Values of pairs of columns; False beyond the mask."""
    row = torch.arange(len(pairs), device=pairs.device)[:, None, None, None]
    at, to = query[:, None, :, None], key[:, :, None]
    inside = (at < pairs.shape[1]) & (to >= 0) & (to < pairs.shape[2])
    return pairs[row, torch.where(inside, at, 0), torch.where(inside, to, 0)] & inside


def _columns(chosen: Any, step: Step, what: str) -> Bool[Tensor, "batch seen"]:
    """The columns of a call that positions or a mask name."""
    if not isinstance(chosen, Tensor):
        return chosen_positions(step.columns, chosen)
    mask = _of_batch(chosen, step.rows, what)
    real = step.columns >= 0
    missing = real.shape[1] - mask.shape[1]
    mask = torch.nn.functional.pad(mask, (0, max(0, missing)))[:, : real.shape[1]]
    return mask.to(real.device) & real


def _of_batch(mask: Tensor, rows: int, what: str) -> Tensor:
    """A mask for every row of a batch."""
    if len(mask) not in (1, rows):
        raise SinkscopeError(
            f"{what} of shape {tuple(mask.shape)} in a batch of {count_of(rows, 'row')}: expected a mask with a row "
            "for each, or with one row for all"
        )
    return mask.expand(rows, *mask.shape[1:])


def _checked(value: Any, what: str, *, pairs: bool) -> Any:
    """Keys or queries in the form in which a knockout stores them."""
    if hasattr(value, "dtype") and not isinstance(value, Tensor):  # of NumPy
        value = torch.as_tensor(value)
    if isinstance(value, list) and value and isinstance(value[0], list | bool):
        value = torch.as_tensor(value)
    if not isinstance(value, Tensor) or value.dtype != torch.bool:
        return checked_positions(value, what)
    if value.ndim == 1:
        value = value[None]
    if value.ndim not in ((2, 3) if pairs else (2,)):
        expected = "[batch pos] or [batch query key]" if pairs else "[batch pos]"
        raise SinkscopeError(f"{what} of shape {tuple(value.shape)}: expected a mask of bools {expected}")
    return value.detach().clone()


def _checked_heads(heads: Any, layers: Any) -> tuple[tuple[int | None, int], ...]:
    """Pairs of a layer (None: each of those chosen) and a head."""
    chosen = [heads] if isinstance(heads, Head) else listed("heads", heads)
    if not chosen:
        raise SinkscopeError("heads=[]: expected at least one head; give None for all")
    pairs: list[tuple[int | None, int]] = []
    for head in chosen:
        pair: Any = head
        if isinstance(head, Head):
            pair = (head.layer, head.head)
        if not isinstance(pair, str | tuple | list):
            pairs.append((None, checked_value(Whole, pair, "heads, of which one is ")))
            continue
        layer, number = head_of(pair)
        if layers is not None and layer not in layers:
            raise SinkscopeError(f"head L{layer}.H{number} with layers={list(layers)}: give heads of these layers")
        pairs.append((layer, number))
    return tuple(dict.fromkeys(pairs))


def _named(keys: Any) -> str:
    return f"a mask of shape {tuple(keys.shape)}" if isinstance(keys, Tensor) else repr(keys)


def _check_servable(target: Target) -> None:
    """Refuse a model in which a hidden key would still be seen, or whose attention cannot be edited.

    Raises:
        UnsupportedError: It is such a model.
    """
    name = target.name
    if target.kind != "bridge" and not target.adapter.attention_interface:
        raise UnsupportedError(
            f"a model of type {target.adapter.model_type!r} computes attention inside its modules, where no key can be "
            "hidden: use another model, or pass it a 4-D attention mask yourself"
        )
    states = layers_with_states(target)
    if states:
        raise UnsupportedError(
            f"{count_of(len(states), 'layer')} of {name} with a state that carries every earlier token, so that a "
            "hidden key would still be seen: use a model whose layers all attend"
        )
    for layer in target.attending:
        if hasattr(target.sub(layer, "attn"), "indexer"):
            raise UnsupportedError(
                f"an indexer chooses the keys that {name} attends to, and would choose others without the hidden ones: "
                "use another model"
            )
