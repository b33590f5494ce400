"""From dialogues to batches of tokens, and what a run says of its reading: shared by answers and fidelity."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from sinkscope.bench.dialogues.form import POSITIONS, Dialogue, Position
from sinkscope.bench.dialogues.methods import Budget, Method, check_methods
from sinkscope.errors import SinkscopeError
from sinkscope.interventions.base import Event, Intervention, Run
from sinkscope.kv.loopserve.serve import LoopServe
from sinkscope.kv.session import Session
from sinkscope.models.open import fingerprint_of
from sinkscope.models.target import Target
from sinkscope.results import ModelInfo


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


@dataclass(frozen=True)
class Asked:
    """The model that is asked, and how.

    Attributes:
        target: the model.
        fingerprint: of it.
        ends: ids that end an answer.
        pad: id that fills rows up.
        new: most tokens of an answer.
        budget: of methods that have none of their own.
        chat: turns are wrapped in the tokenizer's chat template.
    """

    target: Target
    fingerprint: str
    ends: frozenset[int]
    pad: int
    new: int
    budget: Budget
    chat: bool

    def settings(self) -> dict[str, Any]:
        """What decides a record, whatever is done with the model."""
        t = self.target
        return {
            "model": asdict(ModelInfo(t.name, t.config.model_type, t.n_layers, t.d_model, t.d_mlp, self.fingerprint)),
            "kind": t.kind,
            "device": t.device.type,
            "dtype": str(t.dtype).removeprefix("torch."),
            "attention": str(getattr(t.config, "_attn_implementation", "unknown")),
            "max_new_tokens": self.new,
            "budget": self.budget,
            "chat": self.chat,
        }

    def cut(self, row: list[int]) -> tuple[list[int], bool]:
        """An answer up to and with the end of sequence, and whether that came."""
        end = next((k + 1 for k, token in enumerate(row) if token in self.ends), None)
        return row[:end], end is not None


def asked(model: object, tokenizer: Any, new: int, budget: Budget, chat: bool) -> Asked:
    """The model, ready to be asked.

    Raises:
        SinkscopeError: it carries no tokenizer, or one without a chat template where that is wanted.
    """
    target = Target.of(model, tokenizer)
    if target.tokenizer is None:
        raise SinkscopeError(
            f"{target.name} carries no tokenizer: give tokenizer=..., or put the tokenizer's files beside the weights",
            page="no-tokenizer",
        )
    if chat and not getattr(target.tokenizer, "chat_template", None):
        raise SinkscopeError(f"the tokenizer of {target.name} has no chat template: leave out chat")
    end = getattr(target.hf.generation_config, "eos_token_id", None)
    ends = frozenset(end if isinstance(end, list | tuple) else [] if end is None else [int(end)])
    pad = target.tokenizer.pad_token_id
    pad = min(ends, default=0) if pad is None else int(pad)
    return Asked(target, fingerprint_of(target), ends, pad, new, budget, chat)


def question_name(dialogue: str, position: str, turn: int) -> str:
    """What a question is called in a folder."""
    return f"{dialogue} {position} {turn}"


def question(to: Asked, dialogue: Dialogue, place: Position, number: int, answers: Sequence[str]) -> Question:
    """A turn after the turns before it and their answers.

    Raises:
        SinkscopeError: with an answer it exceeds the context.
    """
    said = [
        text for turn, answer in zip(dialogue.turns, answers, strict=False) for text in (turn.prompts[place], answer)
    ]
    made = Question(dialogue.id, place, number, encode(to, [*said, dialogue.turns[number].prompts[place]]))
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


def encode(to: Asked, said: Sequence[str]) -> list[int]:
    """A conversation that the model is to answer, prompts and answers in turn."""
    tokenizer = to.target.tokenizer
    if not to.chat:
        return [int(i) for i in tokenizer("\n\n".join(said), verbose=False)["input_ids"]]
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return [int(i) for i in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]


def check_can(to: Asked, methods: Sequence[Method], lengths: Iterable[int]) -> None:
    """Refuse what cannot be done before anything is computed.

    Raises:
        SinkscopeError: a budget too small for one of the prompts, settings that make no sense, or a method that this
            model cannot have.
    """
    for method in methods:
        edit = method.make(to.budget)
        part = edit.decoding if isinstance(edit, LoopServe) and edit.decode else edit
        for length in lengths:
            if part is not None:
                part.check_prompt(length)
        with edit.on(to.target):
            pass


def padded(to: Asked, rows: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """Rows filled up on the left, and their mask: `[batch pos]` each."""
    width = max(map(len, rows))
    ids = [[to.pad] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=to.target.device), torch.tensor(mask, device=to.target.device)


class Reads(Intervention):
    """Counts, after every call and per row, the tokens that it could attend to: mean over layers and kv heads."""

    def __init__(self) -> None:
        self.counts: list[Tensor] = []

    def enter(self, run: Run, key: int) -> None:
        """Look at the cache, which has to be one of ours for that."""
        session = Session.of(run)
        session.own_cache()

        def note(moment: Any) -> None:
            shown = [layer.readable for layer in moment.layers]
            self.counts.append(torch.stack([there.sum(-1).float().mean(1).cpu() for there in shown]).mean(0))

        session.after_call(note)


def read_of(reads: Reads, row: int, tokens: int) -> float | None:
    """Cached tokens that decoding steps of an answer attended to, mean; None: it is one token, of the prompt's call."""
    steps = [float(count[row]) for count in reads.counts[1:tokens]]  # the last token goes through no call
    return round(fmean(steps), 3) if steps else None


def cells_of(events: Sequence[Event], row: int) -> float | None:
    """Share of a prompt's causal cells that attention covered, mean over layers and heads; None: all, by the model."""
    data = [event.data for event in events if event.kind == "prefill" and event.row == row]
    return round(fmean(float(each.get("attended", 1.0)) for each in data), 4) if data else None


def check_given(
    dialogues: Sequence[Dialogue], methods: Sequence[str], positions: Sequence[str]
) -> tuple[tuple[Method, ...], tuple[Position, ...]]:
    """The methods and positions, each once.

    Raises:
        SinkscopeError: none of one of them, or an unknown one.
    """
    chosen, places = check_methods(methods), check_positions(positions)
    if not dialogues:
        raise SinkscopeError("there are no dialogues: give at least one")
    return chosen, places


def check_sizes(methods: Sequence[Method], budget: Budget, **sizes: int) -> None:
    """Refuse what makes no sense whatever the model.

    Raises:
        SinkscopeError: a size below 1, or a method that cannot have its settings.
    """
    for name, value in sizes.items():
        if isinstance(value, bool) or value < 1:
            raise SinkscopeError(f"{name}={value!r}: expected a whole number from 1")
    for method in methods:
        method.make(budget)


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
