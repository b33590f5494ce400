"""What is made of records: numbers per run, per method, and how well a monitor alone would have seen it coming."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from sinkscope.bench.loopbench.store import Record
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


@dataclass(frozen=True)
class RunMetrics:
    """One run.

    Attributes:
        ttr: type-token ratio of all new tokens (Eq. 5).
        cr: compression ratio of all new tokens (Eq. 6).
        length: new tokens.
        loop: the loop rule (Eq. 7), its length 20 below the cap.
        tail_loop: the rule without the length, on the last `window` tokens.
        seq_rep_4: share of 4-grams that were there before.
        distinct_2: share of 2-grams that are different.
        collapse: step from which the window's type-token ratio stays below 0.2; None: it does not.
        interventions: steps of a guard's interventions.
    """

    ttr: float
    cr: float
    length: int
    loop: bool
    tail_loop: bool
    seq_rep_4: float
    distinct_2: float
    collapse: int | None
    interventions: tuple[int, ...]


def run_metrics(record: Record, cap: int, window: int) -> RunMetrics:
    """Metrics of one run, from its tokens and events alone.

    Args:
        record: the run.
        cap: new tokens it was allowed.
        window: of the signals.
    """
    ids = record.tokens
    return RunMetrics(
        ttr=type_token_ratio(ids),
        cr=compression_ratio(ids),
        length=len(ids),
        loop=is_loop(ids, cap, theta_len=cap - SLACK),
        tail_loop=ends_in_loop(ids, window),
        seq_rep_4=seq_rep(ids, 4),
        distinct_2=distinct(ids, 2),
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
    bench: str, model: str, method: str, records: Sequence[Record], *, cap: int, window: int, guarded: bool
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
    runs = [run_metrics(record, cap, window) for record in records]
    rate = wilson(sum(run.loop for run in runs), len(runs))
    collapses = [run.collapse for run in runs]
    ends = [record.ended for record in records]
    positions = tuple(step for run in runs for step in run.interventions)
    return Group(
        bench=bench,
        model=model,
        method=method,
        runs=len(runs),
        prompt_tokens=fmean(record.prompt_tokens for record in records),
        cr=fmean(run.cr for run in runs),
        ttr=fmean(run.ttr for run in runs),
        length=fmean(run.length for run in runs),
        loop=rate.share,
        loop_low=rate.low,
        loop_high=rate.high,
        tail_loop=fmean(run.tail_loop for run in runs),
        eos=ends.count("eos") / len(ends),
        stopped=ends.count("stopped") / len(ends),
        cap=ends.count("cap") / len(ends),
        seq_rep_4=_mean(run.seq_rep_4 for run in runs),
        distinct_2=_mean(run.distinct_2 for run in runs),
        collapsed=sum(point is not None for point in collapses) / len(collapses),
        collapse_point=_median([p for p in collapses if p is not None]),
        steps=survival_steps(cap),
        survival=tuple(survival(collapses, survival_steps(cap))),
        cached_mean=fmean(record.cached_mean for record in records),
        cached_peak=fmean(record.cached_peak for record in records),
        interventions=len(positions) / len(runs) if guarded else None,
        early=sum(s < EARLY * cap / 2500 for s in positions) / len(positions) if positions else None,
        counts=tuple(len(run.interventions) for run in runs) if guarded else (),
        positions=positions,
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


def detection(model: str, detector: str, runs: Sequence[Record], texts: Sequence[Record], *, window: int) -> Detection:
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
