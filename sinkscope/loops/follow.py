"""`watch` reports where outputs loop while they are being written; `sinkscope loops --follow` is its command."""

from __future__ import annotations

import codecs
import gc
import io
import math
import sys
from collections import deque
from collections.abc import Iterator
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import parse_json
from sinkscope.files.result import read_json
from sinkscope.loops.checker import FIELDS, number, split
from sinkscope.loops.monitor import Monitor, MonitorSettings
from sinkscope.loops.signals import Tail

Form = Literal["auto", "text", "jsonl", "sse"]
OPEN, KEPT, SHORT = 4096, 2048, 60  # streams that may be open, tokens whose text is kept, characters of a shown text
_EVENTS = ("data:", "event:", "retry:", ":")  # how server-sent events may begin
_PIECES = ("token", "content", "response")  # fields of a JSON line that adds to an output; FIELDS are whole ones


class Piece(NamedTuple):
    """A token of a stream, or a piece of its text.

    Attributes:
        stream: Name of the stream.
        key: Identifies equal tokens: an id, its bytes, or its text. None if `text` is arbitrary text.
        text: Text of the token.
        before: Largest probability of the distribution that the token was drawn from; None if unknown.
        after: Largest probability of the distribution that follows it; None uses the `before` of the next token.
        last: Whether the stream ends here.
    """

    stream: str
    key: object = None
    text: str = ""
    before: float | None = None
    after: float | None = None
    last: bool = False


class Alarm(NamedTuple):
    """A detected loop.

    Attributes:
        stream: Name of the stream.
        token: Number of the token, counted from 1, at which the monitor triggered.
        tail: The repetition that reaches this token; None if it is not exact.
        text: One copy, or the last tokens, shortened and without control characters.
    """

    stream: str
    token: int
    tail: Tail | None
    text: str

    def __str__(self) -> str:
        told = "no exact period"
        if self.tail is not None:
            told = f"period {self.tail.period}, {self.tail.repeats:.1f} copies since token {self.tail.start + 1}"
        return f'loop in {self.stream} at token {self.token}: {told}, "{self.text}"'


def shown(text: str, limit: int = SHORT) -> str:
    """The text on one line, without control characters, shortened in the middle."""
    short = text if len(text) <= limit else f"{text[: limit // 2]}...{text[-limit // 2 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)


class Stream:
    """One output and its monitor.

    Args:
        settings: Settings of the monitor.
    """

    def __init__(self, settings: MonitorSettings) -> None:
        self.monitor = Monitor(settings)
        self._word = ""  # the last word of a text, which may still grow
        self._held: Piece | None = None  # waits for the probability that follows it
        self._ids: dict[object, int] = {}
        self._recent = deque[str](maxlen=KEPT)
        self._quiet_until = 0

    def take(self, piece: Piece) -> Iterator[Alarm]:
        """Return the alarms that a piece raises."""
        new = [piece] if piece.key is not None else self._words(piece)
        for token in [*new, None] if piece.last else new:
            if self._held is not None:
                yield from self._feed(self._held, token.before if token else 0.0)  # nothing follows the last one
            self._held = token if token and token.before is not None else None
            if token and self._held is None:
                yield from self._feed(token, token.after)

    def _words(self, piece: Piece) -> list[Piece]:
        text = self._word + piece.text
        words = split(text)
        grows = bool(words) and not piece.last and text.endswith(words[-1])
        self._word = words.pop() if grows else ""
        return [Piece(piece.stream, word, f"{word} ") for word in words]

    def _feed(self, token: Piece, p_max: float | None) -> Iterator[Alarm]:
        key = token.key if isinstance(token.key, int) else self._ids.setdefault(token.key, len(self._ids))
        step = self.monitor.update(key, p_max)
        self._recent.append(token.text[:SHORT])
        if step.trigger and step.step > self._quiet_until:
            copy = list(self._recent)[-step.tail.period if step.tail else -SHORT :]
            turn = -(step.step - step.tail.start) % len(copy) if step.tail else 0  # where a copy begins
            yield Alarm(token.stream, step.step, step.tail, shown("".join(copy[turn:] + copy[:turn]).strip(" ")))
        if step.trigger:  # a loop that goes on is told once
            self._quiet_until = step.step + self.monitor.settings.relapse


class Watch:
    """All streams of an input.

    Attributes:
        tokens: Number of tokens seen so far.
        alarms: Number of alarms raised so far.
        streams: Number of streams seen so far.
        open: Streams that have not ended, by name.
        last: The last step of any stream.

    Args:
        settings: Settings of the monitors.
    """

    def __init__(self, settings: MonitorSettings | None = None) -> None:
        self.tokens = self.alarms = self.streams = 0
        self.open: dict[str, Stream] = {}
        self._settings = settings or MonitorSettings()
        self.last = Monitor(self._settings).last

    def follow(self, source: Any, *, form: Form = "auto", name: str = "the input") -> Iterator[Alarm]:
        """Yield the alarms of a stream as they occur.

        Args:
            source: A binary file, a pipe or a server's response, with `read1` and `readline`; contains text, JSON
                lines, or server-sent events of completions.
            form: Format of the source; "auto" decides by the first line.
            name: Name of the source in alarms and errors.

        Raises:
            SinkscopeError: The source is empty or malformed, or a server reports an error in it.
        """
        try:
            for piece in pieces(source, form, name):
                yield from self._take(piece)
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":  # a character that was cut off is left out
                raise SinkscopeError(f"{name} is not UTF-8 text: convert it, or give another input") from None
        for open_ in list(self.open):
            yield from self._take(Piece(open_, last=True))
        if not self.streams:
            wanted = "a text, JSON lines, or server-sent events with choices"
            raise SinkscopeError(f"{name} is empty, or nothing in it is an output: expected {wanted} (see --format)")

    def _take(self, piece: Piece) -> Iterator[Alarm]:
        stream = self.open.pop(piece.stream, None)
        if stream is None:
            stream, self.streams = Stream(self._settings), self.streams + 1
        before = stream.monitor.last.step
        for alarm in stream.take(piece):
            self.alarms += 1
            yield alarm
        self.last = stream.monitor.last
        self.tokens += self.last.step - before
        if not piece.last:
            self.open[piece.stream] = stream  # the one that was silent for longest is the first
            while len(self.open) > OPEN:
                del self.open[next(iter(self.open))]


def pieces(source: Any, form: Form, name: str) -> Iterator[Piece]:
    """Yield the pieces that a byte stream adds to each output, as soon as they arrive; see `Watch.follow`."""
    start = b""
    while form == "auto":
        more = source.read1(1)
        start += more
        form = _form(start.removeprefix(codecs.BOM_UTF8), ended=not more)
    if form == "text":
        for text in codecs.iterdecode(chain([start], iter(lambda: source.read1(1 << 16), b"")), "utf-8-sig"):
            yield Piece(name, text=text)
        return
    first = start if start.endswith(b"\n") else start + source.readline()
    for i, line in enumerate(chain([first], source), 1):
        yield from _line(line.decode("utf-8-sig").strip(), form, f"{name} line {i}", i)


def _form(start: bytes, *, ended: bool) -> Form:
    """What an input is by its first line; "auto" while that cannot be told."""
    line = start.lstrip().decode(errors="replace")
    if line.startswith(_EVENTS):
        return "sse"
    if not ended and (any(e.startswith(line) for e in _EVENTS) or (line[0] == "{" and line[-1] != "\n")):
        return "auto"
    try:
        return "jsonl" if isinstance(parse_json(line), dict) else "text"
    except (ValueError, RecursionError):
        return "text"


def _line(line: str, form: Form, where: str, at: int) -> list[Piece]:
    """What one line adds: nothing if it is a comment, the name of an event, or the sign that all is over."""
    if form == "sse":
        line = line.removeprefix("data:").strip() if line.startswith("data:") else ""
    if line in ("", "[DONE]"):
        return []
    try:
        data = parse_json(line)
        if problem := data.get("error"):
            raise ValueError(f"the server reports an error, {shown(str(problem), 200)}")
        if "choices" in data:
            return [piece for choice in data["choices"] for piece in _choice(choice, data.get("id"))]
        return _record(data, at) if form == "jsonl" or not data.keys().isdisjoint((*FIELDS, *_PIECES)) else []
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise SinkscopeError(f"{where} is no output of a model: {error}; it is {shown(line)}") from None


def _record(data: dict[str, Any], at: int) -> list[Piece]:
    """A JSON line: a whole output, unless it has an `index` or is a piece by its field."""
    there = [field for field in (*FIELDS, *_PIECES) if field in data]
    if not there:
        raise ValueError(f"expected one of the fields choices, {', '.join((*FIELDS, *_PIECES))}")
    field = next((field for field in there if data[field] not in (None, "", [])), there[0])
    whole, value = field in FIELDS and "index" not in data, data[field]
    name = f"line {at}" if whole else f"stream {shown(str(data.get('index', 0)))}"
    end = Piece(name, last=whole or bool(data.get("stop") or data.get("done") or data.get("finish_reason")))
    if isinstance(value, str) and field != "token":
        return [end._replace(text=value)]
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if wrong := [v for v in tokens if not (isinstance(v, str) or (isinstance(v, int) and 0 <= v < 1 << 32))]:
        raise ValueError(f"{shown(repr(wrong[0]))} is no token")
    after = None if data.get("p_max") is None else float(data["p_max"])
    return [*(Piece(name, v, str(v), after=after) for v in tokens), end]


def _choice(choice: dict[str, Any], origin: object) -> list[Piece]:
    """A choice of a chunk of completions or of chat completions, with its tokens where it has log probabilities."""
    name = f"choice {int(choice.get('index', 0))}" + (f" of {shown(str(origin))}" if origin else "")
    end = Piece(name, last=choice.get("finish_reason") is not None)
    delta = choice.get("delta") or choice.get("message") or choice  # completions have their text in the choice
    parts = [delta.get("reasoning") or delta.get("reasoning_content"), delta.get("content"), delta.get("text")]
    parts += [call["function"].get("arguments") for call in delta.get("tool_calls") or ()]
    if rows := _logged(choice.get("logprobs") or {}):
        return [*(Piece(name, str(key), text, _largest(logs)) for key, text, logs in rows), end]
    return [end._replace(text="".join(part or "" for part in parts))]


def _logged(told: dict[str, Any]) -> list[tuple[Any, str, list[float | None]]]:
    """What makes a token the same, its text and its log probabilities, of completions or of chat completions."""
    if "tokens" in told:
        rows = zip_longest(told["tokens"], told["token_logprobs"], told.get("top_logprobs") or ())
        return [(token, token, [own, *(top or {}).values()]) for token, own, top in rows]
    return [
        (
            one.get("bytes") or one["token"],
            one["token"],
            [row["logprob"] for row in [one, *(one.get("top_logprobs") or ())]],
        )
        for one in told.get("content") or ()
    ]


def _largest(logs: list[float | None]) -> float | None:
    known = [log for log in logs if log is not None]
    return math.exp(min(0.0, max(known))) if known else None


def serve_counts(address: str, counts: Watch) -> Any:
    """Serve the counts of a watch to Prometheus.

    Args:
        address: A port, or host:port; without a host, only this machine is served.
        counts: The watch.

    Returns:
        The server.

    Raises:
        SinkscopeError: prometheus_client is not installed, or the port is invalid or in use.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    except ImportError:
        raise SinkscopeError('--metrics needs prometheus_client: pip install "sinkscope[metrics]"') from None

    class Counts:
        def collect(self) -> Iterator[Any]:
            for family, name, text, value in (
                (CounterMetricFamily, "tokens", "Tokens seen.", counts.tokens),
                (CounterMetricFamily, "alarms", "Loops found.", counts.alarms),
                (CounterMetricFamily, "streams", "Streams seen.", counts.streams),
                (GaugeMetricFamily, "open_streams", "Streams that have not ended.", len(counts.open)),
                (GaugeMetricFamily, "novelty", "Share of new n-grams at the last token.", counts.last.novelty),
                (GaugeMetricFamily, "type_token_ratio", "Of the window of the last token.", counts.last.ttr),
            ):
                yield family(f"sinkscope_loops_{name}", text, value=value)

    registry: Any = CollectorRegistry()
    registry.register(Counts())
    host, _, port = address.rpartition(":")
    try:
        return start_http_server(int(port), host or "127.0.0.1", registry)[0]
    except (OSError, OverflowError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "expected a port from 0 to 65535, or HOST:PORT"
        raise SinkscopeError(f"--metrics {address}: {reason}; give another port, or 0 for any free one") from None


def monitor_settings(file: str | None, variant: str, **given: Any) -> MonitorSettings:
    """The settings of a variant, overridden by those of a file and by those given that are not None.

    Args:
        variant: As for `MonitorSettings.variant`.
        file: File that `loops --calibrate` writes with `--json`, or an object of names and values.
        given: Further settings.

    Raises:
        SinkscopeError: The file cannot be read or has another content, or a value is invalid.
    """
    data = {} if file is None else read_json(file)
    if isinstance(data, dict) and data.get("kind") == "loop-calibration":
        data = data["result"]["monitor"]
    if not isinstance(data, dict) or "schema" in data:
        raise SinkscopeError(f"{file} holds no settings: expected what loops --calibrate writes with --json")
    changed = {**data, **{name: value for name, value in given.items() if value is not None}}
    return MonitorSettings.variant(variant).with_(**changed)


def follow_loops(
    file: str | None = None,
    *,
    form: Form = "auto",
    settings: str | None = None,
    window: int | None = None,
    theta_ttr: float | None = None,
    theta_cr: float | None = None,
    warmup: int | None = None,
    variant: str = "repeats",
    metrics: str | None = None,
    first: bool = False,
) -> bool:
    """Watch a stream, print each loop as it occurs, and return whether there was one.

    Args:
        file: The stream. By default standard input.
        form: Text, JSON lines or server-sent events. By default the first line decides.
        settings: Settings of the monitor, as --calibrate writes them with --json.
        window: Number of tokens that the signals cover.
        theta_ttr: Type-token ratio below which a window is repetitive.
        theta_cr: Compression ratio below which a window is repetitive.
        warmup: First token at which a loop can be detected.
        variant: Which monitor decides: "repeats" detects three copies of anything, "full" is the paper's.
        metrics: With --follow: serve counts to Prometheus on this port.
        first: With --follow: stop at the first loop.
    """
    gc.enable()  # the command line turns it off while libraries are imported
    used = monitor_settings(settings, variant, window=window, theta_ttr=theta_ttr, theta_cr=theta_cr, warmup=warmup)
    watch = Watch(used)
    if metrics is not None:
        server = serve_counts(metrics, watch)
        print(f"metrics: http://{server.server_name}:{server.server_port}/metrics", file=sys.stderr, flush=True)
    name = "standard input" if file in (None, "-") else Path(file).name
    for alarm in watch.follow(open_bytes(file), form=form, name=name):
        print(alarm, flush=True)
        if first:
            break
    return bool(watch.alarms)


def open_bytes(file: str | None) -> Any:
    """Open a file, or standard input for None and "-", to read bytes.

    Raises:
        SinkscopeError: The file cannot be opened.
    """
    if file in (None, "-"):
        return getattr(sys.stdin, "buffer", io.BytesIO())  # there is none if it is closed
    try:
        return open(file, "rb")
    except OSError as error:
        raise SinkscopeError(
            f"cannot read {file}: {(error.strerror or str(error)).lower()}; give another path"
        ) from None


def read_outputs(file: str, form: Form, tokenizer: Any = None) -> tuple[list[list[int]], int]:
    """Token ids of the outputs in a file, and the size of their vocabulary.

    Args:
        file: A text, JSON lines or server-sent events, as for `loops --follow`.
        form: Format of the file.
        tokenizer: Tokenizer of the intended model. None: ids are used as they are, and text is split into words.

    Raises:
        SinkscopeError: The file cannot be read.
    """
    texts: dict[str, str] = {}
    tokens: dict[str, list[object]] = {}
    for piece in pieces(open_bytes(file), form, file):
        texts[piece.stream] = texts.get(piece.stream, "") + piece.text
        if piece.key is not None:
            tokens.setdefault(piece.stream, []).append(piece.key)
    if tokenizer is None:
        outputs = [number(tokens.get(name) or split(text)) for name, text in texts.items()]
        return outputs, len({id for ids in outputs for id in ids})
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts.values()], len(tokenizer)
