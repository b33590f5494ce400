"""Generate answers to a batch of prompts under one method, and measure what each answer cost."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sinkscope.bench.record import Answer, BenchRecord, EndReason, Metrics, Prompt
from sinkscope.engine.actor import Actor
from sinkscope.engine.run import Event, Run
from sinkscope.engine.step import Step, TakeBack
from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import plain
from sinkscope.generation.decode import Processor, decoding, forced_answers, padding_of, to_end
from sinkscope.hooks.edit.base import Intervention, under
from sinkscope.kv.keeper import CacheKeeper, held_tokens
from sinkscope.models.inputs import end_ids
from sinkscope.models.target import Target, tokenizer_of
from sinkscope.models.text.chat import chat_text


def conversation_ids(target: Target, prompt: Prompt, turn: int, chat: bool = False) -> list[int]:
    """Return the ids that are read before a turn is answered: all turns up to it, the earlier ones with answers.

    Without a chat template, they are separated by empty lines.

    Raises:
        SinkscopeError: An earlier turn has no answer.
    """
    texts: list[str] = []
    for number, earlier in enumerate(prompt.turns[:turn], 1):
        if not earlier.answers:
            raise SinkscopeError(f"prompt {prompt.id!r}: turn {number} has no answer for the turns after it: give one")
        texts += [earlier.text, earlier.answers[0]]
    texts.append(prompt.turns[turn].text)
    tokenizer = tokenizer_of(target)
    text = "\n\n".join(texts)
    if chat:
        roles = cycle(["user", "assistant"])
        messages = [{"role": role, "content": part} for role, part in zip(roles, texts, strict=False)]
        text = chat_text(tokenizer, messages, target.name)
    return list(tokenizer(text, add_special_tokens=not chat, verbose=False)["input_ids"])


@dataclass(frozen=True)
class Batch:
    """Some prompts and the methods that answer them; a batch is run completely or not at all.

    Attributes:
        methods: Methods that answer; several only if the task compares them in one pass.
        prompts: The prompts.
        new: Maximum tokens per answer.
        temperature: Sampling temperature; 0 is greedy.
        seed: Seed of the sampling.
    """

    methods: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    new: int
    temperature: float = 0.0
    seed: int = 0

    @property
    def keys(self) -> list[tuple[Any, ...]]:
        """Keys of the records that the batch produces."""
        keys: list[tuple[Any, ...]] = []
        for method in self.methods:
            for prompt in self.prompts:
                keys += [(method, prompt.id, turn, self.seed) for turn in prompt.scored_turns]
        return keys

    def record(self, method: str, prompt: Prompt, turn: int, answer: Answer, metrics: Metrics) -> BenchRecord:
        """Return the record of an answer."""
        about = {"method": method, "prompt": prompt.id, "turn": turn, "seed": self.seed}
        about |= {"set": prompt.set, "part": prompt.part}
        answered: dict[str, Any] = vars(answer) | {"metrics": metrics | answer.metrics}
        return BenchRecord(**about, **answered)


Logits = Float[Tensor, "row vocab"]


def answer_rows(
    target: Target,
    rows: Sequence[list[int]],
    new: int,
    edit: Intervention | None = None,
    *,
    sampler: Processor | None = None,
    along: Sequence[list[int]] = (),
    logits: list[Logits] | None = None,
) -> list[Answer]:
    """Answer prompts, which are padded on the left.

    Args:
        target: The model.
        rows: Ids of the prompts.
        new: Maximum number of new tokens.
        edit: The intervention to apply to the model. None: the model's own full cache.
        sampler: What draws tokens and forbids all others; without it, decoding is greedy.
        along: The answers, whatever the model would have generated.
        logits: Gets the model's logits at each step.
    """
    started = time.perf_counter()
    ids, mask = padded_rows(target, rows)
    pad = padding_of(target)
    options = decoding(target, do_sample=False, pad_token_id=pad)
    options["do_sample"] = sampler is not None  # by which edits know whether tokens are drawn
    processors = processors_of(sampler, logits)
    if along:
        new = max(map(len, along))
        processors.append(forced_answers(padded(along, new, pad), ids.shape[1]))
    options["logits_processor"] = processors
    held = _HeldAfterCalls()
    with under(None if edit is None else edit | held, target) as run, torch.no_grad():
        output = target.hf.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new, **options)
    seconds = (time.perf_counter() - started) / len(rows)
    written = [to_end(ids_of_row, end_ids(target)) for ids_of_row in output[:, ids.shape[1] :].tolist()]
    events = [] if run is None else run.events
    answers: list[Answer] = []
    for row, tokens in enumerate(along or written):
        n_prompt = len(rows[row])
        n_written = len(tokens)
        costs = CacheCosts.of_full_cache(n_prompt, n_written) if run is None else held.costs(row, n_written)
        metrics = metrics_of(costs, events, row, n_prompt=n_prompt, n_written=n_written, seconds=seconds)
        answers.append(answer_of(target, tokens, metrics, row_events(events, row, n_written), is_given=bool(along)))
    return answers


def answer_of(
    target: Target, tokens: Sequence[int], metrics: Metrics, events: tuple[dict[str, Any], ...], *, is_given: bool
) -> Answer:
    """Return an answer: one that is given ends at its last token, whatever that is."""
    ended: EndReason = "cap"
    if tokens[-1] in end_ids(target) and not is_given:
        ended = "eos"
    text = tokenizer_of(target).decode(tokens, skip_special_tokens=True)
    return Answer(tokens=tuple(tokens), text=text, ended=ended, metrics=metrics, events=events)


def padded(answers: Sequence[list[int]], length: int, pad: int) -> list[list[int]]:
    """Return answers of one length, with padding after them."""
    return [[*answer, *[pad] * (length - len(answer))] for answer in answers]


def padded_rows(target: Target, rows: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """Return prompts as one tensor, padded on the left, and a mask with 1 at their tokens."""
    ids = [torch.tensor(row, device=target.device) for row in rows]
    mask = [torch.ones_like(row) for row in ids]
    padded = pad_sequence(ids, batch_first=True, padding_value=padding_of(target), padding_side="left")
    return padded, pad_sequence(mask, batch_first=True, padding_side="left")


def processors_of(sampler: Processor | None, logits: list[Logits] | None) -> list[Processor]:
    """Return what keeps logits, if they are asked for, and then what draws tokens, if they are drawn."""
    processors: list[Processor] = [] if logits is None else [partial(_keep_logits, logits)]
    if sampler is not None:
        processors.append(sampler)
    return processors


def _keep_logits(logits: list[Logits], _: Any, scores: Logits) -> Logits:
    """A processor that keeps the model's own logits."""
    logits.append(scores)
    return scores


@dataclass(frozen=True)
class CacheCosts:
    """What the cache holds of a row after each decoding step, and what of it is read.

    Attributes:
        held: Number of tokens that the cache holds.
        read: Number of tokens that attention reads.
    """

    held: list[float]
    read: list[float]

    @classmethod
    def of_full_cache(cls, n_prompt: int, n_written: int) -> CacheCosts:
        """Return the costs of a full cache; the first token is the prompt's."""
        counts = [float(count) for count in range(n_prompt + 1, n_prompt + n_written)]
        return cls(counts, counts)


def metrics_of(
    costs: CacheCosts, events: Sequence[Event], row: int, *, n_prompt: int, n_written: int, seconds: float
) -> Metrics:
    """Return what an answer cost.

    Args:
        costs: What the cache held and what was read.
        events: The events of all rows.
        row: Number of the row.
        n_prompt: Tokens of its prompt.
        n_written: Tokens of its answer.
        seconds: Time of the batch, divided by its rows.
    """
    full = CacheCosts.of_full_cache(n_prompt, n_written).read
    lossy = [count < of_full - 1e-6 for count, of_full in zip(costs.read, full, strict=False)]
    return {
        "prompt_tokens": n_prompt,
        "length": n_written,
        "read": mean_known(costs.read),
        "cells": cells_of(events, row),
        "cached_peak": max(costs.held, default=None),
        "seconds": seconds,
        "first_lossy": lossy.index(True) + 1 if any(lossy) else None,
    }


@dataclass(eq=False)
class _HeldAfterCalls(Intervention, Actor):
    """Notes what the cache holds, and what of it is read, after each decoding step; it is entered last."""

    reads_logits = True  # when a guard, which does, has cut

    held: list[Tensor] = field(default_factory=list)
    read: list[Tensor] = field(default_factory=list)

    def enter(self, run: Run, key: int) -> None:
        """Follow the calls."""
        CacheKeeper.of(run)
        run.act(self)

    def after(self, step: Step) -> TakeBack | None:
        """Note it."""
        if step.decodes:
            held, read = held_tokens(step.layers)
            self.held.append(held)
            self.read.append(read)
        return None

    def costs(self, row: int, n_written: int) -> CacheCosts:
        """Return what was noted of a row while an answer of so many tokens was written."""
        held = [float(of_rows[row]) for of_rows in self.held[: n_written - 1]]
        read = [float(of_rows[row]) for of_rows in self.read[: n_written - 1]]
        return CacheCosts(held, read)


def cells_of(events: Sequence[Event], row: int) -> float | None:
    """Return the share of a prompt's causal cells that attention covers, mean over layers and heads.

    It is None if attention is unchanged.
    """
    shares = [float(event.data.get("attended", 1.0)) for event in events if (event.kind, event.row) == ("prefill", row)]
    return mean_known(shares)


def mean_known(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are neither None nor NaN; None without any."""
    known = [value for value in values if value is not None and value == value]
    return sum(known) / len(known) if known else None


def row_events(events: Sequence[Event], row: int, tokens: int) -> tuple[dict[str, Any], ...]:
    """Return events of a row before its last token; later ones are in its padding, and costs of prompts apart."""
    of_row: list[Event] = []
    for event in events:
        if event.row == row and event.step < tokens and event.kind != "prefill":
            of_row.append(event)
    return tuple(plain(of_row))
