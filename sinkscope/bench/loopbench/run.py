"""Model x method x prompt: greedy, batched, and resumed after a kill at any point with the same table."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sinkscope._plain import plain
from sinkscope.bench.loopbench.methods import Batch, Method, Row, check_methods
from sinkscope.bench.loopbench.prompts import BenchPrompt, Honest
from sinkscope.bench.loopbench.samplers import PerRow, StopRows
from sinkscope.bench.loopbench.store import Ended, Record, Store
from sinkscope.errors import SinkscopeError
from sinkscope.interventions.base import Event, Intervention, Run
from sinkscope.loops.monitor import Monitor, MonitorSettings
from sinkscope.loops.signals import MAX_NEW, WINDOW
from sinkscope.models.open import fingerprint_of
from sinkscope.models.target import Target
from sinkscope.results import ModelInfo

Progress = Callable[[str, int, int], None]
QA_NEW = 32  # new tokens for 2WikiMultihopQA, LongBench's own number
DETECTORS = ("full", "p1", "ttr", "cr", "stall", "tail")  # variants of the monitor, see `MonitorSettings.variant`
TEXT = "text"  # what stands for the method where a text is read
VERSION = 1  # of the records; a change of what they hold is another setting


@dataclass(frozen=True)
class _Plan:
    """What every batch of a run shares."""

    target: Target
    fingerprint: str
    ends: frozenset[int]
    pad: int
    new: int
    budget: int | float
    window: int
    every: int
    seed: int


def run_loopbench(
    model: object,
    prompts: Sequence[BenchPrompt | Honest],
    methods: Sequence[str],
    *,
    out: str | os.PathLike[str],
    tokenizer: Any = None,
    max_new_tokens: int | None = None,
    budget: int | float = 1024,
    batch_size: int = 1,
    window: int = WINDOW,
    every: int = 32,
    seed: int = 0,
    progress: Progress | None = None,
) -> Path:
    """Continue every prompt by every method; what is in `out` already is not done again.

    Prompts are cut into batches in the order they come in, padded on the left, and a batch that was not finished is
    run again whole: whatever was killed, each prompt meets the same neighbours, and the records are the same. With
    another batch size they are the same but for rounding: matrices of another shape are summed in another order, which
    may turn a tie between two tokens (float32: of about 1e-6 of a logit, in bfloat16 ties are common).

    Args:
        model: Hugging Face, TransformerBridge, nnsight (dispatched) or `Target`, whole in memory.
        prompts: see `load_prompts`; and `honest_texts`, which are read instead of continued, once, by no method.
        methods: names, see `METHODS`.
        out: folder; settings, prompts and records are kept there.
        tokenizer: where the model carries none.
        max_new_tokens: cap; by default 2,500, and 32 where all prompts are of 2WikiMultihopQA.
        budget: of cached tokens, a whole number, or a share of the prompt.
        batch_size: prompts that run together.
        window: tokens W over which signals are taken.
        every: new tokens between two entries of the recorded signals.
        seed: of sampled methods; each prompt has random numbers of its own.
        progress: called as `progress("new tokens", done, total)`; a row that ends early counts as done to the cap.

    Returns:
        `out`.

    Raises:
        SinkscopeError: an unknown method, a window above the cap, a prompt that does not fit, bad numbers, a folder
            that was begun with other settings or is being written.
    """
    chosen = check_methods(methods)
    if not prompts:
        raise SinkscopeError("there are no prompts: give at least one")
    qa = all(prompt.bench == "2wiki" for prompt in prompts)
    new = max_new_tokens if max_new_tokens is not None else QA_NEW if qa else MAX_NEW
    _check_numbers(new, budget, batch_size, window, every, seed)
    if window > new and not qa:
        raise SinkscopeError(
            f"window W = {window} is more than max_new_tokens = {new}, so no window would ever be full: give at least "
            f"{window} new tokens"
        )
    if twice := [name for name, count in Counter(prompt.id for prompt in prompts).items() if count > 1]:
        raise SinkscopeError(
            f"two prompts have the same id {twice[0]!r}: give each set once, and each prompt its own id"
        )
    edits = [each.intervention(budget, window) for each in chosen if each.intervention is not None]
    target = Target.of(model, tokenizer)
    if target.tokenizer is None:
        raise SinkscopeError(
            f"{target.name} carries no tokenizer: give tokenizer=..., or put the tokenizer's files beside the weights",
            page="no-tokenizer",
        )
    plan = _plan(target, new, budget, window, every, seed)
    ids = [[int(i) for i in target.tokenizer(prompt.prompt, verbose=False)["input_ids"]] for prompt in prompts]
    written = [(prompt, row) for prompt, row in zip(prompts, ids, strict=True) if isinstance(prompt, BenchPrompt)]
    for prompt, row in written:
        _check_length(prompt.id, len(row), new, target)
        for edit in edits:
            edit.check_prompt(len(row))
    for edit in edits if written else []:  # what does not work on this model is refused before anything is computed
        with edit.on(target):
            pass
    with Store(out, _settings(plan), [asdict(prompt) for prompt in prompts]) as store:
        for prompt, row in zip(prompts, ids, strict=True):
            if isinstance(prompt, Honest) and (plan.fingerprint, TEXT, prompt.id) not in store.records:
                store.append([_forced(plan, prompt, row)])
        if written:
            _fill(store, plan, chosen, [p for p, _ in written], [row for _, row in written], batch_size, progress)
    return Path(out)


def _fill(
    store: Store,
    plan: _Plan,
    methods: list[Method],
    prompts: list[BenchPrompt],
    ids: list[list[int]],
    size: int,
    progress: Progress | None,
) -> None:
    """Every batch that has a record missing, in order."""
    total = len(methods) * len(prompts) * plan.new
    done = 0

    def tell(step: int, rows: int) -> None:
        if progress is not None:
            progress("new tokens", done + step * rows, total)

    for each in methods:
        for start in range(0, len(prompts), size):
            part = slice(start, start + size)
            rows = prompts[part]
            if any((plan.fingerprint, each.name, p.id) not in store.records for p in rows):
                store.append(_batch(plan, each, rows, ids[part], tell))
            done += len(rows) * plan.new
            tell(0, 0)


def _batch(
    plan: _Plan, method: Method, prompts: list[BenchPrompt], ids: list[list[int]], tell: Callable[[int, int], None]
) -> list[Record]:
    """One method on some prompts."""
    target, started = plan.target, time.perf_counter()
    lengths, width = [len(row) for row in ids], max(map(len, ids))
    padded = torch.tensor([[plan.pad] * (width - len(row)) + row for row in ids], device=target.device)
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths], device=target.device)
    options: dict[str, Any] = {}
    if method.sampler is not None:
        rows = [method.sampler(Row(p.id, target.tokenizer, plan.seed)) for p in prompts]
        options["logits_processor"] = [PerRow(rows, lengths, width)]
    stopper = None
    if method.stopper is not None:
        watching, criterion = method.stopper(Batch(width, tuple(sorted({*plan.ends, plan.pad})), plan.window))
        stopper = StopRows(criterion, len(ids), width)
        options.update(logits_processor=watching, stopping_criteria=[stopper])
    held = _Held()
    edit = None if method.intervention is None else method.intervention(plan.budget, plan.window) | held
    top = _Top(lambda step: tell(step, len(ids)))
    with (
        edit.on(target) if edit is not None else nullcontext() as run,
        target.hooks((target.hf, "post", top)),
        torch.no_grad(),
    ):
        made = target.hf.generate(
            input_ids=padded,
            attention_mask=mask,
            max_new_tokens=plan.new,
            pad_token_id=plan.pad,
            do_sample=False,
            **options,
        )
    events = [] if run is None else run.events
    confidence = torch.stack(top.values, 1).tolist()
    sizes = torch.stack(held.counts, 1).tolist() if held.counts else None
    seconds = round(time.perf_counter() - started, 3)
    records: list[Record] = []
    for i, (prompt, row) in enumerate(zip(prompts, made[:, width:].tolist(), strict=True)):
        new, ended = _ending(row, plan, None if stopper is None else stopper.at[i])
        # The last token never went through the model, so it is in no cache, and nothing happened after it.
        steps = [float(lengths[i] + k) for k in range(len(new))] if sizes is None else sizes[i][: len(new)]
        sure = [round(p, 4) for p in confidence[i][: len(new)]]
        own = [e for e in events if e.row == i and e.step < len(new)]
        records.append(
            Record(
                model=plan.fingerprint,
                method=method.name,
                prompt=prompt.id,
                bench=prompt.bench,
                prompt_tokens=lengths[i],
                tokens=tuple(new),
                text=target.tokenizer.decode(new, skip_special_tokens=True),
                ended=ended,
                top1=tuple(sure),
                signals=_signals(new, sure, plan.window, plan.every),
                detected=detected(new, sure, plan.window) if method.name == "full" else {},
                events=tuple(_event(e) for e in own),
                cached_mean=round(sum(steps) / len(steps), 3),
                cached_peak=round(max(steps), 3),
                seconds=seconds,
                batch_size=len(ids),
            )
        )
    return records


def _ending(row: list[int], plan: _Plan, stopped: int | None) -> tuple[list[int], Ended]:
    """The new tokens of a row without the padding that came after, and what ended them."""
    end = next((k + 1 for k, token in enumerate(row) if token in plan.ends), None)
    if end is not None and (stopped is None or end <= stopped):
        return row[:end], "eos"
    if stopped is not None:
        return row[:stopped], "stopped"
    return row, "cap"


def _signals(new: list[int], top1: list[float], window: int, every: int) -> dict[str, list[Any]]:
    """What was measured over the last `window` tokens, at every `every`th step and at the last."""
    monitor = Monitor(MonitorSettings(window=window, rule="never", stride=1))
    found: dict[str, list[Any]] = {name: [] for name in ("step", "ttr", "cr", "novelty", "streak")}
    for token, sure in zip(new, (*top1[1:], 0.0), strict=True):
        seen = monitor.update(token, sure)
        if seen.step % every == 0 or seen.step == len(new):
            for name, values in found.items():
                value = getattr(seen, name)
                values.append(round(value, 6) if isinstance(value, float) else value)
    return found


def detected(new: Sequence[int], top1: Sequence[float], window: int) -> dict[str, int | None]:
    """Step at which each variant of the monitor fires first on an output.

    Args:
        new: its tokens.
        top1: for each of them the probability of the likeliest token there.
        window: W.
    """
    found: dict[str, int | None] = {}
    following = (*top1[1:], 0.0)  # the monitor takes a token with the probabilities after it
    for name in DETECTORS:
        monitor = Monitor(MonitorSettings.variant(name, window=window))
        steps = (monitor.update(*seen) for seen in zip(new, following, strict=True))
        found[name] = next((step.step for step in steps if step.trigger), None)
    return found


def _event(event: Event) -> dict[str, Any]:
    where = {"layer": event.layer, "head": event.head}
    return {
        "step": event.step,
        "position": event.position,
        "kind": event.kind,
        **{name: value for name, value in where.items() if value is not None},
        "data": plain(event.data),
    }


class _Top:
    """Probability of the likeliest token at every step, as the model gives it, before any sampler."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self.values: list[Tensor] = []
        self._tell = tell

    def __call__(self, _module: Any, _args: Any, _kwargs: Any, output: Any) -> None:
        logits = output.logits[:, -1].float()
        self.values.append((logits.amax(-1) - logits.logsumexp(-1)).exp())
        self._tell(len(self.values))


class _Held(Intervention):
    """Counts the tokens in the cache after every call, per row: those of rows that have ended are left out later."""

    def __init__(self) -> None:
        self.counts: list[Tensor] = []

    def enter(self, run: Run, key: int) -> None:
        from sinkscope.kv.session import Session

        def note(moment: Any) -> None:
            self.counts.append(torch.stack([layer.slots - layer.holes() for layer in moment.layers]).mean(0))

        Session.of(run).after_call(note)


def _forced(plan: _Plan, text: Honest, ids: list[int]) -> Record:
    """A text read instead of written: its tokens, and how sure the model would have been of each."""
    started = time.perf_counter()
    ids = ids[: min(plan.new + 1, plan.target.max_positions or plan.new + 1)]
    with torch.no_grad():
        logits = plan.target.hf(input_ids=torch.tensor([ids], device=plan.target.device)).logits[0, :-1].float()
    top1 = (logits.amax(-1) - logits.logsumexp(-1)).exp().tolist()
    new, top1 = ids[1:], [round(p, 4) for p in top1]
    return Record(
        model=plan.fingerprint,
        method=TEXT,
        prompt=text.id,
        bench=text.bench,
        prompt_tokens=1,
        tokens=tuple(new),
        text=text.prompt,
        ended="eos",
        top1=tuple(top1),
        signals=_signals(new, top1, plan.window, plan.every),
        detected=detected(new, top1, plan.window),
        events=(),
        cached_mean=(1 + len(ids)) / 2,
        cached_peak=float(len(ids)),
        batch_size=1,
        seconds=round(time.perf_counter() - started, 3),
    )


def _plan(target: Target, new: int, budget: int | float, window: int, every: int, seed: int) -> _Plan:
    end = getattr(target.hf.generation_config, "eos_token_id", None)
    ends = frozenset(end if isinstance(end, list | tuple) else [] if end is None else [int(end)])
    pad = target.tokenizer.pad_token_id
    pad = min(ends, default=0) if pad is None else int(pad)
    return _Plan(target, fingerprint_of(target), ends, pad, new, budget, window, every, seed)


def _settings(plan: _Plan) -> dict[str, Any]:
    """Everything that decides a record, but for its method and prompt."""
    t = plan.target
    return {
        "version": VERSION,
        "model": asdict(ModelInfo(t.name, t.config.model_type, t.n_layers, t.d_model, t.d_mlp, plan.fingerprint)),
        "kind": t.kind,
        "device": t.device.type,
        "dtype": str(t.dtype).removeprefix("torch."),
        "attention": str(getattr(t.config, "_attn_implementation", "unknown")),
        "max_new_tokens": plan.new,
        "budget": plan.budget,
        "window": plan.window,
        "every": plan.every,
        "seed": plan.seed,
    }


def _check_numbers(new: int, budget: int | float, batch_size: int, window: int, every: int, seed: int) -> None:
    for name, value, least in (
        ("max_new_tokens", new, 1),
        ("batch_size", batch_size, 1),
        ("window", window, 1),
        ("every", every, 1),
        ("seed", seed, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise SinkscopeError(f"{name}={value!r}: expected a whole number from {least}")
    good = budget >= 1 if isinstance(budget, int) else 0 < budget <= 1
    if not good or isinstance(budget, bool):
        raise SinkscopeError(
            f"budget={budget!r}: expected a whole number of tokens from 1, or a share of the prompt above 0 and up to "
            "1.0"
        )


def _check_length(name: str, length: int, new: int, target: Target) -> None:
    limit = target.max_positions
    if length < 1:
        raise SinkscopeError(f"prompt {name!r} has no tokens: write at least one word")
    if limit is not None and length + new > limit:
        raise SinkscopeError(
            f"prompt {name!r} has {length} tokens and {new} more are to come, but the context of {target.name} is "
            f"{limit}: give at most {max(0, limit - length)} new tokens, or shorter prompts"
        )
