"""Method x position x dialogue x turn: greedy, batched, and resumed after a kill with the same table.

Every turn is a prompt of its own: the whole conversation so far is read anew. With right answers as the history,
methods are compared on the same texts and a method's loss in one turn is not carried into the next; with the method's
own answers, the conversation goes on from what it said. Or one cache grows over the turns of a dialogue, and what a
method threw away in one turn is missing in the next.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args

from torch import Tensor

from sinkscope.bench.dialogues.form import POSITIONS, Dialogue, Position
from sinkscope.bench.dialogues.recall import TASK
from sinkscope.bench.dialogues.tables import COMMAND, Said
from sinkscope.bench.files import open_folder
from sinkscope.bench.methods import Budget, Method, check_methods, check_whole
from sinkscope.bench.runner import Asked, Batch, PerCall, ask, check_can, run_batches
from sinkscope.bench.scorers import score
from sinkscope.console import Progress
from sinkscope.errors import SinkscopeError
from sinkscope.interventions.base import Event
from sinkscope.kv.loopserve.conversation import Conversation
from sinkscope.parallel import Tally, check_workers
from sinkscope.published import set_of
from sinkscope.store import Folder
from sinkscope.text.chat import chat_text

History = Literal["gold", "model"]
Caches = Literal["fresh", "grow"]
VERSION = 2  # of the records; a change of what they hold is another setting


@dataclass(frozen=True)
class AskedTurn:
    """A turn with everything that was said before it, as tokens."""

    dialogue: str
    position: Position
    turn: int
    ids: list[int]

    @property
    def id(self) -> str:
        """What it is called in a folder: dialogue, position and turn."""
        return f"{self.dialogue} {self.position} {self.turn}"

    def heads(self, to: Asked, method: Method) -> dict[str, Any]:
        """What a record of it says first."""
        return {
            "model": to.fingerprint,
            "method": method.spec,
            "prompt": self.id,
            "dialogue": self.dialogue,
            "position": self.position,
            "turn": self.turn,
            "prompt_tokens": len(self.ids),
        }


def run_dialogues(
    model: object,
    dialogues: Sequence[Dialogue],
    methods: Sequence[str],
    *,
    out: str | os.PathLike[str],
    positions: Sequence[str] = POSITIONS,
    tokenizer: Any = None,
    budget: Budget = 256,
    max_new_tokens: int | None = None,
    batch_size: int = 1,
    chat: bool = False,
    history: History = "gold",
    cache: Caches = "fresh",
    workers: int = 1,
    ray: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Answer every turn by every method; what is in `out` already is not done again.

    Turns are cut into batches in the order they come in (with the model's history: dialogues, turn after turn), and a
    batch that was not finished is run again whole, so the records are the same whatever was killed.

    Args:
        model: Hugging Face, TransformerBridge, nnsight (dispatched) or `Target`, whole in memory; or `NamedModel`.
        dialogues: see `read_dialogues` and `recall_dialogues`.
        methods: names in `METHODS`, with settings if wanted ("loopserve:alpha=0.98:first=0"), or
            "package.module:Class"; see `at_settings` for those of a comparison.
        out: folder; settings, dialogues and records are kept there.
        positions: of the question: "begin", "middle", "end".
        tokenizer: where the model carries none.
        budget: of cached tokens, a whole number, or a share of the conversation so far; for methods that have none of
            their own.
        max_new_tokens: cap of an answer; None: the benchmark's for each task (the largest, if there are several).
        batch_size: turns that run together.
        chat: wrap turns in the tokenizer's chat template, instead of empty lines between them.
        history: "gold": turns come after right answers (the first of each turn). "model": after the method's own.
        cache: "fresh": every turn reads the conversation so far anew. "grow": one cache over the turns of a dialogue
            (`Conversation`), one dialogue at a time; a dialogue that was not finished is run again whole. With gold
            history an answer is given twice in every turn: the method's own, and from the same cache the right one.
        workers: processes; more than one run over Ray.
        ray: address of a Ray cluster; None: this machine, or what `RAY_ADDRESS` names.
        progress: called as `progress("answers", done, total)`.

    Returns:
        `out`.

    Raises:
        SinkscopeError: an unknown method, setting or position, a turn that exceeds the context, bad numbers, a folder
            that was begun with other settings or is being written.
    """
    tasks = sorted({dialogue.task for dialogue in dialogues})
    check_scores(dialogues)
    new = max_new_tokens if max_new_tokens is not None else max((set_of(t).new_tokens for t in tasks), default=1)
    chosen, places = check_given(dialogues, methods, positions, budget, max_new_tokens=new, batch_size=batch_size)
    for name, given, known in (("history", history, get_args(History)), ("cache", cache, get_args(Caches))):
        if given not in known:
            raise SinkscopeError(f"{name}={given!r}: expected one of {', '.join(known)}")
    if cache == "grow" and batch_size != 1:
        raise SinkscopeError(f"batch_size={batch_size}: a cache that grows is of one dialogue; use batch_size=1")
    check_workers(workers, ray)
    to = ask(model, tokenizer, new, budget, chat)
    ready = [list(_questions(to, dialogues, place, history, chat)) for place in places]
    check_can(to, chosen, [len(each.ids) for at_place in ready for each, _ in at_place])
    settings = {"version": VERSION, "command": COMMAND, **to.settings(), "chat": chat, "history": history}
    settings |= {"cache": cache} if cache == "grow" else {}
    tally = Tally("answers", len(chosen) * sum(map(len, ready)), progress)
    with open_folder(out, settings, dialogues, Said) as kept:
        told = partial(_told, to, kept, chat)
        stages = (
            [
                Batch(to.fingerprint, (method,), tuple(told(method.spec, row) if stage else row for row in rows))
                for method in chosen
                for rows in groups
            ]
            for stage, groups in enumerate(_stages(ready, dialogues, history, cache, batch_size))
        )
        answer = partial(_converse, chat=chat, history=history) if cache == "grow" else answer_anew
        run_batches(to, stages, answer, kept, tally, model=model, workers=workers, ray=ray)
    return Path(out)


def check_scores(dialogues: Sequence[Dialogue]) -> None:
    """Refuse what could not be scored.

    Raises:
        SinkscopeError: no such set, a library is not there, or a set has no right answer.
    """
    asked = [(each.task, turn) for each in dialogues for turn in each.turns]
    for task, metric in sorted({(task, turn.metric or set_of(task).metric) for task, turn in asked}):
        score(metric, "", [""], task=task)
    for task in sorted({task for task, _ in asked} - {task for task, turn in asked if any(turn.answers)}):
        raise SinkscopeError(
            f"no question of {task} has a right answer: give its references to `dialogues build`, or compare methods "
            "with `dialogues fidelity`"
        )


_Row = tuple[AskedTurn, Dialogue]


def _questions(
    to: Asked, dialogues: Sequence[Dialogue], place: Position, history: History, chat: bool
) -> Iterator[_Row]:
    """Every question as it will be, or, where it depends on what is said, with empty answers before it.

    Raises:
        SinkscopeError: it exceeds the context, or might after the longest answers.
    """
    for dialogue in dialogues:
        answers = [turn.answers[0] if history == "gold" else "" for turn in dialogue.turns]
        for number in range(len(answers)):
            made = question(to, dialogue, place, number, answers[:number], chat)
            if history == "model":
                check_length(to, made, len(made.ids) + number * to.new)
            yield made, dialogue


def _stages(
    ready: Sequence[Sequence[_Row]], dialogues: Sequence[Dialogue], history: History, cache: Caches, size: int
) -> Iterator[list[list[_Row]]]:
    """Questions that run together, in the order they run in; those of a stage may come after answers of the last."""
    if cache == "grow":
        yield [[row for row in rows if row[1] is each] for rows in ready for each in dialogues]
    elif history == "gold":
        yield [list(rows[start : start + size]) for rows in ready for start in range(0, len(rows), size)]
    else:
        parts = [{each.id for each in dialogues[start : start + size]} for start in range(0, len(dialogues), size)]
        for turn in range(max(len(each.turns) for each in dialogues)):
            groups = [[r for r in rows if r[1].id in part and r[0].turn == turn] for rows in ready for part in parts]
            yield [group for group in groups if group]


def _told(to: Asked, kept: Folder[Said], chat: bool, method: str, row: _Row) -> _Row:
    """A question after the method's own answers. The recall model's end of sequence is a word of its answers."""
    made, dialogue = row
    before = [kept.records[to.fingerprint, method, replace(made, turn=number).id] for number in range(made.turn)]
    decode = to.target.tokenizer.decode
    answers = [decode(record.tokens) if dialogue.task == TASK else record.text for record in before]
    return question(to, dialogue, made.position, made.turn, answers, chat), dialogue


def answer_anew(to: Asked, batch: Batch) -> list[Said]:
    """Answers to some questions, each of which is read anew."""
    (method,), started, count = batch.methods, time.perf_counter(), reads()
    made, events = to.generate([each.ids for each, _ in batch.rows], method.make(to.budget) | count)
    seconds = round(time.perf_counter() - started, 3)
    records: list[Said] = []
    for i, ((each, _), row) in enumerate(zip(batch.rows, made, strict=True)):
        tokens, ended = to.cut(row)
        records.append(
            Said(
                **each.heads(to, method),
                tokens=tuple(tokens),
                text=to.text(tokens),
                ended="eos" if ended else "cap",
                read=read_of(count.counts, i, len(tokens)),
                cells=cells_of(events, i),
                seconds=seconds,
            )
        )
    return records


def _converse(to: Asked, batch: Batch, *, chat: bool, history: History) -> list[Said]:
    """All turns of a dialogue on one cache."""
    (method,), dialogue = batch.methods, batch.rows[0][1]
    talk = Conversation(to.target, method.make(to.budget), tokenizer=to.target.tokenizer, chat=chat)
    records: list[Said] = []
    for (each, _), turn in zip(batch.rows, dialogue.turns, strict=True):
        started, prompt = time.perf_counter(), turn.prompts[each.position]
        prompt = prompt if chat or each.turn == 0 else f"\n\n{prompt}"
        asked_one = copy.copy(talk)  # turns replace what a conversation holds, so the one that was copied stays
        made = asked_one.ask(prompt, max_new_tokens=to.new)
        tokens, ended = to.cut(list(made.ids))
        records.append(
            Said(
                **each.heads(to, method) | {"prompt_tokens": made.prompt_tokens},
                tokens=tuple(tokens),
                text=to.text(tokens),
                ended="eos" if ended else "cap",
                read=None if made.read is None else round(made.read, 3),
                cells=cells_of(made.events, 0),
                seconds=round(time.perf_counter() - started, 3),
            )
        )
        if history == "model":
            talk = asked_one
        elif each.turn + 1 < len(dialogue.turns):
            talk.say(prompt, turn.answers[0])
    return records


def question(
    to: Asked, dialogue: Dialogue, place: Position, number: int, answers: Sequence[str], chat: bool
) -> AskedTurn:
    """A turn after the turns before it and their answers.

    Raises:
        SinkscopeError: with an answer it exceeds the context.
    """
    said = [
        text for turn, answer in zip(dialogue.turns, answers, strict=False) for text in (turn.prompts[place], answer)
    ]
    made = AskedTurn(dialogue.id, place, number, encode(to, [*said, dialogue.turns[number].prompts[place]], chat))
    check_length(to, made, len(made.ids))
    return made


def check_length(to: Asked, made: AskedTurn, tokens: int) -> None:
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
    text = chat_text(tokenizer, messages, to.target.name)
    return [int(i) for i in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]


def reads() -> PerCall:
    """Counts, after every call and per row, the tokens that it could attend to: mean over layers and kv heads."""
    return PerCall(lambda layer: layer.readable.sum(-1).float().mean(1).cpu(), own=True)


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
