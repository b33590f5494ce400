"""Settings of the monitor for a vocabulary: thresholds that ordinary text almost never crosses.

    python -m experiments.loopguard.calibrate ordinary.txt [--tokenizer NAME] [--rate 10] [--out settings.json]

The file holds ordinary text, or JSON lines with outputs without loops. `sinkscope loops --settings settings.json` uses
what was fitted. All thresholds come from one rank: at rank j, each threshold is the value below which the j most
repetitive blocks of the text lie for that signal. j is the largest rank at which the monitor, at 95 % confidence,
raises at most `--rate` alarms per million tokens. This is a tolerance limit (Wilks 1941): it needs no assumption on the
distribution of the signals. The model is assumed to be certain of every token, which is the worst case, and both gates
to open at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import gammaincinv

from experiments.script import run
from experiments.tokenizer import open_tokenizer
from sinkscope.errors import SinkscopeError
from sinkscope.loops import Monitor, MonitorSettings
from sinkscope.loops.outputs import parse

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


@dataclass(frozen=True)
class Calibration:
    """Settings for a vocabulary, and their false alarms on text that they were not fitted to.

    Attributes:
        fitted: Number of tokens that the settings were fitted to.
        held_out: Number of tokens that were held out.
        promised: False alarms per million tokens that the settings should not exceed (95 %): the requested rate, or a
            higher one if the text is too short to verify it.
        monitor: The settings, as `--settings` and `MonitorSettings` accept them.
        rates: False alarms on the held-out text.
    """

    fitted: int
    held_out: int
    promised: float
    monitor: dict[str, Any]
    rates: tuple[AlarmRate, ...]


def calibrate(outputs: Sequence[Sequence[int]], rate: float = 10.0) -> Calibration:
    """Fit the thresholds to every second of these outputs, and count alarms on the others.

    Args:
        outputs: Token ids of texts without loops; a single one is cut into pieces.
        rate: Acceptable false alarms per million tokens.
    """
    base = MonitorSettings()
    if len(outputs) == 1:
        outputs = _in_pieces(outputs[0])
    fitted, held_out = outputs[::2], outputs[1::2]
    fitted_tokens = sum(len(ids) for ids in fitted)
    held_tokens = sum(len(ids) for ids in held_out)
    if min(fitted_tokens, held_tokens) < FEWEST_TOKENS // 2:
        total = fitted_tokens + held_tokens
        raise SinkscopeError(f"the text has {total} tokens: expected at least {FEWEST_TOKENS}; a million are better")
    signals, starts = _signals(fitted, base)
    lowest = np.sort(np.minimum.reduceat(signals, starts), axis=0)  # [block signal], sorted by block
    counts = np.arange(1, len(lowest) + held_tokens)
    limits = 1e6 * gammaincinv(counts, CONFIDENCE)  # [alarms]: upper limit of the mean of 0, 1, 2, ... alarms
    allowed = int((limits[1 : len(lowest)] <= rate * fitted_tokens).sum())  # alarms that the fitted text may have
    thresholds = np.floor(lowest[_rank(signals, starts, lowest, allowed)] * 1000) / 1000
    recommended: dict[str, Any] = {"window": base.window}
    for place, signal in enumerate(SIGNALS):
        recommended[signal] = float(thresholds[place])
    longest_allowed = 1 - int(lowest[allowed, 3])
    recommended["tail_shortest"] = max(FEWEST_TAIL_TOKENS, longest_allowed)  # holds where nothing else must be met
    paper = MonitorSettings.paper(window=base.window)
    rules = {
        "monitor, default": base,
        "monitor, recommended": replace(base, **recommended),
        "paper's monitor, default": paper,
        "paper's monitor, recommended": replace(paper, **recommended),
    }
    rates: list[AlarmRate] = []
    for rule, settings in rules.items():
        alarms = sum(_alarms(ids, settings) for ids in held_out)
        rates.append(AlarmRate(rule, alarms, alarms * 1e6 / held_tokens, float(limits[alarms]) / held_tokens))
    promised = max(rate, float(limits[0]) / fitted_tokens)
    return Calibration(fitted_tokens, held_tokens, promised, recommended, tuple(rates))


def _in_pieces(ids: Sequence[int]) -> list[Sequence[int]]:
    """A single text in pieces, so that every second one can be held out."""
    length = max(1, math.ceil(len(ids) / PIECES))
    return [ids[start : start + length] for start in range(0, len(ids), length)]


def _rank(signals: np.ndarray, starts: list[int], lowest: np.ndarray, allowed: int) -> int:
    """The largest rank at which at most `allowed` blocks of the fitted text raise an alarm."""
    ranks: list[np.ndarray] = []  # for each signal, the rank from which on a step crosses its threshold
    for place in range(4):
        ranks.append(np.searchsorted(lowest[:, place], signals[:, place], "right"))
    ttr, cr, novelty, tail = ranks
    one_vote = np.minimum(ttr, cr)  # the model's certainty is the other one
    one_gate = np.minimum(novelty, tail)
    first_ranks = np.sort(np.minimum.reduceat(np.maximum(one_vote, one_gate), starts))
    return min(int(first_ranks[allowed]) - 1, int(len(lowest) * UNUSUAL))


def _signals(outputs: Sequence[Sequence[int]], base: MonitorSettings) -> tuple[np.ndarray, list[int]]:
    """Type-token ratio, compression ratio, novelty, minus the tokens of the tail `[step signal]`; starts of blocks."""
    values: list[tuple[float, ...]] = []
    starts: list[int] = []
    for ids in outputs:
        windowed = Monitor(MonitorSettings.paper(rule="never", window=base.window))
        repeats = Monitor(replace(base, tail_shortest=12))
        for position, token in enumerate(ids):
            if position % BLOCK == 0:
                starts.append(len(values))
            step = windowed.update(token)
            tail = repeats.update(token).tail
            length = 0 if tail is None else tail.start - position - 1
            if position < FIRST_STEP:
                values.append((1.0, 1.0, 1.0, length))
            else:
                values.append((step.ttr, step.cr, step.novelty, length))
    return np.array(values), starts


def _alarms(ids: Sequence[int], settings: MonitorSettings) -> int:
    """Alarms where the model is sure of every token; those that follow each other count once."""
    monitor = Monitor(settings)
    alarms = 0
    for token in ids:
        step = monitor.update(token, 1.0)
        if step.trigger and not step.level:
            alarms += 1
    return alarms


def read_ids(path: Path, tokenizer: str | None) -> list[list[int]]:
    """Token ids of a text, or of each line of JSON; without a tokenizer, text is split into words."""
    if tokenizer is None:
        return [record.ids for record in parse(path.read_text(), path.name)]
    texts = [path.read_text()]
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in texts[0].splitlines()]
        texts = [row.get("output") or row["text"] for row in rows]
    encode = open_tokenizer(tokenizer)
    return [encode(text, add_special_tokens=False)["input_ids"] for text in texts]


def main(file: Path, *, tokenizer: str | None = None, rate: float = 10.0, out: Path = Path("settings.json")) -> None:
    """Make what the module describes.

    Args:
        tokenizer: Model whose vocabulary it is; by default text is split into words.
        rate: Accepted false alarms per million tokens.
    """
    fit = calibrate(read_ids(file, tokenizer), rate)
    for one in fit.rates:
        print(f"{one.rule}: {one.per_million:.3g} false alarms per million tokens (at most {one.at_most:.3g})")
    print(f"On more such text these settings should raise at most {fit.promised:.3g}: {json.dumps(fit.monitor)}")
    out.write_text(json.dumps(fit.monitor) + "\n")


if __name__ == "__main__":
    run(main)
