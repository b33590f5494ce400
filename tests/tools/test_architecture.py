"""The drawing of rooms is that of today's imports."""

from __future__ import annotations

from tools import architecture


def test_the_picture_is_that_of_todays_imports():
    drawn = architecture.drawing(architecture.imports(architecture.ROOT / "sinkscope"))
    assert drawn == architecture.PICTURE.read_text(encoding="utf-8")
