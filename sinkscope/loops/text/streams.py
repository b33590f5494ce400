"""`Watch` says of outputs while they are being read where they loop, and at their end what they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sinkscope.errors import SinkscopeError, warn
from sinkscope.loops.text.channels import Alarm, AnswerWatch, CheckedOutput, Turns
from sinkscope.loops.text.lines import pieces_in
from sinkscope.loops.text.monitor import MonitorSettings, Settings
from sinkscope.loops.text.pieces import TEXT, TURNS, Piece, StreamForm
from sinkscope.loops.text.repetition import asked_copies

KEPT_VERDICTS = 64  # of a stream that is followed
KEPT_ENDED = 4096  # names of answers that have ended
KEPT_PROBLEMS = 20  # lines that could not be read and are named
NOT_TEXT = "is not UTF-8 text, or not to its end: convert it, or give another input"


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
        self.open: dict[str, AnswerWatch | Turns] = {}
        self.ended = 0
        self.checked: list[CheckedOutput] = []
        self.skipped = 0
        self.problems: list[str] = []
        self._ended: dict[str, None] = {}  # names of answers that have ended
        self._mentioned = ""  # name of an answer of which no text has come

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
        by: str | None = None,
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
            by: Field by whose values answers are grouped.
            label: What stands before the names of its outputs.
            whole: Whether it is a file; else a stream, which may never end.

        Raises:
            SinkscopeError: It is empty, holds no output, or is a file that is not UTF-8 text.
        """
        ended, skipped = self.ended, self.skipped
        try:
            for piece in pieces_in(source, form, name, self.skip, field=field, by=by, whole=whole):
                if piece.answer != name:  # the file is one text
                    piece = piece._replace(answer=f"{label}{piece.answer}")
                yield from self.take(piece)
                if not whole:
                    del self.checked[:-KEPT_VERDICTS]
        except UnicodeError:
            if whole:
                raise SinkscopeError(f"{name} {NOT_TEXT}") from None
            self.skip(f"{name} {NOT_TEXT}")
        except (OSError, EOFError) as error:  # EOFError: of a damaged .gz
            self.skip(f"{name} breaks off: {error}")
        for answer, watch in list(self.open.items()):
            yield from self.take(Piece(answer, TURNS if isinstance(watch, Turns) else TEXT, ends=True))
        if self.ended == ended and self._mentioned:
            yield from self.take(Piece(self._mentioned, ends=True))
        self._mentioned = ""
        self._ended.clear()
        if self.ended > ended:
            return
        if self.problems[skipped:]:
            raise SinkscopeError(self.problems[skipped])
        expected = "a text, JSON lines, or the events of a server (see --format)"
        raise SinkscopeError(f"{name} is empty, or nothing in it is an output: expected {expected}")

    def take(self, piece: Piece) -> Iterator[Alarm]:
        """Yield the alarms that a piece raises in its answer. A piece without text opens none, and ends one once."""
        name = piece.answer
        if name not in self.open:
            if not piece.text and (not piece.ends or name in self._ended or piece.channel == TURNS):
                self._mentioned = self._mentioned or name
                return
            if piece.channel == TURNS:
                self.open[name] = Turns(self.settings)
            else:
                self.open[name] = AnswerWatch(self.settings, self._asked)
        watch = self.open[name]
        yield from watch.take(piece)
        if piece.ends:
            del self.open[name]
            self._end(name, watch)

    def _end(self, name: str, watch: AnswerWatch | Turns) -> None:
        """Keep the verdict on an answer that has ended."""
        output = watch.checked(name)
        if output is not None:
            self.checked.append(output)
        self.ended += isinstance(watch, AnswerWatch)
        self._ended[name] = None
        if len(self._ended) > KEPT_ENDED:
            del self._ended[next(iter(self._ended))]
