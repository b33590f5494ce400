"""On a terminal, with a progress bar, everything is seen that a pipe receives."""

from __future__ import annotations

import io
import sys
import time

import pytest
from tqdm import tqdm

from sinkscope.app.cli import main
from sinkscope.results.console import ProgressBar, note

pyte = pytest.importorskip("pyte")
WIDTH = 80


class Terminal(io.TextIOWrapper):
    """What is written to a terminal that knows more than letters, colours and moves included."""

    def __init__(self):
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

    def isatty(self) -> bool:
        return True

    def text(self) -> str:
        return self.buffer.getvalue().decode()


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Where standard error goes from now on."""
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def seen(text: str) -> str:
    """What stands on the screen after a text."""
    screen = pyte.Screen(WIDTH, 300)
    pyte.Stream(screen).feed(text.replace("\n", "\r\n"))
    return "\n".join(line.rstrip() for line in screen.display).rstrip()


PROMPT = "The bird sang the same song again: again, again, again, again, again, again,"
COMMAND = ["generate", PROMPT, "--max-new-tokens", "48", "--guard"]


def test_a_terminal_shows_what_a_pipe_receives(monkeypatch, capfd):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    assert main(COMMAND) == 0
    piped = capfd.readouterr()
    terminal = on_terminal(monkeypatch)
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(COMMAND) == 0
    written, shown = terminal.text(), seen(terminal.text())
    assert "".join(shown.split()) == "".join((piped.out + piped.err).split())  # the terminal breaks the lines
    # What it waits for is said first, and painted over; there was a bar, and it is gone.
    assert "Loading bundled ..." in written and "Loading" not in shown


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_command_runs_without_an_output(closed, monkeypatch, tmp_path):
    """As in a service that has closed it."""
    monkeypatch.setattr(sys, closed, None)
    assert main(["lines", "--count", "2", "--length", "48", "--json", str(tmp_path / "a.json")]) == 0
    assert (tmp_path / "a.json").is_file()


def test_notes_and_the_bar_of_a_download_each_leave_one_line(monkeypatch):
    terminal = on_terminal(monkeypatch)
    with ProgressBar() as progress:
        progress("Loading it ...", 0, 0)
        note("note: a word")
        for _ in tqdm(range(4), desc="download", ncols=60, disable=False, mininterval=0):
            time.sleep(0.2)
        note("note: another")
    first, download, last = seen(terminal.text()).split("\n")
    assert (first, last) == ("note: a word", "note: another") and download.startswith("download: 100%")


def test_a_bar_that_has_ended_does_not_come_back(monkeypatch):
    terminal = on_terminal(monkeypatch)
    with ProgressBar() as progress:
        progress("layers", 1, 2)
        progress.end()
        before = terminal.text()
        progress("layers", 2, 2)
    assert "1/2" in before and terminal.text() == before
