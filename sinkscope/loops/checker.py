"""`check` decides whether texts or token ids end up in a repetition loop; `calibrate` fits the monitor to a vocabulary.

`sinkscope loops` runs both; `--calibrate` finds thresholds that ordinary text almost never crosses.
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from sinkscope.errors import SinkscopeError
from sinkscope.files.console import silent
from sinkscope.files.plain import parse_json
from sinkscope.files.records import Natural, check_values, said
from sinkscope.files.result import ModelInfo, Result, provenance
from sinkscope.loops.monitor import Monitor, MonitorSettings
from sinkscope.loops.signals import (
    Ids,
    Repeats,
    compression_ratio,
    distinct,
    ends_in_loop,
    is_loop,
    seq_rep,
    type_token_ratio,
)

Format = Literal["auto", "text", "jsonl"]
FIELDS = ("tokens", "output", "text")  # of a JSON line, the first that is there: ids are more exact than text
_EXPECTED = "text or output (a string) or tokens (a list of ids)"
_LINES = (".jsonl", ".ndjson")
_WORDS = re.compile(
    r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff]"  # written without spaces: a character each
    r"|(?:(?![\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff])\w){1,12}"
    r"|([^\w\s])\1{0,11}"
)


class TokenRecord(NamedTuple):
    """A model's output as token ids.

    Attributes:
        name: Name of the record in the result.
        ids: Token ids.
    """

    name: str
    ids: list[int]


def split(text: str) -> list[str]:
    """Split into words of at most 12 letters or digits (longer ones in pieces) and other characters, without white
    space.

    No tokenizer is needed, and the tokens are about as long as those of a large vocabulary. Up to 12 equal characters
    in a row form one token, so a ruler is only a few tokens. Chinese, Japanese and Korean characters stand alone.
    """
    return [found[0] for found in _WORDS.finditer(text)]


def number(tokens: Iterable[object]) -> list[int]:
    """Number the tokens in the order of their first occurrence."""
    known: dict[object, int] = {}
    return [known.setdefault(token, len(known)) for token in tokens]


def as_records(given: str | Sequence[Any] | Ids) -> list[TokenRecord]:
    """Records of a text, of token ids, or of several of either; records are returned unchanged.

    Raises:
        SinkscopeError: The input is of another type, or is empty.
    """
    if isinstance(given, str):
        return [_record("text", given)]
    listed = _listed(given)
    if not isinstance(listed, list | tuple) or not listed:
        raise SinkscopeError(f"{_short(given)} cannot be checked: give a text, token ids, or several of either")
    if all(isinstance(one, TokenRecord) for one in listed):
        return list(listed)
    if isinstance(listed[0], int):
        return [_record("ids", listed)]
    return [_record(f"{i}", one) for i, one in enumerate(listed, 1)]


def parse(text: str, name: str, form: Format = "auto") -> list[TokenRecord]:
    """Split the text of a file into records.

    Args:
        text: The file's content.
        name: Name of the file; `.jsonl` and `.ndjson` are JSON lines, anything else is one text.
        form: "text" or "jsonl", overriding the name.

    Raises:
        SinkscopeError: The text is empty, or a line is not an object with one of the fields `FIELDS`.
    """
    if not text.strip():
        raise SinkscopeError(f"{name} is empty: expected a text, or JSON lines with {_EXPECTED}")
    lines = form == "jsonl" or (form == "auto" and name.lower().endswith(_LINES))
    if not lines:
        return [_record(name, text)]
    return [_line(line, f"{name} line {i}", i) for i, line in enumerate(text.split("\n"), 1) if line.strip()]


def _line(line: str, where: str, number_: int) -> TokenRecord:
    try:
        data = parse_json(line)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise SinkscopeError(f"{where} is not JSON ({reason.lower()}): expected an object with {_EXPECTED}") from None
    field = next((f for f in FIELDS if f in data), None) if isinstance(data, dict) else None
    if field is None:
        raise SinkscopeError(f"{where} has none of the fields {', '.join(FIELDS)}: expected an object with {_EXPECTED}")
    return _record(f"line {number_}", data[field], f"{where}: {field}")


def _record(name: str, value: Any, where: str = "the input") -> TokenRecord:
    """A string, a list of ids, or a list of strings."""
    if isinstance(value, str):
        return TokenRecord(name, number(split(value)))
    value = _listed(value)
    if isinstance(value, list | tuple):
        if all(isinstance(v, str) for v in value):
            return TokenRecord(name, number(value))
        if all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 1 << 32 for v in value):
            return TokenRecord(name, list(value))
    raise SinkscopeError(f"{where} is {_short(value)}: expected a string, or a list of token ids from 0 to 2**32 - 1")


def _listed(value: Any) -> Any:
    """Arrays and tensors as lists."""
    to_list = getattr(value, "tolist", None)
    return to_list() if callable(to_list) else value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


POINTS = 128  # of a record's curve
REPEATS, SHORTEST, LONGEST = 3, 16, 2048  # copies and tokens of a stretch that is reported, and its longest period


@dataclass(frozen=True)
class Checked:
    """The result for one record.

    Attributes:
        name: Name such as "line 3", or the file's name.
        tokens: Number of tokens.
        ttr: Type-token ratio of the whole record.
        cr: Compression ratio of the whole record.
        seq_rep_4: Share of 4-grams that repeat an earlier one.
        distinct_2: Distinct 2-grams divided by 2-grams.
        period: Period of the longest repeated stretch, either exact with at least 3 copies and 16 tokens or found by
            the monitor. None if no stretch has a period of up to 2,048 tokens.
        onset: Position of the first token of that stretch.
        repeats: Number of copies in that stretch.
        detected: First step at which the monitor triggers; None if it never does.
        loop: Whether the monitor triggers.
        ends_in_loop: Whether the loop rule without length holds for the last window.
        loop_rule: Whether the loop rule with length holds (Eq. 7); None if the maximum number of tokens was not given.
        steps: Steps at which `curve` was measured.
        curve: Type-token ratio of the window at these steps.
    """

    name: str
    tokens: int
    ttr: float | None
    cr: float | None
    seq_rep_4: float | None
    distinct_2: float | None
    period: int | None
    onset: int | None
    repeats: float | None
    detected: int | None
    loop: bool
    ends_in_loop: bool
    loop_rule: bool | None
    steps: tuple[int, ...]
    curve: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class LoopCheck(Result):
    """Which of the records loop.

    Attributes:
        loops: Number of records that loop.
        records: Results for each record.
    """

    kind: ClassVar[str] = "loops"
    drawing: ClassVar[Any] = "sinkscope.figures.repetition:draw_loops"
    table_without: ClassVar[tuple[str, ...]] = ("steps", "curve")

    loops: int
    records: tuple[Checked, ...]

    def conclusion(self) -> str:
        """How many records loop and where the loops begin, and the diversity of looping and other records."""
        found, others = ([r for r in self.records if r.loop == loops] for loops in (True, False))
        onset, period, ttr, other = (
            statistics.median(known)
            if (known := [getattr(r, name) for r in part if getattr(r, name) is not None])
            else None
            for part, name in ((found, "onset"), (found, "period"), (found, "ttr"), (others, "ttr"))
        )
        where = "" if period is None else f"; median period {period:g}, median onset at token {onset:g}"
        ratio = "" if ttr is None else f"; their median type-token ratio is {ttr:.2g}"
        calm = (
            ", and there is no other output to compare with" if other is None else f", that of the others {other:.2g}"
        )
        told = f"{self.loops} of {len(self.records)} outputs in {self.model.name} loop{where}"
        return f"{told}{ratio}{calm if ratio else ''}."


def check(
    given: str | Sequence[Any] | Ids,
    *,
    settings: MonitorSettings | None = None,
    max_new: int | None = None,
    name: str = "input",
    progress: Callable[[str, int, int], None] | None = None,
) -> LoopCheck:
    """Check outputs for repetition loops; no model, no tokenizer and no torch are needed.

    A record loops if the monitor triggers in it. By default this happens as soon as there are 3 copies of anything that
    cover at least 48 tokens and are exact or nearly so. With `MonitorSettings.paper()`, LoopGuard's monitor decides.
    Because there are no probabilities, its other two votes (type-token ratio and compression ratio) must agree, and one
    of its gates (stalled novelty or tail repetition) must hold.

    Args:
        given: A text, token ids, or several of either; or records that `loops.records.parse` makes from a file.
        settings: Settings of the monitor.
        max_new: Maximum number of new tokens, for the loop rule with length (LoopGuard, Eq. 7).
        name: Name of the input in the result.
        progress: Called with a stage, the amount done and the total.

    Returns:
        A `LoopCheck`.

    Raises:
        SinkscopeError: The input is empty or neither text nor ids, or the settings need probabilities.
    """
    started = time.perf_counter()
    settings = settings or MonitorSettings()
    check_values(Natural | None, max_new=max_new)
    records = as_records(given)
    checked: list[Checked] = []
    for i, record in enumerate(records):
        if progress is not None:
            progress("checking", i, len(records))
        checked.append(_checked(record, settings, max_new))
    digest = hashlib.sha256(b"".join(array("I", r.ids).tobytes() + b"|" for r in records)).hexdigest()[:16]
    return LoopCheck(
        loops=sum(c.loop for c in checked),
        records=tuple(checked),
        model=ModelInfo(name=name, family="text", n_layers=0, d_model=0, d_mlp=0, fingerprint=digest),
        settings={**vars(settings), "max_new": max_new},
        provenance=provenance(started=started, device="cpu", dtype="int", attention="none", bos=None, seed=0),
    )


def _checked(record: TokenRecord, settings: MonitorSettings, max_new: int | None) -> Checked:
    ids = record.ids
    monitor = Monitor(settings)
    every = max(1, -(-len(ids) // POINTS))
    exact = Repeats(LONGEST, REPEATS, SHORTEST, 0.0)
    longest: tuple[int, int, int] | None = None  # tokens, period, onset
    detected: int | None = None
    steps: list[int] = []
    curve: list[float] = []
    for i, token in enumerate(ids):
        step = monitor.update(token)
        if step.trigger and detected is None:
            detected = step.step
        for run in (exact.add(token, i), step.tail and step.tail[:2]):
            if run is not None and (longest is None or i + 1 - run[1] > longest[0]):
                longest = (i + 1 - run[1], *run)
        if step.step % every == 0 or step.step == len(ids):
            steps.append(step.step)
            curve.append(round(step.ttr, 4))
    return Checked(
        name=record.name,
        tokens=len(ids),
        ttr=_known(type_token_ratio(ids)),
        cr=_known(compression_ratio(ids)),
        seq_rep_4=_known(seq_rep(ids, 4)),
        distinct_2=_known(distinct(ids, 2)),
        period=longest and longest[1],
        onset=longest and longest[2],
        repeats=longest and longest[0] / longest[1],
        detected=detected,
        loop=detected is not None,
        ends_in_loop=ends_in_loop(ids, settings.window, theta_ttr=settings.theta_ttr, theta_cr=settings.theta_cr),
        loop_rule=None
        if max_new is None
        else is_loop(ids, max_new, theta_ttr=settings.theta_ttr, theta_cr=settings.theta_cr),
        steps=tuple(steps),
        curve=tuple(curve),
    )


def _known(value: float) -> float | None:
    """None for NaN, which JSON cannot represent."""
    return None if value != value else value


START = 64  # the paper's monitor does not trigger before
BLOCK = 256  # tokens that make one event at most
LEAST = 8192  # tokens of a text
PIECES = 32  # of a single text: every second one is held out
LEAST_TAIL = 16  # tokens that a repetition needs, however clean the text is
LARGEST_PATTERN = 1024  # largest pattern that servers are told to look for
COPIES = {"vllm": 3, "llama_cpp": 4}  # what their users take
UNUSUAL = 0.02  # of the blocks of ordinary text may cross a threshold; a loop crosses two
SIGNALS = ("theta_ttr", "theta_cr", "theta_nov")


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
        servers: Settings of the rules of vLLM and of llama.cpp's server, by name.
        rates: False alarms on the held-out text.
    """

    page: ClassVar[str] = "measure/loops"
    kind: ClassVar[str] = "loop-calibration"
    drawing: ClassVar[Any] = "sinkscope.figures.repetition:draw_calibration"

    vocabulary: int
    fitted: int
    held_out: int
    promised: float
    lowest: dict[str, float]
    longest: int
    monitor: dict[str, Any]
    servers: dict[str, dict[str, int]]
    rates: tuple[AlarmRate, ...]

    def conclusion(self) -> str:
        """The promised rate and the measured one."""
        found = self.rates[1]
        return (
            f"For a vocabulary of {self.vocabulary}, these settings should raise at most {self.promised:.3g} false "
            f"alarms per million tokens of such text; on {self.held_out} held-out tokens they raised {found.alarms} "
            f"({found.per_million:.3g} per million), and the default ones {self.rates[0].alarms}."
        )

    def details(self) -> list[str]:
        """The settings in the format of each program."""
        extremes = ", ".join(f"{name.removeprefix('theta_')} {value:.3g}" for name, value in self.lowest.items())
        return [
            f"Most repetitive in the fitted text: {extremes}, and {self.longest} tokens of repetition.",
            f"Monitor: {json.dumps(self.monitor)}",
            f"vLLM, in a request: {json.dumps({'repetition_detection': self.servers['vllm']})}",
            "llama.cpp with --repetition-detection, in a request: "
            + json.dumps({"repetition_detection": self.servers["llama_cpp"]}),
        ]


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

    started, base = time.perf_counter(), settings or MonitorSettings()
    check_values(Annotated[float, Field(gt=0), said("false alarms per million tokens, more than 0")], rate=rate)
    if len(outputs) == 1:
        piece = -(-len(outputs[0]) // PIECES) or 1
        outputs = [outputs[0][i : i + piece] for i in range(0, len(outputs[0]), piece)]
    size, rest = (sum(map(len, part)) for part in (outputs[::2], outputs[1::2]))
    if min(size, rest) < LEAST // 2:
        raise SinkscopeError(f"{name} has {size + rest} tokens: expected at least {LEAST}; a million are better")
    table, starts = _signals(outputs[::2], base, progress)
    lows = np.sort(np.minimum.reduceat(table, starts), axis=0)
    limit: list[float] = (1e6 * gammaincinv(range(1, len(lows) + rest), 0.95)).tolist()  # of the mean of 0, 1, ...
    events = sum(most <= rate * size for most in limit[1 : len(lows)])  # that the text may have
    ttr, cr, nov, tail = (np.searchsorted(low, values, "right") for low, values in zip(lows.T, table.T, strict=True))
    ranks = np.maximum(np.minimum(ttr, cr), np.minimum(nov, tail))  # from which on a step triggers
    rank = min(int(np.sort(np.minimum.reduceat(ranks, starts))[events]) - 1, int(len(lows) * UNUSUAL))
    thetas = np.floor(lows[rank] * 1000) / 1000
    changed: dict[str, Any] = {"window": base.window, **dict(zip(SIGNALS, thetas.tolist(), strict=False))}
    changed["tail_shortest"] = max(LEAST_TAIL, 1 - int(lows[events, 3]))  # holds also where nothing else must be met
    paper = MonitorSettings.paper(window=base.window)
    rules = {
        "monitor, default": base,
        "monitor, recommended": base.with_(**changed),
        "paper's monitor, default": paper,
        "paper's monitor, recommended": paper.with_(**changed),
    }
    servers: dict[str, dict[str, int]] = {}
    for server, copies in COPIES.items():
        size_ = min(LARGEST_PATTERN, -(-changed["tail_shortest"] // copies))
        servers[server] = {"max_pattern_size": LARGEST_PATTERN, "min_pattern_size": size_, "min_count": copies}
        same = {"tail_repeats": copies, "tail_shortest": size_ * copies, "tail_longest": LARGEST_PATTERN}
        rules[f"{server}, recommended"] = MonitorSettings().with_(tail_noise=0.0, **same)
    rates: list[AlarmRate] = []
    for rule, used in rules.items():
        progress("counting", len(rates), len(rules))
        alarms = sum(_alarms(ids, used) for ids in outputs[1::2])
        rates.append(AlarmRate(rule, alarms, alarms * 1e6 / rest, limit[alarms] / rest))
    digest = hashlib.sha256(b"".join(array("I", ids).tobytes() + b"|" for ids in outputs)).hexdigest()[:16]
    return LoopCalibration(
        vocabulary=vocabulary,
        fitted=size,
        held_out=rest,
        promised=max(rate, limit[0] / size),
        lowest=dict(zip(SIGNALS, lows[0].tolist(), strict=False)),
        longest=-int(lows[0, 3]),
        monitor=changed,
        servers=servers,
        rates=tuple(rates),
        model=ModelInfo(name=name, family="text", n_layers=0, d_model=0, d_mlp=0, fingerprint=digest),
        settings={**vars(base), "rate": rate},
        provenance=provenance(started=started, device="cpu", dtype="int", attention="none", bos=None, seed=0),
    )


def _signals(
    outputs: Sequence[Sequence[int]], base: MonitorSettings, progress: Callable[[str, int, int], None]
) -> tuple[Any, list[int]]:
    """Signals of every step, less is more repetitive: ttr, cr, novelty, minus the tail's tokens; starts of blocks."""
    import numpy as np

    values, starts = array("d"), list[int]()
    for done, ids in enumerate(outputs):
        progress("reading", done, len(outputs))
        watched = Monitor(MonitorSettings.paper(rule="never", window=base.window))
        repeats = Monitor(base.with_(rule="repeats", tail_shortest=12))
        for i, token in enumerate(ids):
            starts += [len(values) // 4] if i % BLOCK == 0 else []
            step, tail = watched.update(token), repeats.update(token).tail
            known = (step.ttr, step.cr, step.novelty) if i >= START else (1.0, 1.0, 1.0)
            values.extend((*known, tail.start - i - 1 if tail else 0))
    return np.array(values).reshape(-1, 4), starts


def _alarms(ids: Sequence[int], settings: MonitorSettings) -> int:
    """Alarms where the model is sure of every token; those that follow each other count once."""
    monitor = Monitor(settings)
    return sum(step.trigger and not step.level for step in (monitor.update(token, 1.0) for token in ids))
