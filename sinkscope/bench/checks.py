"""What is refused of prompts before a model is read and a token is written."""

from __future__ import annotations

from collections.abc import Sequence

from sinkscope.bench.record import Prompt
from sinkscope.bench.scores import check_metric
from sinkscope.errors import SinkscopeError


def check_prompts(prompts: Sequence[Prompt]) -> None:
    """Refuse prompts that cannot be answered.

    Raises:
        SinkscopeError: There are none, two have the same id, no turn of one is scored, or a turn before a scored one
            has no answer.
    """
    if not prompts:
        raise SinkscopeError("the task has no prompts: give at least one")
    ids = set[str]()
    for prompt in prompts:
        if prompt.id in ids:
            raise SinkscopeError(f"two prompts have the id {prompt.id!r}: give each an id of its own")
        ids.add(prompt.id)
        scored = prompt.scored_turns
        if not scored:
            raise SinkscopeError(f'prompt {prompt.id!r} has no turn that is scored: leave "score" out of the last one')
        for number, turn in enumerate(prompt.turns[: scored[-1]], 1):
            if not turn.answers:
                raise SinkscopeError(
                    f"prompt {prompt.id!r}: turn {number} has no answer for the turns after it: give one"
                )


def check_answers(prompts: Sequence[Prompt]) -> None:
    """Refuse prompts whose answers cannot be scored; each metric is tried with a right answer as the output.

    Raises:
        SinkscopeError: A scored turn has no right answer or an empty one, or a metric fails.
    """
    tried = set[str]()
    for prompt in prompts:
        for number in prompt.scored_turns:
            turn = prompt.turns[number]
            where = f"prompt {prompt.id!r}, turn {number + 1}"
            if not turn.answers:
                raise SinkscopeError(f'{where}: no answer to score by; give "answers", or "score": false')
            if not all(answer.strip() for answer in turn.answers):
                raise SinkscopeError(f"{where}: an answer is empty, which any output would contain; give its words")
            if turn.metric not in tried:
                check_metric(turn.metric, turn.answers)
                tried.add(turn.metric)
