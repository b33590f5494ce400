"""What a user does with a model, and in which words the call is made: one row each.

Every way returns the logits of all positions of all rows, each row where it was at the beginning, whatever became of
the order of rows in between; `generate` returns what was written and its logits.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as tf
from torch import Tensor
from transformers import DynamicCache

from .edits import EDITS, Draw
from .families import FAMILIES, PAD

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
        inside: Opens the context.
    """

    call: Callable[..., Any]
    model: Any
    draw: Draw
    ids: Tensor
    mask: Tensor
    inside: Inside

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
    return use.call(input_ids=ids, attention_mask=mask, position_ids=positions, **more).logits


def _no_mask(use: Use, ids: Tensor, _mask: Tensor, more: dict[str, Any]) -> Tensor:
    return use.call(input_ids=ids, **more).logits


def _tuple(use: Use, ids: Tensor, mask: Tensor, more: dict[str, Any]) -> Tensor:
    return use.call(input_ids=ids, attention_mask=mask, return_dict=False, **more)[0]


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
}


def forward(use: Use) -> Tensor:
    with use.inside():
        return use.run(0, use.length)


def steps(use: Use, cache: Any = None) -> Tensor:
    cache = cache or use.cache()
    with use.inside():
        found = [use.run(0, use.prompt, cache)]
        for start in range(use.prompt, use.length):
            found.append(use.run(start, start + 1, cache))
    return torch.cat(found, 1)


def chunks(use: Use) -> Tensor:
    cache, found = use.cache(), []
    with use.inside():
        for start in range(0, use.length, 7):
            found.append(use.run(start, min(use.length, start + 7), cache))
    return torch.cat(found, 1)


def outside(use: Use) -> Tensor:
    """The cache was filled before the block."""
    cache = use.cache()
    before = use.run(0, use.prompt, cache)
    with use.inside():
        return torch.cat([torch.full_like(before, SILENT), use.run(use.prompt, use.length, cache)], 1)


def _diverted(use: Use, cache: Any) -> None:
    """Another token than the next one comes to this cache."""
    other = copy.copy(use)
    other.ids = use.ids.flip(1).roll(1, 1)
    other.run(use.prompt, use.prompt + 1, cache)


def copied(use: Use) -> Tensor:
    """It goes on with a copy, and the first one with something else."""
    first = use.cache()
    with use.inside():
        found = [use.run(0, use.prompt, first)]
        second = copy.deepcopy(first)
        _diverted(use, first)
        for start in range(use.prompt, use.length):
            found.append(use.run(start, start + 1, second))
    return torch.cat(found, 1)


def copied_from(use: Use) -> Tensor:
    """It goes on with the first one, and its copy with something else."""
    first = use.cache()
    with use.inside():
        found = [use.run(0, use.prompt, first)]
        second = copy.deepcopy(first)
        _diverted(use, second)
        for start in range(use.prompt, use.length):
            found.append(use.run(start, start + 1, first))
    return torch.cat(found, 1)


def reordered(use: Use) -> Tensor:
    """After a token rows change places, as in a beam search."""
    cache, order = use.cache(), torch.arange(len(use.ids)).flip(0)
    with use.inside():
        found = [use.run(0, use.prompt, cache), use.run(use.prompt, use.prompt + 1, cache)]
        cache.reorder_cache(order)
        for start in range(use.prompt + 1, use.length):
            found.append(use.run(start, start + 1, cache, order).flip(0))
    return torch.cat(found, 1)


def selected(use: Use) -> Tensor:
    """After a token only the last row goes on."""
    cache, last = use.cache(), torch.tensor([len(use.ids) - 1])
    with use.inside():
        found = [use.run(0, use.prompt, cache), use.run(use.prompt, use.prompt + 1, cache)]
        cache.batch_select_indices(last)
        for start in range(use.prompt + 1, use.length):
            rest = use.run(start, start + 1, cache, last)
            found.append(torch.cat([torch.full_like(found[1][:-1], SILENT), rest]))
    return torch.cat(found, 1)


def repeated(use: Use) -> Tensor:
    """Each row goes on as two, which say the same."""
    cache, order = use.cache(), torch.arange(len(use.ids)).repeat_interleave(2)
    with use.inside():
        found = [use.run(0, use.prompt, cache)]
        cache.batch_repeat_interleave(2)
        for start in range(use.prompt, use.length):
            found.append(use.run(start, start + 1, cache, order)[1::2])
    return torch.cat(found, 1)


def cropped(use: Use) -> Tensor:
    """A token is taken back."""
    cache = use.cache()
    with use.inside():
        found = [use.run(0, use.prompt, cache), use.run(use.prompt, use.prompt + 1, cache)]
        other = copy.copy(use)
        other.ids = use.ids.flip(1)
        other.run(use.prompt + 1, use.prompt + 2, cache)
        cache.crop(-1)
        for start in range(use.prompt + 1, use.length):
            found.append(use.run(start, start + 1, cache))
    return torch.cat(found, 1)


def static(use: Use) -> Tensor:
    return steps(use, tf.StaticCache(config=use.model.config, max_cache_len=use.length + 8))


class Waiting:
    """A call in another thread that waits before its first layer until it is told to go on."""

    def __init__(self, use: Use):
        self._use = use
        self._go, self._there = threading.Event(), threading.Event()
        self._given: list[Any] = []
        self._thread = threading.Thread(target=self._work)
        self._hook = FAMILIES[use.draw["family"]].block(use.model, 0).register_forward_pre_hook(self._wait)

    def _wait(self, *_: Any) -> None:
        if threading.current_thread() is self._thread:
            self._there.set()
            self._go.wait(20)

    def _work(self) -> None:
        try:
            with torch.no_grad():
                self._given.append(self._use.run(0, self._use.length))
        except Exception as error:
            self._given.append(error)
        self._there.set()

    def begin(self) -> None:
        self._thread.start()
        self._there.wait(20)

    def go_on(self, after: float = 0.0) -> None:
        threading.Timer(after, self._go.set).start()

    def given(self) -> Tensor:
        """What the call gives."""
        self._thread.join()
        self._hook.remove()
        if isinstance(self._given[0], Exception):
            raise self._given[0]
        return self._given[0]


def begun_before(use: Use) -> Tensor:
    """A call that begins before the block goes on inside it."""
    waiting = Waiting(use)
    waiting.begin()
    try:
        with use.inside():
            waiting.go_on()
            return waiting.given()
    finally:
        waiting.go_on()


def begun_inside(use: Use) -> Tensor:
    """A call that begins inside the block still runs when the block is left."""
    waiting = Waiting(use)
    try:
        with use.inside():
            waiting.begin()
            waiting.go_on(after=0.05)
        return waiting.given()
    finally:
        waiting.go_on()


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "min": {"min_new_tokens": NEW},
    "suppress": {"suppress_tokens": [1, 5]},
    "beams": {"num_beams": 3},
    "returned": {"num_beams": 2, "num_return_sequences": 2},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "chunked": {"prefill_chunk_size": 7},
    "no eos": {"eos_token_id": None},
    "no cache": {"use_cache": False},
    "drawn": {"do_sample": True, "temperature": 0.9},
}
BY_TOKENS = ("beams", "returned", "lookup")
"""Options with which the logits of steps are not those of the rows."""
ROW_ALONE = ("greedy", "min", "suppress", "no eos", "no cache")
"""Options under which a row says the same alone."""


def generate(use: Use) -> Tensor:
    option = use.draw["options"]
    settings = {"max_new_tokens": NEW, "return_dict_in_generate": True, "do_sample": False, **OPTIONS[option]}
    settings["output_logits"] = option not in BY_TOKENS
    with use.inside():
        torch.manual_seed(7)
        output = use.model.generate(input_ids=use.ids, attention_mask=use.mask, **settings)
    if option in BY_TOKENS:
        return output.sequences
    return torch.stack(output.logits, 1)


@dataclass(frozen=True)
class Way:
    """What is done with the model and its cache.

    Attributes:
        run: Does it.
        alone: The plainest way with the same answer for a row by itself.
        fits: Draws to which it belongs.
        tokens: Whether new tokens are written, after the whole of the ids.
        plain: Whether right is the plain model, because the call is none of the block's.
    """

    run: Callable[[Use], Tensor]
    alone: str | None = None
    fits: Callable[[Draw], bool] = field(default=lambda draw: True)
    tokens: bool = False
    plain: bool = False


def _rows_move(draw: Draw) -> bool:
    return draw["rows"] > 1 and _long(draw)


def _long(draw: Draw) -> bool:
    return draw["length"] >= 20


def _crops(draw: Draw) -> bool:
    return _long(draw) and FAMILIES[draw["family"]].window is None and not EDITS[draw["edit"]].budget


def _another_thread(draw: Draw) -> bool:
    return draw["wrapper"] in ("bare", "module") and draw["other"] == "nothing" and not EDITS[draw["edit"]].alone


WAYS = {
    "none": Way(forward, "none", lambda draw: not EDITS[draw["edit"]].budget),
    "steps": Way(steps, "steps"),
    "chunks": Way(chunks, None, _long),
    "outside": Way(outside, None, lambda draw: draw["edit"] in ("full", "guard")),
    "copied": Way(copied, "steps", _long),
    "copied from": Way(copied_from, "steps", _long),
    "reordered": Way(reordered, "steps", _rows_move),
    "selected": Way(selected, "steps", _rows_move),
    "repeated": Way(repeated, "steps", _long),
    "cropped": Way(cropped, "steps", _crops),
    "static": Way(static, None, _long),
    "begun before": Way(begun_before, None, _another_thread, plain=True),
    "begun inside": Way(begun_inside, None, _another_thread),
    "generate": Way(generate, "generate", tokens=True),
}


def inputs(draw: Draw, seed: int) -> tuple[Tensor, Tensor]:
    """Random ids `[row pos]` and their mask."""
    generator = torch.Generator().manual_seed(seed)
    length, rows = draw["length"], draw["rows"]
    ids = torch.randint(3, 160, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    if draw["padding"] != "none" and length > 4:
        for row in range(1, rows):
            count = int(torch.randint(1, max(2, length // 2), (1,), generator=generator))
            where = slice(0, count) if draw["padding"] == "left" else slice(length - count, length)
            ids[row, where], mask[row, where] = PAD, 0
    return ids, mask
