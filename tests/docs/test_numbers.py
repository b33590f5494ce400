"""Numbers of a page that stand in a figure's data are those of the data.

A comment beside the numbers names the file and where each number stands; as it is written there, the page shows it:

    <!-- figures/find_sinks.json: {r.spikes[0].layers[1]}; {number('effects','needed','left'):.0%} -->
"""

from __future__ import annotations

import json
import re
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from repository import FIGURES, ROOT

from sinkscope.measure.margin import margin_of

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(FIGURES.glob("*.md"))]
MARK = re.compile(r"<!-- (\S+/\S+)\.json: (.+?) -->", re.DOTALL)
MARKED = [
    (page.relative_to(ROOT).as_posix(), name, number.strip().rpartition(" = ")[2])
    for page in PAGES
    for name, numbers in MARK.findall(page.read_text())
    for number in numbers.split("; ")
]


def paired(one: list[float], other: list[float], digits: int) -> str:
    """The mean difference over texts, with its margin."""
    differences = np.array(one) - np.array(other)
    return f"{differences.mean():.{digits}f} ± {margin_of(differences):.{digits}f}"


def key_words(key: Any) -> list[str]:
    """The words of a key: what it holds in the order of its fields, and the names of flags that are set."""
    if isinstance(key, list):
        return [word for part in key for word in key_words(part)]
    if not isinstance(key, SimpleNamespace):
        return [] if key is None else [str(key)]
    words: list[str] = []
    for name, value in vars(key).items():
        if isinstance(value, bool):
            words += [name] if value else []
        else:
            words += key_words(value)
    return words


@cache
def names_of(file: str) -> dict[str, Any]:
    """What the marks of a file may name beside its data `r`."""
    found = json.loads((ROOT / file).read_text(), object_hook=lambda fields: SimpleNamespace(**fields)).result

    def number(table: str, key: str, what: str) -> float:
        """A number of the first spike, or of who attends where, by the words of its row's key."""
        rows = found.attention if table == "attention" else getattr(found.spikes[0], table)
        (row,) = (row for row in rows if " ".join(key_words(row.key)) == key)
        return getattr(row, what).value

    def parts(needed: list[SimpleNamespace], between: str = " and ") -> str:
        """The names of needed neurons."""
        return between.join(f"L{neuron.layer}.N{neuron.neuron}" for neuron in needed)

    def needs(cause: str, model: str) -> str:
        """How many loops of a model need a cause, and what they do without it and under its control."""
        loops = [one for one in found.real if (one.half, one.model) == ("report", model)]
        tried = [getattr(one.tried, cause) for one in loops]
        shares = [np.mean([getattr(one, name) for one in tried]) for name in ("goes_on", "other_loop", "control")]
        return (
            f"{sum(cause in one.found for one in loops)} of {len(loops)} | {' | '.join(map('{:.0%}'.format, shares))}"
        )

    def prompts(length: int | str = "") -> list[SimpleNamespace]:
        """What prompts of a length, or all, lose at LoopServe's default alpha."""
        return [vars(row)["0.99"] for name, row in vars(found).items() if f", {length}" in name and "0.99" in vars(row)]

    def of(model: str, remedy: str) -> SimpleNamespace:
        return getattr(getattr(found, model).report, remedy)

    return {
        "r": found,
        "np": np,
        "mean": np.mean,
        "number": number,
        "parts": parts,
        "needs": needs,
        "paired": paired,
        "lost": lambda: [row.nll - row.dense_nll for row in prompts()],
        "times": lambda length: [row.time for row in prompts(length)],
        "attended": lambda length: [row.attended for row in prompts(length)],
        "of": of,
        "loops": lambda *arm: f"{of(*arm).exact} of {of(*arm).outputs}",
        "score": lambda method: f"{np.mean([row.score for row in found.rows if row.method == method]):.0%}",
    }


@pytest.mark.parametrize(("page", "name", "stands"), MARKED)
def test_a_page_shows_the_numbers_of_its_data(page, name, stands):
    measured = eval(f"f{stands!r}", names_of(f"{name}.json")).replace(" %", "%")
    shown = " ".join(MARK.sub("", (ROOT / page).read_text()).replace(" %", "%").split())
    assert re.search(rf"(?<![\d.,]){re.escape(measured)}(?![\d%])", shown), measured
