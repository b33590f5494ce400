"""Method x position x dialogue x turn: greedy, batched, and resumed after a kill with the same table.

Every turn is a prompt of its own: the whole conversation so far, with right answers as the history, is read anew, so
that methods are compared on the same texts and a method's loss in one turn is not carried into the next.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sinkscope.bench.dialogues.form import POSITIONS, Dialogue, Position
from sinkscope.bench.dialogues.methods import METHODS, Budget, check_methods
from sinkscope.bench.dialogues.metrics import score
from sinkscope.bench.dialogues.recall import TASK
from sinkscope.bench.dialogues.tasks import Metric, task_of
from sinkscope.bench.loopbench.store import Finished, Folder
from sinkscope.errors import SinkscopeError
from sinkscope.generate import check_budget
from sinkscope.interventions.base import Intervention, Run
from sinkscope.kv.loopserve.serve import LoopServe
from sinkscope.models.target import Target
from sinkscope.results import ModelInfo
from sinkscope.sinks._open import fingerprint_of

Progress = Callable[[str, int, int], None]
COMMAND = "dialogues"
VERSION = 1  # of the records; a change of what they hold is another setting
NEW = {
    "narrativeqa": 128, "qasper": 128, "multifieldqa_en": 64, "hotpotqa": 32, "2wikimqa": 32, "musique": 32,
    "multi_news": 512, "gov_report": 512, "qmsum": 512, "trec": 64, "samsum": 128, TASK: 64,
}  # fmt: skip
"""New tokens by task, LongBench's own numbers; of the recall model as many as 21 hops take."""


@dataclass(frozen=True)
class Said(Finished):
    """What one method said in one turn; `prompt` names dialogue, position and turn.

    Attributes:
        dialogue: its id.
        position: of the question in the turns' prompts.
        turn: 0-based.
        prompt_tokens: of the conversation up to the answer, BOS included.
        tokens: ids of the answer, up to and with the end of sequence if it came.
        text: the same decoded.
        ended: by the end of sequence, or at the cap of new tokens.
        read: cached tokens that a decoding step attends to, its own included, mean over the answer's tokens after the
            first, layers and kv heads; None: the answer is one token, which the whole prompt gives.
        seconds: wall clock of the batch it ran in.
    """

    dialogue: str
    position: Position
    turn: int
    prompt_tokens: int
    tokens: tuple[int, ...]
    text: str
    ended: Literal["eos", "cap"]
    read: float | None
    seconds: float


@dataclass(frozen=True)
class _Question:
    dialogue: str
    position: Position
    turn: int
    ids: list[int]

    @property
    def name(self) -> str:
        return f"{self.dialogue} {self.position} {self.turn}"


@dataclass(frozen=True)
class _Plan:
    target: Target
    fingerprint: str
    ends: frozenset[int]
    pad: int
    new: int
    budget: Budget


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
    progress: Progress | None = None,
) -> Path:
    """Answer every turn by every method; what is in `out` already is not done again.

    Turns are cut into batches in the order they come in, and a batch that was not finished is run again whole, so the
    records are the same whatever was killed.

    Args:
        model: Hugging Face, TransformerBridge, nnsight (dispatched) or `Target`, whole in memory.
        dialogues: see `read_dialogues` and `recall_dialogues`.
        methods: names in `METHODS`.
        out: folder; settings, dialogues and records are kept there.
        positions: of the question: "begin", "middle", "end".
        tokenizer: where the model carries none.
        budget: of cached tokens, a whole number, or a share of the conversation so far.
        max_new_tokens: cap of an answer; None: LongBench's for each task (the largest, if there are several).
        batch_size: turns that run together.
        chat: wrap turns in the tokenizer's chat template, instead of empty lines between them.
        progress: called as `progress("answers", done, total)`.

    Returns:
        `out`.

    Raises:
        SinkscopeError: an unknown method or position, a turn that exceeds the context, bad numbers, a folder that was
            begun with other settings or is being written.
    """
    names, places = check_methods(methods), check_positions(positions)
    if not dialogues:
        raise SinkscopeError("there are no dialogues: give at least one")
    tasks = sorted({dialogue.task for dialogue in dialogues})
    for task in tasks:  # what could not be scored is not begun
        score(metric_of(task), "", [""])
    new = max_new_tokens if max_new_tokens is not None else max(NEW[task] for task in tasks)
    for name, value in (("max_new_tokens", new), ("batch_size", batch_size)):
        if isinstance(value, bool) or value < 1:
            raise SinkscopeError(f"{name}={value!r}: expected a whole number from 1")
    edits = [METHODS[name](budget) for name in names]
    target = Target.of(model, tokenizer)
    if target.tokenizer is None:
        raise SinkscopeError(
            f"{target.name} carries no tokenizer: give tokenizer=..., or put the tokenizer's files beside the weights",
            page="no-tokenizer",
        )
    if chat and not getattr(target.tokenizer, "chat_template", None):
        raise SinkscopeError(f"the tokenizer of {target.name} has no chat template: leave out chat")
    plan = _plan(target, new, budget)
    questions = {place: _questions(dialogues, place, plan, chat) for place in places}
    for edit in edits:  # what cannot be done is refused before anything is computed
        part = edit.decoding if isinstance(edit, LoopServe) else edit
        for question in (q for each in questions.values() for q in each):
            check_budget(part, len(question.ids))
        with edit.on(target):
            pass
    batches = [
        (name, part[start : start + batch_size])
        for name in names
        for part in questions.values()
        for start in range(0, len(part), batch_size)
    ]
    done, total = 0, len(names) * sum(map(len, questions.values()))
    settings = _settings(plan, chat)
    with Folder(out, settings, [asdict(dialogue) for dialogue in dialogues], Said) as store:
        for name, batch in batches:
            if any((plan.fingerprint, name, question.name) not in store.records for question in batch):
                store.append(_answer(plan, name, batch))
            done += len(batch)
            if progress is not None:
                progress("answers", done, total)
    return Path(out)


def metric_of(task: str) -> Metric:
    """What answers of a set are scored by.

    Raises:
        SinkscopeError: no such set.
    """
    return "exact" if task == TASK else task_of(task).metric


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


def _questions(dialogues: Sequence[Dialogue], place: Position, plan: _Plan, chat: bool) -> list[_Question]:
    """Every turn with what was said before it, as tokens."""
    target, found = plan.target, list[_Question]()
    for dialogue in dialogues:
        said: list[str] = []
        for number, turn in enumerate(dialogue.turns):
            said.append(turn.prompts[place])
            ids = _encode(target.tokenizer, said, chat)
            limit = target.max_positions
            if limit is not None and len(ids) + plan.new > limit:
                raise SinkscopeError(
                    f"dialogue {dialogue.id!r}, turn {number + 1}, question at {place}: {len(ids)} tokens and "
                    f"{plan.new} new ones exceed the context of {target.name}, {limit}: give shorter or fewer turns"
                )
            found.append(_Question(dialogue.id, place, number, ids))
            said.append(turn.answers[0])
    return found


def _encode(tokenizer: Any, said: Sequence[str], chat: bool) -> list[int]:
    if not chat:
        return [int(i) for i in tokenizer("\n\n".join(said), verbose=False)["input_ids"]]
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return [int(i) for i in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]


def _answer(plan: _Plan, method: str, batch: Sequence[_Question]) -> list[Said]:
    target, started = plan.target, time.perf_counter()
    lengths, width = [len(question.ids) for question in batch], max(len(question.ids) for question in batch)
    rows = [[plan.pad] * (width - len(question.ids)) + question.ids for question in batch]
    mask = [[0] * (width - length) + [1] * length for length in lengths]
    reads = _Reads()
    with (METHODS[method](plan.budget) | reads).on(target), torch.no_grad():
        made = target.hf.generate(
            input_ids=torch.tensor(rows, device=target.device),
            attention_mask=torch.tensor(mask, device=target.device),
            max_new_tokens=plan.new, pad_token_id=plan.pad, do_sample=False,
        )[:, width:].tolist()  # fmt: skip
    counts = torch.stack(reads.counts, 1).tolist()
    seconds = round(time.perf_counter() - started, 3)
    records: list[Said] = []
    for question, row, count in zip(batch, made, counts, strict=True):
        end = next((k + 1 for k, token in enumerate(row) if token in plan.ends), None)
        tokens = row[:end]
        steps = count[1 : len(tokens)]  # the first call reads the prompt; the last token goes through no call
        records.append(
            Said(
                model=plan.fingerprint, method=method, prompt=question.name, dialogue=question.dialogue,
                position=question.position, turn=question.turn, prompt_tokens=len(question.ids), tokens=tuple(tokens),
                text=target.tokenizer.decode(tokens, skip_special_tokens=True),
                ended="cap" if end is None else "eos",
                read=round(sum(steps) / len(steps), 3) if steps else None, seconds=seconds,
            )
        )  # fmt: skip
    return records


class _Reads(Intervention):
    """Counts, after every call and per row, the tokens that it could attend to."""

    def __init__(self) -> None:
        self.counts: list[Tensor] = []

    def enter(self, run: Run, key: int) -> None:
        from sinkscope.kv.session import Session

        def note(moment: Any) -> None:
            shown = [layer.pos >= 0 if layer.hidden is None else (layer.pos >= 0) & ~layer.hidden
                     for layer in moment.layers]  # fmt: skip
            self.counts.append(torch.stack([there.sum(-1).float().mean(1).cpu() for there in shown]).mean(0))

        Session.of(run).after_call(note)


def _plan(target: Target, new: int, budget: Budget) -> _Plan:
    end = getattr(target.hf.generation_config, "eos_token_id", None)
    ends = frozenset(end if isinstance(end, list | tuple) else [] if end is None else [int(end)])
    pad = target.tokenizer.pad_token_id
    return _Plan(target, fingerprint_of(target), ends, min(ends, default=0) if pad is None else int(pad), new, budget)


def _settings(plan: _Plan, chat: bool) -> dict[str, Any]:
    """Everything that decides a record, but for its method and prompt."""
    t = plan.target
    return {
        "version": VERSION, "command": COMMAND, "model": asdict(ModelInfo(
            t.name, t.config.model_type, t.n_layers, t.d_model, t.d_mlp, plan.fingerprint
        )),
        "kind": t.kind, "device": t.device.type, "dtype": str(t.dtype).removeprefix("torch."),
        "attention": str(getattr(t.config, "_attn_implementation", "unknown")), "max_new_tokens": plan.new,
        "budget": plan.budget, "history": "right answers", "chat": chat,
    }  # fmt: skip
