"""Texts that repeat honestly: tables, JSON, code, refrains. A guard that fires on them is wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass

from sinkscope.text.harmless import honest_repetition

_TOWNS = ("Ardel", "Brinmoor", "Castlow", "Dunhaven", "Elmsford", "Fenwick", "Garrow", "Holmby", "Ivester", "Kelding",
          "Lorne", "Marsden", "Norwell", "Ostley", "Penrow", "Quarndon", "Rishworth", "Selby", "Tarrant", "Ulverby",
          "Wexcombe", "Yarrow")  # fmt: skip
_CRAFTS = ("weaver", "smith", "baker", "carter", "mason", "thatcher", "cooper", "tanner", "miller", "glazier", "sawyer")


@dataclass(frozen=True)
class Honest:
    """A text that is read, not written: the monitor is held against it token by token.

    Attributes:
        id: its name.
        prompt: the text.
        bench: what tells it from a prompt.
    """

    id: str
    prompt: str
    bench: str = "honest"


def honest_texts() -> list[Honest]:
    """The texts, the same every time: some hundred tokens each."""
    people = [
        {"id": 1000 + 7 * i, "town": town, "craft": _CRAFTS[i * 5 % len(_CRAFTS)], "founded": 1100 + i * 37 % 800}
        for i, town in enumerate(_TOWNS)
    ]
    made = {
        **{f"tables-and-songs-{i}": honest_repetition(12, seed=i) for i in range(4)},
        "table-csv": "id,town,craft,founded\n" + "".join(",".join(map(str, p.values())) + "\n" for p in people),
        "table-products": "".join(f"{a} x {b} = {a * b}\n" for a in range(2, 10) for b in range(2, 12)),
        "json-records": json.dumps(people, indent=2),
        "json-lines": "".join(json.dumps(p) + "\n" for p in people),
        "code-tests": "".join(
            f"def test_{p['craft']}_of_{str(p['town']).lower()}() -> None:\n"
            f"    found = look_up({p['town']!r})\n"
            f"    assert found.craft == {p['craft']!r}\n"
            f"    assert found.founded == {p['founded']}\n\n\n"
            for p in people
        ),
        "code-table": "FOUNDED = {\n" + "".join(f"    {p['town']!r}: {p['founded']},\n" for p in people) + "}\n",
        "code-markup": "<ul>\n"
        + "".join(f'  <li class="town" id="t{p["id"]}"><b>{p["town"]}</b> ({p["craft"]})</li>\n' for p in people)
        + "</ul>\n",
        "refrain-litany": "".join(
            f"For the people of {p['town']}, and for every {p['craft']} there, we give thanks.\n" for p in people
        ),
    }
    return [Honest(name, text) for name, text in made.items()]
