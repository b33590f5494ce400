"""`Watch` says of outputs while they are being read where they loop, and at their end what they are."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple
from zlib import crc32

from sinkscope.errors import SinkscopeError, warn
from sinkscope.loops.text.forms import Origin, Piece, StreamForm, on_one_line
from sinkscope.loops.text.lines import pieces_in
from sinkscope.loops.text.monitor import Monitor, MonitorSettings, Settings
from sinkscope.loops.text.near_copies import Echoes
from sinkscope.loops.text.outputs import Splitter
from sinkscope.loops.text.repetition import asked_copies
from sinkscope.loops.text.signals import Tail
from sinkscope.results.notation import count_of

TextVerdict = Literal["loops", "looped", "suspicious", "empty", "clean"]
SHORT_END = 48  # tokens after the last copy that may be anything
KEPT_TOKENS = 2048  # whose text is kept
KEPT_VERDICTS = 64  # of a stream that is followed
SHOWN_TOKENS = 60  # of a loop without an exact period
KEPT_PROBLEMS = 20  # lines that could not be read and are named
NOT_TEXT = "is not UTF-8 text, or not to its end: convert it, or give another input"


class Alarm(NamedTuple):
    """A detected loop, or a repetition that may be honest.

    Attributes:
        stream: Name of the stream.
        token: Number of the token, counted from 1, at which it was found.
        tail: The repetition that reaches this token; None if the paper's monitor found none.
        text: One copy, or the last tokens, shortened and without control characters.
        cut: Whether it is a loop, which a proxy or a guard ends.
        origin: Id and model of the answer.
    """

    stream: str
    token: int
    tail: Tail | None
    text: str
    cut: bool = True
    origin: Origin = Origin()

    def about(self) -> dict[str, Any]:
        """Return it as JSON without the text, with the time now."""
        return {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "verdict": "loops" if self.cut else "suspicious",
            "model": self.origin.model or None,
            "id": self.origin.id or None,
            "token": self.token,
            "period": None if self.tail is None else self.tail.period,
            "onset": None if self.tail is None else self.tail.start,
        }

    def __str__(self) -> str:
        repetition = "no exact period"
        if self.tail is not None:
            repetition = f"period {self.tail.period}, {self.tail.repeats:.1f} copies since token {self.tail.start + 1}"
        what = "loop" if self.cut else "perhaps honest repetition"
        return f'{what} in {self.stream} at token {self.token}: {repetition}, "{self.text}"'


def _number_of(key: object) -> int:
    """A number for a token that has no id: equal tokens have equal numbers, in every run."""
    return crc32(repr(key).encode())


@dataclass(frozen=True)
class CheckedOutput:
    """The result for one record.

    Attributes:
        name: Name such as "line 3", or the file's name.
        verdict: "loops": it repeats itself to its end. "looped": it repeated itself and went on. "suspicious": it has
            near copies, or copies of data, which may be honest. "empty": no text was found in it. "clean": none of
            these. A proxy and a guard end what loops.
        tokens: Number of tokens.
        wasted: Number of tokens after the first copy that belong to the repetition; None if there is none.
        period: Period in tokens of the stretch that covers most, as the monitor found it; None if there is none.
        onset: Position of the first token of the repetition, counted from 0.
        detected: Number of tokens at which the repetition was found; None if there is none.
        id: Its own id, as its record says; empty if unknown.
        excerpt: One copy of what repeats, shortened; empty if nothing does.
    """

    name: str
    verdict: TextVerdict
    tokens: int = 0
    wasted: int | None = None
    period: int | None = None
    onset: int | None = None
    detected: int | None = None
    id: str = ""
    excerpt: str = ""

    def repetition(self) -> str:
        """Return what repeats, as the end of a sentence; empty if no period was found."""
        if self.period is None or self.wasted is None:
            return ""
        repeated = count_of(self.period + self.wasted, "token")
        if self.verdict == "loops":
            return f": its last {repeated} repeat a piece of {self.period}"
        return f": {repeated} repeated a piece of {self.period}, and then it went on"


class Stream:
    """One output, its monitor, and what was found in it.

    Args:
        settings: Settings of the monitor.
        asked: Number of copies that the prompt asks for.
    """

    def __init__(self, settings: Settings | None = None, asked: int = 0) -> None:
        self._recent = deque[str](maxlen=KEPT_TOKENS)
        self.monitor = Monitor(settings, self._words_of, asked)
        self._has_words: bool | None = None  # else ids
        self._splitter = Splitter()
        self._told = 0  # 1: what may be honest, 2: a loop
        self._origin = Origin()
        self._excerpt = ""
        self._echoes = Echoes()
        self._suspected: int | None = None
        self._onset: int | None = None  # of what may be honest
        self._detected: int | None = None
        self._longest: Tail | None = None
        self._covered = 0
        self._last_copy = 0  # number of tokens up to the last one that repeats

    def take(self, piece: Piece) -> Iterator[Alarm]:
        """Yield the alarms that a piece raises: at most one for a loop, and before it one for what may be honest."""
        if piece.origin is not None and not any(self._origin):
            self._origin = piece.origin
        if piece.key is not None:
            self._has_words = False
            key = piece.key
            if not isinstance(key, int):
                key = _number_of(key)
            yield from self._advance(piece.stream, key, piece.text)
            return
        if self._has_words is None:
            self._has_words = True
        for word in self._splitter.feed(piece.text, piece.last):
            yield from self._advance(piece.stream, _number_of(word), word)

    def _words_of(self, ids: Sequence[int]) -> Sequence[str]:
        """The words of the last tokens; of ids there are none."""
        if not self._has_words:
            return ()
        if len(ids) == 1:
            return [self._recent[-1]]
        return [*self._recent][-len(ids) :]

    def _advance(self, name: str, token: int, text: str) -> Iterator[Alarm]:
        """Yield the alarm that a token raises, if it does."""
        self._recent.append(text[:SHOWN_TOKENS])
        step = self.monitor.update(token)
        count, tail = step.step, step.tail
        if self._has_words:
            self._look_for_echoes(text, count - 1, count)
        if not step.suspect and (tail is not None or step.trigger):
            self._last_copy = count
            if tail is not None and count - tail.start > self._covered:
                self._longest, self._covered = tail, count - tail.start
        if step.trigger and self._detected is None:
            self._detected = count
        if step.suspect and self._suspected is None and tail is not None:
            self._suspected, self._onset = count, tail.start
        level = 2 if step.trigger else int(step.suspect)
        if level > self._told:
            self._told = level
            self._excerpt = self._copy(tail)
            yield Alarm(name, count, tail, self._excerpt, step.trigger, self._origin)

    def _look_for_echoes(self, word: str, place: int, count: int) -> None:
        """Suspect near copies, unless something was found before."""
        if self._detected is None and self._suspected is None and self._echoes.add(word, place):
            self._suspected, self._onset = count, self._echoes.onset

    def _copy(self, tail: Tail | None) -> str:
        """Text of one copy of the loop, from where it began on, or of the last tokens."""
        length = SHOWN_TOKENS if tail is None else tail.period
        last = [*self._recent][-length:]
        if tail is not None and len(last) == length:
            begun = (self.monitor.last.step - tail.start) % tail.period  # tokens of the copy that is not complete
            last = last[len(last) - begun :] + last[: len(last) - begun]
        gap = " " if self._has_words else ""
        return on_one_line(gap.join(last).strip(" "))

    def checked(self, name: str) -> CheckedOutput:
        """Return the verdict on the output of this name, which has ended."""
        tokens, tail = self.monitor.last.step, self._longest
        self._look_for_echoes("\n", tokens, tokens)
        verdict: TextVerdict = "clean" if tokens else "empty"
        wasted, period, onset, detected = None, None, self._onset, self._suspected
        if self._detected is not None:
            verdict, onset, detected = "looped", self._detected, self._detected
            if tokens - self._last_copy <= max(SHORT_END, self.monitor.settings.cooldown):
                verdict = "loops"
            if tail is not None:
                wasted = max(0, self._last_copy - tail.start - tail.period)
                period, onset = tail.period, tail.start
        elif self._suspected is not None:
            verdict = "suspicious"
        return CheckedOutput(name, verdict, tokens, wasted, period, onset, detected, self._origin.id, self._excerpt)


class Watch:
    """All outputs of one or several inputs.

    Attributes:
        open: Outputs that have not ended, by name.
        ended: Number of those that have.
        checked: Verdicts on these; of a stream, whose end may never come, the latest.
        skipped: Number of lines that could not be read, and of inputs that broke off.
        problems: What was wrong with the first of them.

    Args:
        settings: Settings of the monitors.
        prompt: What was asked; copies that it asks for are no loop.
    """

    def __init__(self, settings: Settings | None = None, prompt: str = "") -> None:
        self.settings = settings or MonitorSettings()
        self._asked = asked_copies(prompt)
        self.open: dict[str, Stream] = {}
        self.ended = 0
        self.checked: list[CheckedOutput] = []
        self.skipped = 0
        self.problems: list[str] = []

    def skip(self, problem: str) -> None:
        """Count what cannot be read."""
        self.skipped += 1
        self.problems = [*self.problems, problem][:KEPT_PROBLEMS]

    def follow(
        self, source: Any, *, form: StreamForm = "auto", name: str = "the input", field: str | None = None
    ) -> Iterator[Alarm]:
        """Yield the alarms of an input as they occur.

        A line of JSON that cannot be read is skipped with a warning. If the source breaks off, what was read until then
        counts.

        Args:
            source: A binary file, a pipe or a server's response, with `read1`; contains text, JSON lines, or
                server-sent events of any server in `sinkscope.loops.text.forms`.
            form: Format of the source; "auto" decides by the first line.
            name: Name of the source in alarms and errors.
            field: Where the answers of a line are, such as "response.choices"; None: under a name that is known.

        Raises:
            SinkscopeError: The source is empty, or holds no output.
        """
        yield from self.read(source, form=form, name=name, field=field, whole=False)
        if self.skipped:
            warn(f"{self.problems[0]}; what cannot be read was skipped {self.skipped} times")

    def read(
        self,
        source: Any,
        *,
        form: StreamForm = "auto",
        name: str = "the input",
        field: str | None = None,
        label: str = "",
        whole: bool = True,
    ) -> Iterator[Alarm]:
        """Yield the alarms of a file, as `follow` does, and keep the verdicts on all its outputs.

        Lines that cannot be read are counted. JSON lines may also be one value on several lines.

        Args:
            source: As for `follow`.
            form: As for `follow`.
            name: As for `follow`.
            field: As for `follow`.
            label: What stands before the names of its outputs.
            whole: Whether it is a file; else a stream, which may never end.

        Raises:
            SinkscopeError: It is empty, holds no output, or is a file that is not UTF-8 text.
        """
        ended, skipped = self.ended, self.skipped
        try:
            for piece in pieces_in(source, form, name, self.skip, field=field, whole=whole):
                if piece.stream != name:  # the file is one text
                    piece = piece._replace(stream=f"{label}{piece.stream}")
                yield from self.take(piece)
                if not whole:
                    del self.checked[:-KEPT_VERDICTS]
        except UnicodeError:
            if whole:
                raise SinkscopeError(f"{name} {NOT_TEXT}") from None
            self.skip(f"{name} {NOT_TEXT}")
        except (OSError, EOFError) as error:  # EOFError: of a damaged .gz
            self.skip(f"{name} breaks off: {error}")
        for open_stream in list(self.open):
            yield from self.take(Piece(open_stream, last=True))
        if self.ended > ended:
            return
        if self.problems[skipped:]:
            raise SinkscopeError(self.problems[skipped])
        expected = "a text, JSON lines, or the events of a server (see --format)"
        raise SinkscopeError(f"{name} is empty, or nothing in it is an output: expected {expected}")

    def take(self, piece: Piece) -> Iterator[Alarm]:
        """Yield the alarms that a piece raises in its output."""
        if piece.stream not in self.open:
            if piece.part and not piece.text:
                return
            self.open[piece.stream] = Stream(self.settings, self._asked)
        stream = self.open[piece.stream]
        yield from stream.take(piece)
        if piece.last:
            del self.open[piece.stream]
            self.ended += 1
            self.checked.append(stream.checked(piece.stream))
