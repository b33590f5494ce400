"""What is made of records: numbers per run, per method, and how well a monitor alone would have seen it coming."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

from sinkscope.bench.files import Contents, Finished, read_folder
from sinkscope.loops.signals import (
    collapse_point,
    compression_ratio,
    distinct,
    ends_in_loop,
    is_loop,
    seq_rep,
    survival,
    type_token_ratio,
)
from sinkscope.rate import wilson

SLACK = 20  # the loop rule's length is this much below the cap: 2,480 of 2,500 (section 4.3)
EARLY = 400  # of 2,500 tokens; the same share of any other cap. Fig. 4 b calls 0 to 400 early
INTERVENTION = "guard"  # kind of the event that a guard's intervention is
SURVIVAL_POINTS = 50
TEXT = "text"  # what stands for the method where a text is read
Ended = Literal["eos", "stopped", "cap"]


@dataclass(frozen=True)
class Continued(Finished):
    """One prompt continued by one method.

    Attributes:
        bench: the set that the prompt is of.
        prompt_tokens: its length, BOS included.
        tokens: ids of the new tokens, up to and with the end of sequence if it came.
        text: the same decoded.
        ended: by the end of sequence, by a stopper, or at the cap of new tokens.
        top1: for each of them the probability that the model gave its likeliest token there.
        signals: "step" and, in lists as long, what was measured over the last window of tokens there.
        detected: step at which each variant of the monitor would have fired first, looking on; for outputs that nobody
            interfered with (method "full") and for texts that were read.
        events: what the method did: step, position, kind and data. Step s came after s new tokens.
        cached_mean: tokens in the cache, mean over steps, layers and kv heads.
        cached_peak: the same at the step with most.
        seconds: wall clock of the batch it ran in.
        batch_size: rows of that batch.
    """

    bench: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    text: str
    ended: Ended
    top1: tuple[float, ...]
    signals: dict[str, list[Any]]
    detected: dict[str, int | None]
    events: tuple[dict[str, Any], ...]
    cached_mean: float
    cached_peak: float
    seconds: float
    batch_size: int


def read_run(folder: str | os.PathLike[str]) -> Contents[Continued]:
    """What a folder of `loopbench run` holds so far; see `read_folder`."""
    return read_folder(folder, Continued, "loopbench")


@dataclass(frozen=True)
class Ending:
    """How diverse one run was, and how it ended.

    Attributes:
        length: new tokens.
        ttr: type-token ratio of all new tokens (Eq. 5).
        cr: compression ratio of all new tokens (Eq. 6).
        loop: the loop rule (Eq. 7), its length 20 below the cap.
        tail_loop: the rule without the length, on the last window of tokens.
        collapse: step from which the window's type-token ratio stays below 0.2; None: it does not.
        interventions: steps of a guard's interventions.
    """

    length: int
    ttr: float
    cr: float
    loop: bool
    tail_loop: bool
    collapse: int | None
    interventions: tuple[int, ...]


def ending(record: Continued, cap: int, window: int) -> Ending:
    """Metrics of one run, from its tokens and events alone.

    Args:
        record: the run.
        cap: new tokens it was allowed.
        window: of the signals.
    """
    ids = record.tokens
    return Ending(
        length=len(ids),
        ttr=type_token_ratio(ids),
        cr=compression_ratio(ids),
        loop=is_loop(ids, cap, theta_len=cap - SLACK),
        tail_loop=ends_in_loop(ids, window),
        collapse=collapse_point(ids, window),
        interventions=tuple(e["step"] for e in record.events if e["kind"] == INTERVENTION),
    )


@dataclass(frozen=True)
class Group:
    """All runs of one method on one set by one model; means unless said otherwise.

    Attributes:
        bench: the set.
        model: name of the model.
        method: name of the method.
        runs: how many.
        prompt_tokens: length of the prompts.
        cr: compression ratio.
        ttr: type-token ratio.
        length: new tokens.
        loop: share that the loop rule flags, `loop_low` to `loop_high` its 95 % interval (Wilson).
        tail_loop: share that the rule without the length flags on the last window.
        eos: share that ended by the end of sequence.
        stopped: share that a stopper ended.
        cap: share that reached the cap.
        seq_rep_4: share of repeated 4-grams.
        distinct_2: share of different 2-grams.
        collapsed: share that collapsed for good.
        collapse_point: median step of those; None: none did.
        steps: where survival is read.
        survival: share not collapsed by each of them.
        cached_mean: tokens in the cache per layer and kv head, mean over steps.
        cached_peak: the most there were, mean over runs.
        interventions: a guard's interventions per run; None: no guard.
        early: share of them before 400 of 2,500 tokens; None: there were none.
        counts: interventions of each run.
        positions: steps of all interventions.
    """

    bench: str
    model: str
    method: str
    runs: int
    prompt_tokens: float
    cr: float
    ttr: float
    length: float
    loop: float
    loop_low: float
    loop_high: float
    tail_loop: float
    eos: float
    stopped: float
    cap: float
    seq_rep_4: float | None
    distinct_2: float | None
    collapsed: float
    collapse_point: float | None
    steps: tuple[int, ...]
    survival: tuple[float, ...]
    cached_mean: float
    cached_peak: float
    interventions: float | None
    early: float | None
    counts: tuple[int, ...]
    positions: tuple[int, ...]


def survival_steps(cap: int) -> tuple[int, ...]:
    """Steps at which survival is read."""
    return tuple(sorted({cap * i // SURVIVAL_POINTS for i in range(1, SURVIVAL_POINTS + 1)} - {0}))


def group(
    bench: str, model: str, method: str, records: Sequence[Continued], *, cap: int, window: int, guarded: bool
) -> Group:
    """The runs of one method on one set, added up.

    Args:
        bench: the set.
        model: name of the model.
        method: name of the method.
        records: its runs, at least one.
        cap: new tokens they were allowed.
        window: of the signals.
        guarded: the method has a guard, so that no event means no intervention.
    """
    runs = [ending(record, cap, window) for record in records]
    rate = wilson(sum(run.loop for run in runs), len(runs))
    collapses = [run.collapse for run in runs]
    collapsed = [point for point in collapses if point is not None]
    counts = tuple(len(run.interventions) for run in runs)
    positions = tuple(step for run in runs for step in run.interventions)
    ends: list[str] = [record.ended for record in records]
    return Group(
        bench=bench,
        model=model,
        method=method,
        runs=len(runs),
        loop=rate.share,
        loop_low=rate.low,
        loop_high=rate.high,
        seq_rep_4=_mean(seq_rep(record.tokens, 4) for record in records),
        distinct_2=_mean(distinct(record.tokens, 2) for record in records),
        collapsed=len(collapsed) / len(collapses),
        collapse_point=_median(collapsed),
        steps=survival_steps(cap),
        survival=tuple(survival(collapses, survival_steps(cap))),
        interventions=len(positions) / len(runs) if guarded else None,
        early=sum(s < EARLY * cap / 2500 for s in positions) / len(positions) if positions else None,
        counts=counts if guarded else (),
        positions=positions,
        **{end: ends.count(end) / len(ends) for end in ("eos", "stopped", "cap")},
        **{name: fmean(getattr(run, name) for run in runs) for name in ("cr", "ttr", "length", "tail_loop")},
        **{
            name: fmean(getattr(record, name) for record in records)
            for name in ("prompt_tokens", "cached_mean", "cached_peak")
        },
    )


def _mean(values: Iterable[float]) -> float | None:
    """Mean of those that are numbers: a run of three tokens has no 4-gram."""
    known = [value for value in values if value == value]
    return fmean(known) if known else None


def _median(values: Sequence[int]) -> float | None:
    return float(median(values)) if values else None


@dataclass(frozen=True)
class Detection:
    """A monitor alone, on outputs that nobody interfered with (method "full") and on honest texts.

    A run loops if the loop rule without the length flags its last window; the loop is established at its collapse
    point, from which on the window's type-token ratio stays below 0.2 to the end. The lead is that step minus the step
    of the first trigger: positive where the monitor is ahead.

    Attributes:
        model: name of the model.
        detector: variant of the monitor.
        loops: runs that loop.
        detected: share of them with a trigger.
        step: median step of the first trigger; None: there was none.
        lead: median lead, over runs that loop, collapse and are detected; None: there are none.
        healthy: runs that neither loop nor collapse.
        healthy_alarms: share of them with a trigger.
        texts: honest texts.
        text_alarms: share of them with a trigger.
        alarmed: the honest texts with a trigger.
    """

    model: str
    detector: str
    loops: int
    detected: float | None
    step: float | None
    lead: float | None
    healthy: int
    healthy_alarms: float | None
    texts: int
    text_alarms: float | None
    alarmed: tuple[str, ...]


def detection(
    model: str, detector: str, runs: Sequence[Continued], texts: Sequence[Continued], *, window: int
) -> Detection:
    """How one variant of the monitor does.

    Args:
        model: name of the model.
        detector: the variant.
        runs: outputs of method "full".
        texts: honest texts, read by the model.
        window: of the signals.
    """
    looping: list[tuple[int | None, int | None]] = []  # (first trigger, collapse point)
    healthy: list[int | None] = []
    for record in runs:
        collapse, first = collapse_point(record.tokens, window), record.detected[detector]
        if ends_in_loop(record.tokens, window):
            looping.append((first, collapse))
        elif collapse is None:
            healthy.append(first)
    alarmed = tuple(text.prompt for text in texts if text.detected[detector] is not None)
    steps = [first for first, _ in looping if first is not None]
    leads = [collapse - first for first, collapse in looping if first is not None and collapse is not None]
    return Detection(
        model=model,
        detector=detector,
        loops=len(looping),
        detected=len(steps) / len(looping) if looping else None,
        step=_median(steps),
        lead=_median(leads),
        healthy=len(healthy),
        healthy_alarms=sum(first is not None for first in healthy) / len(healthy) if healthy else None,
        texts=len(texts),
        text_alarms=len(alarmed) / len(texts) if texts else None,
        alarmed=alarmed,
    )
