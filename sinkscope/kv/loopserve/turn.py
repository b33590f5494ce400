"""What a conversation holds between turns, and what it notes during one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessor

from sinkscope.errors import SinkscopeError
from sinkscope.interventions.base import Event, Intervention, Run
from sinkscope.interventions.positions import Call, Sequence
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.loopserve.prefill import follow_lines
from sinkscope.kv.session import Moment, Session
from sinkscope.lines.choice import HeadLines
from sinkscope.models.target import Target


@dataclass(frozen=True, eq=False)
class Turn:
    """One turn of a conversation.

    Attributes:
        prompt: token ids of what was said to the model.
        ids: token ids of its answer, with the end of sequence if it came.
        text: the answer as text, without special tokens; None: there is no tokenizer.
        prompt_tokens: length of the whole conversation when the answer begins.
        queries: tokens read before the answer, all in one pass: what of the answer before has to be read, and `prompt`.
        lines: per layer the lines that these queries attended along; None where attention was dense.
        events: what the edit did; `step` counts the forward calls of the turn.
        read: tokens that a decoding step attended to, its own included: mean over steps, layers and kv heads; None:
            the answer is a single token, which the prompt gives.
        output: what `model.generate` returned; None in a conversation that was loaded.
    """

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    text: str | None
    prompt_tokens: int
    queries: int
    lines: tuple[HeadLines | None, ...] = field(repr=False)
    events: tuple[Event, ...] = field(repr=False)
    read: float | None
    output: Any = field(default=None, repr=False)


@dataclass(frozen=True, eq=False)
class Held:
    """The cache after a turn, and what edits know of the tokens in it; never changed, so a turn can be given up.

    Attributes:
        layers: of the cache; none before the first turn.
        sequence: of its tokens.
    """

    layers: tuple[CacheLayer, ...] = ()
    sequence: Sequence | None = None

    @property
    def seen(self) -> int:
        """Tokens that went through the model, evicted or not."""
        return self.layers[0].seen if self.layers else 0

    def cache(self) -> Any:
        """A cache to go on with. Tensors are shared: whatever happens to a layer, new ones take their place."""
        from transformers import DynamicCache

        cache: Any = DynamicCache()
        if self.layers:
            cache.layers = [layer.copy() for layer in self.layers]
            cache.layer_class_to_replicate = None
        return cache


@dataclass(eq=False)
class Noting(Intervention):
    """Entered before a conversation's edit in every turn: owns the cache, goes on with it, and notes.

    Attributes:
        before: what was held before the turn.
        cache: the one that the turn runs on.
        lines: by layer.
        reads: tokens attended to, of every decoding step.
        prompted: what edits knew when the prompt had been read.
        answered: and at the end.
    """

    before: Held
    cache: Any
    lines: dict[int, HeadLines] = field(default_factory=dict)
    reads: list[float] = field(default_factory=list)
    prompted: Sequence | None = None
    answered: Sequence | None = None

    def enter(self, run: Run, key: int) -> None:
        """Follow the calls."""
        session = Session.of(run)
        session.own_cache()
        if self.before.sequence is not None:
            columns = torch.zeros(1, self.before.seen, dtype=torch.int64)
            call = Call(0, self.before.seen, columns[:, :0], columns, columns.sum(1), self.before.sequence.copy())
            run.tracker.bind(call, self.cache)
        follow_lines(run, self._follow)
        session.after_call(self._note)

    def _follow(self, layer: int, row: int, lines: HeadLines) -> None:
        # Kept for every turn, and only looked at.
        self.lines[layer] = HeadLines(lines.vertical.cpu(), lines.slash.cpu(), lines.queries)

    def _note(self, moment: Moment) -> None:
        if moment.layers is not self.cache.layers:  # a logits processor runs the model on a cache of its own
            return
        self.answered = moment.call.sequence
        if self.prompted is None:  # the first call reads the prompt
            self.prompted = moment.call.sequence.copy()
        else:
            self.reads.append(sum(map(_shown, moment.layers)) / len(moment.layers))

    def held(self, prompt: int, keep: bool) -> Held:
        """After the turn: with the answer's keys and values, or cut back to a conversation of `prompt` tokens."""
        layers: list[CacheLayer] = self.cache.layers
        for layer in layers:
            layer.crop(0 if keep else prompt - layer.seen)  # also puts everything back that was aside
        # The cache may be in what `generate` returns, for others to go on with.
        return Held(tuple(layer.copy() for layer in layers), self.answered if keep else self.prompted)


def _shown(kv: CacheLayer) -> float:
    """Tokens that a single row attends to, mean over kv heads."""
    if kv.hidden is None and not kv.ragged:
        return float(kv.slots)
    return float(kv.readable.sum(-1).float().mean())


class Told(LogitsProcessor):
    """Leaves no token but the next one of an answer, so that `generate` says it whatever the model would have said.

    Args:
        answers: token ids, of each row.
        start: tokens before them, padding included.
        pad: what a row says whose answer is over.
    """

    def __init__(self, answers: list[list[int]], start: int, pad: int = 0) -> None:
        self._answers, self._start, self._pad = answers, start, pad

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Scores `[row vocab]` of which one a row is above minus infinity."""
        step = input_ids.shape[1] - self._start
        told = [answer[step] if step < len(answer) else self._pad for answer in self._answers]
        index = torch.tensor(told, device=scores.device)[:, None]
        return torch.full_like(scores, -torch.inf).scatter_(1, index, 0.0)


def check_ids(ids: Iterable[Any], target: Target, where: str) -> None:
    """Refuse what the model has no embedding for.

    Raises:
        SinkscopeError: an id that is no whole number, or out of range; `where` begins the message.
    """
    size = int(target.config.vocab_size)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
            raise SinkscopeError(
                f"{where}: {token!r} is no token id of {target.name}: expected whole numbers from 0 to {size - 1}"
            )
