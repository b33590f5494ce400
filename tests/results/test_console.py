"""Progress shows nothing outside of notebooks and terminals."""

from __future__ import annotations

from sinkscope.results.console import ProgressBar


def test_outside_of_notebooks_nothing_is_shown(capsys):
    with ProgressBar() as bar:
        bar("reading", 0, 4)
    assert capsys.readouterr() == ("", "")
