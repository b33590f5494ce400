"""Sessions of chats and agents: cycles of turns and of calls, and the same history without their copies."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import parse_json
from sinkscope.files.progress import silent
from sinkscope.files.provenance import ModelInfo
from sinkscope.files.records import rows_of
from sinkscope.loops.text.check import CheckedOutput, LoopCheck, Verdict, checked_output, loop_check
from sinkscope.loops.text.forms import StreamForm
from sinkscope.loops.text.messages import LISTS, Call, CallResult, Message, message_of
from sinkscope.loops.text.monitor import MonitorSettings
from sinkscope.loops.text.outputs import TokenRecord, is_output, number, split

LONGEST_CYCLE = 8  # steps
CALL_COPIES, CYCLE_COPIES = 4, 3  # of a single step with calls, and of anything else
SPOKEN_TOKENS = 48  # of copies without calls
FIRST_LINES = 50  # by which a file of JSON lines is known
UNCHECKED = 24  # tokens of a message that is too short to loop
_MASKED_FIELDS = frozenset(
    "attempt call_id counter created_at date duration elapsed iteration nonce request_id requestid retry seq sequence "
    "step time timestamp took trace_id try uuid".split()
)
_COUNTED = r"attempt|call|count|counter|iteration|request|retry|run|seq|sequence|step|try|turn"
_VARIABLE = re.compile(
    r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"  # ids
    r"|\b(?=[a-z]*\d)[0-9a-f]{8,}\b"
    r"|\b[a-z]+_(?=\w*\d)\w{6,}\b"
    r"|\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)?"  # dates and times
    r"|\b\d?\d:\d\d(?::\d\d)?(?:[.,]\d+)?\b"
    r"|\b\d+(?:\.\d+)? ?(?:ms|µs|us|s|sec|seconds|min|minutes)\b"
    rf"|(?<=#)\d+|\b(?:{_COUNTED})[ :=#]+\d+(?: ?(?:of|/) ?\d+)?\b",  # counters
    re.IGNORECASE,
)


class Session(NamedTuple):
    """The entries of a history.

    Attributes:
        name: Its name in the result.
        entries: The entries as they were read.
        messages: The message of each entry; None of one that is no message.
    """

    name: str
    entries: list[Any]
    messages: list[Message | None]


@dataclass(frozen=True)
class History:
    """What a file holds.

    Attributes:
        sessions: Its sessions.
        root: The JSON of the file; of one with lines, their list.
        field: Field of the messages in `root`, or in each of its entries; empty if the entries are the messages.
        lines: Whether the file has JSON lines.
    """

    sessions: tuple[Session, ...]
    root: Any
    field: str
    lines: bool


class Step(NamedTuple):
    """A turn of one speaker, with the results of its calls.

    Attributes:
        first: Number of its first message.
        end: Number behind its last message.
        role: Who speaks.
        key: Equal for steps that repeat each other.
        calls: Number of calls.
        tokens: Number of tokens in it.
    """

    first: int
    end: int
    role: str
    key: object
    calls: int
    tokens: int


class Cycle(NamedTuple):
    """Steps that repeat.

    Attributes:
        first: Number of the first step.
        period: Steps of a copy.
        end: Number behind the last step.
    """

    first: int
    period: int
    end: int

    @property
    def copies(self) -> int:
        """Number of whole copies."""
        return (self.end - self.first) // self.period


def is_session_file(text: str, name: str, form: StreamForm = "auto") -> bool:
    """Whether a file is read as sessions: by its form, or if it is JSON that holds messages and no outputs.

    A `.json` file that holds no outputs is one as well, so that it is never taken for a text by mistake.
    """
    if form != "auto":
        return form == "session"
    suffix = name.lower().rpartition(".")[2]
    if text.lstrip()[:1] not in ("{", "["):
        return suffix == "json"
    rows = _first_rows(text)
    if any(is_output(row) for row in rows):
        return False
    return suffix == "json" or is_history(rows)


def _first_rows(text: str) -> list[Any]:
    """The entries of a JSON list, or those of the first lines; none if it is no JSON."""
    with suppress(ValueError):
        rows = parse_json(text)
        return rows if isinstance(rows, list) else [rows]
    rows: list[Any] = []
    with suppress(ValueError):
        for line in islice(text.splitlines(), FIRST_LINES):
            if line.strip():
                rows.append(parse_json(line))
    return rows


def is_history(rows: Any) -> bool:
    """Whether JSON may be a chat history: messages, or objects that hold a list of them."""
    if isinstance(rows, dict):
        rows = [rows]
    if not isinstance(rows, list):
        return False
    return any(isinstance(row, dict) and (_holder(row) or _message(row) is not None) for row in rows)


def read_history(text: str, name: str) -> History:
    """Read a chat history or the log of an agent.

    Args:
        text: Content of the file: JSON, or JSON lines.
        name: Name of the file.

    Raises:
        SinkscopeError: It is not JSON, or an entry is of no form in `sinkscope.loops.text.messages`.
    """
    expected = "messages with role and content, as those of OpenAI or Anthropic"
    lines = False
    try:
        root = parse_json(text)
    except ValueError:
        lines = True
        root = [row for _, row in rows_of(text, name, f"{expected}, or --format text")]
    if not is_history(root):
        raise SinkscopeError(f"{name} is no chat history: expected {expected}; --format text reads it as one text")
    if isinstance(root, dict) and not _holder(root):
        root = [root]
    if isinstance(root, dict):
        field = _holder(root)
        return History((_session("session", root[field], name),), root, field, lines)
    field = _holder(root[0]) if isinstance(root[0], dict) else ""
    if not field:
        return History((_session("session", root, name),), root, field, lines)
    sessions: list[Session] = []
    for place, row in enumerate(root, 1):
        if not isinstance(row, dict) or not isinstance(row.get(field), list):
            raise SinkscopeError(f"{name} session {place} has no list {field!r}, as session 1 has: expected {expected}")
        sessions.append(_session(f"session {place}", row[field], name))
    return History(tuple(sessions), root, field, lines)


def _holder(row: dict[str, Any]) -> str:
    """The field of an object that holds messages; empty if there is none."""
    for field in LISTS:
        entries = row.get(field)
        if isinstance(entries, list) and entries and all(isinstance(entry, dict) for entry in entries):
            return field
    return ""


def _message(entry: Any) -> Message | None:
    try:
        return message_of(entry)
    except (AttributeError, LookupError, TypeError, ValueError):
        return None


def _session(name: str, entries: list[Any], file: str) -> Session:
    """The messages of the entries; entries of a log with another `type` are passed over."""
    messages: list[Message | None] = []
    for place, entry in enumerate(entries, 1):
        message = _message(entry)
        passed = isinstance(entry, dict) and "role" not in entry and isinstance(entry.get("type"), str)
        if message is None and not passed:
            raise SinkscopeError(
                f"{file} {name} entry {place} is no message: expected role and content, as those of OpenAI or Anthropic"
            )
        messages.append(message)
    return Session(name, entries, messages)


def check_history(
    history: History,
    settings: MonitorSettings,
    name: str,
    progress: Callable[[str, int, int], None] | None = None,
) -> LoopCheck:
    """The verdict on each session.

    A session loops if the same steps repeat to its end: 4 calls of a tool with the same arguments and the same result,
    or 3 copies of up to 8 steps. Ids, times and counters may differ. It also loops if its last message does. A session
    that repeats itself and goes on looped.

    Args:
        history: The sessions.
        settings: Settings of the monitor of each message.
        name: Name of the file.
        progress: Called with a stage, the amount done and the total.
    """
    started = time.perf_counter()
    progress = progress or silent
    results: list[CheckedOutput] = []
    digest = hashlib.sha256()
    for place, session in enumerate(history.sessions):
        progress("checking", place, len(history.sessions))
        results.append(_checked(session, settings))
        digest.update(json.dumps(session.entries, sort_keys=True, ensure_ascii=True).encode())
    fingerprint = digest.hexdigest()[:16]
    model = ModelInfo(name=name, family="session", n_layers=0, d_model=0, d_mlp=0, fingerprint=fingerprint)
    return loop_check(results, model, vars(settings), started)


def cleaned(history: History) -> str:
    """The history without the copies of its cycles, as the text of a file of the same form.

    Only whole copies are removed, so each message that stays has the neighbours that it could have before, and a step
    is removed with the results of its calls. Cleaning the result again changes nothing.
    """
    kept = [_without_copies(session).entries for session in history.sessions]
    root: Any = kept[0]
    if isinstance(history.root, dict):
        root = {**history.root, history.field: kept[0]}
    elif history.field:
        root = [{**row, history.field: entries} for row, entries in zip(history.root, kept, strict=True)]
    if history.lines:
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in root)
    return json.dumps(root, ensure_ascii=False, indent=2) + "\n"


def _without_copies(session: Session) -> Session:
    """The session without copies; what is left may repeat in turn, so this goes on until nothing does."""
    while True:
        steps = steps_of(session)
        dropped: set[int] = set()
        for cycle in cycles_of(steps):
            for step in steps[cycle.first + cycle.period : cycle.first + cycle.period * cycle.copies]:
                dropped.update(range(step.first, step.end))
        if not dropped:
            return session
        places = [place for place in range(len(session.entries)) if place not in dropped]
        entries = [session.entries[place] for place in places]
        session = Session(session.name, entries, [session.messages[place] for place in places])


def steps_of(session: Session) -> list[Step]:
    """The steps of a session: what one role says at a time, with the results of its calls."""
    has_results = any(message is not None and message.results for message in session.messages)
    groups: list[list[int]] = []
    role = ""
    answered = False
    for place, message in enumerate(session.messages):
        if message is None:
            if groups:
                groups[-1].append(place)  # an entry of the log belongs to the step before
            continue
        speaker = "assistant" if message.results else message.role
        same = bool(groups) and speaker == role == "assistant"
        joins = same and (bool(message.results) or (has_results and not answered))
        if not joins:
            groups.append([])
            answered = False
        groups[-1].append(place)
        role = speaker
        answered = answered or bool(message.results)
    return [_step(session, group, has_results) for group in groups]


def _step(session: Session, places: Sequence[int], has_results: bool) -> Step:
    messages = [session.messages[place] for place in places]
    spoken = [message for message in messages if message is not None]
    calls: list[Call] = []
    results: list[CallResult] = []
    texts: list[str] = []
    for message in spoken:
        calls += message.calls
        results += message.results
        texts.append(message.text)
    role = spoken[0].role
    key: object = (role, masked("\n".join(texts)))
    if calls or results:
        names = [(call.name, masked_arguments(call.arguments)) for call in calls]
        key = ("calls", tuple(names), tuple(masked(result.text) for result in results))
        asked, answered = sorted(call.key for call in calls), sorted(result.key for result in results)
        if (has_results and len(asked) != len(answered)) or (any(answered) and all(asked) and asked != answered):
            key = places[0]  # a call without its result, or the reverse, is like no other step
    texts += [result.text for result in results]
    texts += [f"{call.name} {call.arguments}" for call in calls]
    tokens = sum(len(split(text)) for text in texts)
    return Step(places[0], places[-1] + 1, "assistant" if calls else role, key, len(calls), tokens)


def masked(text: str) -> str:
    """A text without ids, times and counters."""
    return _VARIABLE.sub("~", text)


def masked_arguments(arguments: Any) -> str:
    """The arguments of a call without ids, times and counters; those written as JSON are read."""
    value = arguments
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError:
            return masked(value)
    return masked(json.dumps(_masked_fields(value), sort_keys=True, ensure_ascii=False))


def _masked_fields(value: Any) -> Any:
    if isinstance(value, dict):
        fields: dict[str, Any] = {}
        for name, inside in value.items():
            fields[name] = "~" if str(name).lower() in _MASKED_FIELDS else _masked_fields(inside)
        return fields
    if isinstance(value, list):
        return [_masked_fields(inside) for inside in value]
    return value


def cycles_of(steps: Sequence[Step]) -> list[Cycle]:
    """The cycles of steps, from left to right, each with its smallest period."""
    cycles: list[Cycle] = []
    first = 0
    while first < len(steps):
        cycle = _cycle_at(steps, first)
        if cycle is None:
            first += 1
        else:
            cycles.append(cycle)
            first = cycle.end
    return cycles


def _cycle_at(steps: Sequence[Step], first: int) -> Cycle | None:
    for period in range(1, LONGEST_CYCLE + 1):
        end = first + period
        while end < len(steps) and steps[end].key == steps[end - period].key:
            end += 1
        cycle = Cycle(first, period, end)
        calls = any(step.calls for step in steps[first : first + period])
        least = CALL_COPIES if calls and period == 1 else CYCLE_COPIES
        tokens = sum(step.tokens for step in steps[first:end])
        speaks = any(step.role == "assistant" for step in steps[first : first + period])
        if cycle.copies >= least and speaks and (calls or tokens >= SPOKEN_TOKENS):
            return cycle
    return None


def _checked(session: Session, settings: MonitorSettings) -> CheckedOutput:
    """The verdict on a session: its cycles, then the texts of its assistant."""
    steps = steps_of(session)
    tokens = sum(step.tokens for step in steps)
    result = CheckedOutput(session.name, "clean", tokens=tokens)
    wasted = 0
    turns: list[str] = []
    verdict: Verdict = "clean"
    for cycle in cycles_of(steps):
        wasted += sum(step.tokens for step in steps[cycle.first + cycle.period : cycle.end])
        turns.append(f"{steps[cycle.first].first + 1}-{steps[cycle.end - 1].end}")
        verdict = "loops" if _is_end(steps, cycle.end) else "looped"
        result = replace(result, repeats=(cycle.end - cycle.first) / cycle.period)
    ranks: tuple[Verdict, ...] = ("clean", "suspicious", "looped", "loops")
    for place, message in enumerate(session.messages):
        if message is None or message.role != "assistant":
            continue
        words = split(message.text)
        if len(words) < UNCHECKED:
            continue
        checked = checked_output(TokenRecord("", number(words), message.text), settings)
        said = checked.verdict
        if said == "clean":
            continue
        if said == "loops" and place + 1 < len(session.messages):
            said = "looped"
        turns.append(str(place + 1))
        wasted += checked.wasted or 0
        if ranks.index(said) > ranks.index(verdict):
            verdict = said
    if verdict == "clean":
        return result
    return replace(result, verdict=verdict, role="assistant", turns=", ".join(turns), wasted=wasted)


def _is_end(steps: Sequence[Step], end: int) -> bool:
    """Whether the assistant does nothing more from a step on."""
    return not any(step.role == "assistant" for step in steps[end:])
