"""A prompt, and what a model writes after it, in which a loop is looked for."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from sinkscope.generation.decode import decode
from sinkscope.measure.setup import Setup, prompt_ids
from sinkscope.models.inputs import check_length

NEW_TOKENS = 512  # written by default, if the context holds them


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
