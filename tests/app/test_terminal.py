"""On a terminal, with a progress bar, everything is seen that a pipe receives."""

from __future__ import annotations

import io
import os
import pty
import sys
import termios
import threading
import time
from textwrap import fill

import pytest
from sample_results import sample_find_sinks
from tqdm import tqdm

import sinkscope.app.scan
from sinkscope.app.card import SinkCard
from sinkscope.app.cli import main
from sinkscope.app.scan import Part, card_part
from sinkscope.loops.text.streams import Watch
from sinkscope.results.console import ProgressBar, note
from sinkscope.sinks.find.find import find_sinks

pyte = pytest.importorskip("pyte")
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
    screen = pyte.Screen(WIDTH, 300)
    pyte.Stream(screen).feed(text.replace("\n", "\r\n"))
    return "\n".join(line.rstrip() for line in screen.display).rstrip()


@pytest.fixture
def stream(tmp_path, monkeypatch) -> str:
    """A file that loops, and a watch that is as slow as a model that writes it."""
    file = tmp_path / "answer.txt"
    file.write_text(LOOPS)
    follow = Watch.follow

    def slowly(*args, **options):
        time.sleep(0.15)
        for alarm in follow(*args, **options):
            yield alarm
            time.sleep(0.15)

    monkeypatch.setattr(Watch, "follow", slowly)
    return str(file)


@pytest.fixture
def tour(monkeypatch) -> None:
    """A scan that takes a moment, and whose findings are made up."""
    part = card_part(Part("find_sinks", "find-sinks", find_sinks.on, "Sink"), sample_find_sinks())

    def scan(*, progress, **_):
        for done in range(3):
            progress("scan: find-sinks", done, 3)
            time.sleep(0.15)
        return SinkCard(quick=True, parts=(part,))

    monkeypatch.setattr(sinkscope.app.scan, "scan", scan)


PROMPT = "The bird sang the same song again: again, again, again, again, again, again,"
COMMANDS = {
    "generate": ["generate", PROMPT, "--max-new-tokens", "24"],
    "generate under the guard": ["generate", PROMPT, "--max-new-tokens", "48", "--guard"],
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
    if name.startswith("generate"):  # the same words, of which none is broken at the edge
        assert seen(shown).split() == (piped.out + "\n".join(notes)).split()
        assert max(map(len, seen(shown).split("\n"))) <= WIDTH
    else:
        assert sorted(seen(shown).split("\n")) == sorted(wanted.split("\n"))
    if "demo" in name or name.startswith("generate"):  # what they wait for is said first, and painted over
        assert shown.startswith("\x1b[?25lLoading bundled ...") == name.startswith("generate")
    if name.startswith("generate"):
        assert (
            "\x1b[2K" in shown and seen(shown).split()[:9] == piped.out.split()[:9]
        )  # there was a bar, and it is gone


def as_terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What is written to standard error, as if that were a terminal that knows more than letters."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    return terminal


def test_a_bar_that_has_ended_does_not_come_back(monkeypatch):
    terminal = as_terminal(monkeypatch)
    with ProgressBar() as progress:
        assert terminal.getvalue() == ""  # nothing is known yet: a dead 0/100 says nothing
        progress("layers", 1, 2)
        progress.end()
        before = terminal.getvalue()
        progress("layers", 2, 2)
    assert "1/2" in before and terminal.getvalue() == before


def test_the_seconds_of_waiting_are_counted(monkeypatch):
    terminal = as_terminal(monkeypatch)
    with ProgressBar() as progress:
        progress("Loading it ...", 0, 0)
        time.sleep(1.5)
        shown = seen(terminal.getvalue())
    assert shown.startswith("Loading it ...") and "0:00:01" in shown


def test_notes_and_the_bar_of_a_download_each_leave_one_line(monkeypatch):
    terminal = as_terminal(monkeypatch)
    with ProgressBar() as progress:
        progress("Loading it ...", 0, 0)
        note("note: a word")
        for _ in tqdm(range(4), desc="download", ncols=60, disable=False, mininterval=0):
            time.sleep(0.2)
        note("note: another")
    first, download, last = seen(terminal.getvalue()).split("\n")
    assert (first, last) == ("note: a word", "note: another") and download.startswith("download: 100%")


def test_what_is_waited_for_is_painted_over_by_what_comes_first(monkeypatch, capfd):
    """An error that is shorter than the line that it replaces."""
    words = ["find-sinks", "--text", "no", "--model", "a-model-whose-name-is-longer-than-the-whole-line-of-the-error"]
    main(words)
    status, shown = on_a_terminal(monkeypatch, words)
    assert status == 2 and "Loading a-model-whose-name-is" in shown
    assert seen(shown) == fill(capfd.readouterr().err, WIDTH)
