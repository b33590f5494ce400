"""In which words a call is made: one row each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from .edits import Draw
from .families import FAMILIES

NEW = 6
SILENT = -12345.0
"""Stands where a way says nothing."""
Inside = Callable[[], AbstractContextManager[Any]]


@dataclass
class Use:
    """A model, its inputs, and the context of an intervention.

    Attributes:
        call: What is called.
        model: The model, for `generate` and its configuration.
        draw: The draw.
        ids: Ids of all rows.
        mask: 1 where they are real.
        inside: Opens the context and gives its runs.
        edits: The interventions, for functions that enter them by themselves; none by plain means.
        shift: Where the first token stands, if a call has to say so.
    """

    call: Callable[..., Any]
    model: Any
    draw: Draw
    ids: Tensor
    mask: Tensor
    inside: Inside
    edits: Sequence[Any] | None = None
    shift: int = 0

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    @property
    def prompt(self) -> int:
        """Length of the prompt in ways that go on by single tokens."""
        return max(1, self.length - 4)

    def cache(self) -> Any:
        return DynamicCache(config=self.model.config)

    def run(self, start: int, stop: int, cache: Any = None, order: Tensor | None = None) -> Tensor:
        """Logits of a range of positions; `order` says which row stands where."""
        ids, mask = self.ids[:, start:stop], self.mask[:, :stop]
        if order is not None:
            ids, mask = ids[order], mask[order]
        more = {} if cache is None else {"past_key_values": cache}
        if self.shift:
            more["position_ids"] = torch.arange(start, stop, device=ids.device)[None] + self.shift
        return CALLS[self.draw["call"]].make(self, ids, mask, more)


def positions_of(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


def _keyword(use: Use, ids: Tensor, mask: Tensor, more: dict[str, Any]) -> Tensor:
    return use.call(input_ids=ids, attention_mask=mask, **more).logits


def _positional(use: Use, ids: Tensor, mask: Tensor, more: dict[str, Any]) -> Tensor:
    if more or not FAMILIES[use.draw["family"]].mask_second:
        return use.call(ids, attention_mask=mask, **more).logits
    return use.call(ids, mask).logits


def _positions(use: Use, ids: Tensor, mask: Tensor, more: dict[str, Any]) -> Tensor:
    positions = positions_of(mask)[:, mask.shape[1] - ids.shape[1] :]
    return use.call(input_ids=ids, attention_mask=more.pop("whole", mask), position_ids=positions, **more).logits


def _no_mask(use: Use, ids: Tensor, _mask: Tensor, more: dict[str, Any]) -> Tensor:
    return use.call(input_ids=ids, **more).logits


def _tuple(use: Use, ids: Tensor, mask: Tensor, more: dict[str, Any]) -> Tensor:
    return use.call(input_ids=ids, attention_mask=mask, return_dict=False, **more)[0]


def _whole_mask(use: Use, ids: Tensor, mask: Tensor, more: dict[str, Any]) -> Tensor:
    """A mask of each query and key, which is added to scores."""
    keys, queries = mask.shape[1], ids.shape[1]
    sees = torch.ones(keys, keys, dtype=torch.bool, device=mask.device).tril()[keys - queries :]
    sees = sees & mask[:, None, None].bool() & mask[:, None, keys - queries :, None].bool()
    dtype = use.model.get_input_embeddings().weight.dtype
    whole = torch.zeros(sees.shape, dtype=dtype, device=mask.device).masked_fill(~sees, torch.finfo(dtype).min)
    return _positions(use, ids, mask, {**more, "whole": whole})


def _embeds(use: Use, ids: Tensor, mask: Tensor, more: dict[str, Any]) -> Tensor:
    return use.call(inputs_embeds=use.model.get_input_embeddings()(ids), attention_mask=mask, **more).logits


def _everything(use: Use, ids: Tensor, mask: Tensor, more: dict[str, Any]) -> Tensor:
    """Attention and states are asked for as well."""
    return use.call(
        input_ids=ids, attention_mask=mask, output_attentions=True, output_hidden_states=True, **more
    ).logits


def _takes_mask(draw: Draw) -> bool:
    """Whether a mask of queries and keys can say it all: no window hides more, and the attention takes it."""
    family = FAMILIES[draw["family"]]
    takes = family.positions and family.dispatches and family.window is None
    return takes and draw["attention"] in ("sdpa", "eager", "own with mask") and draw["cache"] != "static"


@dataclass(frozen=True)
class Call:
    """In which words a call is made."""

    make: Callable[[Use, Tensor, Tensor, dict[str, Any]], Tensor]
    fits: Callable[[Draw], bool] = lambda draw: True


CALLS = {
    "keyword": Call(_keyword),
    "positional": Call(_positional),
    "positions": Call(_positions, lambda draw: FAMILIES[draw["family"]].positions),
    "no mask": Call(_no_mask, lambda draw: draw["padding"] == "none"),
    "tuple": Call(_tuple, lambda draw: draw["cache"] != "generate"),
    "whole mask": Call(_whole_mask, _takes_mask),
    "embeds": Call(_embeds, lambda draw: draw["family"] != "gemma4" and draw["wrapper"] != "nnsight"),
    "everything": Call(_everything),
}
