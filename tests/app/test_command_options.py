"""The commands that are written out with click, held beside the functions of Python that they call."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any, Literal, get_args, get_origin

import click
import pytest
from repository import python

import sinkscope as ss
from sinkscope.app.cli import main
from sinkscope.app.commands import COMMANDS, LEFT
from sinkscope.app.commands.command import RENAMED, out_of_memory
from sinkscope.app.commands.options import MODEL_WORD, OUTPUTS, Commas, TextFile
from sinkscope.files.arguments import PYTHON_ONLY, parameters_of
from sinkscope.files.envelope import OWN, kind_modules, measurements, result_class
from sinkscope.measure import Measurement, Setup

LEFT_OUT = {("bench", name) for name in ("temperature", "batch_size", "seed", "methods")}
"""Options that are given to a function only where they are typed, which then has its own default, or needs them."""
EVERY = pytest.mark.parametrize("words", list(COMMANDS))


def parameters(words: str) -> dict[str, Any]:
    """The parameters of the function of a command, and of functions that get its `**settings`."""
    function = COMMANDS[words].load()
    if isinstance(function, Measurement):
        return {one.name: one for one in function.all_parameters}
    found = {one.name: one for one in parameters_of(inspect.unwrap(function))}
    if any(one.kind is one.VAR_KEYWORD for one in inspect.signature(function).parameters.values()):
        more = Setup.open
        if words == "bench":
            more = import_module("sinkscope.bench.benchmark").run
        found = {one.name: one for one in parameters_of(more)} | found
    if words == "compare":  # of several models, which have no revision in common
        del found["model"], found["revision"]
    return found


def own_options(words: str) -> dict[str, click.Parameter]:
    """The options of a command that are arguments of its function."""
    others = [MODEL_WORD, *(one.name for one in OUTPUTS), *(["results"] if words == "compare" else [])]
    return {str(one.name): one for one in COMMANDS[words].params if one.name not in others}


@EVERY
def test_every_parameter_is_an_option_with_its_default_choices_and_kind(words):
    known, options = parameters(words), own_options(words)
    assert options.keys() == known.keys() - PYTHON_ONLY
    for name, option in options.items():
        one = known[name]
        default: Any = option.to_info_dict()["default"]
        expected = None if one.default is inspect.Parameter.empty else one.default
        if one.many and expected:
            default, expected = [*default], [",".join(map(str, expected))]
        if (words, name) not in LEFT_OUT:
            assert option.required == (one.default is inspect.Parameter.empty), name
            assert (default or None) == (expected or None), name
        kind = option.type
        if isinstance(kind, Commas):
            kind = kind.kind
        assert one.many == (option.multiple or option.nargs < 0) or isinstance(kind, TextFile), name
        if get_origin(one.type) is Literal:
            assert tuple(kind.choices) == get_args(one.type), name
        elif one.type in (int, float, bool):
            assert kind.name == {int: "integer", float: "float", bool: "boolean"}[one.type], name


@EVERY
def test_the_help_is_the_docstring_without_what_only_python_takes(words, typed):
    command = COMMANDS[words]
    text = " ".join(typed([*words.split(), "--help"]).out.split())
    doc = re.split("\n\n(?:Args:|Every measurement)", inspect.getdoc(command.load()) or "")[0]
    assert re.sub(r" (Raises|Returns|Example): .*", "", " ".join(doc.split())) in text
    assert "from Python also" not in text
    known = parameters(words)
    for name in own_options(words):
        if name in known:  # the options of files and of the words that are typed are described here
            first, *_ = known[name].help.replace(". ", "; ").split("; ")
            assert first.rstrip(".") in text, name


def test_a_command_or_a_name_that_left_says_what_has_its_work(capsys):
    for words, remedy in LEFT.items():
        assert main([*words.split(), "--model", "bundled"]) == 2
        assert capsys.readouterr().err == f"error: `sinkscope {words}` left in version 0.3: {remedy}\n"
    for name in ss.LEFT:
        with pytest.raises(AttributeError, match=ss.LEFT[name].replace("(", r"\(").replace(")", r"\)")):
            getattr(ss, name)
    for name, place in (("SnapKV", "kv"), ("DRY", "loops"), ("TriShape", "sparse")):
        with pytest.raises(AttributeError, match=rf"it is sinkscope\.{place}\.{name}"):
            getattr(ss, name)
        assert getattr(getattr(ss, place), name).__name__ == name
    assert len(ss.__all__) <= 38 and len(COMMANDS) == 16


def test_an_option_has_one_name_everywhere():
    flags: dict[str, set[str]] = {}
    for command in COMMANDS.values():
        for one in command.params:
            if isinstance(one, click.Option):
                flags.setdefault(str(one.name), set()).add(one.opts[0])
    other = {name: found for name, found in flags.items() if found != {"--" + name.replace("_", "-")}}
    assert other == {"prompt": {"--prompt", "--prompt-file"}, "answer": {"--answer-file"}}


def test_earlier_names_of_options_are_still_read(capsys):
    for old, new in RENAMED.items():
        words = next(words for words, one in COMMANDS.items() if new in own_options(words))
        with COMMANDS[words].make_context(words, [f"--{old}", "1" if old in ("eta", "layer") else "cat"]) as context:
            assert context.params[new]
        assert f"--{old} " not in COMMANDS[words].get_help(click.Context(COMMANDS[words]))


def test_every_kind_of_result_is_in_the_module_that_is_named():
    kinds = kind_modules()
    assert {kind for one in COMMANDS.values() for kind in one.kinds} == {*kinds}
    for kind, module in kinds.items():
        import_module(module)
        assert result_class(kind).kind == kind
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


def test_what_to_try_without_memory_is_an_option_of_the_command():
    for command in COMMANDS.values():
        said = out_of_memory(command)
        flags = {flag for one in command.params for flag in one.opts}
        assert said.startswith("out of memory: try ")
        assert {word.strip(",") for word in said.split() if word.startswith("--")} <= flags, command.words
