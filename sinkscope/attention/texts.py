"""Inputs of attention measurements as token ids: prompts that end in a loop, and texts for lines."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.files.console import note
from sinkscope.files.records import Part, conform
from sinkscope.interventions.base import Event
from sinkscope.interventions.decode import greedy
from sinkscope.loops.signals import tail_period
from sinkscope.measure import Setup
from sinkscope.models.inputs import read_row
from sinkscope.models.text import text_rows
from sinkscope.models.text.prompts import read_text_prompts

PERIODS = 3  # repetitions that make a loop
LEAST = 24  # minimum tokens of a loop
LENGTH = 512  # tokens of a piece of ordinary text
SHORTEST = 16  # tokens; with fewer, a tenth of the lines is almost none
ASKED = "\n\nQuestion: What is this text about?\n\nAnswer:"  # about ordinary text
File = str | os.PathLike[str]
Text = str | Sequence[int]


@dataclass(frozen=True)
class QueryHead:
    """A query head.

    Attributes:
        layer: Layer of the head.
        head: Number of the head.
    """

    layer: int
    head: int

    def __str__(self) -> str:
        return f"L{self.layer}.H{self.head}"


@dataclass(frozen=True)
class Mark:
    """An action of an intervention.

    Attributes:
        step: Generation step, from 0.
        kind: Kind of the event.
        count: Number of events of that kind in that step.
    """

    step: int
    kind: str
    count: int


@dataclass(frozen=True)
class Loop:
    """Token ids and the periodic tail in which they end.

    Attributes:
        ids: The prompt and the generated tokens.
        prompt: Number of prompt tokens.
        period: Period of the tail; None if the text does not end in a loop.
        onset: First position of the periodic tail; None without a loop.
    """

    ids: Int[Tensor, " pos"]
    prompt: int
    period: int | None
    onset: int | None

    @property
    def length(self) -> int:
        """Number of tokens in the periodic tail."""
        return 0 if self.onset is None else len(self.ids) - self.onset


def prompt_ids(made: Setup, prompt: str | Sequence[int] | None) -> list[int]:
    """Ids of a prompt: a text, ids, or by default the beginning of the typical text.

    Raises:
        SinkscopeError: It is empty, or contains an id unknown to the model.
    """
    if prompt is None:
        return made.ids[0].tolist()
    ids = read_row(made.target, prompt, special=False)
    return [made.bos, *(i for i in ids if i != made.bos)] if isinstance(prompt, str) and made.bos is not None else ids


def generated(made: Setup, prompt: list[int], new: int) -> Loop:
    """Continue `prompt` greedily by up to `new` tokens and look for a loop at the end."""
    made.target.check_length("the prompt", len(prompt), new)
    answer = greedy(made.target, torch.tensor([prompt]), new)[0]
    return loop_of([*prompt, *answer], len(prompt))


def loop_of(ids: Sequence[int], prompt: int) -> Loop:
    """The loop at the end of the ids; a loop that begins inside the prompt also counts."""
    found = tail_period(ids, repeats=PERIODS, shortest=LEAST)
    period, onset = (None, None) if found is None else (found.period, found.start)
    return Loop(torch.tensor(list(ids)), prompt, period, onset)


def healthy_ids(made: Setup, length: int) -> Int[Tensor, " pos"] | None:
    """The same number of tokens of the typical text; None if it is shorter."""
    try:
        return text_rows(made.target.tokenizer, made.text, 1, length, made.bos)[0]
    except SinkscopeError:
        return None


def marks(events: list[Event]) -> tuple[Mark, ...]:
    """Events by step and kind."""
    counted = Counter((event.step, event.kind) for event in events)
    return tuple(Mark(step, kind, n) for (step, kind), n in sorted(counted.items()))


@dataclass(frozen=True)
class Input:
    """A text.

    Attributes:
        name: Number of the text, or its name in the file.
        tokens: Length of the text.
    """

    name: str
    tokens: int


@dataclass(frozen=True)
class Question:
    """Ids of a prompt in parts, without BOS, so that the question can be placed anywhere in the context."""

    start: list[int]
    context: list[int]
    question: list[int]

    def placed(self, where: str) -> list[int]:
        """The prompt with the question at "begin", "middle" or "end"."""
        at = {"begin": 0, "middle": len(self.context) // 2, "end": len(self.context)}[where]
        return [*self.start, *self.context[:at], *self.question, *self.context[at:]]


def shares(values: Sequence[float], option: str = "--eta") -> tuple[float, ...]:
    """Shares in ascending order; `option` is their name in the message.

    Raises:
        SinkscopeError: There are none, or one lies outside (0, 1].
    """
    found = tuple(sorted({float(value) for value in values}))
    for value in found or (None,):
        conform(Part, value, f"{option} ", strict=True)
    return found


def means(series: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Element-wise mean of several series of equal length."""
    return tuple(sum(values) / len(values) for values in zip(*series, strict=True))


def inputs(
    setup: Setup, texts: Sequence[Text] | None, data: File | None, count: int, length: int | None
) -> list[tuple[Input, Int[Tensor, " pos"]]]:
    """Ids of each text, beginning with BOS if the model has one.

    Args:
        setup: The model and ordinary text.
        texts: Texts or ids; all are used.
        data: A file of prompts to use instead (see `read_text_prompts`); the first `count` are used.
        count: Number of pieces of ordinary text, or of prompts from the file.
        length: Maximum tokens per text; longer texts are shortened in the middle, as in LongBench. None uses the
            context, or 512 for ordinary text.

    Raises:
        SinkscopeError: There is no text, a text is too short, or a number is invalid.
    """
    limit = setup.target.max_positions
    if isinstance(texts, str) or (texts is not None and data is not None):
        raise SinkscopeError("texts: expected a list of them or a file of prompts, and only one of them")
    if length is not None and not SHORTEST <= length <= (limit or length):
        upto = f" to {limit}, the context of {setup.target.name}" if limit else ""
        raise SinkscopeError(f"--length {length}: expected {SHORTEST}{upto or ' or more'}")
    if texts is None and data is None:
        rows = _ordinary(setup, count, length)
        return [(Input(str(i), len(row)), row) for i, row in enumerate(rows)]
    named: list[tuple[str, Text]] = [(str(i), text) for i, text in enumerate(texts or ())]
    if data is not None:
        named = [(prompt.id, prompt.text) for prompt in read_text_prompts(data)[:count]]
    if not named:
        raise SinkscopeError("no text was given: expected at least one")
    found: list[tuple[Input, Int[Tensor, " pos"]]] = []
    for name, text in named:
        ids = _ids(setup, text, length or limit)
        if len(ids) < SHORTEST:
            raise SinkscopeError(
                f"text {name} has {len(ids)} tokens, at least {SHORTEST} are needed: give a longer one"
            )
        found.append((Input(name, len(ids)), torch.tensor(ids)))
    return found


def questions(setup: Setup, data: File | None, count: int, length: int | None, new: int) -> list[Question]:
    """Context and question of each prompt; without a file, pieces of ordinary text and a question about them.

    Args:
        setup: The model and ordinary text.
        data: A file of prompts; prompts without a question are left out.
        count: Number of pieces of ordinary text, or of prompts from the file.
        length: Maximum tokens per prompt, as in `inputs`.
        new: Tokens of the context that are reserved for an answer.

    Raises:
        SinkscopeError: Prompt and answer do not fit into the context.
    """
    limit = setup.target.max_positions
    start = [] if setup.bos is None else [setup.bos]
    if data is None:
        body = _ordinary(setup, count, length)[:, len(start) :].tolist()
        length = length or len(start) + len(body[0])
        named = [(_tokens(setup, ASKED), row) for row in body]
    else:
        found = [p for p in read_text_prompts(data)[:count] if p.question.strip() and p.context.strip()]
        if not found:
            note(f"{Path(data).name} does not separate questions from their context, so nothing is asked")
        named = [(_tokens(setup, p.question), _tokens(setup, p.context)) for p in found]
    most = min(length or limit or 1 << 62, (limit or 1 << 62) - new)
    out: list[Question] = []
    for question, context in named:
        room = most - len(start) - len(question)
        if room < SHORTEST:
            raise SinkscopeError(
                f"a question of {len(question)} tokens, {SHORTEST} of its context and an answer of {new} do not fit "
                f"{length or limit} tokens: raise --length, or lower --max-new-tokens (0 leaves questions out)"
            )
        out.append(Question(start, _middle_cut(context, room), question))
    return out


def _ordinary(setup: Setup, count: int, length: int | None) -> Int[Tensor, "row pos"]:
    length = length or min(LENGTH, setup.target.max_positions or LENGTH)
    rows = text_rows(setup.tokenizer, setup.text, count, length, setup.bos)
    if len(rows) < count:
        raise SinkscopeError(
            f"the text has {len(rows)} pieces of {rows.shape[1]} tokens, {count} were asked for: give a longer --text, "
            "or a smaller --count or --length"
        )
    return rows


def _ids(setup: Setup, text: Text, most: int | None) -> list[int]:
    if isinstance(text, str):
        start = [] if setup.bos is None else [setup.bos]
        body = _tokens(setup, text)
        return [*start, *(body if most is None else _middle_cut(body, most - len(start)))]
    given = read_row(setup.target, text)
    if most is not None and len(given) > most:
        raise SinkscopeError(f"{len(given)} ids were given, at most {most} were asked for: give fewer")
    return given


def _tokens(setup: Setup, text: str) -> list[int]:
    ids = [int(i) for i in setup.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
    return ids[1:] if ids[:1] == [setup.bos] else ids


def _middle_cut(ids: list[int], most: int) -> list[int]:
    return ids if len(ids) <= most else [*ids[: most - most // 2], *ids[len(ids) - most // 2 :]]
