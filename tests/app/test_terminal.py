"""On a terminal, with a progress bar, everything is seen that a pipe receives."""

from __future__ import annotations

import io
import sys
import time
from unittest import mock

import pytest
from tqdm import tqdm

from sinkscope.app.cli import main
from sinkscope.files import progress as files_progress
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


def test_no_bar_stands_full_and_the_time_left_is_shown(monkeypatch):
    terminal = on_terminal(monkeypatch)
    with ProgressBar() as progress:
        progress("layers", 0, 2)
        time.sleep(0.6)
        progress("layers", 1, 2)
        assert "1/2 00:00<00:00" in seen(terminal.text())
        progress("layers", 2, 2)
        shown = seen(terminal.text())
        assert "2/2" not in terminal.text() and shown.startswith("layers: done, going on")
    assert seen(terminal.text()) == ""


def test_where_no_terminal_is_lines_come_until_the_end(monkeypatch, capsys):
    monkeypatch.setattr(files_progress, "PAUSE", 0.1)
    with ProgressBar() as progress:
        progress("layers", 1, 4)
        time.sleep(0.5)  # the stage reports nothing meanwhile
    lines = capsys.readouterr().err.splitlines()
    assert lines and lines[0] == "layers: 1 of 4 (0:00 so far)"
    time.sleep(0.3)
    assert capsys.readouterr().err == ""


def test_a_line_says_how_much_is_done_and_how_long_the_rest_takes(monkeypatch):
    now = mock.Mock(return_value=100.0)
    monkeypatch.setattr(files_progress.time, "monotonic", now)
    lines = files_progress.ProgressLines(lambda _: None)
    for stage, done, total, at, said in (
        ("Loading it ...", 0, 0, 100, "Loading it ... (0:00 so far)"),
        ("layers", 2, 10, 130, "layers: 2 of 10 (0:00 so far)"),  # two were there already
        ("layers", 4, 10, 155, "layers: 4 of 10 (0:25 so far, about 1:15 left)"),
        ("heads", 0, 10, 160, "heads: 0 of 10 (0:00 so far)"),
    ):
        now.return_value = at
        lines.show(stage, done, total)
        assert lines.line() == said
    lines.end()


def test_a_short_command_says_no_progress_where_no_terminal_is(capsys):
    assert main(["lines", "--count", "2", "--length", "48"]) == 0
    assert capsys.readouterr().err == ""


def test_a_bar_that_has_ended_does_not_come_back(monkeypatch):
    terminal = on_terminal(monkeypatch)
    with ProgressBar() as progress:
        progress("layers", 1, 2)
        progress.end()
        before = terminal.text()
        progress("layers", 2, 2)
    assert "1/2" in before and terminal.text() == before
