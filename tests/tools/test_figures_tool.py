"""The tool that lists figures whose code has changed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from sinkscope.files.provenance import commit_of
from tools import figures


def _git(folder: Path, *words: str) -> str:
    about = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", folder, *about, *words], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_a_figure_is_stale_if_what_its_script_imports_has_changed(tmp_path, monkeypatch):
    code = tmp_path / "experiments"
    code.mkdir()
    (code / "stale_script.py").write_text("from experiments import helper\n")
    (code / "helper.py").write_text("x = 1\n")
    (tmp_path / "sinkscope").mkdir()
    (tmp_path / "figures").mkdir()
    assert commit_of(tmp_path) is None
    _git(tmp_path, "init")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-m", "first")
    commit_of.cache_clear()
    first = commit_of(tmp_path)
    assert first == _git(tmp_path, "rev-parse", "HEAD")
    made = {"argv": ["torchrun", "--standalone", "-m", "experiments.stale_script"], "commit": first}
    (tmp_path / "figures/a.json").write_text(json.dumps({"kind": "a", "provenance": made}))
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    assert figures.stale() == {}
    (code / "helper.py").write_text("x = 2\n")
    assert figures.stale() == {"a": ["experiments/helper.py"]}
    commit_of.cache_clear()
    assert commit_of(tmp_path) == f"{first}+"

    gone = json.dumps({"kind": "a", "provenance": {**made, "commit": "1" * 40}})
    (tmp_path / "figures/a.json").write_text(gone)  # a commit that was rewritten: that of the JSON counts
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-m", "second")
    assert figures.stale() == {}
    (code / "helper.py").write_text("x = 3\n")
    assert figures.stale() == {"a": ["experiments/helper.py"]}
