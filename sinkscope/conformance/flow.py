"""A use of a cache as data, what it gives, and what is right."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from jaxtyping import Int
from rich.repr import auto as repr_without_defaults
from torch import Tensor

from sinkscope.conformance.masked import plain_logits, positions_of
from sinkscope.conformance.models import kit_ids, kit_model
from sinkscope.conformance.recorder import CacheRecorder, Logits
from sinkscope.conformance.subject import Factory, entered, made
from sinkscope.models.call_cache import cache_argument

_OTHER = 50  # seeds further: another text


@repr_without_defaults
@dataclass(frozen=True)
class Flow:
    """How a cache is used: prompts, tokens that follow one by one, and what happens between them.

    Attributes:
        model: Name of a model of the kit.
        lengths: Tokens of the prompt of each row; shorter ones are padded on the left.
        chunks: The prompt is read in calls of these lengths. Empty: at once.
        steps: Tokens that follow one by one.
        turn: Tokens of a second prompt, which is read at once after the steps, before as many steps again.
        rejected: Tokens of a draft that are read at once after the first step, and cropped.
        reset: Another text is read before, and the cache is reset.
        budget: Tokens that are to be kept. None: everything.
        dtype: Data type of the model.
        seed: Seed of the ids.
    """

    model: str = "grouped"
    lengths: tuple[int, ...] = (24,)
    chunks: tuple[int, ...] = ()
    steps: int = 3
    turn: int = 0
    rejected: int = 0
    reset: bool = False
    budget: int | None = None
    dtype: str = "float32"
    seed: int = 0

    @property
    def prompt(self) -> int:
        """Columns of the prompt."""
        return max(self.lengths)

    def tokens(self) -> tuple[Int[Tensor, "row column"], Int[Tensor, "row column"]]:
        """Return all tokens of the rows as they begin, and a mask that is 0 at padding."""
        more = 2 * self.steps + self.turn if self.turn else self.steps
        ids = kit_ids(self.model, self.lengths, more, self.seed)
        mask = torch.arange(ids.shape[1]) >= self.prompt - torch.tensor(self.lengths)[:, None]
        return ids, mask.long()


def outcome_of(factory: Factory, flow: Flow) -> CacheRecorder:
    """Use what a factory gives as a flow says; the logits are those from the last token of the prompt on.

    Args:
        factory: Takes a model, and perhaps more (`subject.KNOWN`).
        flow: The use.
    """
    model = kit_model(flow.model, flow.dtype)
    watched = flow.budget is not None
    with entered(made(factory, model, flow.prompt, flow.budget), model) as used:
        recorder = CacheRecorder(used)

        def call(ids: Tensor, mask: Tensor, start: int, end: int, notes: bool = True) -> Tensor:
            """Return logits of the columns from `start` to `end`."""
            given = {"attention_mask": mask[:, :end], "position_ids": positions_of(mask)[:, start:end]}
            with torch.set_grad_enabled(watched):
                given.update(cache_argument(model, used))
                logits = model(input_ids=ids[:, start:end], use_cache=True, **given).logits
            if watched and notes:
                recorder.read(logits, ids.shape[1], start)
            recorder.measure()
            return logits.detach()

        if flow.reset:
            other = replace(flow, seed=flow.seed + _OTHER).tokens()
            call(*other, 0, flow.prompt, notes=False)
            call(*other, flow.prompt, flow.prompt + 1, notes=False)
            _change(used, "reset")
            recorder.forget()
        ids, mask = flow.tokens()
        sizes = [*(flow.chunks or (flow.prompt,)), *[1] * flow.steps]
        if flow.turn:
            sizes += [flow.turn, *[1] * flow.steps]
        logits = torch.empty(len(ids), 0, model.config.vocab_size)
        at = 0
        for size in sizes:
            if flow.rejected and at == flow.prompt + 1:  # a draft is read and cropped
                wrong = torch.cat([ids[:, :at], ids.flip(0).roll(1, 1)[:, : flow.rejected]], 1)
                call(wrong, mask[:, -1:].expand_as(wrong) * wrong.ne(0), at, wrong.shape[1], notes=False)
                _change(used, "crop", -flow.rejected)
                recorder.forget(flow.rejected)
            logits = torch.cat([logits, call(ids, mask, at, at + size)], 1)
            at += size
        recorder.logits = logits[:, flow.prompt - 1 :]
        return recorder


def _change(used: Any, method: str, *given: int) -> None:
    """Crop or reset a cache.

    Raises:
        NotImplementedError: The cache has no such method, or layers of transformers say that they cannot.
    """
    for one in (used, *getattr(used, "layers", ())):
        if not hasattr(one, method):
            raise NotImplementedError(f"{type(one).__name__} has no {method}")
    try:
        getattr(used, method)(*given)
    except RuntimeError as error:
        if "`crop` was called, but" not in str(error):  # how transformers says what others say by NotImplementedError
            raise
        raise NotImplementedError(str(error)) from None


def right_logits(flow: Flow, sees: dict[int, Tensor] | None = None) -> Logits:
    """Return what is right: the logits of a plain pass.

    Args:
        flow: The use.
        sees: What the queries of each layer saw of what the cache kept. None or nothing: everything.
    """
    if sees:
        return _dense(flow, sees)
    return _plain(flow)


@cache
def _plain(flow: Flow) -> Logits:
    return _dense(flow, None)


def _dense(flow: Flow, sees: dict[int, Tensor] | None) -> Logits:
    return plain_logits(kit_model(flow.model, flow.dtype), *flow.tokens(), sees)[:, flow.prompt - 1 :]


def error_of(seen: Logits, right: Logits) -> float:
    """Return the largest difference of two logits, divided by the standard deviation of the right ones."""
    difference = (seen.float() - right.float()).abs().max()
    return float(difference / right.float().std())
