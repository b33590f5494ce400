"""What the command line knows without importing a command is what the imported function says."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib import import_module

import pytest

from sinkscope.app.command_run import CommandRun
from sinkscope.files.catalog import FILE, commands, kind_modules
from sinkscope.files.envelope import class_of
from sinkscope.results.options import Outline
from tools.commands import written


def test_the_data_are_those_of_the_functions():
    assert FILE.read_text() == written(), "run python -m tools.commands"


@pytest.mark.parametrize("words", list(commands()))
def test_an_outline_of_the_data_gives_the_options_of_the_imported_function(words):
    command = commands()[words]
    assert command.outline is not None
    read, imported = Outline.from_data(command.outline), Outline.of(command.load())
    assert replace(read, parameters=(), outputs=()) == replace(imported, parameters=(), outputs=())
    shown: list[list[dict[str, object]]] = []
    for outline in (read, imported):
        shown.append([option.to_info_dict() for option in CommandRun(command, outline).click_parameters()])
    assert shown[0] == shown[1]
    for one, other in zip(read.parameters, imported.parameters, strict=True):
        assert (one.name, one.option, one.many, one.help) == (other.name, other.option, other.many, other.help)
        if one.type in (int, float):
            for number in (-1, 0, 1, 3, 10**400, float("nan")):
                assert _refusal(one, number) == _refusal(other, number), one.name


def _refusal(parameter, number):
    values = [number] if parameter.many else number
    try:
        parameter.check(values)
    except Exception as error:
        return str(error)
    return ""


def test_every_kind_of_result_is_in_the_module_that_the_data_name():
    kinds = kind_modules()
    assert len(kinds) > 15 and kinds["find-sinks"] == "sinkscope.sinks.find.result"
    for kind, module in kinds.items():
        import_module(module)
        assert class_of(kind).__module__ == module


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
