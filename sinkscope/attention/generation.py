"""Token by token under interventions, and the loop that a text ends in: where measurements of loops begin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.interventions.base import Event
from sinkscope.interventions.decode import greedy
from sinkscope.loops.signals import tail_period
from sinkscope.measure import Setup
from sinkscope.text import text_rows

PERIODS = 3  # repetitions that make a loop
LEAST = 24  # tokens it lasts at least


@dataclass(frozen=True)
class Mark:
    """Something that an intervention did.

    Attributes:
        step: token that was generated then, from 0.
        kind: of the event.
        count: events of that kind in that step.
    """

    step: int
    kind: str
    count: int


@dataclass(frozen=True)
class Loop:
    """Ids and the periodic tail they end in.

    Attributes:
        ids: prompt and what was generated.
        prompt: tokens of the prompt.
        period: of the tail; None: they do not end in a loop.
        onset: the first position of the periodic tail; None without a loop.
    """

    ids: Int[Tensor, " pos"]
    prompt: int
    period: int | None
    onset: int | None

    @property
    def length(self) -> int:
        """Tokens of the periodic tail."""
        return 0 if self.onset is None else len(self.ids) - self.onset


def prompt_ids(made: Setup, prompt: str | Sequence[int] | None) -> list[int]:
    """Ids of a prompt: a text, ids, or by default the beginning of the typical text.

    Raises:
        SinkscopeError: it is empty, or an id is not one of the model's.
    """
    if prompt is None:
        return made.ids[0].tolist()
    if isinstance(prompt, str):
        if not prompt.strip():
            raise SinkscopeError("the prompt is empty: write at least one word")
        ids = made.target.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return [int(i) for i in ids] if made.bos is None else [made.bos, *(int(i) for i in ids if i != made.bos)]
    return checked_ids(made, prompt)


def checked_ids(made: Setup, ids: Sequence[int]) -> list[int]:
    """The ids as a list.

    Raises:
        SinkscopeError: there are none, more than the context holds, or one that the model does not know.
    """
    given = [int(i) for i in ids]
    size, limit = int(made.target.config.vocab_size), made.target.max_positions
    if not given:
        raise SinkscopeError("no ids were given: expected at least one")
    if wrong := [i for i in given if not 0 <= i < size]:
        raise SinkscopeError(f"id {wrong[0]} is not in the vocabulary: expected 0 to {size - 1}")
    if limit is not None and len(given) > limit:
        raise SinkscopeError(f"{len(given)} ids, but the context of {made.target.name} is {limit}: give fewer")
    return given


def chosen_layers(made: Setup, layers: Sequence[int] | None) -> list[int]:
    """The layers in order; None: all.

    Raises:
        SinkscopeError: none was given, or one that the model does not have.
    """
    count = made.target.n_layers
    wanted = list(range(count)) if layers is None else sorted(set(layers))
    wrong = [f"layer {i}" for i in wanted if not 0 <= i < count]
    if wrong or not wanted:
        given = wrong[0] if wrong else "no layer"
        raise SinkscopeError(f"{given} was given: {made.target.name} has layers 0 to {count - 1}")
    return wanted


def check_room(made: Setup, prompt: int, new: int) -> None:
    """Whether prompt and new tokens fit.

    Raises:
        SinkscopeError: `new` is no positive number, or they do not.
    """
    if new < 1:
        raise SinkscopeError(f"--max-new-tokens {new}: expected 1 or more")
    limit = made.target.max_positions
    if limit is not None and prompt + new > limit:
        fewer = f" or ask for at most {limit - prompt} new tokens" if prompt < limit else ""
        raise SinkscopeError(
            f"prompt of {prompt} tokens and {new} new ones are {prompt + new}, but the context of "
            f"{made.target.name} is {limit}: shorten the prompt{fewer}"
        )


def generated(made: Setup, prompt: list[int], new: int) -> Loop:
    """Continue `prompt` greedily by up to `new` tokens and look for a loop at the end."""
    check_room(made, len(prompt), new)
    answer = greedy(made.target, torch.tensor([prompt]), new)[0]
    return loop_of([*prompt, *answer], len(prompt))


def loop_of(ids: Sequence[int], prompt: int) -> Loop:
    """The loop that ids end in; one that begins inside the prompt counts as well."""
    found = tail_period(ids, repeats=PERIODS, shortest=LEAST)
    period, onset = (None, None) if found is None else (found.period, found.start)
    return Loop(torch.tensor(list(ids)), prompt, period, onset)


def healthy_ids(made: Setup, length: int) -> Int[Tensor, " pos"] | None:
    """As many tokens of the typical text; None where it is shorter."""
    try:
        return text_rows(made.target.tokenizer, made.text, 1, length, made.bos)[0]
    except SinkscopeError:
        return None


def marks(events: list[Event]) -> tuple[Mark, ...]:
    """Events by step and kind."""
    counted = Counter((event.step, event.kind) for event in events)
    return tuple(Mark(step, kind, n) for (step, kind), n in sorted(counted.items()))
