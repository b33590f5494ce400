"""`check` decides whether texts or token ids end up in a repetition loop; `sinkscope loops` is its command."""

from __future__ import annotations

import hashlib
import json
import re
import statistics
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from sinkscope._plain import parse_json
from sinkscope.errors import SinkscopeError
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
from sinkscope.results import ModelInfo, Result, provenance

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
    """What a model wrote, as ids.

    Attributes:
        name: what it is called in the result.
        ids: its tokens, as numbers.
    """

    name: str
    ids: list[int]


def split(text: str) -> list[str]:
    """Words of at most 12 letters or digits (longer ones in pieces), and other signs; white space is dropped.

    No tokenizer is needed, and the tokens are about as long as those of a large vocabulary. Up to 12 equal signs in a
    row are one token, so a ruler is a few of them. Chinese, Japanese and Korean characters stand alone.
    """
    return [found[0] for found in _WORDS.finditer(text)]


def number(tokens: Iterable[object]) -> list[int]:
    """Tokens as ids, counted in the order in which they first come."""
    known: dict[object, int] = {}
    return [known.setdefault(token, len(known)) for token in tokens]


def as_records(given: str | Sequence[Any] | Ids) -> list[TokenRecord]:
    """Records of a text, of token ids, or of several of either; records stay what they are.

    Raises:
        SinkscopeError: it is something else, or there is nothing in it.
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
    """Records of a file's text.

    Args:
        text: the file's content.
        name: of the file; `.jsonl` and `.ndjson` are JSON lines, anything else is one text.
        form: "text" or "jsonl" instead of what the name says.

    Raises:
        SinkscopeError: it is empty, or a line is not an object with one of the fields `FIELDS`.
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
    """One record.

    Attributes:
        name: "line 3", or the file's name.
        tokens: number of tokens.
        ttr: type-token ratio of the whole record.
        cr: compression ratio of the whole record.
        seq_rep_4: share of 4-grams that repeat an earlier one.
        distinct_2: different 2-grams over 2-grams.
        period: period of the longest stretch of repetition, which has at least 3 copies and 16 tokens and is exact, or
            which the monitor found; None: no stretch has a period of up to 2,048 tokens.
        onset: position of the first token of that stretch.
        repeats: number of copies in that stretch.
        detected: first step at which the monitor triggers; None: it never does.
        loop: whether the monitor triggers.
        ends_in_loop: whether the loop rule without length holds for the last window.
        loop_rule: whether the loop rule with length holds (Eq. 7); None: the number of allowed tokens was not given.
        steps: steps at which `curve` was read.
        curve: type-token ratio of the window at these steps.
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
        loops: number of records that loop.
        records: what was found in each record.
    """

    kind: ClassVar[str] = "loops"
    drawing: ClassVar[Any] = "sinkscope.figures.repetition:draw_loops"

    loops: int
    records: tuple[Checked, ...]

    def rows(self) -> list[dict[str, Any]]:
        """One row per record."""
        return [{k: v for k, v in vars(r).items() if k not in ("steps", "curve")} for r in self.records]

    def conclusion(self) -> str:
        """How many loop and where they begin, with the diversity of the others beside theirs."""
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

    A record loops if the monitor triggers in it: by default as soon as 3 copies of anything have come, of 48 tokens at
    least and exact or nearly so. With `MonitorSettings.paper()` LoopGuard's monitor decides. There are no
    probabilities, so its other two votes must agree, type-token ratio and compression ratio, and one of the gates,
    stalled novelty and tail repetition.

    Args:
        given: a text, token ids, or several of either; or records as `loops.records.parse` makes them of a file.
        settings: of the monitor.
        max_new: tokens that were allowed, for the loop rule with length (LoopGuard, Eq. 7).
        name: what the result calls the input.
        progress: called with a stage, what is done, and how much there is.

    Returns:
        A `LoopCheck`.

    Raises:
        SinkscopeError: the input is empty or neither text nor ids, or the settings need probabilities.
    """
    started = time.perf_counter()
    settings = settings or MonitorSettings()
    if max_new is not None and max_new < 1:
        raise SinkscopeError(f"max_new is {max_new}: expected the number of tokens that were allowed, at least 1")
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
