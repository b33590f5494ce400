"""What the page on the design promises: a new part of each kind is one file, with no edit elsewhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import sinkscope

PACKAGE = Path(sinkscope.__file__).parent
PARTS = {
    "a cache policy": (
        "kv/newest_first.py",
        """
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
    "a benchmark task": (
        "bench/tasks/echo.py",
        """
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
    (tmp_path / "sinkscope" / file).write_text(f"from __future__ import annotations\n{textwrap.dedent(source)}")
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(use)], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert ran.returncode == 0, ran.stderr
