"""Generate answers to a batch of prompts under one method, and measure what each answer cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import cycle, product
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import LogitsProcessor

from sinkscope.bench.methods import Method
from sinkscope.bench.record import BenchRecord, EndReason, Metrics, Prompt
from sinkscope.conformance.subject import entered
from sinkscope.engine.actor import Actor
from sinkscope.engine.run import Event
from sinkscope.engine.step import Step, TakeBack
from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import plain
from sinkscope.generation.decode import ForcedAnswer, decoding, noted_decoding, to_end
from sinkscope.generation.generate import padded
from sinkscope.hooks.edit.base import Intervention, under
from sinkscope.kv.keeper import CacheKeeper
from sinkscope.kv.usage import HeldTokens, full_read
from sinkscope.loops.guard.detect import largest_probability
from sinkscope.measure.margin import mean_known
from sinkscope.measure.setup import model_info
from sinkscope.models.inputs import end_ids, tokenizer_of
from sinkscope.models.target import Target
from sinkscope.models.text.chat import chat_text
from sinkscope.models.windows import layer_window


def answering_settings(target: Target) -> dict[str, Any]:
    """Return what determines the answers of a model, whatever is done with it."""
    with noted_decoding() as used:
        decoding(target, do_sample=False)
    return {
        "model": asdict(model_info(target)),
        "kind": target.kind,
        "device": target.device.type,
        "dtype": str(target.dtype).removeprefix("torch."),
        "attention": str(getattr(target.config, "_attn_implementation", "unknown")),
        "decoding": used,
    }


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
        model: Fingerprint of the model.
        task: Name of the task.
        methods: Methods that answer; several only if the task compares them in one pass.
        prompts: The prompts.
        new: Maximum tokens per answer.
        temperature: Sampling temperature; 0 is greedy.
        seed: Seed of the sampling.
    """

    model: str
    task: str
    methods: tuple[Method, ...]
    prompts: tuple[Prompt, ...]
    new: int
    temperature: float = 0.0
    seed: int = 0

    @property
    def keys(self) -> tuple[tuple[Any, ...], ...]:
        """Keys of the records that the batch produces."""
        keys: list[tuple[Any, ...]] = []
        for method, prompt in product(self.methods, self.prompts):
            for turn in range(len(prompt.turns)):
                keys.append((self.model, self.task, method, prompt.id, turn, self.seed))
        return tuple(keys)

    def record(self, method: Method, prompt: Prompt, turn: int, answer: Answer, metrics: Metrics) -> BenchRecord:
        """Return the record of an answer."""
        settings = {"set": prompt.set, "part": prompt.part, "temperature": self.temperature, **prompt.about}
        return BenchRecord(
            model=self.model,
            task=self.task,
            method=method,
            prompt=prompt.id,
            turn=turn,
            seed=self.seed,
            settings=settings,
            metrics=metrics | answer.costs,
            tokens=tuple(answer.tokens),
            text=answer.text,
            ended=answer.ended,
            events=answer.events,
            steps=answer.steps,
        )


@dataclass(frozen=True)
class Answer:
    """One answer and its cost.

    Attributes:
        tokens: Ids of the answer.
        text: The decoded answer.
        ended: Why it ended.
        costs: `prompt_tokens`, with BOS; `length` of the answer; `read`, the cached tokens that a decoding step after
            the first attended to, and `cached_peak`, the most that stayed cached after one, means over layers and kv
            heads; `cells`, the share of the prompt's causal cells that attention covered (None if the method does not
            change prompts); `seconds` of wall-clock time of its batch, divided by the rows.
        events: Actions of the method.
        steps: Numbers for each new token, by name.
        first_lossy: The first decoding step after the first that read less than with a full cache, which is a sliding
            window in some layers. None: no step did.
    """

    tokens: list[int]
    text: str
    ended: EndReason
    costs: Metrics
    events: tuple[dict[str, Any], ...] = ()
    steps: dict[str, tuple[float, ...]] = field(default_factory=dict)
    first_lossy: int | None = None


Logits = Float[Tensor, "row vocab"]
RowNumbers = dict[str, Float[Tensor, " row"]]
Maker = Callable[[Target, int], Any]
"""Makes an intervention, a cache or a context manager for a model and the tokens of the longest prompt."""
Measure = Callable[[Logits], RowNumbers]
"""Numbers of each row by name, from the model's logits at a step, before any sampler."""


def top_probability(logits: Logits) -> RowNumbers:
    """Return the probability of the top prediction."""
    return {"top1": largest_probability(logits).cpu().double().round(decimals=4)}


def answer_rows(
    target: Target,
    rows: Sequence[list[int]],
    new: int,
    edit: Intervention | Maker | None = None,
    *,
    measure: Measure = top_probability,
    sampler: LogitsProcessor | None = None,
    method: Method | None = None,
    along: Sequence[list[int]] = (),
) -> list[Answer]:
    """Answer prompts, which are padded on the left.

    Args:
        target: The model.
        rows: Ids of the prompts.
        new: Maximum number of new tokens.
        edit: The intervention to apply to the model, or what makes it or a cache for these prompts. None: the model's
            own full cache.
        measure: Numbers to keep of each step.
        sampler: What draws tokens and forbids all others; without it, decoding is greedy.
        method: The method, which may change the scores before that.
        along: The answers, whatever the model would have generated.
    """
    started = time.perf_counter()
    ends = end_ids(target)
    pad = max(0, min(ends, default=0))
    ids, mask = padded(rows, pad, target.device)
    processors: list[Any] = [] if method is None else method.processors(pad)
    if sampler is not None:
        processors.append(sampler)
    if along:
        new = max(map(len, along))
        processors.append(ForcedAnswer(list(along), ids.shape[1], pad))
    options = decoding(target, do_sample=False, pad_token_id=pad)
    options["do_sample"] = sampler is not None  # by which edits know whether tokens are drawn
    options |= {"input_ids": ids, "attention_mask": mask, "max_new_tokens": new, "logits_processor": processors}
    values: dict[str, list[Tensor]] = {}

    def keep(_module: Any, _args: Any, _kwargs: Any, output: Any) -> None:
        for name, value in measure(output.logits[:, -1].float()).items():
            values.setdefault(name, []).append(value.cpu().double())

    if edit is not None and not isinstance(edit, Intervention):
        edit = edit(target, max(map(len, rows)))
    output, events, held = _generated(target, edit, keep, options)
    seconds = (time.perf_counter() - started) / len(rows)
    by_step = {name: torch.stack(value).round(decimals=6) for name, value in values.items()}
    windows = [layer_window(target.config, layer) for layer in target.attending]
    answers: list[Answer] = []
    for row, written in enumerate(output[:, ids.shape[1] :].tolist()):
        tokens = along[row] if along else to_end(written, ends)
        prompt, length = len(rows[row]), len(tokens)
        cached: Sequence[float] = range(prompt + 1, prompt + length)  # of a full cache: the first token is the prompt's
        read = whole = [full_read(count, windows) for count in cached]
        if edit is not None:
            read = [float(call.read_by_row()[row]) for call in held[1:length]]
            cached = [float(call.held_by_row()[row]) for call in held[1:length]]
        lossy = [count < full - 1e-6 for count, full in zip(read, whole, strict=False)]
        costs: Metrics = {
            "prompt_tokens": prompt,
            "length": length,
            "read": mean_known(read),
            "cells": cells_of(events, row),
            "cached_peak": max(cached, default=None),
            "seconds": seconds,
        }
        text = tokenizer_of(target).decode(tokens, skip_special_tokens=True)
        ended: EndReason = "eos" if tokens[-1] in ends and not along else "cap"
        steps = {name: tuple(value[:length, row].tolist()) for name, value in by_step.items()}
        acted = row_events(events, row, length)
        answers.append(Answer(tokens, text, ended, costs, acted, steps, lossy.index(True) + 1 if any(lossy) else None))
    return answers


@dataclass(frozen=True, eq=False)
class _HeldAfterCalls(Actor):
    """Notes what the cache holds after each call."""

    held: list[HeldTokens]
    windows: list[int | None]
    reads_logits: ClassVar[bool] = False

    def after(self, step: Step) -> TakeBack | None:
        """Note it."""
        if step.layers:
            self.held.append(HeldTokens.by(step.layers, self.windows))
        return None


def _generated(
    target: Target, edit: Any, keep: Callable[..., None], options: dict[str, Any]
) -> tuple[Tensor, Sequence[Event], list[HeldTokens]]:
    """What the model writes under an edit or with a cache, the events on the way, and what was held after each call.

    Slots of a cache of somebody else's count as tokens, but no more than a row has.
    """
    held: list[HeldTokens] = []
    lengths: Tensor = options["attention_mask"].sum(1).double()
    with ExitStack() as stack, torch.no_grad():
        if edit is None or isinstance(edit, Intervention):
            run = stack.enter_context(under(edit, target))
            if run is not None:
                run.act(_HeldAfterCalls(held, CacheKeeper.of(run).windows))
            stack.enter_context(target.hooks((target.hf, "post", keep)))
            return target.hf.generate(**options), [] if run is None else run.events, held
        cache = stack.enter_context(entered(edit, target.hf))

        def count(*_: Any) -> None:
            slots = [float(layer.keys.shape[-2]) for layer in cache.layers if getattr(layer, "keys", None) is not None]
            tokens = torch.stack([(lengths + len(held)).clamp(max=size) for size in slots]).sum(0)
            held.append(HeldTokens(len(slots), tokens, tokens))

        stack.enter_context(target.hooks((target.hf, "post", keep), (target.hf, "post", count)))
        return target.hf.generate(**options, past_key_values=cache), [], held


def cells_of(events: Sequence[Event], row: int) -> float | None:
    """Return the share of a prompt's causal cells that attention covers, mean over layers and heads.

    It is None if attention is unchanged.
    """
    return mean_known(
        float(event.data.get("attended", 1.0)) for event in events if (event.kind, event.row) == ("prefill", row)
    )


def row_events(events: Sequence[Event], row: int, tokens: int) -> tuple[dict[str, Any], ...]:
    """Return events of a row before its last token; later ones are in its padding, and costs of prompts apart."""
    of_row = [event for event in events if event.row == row and event.step < tokens and event.kind != "prefill"]
    return tuple(plain(of_row))
