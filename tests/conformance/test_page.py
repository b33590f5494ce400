"""The page names the check of each mistake and fault, and every check."""

from __future__ import annotations

from faulty_caches import FAULTS
from mistaken_policies import MISTAKES
from repository import ROOT

PAGE = (ROOT / "docs" / "check_cache.md").read_text(encoding="utf-8")


def test_the_table_of_mistakes_is_that_of_the_tests():
    for name, planted in {**FAULTS, **MISTAKES}.items():
        row = f"| {name.replace('_', ' ')} | {planted.check.replace('_', ' ')} |"
        assert row in PAGE, row
