"""Generate answers to a batch of prompts under one method, and measure what each answer cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import LogitsProcessor

from sinkscope.bench.methods import Method
from sinkscope.bench.prompt import Prompt
from sinkscope.bench.record import BenchRecord, Ending, Metrics
from sinkscope.bench.samplers import PerRow, RowProcessor, row_processor, sampled
from sinkscope.files.plain import plain
from sinkscope.files.provenance import ModelInfo
from sinkscope.interventions.base import Event, Intervention, Run
from sinkscope.interventions.decode import decoding, noted_decoding
from sinkscope.kv.loopguard.detect import largest_probability
from sinkscope.kv.loopserve.serve import LoopServe
from sinkscope.kv.session import Session
from sinkscope.models.open import fingerprint_of
from sinkscope.models.target import Target
from sinkscope.models.text.chat import chat_text
from sinkscope.models.wrapped import target_of
from sinkscope.serving.generate import ends_and_pad, padded


@dataclass(frozen=True)
class ModelByName:
    """A model that each process opens for itself.

    Attributes:
        name: As for `sinkscope.load`.
        options: As for `sinkscope.load`.
    """

    name: str | None
    options: dict[str, Any] = field(default_factory=dict)

    def open(self) -> Any:
        """The model itself."""
        from sinkscope.models.load import load

        return load(self.name, **self.options)


@dataclass(frozen=True)
class BenchModel:
    """The model that answers.

    Attributes:
        target: The model, whole in memory.
        fingerprint: Fingerprint of the model.
        ends: Ids that end an answer.
        pad: Id used for padding.
    """

    target: Target
    fingerprint: str
    ends: frozenset[int]
    pad: int

    @classmethod
    def of(cls, model: object, tokenizer: Any = None) -> BenchModel:
        """Prepare a model.

        Raises:
            SinkscopeError: The model carries no tokenizer.
        """
        opened = model.open() if isinstance(model, ModelByName) else model
        target = target_of(opened, tokenizer)
        target.need_tokenizer()
        ends, pad = ends_and_pad(target)
        return cls(target, fingerprint_of(target), ends, pad)

    def settings(self) -> dict[str, Any]:
        """What determines the answers, whatever is done with the model."""
        target = self.target
        with noted_decoding() as used:
            decoding(target, do_sample=False)
        info = ModelInfo(
            target.name, target.config.model_type, target.n_layers, target.d_model, target.d_mlp, self.fingerprint
        )
        return {
            "model": asdict(info),
            "kind": target.kind,
            "device": target.device.type,
            "dtype": str(target.dtype).removeprefix("torch."),
            "attention": str(getattr(target.config, "_attn_implementation", "unknown")),
            "decoding": used,
        }

    def encode(self, texts: Sequence[str], chat: bool = False) -> list[int]:
        """Ids of a conversation of alternating prompts and answers that ends with a prompt.

        Without a chat template, its parts are separated by empty lines.
        """
        tokenizer = self.target.need_tokenizer()
        if not chat:
            return [int(token) for token in tokenizer("\n\n".join(texts), verbose=False)["input_ids"]]
        messages: list[dict[str, str]] = []
        for number, text in enumerate(texts):
            messages.append({"role": ("user", "assistant")[number % 2], "content": text})
        text = chat_text(tokenizer, messages, self.target.name)
        return [int(token) for token in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]

    def cut(self, row: list[int]) -> tuple[list[int], bool]:
        """An answer up to and including the end of sequence, and whether that token occurred."""
        for number, token in enumerate(row):
            if token in self.ends:
                return row[: number + 1], True
        return row, False

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        """Tokens as text, with special tokens or without."""
        return str(self.target.need_tokenizer().decode(list(tokens), skip_special_tokens=not special))


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
        for method in self.methods:
            for prompt in self.prompts:
                for turn in range(len(prompt.turns)):
                    keys.append((self.model, self.task, method.spec, prompt.id, turn, self.seed))
        return tuple(keys)

    @property
    def size(self) -> int:
        """Number of answers."""
        return len(self.keys)

    def record(
        self, method: Method, prompt: Prompt, turn: int, answer: Answer, metrics: Any, steps: Any
    ) -> BenchRecord:
        """The record of an answer."""
        settings = {"set": prompt.set, "part": prompt.part, "temperature": self.temperature, **prompt.about}
        return BenchRecord(
            model=self.model,
            task=self.task,
            method=method.spec,
            prompt=prompt.id,
            turn=turn,
            seed=self.seed,
            settings=settings,
            metrics={**metrics, **answer.costs()},
            tokens=tuple(answer.tokens),
            text=answer.text,
            ended=answer.ended,
            events=answer.events,
            steps=steps,
        )


@dataclass(frozen=True)
class Answer:
    """One answer and its cost.

    Attributes:
        prompt_tokens: Length of the prompt, including BOS.
        tokens: Ids of the answer.
        text: The decoded answer.
        ended: Why it ended.
        events: Actions of the method.
        read: Cached tokens that each decoding step after the first attended to, mean over layers and kv heads.
        cached: Tokens in the cache after each step, mean over layers and kv heads.
        cells: Share of the prompt's causal cells that attention covered; None if the method does not change prompts.
        seconds: Wall-clock time of its batch, divided by the rows.
        top1: Probability of the model's top prediction at each step.
    """

    prompt_tokens: int
    tokens: list[int]
    text: str
    ended: Ending
    events: tuple[dict[str, Any], ...]
    read: list[float]
    cached: list[float]
    cells: float | None
    seconds: float
    top1: list[float] = field(default_factory=list)

    def costs(self) -> Metrics:
        """Numbers of the cost, as records hold them."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "length": len(self.tokens),
            "read": round(fmean(self.read), 3) if self.read else None,
            "cells": self.cells,
            "cached_mean": round(fmean(self.cached), 3),
            "cached_peak": round(max(self.cached), 3),
            "seconds": round(self.seconds, 4),
        }


class CacheCounts(Intervention):
    """Counts the tokens of each row after every call: those held, and those that a query can read.

    Attributes:
        held: `[row]` for each call: mean over layers and kv heads.
        readable: `[row]` for each call: the same of the tokens that are not hidden.
    """

    def __init__(self) -> None:
        self.held: list[Float[Tensor, " row"]] = []
        self.readable: list[Float[Tensor, " row"]] = []

    def enter(self, run: Run, key: int) -> None:
        """Read sinkscope's own cache after every call."""
        session = Session.of(run)
        session.own_cache()
        session.after_call(lambda moment: self._note(moment.layers))

    def _note(self, layers: Sequence[Any]) -> None:
        held = [layer.slots - layer.holes() for layer in layers]
        readable = [layer.readable.sum(-1).float().mean(1).cpu() for layer in layers]
        self.held.append(torch.stack(held).float().mean(0).cpu())
        self.readable.append(torch.stack(readable).mean(0))


class TopProbabilities:
    """Probability of the top prediction at every step, as the model gives it, before any sampler."""

    def __init__(self) -> None:
        self.values: list[Float[Tensor, " row"]] = []

    def __call__(self, _module: Any, _args: Any, _kwargs: Any, output: Any) -> None:
        """Keep the probability after a call of the model."""
        self.values.append(largest_probability(output.logits[:, -1]).cpu())


def generate_rows(
    model: BenchModel,
    rows: Sequence[list[int]],
    new: int,
    edit: Intervention | None = None,
    hook: Callable[..., None] | None = None,
    **options: Any,
) -> tuple[list[list[int]], list[Event]]:
    """Generate after prompts that are padded on the left.

    Args:
        model: The model.
        rows: Ids of the prompts.
        new: Maximum number of new tokens.
        edit: The intervention to apply to the model.
        hook: Called after each pass of the causal model.
        options: Further options of transformers' `generate`.

    Returns:
        The new ids of each row, and what the intervention did.
    """
    target = model.target
    ids, mask = padded(rows, model.pad, target.device)
    hooks: list[Any] = []
    if hook is not None:
        hooks.append((target.hf, "post", hook))
    entered: Any = nullcontext()
    if edit is not None:
        entered = edit.on(target)
    with entered as run, target.hooks(*hooks), torch.no_grad():
        output = target.hf.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=new,
            **decoding(target, do_sample=False, pad_token_id=model.pad, **options),
        )
        events = [] if run is None else run.events
    return output[:, ids.shape[1] :].tolist(), events


def answer_rows(
    model: BenchModel,
    method: Method,
    rows: Sequence[list[int]],
    prompts: Sequence[Prompt],
    batch: Batch,
) -> list[Answer]:
    """Answer prompts by one method."""
    started = time.perf_counter()
    processors = _processors(method, rows, prompts, batch)
    counts = CacheCounts()
    edit = method.make()
    if edit is not None:
        edit = edit | counts
    top = TopProbabilities()
    written, events = generate_rows(model, rows, batch.new, edit, top, logits_processor=processors)
    seconds = (time.perf_counter() - started) / len(rows)
    probabilities = torch.stack(top.values, 1).tolist()
    answers: list[Answer] = []
    for row, ids in enumerate(written):
        tokens, ended = model.cut(ids)
        answer = Answer(
            prompt_tokens=len(rows[row]),
            tokens=tokens,
            text=model.decode(tokens),
            ended="eos" if ended else "cap",
            events=row_events(events, row, len(tokens)),
            read=read_counts(counts.readable, row, len(rows[row]), len(tokens)),
            cached=held_counts(counts.held, row, len(rows[row]), len(tokens)),
            cells=cells_of(events, row),
            seconds=seconds,
            top1=[round(value, 4) for value in probabilities[row][: len(tokens)]],
        )
        answers.append(answer)
    return answers


def _processors(
    method: Method, rows: Sequence[list[int]], prompts: Sequence[Prompt], batch: Batch
) -> list[LogitsProcessor]:
    """What samples the rows, as `generate` takes it."""
    lengths = [len(row) for row in rows]
    processors: list[LogitsProcessor] = []
    if method.kind.block == "sampler":
        chosen: list[RowProcessor] = []
        for prompt in prompts:
            chosen.append(row_processor(method.name, batch.seed, prompt.id))
        processors.append(PerRow(chosen, lengths))
    if batch.temperature:
        drawn = [sampled(batch.temperature, batch.seed, prompt.id) for prompt in prompts]
        processors.append(PerRow(drawn, lengths))
    return processors


def read_counts(readable: Sequence[Tensor], row: int, prompt: int, tokens: int) -> list[float]:
    """Tokens that each decoding step attended to, its own included; without counts, those of the full cache.

    The first token of an answer comes from the prompt, and the last one goes through no call.
    """
    if not readable:
        return [float(prompt + step) for step in range(1, tokens)]
    return [float(count[row]) for count in readable[1:tokens]]


def held_counts(held: Sequence[Tensor], row: int, prompt: int, tokens: int) -> list[float]:
    """Tokens in the cache after the prompt and after each decoding step; without counts, those of the full cache."""
    if not held:
        return [float(prompt + step) for step in range(tokens)]
    return [float(count[row]) for count in held[:tokens]]


def cells_of(events: Sequence[Event], row: int) -> float | None:
    """Share of a prompt's causal cells that were computed, mean over layers and heads; None if prompts are unchanged.

    The rows from which lines are chosen count too.
    """
    shares: list[float] = []
    for event in events:
        if event.kind == "prefill" and event.row == row:
            shares.append(float(event.data.get("cells", 1.0)))
    if not shares:
        return None
    return round(fmean(shares), 4)


def row_events(events: Sequence[Event], row: int, tokens: int) -> tuple[dict[str, Any], ...]:
    """Events of one row before its last token; later ones are in its padding. What prompts cost is counted apart."""
    written: list[dict[str, Any]] = []
    for event in events:
        if event.row == row and event.step < tokens and event.kind != "prefill":
            named = {"step": event.step, "position": event.position, "kind": event.kind}
            written.append({**named, "data": plain(event.data)})
    return tuple(written)


def check_prompt(model: BenchModel, methods: Sequence[Method], prompt: Prompt, tokens: int, new: int) -> None:
    """Reject a prompt that does not fit, or a method that cannot be applied to it, before any computation.

    Raises:
        SinkscopeError: Prompt and answer exceed the context, or a budget is too small for the prompt.
    """
    model.target.check_length(f"prompt {prompt.id!r}", tokens, new, "give shorter prompts or fewer turns")
    for method in methods:
        edit = method.make()
        if isinstance(edit, LoopServe) and edit.decode:
            edit.decoding.check_prompt(tokens)
        elif edit is not None:
            edit.check_prompt(tokens)
