"""What the page on the design promises: a new part of each kind is one file, with no edit elsewhere."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import sinkscope
from sinkscope.app.cli import main

PACKAGE = Path(sinkscope.__file__).parent
PARTS = {
    "a cache policy": (
        "kv/newest_first.py",
        """
        from __future__ import annotations
        from dataclasses import dataclass
        from sinkscope.kv.policy import LayerMoment, Policy
        from sinkscope.kv.registry import register_policy

        @register_policy("newest-first")
        @dataclass(frozen=True, kw_only=True)
        class NewestFirst(Policy):
            def scores(self, at: LayerMoment):
                return at.kv.pos.float()
        """,
        """
        from sinkscope.bench.methods import read_method
        from sinkscope.kv import make_policy, policies
        assert "newest-first" in policies()
        assert make_policy("newest-first", budget=9).budget == 9
        assert read_method("newest-first:9").make().budget == 9
        """,
    ),
    "a measurement with a figure, a command and a part of a scan": (
        "attention/attention_entropy.py",
        (Path(__file__).parents[1] / "fixtures/attention_entropy.py")
        .read_text(encoding="utf-8")
        .replace("measure import Natural, Result,", "measure import Natural, Result, ScanPart,")
        .replace("figure=draw", 'figure=draw, help="Measure entropy.", scan=ScanPart(quick={"last": 8})'),
        """
        import sinkscope as ss
        from sinkscope.app.cli import main
        from sinkscope.app.scan import scan_parts
        assert main(["attention-entropy", "--last", "8", "--json", "a.json", "--html", "a.html"]) == 0
        result = ss.Result.load("a.json")
        assert result.kind == "attention-entropy"
        assert result.figure().data and "uniform head" in open("a.html").read()
        assert ss.attention_entropy(last=8).entropy.shape == result.entropy.shape
        assert "attention_entropy" in [part.name for part in scan_parts()]
        """,
    ),
    "a benchmark task": (
        "bench/tasks/echo.py",
        """
        from __future__ import annotations
        from dataclasses import dataclass
        from typing import ClassVar
        from sinkscope.bench.prompt import Prompt, Turn
        from sinkscope.bench.task import Task, register_task

        @register_task
        @dataclass(frozen=True, kw_only=True)
        class Echo(Task):
            name: ClassVar[str] = "echo"

            def prompts(self, target):
                return [Prompt("0", (Turn("again and again", ("again",)),), "echo")]
        """,
        """
        from sinkscope.bench.run import bench
        table = bench(task="echo", methods=["full", "streaming:8"], batch_size=1)
        assert [group.task for group in table.groups] == ["echo", "echo"]
        """,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_a_new_part_is_one_file(part, tmp_path):
    file, source, use = PARTS[part]
    shutil.copytree(PACKAGE, tmp_path / "sinkscope", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "sinkscope" / file).write_text(textwrap.dedent(source))
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(use)], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert ran.returncode == 0, ran.stderr


def test_the_policy_in_the_readme_works_as_it_is_typed(tmp_path, monkeypatch, capsys):
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "register_policy" in block]
    (tmp_path / "your_module.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    (typed,) = re.findall(r"`sinkscope (generate[^`]*--policy your_module:LargeValues:512)`", readme)
    assert main([*shlex.split(typed), "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out
