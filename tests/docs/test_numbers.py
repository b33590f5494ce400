"""Numbers of a page that stand in a figure's data are those of the data.

A comment beside the numbers names the file and where each number stands; as it is written there, the page shows it:

    <!-- figures/find_sinks.json: {r.spikes[0].layers[1]}; {number('spike','norm','ratio'):.0f} times -->
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
from repository import ROOT

from sinkscope.measure.margin import margin_of

PAPERS = ("repeated-token", "loopguard", "loopserve")
_MARK = re.compile(r"<!-- (\S+/\S+)\.json: (.+?) -->", re.DOTALL)


@cache
def data(name: str) -> SimpleNamespace:
    text = (ROOT / f"{name}.json").read_text()
    return json.loads(text, object_hook=lambda fields: SimpleNamespace(**fields)).result


def number_of(result: SimpleNamespace, table: str, name: str, number: str) -> float:
    """A number of the first spike, or of who attends where, by its row."""
    rows = [row for row in (*result.attention, *result.spikes[0].rows) if (row.table, row.name) == (table, name)]
    return getattr(rows[0].numbers, number).value


def needs(found: SimpleNamespace, cause: str, model: str) -> str:
    """The cells of a cause of loops of a model: how many need it, and what they do without it and under its control."""
    loops = [one for one in found.real if (one.half, one.model) == ("report", model)]
    tried = [getattr(one.tried, cause) for one in loops]
    shares = [np.mean([getattr(one, name) for one in tried]) for name in ("goes_on", "other_loop", "control")]
    return " | ".join(
        [f"{sum(cause in one.found for one in loops)} of {len(loops)}", *(f"{share:.0%}" for share in shares)]
    )


def paired(one: list[float], other: list[float], digits: int) -> str:
    """The mean difference over texts, with its margin."""
    differences = np.array(one) - np.array(other)
    return f"{differences.mean():.{digits}f} ± {margin_of(differences):.{digits}f}"


def of_prompts(found: SimpleNamespace) -> dict[str, Callable[..., list[float]]]:
    """What prompts of LoopServe lose, and of a length their time and the share of cells, at the default alpha."""
    rows = [(name, vars(row)["0.99"]) for name, row in vars(found).items() if "0.99" in getattr(row, "__dict__", ())]
    return {
        "lost": lambda: [row.nll - row.dense_nll for _, row in rows],
        "times": lambda length: [row.time for name, row in rows if f", {length}," in name],
        "attended": lambda length: [row.attended for name, row in rows if f", {length}," in name],
    }


def marked() -> list[tuple[str, str, str]]:
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "figures").glob("*.md"))]:
        for name, numbers in _MARK.findall(page.read_text()):
            for number in numbers.split("; "):
                found.append((page.relative_to(ROOT).as_posix(), name, number.strip().rpartition(" = ")[2]))
    return found


@pytest.mark.parametrize(("page", "name", "stands"), marked())
def test_a_page_shows_the_numbers_of_its_data(page, name, stands):
    found = data(name)
    names = {"r": found, "np": np, "mean": np.mean, "number": partial(number_of, found)}
    names["needs"] = partial(needs, found)
    names["of"] = lambda model, remedy: getattr(getattr(found, model).report, remedy)
    names["loops"] = lambda *of: f"{names['of'](*of).exact} of {names['of'](*of).outputs}"
    names["score"] = lambda method: f"{np.mean([row.score for row in found.rows if row.method == method]):.0%}"
    names |= {"paired": paired, **of_prompts(found)}
    measured = eval(f"f{stands!r}", names).replace(" %", "%")
    shown = " ".join(_MARK.sub("", (ROOT / page).read_text()).replace(" %", "%").split())
    assert re.search(rf"(?<![\d.,]){re.escape(measured)}(?![\d%])", shown), measured


def test_the_pages_of_the_papers_have_their_numbers_compared():
    for paper in PAPERS:
        assert sum(page == f"docs/papers/{paper}.md" for page, *_ in marked()) >= 6, paper
