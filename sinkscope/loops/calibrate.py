"""`calibrate` fits the monitor to a vocabulary: thresholds that ordinary text almost never crosses."""

from __future__ import annotations

import json
import math
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from sinkscope.errors import SinkscopeError
from sinkscope.files.console import silent
from sinkscope.files.records import check_values, said
from sinkscope.files.result import Result
from sinkscope.loops.check import text_info, text_provenance
from sinkscope.loops.monitor import Monitor, MonitorSettings

if TYPE_CHECKING:
    import numpy as np

FIRST_STEP = 64  # the paper's monitor does not trigger before
BLOCK = 256  # tokens that make one event at most
FEWEST_TOKENS = 8192  # of a text
PIECES = 32  # of a single text: every second one is held out
FEWEST_TAIL_TOKENS = 16  # that a repetition needs, however clean the text is
UNUSUAL = 0.02  # of the blocks of ordinary text may cross a threshold; a loop crosses two
SIGNALS = ("theta_ttr", "theta_cr", "theta_nov")
CONFIDENCE = 0.95


@dataclass(frozen=True)
class AlarmRate:
    """False alarms of a rule on the held-out text.

    Attributes:
        rule: Name of the rule, and the source of its settings.
        alarms: Number of alarms; consecutive alarms count once.
        per_million: Alarms per million tokens.
        at_most: 95 % upper limit of the alarms per million tokens (Poisson).
    """

    rule: str
    alarms: int
    per_million: float
    at_most: float


@dataclass(frozen=True, kw_only=True)
class LoopCalibration(Result):
    """Settings for a vocabulary, and their false alarms on text that they were not fitted to.

    Attributes:
        vocabulary: Size of the vocabulary.
        fitted: Number of tokens that the settings were fitted to.
        held_out: Number of tokens that were held out.
        promised: False alarms per million tokens that the settings should not exceed (95 %): the requested rate, or a
            higher one if the text is too short to verify it.
        lowest: Lowest value of each signal in the fitted text, by the name of its threshold.
        longest: Tokens of the longest repetition in the fitted text, exact or nearly so.
        monitor: The settings, as `--settings` and `MonitorSettings` accept them.
        rates: False alarms on the held-out text.
    """

    page: ClassVar[str] = "measure/loops"
    kind: ClassVar[str] = "loop-calibration"

    vocabulary: int
    fitted: int
    held_out: int
    promised: float
    lowest: dict[str, float]
    longest: int
    monitor: dict[str, Any]
    rates: tuple[AlarmRate, ...]

    def conclusion(self) -> str:
        """The measured rate, and that of the default settings."""
        default, recommended = self.rates[0], self.rates[1]
        return (
            f"On {self.held_out} held-out tokens these settings raise {recommended.per_million:.3g} false alarms per "
            f"million tokens; the default settings raise {default.per_million:.3g}."
        )

    def details(self) -> list[str]:
        """What the settings promise, and the settings."""
        extremes: list[str] = []
        for name, value in self.lowest.items():
            extremes.append(f"{name.removeprefix('theta_')} {value:.3g}")
        return [
            f"On more such text they should raise at most {self.promised:.3g} per million tokens "
            f"({CONFIDENCE:.0%} confidence; vocabulary of {self.vocabulary}).",
            f"Most repetitive in the fitted text: {', '.join(extremes)}, and {self.longest} tokens of repetition.",
            f"Monitor: {json.dumps(self.monitor)}",
        ]


@dataclass(frozen=True)
class _BlockSignals:
    """Signals of the fitted text; less is more repetitive.

    Attributes:
        steps: Type-token ratio, compression ratio, novelty, and minus the tokens of the tail `[step signal]`.
        starts: First step of each block.
    """

    steps: np.ndarray
    starts: list[int]


def calibrate(
    outputs: Sequence[Sequence[int]],
    *,
    vocabulary: int,
    rate: float = 10.0,
    settings: MonitorSettings | None = None,
    name: str = "input",
    progress: Callable[[str, int, int], None] = silent,
) -> LoopCalibration:
    """Fit the monitor's thresholds to ordinary text.

    All thresholds come from one rank: at rank j, each threshold is the value below which the j most repetitive blocks
    of the text lie for that signal. j is the largest rank at which the monitor, at 95 % confidence, raises at most
    `rate` alarms per million tokens. This is a tolerance limit (Wilks 1941): it needs no assumption on the distribution
    of the signals. The model is assumed to be certain of every token, which is the worst case, and both gates to open
    at once.

    Args:
        outputs: Token ids of texts without loops. Every second one is held out; a single one is cut into pieces.
        vocabulary: Size of the vocabulary.
        rate: Acceptable false alarms per million tokens.
        settings: Settings of the monitor (rule "repeats"), except for the thresholds.
        name: Name of the text in the result.
        progress: Called with a stage, the amount done and the total.

    Raises:
        SinkscopeError: The text is too short, or `rate` is not positive.
    """
    import numpy as np
    from scipy.special import gammaincinv

    started = time.perf_counter()
    base = settings or MonitorSettings()
    check_values(Annotated[float, Field(gt=0), said("false alarms per million tokens, more than 0")], rate=rate)
    if len(outputs) == 1:
        outputs = _in_pieces(outputs[0])
    fitted, held_out = outputs[::2], outputs[1::2]
    fitted_tokens = sum(len(ids) for ids in fitted)
    held_tokens = sum(len(ids) for ids in held_out)
    if min(fitted_tokens, held_tokens) < FEWEST_TOKENS // 2:
        total = fitted_tokens + held_tokens
        raise SinkscopeError(f"{name} has {total} tokens: expected at least {FEWEST_TOKENS}; a million are better")
    signals = _block_signals(fitted, base, progress)
    lowest = np.sort(np.minimum.reduceat(signals.steps, signals.starts), axis=0)  # [block signal], sorted by block
    counts = np.arange(1, len(lowest) + held_tokens)
    limits = 1e6 * gammaincinv(counts, CONFIDENCE)  # [alarms]: upper limit of the mean of 0, 1, 2, ... alarms
    allowed = int((limits[1 : len(lowest)] <= rate * fitted_tokens).sum())  # alarms that the fitted text may have
    rank = _rank(signals, lowest, allowed)
    thresholds = np.floor(lowest[rank] * 1000) / 1000
    recommended: dict[str, Any] = {"window": base.window}
    for place, signal in enumerate(SIGNALS):
        recommended[signal] = float(thresholds[place])
    longest_allowed = 1 - int(lowest[allowed, 3])
    recommended["tail_shortest"] = max(FEWEST_TAIL_TOKENS, longest_allowed)  # holds where nothing else must be met
    paper = MonitorSettings.paper(window=base.window)
    rules = {
        "monitor, default": base,
        "monitor, recommended": base.with_(**recommended),
        "paper's monitor, default": paper,
        "paper's monitor, recommended": paper.with_(**recommended),
    }
    rates: list[AlarmRate] = []
    for rule, rule_settings in rules.items():
        progress("counting", len(rates), len(rules))
        alarms = sum(_alarms(ids, rule_settings) for ids in held_out)
        per_million = alarms * 1e6 / held_tokens
        rates.append(AlarmRate(rule, alarms, per_million, float(limits[alarms]) / held_tokens))
    return LoopCalibration(
        vocabulary=vocabulary,
        fitted=fitted_tokens,
        held_out=held_tokens,
        promised=max(rate, float(limits[0]) / fitted_tokens),
        lowest={signal: float(lowest[0, place]) for place, signal in enumerate(SIGNALS)},
        longest=-int(lowest[0, 3]),
        monitor=recommended,
        rates=tuple(rates),
        model=text_info(name, outputs),
        settings={**vars(base), "rate": rate},
        provenance=text_provenance(started),
    )


def _in_pieces(ids: Sequence[int]) -> list[Sequence[int]]:
    """A single text in pieces, so that every second one can be held out."""
    length = max(1, math.ceil(len(ids) / PIECES))
    return [ids[start : start + length] for start in range(0, len(ids), length)]


def _rank(signals: _BlockSignals, lowest: np.ndarray, allowed: int) -> int:
    """The largest rank at which at most `allowed` blocks of the fitted text raise an alarm."""
    import numpy as np

    ranks: list[np.ndarray] = []  # for each signal, the rank from which on a step crosses its threshold
    for place in range(4):
        ranks.append(np.searchsorted(lowest[:, place], signals.steps[:, place], "right"))
    ttr, cr, novelty, tail = ranks
    one_vote = np.minimum(ttr, cr)  # the model's certainty is the other one
    one_gate = np.minimum(novelty, tail)
    trigger_ranks = np.maximum(one_vote, one_gate)
    first_ranks = np.sort(np.minimum.reduceat(trigger_ranks, signals.starts))
    return min(int(first_ranks[allowed]) - 1, int(len(lowest) * UNUSUAL))


def _block_signals(
    outputs: Sequence[Sequence[int]], base: MonitorSettings, progress: Callable[[str, int, int], None]
) -> _BlockSignals:
    import numpy as np

    values = array("d")
    starts: list[int] = []
    for place, ids in enumerate(outputs):
        progress("reading", place, len(outputs))
        windowed = Monitor(MonitorSettings.paper(rule="never", window=base.window))
        repeats = Monitor(base.with_(rule="repeats", tail_shortest=12))
        for position, token in enumerate(ids):
            if position % BLOCK == 0:
                starts.append(len(values) // 4)
            step = windowed.update(token)
            tail = repeats.update(token).tail
            if position < FIRST_STEP:
                values.extend((1.0, 1.0, 1.0))
            else:
                values.extend((step.ttr, step.cr, step.novelty))
            values.append(0 if tail is None else tail.start - position - 1)
    return _BlockSignals(np.array(values).reshape(-1, 4), starts)


def _alarms(ids: Sequence[int], settings: MonitorSettings) -> int:
    """Alarms where the model is sure of every token; those that follow each other count once."""
    monitor = Monitor(settings)
    alarms = 0
    for token in ids:
        step = monitor.update(token, 1.0)
        if step.trigger and not step.level:
            alarms += 1
    return alarms
