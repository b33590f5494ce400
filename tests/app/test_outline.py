"""What the text of a module says of its command is what the imported function says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sinkscope.app.command_run import CommandRun
from sinkscope.app.commands import commands
from sinkscope.app.outline import Outline


@pytest.mark.parametrize("words", list(commands()))
def test_an_outline_read_is_that_of_the_imported_function(words):
    command = commands()[words]
    read, imported = Outline.read(command.module, command.name), Outline.of(command.load())
    assert read is not None and (read.doc, read.measures) == (imported.doc, imported.measures)
    shown: list[list[dict[str, object]]] = []
    limits: list[list[list[str]]] = []
    for outline in (read, imported):
        shown.append([option.to_info_dict() for option in CommandRun(command, outline).click_parameters()])
        limits.append([[str(limit).split(" at 0x")[0] for limit in one.limits] for one in outline.parameters])
    assert shown[0] == shown[1] and limits[0] == limits[1]
    assert [one.name for one in read.parameters] == [one.name for one in imported.parameters]


def test_a_command_of_another_package_has_no_text_to_read():
    assert Outline.read("json", "loads") is None


def test_help_and_typing_errors_load_no_torch_and_the_wait_is_announced_before_it():
    code = """
import sys
from sinkscope.app.cli import main
from sinkscope.results.console import ProgressBar
def wait(bar, words):
    print(words, 'torch' in sys.modules)
    raise KeyboardInterrupt
ProgressBar.wait = wait
for words in ('--help', '--modle x', '--top-k 0', '--text none'):
    print(main(['find-sinks', *words.split()]), 'torch' in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    ends = [line for line in done.stdout.splitlines() if line.endswith((" True", " False"))]
    assert ends == ["0 False", "2 False", "2 False", "Loading bundled ... False", "130 False"]
