"""Prompts of measurements as token ids, and what a model writes after them."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from sinkscope.generation.decode import decode
from sinkscope.measure import Setup
from sinkscope.models.inputs import check_length, read_row
from sinkscope.models.text import beginning, note_second_bos

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
