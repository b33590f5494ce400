"""The channels of one answer, each with a monitor of its own, and the turns of a conversation."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple
from zlib import crc32

from sinkscope.files.plain import parse_json
from sinkscope.loops.text.encoded import Readable
from sinkscope.loops.text.monitor import Monitor, Settings
from sinkscope.loops.text.near_copies import Echoes
from sinkscope.loops.text.outputs import Splitter
from sinkscope.loops.text.pieces import CALLS, TEXT, TURNS, Origin, Piece, on_one_line
from sinkscope.loops.text.repetition import asked_copies
from sinkscope.loops.text.signals import Tail
from sinkscope.results.notation import count_of

TextVerdict = Literal["loops", "looped", "suspicious", "empty", "clean"]
WORST = ("loops", "looped", "suspicious", "clean", "empty")
SHORT_END = 48  # tokens after the last copy that may be anything
KEPT_TOKENS = 2048  # whose text is kept
SHOWN_TOKENS = 60  # of a loop without an exact period
FEWEST_TURNS = 4  # of a loop of turns


class Alarm(NamedTuple):
    """A detected loop, or a repetition that may be honest.

    Attributes:
        stream: Name of the answer.
        token: Number of the token, counted from 1 in its channel, at which it was found.
        tail: The repetition that reaches this token; None if the paper's monitor found none.
        text: One copy, or the last tokens, shortened and without control characters.
        cut: Whether it is a loop, which a proxy or a guard ends.
        origin: Id and model of the answer.
        channel: The channel that repeats itself: "text", "reasoning", "call 0", "calls" or "turns".
    """

    stream: str
    token: int
    tail: Tail | None
    text: str
    cut: bool = True
    origin: Origin = Origin()
    channel: str = TEXT

    def about(self) -> dict[str, Any]:
        """Return it as JSON without the text, with the time now."""
        return {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "verdict": "loops" if self.cut else "suspicious",
            "model": self.origin.model or None,
            "id": self.origin.id or None,
            "channel": self.channel,
            "token": self.token,
            "period": None if self.tail is None else self.tail.period,
            "onset": None if self.tail is None else self.tail.start,
        }

    def __str__(self) -> str:
        repetition = "no exact period"
        if self.tail is not None:
            repetition = f"period {self.tail.period}, {self.tail.repeats:.1f} copies since token {self.tail.start + 1}"
        what = "loop" if self.cut else "perhaps honest repetition"
        where = self.stream if self.channel in (TEXT, TURNS) else f"{self.stream}, {self.channel},"
        return f'{what} in {where} at token {self.token}: {repetition}, "{self.text}"'


@dataclass(frozen=True)
class CheckedOutput:
    """The result for one record.

    Attributes:
        name: Name such as "line 3", or the file's name.
        verdict: "loops": it repeats itself to its end. "looped": it repeated itself and went on. "suspicious": it has
            near copies, or copies of data, which may be honest. "empty": no text was found in it. "clean": none of
            these. A proxy and a guard end what loops. It is that of the worst channel.
        tokens: Number of tokens of all channels.
        wasted: Number of tokens after the first copy that belong to the repetition; None if there is none.
        period: Period in tokens of the stretch that covers most, as the monitor found it; None if there is none.
        onset: Position of the first token of the repetition in its channel, counted from 0.
        detected: Number of tokens at which the repetition was found; None if there is none.
        id: Its own id, as its record says; empty if unknown.
        excerpt: One copy of what repeats, shortened; empty if nothing does.
        channel: The channel of the verdict: "text", "reasoning", "call 0", "calls" (all of them) or "turns".
        group: Value of the field by which answers are grouped; empty without one.
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
    channel: str = TEXT
    group: str = ""

    def repetition(self) -> str:
        """Return what repeats, as the end of a sentence; empty if no period was found."""
        if self.period is None or self.wasted is None:
            return ""
        repeated = count_of(self.period + self.wasted, "token")
        place = "" if self.channel == TEXT else f" of its {self.channel}"
        if self.verdict == "loops":
            return (
                f": the last {repeated}{place} repeat a piece of {self.period}"
                if place
                else (f": its last {repeated} repeat a piece of {self.period}")
            )
        return f": {repeated}{place} repeated a piece of {self.period}, and then it went on"


class Told(NamedTuple):
    """What a token raised.

    Attributes:
        number: Of the token, from 1.
        tail: The repetition.
        is_loop: Whether it is a loop; else it may be honest.
    """

    number: int
    tail: Tail | None
    is_loop: bool


class Channel:
    """One text of an answer and its monitor.

    Args:
        settings: Settings of the monitor.
        asked: Number of copies that the prompt asks for.

    Attributes:
        monitor: Its monitor.
        excerpt: One copy of what repeats.
    """

    def __init__(self, settings: Settings, asked: int = 0) -> None:
        self.monitor = Monitor(settings, self._words_of, asked)
        self.excerpt = ""
        self._asked = asked
        self._readable = Readable()
        self._splitter = Splitter()
        self._echoes = Echoes()
        self._recent: deque[str] = deque(maxlen=KEPT_TOKENS)  # the texts of the last tokens
        self._has_words: bool | None = None
        self._told = 0  # 1: what may be honest was told, 2: a loop
        self._suspected: int | None = None  # number of tokens at which what may be honest was found
        self._onset: int | None = None  # of what may be honest
        self._detected: int | None = None
        self._longest: Tail | None = None
        self._covered = 0
        self._last_copy = 0  # number of tokens up to the last one that repeats

    def take(self, text: str, key: object = None, last: bool = False) -> Iterator[Told]:
        """Yield what a piece of text raises: at most one loop, and before it at most one repetition that may be honest.

        Args:
            text: The piece.
            key: Identifies equal tokens; None if the piece is arbitrary text.
            last: Whether the text ends here.
        """
        if key is not None:
            self._has_words = False
            yield from self._advance(key if isinstance(key, int) else number_of(key), text)
            return
        if self._has_words is None:
            self._has_words = True
        for word in self._splitter.feed(self._readable.feed(text, last), last):
            yield from self._advance(number_of(word), word)

    def _words_of(self, ids: Sequence[int]) -> Sequence[str]:
        """The words of the last tokens; of ids there are none."""
        if not self._has_words:
            return ()
        if len(ids) == 1:
            return [self._recent[-1]]
        return [*self._recent][-len(ids) :]

    def _advance(self, token: int, text: str) -> Iterator[Told]:
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
            self.excerpt = self._copy(tail)
            yield Told(count, tail, step.trigger)

    def _look_for_echoes(self, word: str, place: int, count: int) -> None:
        """Suspect near copies, unless something was found before, or so many were asked for."""
        if self._detected is not None or self._suspected is not None or not self._echoes.add(word, place):
            return
        if self._echoes.sentences > self._asked:
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

    def checked(self, name: str, channel: str, origin: Origin) -> CheckedOutput:
        """Return the verdict on the text, which has ended."""
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
        return CheckedOutput(name, verdict, tokens, wasted, period, onset, detected, origin.id, self.excerpt, channel)


class AnswerWatch:
    """All channels of one answer; each is watched apart, and its calls of tools also one after another.

    Args:
        settings: Settings of the monitors.
        asked: Number of copies that the prompt asks for, where the answer's record has no prompt.
    """

    def __init__(self, settings: Settings, asked: int = 0) -> None:
        self._settings = settings
        self._asked = asked
        self._channels: dict[str, Channel] = {}
        self._calls: dict[str, list[str]] = {}  # the texts of the calls that are not complete
        self._origin = Origin()
        self._group = ""
        self._told = 0

    def take(self, piece: Piece) -> Iterator[Alarm]:
        """Yield the alarms that a piece raises: at most one for a loop, and before it one for what may be honest."""
        if piece.origin is not None and not any(self._origin):
            self._origin = piece.origin
        if piece.text and not self._channels and piece.prompt:
            self._asked = max(self._asked, asked_copies(piece.prompt))
        self._group = self._group or piece.group
        if piece.channel.startswith("call "):
            if piece.text and piece.channel not in self._calls:
                yield from self._complete(piece.answer, all_of_them=False)
                self._calls[piece.channel] = []
            if piece.text:
                self._calls[piece.channel].append(piece.text)
        yield from self._feed(piece.answer, piece.channel, piece.text, piece.key)
        if piece.ends:
            yield from self._end(piece.answer)

    def _feed(self, name: str, channel: str, text: str, key: object = None, last: bool = False) -> Iterator[Alarm]:
        if not text and not (last and channel in self._channels):
            return
        if channel not in self._channels:
            self._channels[channel] = Channel(self._settings, self._asked)
        watch = self._channels[channel]
        for count, tail, is_loop in watch.take(text, key, last):
            level = 1 + is_loop
            if level > self._told:
                self._told = level
                yield Alarm(name, count, tail, watch.excerpt, is_loop, self._origin, channel)

    def _complete(self, name: str, all_of_them: bool) -> Iterator[Alarm]:
        """Feed the calls that are complete to the channel of all calls: those whose arguments are whole JSON."""
        for channel, parts in [*self._calls.items()]:
            text = "".join(parts)
            if parts and (all_of_them or _is_whole(text)):
                self._calls[channel] = []
                if len(self._calls) > 1 or not all_of_them:
                    yield from self._feed(name, CALLS, f"{text}\n")

    def _end(self, name: str) -> Iterator[Alarm]:
        yield from self._complete(name, all_of_them=True)
        for channel in [*self._channels]:
            yield from self._feed(name, channel, "", last=True)

    def checked(self, name: str) -> CheckedOutput:
        """Return the verdict on the answer, which has ended: that of its worst channel."""
        outputs = [watch.checked(name, channel, self._origin) for channel, watch in self._channels.items()]
        if not outputs:
            return CheckedOutput(name, "empty", id=self._origin.id, group=self._group)
        worst = min(outputs, key=lambda output: (WORST.index(output.verdict), output.channel == CALLS))
        tokens = sum(output.tokens for output in outputs if output.channel != CALLS)
        return replace(worst, tokens=tokens, group=self._group)


class Turns:
    """The turns of a conversation as one text: it loops if turns repeat although nothing new was said to the model.

    Equal turns after new words of a user, or after other results of a tool, may be honest.
    """

    def __init__(self, settings: Settings) -> None:
        self._channel = Channel(settings)
        self._turns: list[tuple[int, int, int]] = []  # token where a turn begins; numbers for it and what came before
        self._is_loop = False
        self._told = 0
        self._origin = Origin()

    def take(self, piece: Piece) -> Iterator[Alarm]:
        """Yield the alarms that a turn raises."""
        if piece.origin is not None and not any(self._origin):
            self._origin = piece.origin
        if piece.text:
            begin = self._channel.monitor.last.step
            self._turns.append((begin, number_of(piece.text), number_of(piece.context)))
        for _ in self._channel.take(piece.text, last=piece.ends):
            pass
        output = self._channel.checked(piece.answer, TURNS, self._origin)
        tail = self._channel.monitor.last.tail
        inside = [turn for turn in self._turns if tail is not None and turn[0] >= tail.start]
        if len(inside) < FEWEST_TURNS or output.verdict not in ("loops", "suspicious"):
            return
        told = len({turn[2] for turn in inside[1:]})
        is_loop = output.verdict == "loops" and told <= max(1, len({turn[1] for turn in inside}))
        self._is_loop = self._is_loop or is_loop
        if self._told < 1 + is_loop:
            self._told = 1 + is_loop
            count = self._channel.monitor.last.step
            yield Alarm(piece.answer, count, tail, self._channel.excerpt, is_loop, self._origin, TURNS)

    def checked(self, name: str) -> CheckedOutput | None:
        """Return the verdict on the turns; None if they do not repeat themselves."""
        output = self._channel.checked(name, TURNS, self._origin)
        if not self._told:
            return None
        verdict = output.verdict if self._is_loop else "suspicious"
        return replace(output, verdict=verdict)


def number_of(key: object) -> int:
    """Return a number for a token that has no id: equal tokens have equal numbers, in every run."""
    return crc32(repr(key).encode())


def _is_whole(call: str) -> bool:
    """Whether a call, a name and its arguments, is complete."""
    with suppress(ValueError):
        parse_json(call[call.index("{") :])
        return True
    return False
