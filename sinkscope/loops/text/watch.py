"""Where answers loop, said while they are read, and at their end what they are.

1. `TextWatch` has the monitor of one text, or of one row of token ids.
2. `Watch` has those of all channels of all answers, and the verdict on each answer that has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from zlib import crc32

from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import in_one_line
from sinkscope.loops.text.answers import TEXT, Piece, pieces_in
from sinkscope.loops.text.monitor import Monitor, MonitorSettings, Settings
from sinkscope.loops.text.near_copies import Echoes
from sinkscope.loops.text.outputs import Splitter
from sinkscope.loops.text.repetition import asked_copies, asked_items
from sinkscope.loops.text.signals import Tail

TextVerdict = Literal["loops", "looped", "suspicious", "clean", "empty"]
WORST: tuple[TextVerdict, ...] = ("loops", "looped", "suspicious", "clean", "empty")
SHORT_END = 48  # tokens after the last copy that may be anything
KEPT_TOKENS = 2048  # whose text is kept
SHOWN = 60  # characters that are shown, or tokens of a loop without a period


@dataclass(frozen=True)
class CheckedOutput:
    """The result for one answer; of a stream, the result so far.

    Attributes:
        name: Name such as "line 3", or the file's name.
        verdict: "loops": it repeats itself to its end. "looped": it repeated itself and went on. "suspicious": it has
            near copies, or copies of data, which may be honest. "empty": it has no text. "clean": none of these. It is
            that of the worst channel.
        tokens: Number of tokens of all channels.
        wasted: Number of tokens after the first copy that belong to the repetition; None if there is none.
        period: Period in tokens of the stretch that covers most; None if there is none.
        onset: Position of the first token of the repetition in its channel, counted from 0.
        detected: Number of tokens at which it was found; None if nothing was.
        excerpt: One copy of what repeats, shortened; empty if nothing does.
        channel: The channel of the verdict: "text" or "reasoning".
    """

    name: str
    verdict: TextVerdict
    tokens: int = 0
    wasted: int | None = None
    period: int | None = None
    onset: int | None = None
    detected: int | None = None
    excerpt: str = ""
    channel: str = TEXT

    def __str__(self) -> str:
        where = self.name if self.channel == TEXT else f"{self.name}, {self.channel},"
        if self.detected is None:
            return f"{where} is {self.verdict}"
        found = f'{where} {self.verdict}: found at token {self.detected}, since token {self.onset}, "{self.excerpt}"'
        return found if self.period is None else f"{found}, period {self.period}"


class TextWatch:
    """One text, or one row of token ids, and its monitor.

    Args:
        settings: Settings of the monitor.
        asked: Number of copies that the prompt asks for.
        items: Number of items of a list that it may ask for.
        has_words: Whether it is a text.

    Attributes:
        monitor: The monitor.
        level: 2 if the text loops or looped, 1 if it has a repetition that may be honest, else 0.
    """

    def __init__(self, settings: Settings, asked: int, items: float, has_words: bool) -> None:
        self.monitor = Monitor(settings, self._words_of if has_words else None, asked, items)
        self.level = 0
        self._asked = asked
        self._splitter = Splitter()
        self._echoes = Echoes()
        self._recent: deque[str] = deque(maxlen=KEPT_TOKENS)  # the texts of the last tokens
        self._has_words = has_words
        self._detected = self._onset = 0  # of what raised the level
        self._excerpt = ""
        self._longest: Tail | None = None
        self._covered = 0
        self._last_copy = 0  # number of tokens up to the last one that repeats

    def feed(self, piece: str | Sequence[int], last: bool = False) -> None:
        """Take a piece of the text, or further ids; `last` says that it ends here."""
        if not isinstance(piece, str):
            for token in piece:
                self._advance(token, str(token))
            return
        for word in self._splitter.feed(piece, last):
            self._advance(crc32(word.encode("utf-8", "replace")), word)
        if last and self.monitor.last.step:
            self._look_for_echoes("\n", self.monitor.last.step + 1)

    def _words_of(self, ids: Sequence[int]) -> Sequence[str]:
        """The words of the last tokens."""
        return [self._recent[place] for place in range(-min(len(ids), len(self._recent)), 0)]

    def _advance(self, token: int, text: str) -> None:
        """Take a token and its text."""
        self._recent.append(text)
        step = self.monitor.update(token)
        tail = step.tail
        if self._has_words:
            self._look_for_echoes(text, step.step)
        if not step.suspect and (tail is not None or step.trigger):
            self._last_copy = step.step
            if tail is not None and step.step - tail.start > self._covered:
                self._longest, self._covered = tail, step.step - tail.start
        level = 2 if step.trigger else int(step.suspect)
        if level > self.level:
            self.level, self._detected = level, step.step
            self._onset = step.step if tail is None else tail.start
            self._excerpt = self._copy(tail)

    def _look_for_echoes(self, word: str, count: int) -> None:
        """Suspect near copies, unless something was found before, or as many were asked for."""
        if not self.level and self._echoes.add(word, count - 1) and self._echoes.copies > self._asked:
            self.level, self._detected, self._onset = 1, count, self._echoes.onset or 0

    def _copy(self, tail: Tail | None) -> str:
        """Text of the last copy of the loop, or of the last tokens."""
        last = [*self._recent][-(SHOWN if tail is None else tail.period) :]
        text = in_one_line(" ".join(last).strip())
        return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."

    def checked(self, name: str, channel: str = TEXT) -> CheckedOutput:
        """Return the verdict on the text so far."""
        tokens, tail = self.monitor.last.step, self._longest
        if not self.level:
            return CheckedOutput(name, "clean" if tokens else "empty", tokens, channel=channel)
        verdict: TextVerdict = "suspicious"
        wasted, period, onset = None, None, self._onset
        if self.level == 2:
            ends = tokens - self._last_copy <= max(SHORT_END, self.monitor.settings.cooldown)
            verdict = "loops" if ends else "looped"
            if tail is not None:
                wasted, period, onset = max(0, self._last_copy - tail.start - tail.period), tail.period, tail.start
        return CheckedOutput(name, verdict, tokens, wasted, period, onset, self._detected, self._excerpt, channel)


class Watch:
    """All answers of one or several inputs.

    Attributes:
        settings: Settings of the monitors.
        open: The channels of answers that have not ended, by the names of the answers.
        checked: Verdicts on those that have.
        problems: What was wrong with lines that could not be read, and with inputs that broke off.

    Args:
        settings: Settings of the monitors.
        prompt: What was asked; copies that it asks for are no loop.

    Example:
        >>> watch = Watch()
        >>> pieces = (Piece("answer", "one more cup of tea, ") for _ in range(99))
        >>> next(found.verdict for piece in pieces for found in watch.take(piece))
        'loops'
    """

    def __init__(self, settings: Settings | None = None, prompt: str = "") -> None:
        self.settings = settings or MonitorSettings()
        self._prompt = prompt
        self.open: dict[str, dict[str, TextWatch]] = {}
        self.checked: list[CheckedOutput] = []
        self.problems: list[str] = []

    def __repr__(self) -> str:
        """Return how many answers are open and checked."""
        return f"Watch(open={len(self.open)}, checked={len(self.checked)}, problems={len(self.problems)})"

    def take(self, piece: Piece) -> Iterator[CheckedOutput]:
        """Take a piece of an answer; yield the answer once it loops, and before that once it is suspicious."""
        if not piece.content and not piece.ends:
            return
        channels = self.open.setdefault(piece.answer, {})
        if piece.content and piece.channel not in channels:
            prompt = f"{self._prompt}\n{piece.prompt}"
            has_words = isinstance(piece.content, str)
            channels[piece.channel] = TextWatch(self.settings, asked_copies(prompt), asked_items(prompt), has_words)
        for channel, watch in channels.items():
            level = watch.level
            if channel == piece.channel:
                watch.feed(piece.content, piece.ends)
            elif piece.ends:
                watch.feed("", last=True)
            if watch.level > level:
                yield watch.checked(piece.answer, channel)
        if piece.ends:
            self.checked.append(self._ended(piece.answer))

    def _ended(self, name: str) -> CheckedOutput:
        """The verdict on an answer that has ended: that of its worst channel."""
        outputs = [watch.checked(name, channel) for channel, watch in self.open.pop(name).items()]
        worst = min(outputs, key=lambda output: WORST.index(output.verdict), default=CheckedOutput(name, "empty"))
        return replace(worst, tokens=sum(output.tokens for output in outputs))

    def read(self, source: Any, name: str = "the input", field: str | None = None) -> Iterator[CheckedOutput]:
        """Read a whole input; yield each answer once it loops, and before that once it is suspicious.

        Lines that cannot be read are counted. What was read before the input breaks off counts as well.

        Args:
            source: A binary file, a pipe or a response with `read1`: one text, JSON lines, or the events of a server
                that speaks as OpenAI's.
            name: Its name in the result and in errors.
            field: Where the answers are in a record, such as "response.choices".

        Raises:
            SinkscopeError: It is empty, is not UTF-8, or holds no answer.
        """
        checked, skipped = len(self.checked), len(self.problems)
        try:
            for piece in pieces_in(source, name, field, self.problems.append):
                yield from self.take(piece)
        except UnicodeError:
            self.open.clear()  # what was read of it belongs to no other input
            raise SinkscopeError(f"{name} is not UTF-8 text: convert it, or give another input") from None
        except OSError as error:
            self.problems.append(f"{name} breaks off: {error}")
        for answer in [*self.open]:
            yield from self.take(Piece(answer, ends=True))
        if len(self.checked) == checked:
            if len(self.problems) > skipped:
                raise SinkscopeError(self.problems[skipped])
            raise SinkscopeError(
                f"{name} is empty, or nothing in it is an output: expected a text, JSON lines, or a stream"
            )
