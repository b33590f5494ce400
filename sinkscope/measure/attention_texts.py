"""Prompts and texts of attention measurements as token ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from math import inf
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import PathName
from sinkscope.files.records import check_values
from sinkscope.files.texts import read_texts
from sinkscope.generation.decode import decode
from sinkscope.measure import Setup
from sinkscope.models.inputs import check_length, read_row
from sinkscope.models.text import beginning, note_second_bos, text_rows

ORDINARY_TOKENS = 512  # tokens of a piece of ordinary text
SHORTEST_TEXT = 16  # tokens; with fewer, a tenth of the lines is almost none
NEW_TOKENS = 512  # written by default after a prompt in which a loop is looked for, if the context holds them


def prompt_ids(setup: Setup, prompt: str | Sequence[int] | None, *, any_length: bool = False) -> list[int]:
    """Return ids of a prompt: a text, ids, or by default the beginning of the typical text.

    Args:
        setup: The model and typical text.
        prompt: The prompt.
        any_length: Whether it may be longer than the context, because it is shortened.

    Raises:
        SinkscopeError: It is empty, or contains an id unknown to the model.
    """
    if prompt is None:
        return setup.ids[0].tolist()
    ids = read_row(setup.target, prompt, special=False, any_length=any_length)
    if isinstance(prompt, str) and setup.bos is not None:
        ids = [*beginning(setup.tokenizer, setup.bos), *ids]
        note_second_bos(ids, setup.bos, "the prompt")
    return ids


def prompt_and_continuation(
    setup: Setup, prompt: str | Sequence[int] | None, new: int | None, spare: int = 0
) -> tuple[list[int], int]:
    """Return a prompt with its greedy continuation, and the length of the prompt.

    Args:
        setup: The model, with the interventions under which it writes.
        prompt: Text or ids. None: the beginning of the typical text.
        new: Tokens to generate. None: 512, or as many as the context holds.
        spare: Tokens for which there should still be room.
    """
    start = prompt_ids(setup, prompt)
    if new is None:
        room = (setup.target.max_positions or inf) - len(start) - spare
        new = int(max(1, min(NEW_TOKENS, room)))
    check_length(setup.target, "the prompt", len(start), new)
    (answer,), _ = decode(setup.target, [start], new, setup.edit)
    return [*start, *answer], len(start)


def texts_of(
    setup: Setup,
    texts: Any,
    data: PathName | None,
    count: int,
    length: int | None,
) -> list[Int[Tensor, " pos"]]:
    """Return ids of each text, beginning with BOS if the model has one.

    Args:
        setup: The model and ordinary text.
        texts: One text, or several texts or rows of ids; all are used.
        data: A file of JSON lines with a "text" to use instead; the first `count` are used.
        count: Number of pieces of ordinary text, or of lines of the file.
        length: Maximum tokens per text; longer texts are shortened in the middle. None: the context, or 512 for
            ordinary text.

    Raises:
        SinkscopeError: There are too few texts, a text is too short, or a number is invalid.
    """
    context = setup.target.max_positions or 1 << 30
    if length is not None and not SHORTEST_TEXT <= length <= context:
        raise SinkscopeError(f"--length {length}: expected {SHORTEST_TEXT} to {context}, the context of the model")
    least = 1
    if data is not None:
        texts = [record.text for record in islice(read_texts(data), count)]
    if texts is None:
        least, size = count, length or min(ORDINARY_TOKENS, context)
        rows = list(text_rows(setup.tokenizer, setup.text, count, size, setup.bos))
    else:
        check_values(Iterable[Any], texts=texts)
        rows = [_row(setup, text, length or context) for text in ([texts] if isinstance(texts, str) else texts)]
    if len(rows) < least:
        raise SinkscopeError(f"there are {len(rows)} texts: give more of them, a longer --text, or a smaller --count")
    return rows


def check_data(*, data: PathName | None, **_: Any) -> None:
    """Refuse a file that is missing or holds something else before a model is opened; what flows is read but once."""
    if data is not None and data != "-":
        list(read_texts(data))


def _row(setup: Setup, text: str | Sequence[int], most: int) -> Int[Tensor, " pos"]:
    """The ids of a text; long texts are cut in the middle, as in LongBench."""
    ids = prompt_ids(setup, text, any_length=True)
    if len(ids) > most:
        half = (most - (setup.bos is not None)) // 2
        ids = [*ids[: most - half], *ids[len(ids) - half :]]
    if len(ids) < SHORTEST_TEXT:
        raise SinkscopeError(f"a text has {len(ids)} tokens, at least {SHORTEST_TEXT} are needed: give a longer one")
    return torch.tensor(ids)
