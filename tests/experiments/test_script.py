"""The command lines of scripts are what the signatures of their functions say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest

from experiments.script import arguments_of, run
from sinkscope.errors import SinkscopeError


def main(
    files: Sequence[Path],
    *,
    size: int,
    kind: Literal["a", "b"] = "a",
    heads: Sequence[int] = (3,),
    no_loops: bool = False,
) -> None:
    raise SinkscopeError("the file is empty: give another")


def test_words_become_parameters_and_what_is_not_given_is_left_out():
    given = {"files": [Path("x")], "size": 4}
    assert arguments_of(main, "x --size 4".split()) == given
    given |= {"files": [Path("x"), Path("y")], "kind": "b", "heads": [1, 2, 7], "no_loops": True}
    assert arguments_of(main, "x y --size 4 --kind b --heads 1 2 --heads 7 --no-loops".split()) == given


@pytest.mark.parametrize("words", ["x", "--size 4", "x --size four", "x --size 4 --kind c", "x --size 4"])
def test_bad_input_is_one_line_and_exit_code_2(words, capsys):
    with pytest.raises(SystemExit) as left:
        run(main, words.split())
    said = capsys.readouterr().err
    assert left.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1
