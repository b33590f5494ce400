"""The drawing of rooms is that of today's imports."""

from __future__ import annotations

from tools import architecture


def test_the_picture_is_that_of_todays_imports():
    drawn = architecture.drawing(architecture.imports(architecture.ROOT / "sinkscope"))
    assert drawn == architecture.PICTURE.read_text(encoding="utf-8")


def test_imports_are_found_also_inside_functions_and_what_others_imply_is_left_out(tmp_path):
    package = tmp_path / "house"
    for room, text in {"a": "", "b": "from house.a import x", "c": "def f():\n    from house.b.d import y"}.items():
        (package / room).mkdir(parents=True)
        (package / room / "one.py").write_text(text)
    (package / "c/two.py").write_text("from house.a import x\nfrom house.c import z")
    found = architecture.imports(package)
    assert found == {"a": set(), "b": {"a"}, "c": {"a", "b"}}
    assert architecture.arrows(found) == [("a", "b"), ("b", "c")]
    assert [architecture.floor(room, found) for room in "abc"] == [0, 1, 2]
