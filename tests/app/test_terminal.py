"""On a terminal, with a progress bar, everything is seen that a pipe receives."""

from __future__ import annotations

import os
import pty
import sys
import termios
import threading
import time
from textwrap import fill

import pytest
from sample_results import sample_find_sinks
from terminal_screen import Screen

import sinkscope.app.scan
from sinkscope.app.card import SinkCard
from sinkscope.app.cli import main
from sinkscope.app.scan import Part, card_part
from sinkscope.display.console import ProgressBar
from sinkscope.loops import check
from sinkscope.loops.streams import Watch
from sinkscope.measure import ScanPart

WIDTH = 80
LOOPS = "one two three four five six seven\n" * 60


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> tuple[int, str]:
    """Run a command whose two outputs are a terminal: its status and all that it writes, colours and moves included."""
    reader, writer = pty.openpty()
    modes = termios.tcgetattr(writer)
    modes[1] &= ~termios.OPOST  # bytes arrive as they are written
    termios.tcsetattr(writer, termios.TCSANOW, modes)
    written: list[bytes] = []

    def read() -> None:
        while True:
            try:
                piece = os.read(reader, 4096)
            except OSError:
                return
            if not piece:
                return
            written.append(piece)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        with open(writer, "w", encoding="utf-8") as terminal, monkeypatch.context() as patch:
            patch.setenv("COLUMNS", str(WIDTH))
            patch.setenv("TERM", "xterm")
            patch.setattr(sys, "stdout", terminal)
            patch.setattr(sys, "stderr", terminal)
            code = main(words)
    finally:
        thread.join(timeout=20)
        os.close(reader)
    return code, b"".join(written).decode()


def seen(text: str) -> str:
    """What stands on the screen after a text."""
    screen = Screen(WIDTH)
    screen.write(text.replace("\n", "\r\n"))
    return screen.text()


@pytest.fixture
def stream(tmp_path, monkeypatch) -> str:
    """A file that loops, and a watch that is as slow as a model that writes it."""
    file = tmp_path / "answer.txt"
    file.write_text(LOOPS)
    follow = Watch.follow

    def slowly(*args, **options):
        time.sleep(0.3)
        for alarm in follow(*args, **options):
            yield alarm
            time.sleep(0.3)

    monkeypatch.setattr(Watch, "follow", slowly)
    return str(file)


@pytest.fixture
def tour(monkeypatch) -> None:
    """A scan that takes a moment, and whose findings are made up."""
    part = card_part(Part("find_sinks", "find-sinks", None, ScanPart(topic="Sink")), sample_find_sinks())

    def scan(*, progress, **_):
        for done in range(3):
            progress("scan: find-sinks", done, 3)
            time.sleep(0.15)
        return SinkCard(quick=True, parts=(part,))

    monkeypatch.setattr(sinkscope.app.scan, "scan", scan)


PROMPT = "The bird sang the same song again: again, again, again, again, again, again,"
COMMANDS = {
    "generate": ["generate", PROMPT, "--max-new-tokens", "40"],
    "generate under the guard": ["generate", PROMPT, "--max-new-tokens", "80", "--guard"],
    "generate under the guard, as it is written": [
        *("generate", PROMPT, "--max-new-tokens", "80", "--guard", "--no-rewind"),
    ],
    "loops": ["loops", "--follow", "FILE"],
    "loops with the stream": ["loops", "--follow", "--tee", "FILE"],
    "demo": ["demo"],
}


@pytest.mark.parametrize("name", list(COMMANDS))
def test_a_terminal_shows_what_a_pipe_receives(name, stream, tour, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    words = [stream if word == "FILE" else word for word in COMMANDS[name]]
    code = main(words)
    piped = capfd.readouterr()
    assert piped.out
    status, shown = on_a_terminal(monkeypatch, words)
    assert status == code
    notes = [fill(line, WIDTH, break_on_hyphens=False) for line in piped.err.splitlines()]
    wanted = seen(piped.out + "\n".join(notes))
    assert sorted(seen(shown).split("\n")) == sorted(wanted.split("\n"))
    if name.startswith("generate"):
        assert "\x1b[2K" in shown and seen(shown).startswith(seen(piped.out))  # there was a bar, and it is gone


def test_a_bar_that_has_ended_does_not_come_back(monkeypatch):
    class Terminal:
        def __init__(self) -> None:
            self.written = ""

        def write(self, text: str) -> None:
            self.written += text

        def flush(self) -> None: ...

        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with ProgressBar() as progress:
        assert terminal.written == ""  # nothing is known yet: a dead 0/100 says nothing
        progress("layers", 1, 2)
        progress.end()
        assert "1/2" in terminal.written
        before = terminal.written
        progress("layers", 2, 2)
    assert terminal.written == before


@pytest.mark.parametrize("width", [40, 61, 80])
def test_prose_is_broken_between_words(width, tmp_path, monkeypatch):
    """Each line of the terminal ends where a word ends, and no word is lost."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(LOOPS)
    monkeypatch.setattr(sys.modules[__name__], "WIDTH", width)
    _, shown = on_a_terminal(monkeypatch, ["loops", "a.txt", "--html", "a.html"])
    lines = seen(shown).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("Conclusion: "))
    said = " ".join(lines[start:])
    assert said == f"Conclusion: {check(LOOPS, name='a.txt').conclusion()} Page: a.html"
