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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from sinkscope.bench.dialogues.asking import (
    Asked,
    Question,
    Reads,
    asked,
    cells_of,
    check_can,
    check_given,
    check_length,
    check_sizes,
    padded,
    question,
    question_name,
    read_of,
)
from sinkscope.bench.dialogues.form import POSITIONS, Dialogue, Position
from sinkscope.bench.dialogues.methods import Budget, Method
from sinkscope.bench.dialogues.metrics import metric_of, score
from sinkscope.bench.dialogues.recall import TASK
from sinkscope.bench.dialogues.scbench import SCBENCH
from sinkscope.bench.dialogues.tables import COMMAND, Said
from sinkscope.bench.loopbench.store import Folder
from sinkscope.errors import SinkscopeError
from sinkscope.kv.loopserve.conversation import Conversation

Progress = Callable[[str, int, int], None]
History = Literal["gold", "model"]
Caches = Literal["fresh", "grow"]
VERSION = 2  # of the records; a change of what they hold is another setting
NEW = {
    "narrativeqa": 128,
    "qasper": 128,
    "multifieldqa_en": 64,
    "hotpotqa": 32,
    "2wikimqa": 32,
    "musique": 32,
    "multi_news": 512,
    "gov_report": 512,
    "qmsum": 512,
    "trec": 64,
    "samsum": 128,
    TASK: 64,
    **{name: shared.new_tokens for name, shared in SCBENCH.items()},
}
"""New tokens by task, LongBench's and SCBench's own numbers; of the recall model as many as 21 hops take."""


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
    progress: Progress | None = None,
) -> Path:
    """Answer every turn by every method; what is in `out` already is not done again.

    Turns are cut into batches in the order they come in (with the model's history: dialogues, turn after turn), and a
    batch that was not finished is run again whole, so the records are the same whatever was killed.

    Args:
        model: Hugging Face, TransformerBridge, nnsight (dispatched) or `Target`, whole in memory.
        dialogues: see `read_dialogues` and `recall_dialogues`.
        methods: names in `METHODS`, with settings if wanted ("loopserve:alpha=0.98:first=0"); see `at_settings` for
            those of a comparison.
        out: folder; settings, dialogues and records are kept there.
        positions: of the question: "begin", "middle", "end".
        tokenizer: where the model carries none.
        budget: of cached tokens, a whole number, or a share of the conversation so far; for methods that have none of
            their own.
        max_new_tokens: cap of an answer; None: LongBench's for each task (the largest, if there are several).
        batch_size: turns that run together.
        chat: wrap turns in the tokenizer's chat template, instead of empty lines between them.
        history: "gold": turns come after right answers (the first of each turn). "model": after the method's own.
        cache: "fresh": every turn reads the conversation so far anew. "grow": one cache over the turns of a dialogue
            (`Conversation`), one dialogue at a time; a dialogue that was not finished is run again whole. With gold
            history an answer is given twice in every turn: the method's own, and from the same cache the right one.
        progress: called as `progress("answers", done, total)`.

    Returns:
        `out`.

    Raises:
        SinkscopeError: an unknown method, setting or position, a turn that exceeds the context, bad numbers, a folder
            that was begun with other settings or is being written.
    """
    chosen, places = check_given(dialogues, methods, positions)
    for name, given, known in (("history", history, get_args(History)), ("cache", cache, get_args(Caches))):
        if given not in known:
            raise SinkscopeError(f"{name}={given!r}: expected one of {', '.join(known)}")
    if cache == "grow" and batch_size != 1:
        raise SinkscopeError(f"batch_size={batch_size}: a cache that grows is of one dialogue; use batch_size=1")
    tasks = sorted({dialogue.task for dialogue in dialogues})
    for task in tasks:  # what could not be scored is not begun
        score(metric_of(task), "", [""])
    new = max_new_tokens if max_new_tokens is not None else max(NEW[task] for task in tasks)
    check_sizes(chosen, budget, max_new_tokens=new, batch_size=batch_size)
    to = asked(model, tokenizer, new, budget, chat)
    ready = {each.name: each for each in _questions(to, dialogues, places, history)}
    check_can(to, chosen, sorted({len(each.ids) for each in ready.values()}))
    groups: list[tuple[Position, list[tuple[Dialogue, int]]]] = [
        (place, group) for place in places for group in _groups(dialogues, history, cache, batch_size)
    ]
    done, total = 0, len(chosen) * len(ready)
    settings = {"version": VERSION, "command": COMMAND, **to.settings(), "history": history}
    settings |= {"cache": cache} if cache == "grow" else {}
    with Folder(out, settings, [asdict(dialogue) for dialogue in dialogues], Said) as store:

        def spoken(method: str, place: Position, dialogue: Dialogue, number: int) -> Question:
            names = [question_name(dialogue.id, place, i) for i in range(number)]
            told = [store.records[to.fingerprint, method, name] for name in names]
            return question(to, dialogue, place, number, [_spoken(to, dialogue.task, each) for each in told])

        for method in chosen:
            for place, group in groups:
                names = [question_name(dialogue.id, place, number) for dialogue, number in group]
                if any((to.fingerprint, method.spec, name) not in store.records for name in names):
                    if cache == "grow":
                        store.append(_converse(to, method, group[0][0], place, history))
                    elif history == "gold":
                        store.append(_answer(to, method, [ready[name] for name in names]))
                    else:
                        store.append(_answer(to, method, [spoken(method.spec, place, *each) for each in group]))
                done += len(group)
                if progress is not None:
                    progress("answers", done, total)
    return Path(out)


def _questions(
    to: Asked, dialogues: Sequence[Dialogue], places: Sequence[Position], history: History
) -> Iterator[Question]:
    """Every question as it will be, or, where it depends on what is said, with empty answers before it.

    Raises:
        SinkscopeError: it exceeds the context, or might after the longest answers.
    """
    for place in places:
        for dialogue in dialogues:
            answers = [turn.answers[0] if history == "gold" else "" for turn in dialogue.turns]
            for number in range(len(answers)):
                made = question(to, dialogue, place, number, answers[:number])
                if history == "model":
                    check_length(to, made, len(made.ids) + number * to.new)
                yield made


def _groups(
    dialogues: Sequence[Dialogue], history: History, cache: Caches, size: int
) -> list[list[tuple[Dialogue, int]]]:
    """Dialogues and turns that run together, in the order they run in."""
    if cache == "grow":
        return [[(dialogue, number) for number in range(len(dialogue.turns))] for dialogue in dialogues]
    if history == "gold":
        turns = [(dialogue, number) for dialogue in dialogues for number in range(len(dialogue.turns))]
        return [turns[start : start + size] for start in range(0, len(turns), size)]
    found: list[list[tuple[Dialogue, int]]] = []
    for start in range(0, len(dialogues), size):
        part = dialogues[start : start + size]
        most = max(len(dialogue.turns) for dialogue in part)
        found += [[(each, number) for each in part if number < len(each.turns)] for number in range(most)]
    return found


def _spoken(to: Asked, task: str, record: Said) -> str:
    """An answer as history. Of the recall model the end of sequence is a word of it, as in the right answers."""
    return to.target.tokenizer.decode(record.tokens) if task == TASK else record.text


def _answer(to: Asked, method: Method, batch: Sequence[Question]) -> list[Said]:
    target, started = to.target, time.perf_counter()
    ids, mask = padded(to, [each.ids for each in batch])
    reads = Reads()
    with (method.make(to.budget) | reads).on(target) as run, torch.no_grad():
        made = target.hf.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=to.new, pad_token_id=to.pad, do_sample=False
        )[:, ids.shape[1] :].tolist()
        events = run.events
    seconds = round(time.perf_counter() - started, 3)
    records: list[Said] = []
    for i, (each, row) in enumerate(zip(batch, made, strict=True)):
        tokens, ended = to.cut(row)
        records.append(
            Said(
                model=to.fingerprint,
                method=method.spec,
                prompt=each.name,
                dialogue=each.dialogue,
                position=each.position,
                turn=each.turn,
                prompt_tokens=len(each.ids),
                tokens=tuple(tokens),
                text=target.tokenizer.decode(tokens, skip_special_tokens=True),
                ended="eos" if ended else "cap",
                read=read_of(reads, i, len(tokens)),
                cells=cells_of(events, i),
                seconds=seconds,
            )
        )
    return records


def _converse(to: Asked, method: Method, dialogue: Dialogue, place: Position, history: History) -> list[Said]:
    """All turns of a dialogue on one cache."""
    chat = Conversation(to.target, method.make(to.budget), tokenizer=to.target.tokenizer, chat=to.chat)
    records: list[Said] = []
    for number, turn in enumerate(dialogue.turns):
        started, prompt = time.perf_counter(), turn.prompts[place]
        prompt = prompt if to.chat or number == 0 else f"\n\n{prompt}"
        asked_one = copy.copy(chat)  # turns replace what a conversation holds, so the one that was copied stays
        made = asked_one.ask(prompt, max_new_tokens=to.new)
        tokens, ended = to.cut(list(made.ids))
        records.append(
            Said(
                model=to.fingerprint,
                method=method.spec,
                prompt=question_name(dialogue.id, place, number),
                dialogue=dialogue.id,
                position=place,
                turn=number,
                prompt_tokens=made.prompt_tokens,
                tokens=tuple(tokens),
                text=to.target.tokenizer.decode(tokens, skip_special_tokens=True),
                ended="eos" if ended else "cap",
                read=None if made.read is None else round(made.read, 3),
                cells=cells_of(made.events, 0),
                seconds=round(time.perf_counter() - started, 3),
            )
        )
        if history == "model":
            chat = asked_one
        elif number + 1 < len(dialogue.turns):
            chat.say(prompt, turn.answers[0])
    return records
