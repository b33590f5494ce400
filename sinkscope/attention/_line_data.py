"""The texts that lines are measured on, as ids."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.attention.generation import checked_ids
from sinkscope.errors import SinkscopeError
from sinkscope.sinks.first_token.locate import Setup
from sinkscope.text import text_rows
from sinkscope.text.prompts import read_prompts

LENGTH = 512  # tokens of a piece of ordinary text
SHORTEST = 16  # tokens: with fewer, a tenth of the lines is next to none
ASKED = "\n\nQuestion: What is this text about?\n\nAnswer:"  # of ordinary text
Text = str | Sequence[int]


@dataclass(frozen=True)
class Input:
    """A text.

    Attributes:
        name: its number, or what its file calls it.
        tokens: how many.
    """

    name: str
    tokens: int


@dataclass(frozen=True)
class Question:
    """Ids of a prompt in parts, without BOS: the question can stand anywhere in the context."""

    start: list[int]
    context: list[int]
    question: list[int]

    def placed(self, where: str) -> list[int]:
        """The prompt with the question at "begin", "middle" or "end"."""
        at = {"begin": 0, "middle": len(self.context) // 2, "end": len(self.context)}[where]
        return [*self.start, *self.context[:at], *self.question, *self.context[at:]]


def checked_etas(etas: Sequence[float], option: str = "--eta") -> tuple[float, ...]:
    """The shares in rising order; `option` is what the message calls them.

    Raises:
        SinkscopeError: none was given, or one outside (0, 1].
    """
    found = tuple(sorted({float(eta) for eta in etas}))
    if not found:
        raise SinkscopeError(f"no {option} was given: expected at least one share, such as 0.1")
    for eta in found:
        if not 0 < eta <= 1:
            raise SinkscopeError(f"{option} {eta:g}: expected a share above 0 and up to 1, such as 0.1")
    return found


def inputs(
    made: Setup, texts: Sequence[Text] | None, data: str | os.PathLike[str] | None, count: int, length: int | None
) -> list[tuple[Input, Int[Tensor, " pos"]]]:
    """Ids of each text, BOS first where there is one.

    Args:
        made: model and ordinary text.
        texts: texts or ids; all are taken.
        data: file of prompts instead (see `read_prompts`); the first `count` are taken.
        count: pieces of ordinary text, or prompts of the file.
        length: most tokens of each; longer ones lose their middle, as in LongBench. None: what the context holds, for
            ordinary text 512.

    Raises:
        SinkscopeError: no text, one that is too short, or bad numbers.
    """
    limit = made.target.max_positions
    if texts is not None and data is not None:
        raise SinkscopeError("texts and a file of prompts are given: expected one of them")
    if count < 1:
        raise SinkscopeError(f"--count {count}: at least one text is needed; give 1 or more")
    if length is not None and not SHORTEST <= length <= (limit or length):
        upto = f" to {limit}, the context of {made.target.name}" if limit else ""
        raise SinkscopeError(f"--length {length}: expected {SHORTEST}{upto or ' or more'}")
    if isinstance(texts, str):
        raise SinkscopeError("texts is one text: expected a list of them")
    if texts is None and data is None:
        rows = text_rows(made.target.tokenizer, made.text, count, length or min(LENGTH, limit or LENGTH), made.bos)
        if len(rows) < count:
            raise SinkscopeError(
                f"the text has {len(rows)} pieces of {rows.shape[1]} tokens, {count} were asked for: give a longer "
                "--text, or a smaller --count or --length"
            )
        return [(Input(str(i), len(row)), row) for i, row in enumerate(rows)]
    named = (
        [(p.id, p.text) for p in read_prompts(data)[:count]]
        if data is not None
        else [(str(i), text) for i, text in enumerate(texts or ())]
    )
    if not named:
        raise SinkscopeError("no text was given: expected at least one")
    found: list[tuple[Input, Int[Tensor, " pos"]]] = []
    for name, text in named:
        ids = _ids(made, text, length or limit)
        if len(ids) < SHORTEST:
            raise SinkscopeError(
                f"text {name} has {len(ids)} tokens, at least {SHORTEST} are needed: give a longer one"
            )
        found.append((Input(name, len(ids)), torch.tensor(ids)))
    return found


def questions(
    made: Setup, data: str | os.PathLike[str] | None, count: int, length: int | None, new: int
) -> list[Question]:
    """Context and question of each prompt; without a file, pieces of ordinary text and a question about them.

    Args:
        made: model and ordinary text.
        data: file of prompts; those without a question are left out.
        count: pieces of ordinary text, or prompts of the file.
        length: most tokens of a prompt, as in `inputs`.
        new: room for an answer in the context.

    Raises:
        SinkscopeError: prompt and answer do not fit the context.
    """
    limit = made.target.max_positions
    start = [] if made.bos is None else [made.bos]
    if data is None:
        length = length or min(LENGTH, limit or LENGTH)
        body = text_rows(made.target.tokenizer, made.text, count, length, made.bos)[:, len(start) :]
        named = [(_tokens(made, ASKED), row) for row in body.tolist()]
    else:
        found = [p for p in read_prompts(data)[:count] if p.question.strip() and p.context.strip()]
        named = [(_tokens(made, p.question), _tokens(made, p.context)) for p in found]
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


def _ids(made: Setup, text: Text, most: int | None) -> list[int]:
    start = [] if made.bos is None else [made.bos]
    if isinstance(text, str):
        body = _tokens(made, text)
        return [*start, *(body if most is None else _middle_cut(body, most - len(start)))]
    given = checked_ids(made, text)
    if most is not None and len(given) > most:
        raise SinkscopeError(f"{len(given)} ids were given, at most {most} were asked for: give fewer")
    return given


def _tokens(made: Setup, text: str) -> list[int]:
    ids = [int(i) for i in made.target.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
    return ids[1:] if ids[:1] == [made.bos] else ids


def _middle_cut(ids: list[int], most: int) -> list[int]:
    return ids if len(ids) <= most else [*ids[: most - most // 2], *ids[len(ids) - most // 2 :]]
