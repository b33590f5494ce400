"""A use of a cache as data, what it gives, and what is right.

1. A flow is a prompt and acts after it: tokens, and what is done to the cache between them.
2. `Use` calls the model and the cache as the acts say, and keeps the text that the cache then stands for.
3. Where the text ends or changes, a stretch of it is kept with the logits; a plain pass over it says what is right.
"""

from __future__ import annotations

import pickle
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from rich.repr import auto as repr_without_defaults
from torch import Tensor

from sinkscope.conformance.masked import plain_logits, positions_of, reach_of
from sinkscope.conformance.models import kit_model, kit_tokens
from sinkscope.conformance.recorder import CacheRecorder, disagreement, held_bytes
from sinkscope.conformance.subject import Factory, entered, made
from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Budget
from sinkscope.models.call_cache import cache_argument

Act = tuple[Any, ...]
"""What is done, and numbers: ("step", tokens read one by one), ("read", tokens read at once), ("turn", tokens of each
row, padded), ("crop", tokens), ("reset",), ("copy",), ("pickle",), ("reorder", rows), ("select", rows),
("repeat", times)."""
Padding = Literal["left", "right"]
_ELSEWHERE = 500  # other draws of tokens
STEPS: tuple[Act, ...] = (("step", 3),)
ROW_ACTS = {"reorder": "reorder_cache", "select": "batch_select_indices", "repeat": "batch_repeat_interleave"}
"""Acts that change rows, and the method of a cache that does it."""


@repr_without_defaults
@dataclass(frozen=True)
class Flow:
    """How a cache is used: prompts, and what follows.

    Attributes:
        model: Name of a model of the kit.
        lengths: Tokens of the prompt of each row.
        chunks: The prompt is read in calls of these lengths. Empty: at once.
        acts: What follows.
        padding: Where shorter rows are padded.
        budget: Tokens that are to be kept, or a share of the prompt. None: everything.
        watched: Whether it is noted what each call reads. None: if there is a budget.
        dtype: Data type of the model.
        seed: Seed of the ids.
        text: Ids of a single row, which are read instead of drawn ones.
    """

    model: str = "grouped"
    lengths: tuple[int, ...] = (24,)
    chunks: tuple[int, ...] = ()
    acts: tuple[Act, ...] = STEPS
    padding: Padding = "left"
    budget: Budget | None = None
    watched: bool | None = None
    dtype: str = "float32"
    seed: int = 0
    text: tuple[int, ...] = ()

    @property
    def is_watched(self) -> bool:
        """Whether it is noted what each call reads."""
        return self.budget is not None if self.watched is None else self.watched

    @property
    def prompt(self) -> int:
        """Columns of the prompt."""
        return max(self.lengths)

    def without(self, *kinds: str) -> Flow:
        """Return the flow without acts of these kinds."""
        return replace(self, acts=tuple(act for act in self.acts if act[0] not in kinds))

    def longer(self, prompt: int) -> Flow:
        """Return the flow with a prompt of at least so many columns; rows and chunks grow alike."""
        if prompt <= self.prompt:
            return self
        times = -(-prompt // self.prompt)
        chunks = tuple(times * chunk for chunk in self.chunks)
        return replace(self, lengths=tuple(times * length for length in self.lengths), chunks=chunks)


@dataclass(frozen=True, eq=False)
class Stretch:
    """A text that a cache stood for, with the logits of its last columns.

    Attributes:
        flow: The flow that it is of.
        ids: Token ids `[row column]`.
        mask: 0 at padding.
        first: Column of the first logits.
        logits: The logits `[row column vocab]`.
        sees: Which columns the queries of each layer saw. Empty: they were not watched.
    """

    flow: Flow
    ids: Int[Tensor, "row column"]
    mask: Int[Tensor, "row column"]
    first: int
    logits: Float[Tensor, "row judged vocab"]
    sees: dict[int, Bool[Tensor, "row kv_head query key"]]

    def right(self) -> Float[Tensor, "row judged vocab"]:
        """Return what is right: the logits of one pass in which a mask hides what the cache did not hand out."""
        return right_logits(self.flow, self.ids, self.mask, self.sees)[:, self.first :]

    def error(self) -> float:
        """Return the largest error of a logit of a real token, in standard deviations of the right ones."""
        return error_of(self.logits, self.right(), self.mask[:, self.first :].bool())

    def evicted(self) -> float:
        """Return how many tokens the last query could see and did not: mean over layers and kv heads, sum over rows."""
        if not self.sees:
            return 0.0
        lost: list[Tensor] = []
        for layer, reach in reach_of(kit_model(self.flow.model).config, self.sees, self.mask).items():
            lost.append((reach[:, :, -1] & ~self.sees[layer][:, :, -1]).sum((0, 2)).float().mean())
        return float(torch.stack(lost).mean())


@dataclass(eq=False)
class Outcome:
    """What a flow gave.

    Attributes:
        flow: The flow.
        stretches: The texts that the cache stood for, one after the other.
        bytes: What the cache held after each call, if it was watched.
        lengths: What the cache said of its length after each call, beside the right one.
        rotated_again: Whether keys were handed out that were never written.
        changed: Largest change of what is kept, as a share of the spread of the numbers.
        drops: Whether a layer handed out fewer slots than it was given.
        misplaced: Which slot has a wrong position, where a cache says positions.
        placed: How often a layer said positions.
        apart: Which slot holds the key of one token and the value of another; empty if none does.
    """

    flow: Flow
    stretches: list[Stretch] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    lengths: list[tuple[int, int]] = field(default_factory=list)
    rotated_again: bool = False
    changed: float = 0.0
    drops: bool = False
    misplaced: str = ""
    placed: int = 0
    apart: str = ""

    @property
    def last(self) -> Stretch:
        """The last text."""
        return self.stretches[-1]

    def error(self) -> float:
        """Return the largest error of all its logits."""
        return max(stretch.error() for stretch in self.stretches)

    def evicted(self) -> float:
        """Return the tokens that were evicted, at the end of the stretch in which most were."""
        return max(stretch.evicted() for stretch in self.stretches)


class BrokenUseError(Exception):
    """Raised where a cache or the model raises an error in use; the cause is that error.

    Attributes:
        slots: Which layer has more or fewer positions than slots; empty if none has.
    """

    def __init__(self, slots: str) -> None:
        super().__init__(slots or "an error was raised in use")
        self.slots = slots


def outcome_of(factory: Factory, flow: Flow) -> Outcome:
    """Use what a factory gives as a flow says.

    Args:
        factory: Takes a model, and perhaps more (`subject.KNOWN`).
        flow: The use.

    Raises:
        NotImplementedError: The factory or the cache refuses.
        BrokenUseError: Another error was raised.
    """
    model = kit_model(flow.model, flow.dtype)
    use: Use | None = None
    try:
        with entered(made(factory, model, flow.prompt, flow.budget), model) as cache:
            use = Use(model, cache, flow)
            for act in prompt_acts(flow):
                use.do(act)
            if any(act[0] == "crop" for act in flow.acts):
                record_past(cache)
            for act in flow.acts:
                use.do(act)
            use.end()
            return use.outcome
    except (NotImplementedError, SinkscopeError):
        raise
    except Exception as error:  # what others wrote may fail in any way
        raise BrokenUseError(disagreement(use.cache) if use else "") from error


def prompt_acts(flow: Flow) -> tuple[Act, ...]:
    """Return the calls that read the prompt of a flow."""
    if flow.chunks:
        return tuple(("read", chunk) for chunk in flow.chunks)
    return (("turn", *flow.lengths),)


class Use:
    """A cache in use: the text that it stands for, and what is done.

    Args:
        model: The model.
        cache: The cache, empty.
        flow: The flow.
    """

    def __init__(self, model: Any, cache: Any, flow: Flow) -> None:
        self.model, self.cache, self.flow = model, cache, flow
        self.outcome = Outcome(flow)
        self.watched = flow.is_watched
        self._recorder = CacheRecorder(cache)
        self._rows = len(flow.lengths)
        self._reads = 0
        self._begin()

    def _begin(self) -> None:
        """Begin a text."""
        self.ids = torch.zeros(self._rows, 0, dtype=torch.long)
        self.mask = torch.zeros(self._rows, 0, dtype=torch.long)
        self._logits: list[Tensor] = []

    def do(self, act: Act) -> None:
        """Do one act.

        Raises:
            NotImplementedError: The cache refuses.
        """
        kind, *numbers = act
        if kind == "step":
            for _ in range(numbers[0]):
                self._read((1,) * self._rows)
        elif kind == "read":
            self._read((numbers[0],) * self._rows)
        elif kind == "turn":
            self._read(tuple(numbers))
        elif kind in ROW_ACTS:
            self._move(kind, numbers)
        elif kind == "crop":
            change(self.cache, "crop", -numbers[0])
            self._cut(numbers[0])
        elif kind == "reset":
            change(self.cache, "reset")
            self.end()
            self._recorder.clear()
            self._begin()
        elif kind == "copy":
            self._copy()
        elif kind == "pickle":
            self._follow(self._pickled())
        else:
            raise SinkscopeError(
                f"act {kind!r}: expected one of read, step, turn, crop, reset, copy, pickle, {ROW_ACTS}"
            )

    def _read(self, lengths: tuple[int, ...]) -> None:
        """Read new tokens in one call; shorter rows are padded."""
        ids, mask = self._new_tokens(lengths)
        self.ids, self.mask = torch.cat([self.ids, ids], 1), torch.cat([self.mask, mask], 1)
        logits = self._call(ids.shape[1])
        self._logits.append(logits)
        outcome, recorder = self.outcome, self._recorder
        if self.watched:
            outcome.bytes.append(held_bytes(self.cache))
        outcome.lengths.append((int(self.cache.get_seq_length()), self.ids.shape[1]))
        outcome.rotated_again, outcome.changed = recorder.rotated_again, recorder.changed
        outcome.misplaced, outcome.placed, outcome.apart = recorder.misplaced, recorder.placed, recorder.apart
        outcome.drops = recorder.fewest_slots < 0

    def _new_tokens(self, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Tokens that follow, and their mask; a row of a tiny model gets those that it has not had for longest."""
        width = max(lengths)
        ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width).long()
        for row, length in enumerate(lengths):
            here = slice(width - length, width) if self.flow.padding == "left" else slice(0, length)
            earlier = self.ids[row][self.mask[row].bool()].tolist()
            planned = self.flow.text[len(earlier) :][:length]
            tokens = planned or kit_tokens(self.flow.model, earlier, length, self.flow.seed + row, self._reads)
            ids[row, here] = torch.tensor(tokens)
            mask[row, here] = 1
        self._reads += 1
        return ids, mask

    def _call(self, new: int) -> Float[Tensor, "row new vocab"]:
        """Call the model on the last columns."""
        positions = positions_of(self.mask)
        inputs: dict[str, Any] = {"attention_mask": self.mask, "position_ids": positions[:, -new:]}
        with torch.set_grad_enabled(self.watched):
            inputs.update(cache_argument(self.model, self.cache))
            logits = self.model(input_ids=self.ids[:, -new:], use_cache=True, **inputs).logits
        if self.watched:
            self._recorder.read(logits, positions, self.mask.bool())
        return logits.detach()

    def end(self) -> None:
        """Keep the text so far with its logits, before it changes or because nothing follows."""
        if not self._logits:
            return
        logits = torch.cat(self._logits, 1)
        first = self.ids.shape[1] - logits.shape[1]
        if self.watched or self.flow.budget is not None:  # what is read of a prompt may be sparse
            judged = max(0, self.flow.prompt - 1 - first)
            logits, first = logits[:, judged:], first + judged
        if logits.shape[1]:
            stretch = Stretch(self.flow, self.ids, self.mask, first, logits, dict(self._recorder.sees))
            self.outcome.stretches.append(stretch)
        self._logits = []

    def _cut(self, tokens: int) -> None:
        """Take the last columns off the text, as the cache was told to."""
        self.end()
        left = self.ids.shape[1] - tokens
        self.ids, self.mask = self.ids[:, :left], self.mask[:, :left]
        self._recorder.keep(left)

    def _move(self, kind: str, numbers: list[int]) -> None:
        """Change the rows of cache and text."""
        rows = torch.tensor(numbers)
        argument: Any = rows
        if kind == "repeat":
            argument = numbers[0]
            rows = torch.arange(self._rows).repeat_interleave(argument)
        change(self.cache, ROW_ACTS[kind], argument)
        self.end()
        self.ids, self.mask, self._rows = self.ids[rows], self.mask[rows], len(rows)
        self._recorder.take(rows)

    def _copy(self) -> None:
        """Go on with a copy, after the original has read two other tokens, of which the copy knows nothing."""
        self._recorder.leave()
        original, copied = self.cache, deepcopy(self.cache)
        mine = self._recorder, self.watched, self.outcome, self.ids, self.mask, self._logits, self._reads
        self._recorder, self.watched, self.outcome = CacheRecorder(original), False, Outcome(self.flow)
        self._logits, self._reads = [], self._reads + _ELSEWHERE
        for _ in range(2):
            self._read((1,) * self._rows)
        self._recorder.leave()
        self._recorder, self.watched, self.outcome, self.ids, self.mask, self._logits, self._reads = mine
        self._follow(copied)

    def _pickled(self) -> Any:
        """The cache as it comes back from its bytes.

        Raises:
            NotImplementedError: It cannot be written as bytes.
        """
        self._recorder.leave()
        try:
            written = pickle.dumps(self.cache)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise NotImplementedError(f"it cannot be pickled: {error}") from None
        return pickle.loads(written)

    def _follow(self, cache: Any) -> None:
        self.cache = cache
        self._recorder.follow(cache)


def record_past(cache: Any) -> None:
    """Let a cache keep what `crop` needs, as `generate` does after a prompt, unless it says that it cannot go back."""
    if hasattr(cache, "activate_past_recording") and getattr(cache, "is_croppable", True):
        cache.activate_past_recording()


def change(used: Any, method: str, *arguments: Any) -> None:
    """Crop, reset or reorder a cache.

    Raises:
        NotImplementedError: The cache has no such method, or layers of transformers say that they cannot.
    """
    for part in (used, *getattr(used, "layers", ())):
        if not hasattr(part, method):
            raise NotImplementedError(f"{type(part).__name__} has no {method}")
    try:
        getattr(used, method)(*arguments)
    except RuntimeError as error:
        if "`crop` was called, but" not in str(error):  # how transformers says what others say by NotImplementedError
            raise
        raise NotImplementedError(str(error)) from None


def right_logits(
    flow: Flow,
    ids: Int[Tensor, "row column"],
    mask: Int[Tensor, "row column"],
    sees: dict[int, Bool[Tensor, "row kv_head query key"]] | None = None,
) -> Float[Tensor, "row column vocab"]:
    """Return the logits of one plain pass over a text.

    Args:
        flow: Whose model is called.
        ids: Token ids.
        mask: 0 at padding.
        sees: What the queries of each layer saw of what the cache kept. None or nothing: everything.
    """
    if sees:
        return plain_logits(kit_model(flow.model, flow.dtype), ids, mask, sees)
    key = tuple(tuple(row) for row in ids.tolist()), tuple(tuple(row) for row in mask.tolist())
    return _plain(flow.model, flow.dtype, *key)


@lru_cache(256)
def _plain(model: str, dtype: str, ids: Any, mask: Any) -> Float[Tensor, "row column vocab"]:
    return plain_logits(kit_model(model, dtype), torch.tensor(ids), torch.tensor(mask))


def error_of(
    seen: Float[Tensor, "row column vocab"],
    right: Float[Tensor, "row column vocab"],
    real: Bool[Tensor, "row column"] | None = None,
) -> float:
    """Return the largest difference of two logits of real tokens, divided by the deviation of the right ones."""
    difference = (seen.float() - right.float()).abs().amax(-1)
    if real is not None:
        difference = difference.where(real, 0.0)
    return float(difference.max() / right.float().std())
