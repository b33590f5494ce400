"""Results of experiments, which have no class: whatever their data look like, every value is in a table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from experiments import drawn as module

keys = st.text("abcxyz_", min_size=1, max_size=4)
numbers = st.integers(100, 999)
data = st.dictionaries(
    keys,
    st.recursive(numbers, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4)),
    max_size=5,
)


def _leaves(value: Any) -> Iterator[int]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    else:
        yield value


@given(data)
def test_no_value_of_a_record_is_lost(value: dict[str, Any]) -> None:
    tables = list(module.tables(value))
    shown = {int(n) for t in tables for row in t.cells for cell in row for n in re.findall(r"\b\d{3}\b", cell)}
    cut = any("…" in cell for t in tables for row in t.cells for cell in row)
    assert cut or shown == set(_leaves(value))
    assert all(len(row) == len(t.head) for t in tables for row in t.cells)


def test_tables_of_a_record() -> None:
    value = {
        "ratio": 0.5,
        "fast": {"seconds": 1, "ok": True},
        "slow": {"seconds": 2, "ok": False},
        "runs": [{"seed": 0, "rows": [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]}, {"seed": 1, "rows": []}],
    }
    shown = {t.title: (t.head, t.cells) for t in module.tables(value)}
    assert shown[""] == (["name", "value"], [["ratio", "0.5"]])
    assert shown["fast"] == (["name", "value"], [["seconds", "1"], ["ok", "yes"]])
    assert shown["runs"] == (
        ["seed", "step", "loss", "rows"],
        [["0", "1", "2", "-"], ["0", "2", "1", "-"], ["1", "-", "-", ""]],
    )
    del value["runs"]
    (_, both) = module.tables(value)
    assert (both.head, both.cells) == (["name", "seconds", "ok"], [["fast", "1", "yes"], ["slow", "2", "no"]])


def test_long_lists_are_cut_between_values() -> None:
    (table,) = module.tables({"steps": list(range(1000, 1100)), "pairs": [[i, 2 * i] for i in range(50)]})
    steps, pairs = (row[1] for row in table.cells)
    shown = steps.removesuffix(", … (100 values)").split(", ")
    assert shown == [str(1000 + i) for i in range(len(shown))] and 5 < len(shown) < 20
    assert pairs == "[0, 0], … (50 values)"


def test_long_tables_are_cut_and_say_so() -> None:
    (table,) = module.tables({"rows": [{"at": i} for i in range(2345)]})
    assert table.title == "rows (the first 2,000 of 2,345 rows)" and len(table.cells) == 2000
