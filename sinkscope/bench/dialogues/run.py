"""Method x position x dialogue x turn: greedy, batched, and resumable after a kill with the same table.

Every turn is a separate prompt that contains the whole conversation so far. With correct answers as the history,
methods are compared on the same texts, and a method's errors in one turn do not affect the next; with the method's own
answers, the conversation continues from what it said. Alternatively, one cache grows over the turns of a dialogue, and
what a method evicted in one turn is missing in the next.

`run_fidelity` measures how close a method stays to full attention along one text: every method reads the same prompt
and is then fed the same answer token by token, whatever it would have generated itself.

- *KL*: sum of p (log p - log q) over the vocabulary, in nats; p of full attention, q of the method, at every token of
  the answer. The first one depends on the prompt alone: it is 0 if a method does not change prompts.
- *agreement*: both have the same top prediction at that token.
- *mass kept*: of the attention that a decoding step pays with the full cache along the same text, the share that lies
  on positions that the method can read at this step, per layer and head. Methods that change only prompts keep 1.
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
from typing import Annotated, Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from sinkscope.bench.dialogues.build import build_published
from sinkscope.bench.dialogues.form import POSITIONS, Dialogue, DialogueTurn, Position, read_dialogues
from sinkscope.bench.dialogues.recall import TASK, recall_dialogues
from sinkscope.bench.dialogues.tables import (
    COMMAND,
    FIDELITY,
    TEXT,
    Dialogues,
    Fidelity,
    Near,
    Said,
    tabulate_dialogues,
    tabulate_fidelity,
)
from sinkscope.bench.files import open_folder
from sinkscope.bench.methods import SHARE, Method, at_settings, check_methods
from sinkscope.bench.published import SETS, set_of
from sinkscope.bench.runner import Asked, Batch, PerCall, ask, check_can, named_model, run_batches
from sinkscope.bench.scorers import score
from sinkscope.errors import SinkscopeError
from sinkscope.files.console import Progress
from sinkscope.files.jobs import Tally, check_workers
from sinkscope.files.options import Count, Hidden, Option, Positive, command
from sinkscope.files.records import Budget, Natural, check_values, conform, read_setting, said
from sinkscope.files.store import Folder
from sinkscope.interventions.base import Event, Intervention, Run
from sinkscope.interventions.decode import ForcedAnswer
from sinkscope.kv import Full
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.loopserve.conversation import Conversation
from sinkscope.kv.session import AttentionRows, Session
from sinkscope.models.text import typical_text
from sinkscope.models.text.chat import chat_text

History = Literal["gold", "model"]
Caches = Literal["fresh", "grow"]
VERSION = 2  # of the records; a change of what they hold is another setting


@dataclass(frozen=True)
class AskedTurn:
    """A turn with all preceding turns and answers, as tokens."""

    dialogue: str
    position: Position
    turn: int
    ids: list[int]

    @property
    def id(self) -> str:
        """Name in a folder: dialogue, position and turn."""
        return f"{self.dialogue} {self.position} {self.turn}"

    def heads(self, to: Asked, method: Method) -> dict[str, Any]:
        """The fields at the beginning of its record."""
        return {
            "model": to.fingerprint,
            "method": method.spec,
            "prompt": self.id,
            "dialogue": self.dialogue,
            "position": self.position,
            "turn": self.turn,
            "prompt_tokens": len(self.ids),
        }


@command(group="Dialogues", command="dialogues run")
def dialogues_run(
    *,
    out: Annotated[Path, Option(metavar="DIR", writes=True)],
    model: str = "recall",
    revision: str | None = None,
    backend: Literal["bridge", "hf", "nnsight"] = "hf",
    device: str | None = None,
    dtype: str | None = None,
    dialogues: Annotated[str, Option("--dialogues", metavar="FILE|TASK:FILE|recall")] = "recall",
    count: Positive | None = None,
    methods: Annotated[Sequence[str], Option("--methods", reads="commas")] = (),
    settings: Literal["paper", "equal"] | None = None,
    positions: Annotated[Sequence[str], Option("--positions", reads="commas")] = ("begin", "middle", "end"),
    budget: str | None = None,
    history: Literal["gold", "model"] = "gold",
    cache: Literal["fresh", "grow"] = "fresh",
    max_new_tokens: Positive | None = None,
    batch_size: Positive = 1,
    chat: bool = False,
    seed: Count = 0,
    workers: Positive = 1,
    ray: Annotated[str | None, Option(metavar="ADDRESS")] = None,
    progress: Hidden = None,
) -> Dialogues:
    """Answer every turn with every method. After an interruption, the same command resumes.

    Args:
        out: Folder for the answers. If it holds part of this run, the run continues.
        model: A short name, hub id or folder; recall is the bundled recall model.
        revision: Branch, tag or commit on the hub.
        backend: Load the model as this kind of object.
        device: cpu, cuda, cuda:1 or mps. By default the first CUDA device, else the CPU.
        dtype: float32, bfloat16 or float16. By default the checkpoint's.
        dialogues: A file that `dialogues build` wrote; a benchmark's file preceded by its task, such as
            longeval_topics:5_topics.jsonl; or recall, which generates dialogues for the recall model.
        count: Number of dialogues. By default 10 for recall, and all of a file.
        methods: Names separated by commas, each with optional settings (snapkv:window=32:kernel=7), or
            package.module:Class. An unknown name lists all. By default full,streaming,h2o,snapkv,tova; with --settings
            those of the paper.
        settings: paper uses LoopServe's Table 7; equal gives every method the same fraction of the context, --budget.
            By default each method has its own.
        positions: Positions of the question, separated by commas.
        budget: Cached tokens, or a fraction of the conversation such as 0.125. By default 256; 0.125 with --settings
            equal.
        history: Turns follow correct answers (gold), or the method's own (model).
        cache: Each turn rereads the whole conversation (fresh), or one cache grows over the turns (grow).
        max_new_tokens: Maximum length of an answer. By default the benchmark's for each task; 64 for recall.
        batch_size: Number of turns that run together.
        chat: Wrap turns in the tokenizer's chat template.
        seed: Seed of every random choice.
        workers: Number of processes that share the work; more than one run over Ray.
        ray: Address of a Ray cluster, for several machines. By default workers run on this machine.
        progress: Called as `progress(what, done, total)`.

    Example:
        sinkscope dialogues run --methods full,h2o --budget 128 --out runs
    """
    names, share = _methods_of(methods, settings, budget)
    some = _dialogues_of(dialogues, count, seed)

    folder = run_dialogues(
        named_model(model, backend, revision=revision, device=device, dtype=dtype),
        some,
        names,
        out=out,
        positions=positions,
        budget=share,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        chat=chat,
        history=history,
        cache=cache,
        workers=workers,
        ray=ray,
        progress=progress,
    )
    return tabulate_dialogues([folder])


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
    """Answer every turn with every method; records already in `out` are not computed again.

    Turns are grouped into batches in their given order (with the model's history: dialogues, turn after turn). An
    unfinished batch is rerun as a whole, so the records do not depend on interruptions.

    Args:
        model: Hugging Face, TransformerBridge, nnsight (dispatched) or `Target`, whole in memory; or `NamedModel`.
        dialogues: See `read_dialogues` and `recall_dialogues`.
        methods: Names in `METHODS`, with optional settings ("loopserve:alpha=0.98:first=0"), or "package.module:Class";
            see `at_settings` for those of a comparison.
        out: Folder in which settings, dialogues and records are kept.
        positions: Positions of the question: "begin", "middle", "end".
        tokenizer: Tokenizer for a model that carries none.
        budget: Cached tokens as a whole number, or a share of the conversation so far; for methods without a budget of
            their own.
        max_new_tokens: Maximum length of an answer; None uses the benchmark's for each task (the largest, if several).
        batch_size: Number of turns that run together.
        chat: Wrap turns in the tokenizer's chat template instead of separating them by empty lines.
        history: "gold": turns follow correct answers (the first of each turn). "model": turns follow the method's own.
        cache: "fresh": every turn rereads the conversation so far. "grow": one cache over the turns of a dialogue
            (`Conversation`), one dialogue at a time; an unfinished dialogue is rerun as a whole. With gold history each
            turn is answered twice from the same cache: with the method's own answer, and with the correct one.
        workers: Number of processes; more than one run over Ray.
        ray: Address of a Ray cluster; None uses the address in `RAY_ADDRESS`, or this machine.
        progress: Called as `progress("answers", done, total)`.

    Returns:
        `out`.

    Raises:
        SinkscopeError: A method, setting or position is unknown, a turn exceeds the context, a number is invalid, or
            the folder was begun with other settings or is being written.
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
    """Reject dialogues that could not be scored.

    Raises:
        SinkscopeError: The set is unknown, a library is not installed, or a set has no correct answer.
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
    """Every question as it will be asked; if it depends on generated answers, with empty answers before it.

    Raises:
        SinkscopeError: A question exceeds the context, or could do so after answers of maximum length.
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
    """Answer questions, each with the whole conversation read from the start."""
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
                read=read_of(count.found, i, len(tokens)),
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
        asked_one = copy.copy(talk)  # turns replace the conversation's contents, so the copied one is unchanged
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
    """A turn preceded by the earlier turns and their answers.

    Raises:
        SinkscopeError: With an answer, it exceeds the context.
    """
    said = [
        text for turn, answer in zip(dialogue.turns, answers, strict=False) for text in (turn.prompts[place], answer)
    ]
    made = AskedTurn(dialogue.id, place, number, encode(to, [*said, dialogue.turns[number].prompts[place]], chat))
    check_length(to, made, len(made.ids))
    return made


def check_length(to: Asked, made: AskedTurn, tokens: int) -> None:
    """Reject a turn that does not fit.

    Raises:
        SinkscopeError: This number of tokens and an answer exceed the context.
    """
    to.target.check_length(
        f"dialogue {made.dialogue!r}, turn {made.turn + 1}, question at {made.position}: the text",
        tokens,
        to.new,
        "give shorter or fewer turns",
    )


def encode(to: Asked, said: Sequence[str], chat: bool) -> list[int]:
    """Encode a conversation of alternating prompts and answers that ends with a prompt."""
    tokenizer = to.target.tokenizer
    if not chat:
        return [int(i) for i in tokenizer("\n\n".join(said), verbose=False)["input_ids"]]
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    text = chat_text(tokenizer, messages, to.target.name)
    return [int(i) for i in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]


def reads() -> PerCall:
    """Counts the readable tokens after every call, per row: mean over layers and kv heads."""
    return PerCall(
        lambda layers: torch.stack([each.readable.sum(-1).float().mean(1).cpu() for each in layers]).mean(0), own=True
    )


def read_of(counts: Sequence[Tensor], row: int, tokens: int) -> float | None:
    """Mean number of cached tokens that an answer's decoding steps attended to; None for an answer of one token."""
    steps = [float(count[row]) for count in counts[1:tokens]]  # the last token goes through no call
    return round(fmean(steps), 3) if steps else None


def cells_of(events: Sequence[Event], row: int) -> float | None:
    """Share of a prompt's causal cells that were covered, mean over layers and heads; None if prompts are unchanged."""
    data = [event.data for event in events if event.kind == "prefill" and event.row == row]
    return round(fmean(float(each.get("attended", 1.0)) for each in data), 4) if data else None


def check_given(
    dialogues: Sequence[Dialogue], methods: Sequence[str], positions: Sequence[str], budget: Budget, **sizes: Any
) -> tuple[tuple[Method, ...], tuple[Position, ...]]:
    """The methods and positions without duplicates.

    Raises:
        SinkscopeError: A list is empty or has an unknown name, a size is below 1, or a method does not accept its
            settings.
    """
    chosen, places = check_methods(methods, ["cache"]), check_positions(positions)
    if not dialogues:
        raise SinkscopeError("there are no dialogues: give at least one")
    check_values(Natural | None, **sizes)
    for method in chosen:
        method.make(budget)
    return chosen, places


def check_positions(positions: Sequence[str]) -> tuple[Position, ...]:
    """The positions without duplicates, in the order begin, middle, end.

    Raises:
        SinkscopeError: The list is empty, or has an unknown position.
    """
    conform(
        Annotated[tuple[Position, ...], Field(min_length=1), said(f"some of {', '.join(POSITIONS)}")],
        tuple(positions),
        "positions=",
        strict=True,
    )
    return tuple(place for place in POSITIONS if place in positions)


Along = Literal["full", "gold"]
NEAR_VERSION = 1  # of the records of fidelity


def text_dialogues(
    tokenizer: Any, count: int = 8, *, prompt_tokens: int = 512, answer_tokens: int = 64, text: str | None = None
) -> tuple[Dialogue, ...]:
    """Consecutive pieces of a text as dialogues of one turn; the correct answer is the continuation of the text.

    Args:
        tokenizer: Measures the pieces.
        count: Number of pieces.
        prompt_tokens: Tokens per prompt.
        answer_tokens: Tokens of the answer that follows.
        text: The text. None uses the bundled text, which the bundled model was not trained on.

    Raises:
        SinkscopeError: The text is too short.
    """
    whole = typical_text() if text is None else text
    ids = tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"]
    length = prompt_tokens + answer_tokens
    if len(ids) < count * length:
        raise SinkscopeError(
            f"the text has {len(ids)} tokens, and {count} pieces of {prompt_tokens} + {answer_tokens} are wanted: give "
            f"at most {len(ids) // length}, shorter ones, or a longer text"
        )
    found: list[Dialogue] = []
    for number in range(count):
        piece = ids[number * length : (number + 1) * length]
        prompt, answer = tokenizer.decode(piece[:prompt_tokens]), tokenizer.decode(piece[prompt_tokens:])
        turn = DialogueTurn({place: prompt for place in POSITIONS}, (answer,), (0,))
        found.append(Dialogue(f"{TEXT}-{number}", TEXT, (turn,)))
    return tuple(found)


@command(group="Dialogues", command="dialogues fidelity")
def dialogues_fidelity(
    *,
    out: Annotated[Path, Option(metavar="DIR", writes=True)],
    model: str | None = None,
    revision: str | None = None,
    backend: Literal["bridge", "hf", "nnsight"] = "hf",
    device: str | None = None,
    dtype: str | None = None,
    dialogues: Annotated[str, Option("--dialogues", metavar="FILE|TASK:FILE|recall|text")] = "recall",
    count: Positive | None = None,
    along: Literal["full", "gold"] | None = None,
    methods: Annotated[Sequence[str], Option("--methods", reads="commas")] = (),
    settings: Literal["paper", "equal"] | None = None,
    positions: Annotated[Sequence[str], Option("--positions", reads="commas")] = (),
    budget: str | None = None,
    prompt_tokens: Positive | None = None,
    answer_tokens: Positive = 64,
    batch_size: Positive = 1,
    chat: bool = False,
    seed: Count = 0,
    workers: Positive = 1,
    ray: Annotated[str | None, Option(metavar="ADDRESS")] = None,
    progress: Hidden = None,
) -> Fidelity:
    """Compare methods with full attention along the same text: KL, top-1 agreement, and the attention mass kept.

    Args:
        out: Folder for the numbers. If it holds part of this run, the run continues.
        model: A short name, hub id or folder. By default the bundled recall model; for text the bundled model.
        revision: Branch, tag or commit on the hub.
        backend: Load the model as this kind of object.
        device: cpu, cuda, cuda:1 or mps. By default the first CUDA device, else the CPU.
        dtype: float32, bfloat16 or float16. By default the checkpoint's.
        dialogues: A file that `dialogues build` wrote; a benchmark's file preceded by its task, such as
            longeval_topics:5_topics.jsonl; recall; or text, which uses pieces of the bundled text.
        count: Number of dialogues. By default 10 for recall, 8 for text, and all of a file.
        along: Compare along the full cache's answers (full) or the correct ones (gold). By default full; gold for text.
        methods: Names separated by commas, each with optional settings (snapkv:window=32:kernel=7), or
            package.module:Class. An unknown name lists all. By default full,streaming,h2o,snapkv,tova; with --settings
            those of the paper.
        settings: paper uses LoopServe's Table 7; equal gives every method the same fraction of the context, --budget.
            By default each method has its own.
        positions: Positions of the question, separated by commas. By default end.
        budget: Cached tokens, or a fraction of the conversation such as 0.125. By default 256; 0.125 with --settings
            equal.
        prompt_tokens: For text: tokens per prompt. By default 512.
        answer_tokens: Longer answers are cut to this length.
        batch_size: Number of turns that run together.
        chat: Wrap turns in the tokenizer's chat template.
        seed: Seed of every random choice.
        workers: Number of processes that share the work; more than one run over Ray.
        ray: Address of a Ray cluster, for several machines. By default workers run on this machine.
        progress: Called as `progress(what, done, total)`.

    Example:
        sinkscope dialogues fidelity --dialogues text --out near
    """
    names, share = _methods_of(methods, settings, budget)

    places, texts = check_positions(positions or ("end",)), dialogues == TEXT
    if texts and positions:
        raise SinkscopeError(f"--positions {','.join(positions)}: pieces of a text have no question; leave it out")
    if not texts and prompt_tokens is not None:
        raise SinkscopeError(f"--prompt-tokens {prompt_tokens} is of --dialogues text: leave it out for {dialogues}")
    some = () if texts else _dialogues_of(dialogues, count, seed)
    opened: Any = named_model(
        model or (None if texts else TASK), backend, revision=revision, device=device, dtype=dtype
    )
    if texts:
        opened = opened.open()
        if (tokenizer := opened.tokenizer) is None:
            raise SinkscopeError("--dialogues text needs a model with a tokenizer: give one that carries it")
        some = text_dialogues(tokenizer, count or 8, prompt_tokens=prompt_tokens or 512, answer_tokens=answer_tokens)
    folder = run_fidelity(
        opened,
        some,
        names,
        out=out,
        along=along or ("gold" if texts else "full"),
        positions=places,
        budget=share,
        max_new_tokens=answer_tokens,
        batch_size=batch_size,
        chat=chat,
        workers=workers,
        ray=ray,
        progress=progress,
    )
    return tabulate_fidelity([folder])


def _methods_of(methods: Sequence[str], settings: Any, budget: str | None) -> tuple[Sequence[str], Budget]:
    """Methods as they are written, and the budget of those that have none of their own."""
    if settings == "paper" and budget is not None:
        raise SinkscopeError(f"--budget {budget}: --settings paper has budgets of its own; give one of them")
    usual = {None: "256", "paper": "1024", "equal": str(SHARE)}[settings]
    share = read_setting(budget or usual, Budget, "--budget ")
    names = methods or ("full", "streaming", "h2o", "snapkv", "tova")
    check_methods(names, ["cache"])
    if settings is not None:
        names = at_settings(methods, settings, share if settings == "equal" else SHARE)
    return names, share


def _dialogues_of(source: str, count: int | None, seed: int) -> tuple[Dialogue, ...]:
    """The dialogues of a file, or those of the recall model."""
    if source == TASK:
        return recall_dialogues(count or 10, seed=seed)
    task, colon, file = source.partition(":")
    if colon and task in SETS:
        return build_published(task, file, count=count).made
    found = read_dialogues(source)
    if count is not None and count > len(found):
        raise SinkscopeError(f"--count {count}: {Path(source).name} has {len(found)} dialogues")
    return found[:count]


def run_fidelity(
    model: object,
    dialogues: Sequence[Dialogue],
    methods: Sequence[str],
    *,
    out: str | os.PathLike[str],
    along: Along = "full",
    positions: Sequence[str] = ("end",),
    tokenizer: Any = None,
    budget: Budget = 256,
    max_new_tokens: int = 64,
    batch_size: int = 1,
    chat: bool = False,
    workers: int = 1,
    ray: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Compare methods with full attention, token by token; records already in `out` are not computed again.

    Full attention reads every prompt twice: as the reference, and to weigh the positions that each method left
    readable. These positions are stored as one bit per method, step, layer, kv head and token.

    Args:
        model: Hugging Face, TransformerBridge, nnsight (dispatched) or `Target`, whole in memory; or `NamedModel`.
        dialogues: See `read_dialogues`, `recall_dialogues` and `text_dialogues`; correct answers are the history.
        methods: As for `run_dialogues`.
        out: Folder in which settings, dialogues and records are kept.
        along: "full": the greedy answer of the full cache. "gold": the (first) correct one.
        positions: Positions of the question: "begin", "middle", "end".
        tokenizer: Tokenizer for a model that carries none.
        budget: As for `run_dialogues`.
        max_new_tokens: Longer answers are cut to this length.
        batch_size: Number of turns that run together.
        chat: Wrap turns in the tokenizer's chat template.
        workers: Number of processes; more than one run over Ray.
        ray: Address of a Ray cluster; None uses the address in `RAY_ADDRESS`, or this machine.
        progress: Called as `progress("answers", done, total)`.

    Returns:
        `out`.

    Raises:
        SinkscopeError: As for `run_dialogues`, and if a correct answer has no token.
    """
    sizes = {"max_new_tokens": max_new_tokens, "batch_size": batch_size}
    chosen, places = check_given(dialogues, methods, positions, budget, **sizes)
    if along not in get_args(Along):
        raise SinkscopeError(f"along={along!r}: expected one of {', '.join(get_args(Along))}")
    check_workers(workers, ray)
    to = ask(model, tokenizer, max_new_tokens, budget, chat)
    rows = [
        (made, _gold(to, made, dialogue.turns[made.turn].answers[0]) if along == "gold" else None)
        for place in places
        for made, dialogue in _questions(to, dialogues, place, "gold", chat)
    ]
    check_can(to, chosen, [len(each.ids) for each, _ in rows])
    settings = {"version": NEAR_VERSION, "command": FIDELITY, **to.settings(), "chat": chat, "along": along}
    tally = Tally("answers", len(rows) * len(chosen), progress)
    with open_folder(out, {**settings, "history": "gold"}, dialogues, Near) as kept:
        batches: list[Batch] = []
        for start in range(0, len(rows), batch_size):
            some = tuple(rows[start : start + batch_size])
            each = {method: Batch(to.fingerprint, (method,), some) for method in chosen}
            there = tuple(method for method, batch in each.items() if kept.records.keys() >= {*batch.keys})
            missing = tuple(method for method in chosen if method not in there)
            batches += [Batch(to.fingerprint, part, some) for part in (there, missing) if part]
        run_batches(to, [batches], answer_along, kept, tally, model=model, workers=workers, ray=ray)
    return Path(out)


def _gold(to: Asked, each: AskedTurn, answer: str) -> list[int]:
    ids = to.target.tokenizer(answer, add_special_tokens=False, verbose=False)["input_ids"]
    cut = to.cut([int(i) for i in ids][: to.new])[0]
    if not cut:
        raise SinkscopeError(
            f'dialogue {each.dialogue!r}, turn {each.turn + 1}: its right answer has no tokens; give along="full"'
        )
    return cut


def answer_along(to: Asked, batch: Batch) -> list[Near]:
    """Run full attention, every method, and full attention again to weigh the positions they left readable.

    Args:
        to: The model, whole in memory.
        batch: Its rows pair an `AskedTurn` with the ids of its answer; None uses the answer of full attention.
    """
    rows = [each.ids for each, _ in batch.rows]
    answers = None if batch.rows[0][1] is None else [answer for _, answer in batch.rows]
    full = _Logits()
    made = _say(to, rows, answers, Full(), full)[0]
    told = [to.cut(row)[0] for row in made] if answers is None else answers
    left: list[PerCall] = []
    found: list[tuple[Method, _Logits, PerCall, list[Event], float]] = []
    for method in batch.methods:
        started = time.perf_counter()
        logits, count, readable = _Logits(full.values), reads(), PerCall(_bits, own=True)
        events = _say(to, rows, told, method.make(to.budget) | count | readable, logits)[1]
        left.append(readable)
        found.append((method, logits, count, events, round(time.perf_counter() - started, 3)))
    weigh = _Weigh(left)
    _say(to, rows, told, Full() | weigh)
    return [
        Near(
            **each.heads(to, method),
            kl=tuple(round(float(step[row]), 6) for step in logits.kl[: len(answer)]),
            agree=tuple(bool(step[row]) for step in logits.agree[: len(answer)]),
            kept=tuple(round(step[row], 6) for step in kept[: len(answer) - 1]),
            read=read_of(count.found, row, len(answer)),
            cells=cells_of(events, row),
            seconds=seconds,
        )
        for (method, logits, count, events, seconds), kept in zip(found, weigh.kept(), strict=True)
        for row, ((each, _), answer) in enumerate(zip(batch.rows, told, strict=True))
    ]


def _say(
    to: Asked, rows: list[list[int]], answers: list[list[int]] | None, edit: Intervention, logits: _Logits | None = None
) -> tuple[list[list[int]], list[Event]]:
    """New tokens and events; with `answers` it says these, whatever it would have said."""
    if answers is None:
        return to.generate(rows, edit, logits)
    told = ForcedAnswer(answers, max(map(len, rows)), to.pad)
    return to.generate(rows, edit, logits, max(map(len, answers)), logits_processor=[told])


class _Logits:
    """Of every step, as the model gives them; or, beside those of full attention, how far they are from them."""

    def __init__(self, full: list[Tensor] | None = None) -> None:
        self.values: list[Tensor] = []  # [batch vocab]
        self.kl: list[Tensor] = []  # [batch]
        self.agree: list[Tensor] = []
        self._full = full

    def __call__(self, _module: Any, _args: Any, _kwargs: Any, output: Any) -> None:
        logits = output.logits[:, -1].float()
        if self._full is None:
            self.values.append(logits)
            return
        full = self._full[len(self.kl)]
        self.kl.append(divergence(full, logits).cpu())
        self.agree.append((full.argmax(-1) == logits.argmax(-1)).cpu())


def divergence(full: Float[Tensor, "batch vocab"], other: Float[Tensor, "batch vocab"]) -> Float[Tensor, " batch"]:
    """KL(full || other) between two rows of logits, in nats."""
    p, q = full.double().log_softmax(-1), other.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).clamp(min=0)


def _bits(layers: Sequence[CacheLayer]) -> list[Any]:
    """Which true positions each kv head could read, by layer: `[batch kv_head bit]`."""
    return [np.packbits(_there(layer).cpu().numpy(), axis=-1) for layer in layers]


def _there(layer: CacheLayer) -> Bool[Tensor, "batch _ pos"]:
    """Positions that hold a token which is not hidden, by kv head, or by query head if each hides its own."""
    there = layer.readable
    pos = layer.pos.repeat_interleave(there.shape[1] // layer.pos.shape[1], 1)
    found = torch.zeros(*pos.shape[:2], layer.seen + 1, dtype=torch.bool, device=pos.device)
    return found.scatter_(-1, pos.masked_fill(~there, layer.seen), True)[..., : layer.seen]


class _Weigh(Intervention):
    """Of what full attention pays in every decoding step, the share on positions that others left readable."""

    def __init__(self, left: list[PerCall]) -> None:
        self._left = left
        self._sums: list[list[Tensor]] = [[] for _ in left]  # per step, over layers
        self._calls = self._layers = 0

    def enter(self, run: Run, key: int) -> None:
        """Observe the newest query of every layer."""
        session = Session.of(run)
        session.own_cache()
        session.watch(self._add, last=1)
        session.after_call(lambda moment: self._next(len(moment.layers)))

    def kept(self) -> list[list[list[float]]]:
        """For each method, per step and row: mean over layers and heads."""
        return [[(total / self._layers).tolist() for total in sums] for sums in self._sums]

    def _next(self, layers: int) -> None:
        self._calls, self._layers = self._calls + 1, layers

    def _add(self, rows: AttentionRows) -> None:
        if not self._calls:  # the prompt
            return
        for left, sums in zip(self._left, self._sums, strict=True):
            bits = torch.from_numpy(np.unpackbits(left.found[self._calls][rows.layer], axis=-1)).to(rows.pos.device)
            paid = rows.probs[:, :, -1].double().unflatten(1, (bits.shape[1], -1))
            pos = rows.pos.repeat_interleave(bits.shape[1] // rows.pos.shape[1], 1)
            there = bits.gather(-1, pos.clamp(min=0)) > 0  # nothing is paid to padding
            share = (paid * there[:, :, None]).sum(-1) / paid.sum(-1)
            if len(sums) < self._calls:
                sums.append(torch.zeros(len(paid), dtype=torch.float64))
            sums[-1] += share.mean((1, 2)).cpu()
