"""Notebooks run in a kernel with `-m slow`; `tests/docs/test_notebooks.py` runs the first one by default, without."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before items are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Also sees the items of other folders, which are left as they are."""
    for item in items:
        if item.path.parent == HERE:
            item.add_marker("slow")
