"""One notebook runs by default, the others with `-m slow`."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
DEFAULT = ("01_find_sinks.ipynb",)


@pytest.hookimpl(tryfirst=True)  # before items are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Also sees the items of other folders, which are left as they are."""
    for item in items:
        if item.path.parent == HERE and item.path.name not in DEFAULT:
            item.add_marker("slow")
