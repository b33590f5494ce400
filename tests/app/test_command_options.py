"""The commands that are written out with click, held beside the functions of Python that they call."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any, Literal, get_args, get_origin

import pytest
from repository import python

import sinkscope as ss
from sinkscope.app.commands import COMMANDS
from sinkscope.app.commands.options import MODEL_WORD, OUTPUTS, Several
from sinkscope.files.arguments import PYTHON_ONLY, parameters_of
from sinkscope.files.envelope import OWN, kinds, measurements
from sinkscope.measure import Measurement, Setup

LEFT_OUT = {("bench", name) for name in ("temperature", "batch_size", "seed", "methods")}
"""Options that are given to a function only where they are typed, which then has its own default, or needs them."""


def parameters(words: str) -> dict[str, Any]:
    """The parameters of the function of a command, and of functions that get its `**settings`."""
    function = COMMANDS[words].load()
    if isinstance(function, Measurement):
        return function.all_parameters
    found = {one.name: one for one in parameters_of(inspect.unwrap(function))}
    if any(one.kind is one.VAR_KEYWORD for one in inspect.signature(function).parameters.values()):
        more = import_module("sinkscope.bench.benchmark").run if words == "bench" else Setup.open
        found = {one.name: one for one in parameters_of(more)} | found
    if words == "compare":  # of several models, which have no revision in common
        del found["model"], found["revision"]
    return found


@pytest.mark.parametrize("words", COMMANDS)
def test_every_parameter_is_an_option_with_its_default_and_its_choices(words, typed):
    known = parameters(words)
    others = {MODEL_WORD, *(one.name for one in OUTPUTS), *(["results"] if words == "compare" else [])}
    options = {str(one.name): one for one in COMMANDS[words].params if one.name not in others}
    assert options.keys() == known.keys() - PYTHON_ONLY
    help_text = " ".join(typed([*words.split(), "--help"]).out.split())
    assert (inspect.getdoc(COMMANDS[words].load()) or "").partition("\n")[0] in help_text
    for name, option in options.items():
        one = known[name]
        default: Any = option.to_info_dict()["default"]
        expected = None if one.default is inspect.Parameter.empty else one.default
        if one.many and expected:
            default, expected = [*default], [",".join(map(str, expected))]
        if (words, name) not in LEFT_OUT:
            assert option.required == (one.default is inspect.Parameter.empty), name
            assert (default or None) == (expected or None), name
        if get_origin(one.type) is Literal and not isinstance(option, Several):
            assert tuple(option.type.choices) == get_args(one.type), name
        assert one.help.replace(". ", "; ").split("; ")[0].rstrip(".") in help_text, name


def test_a_name_that_left_says_what_has_its_work_and_every_kind_has_its_place():
    for name in ss.LEFT:
        with pytest.raises(AttributeError, match=ss.LEFT[name].replace("(", r"\(").replace(")", r"\)")):
            getattr(ss, name)
    for name, place in (("SnapKV", "kv"), ("Watch", "loops"), ("TriShape", "sparse")):
        with pytest.raises(AttributeError, match=rf"it is sinkscope\.{place}\.{name}"):
            getattr(ss, name)
        assert getattr(getattr(ss, place), name).__name__ == name
    with pytest.raises(AttributeError, match=r"'find_sink'; did you mean find_sinks\?"):
        _ = ss.find_sink
    assert len(ss.__all__) <= 38 and len(COMMANDS) == 16
    assert {kind for one in COMMANDS.values() for kind in one.kinds} == {*kinds()}
    for words in OWN:
        assert measurements()[words].load() is getattr(ss, words.replace("-", "_"))


def test_help_typing_errors_and_names_of_models_load_no_torch():
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
print(main(['heads']), 'torch' in sys.modules)
"""
    ends = [line for line in python(code).stdout.splitlines() if line.endswith((" True", " False"))]
    assert ends == ["0 False", "2 False", "2 False", "Loading bundled ... False", "130 False", "2 False"]
