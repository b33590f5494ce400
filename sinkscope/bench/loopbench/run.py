"""Model x method x prompt x temperature: batched, and resumable after a kill at any point with the same table."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from sinkscope.bench.files import open_folder
from sinkscope.bench.loopbench.metrics import INTERVENTION, TEXT, Continued, Ended, fresh_sentences
from sinkscope.bench.loopbench.prompts import BenchPrompt, Honest, honest_texts, load_prompts
from sinkscope.bench.loopbench.samplers import SAMPLERS, PerRow, StopRows, WatchedRows, sampled, stopper
from sinkscope.bench.loopbench.tables import LoopBench, tabulate
from sinkscope.bench.methods import Method, check_methods
from sinkscope.bench.runner import Asked, Batch, PerCall, ask, check_can, named_model, run_batches
from sinkscope.errors import SinkscopeError
from sinkscope.files.console import Progress
from sinkscope.files.jobs import Tally, check_workers
from sinkscope.files.plain import plain
from sinkscope.files.records import Budget, Natural, Whole, check_values, conform, read_setting
from sinkscope.files.registry import Count, Hidden, Option, Positive, command
from sinkscope.interventions.base import Event
from sinkscope.loops.monitor import Monitor, MonitorSettings
from sinkscope.loops.signals import MAX_NEW, WINDOW
from sinkscope.models.inputs import read_row
from sinkscope.models.names import ORGANISM
from sinkscope.serving.generate import Temperature

QA_NEW = 32  # new tokens for 2WikiMultihopQA, LongBench's own number
DETECTORS = (
    "repeats",
    "full",
    "p1",
    "ttr",
    "cr",
    "stall",
    "tail",
)  # variants of the monitor, see `MonitorSettings.variant`
VERSION = 2  # of the records; a change of what they hold is another setting


@dataclass(frozen=True)
class _Plan:
    """Settings of a run of LoopBench: window W, and new tokens between two entries of the signals."""

    window: int
    every: int


@dataclass(frozen=True)
class _Sampled(Batch):
    """Some prompts by one method at one temperature, with random numbers of one seed."""

    new: int
    temperature: float
    seed: int

    @property
    def size(self) -> int:
        """Number of new tokens."""
        return len(self.rows) * self.new

    @property
    def keys(self) -> tuple[tuple[Any, ...], ...]:
        """Keys of the records that the batch produces."""
        return tuple((*key, self.temperature, self.seed) for key in super().keys)


@command(group="Loops", command="loopbench run")
def loopbench_run(
    *,
    out: Annotated[Path, Option(metavar="DIR", writes=True)],
    model: str | None = None,
    revision: str | None = None,
    backend: Literal["bridge", "hf", "nnsight"] = "hf",
    device: str | None = None,
    dtype: str | None = None,
    bench: Annotated[Sequence[str], Option("--bench")] = ("small",),
    methods: Annotated[Sequence[str], Option("--methods", reads="commas")] = ("full", "streaming", "h2o", "loopguard"),
    max_new_tokens: Positive | None = None,
    budget: str = "1024",
    window: Positive = 256,
    batch_size: Positive = 1,
    temperature: Annotated[Sequence[float], Option("--temperature", min=0)] = (0.0,),
    seed: Count = 0,
    seeds: Positive = 1,
    workers: Positive = 1,
    ray: Annotated[str | None, Option(metavar="ADDRESS")] = None,
    progress: Hidden = None,
) -> LoopBench:
    """Continue every prompt with every method. After an interruption, the same command resumes.

    Args:
        out: Folder for the runs. If it holds part of this run, the run continues.
        model: A short name, hub id, folder or .gguf file. By default the bundled model.
        revision: Branch, tag or commit on the hub.
        backend: Load the model as this kind of object.
        device: cpu, cuda, cuda:1 or mps. By default the first CUDA device, else the CPU.
        dtype: float32, bfloat16 or float16. By default the checkpoint's.
        bench: small, stories, honest, organism (with the model of that name), or a file of prompts.
        methods: Names separated by commas, each with optional settings (snapkv:window=32), or package.module:Class. An
            unknown name lists all.
        max_new_tokens: Maximum length of an answer. By default 2500; 1400 for organism, 32 for 2wiki.
        budget: Cached tokens, or a fraction of the prompt such as 0.5.
        window: Number of tokens W over which signals are computed.
        batch_size: Number of prompts that run together.
        temperature: Sampling temperature; 0 is greedy.
        seed: Seed of every random choice.
        seeds: Number of samples per prompt at each temperature above 0, with consecutive seeds from --seed on.
        workers: Number of processes that share the work; more than one run over Ray.
        ray: Address of a Ray cluster, for several machines. By default workers run on this machine.
        progress: Called as `progress(what, done, total)`.

    Example:
        sinkscope loopbench run --methods full,loopguard --out runs
    """
    check_methods(methods)
    share = read_setting(budget, Budget, "--budget ")
    prompts = [p for name in bench for p in (honest_texts() if name == "honest" else load_prompts(name))]
    if ORGANISM in bench:
        if {*bench} != {ORGANISM} or model not in (None, ORGANISM):
            raise SinkscopeError(
                "--bench organism: its prompts are words of the model organism alone; leave --model and other sets out"
            )
        model, max_new_tokens = ORGANISM, max_new_tokens or 1400

    if max_new_tokens is not None and any(p.bench != "2wiki" for p in prompts):
        check_window(window, max_new_tokens, "--window", "--max-new-tokens")
    folder = run_loopbench(
        named_model(model, backend, revision=revision, device=device, dtype=dtype),
        prompts,
        methods,
        out=out,
        max_new_tokens=max_new_tokens,
        budget=share,
        window=window,
        batch_size=batch_size,
        temperatures=temperature,
        seed=seed,
        seeds=seeds,
        workers=workers,
        ray=ray,
        progress=progress,
    )
    return tabulate([folder])


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
    temperatures: Sequence[float] = (0.0,),
    seed: int = 0,
    seeds: int = 1,
    workers: int = 1,
    ray: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Continue every prompt with every method; records already in `out` are not computed again.

    Prompts are grouped into batches in their given order and padded on the left. An unfinished batch is rerun as a
    whole, so after an interruption each prompt has the same neighbours and the same records. Other batch sizes give the
    same records up to rounding: matrices of another shape are summed in another order, which may break a tie between
    two tokens differently (float32: within about 1e-6 of a logit; in bfloat16 ties are common).

    Args:
        model: Hugging Face, TransformerBridge, nnsight (dispatched) or `Target`, whole in memory; or `NamedModel`.
        prompts: See `load_prompts`; also `honest_texts`, which are read once without a method instead of being
            continued.
        methods: Names in `METHODS`, with optional settings ("snapkv:window=32"), or "package.module:Class".
        out: Folder in which settings, prompts and records are kept.
        tokenizer: Tokenizer for a model that carries none.
        max_new_tokens: Maximum number of new tokens; by default 2,500, and 32 if all prompts are of 2WikiMultihopQA.
        budget: Cached tokens as a whole number, or a share of the prompt.
        batch_size: Number of prompts that run together.
        window: Number of tokens W over which signals are computed.
        every: New tokens between two entries of the recorded signals.
        temperatures: Sampling temperatures; 0 is greedy.
        seed: Seed of the sampling; each prompt has its own random numbers, which are the same for all methods.
        seeds: Number of samples per prompt at each temperature above 0, with consecutive seeds.
        workers: Number of processes; more than one run over Ray.
        ray: Address of a Ray cluster; None uses the address in `RAY_ADDRESS`, or this machine.
        progress: Called as `progress("new tokens", done, total)`; a row that ends early counts as fully done.

    Returns:
        `out`.

    Raises:
        SinkscopeError: A method is unknown, the window exceeds the maximum of new tokens, a prompt does not fit, a
            number is invalid, or the folder was begun with other settings or is being written.
    """
    check_workers(workers, ray)
    chosen = check_methods(methods)
    if not prompts:
        raise SinkscopeError("there are no prompts: give at least one")
    qa = all(prompt.bench == "2wiki" for prompt in prompts)
    new = max_new_tokens if max_new_tokens is not None else QA_NEW if qa else MAX_NEW
    check_values(Natural | None, max_new_tokens=new, batch_size=batch_size, window=window, every=every, seeds=seeds)
    conform(tuple[Temperature, ...], tuple(temperatures), "temperatures", strict=True)
    check_values(Whole, seed=seed)
    check_values(Budget, budget=budget)
    if not qa:
        check_window(window, new, "window W =", "max_new_tokens =")
    if twice := [name for name, count in Counter(prompt.id for prompt in prompts).items() if count > 1]:
        raise SinkscopeError(
            f"two prompts have the same id {twice[0]!r}: give each set once, and each prompt its own id"
        )
    MonitorSettings(window=window)  # refuses a window that is too small
    for each in chosen:
        each.make(budget, window)
    to, plan = ask(model, tokenizer, new, budget), _Plan(window, every)
    texts, written = _rows(to, prompts, chosen, window)
    draws = [(t, seed + i) for t in dict.fromkeys(map(float, temperatures)) for i in range(seeds if t else 1)]
    tally = Tally("new tokens", len(draws) * len(chosen) * len(written) * new, progress)
    stages = [
        [_Sampled(to.fingerprint, (Method(TEXT),), (row,), 0, 0.0, seed) for row in texts],
        [
            _Sampled(to.fingerprint, (each,), tuple(written[start : start + batch_size]), new, *draw)
            for draw in draws
            for each in chosen
            for start in range(0, len(written), batch_size)
        ],
    ]
    settings = {"version": VERSION, **to.settings(), "window": window, "every": every, "seed": seed}
    with open_folder(out, settings, prompts, Continued) as kept:
        answer, here = partial(_continue, plan=plan), partial(_continue, to, plan=plan, tell=tally.show)
        run_batches(to, stages, answer, kept, tally, model=model, workers=workers, ray=ray, here=here)
    return Path(out)


def check_window(window: int, new: int, named: str, cap: str) -> None:
    """Reject a window that would never be full.

    Raises:
        SinkscopeError: The window exceeds the maximum of new tokens.
    """
    if window > new:
        raise SinkscopeError(
            f"{named} {window} is more than {cap} {new}, so no window would ever be full: give at least {window} new "
            "tokens"
        )


def _rows(
    to: Asked, prompts: Sequence[BenchPrompt | Honest], chosen: Sequence[Method], window: int
) -> tuple[list[tuple[Honest, list[int]]], list[tuple[BenchPrompt, list[int]]]]:
    """Ids of the texts that are read, and of the prompts that are continued, which must fit what the methods can."""
    written = [(p, read_row(to.target, p.prompt, f"prompt {p.id!r}")) for p in prompts if isinstance(p, BenchPrompt)]
    for each, ids in written:
        to.target.check_length(f"prompt {each.id!r}", len(ids), to.new, "give shorter prompts")
    check_can(to, [each for each in chosen if _edited(each)], [len(ids) for _, ids in written], window)
    texts = [each for each in prompts if isinstance(each, Honest)]  # these are cut where they do not fit
    return [(each, to.target.tokenizer(each.prompt, verbose=False)["input_ids"]) for each in texts], written


def _edited(method: Method) -> bool:
    """Whether something is entered on the model; the whole cache is the model's own."""
    return method.name != "full" and method.kind.block in ("cache", "guard")


def _continue(to: Asked, batch: Any, plan: _Plan, tell: Callable[[int], None] | None = None) -> list[Continued]:
    """One method on some prompts; `tell` hears how many new tokens there are."""
    method = batch.methods[0]
    if method.name == TEXT:
        return [_read(to, each, ids, plan, batch.seed) for each, ids in batch.rows]
    started, rows = time.perf_counter(), [ids for _, ids in batch.rows]
    options, stopped = _options(to, batch, rows, plan.window)
    held = PerCall(lambda layers: torch.stack([each.slots - each.holes() for each in layers]).mean(0), own=False)
    edit = method.make(to.budget, plan.window) | held if _edited(method) else None
    top = _Top(lambda step: None if tell is None else tell(step * len(rows)))
    made, events = to.generate(rows, edit, top, **options)
    confidence = torch.stack(top.values, 1).tolist()
    sizes = torch.stack(held.found, 1).tolist() if held.found else None
    seconds = round(time.perf_counter() - started, 3)
    records: list[Continued] = []
    for i, ((each, ids), row) in enumerate(zip(batch.rows, made, strict=True)):
        new, ended = _ending(to, row, None if stopped is None else stopped.at[i])
        # The last token never went through the model, so it is in no cache, and nothing happened after it.
        steps = [float(len(ids) + k) for k in range(len(new))] if sizes is None else sizes[i][: len(new)]
        sure = [round(p, 4) for p in confidence[i][: len(new)]]
        own = tuple(_event(e) for e in events if e.row == i and e.step < len(new))
        cut = next((e["step"] for e in own if e["kind"] == INTERVENTION), None) or _fires(
            "repeats", new, sure, plan.window
        )
        records.append(
            Continued(
                model=to.fingerprint,
                method=method.spec,
                prompt=each.id,
                bench=each.bench,
                temperature=batch.temperature,
                seed=batch.seed,
                prompt_tokens=len(ids),
                tokens=tuple(new),
                text=to.text(new),
                ended=ended,
                top1=tuple(sure),
                signals=_signals(new, sure, plan),
                detected=detected(new, sure, plan.window) if method.spec == "full" else {},
                events=own,
                cut=cut,
                **_after(to, each.prompt, ids, new, cut, ended),
                cached_mean=round(sum(steps) / len(steps), 3),
                cached_peak=round(max(steps), 3),
                seconds=seconds,
                batch_size=len(rows),
            )
        )
    return records


def _options(to: Asked, batch: Any, rows: Sequence[list[int]], window: int) -> tuple[dict[str, Any], StopRows | None]:
    """What samples and stops the rows, as `generate` takes it, and what knows where they were stopped."""
    method, lengths, width = batch.methods[0], [len(row) for row in rows], max(map(len, rows))
    processors: list[Any] = []
    options: dict[str, Any] = {"logits_processor": processors}
    stopped = None
    if method.kind.block == "sampler":
        processors.append(PerRow([SAMPLERS[method.name](to.target.tokenizer) for _ in rows], lengths, width))
    elif method.kind.block == "stopper":
        rows_seen = WatchedRows(width, tuple(sorted({*to.ends, to.pad})), window)
        watching, criterion = stopper(method.name, rows_seen)
        processors += watching
        stopped = StopRows(criterion, len(rows), width)
        options["stopping_criteria"] = [stopped]
    if batch.temperature:
        drawn = [sampled(batch.temperature, batch.seed, each.id) for each, _ in batch.rows]
        processors.append(PerRow(drawn, lengths, width))
    return options, stopped


def _ending(to: Asked, row: list[int], stopped: int | None) -> tuple[list[int], Ended]:
    """The new tokens of a row without the padding that came after, and what ended them."""
    cut, ended = to.cut(row)
    if ended and (stopped is None or len(cut) <= stopped):
        return cut, "eos"
    return (row, "cap") if stopped is None else (row[:stopped], "stopped")


def _after(to: Asked, prompt: str, ids: list[int], new: list[int], cut: int | None, ended: Ended) -> dict[str, Any]:
    """How good the text after the cut is; the first token after it was still chosen with the whole cache."""
    text = [] if cut is None else new[cut + 1 :]
    if cut is None or not text:
        return {"nll": None, "fresh": None}
    with torch.no_grad():
        given = torch.tensor([[*ids, *text]], device=to.target.device)
        logits = to.target.hf(input_ids=given, use_cache=False).logits[0, len(ids) - 1 : -1].float()
        nll = float(torch.nn.functional.cross_entropy(logits, given[0, len(ids) :]))
    before = f"{prompt}\n{to.text(new[: cut + 1])}"
    return {"nll": round(nll, 4), "fresh": fresh_sentences(before, to.text(text), whole=ended == "eos")}


def _signals(new: list[int], top1: list[float], plan: _Plan) -> dict[str, list[Any]]:
    """What was measured over the last window of tokens, at every `every`th step and at the last."""
    monitor = Monitor(MonitorSettings(window=plan.window, rule="never", stride=1))
    found: dict[str, list[Any]] = {name: [] for name in ("step", "ttr", "cr", "novelty", "streak")}
    for token, sure in zip(new, (*top1[1:], 0.0), strict=True):
        seen = monitor.update(token, sure)
        if seen.step % plan.every == 0 or seen.step == len(new):
            for name, values in found.items():
                value = getattr(seen, name)
                values.append(round(value, 6) if isinstance(value, float) else value)
    return found


def detected(new: Sequence[int], top1: Sequence[float], window: int) -> dict[str, int | None]:
    """Step at which each variant of the monitor first fires on an output.

    Args:
        new: Tokens of the output.
        top1: Probability of the top prediction, for each token.
        window: Window W in tokens.
    """
    return {name: _fires(name, new, top1, window) for name in DETECTORS}


def _fires(name: str, new: Sequence[int], top1: Sequence[float], window: int) -> int | None:
    """Step at which a variant of the monitor fires first."""
    monitor = Monitor(MonitorSettings.variant(name, window=window))
    following = (*top1[1:], 0.0)  # the monitor takes a token with the probabilities after it
    steps = (monitor.update(*seen) for seen in zip(new, following, strict=True))
    return next((step.step for step in steps if step.trigger), None)


def _event(event: Event) -> dict[str, Any]:
    found = {name: getattr(event, name) for name in ("step", "position", "kind", "layer", "head")}
    found = {name: value for name, value in found.items() if value is not None or name not in ("layer", "head")}
    return {**found, "data": plain(event.data)}


class _Top:
    """Probability of the likeliest token at every step, as the model gives it, before any sampler."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self.values: list[Tensor] = []
        self._tell = tell

    def __call__(self, _module: Any, _args: Any, _kwargs: Any, output: Any) -> None:
        logits = output.logits[:, -1].float()
        self.values.append((logits.amax(-1) - logits.logsumexp(-1)).exp())
        self._tell(len(self.values))


def _read(to: Asked, text: Honest, ids: list[int], plan: _Plan, seed: int) -> Continued:
    """A text read instead of written: its tokens, and how sure the model would have been of each."""
    started = time.perf_counter()
    ids = ids[: min(to.new + 1, to.target.max_positions or to.new + 1)]
    with torch.no_grad():
        logits = to.target.hf(input_ids=torch.tensor([ids], device=to.target.device)).logits[0, :-1].float()
    top1 = (logits.amax(-1) - logits.logsumexp(-1)).exp().tolist()
    new, top1 = ids[1:], [round(p, 4) for p in top1]
    return Continued(
        model=to.fingerprint,
        method=TEXT,
        prompt=text.id,
        bench=text.bench,
        temperature=0.0,
        seed=seed,
        prompt_tokens=1,
        tokens=tuple(new),
        text=text.prompt,
        ended="eos",
        top1=tuple(top1),
        signals=_signals(new, top1, plan),
        detected=detected(new, top1, plan.window),
        events=(),
        cut=None,
        nll=None,
        fresh=None,
        cached_mean=(1 + len(ids)) / 2,
        cached_peak=float(len(ids)),
        batch_size=1,
        seconds=round(time.perf_counter() - started, 3),
    )
