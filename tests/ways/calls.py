"""In which words a call is made: one row each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import DynamicCache

from .edits import Draw
from .families import FAMILIES
from .masks import SECOND, Layout

NEW = 6
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
        layout: What calls say beside the ids.
        edits: The interventions, for functions that enter them by themselves; none by plain means.
        cut: Where the prompt ends; None: before the last tokens.
    """

    call: Callable[..., Any]
    model: Any
    draw: Draw
    ids: Tensor
    mask: Tensor
    inside: Inside
    layout: Layout
    edits: Sequence[Any] | None = None
    cut: int | None = None

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    @property
    def prompt(self) -> int:
        """Length of the prompt in ways that go on by single tokens."""
        return max(1, self.length - SECOND) if self.cut is None else self.cut

    def cache(self) -> Any:
        return DynamicCache(config=self.model.config)

    def run(self, start: int, stop: int, cache: Any = None, order: Tensor | None = None) -> Tensor:
        """Logits of a range of positions; `order` says which row stands where."""
        ids, mask = self.ids[:, start:stop], self.mask[:, :stop]
        if order is not None:
            ids, mask = ids[order], mask[order]
        more = self.layout.told(start, stop, order)
        if cache is not None:
            more["past_key_values"] = cache
        return CALLS[self.draw["call"]].make(self, ids, mask, more)


def _keyword(use: Use, ids: Tensor, mask: Tensor, more: dict[str, Any]) -> Tensor:
    return use.call(input_ids=ids, attention_mask=mask, **more).logits


def _positional(use: Use, ids: Tensor, mask: Tensor, more: dict[str, Any]) -> Tensor:
    if more or not FAMILIES[use.draw["family"]].mask_second:
        return use.call(ids, attention_mask=mask, **more).logits
    return use.call(ids, mask).logits


def _no_mask(use: Use, ids: Tensor, _mask: Tensor, more: dict[str, Any]) -> Tensor:
    return use.call(input_ids=ids, **more).logits


def _tuple(use: Use, ids: Tensor, mask: Tensor, more: dict[str, Any]) -> Tensor:
    return use.call(input_ids=ids, attention_mask=mask, return_dict=False, **more)[0]


def _embeds(use: Use, ids: Tensor, mask: Tensor, more: dict[str, Any]) -> Tensor:
    return use.call(inputs_embeds=use.model.get_input_embeddings()(ids), attention_mask=mask, **more).logits


def _everything(use: Use, ids: Tensor, mask: Tensor, more: dict[str, Any]) -> Tensor:
    """Attention and states are asked for as well."""
    return use.call(
        input_ids=ids, attention_mask=mask, output_attentions=True, output_hidden_states=True, **more
    ).logits


@dataclass(frozen=True)
class Call:
    """In which words a call is made."""

    make: Callable[[Use, Tensor, Tensor, dict[str, Any]], Tensor]
    fits: Callable[[Draw], bool] = lambda draw: True


CALLS = {
    "keyword": Call(_keyword),
    "positional": Call(_positional),
    "no mask": Call(_no_mask, lambda draw: draw["padding"] == "none"),
    "tuple": Call(_tuple, lambda draw: draw["cache"] != "generate"),
    "embeds": Call(_embeds, lambda draw: draw["family"] != "gemma4" and draw["wrapper"] != "nnsight"),
    # Falcon forgets that it is causal where its rows are asked for.
    "everything": Call(_everything, lambda draw: draw["family"] != "falcon"),
}
