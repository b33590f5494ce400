"""What the command line knows without importing a command is what the imported function says."""

from __future__ import annotations

from importlib import import_module

from repository import python

from sinkscope.files.catalog import COMMANDS_FILE, kind_modules
from sinkscope.files.envelope import result_class
from tools.commands import written


def test_the_data_are_those_of_the_functions():
    assert COMMANDS_FILE.read_text() == written(), "run python -m tools.commands"


def test_every_kind_of_result_is_in_the_module_that_the_data_name():
    kinds = kind_modules()
    assert len(kinds) > 15 and kinds["find-sinks"] == "sinkscope.sinks.spikes.result"
    for kind, module in kinds.items():
        import_module(module)
        assert result_class(kind).__module__ == module


def test_help_and_typing_errors_load_no_torch():
    code = """
import sys
from sinkscope.app.cli import main
from sinkscope.results.console import ProgressBar
def announce(bar, words, done, total):
    print(words, 'torch' in sys.modules)
    raise KeyboardInterrupt
ProgressBar.__call__ = announce
for words in ('--help', '--modle x', '--max-repeats x', '--text none'):
    print(main(['find-sinks', *words.split()]), 'torch' in sys.modules)
"""
    ends = [line for line in python(code).stdout.splitlines() if line.endswith((" True", " False"))]
    assert ends == ["0 False", "2 False", "2 False", "Loading bundled ... False", "130 False"]
