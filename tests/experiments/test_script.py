"""The command lines of scripts are what the signatures of their functions say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest

from experiments.script import run
from sinkscope.errors import SinkscopeError


def test_words_become_parameters_and_what_is_not_given_keeps_its_default():
    seen = {}

    def main(
        files: Sequence[Path],
        *,
        size: int,
        kind: Literal["a", "b"] = "a",
        rate: float | None = None,
        heads: Sequence[int] = (3,),
        no_loops: bool = False,
    ) -> None:
        seen.update(files=files, size=size, kind=kind, rate=rate, heads=heads, no_loops=no_loops)

    run(main, ["x", "y", "--size", "4"])
    assert [*seen.values()] == [[Path("x"), Path("y")], 4, "a", None, (3,), False]
    run(main, ["x", "--size", "4", "--kind", "b", "--rate", "0.5", "--heads", "1", "2", "--heads", "7", "--no-loops"])
    assert (seen["kind"], seen["rate"], seen["heads"], seen["no_loops"]) == ("b", 0.5, [1, 2, 7], True)
    for bad in (["x"], ["--size", "4"], ["x", "--size", "four"], ["x", "--size", "4", "--kind", "c"]):
        with pytest.raises(SystemExit) as left:
            run(main, bad)
        assert left.value.code == 2


def test_bad_input_is_one_line_and_exit_code_2(capsys):
    def main() -> None:
        raise SinkscopeError("the file is empty: give another")

    with pytest.raises(SystemExit) as left:
        run(main, [])
    assert left.value.code == 2 and capsys.readouterr().err == "error: the file is empty: give another\n"
