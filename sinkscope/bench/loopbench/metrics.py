"""What is made of records: numbers per run, per method, and how well a monitor alone would have seen it coming."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, ClassVar, Literal

from sinkscope.bench.files import Contents, Finished, read_folder
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
from sinkscope.rate import mean_known, wilson

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
        bench: the set that the prompt is of.
        temperature: of sampling; 0 is greedy.
        seed: of sampling.
        prompt_tokens: its length, BOS included.
        tokens: ids of the new tokens, up to and with the end of sequence if it came.
        text: the same decoded.
        ended: by the end of sequence, by a stopper, or at the cap of new tokens.
        top1: for each of them the probability that the model gave its likeliest token there.
        signals: "step" and, in lists as long, what was measured over the last window of tokens there.
        detected: step at which each variant of the monitor would have fired first, looking on; for outputs that nobody
            interfered with (method "full") and for texts that were read.
        events: what the method did: step, position, kind and data. Step s came after s new tokens.
        cut: step of a guard's first intervention; where there is none, the step at which the monitor, as it is by
            default, would have fired first; None: it would not have fired.
        nll: how surprising the tokens after the cut are, in nats a token, for the same model with a clean cache: it
            reads the prompt and these tokens alone. None: there are none.
        fresh: share of the whole sentences after the cut that stand nowhere before; None: there are none.
        cached_mean: tokens in the cache, mean over steps, layers and kv heads.
        cached_peak: the same at the step with most.
        seconds: wall clock of the batch it ran in.
        batch_size: rows of that batch.
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
        """The method, and how it was sampled."""
        return f"{self.method} at {self.temperature:g}, seed {self.seed}" if self.temperature else self.method


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
        loop: the loop rule (Eq. 7), see `is_loop`.
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
        loop=is_loop(ids, cap),
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
        temperature: of sampling; runs of several seeds are counted together.
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
        alarmed: runs that were cut, or that the monitor would have cut, and that went on.
        alarm: median step of that.
        perplexity: of the tokens after it, for the same model with a clean cache: exp of the mean over runs of `nll`.
        fresh: share of new sentences after it, mean over runs.
        reached: share of these runs that ended by the end of sequence.
        counts: interventions of each run.
        positions: steps of all interventions.
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
    """Share of the sentences of a text that stand neither before it nor earlier in it; None: it has no whole sentence.

    A sentence ends at a full stop, a question mark, an exclamation mark or a line end. Two with the same words are the
    same. The text begins in the middle of a sentence, which is not counted.

    Args:
        before: what came before.
        after: the text.
        whole: it ended by itself, so that its last sentence is whole.
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
    """The loop organism by one method: where its prompts say whether and where it loops.

    A run loops if it reaches the cap and its last tokens are three copies of a cycle.

    Attributes:
        model: name of the model.
        method: name of the method.
        runs: prompts that loop with the full cache.
        loop: share of them that loop, `loop_low` to `loop_high` its 95 % interval (Wilson).
        eos: share of them that ended by the end of sequence.
        period_2_16: looping runs of all runs whose cycle has so many tokens; further ones alike.
        onset_0: the same, by new tokens before the cycle; further ones alike.
        older: the same where older copies of the cycle stand at the beginning of the prompt.
        honest: prompts that repeat honestly.
        honest_cut: share of them that a guard cut or a stopper stopped.
        honest_same: share of them whose output is that of the full cache; None: "full" was not run.
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
    """What one method made of the prompts of the loop organism.

    Args:
        model: name of the model.
        method: name of the method.
        records: its runs.
        prompts: by id, with their truth.
        full: tokens of the full cache by prompt.
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
        healthy_alarms=mean_known(first is not None for first in healthy),
        texts=len(texts),
        text_alarms=len(alarmed) / len(texts) if texts else None,
        alarmed=alarmed,
    )
