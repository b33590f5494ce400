"""The commands that are written out with click, held beside the functions of Python that they call."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any, Literal, get_args, get_origin

import click
import pytest
from packaging.version import Version
from refusals import refused

import sinkscope as ss
from sinkscope.app.commands import COMMANDS
from sinkscope.app.commands.command import Command
from sinkscope.app.commands.options import MODEL_WORD, OUTPUTS, OutputFile, OutputFolder, Several
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
def test_every_parameter_is_an_option_with_its_default_and_its_help(words, typed):
    known = parameters(words)
    others = {MODEL_WORD, *(one.name for one in OUTPUTS), *(["results"] if words == "compare" else [])}
    options = {str(one.name): one for one in COMMANDS[words].params if one.name not in others}
    assert options.keys() == known.keys() - PYTHON_ONLY
    assert typed(f"{words} --help").out.count("\n  --") >= len(options) - 2  # but for arguments
    for name, option in options.items():
        one = known[name]
        required = one.default is inspect.Parameter.empty
        expected: Any = None if required else one.default
        default: Any = option.to_info_dict()["default"]
        if one.many and expected:
            default, expected = [*default], [",".join(map(str, expected))]
        if (words, name) not in LEFT_OUT:
            assert (option.required, default or None) == (one.default is inspect.Parameter.empty, expected or None), (
                name
            )
        if get_origin(one.type) is Literal and not isinstance(option, Several):
            assert tuple(option.type.choices) == get_args(one.type), name


def test_a_name_that_is_elsewhere_or_left_says_so_and_every_kind_has_its_command():
    said = {name: re.escape(words) for name, words in ss.LEFT.items()}
    said |= {"SnapKV": r"it is sinkscope\.kv\.SnapKV", "find_sink": r"did you mean find_sinks\?"}
    for name, words in said.items():
        with pytest.raises(AttributeError, match=words):
            getattr(ss, name)
    for version in re.findall(r"version ([\d.]+)", " ".join(ss.LEFT.values())):
        assert Version(version) <= Version(ss.__version__), "a version that is not there yet"
    assert {kind for one in COMMANDS.values() for kind in one.kinds} == {*kinds()}
    for words in OWN:
        assert measurements()[words].load() is getattr(ss, words.replace("-", "_"))


def test_what_is_written_is_known_by_its_type_whatever_it_is_called(tmp_path):
    """Neither the name of an option nor a word of its help decides what is checked."""
    page = click.Option(["--page"], type=OutputFile(), metavar="PAGE", help="A page.")
    store = click.Option(["--store"], type=OutputFolder(), metavar="FILE", help="A folder.")
    command = Command("x", lambda **options: pytest.fail("it runs"), "Tests", params=[page, store])
    (tmp_path / "notes.txt").write_text("mine")
    for words, says in (
        (["--page", str(tmp_path)], "is a folder: give the name of a file to write"),
        (["--store", str(tmp_path / "notes.txt")], "is a file: give the name of a folder to write"),
        (["--store", str(tmp_path)], "holds other files: give a new or empty folder"),
        (
            ["--page", f"{tmp_path}/new", "--store", f"{tmp_path}/new"],
            "new is given for two outputs: give each its own",
        ),
    ):
        with refused(says):
            command.main(words, standalone_mode=False)
