"""The policy that the README shows works as it is typed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from sinkscope.app.cli import main


def test_the_policy_in_the_readme_works_as_it_is_typed(tmp_path, monkeypatch, capsys):
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "register_policy" in block]
    (tmp_path / "your_module.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    (typed,) = re.findall(r"`sinkscope (generate[^`]*--policy your_module:LargeValues:512)`", readme)
    assert main([*shlex.split(typed), "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out
