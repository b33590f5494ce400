"""The drawing of rooms is that of today's imports."""

from __future__ import annotations

from tools import architecture


def test_the_page_has_the_drawing_of_todays_imports():
    assert architecture.page() == architecture.PAGE.read_text(encoding="utf-8")


def test_imports_are_found_also_inside_functions_and_what_others_imply_is_left_out(tmp_path):
    package = tmp_path / "house"
    for room, text in {"a": "", "b": "from house.a import x", "c": "def f():\n    from house.b.d import y"}.items():
        (package / room).mkdir(parents=True)
        (package / room / "one.py").write_text(text)
    (package / "c/two.py").write_text("from house.a import x\nfrom house.c import z")
    found = architecture.imports(package)
    assert found == {"a": set(), "b": {"a"}, "c": {"a", "b"}}
    assert architecture.drawing(found) == "flowchart BT\n  a --> b\n  b --> c"
