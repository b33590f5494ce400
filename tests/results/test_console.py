"""Progress in a notebook is a widget, and outside of notebooks and terminals nothing."""

from __future__ import annotations

import sys
from types import SimpleNamespace

from sinkscope.results.console import ProgressBar


def test_outside_of_notebooks_nothing_is_shown(capsys):
    with ProgressBar() as bar:
        bar("reading", 0, 4)
    assert capsys.readouterr() == ("", "")


def test_a_notebook_shows_progress_until_it_ends(monkeypatch, capsys):
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    with ProgressBar() as bar:
        bar("reading <layers>", 1, 4)
        assert ProgressBar.shown is not None and ProgressBar.shown.n == 1
    assert ProgressBar.shown is None and "reading" in capsys.readouterr().err
