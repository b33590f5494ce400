"""From dialogues to questions as tokens, and what a run says of its reading: shared by answers and fidelity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from torch import Tensor

from sinkscope.bench.dialogues.form import POSITIONS, Dialogue, Position
from sinkscope.bench.methods import Budget, Method, check_methods
from sinkscope.bench.runner import Asked, Batch, PerCall, check_whole
from sinkscope.errors import SinkscopeError
from sinkscope.interventions.base import Event


@dataclass(frozen=True)
class Question:
    """A turn with everything that was said before it, as tokens."""

    dialogue: str
    position: Position
    turn: int
    ids: list[int]

    @property
    def name(self) -> str:
        """What it is called in a folder: dialogue, position and turn."""
        return question_name(self.dialogue, self.position, self.turn)

    def heads(self, to: Asked, method: Method) -> dict[str, Any]:
        """What a record of it says first."""
        return {
            "model": to.fingerprint,
            "method": method.spec,
            "prompt": self.name,
            "dialogue": self.dialogue,
            "position": self.position,
            "turn": self.turn,
            "prompt_tokens": len(self.ids),
        }


def check_chat(to: Asked, chat: bool) -> None:
    """Refuse a chat template that is not there.

    Raises:
        SinkscopeError: it is wanted, and the tokenizer has none.
    """
    if chat and not getattr(to.target.tokenizer, "chat_template", None):
        raise SinkscopeError(f"the tokenizer of {to.target.name} has no chat template: leave out chat")


def question_name(dialogue: str, position: str, turn: int) -> str:
    """What a question is called in a folder."""
    return f"{dialogue} {position} {turn}"


def question(
    to: Asked, dialogue: Dialogue, place: Position, number: int, answers: Sequence[str], chat: bool
) -> Question:
    """A turn after the turns before it and their answers.

    Raises:
        SinkscopeError: with an answer it exceeds the context.
    """
    said = [
        text for turn, answer in zip(dialogue.turns, answers, strict=False) for text in (turn.prompts[place], answer)
    ]
    made = Question(dialogue.id, place, number, encode(to, [*said, dialogue.turns[number].prompts[place]], chat))
    check_length(to, made, len(made.ids))
    return made


def check_length(to: Asked, made: Question, tokens: int) -> None:
    """Refuse what will not fit.

    Raises:
        SinkscopeError: so many tokens and an answer exceed the context.
    """
    limit = to.target.max_positions
    if limit is not None and tokens + to.new > limit:
        raise SinkscopeError(
            f"dialogue {made.dialogue!r}, turn {made.turn + 1}, question at {made.position}: {tokens} tokens and "
            f"{to.new} new ones exceed the context of {to.target.name}, {limit}: give shorter or fewer turns"
        )


def encode(to: Asked, said: Sequence[str], chat: bool) -> list[int]:
    """A conversation that the model is to answer, prompts and answers in turn."""
    tokenizer = to.target.tokenizer
    if not chat:
        return [int(i) for i in tokenizer("\n\n".join(said), verbose=False)["input_ids"]]
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return [int(i) for i in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]


def batch_of(to: Asked, methods: Sequence[Method], rows: Sequence[tuple[Question, Any]]) -> Batch:
    """Questions that run together, each with what else is known of it."""
    names = tuple(each.name for each, _ in rows)
    return Batch(to.fingerprint, tuple(methods), names, tuple(rows), len(methods) * len(rows))


def reads() -> PerCall:
    """Counts, after every call and per row, the tokens that it could attend to: mean over layers and kv heads."""
    return PerCall(_readable, own=True)


def _readable(layer: Any) -> Tensor:
    return layer.readable.sum(-1).float().mean(1).cpu()


def read_of(counts: Sequence[Tensor], row: int, tokens: int) -> float | None:
    """Cached tokens that decoding steps of an answer attended to, mean; None: it is one token, of the prompt's call."""
    steps = [float(count[row]) for count in counts[1:tokens]]  # the last token goes through no call
    return round(fmean(steps), 3) if steps else None


def cells_of(events: Sequence[Event], row: int) -> float | None:
    """Share of a prompt's causal cells that attention covered, mean over layers and heads; None: all, by the model."""
    data = [event.data for event in events if event.kind == "prefill" and event.row == row]
    return round(fmean(float(each.get("attended", 1.0)) for each in data), 4) if data else None


def check_given(
    dialogues: Sequence[Dialogue], methods: Sequence[str], positions: Sequence[str], budget: Budget, **sizes: Any
) -> tuple[tuple[Method, ...], tuple[Position, ...]]:
    """The methods and positions, each once.

    Raises:
        SinkscopeError: none of one of them, an unknown one, a size below 1, or a method that cannot have its settings.
    """
    chosen, places = check_methods(methods, ["cache"]), check_positions(positions)
    if not dialogues:
        raise SinkscopeError("there are no dialogues: give at least one")
    check_whole(**sizes)
    for method in chosen:
        method.make(budget)
    return chosen, places


def check_positions(positions: Sequence[str]) -> tuple[Position, ...]:
    """The positions, each once, in the order begin, middle, end.

    Raises:
        SinkscopeError: none, or an unknown one.
    """
    for given in positions:
        if given not in POSITIONS:
            raise SinkscopeError(f"position {given!r} is unknown: expected some of {', '.join(POSITIONS)}")
    if not positions:
        raise SinkscopeError(f"no position is given: choose from {', '.join(POSITIONS)}")
    return tuple(place for place in POSITIONS if place in positions)
