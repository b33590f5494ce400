"""English phrases are words to be shown, and no keys: no code compares them, looks them up or splits a label."""

from __future__ import annotations

import ast
from pathlib import Path

from repository import ROOT

ROOMS = ("sinks", "loops", "sparse", "bench", "app")
SHAPES = ("Bool", "Float", "Int", "Shaped", "UInt8")
"""Types of jaxtyping, in whose brackets axes are named."""
ALLOWED: dict[str, str] = {}
"""Phrases that are keys all the same, each with its reason."""


def phrases(node: ast.AST) -> list[str]:
    """The strings with a space in them that stand in a node itself, or in a tuple, list or set in its place."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value] if " " in node.value.strip() else []
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return [phrase for element in node.elts for phrase in phrases(element)]
    return []


def keys_in(tree: ast.AST) -> list[str]:
    """The phrases that are compared, looked up, keys of a dictionary, or by which a label is split."""
    found: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.Compare():
                for part in (node.left, *node.comparators):
                    found += phrases(part)
            case ast.Subscript(value=ast.Name(id=name)) if name in SHAPES:
                continue
            case ast.Subscript():
                found += phrases(node.slice)
            case ast.Dict():
                for key in node.keys:
                    found += [] if key is None else phrases(key)
            case ast.MatchValue():
                found += phrases(node.value)
            case ast.Call(func=ast.Attribute(attr="get" | "startswith" | "endswith" | "removeprefix" | "removesuffix")):
                for argument in node.args:
                    found += phrases(argument)
            case ast.Call(
                func=ast.Attribute(attr="split" | "partition" | "rpartition", value=ast.Attribute(attr=name))
            ):
                if name in ("label", "full_label", "title", "words", "group"):
                    found.append(f"{name} is split")
    return found


def offenders(folder: Path) -> list[str]:
    lines: list[str] = []
    for room in ROOMS:
        for file in sorted((folder / room).rglob("*.py")):
            for phrase in keys_in(ast.parse(file.read_text(encoding="utf-8"))):
                if phrase not in ALLOWED:
                    lines.append(f"{file.relative_to(folder)}: {phrase!r}")
    return lines


def test_no_phrase_is_a_key():
    found = offenders(ROOT / "sinkscope")
    assert not found, "give these a typed key (an enum, a record), and its words where it is shown:\n" + "\n".join(
        found
    )


def test_a_phrase_that_is_a_key_is_found():
    source = (
        'if row.name == "at place": pass\nx = {"its token": 1}\ny = rows["hidden in all layers"]\nz = row.label.split()'
    )
    assert keys_in(ast.parse(source)) == ["at place", "its token", "hidden in all layers", "label is split"]
