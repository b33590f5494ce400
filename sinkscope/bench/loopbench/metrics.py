"""Numbers computed from records: per run, per method, and how early a monitor alone would have detected the loop."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, ClassVar, Literal

from sinkscope.bench.files import Contents, Finished, read_folder
from sinkscope.files.rate import mean_known, wilson
from sinkscope.loops.signals import (
    collapse_point,
    compression_ratio,
    distinct,
    ends_in_loop,
    is_loop,
    seq_rep,
    survival,
    tail_period,
    type_token_ratio,
)

EARLY = 400  # of 2,500 tokens; the same share of any other cap. Fig. 4 b calls 0 to 400 early
PERIODS, ONSETS = (
    ((2, 16), (24, 48), (64, 128)),
    (0, 30, 200, 600),
)  # of the loop organism's prompts, as tables join them
INTERVENTION = "guard"  # kind of the event that a guard's intervention is
SURVIVAL_POINTS = 50
TEXT = "text"  # what stands for the method where a text is read
Ended = Literal["eos", "stopped", "cap"]


@dataclass(frozen=True)
class Continued(Finished):
    """One prompt continued by one method.

    Attributes:
        bench: Set that the prompt belongs to.
        temperature: Sampling temperature; 0 is greedy.
        seed: Seed of the sampling.
        prompt_tokens: Length of the prompt, including BOS.
        tokens: Ids of the new tokens, up to and including the end of sequence if it occurred.
        text: The decoded new tokens.
        ended: Why it ended: by the end of sequence, by a stopper, or at the maximum of new tokens.
        top1: Probability of the model's top prediction, for each new token.
        signals: "step" and, in lists of the same length, the signals over the last window of tokens at each step.
        detected: Step at which each variant of the monitor would first have fired as an observer; for outputs without
            intervention (method "full") and for texts that were only read.
        events: Actions of the method: step, position, kind and data. Step s follows s new tokens.
        cut: Step of a guard's first intervention; without one, the step at which the default monitor would first have
            fired. None if it would not have fired.
        nll: Mean surprise of the tokens after the cut, in nats per token, for the same model with a clean cache, which
            reads only the prompt and these tokens. None if there are none.
        fresh: Share of the complete sentences after the cut that occur nowhere before; None if there are none.
        cached_mean: Tokens in the cache, mean over steps, layers and kv heads.
        cached_peak: The same at the step with the most tokens.
        seconds: Wall-clock time of the batch it ran in.
        batch_size: Number of rows in that batch.
    """

    identity: ClassVar[tuple[str, ...]] = (*Finished.identity, "temperature", "seed")

    bench: str
    temperature: float
    seed: int
    prompt_tokens: int
    tokens: tuple[int, ...]
    text: str
    ended: Ended
    top1: tuple[float, ...]
    signals: dict[str, list[Any]]
    detected: dict[str, int | None]
    events: tuple[dict[str, Any], ...]
    cut: int | None
    nll: float | None
    fresh: float | None
    cached_mean: float
    cached_peak: float
    seconds: float
    batch_size: int

    @property
    def label(self) -> str:
        """The method and its sampling settings."""
        return f"{self.method} at {self.temperature:g}, seed {self.seed}" if self.temperature else self.method


def read_run(folder: str | os.PathLike[str]) -> Contents[Continued]:
    """Read the current contents of a folder of `loopbench run`; see `read_folder`."""
    return read_folder(folder, Continued, "loopbench")


@dataclass(frozen=True)
class Ending:
    """The diversity of one run, and how it ended.

    Attributes:
        length: Number of new tokens.
        ttr: Type-token ratio of all new tokens (Eq. 5).
        cr: Compression ratio of all new tokens (Eq. 6).
        loop: Result of the loop rule (Eq. 7), see `is_loop`.
        tail_loop: Result of the rule without the length, on the last window of tokens.
        collapse: Step from which the window's type-token ratio stays below 0.2; None if it does not.
        interventions: Steps of a guard's interventions.
    """

    length: int
    ttr: float
    cr: float
    loop: bool
    tail_loop: bool
    collapse: int | None
    interventions: tuple[int, ...]


def ending(record: Continued, cap: int, window: int) -> Ending:
    """Metrics of one run, computed only from its tokens and events.

    Args:
        record: The run.
        cap: Maximum number of new tokens it was allowed.
        window: Window of the signals in tokens.
    """
    ids = record.tokens
    return Ending(
        length=len(ids),
        ttr=type_token_ratio(ids),
        cr=compression_ratio(ids),
        loop=is_loop(ids, cap),
        tail_loop=ends_in_loop(ids, window),
        collapse=collapse_point(ids, window),
        interventions=tuple(e["step"] for e in record.events if e["kind"] == INTERVENTION),
    )


@dataclass(frozen=True)
class Group:
    """All runs of one method on one set by one model; values are means unless stated otherwise.

    Attributes:
        bench: Name of the set.
        model: Name of the model.
        method: Name of the method.
        temperature: Sampling temperature; runs with different seeds are counted together.
        runs: Number of runs.
        prompt_tokens: Length of the prompts.
        cr: Compression ratio.
        ttr: Type-token ratio.
        length: Number of new tokens.
        loop: Share that the loop rule flags; `loop_low` to `loop_high` is its 95 % interval (Wilson).
        tail_loop: Share that the rule without the length flags on the last window.
        eos: Share that ended by the end of sequence.
        stopped: Share that a stopper ended.
        cap: Share that reached the maximum of new tokens.
        seq_rep_4: Share of repeated 4-grams.
        distinct_2: Share of distinct 2-grams.
        collapsed: Share that collapsed permanently.
        collapse_point: Median step of these collapses; None if no run collapsed.
        steps: Steps at which survival is measured.
        survival: Share not collapsed by each of these steps.
        cached_mean: Tokens in the cache per layer and kv head, mean over steps.
        cached_peak: Largest number of cached tokens, mean over runs.
        interventions: A guard's interventions per run; None if there is no guard.
        early: Share of interventions before 400 of 2,500 tokens; None if there were none.
        alarmed: Number of runs that were cut, or that the monitor would have cut, and that continued.
        alarm: Median step of the cut.
        perplexity: Perplexity after the cut, for the same model with a clean cache: exp of the mean over runs of `nll`.
        fresh: Share of new sentences after the cut, mean over runs.
        reached: Share of these runs that ended by the end of sequence.
        counts: Number of interventions in each run.
        positions: Steps of all interventions.
    """

    bench: str
    model: str
    method: str
    temperature: float
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
    alarmed: int
    alarm: float | None
    perplexity: float | None
    fresh: float | None
    reached: float | None
    counts: tuple[int, ...]
    positions: tuple[int, ...]


_END = re.compile(r"(?<=[.!?…])[\"'”’)]*\s+|\n+")
_WORD = re.compile(r"\w+")


def fresh_sentences(before: str, after: str, *, whole: bool) -> float | None:
    """Share of a text's sentences that occur neither before it nor earlier in it; None without a complete sentence.

    A sentence ends at a full stop, a question mark, an exclamation mark or a line end. Two sentences with the same
    words are equal. The text begins in the middle of a sentence, which is not counted.

    Args:
        before: The preceding text.
        after: The text.
        whole: Whether the text ended by itself, so that its last sentence is complete.
    """
    known = {tuple(_WORD.findall(each.lower())) for each in _END.split(before)}
    fresh: list[bool] = []
    for each in _END.split(after)[1 : None if whole else -1]:
        words = tuple(_WORD.findall(each.lower()))
        if words:
            fresh.append(words not in known)
            known.add(words)
    return mean_known(fresh)


@dataclass(frozen=True)
class Planted:
    """The loop organism with one method: its prompts state whether and where it loops.

    A run counts as a loop if it reaches the maximum of new tokens and its last tokens are three copies of a cycle.

    Attributes:
        model: Name of the model.
        method: Name of the method.
        runs: Number of prompts that loop with the full cache.
        loop: Share of these prompts that loop; `loop_low` to `loop_high` is its 95 % interval (Wilson).
        eos: Share of these prompts that ended by the end of sequence.
        period_2_16: Loops out of all runs whose cycle has 2 to 16 tokens; the following fields likewise.
        onset_0: Loops out of all runs whose cycle begins after 0 new tokens; the following fields likewise.
        older: The same for prompts that begin with older copies of the cycle.
        honest: Number of prompts that repeat legitimately.
        honest_cut: Share of these prompts that a guard cut or a stopper stopped.
        honest_same: Share of these prompts whose output equals that of the full cache; None if "full" was not run.
    """

    model: str
    method: str
    runs: int
    loop: float
    loop_low: float
    loop_high: float
    eos: float
    period_2_16: str
    period_24_48: str
    period_64_128: str
    onset_0: str
    onset_30: str
    onset_200: str
    onset_600: str
    older: str
    honest: int
    honest_cut: float | None
    honest_same: float | None


def planted(
    model: str,
    method: str,
    records: Sequence[Continued],
    prompts: Mapping[str, Mapping[str, Any]],
    full: Mapping[str, Sequence[int]],
) -> Planted:
    """Results of one method on the prompts of the loop organism.

    Args:
        model: Name of the model.
        method: Name of the method.
        records: Runs of the method.
        prompts: Prompts by id, with their true loops.
        full: Tokens of the full cache by prompt.
    """
    pairs = [(prompts[record.prompt], record) for record in records]
    looping = [(p, r.ended == "cap" and tail_period(r.tokens) is not None) for p, r in pairs if p.get("period")]
    honest = [record for p, record in pairs if not p.get("period")]
    rate = wilson(sum(loops for _, loops in looping), len(looping))

    def some(wanted: Callable[[Mapping[str, Any]], bool]) -> str:
        found = [loops for p, loops in looping if wanted(p)]
        return f"{sum(found)}/{len(found)}"

    return Planted(
        model=model,
        method=method,
        runs=len(looping),
        loop=rate.share,
        loop_low=rate.low,
        loop_high=rate.high,
        eos=fmean(record.ended == "eos" for p, record in pairs if p.get("period")),
        **{f"period_{low}_{high}": some(lambda p, a=low, b=high: a <= p["period"] <= b) for low, high in PERIODS},
        **{f"onset_{onset}": some(lambda p, at=onset: p["onset"] == at) for onset in ONSETS},
        older=some(lambda p: p["id"].endswith("older")),
        honest=len(honest),
        honest_cut=mean_known(r.ended == "stopped" or any(e["kind"] == INTERVENTION for e in r.events) for r in honest),
        honest_same=mean_known(list(r.tokens) == list(full[r.prompt]) for r in honest if r.prompt in full),
    )


def survival_steps(cap: int) -> tuple[int, ...]:
    """Steps at which survival is measured."""
    return tuple(sorted({cap * i // SURVIVAL_POINTS for i in range(1, SURVIVAL_POINTS + 1)} - {0}))


def group(
    bench: str, model: str, method: str, records: Sequence[Continued], *, cap: int, window: int, guarded: bool
) -> Group:
    """Summarize the runs of one method on one set.

    Args:
        bench: Name of the set.
        model: Name of the model.
        method: Name of the method.
        records: Runs of the method, at least one.
        cap: Maximum number of new tokens they were allowed.
        window: Window of the signals in tokens.
        guarded: Whether the method has a guard, so that no event means no intervention.
    """
    runs = [ending(record, cap, window) for record in records]
    rate = wilson(sum(run.loop for run in runs), len(runs))
    collapses = [run.collapse for run in runs]
    collapsed = [point for point in collapses if point is not None]
    counts = tuple(len(run.interventions) for run in runs)
    positions = tuple(step for run in runs for step in run.interventions)
    ends: list[str] = [record.ended for record in records]
    alarmed, after = _went_on(records)
    return Group(
        bench=bench,
        model=model,
        method=method,
        temperature=records[0].temperature,
        runs=len(runs),
        loop=rate.share,
        loop_low=rate.low,
        loop_high=rate.high,
        seq_rep_4=mean_known(seq_rep(record.tokens, 4) for record in records),
        distinct_2=mean_known(distinct(record.tokens, 2) for record in records),
        collapsed=len(collapsed) / len(collapses),
        collapse_point=_median(collapsed),
        steps=survival_steps(cap),
        survival=tuple(survival(collapses, survival_steps(cap))),
        interventions=len(positions) / len(runs) if guarded else None,
        early=sum(s < EARLY * cap / 2500 for s in positions) / len(positions) if positions else None,
        counts=counts if guarded else (),
        positions=positions,
        alarmed=alarmed,
        **after,
        **{end: ends.count(end) / len(ends) for end in ("eos", "stopped", "cap")},
        **{name: fmean(getattr(run, name) for run in runs) for name in ("cr", "ttr", "length", "tail_loop")},
        **{
            name: fmean(getattr(record, name) for record in records)
            for name in ("prompt_tokens", "cached_mean", "cached_peak")
        },
    )


def _went_on(records: Sequence[Continued]) -> tuple[int, dict[str, Any]]:
    """Number of runs that went on after an alarm, and the fields of `Group` about them."""
    after = [record for record in records if record.nll is not None]
    surprise = mean_known(record.nll for record in after)
    return len(after), {
        "alarm": _median([record.cut for record in after if record.cut is not None]),
        "perplexity": None if surprise is None else math.exp(surprise),
        "fresh": mean_known(record.fresh for record in after),
        "reached": mean_known(record.ended == "eos" for record in after),
    }


def _median(values: Sequence[int]) -> float | None:
    return float(median(values)) if values else None


@dataclass(frozen=True)
class Detection:
    """A monitor alone, on outputs without intervention (method "full") and on texts that repeat legitimately.

    A run loops if the loop rule without the length flags its last window. The loop is established at its collapse
    point, from which the window's type-token ratio stays below 0.2 to the end. The lead is that step minus the step of
    the first trigger; it is positive if the monitor is earlier.

    Attributes:
        model: Name of the model.
        detector: Variant of the monitor.
        loops: Number of runs that loop.
        detected: Share of these runs with a trigger.
        step: Median step of the first trigger; None if there was none.
        lead: Median lead, over runs that loop, collapse and are detected; None if there are none.
        healthy: Number of runs that neither loop nor collapse.
        healthy_alarms: Share of these runs with a trigger.
        texts: Number of texts that repeat legitimately.
        text_alarms: Share of these texts with a trigger.
        alarmed: The texts with a trigger.
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
    """Evaluate one variant of the monitor.

    Args:
        model: Name of the model.
        detector: Variant of the monitor.
        runs: Outputs of method "full".
        texts: Texts that repeat legitimately, read by the model.
        window: Window of the signals in tokens.
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
        healthy_alarms=mean_known(first is not None for first in healthy),
        texts=len(texts),
        text_alarms=len(alarmed) / len(texts) if texts else None,
        alarmed=alarmed,
    )
