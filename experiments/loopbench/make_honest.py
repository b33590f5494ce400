"""Texts that repeat honestly: tables, data, code, refrains, lists, logs. A guard that fires on them is wrong.

    python -m experiments.loopbench.make_honest [--out experiments/loopbench/honest.jsonl]

The script makes the same texts every time; they lie beside it as JSON lines, and `experiments.loopguard.honest` reads
them. Forms repeat and entries differ, as in texts of people and programs;
a refrain recurs word for word, with a verse in between.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from experiments.loopguard.honest import FILE, HonestText
from experiments.script import run
from sinkscope.files.output import write_atomic

_TOWNS = (
    "Ardel Brinmoor Castlow Dunhaven Elmsford Fenwick Garrow Holmby Ivester Kelding Lorne Marsden Norwell Ostley "
    "Penrow Quarndon Rishworth Selby Tarrant Ulverby Wexcombe Yarrow Zennor Aldburgh Beccles Corwen Dolgarth Eyam"
).split()
_CRAFTS = "weaver smith baker carter mason thatcher cooper tanner miller glazier sawyer potter".split()
_GOODS = (
    "apple barley candle drum flute grain hammer ink jar kettle lamp mirror needle oar plough quilt rope saddle".split()
)
_FIRST = (
    "Ada Bruno Clara Dov Edda Felix Greta Hugo Ilse Jonas Kaja Leon Mira Nils Olga Paul Runa Sven Tilda Ugo".split()
)
_LAST = (
    "Abel Borg Crane Dahl Ekman Frey Gast Holm Isaksen Juhl Krog Lind Moss Nye Ore Pohl Quist Rask Stein Thorn".split()
)
_PARTS = "parser router cache index queue mailer ledger tracker sampler planner watcher archive monitor gateway".split()
_COLOURS = (
    "amber azure black brown copper coral crimson grey green indigo ivory olive orange purple rose silver".split()
)
_TREES = (
    "alder ash aspen beech birch cedar elm fir hazel holly larch lime maple oak pine poplar rowan willow yew".split()
)
_BIRDS = "crane finch heron lark linnet magpie owl plover robin rook snipe starling swallow swift thrush wren".split()


def honest_texts(seed: str = "honest") -> list[HonestText]:
    """The texts, in order of their names, each of a few hundred words; another seed gives other entries."""
    rows = []
    for name, maker in sorted(_MAKERS.items()):
        rows.append(HonestText(name, name.partition("-")[0], maker(random.Random(f"{seed} {name}"))))
    return rows


def lines() -> str:
    """The texts as they ship."""
    parts = []
    for text in honest_texts():
        parts.append(json.dumps(asdict(text), ensure_ascii=False) + "\n")
    return "".join(parts)


def _people(rng: random.Random, count: int) -> list[str]:
    rows = []
    for i in rng.sample(range(400), count):
        rows.append(f"{_FIRST[i % 20]} {_LAST[i // 20]}")
    return rows


def _pairs(rng: random.Random, first: Sequence[str], second: Sequence[str], count: int) -> list[tuple[str, str]]:
    """Pairs of which no two are equal."""
    rows = []
    for i in rng.sample(range(len(first) * len(second)), count):
        rows.append((first[i % len(first)], second[i // len(first)]))
    return rows


def _day(i: int) -> str:
    return f"2024-{i // 28 % 12 + 1:02d}-{i % 28 + 1:02d}"


def _markdown(rng: random.Random) -> str:
    rows = []
    for p, (town, craft) in zip(_people(rng, 45), _pairs(rng, _TOWNS, _CRAFTS, 45), strict=True):
        rows.append(f"| {p} | {town} | {craft} | {rng.randint(18, 80)} |")
    return "\n".join(["| name | town | craft | age |", "| --- | --- | --- | --- |", *rows])


def _csv(rng: random.Random) -> str:
    rows = []
    for i, (town, craft) in enumerate(_pairs(rng, _TOWNS, _CRAFTS, 60)):
        rows.append(f"{1000 + 7 * i},{town},{craft},{rng.randint(1100, 1990)},{rng.random():.3f}")
    return "\n".join(["id,town,craft,founded,share", *rows])


def _league(rng: random.Random) -> str:
    lines = [f"{'':4}{'club':18}{'won':>5}{'drawn':>7}{'lost':>6}{'points':>8}"]
    for i, town in enumerate(rng.sample(_TOWNS, 28), 1):
        won = rng.randint(2, 26)
        drawn = rng.randint(0, 12)
        club = f"{town} {rng.choice(('Rovers', 'United', 'Town'))}"
        lines.append(f"{i:<4}{club:18}{won:>5}{drawn:>7}{38 - won - drawn:>6}{3 * won + drawn:>8}")
    return "\n".join(lines)


def _latex(rng: random.Random) -> str:
    rows = []
    for tree, colour in _pairs(rng, _TREES, _COLOURS, 45):
        rows.append(rf"{tree} & {rng.randint(3, 60)} & {rng.randint(2, 40)}.{rng.randint(0, 9)} & {colour} \\")
    return "\n".join([r"\begin{tabular}{lrrl}", r"tree & age & height & bark \\ \hline", *rows, r"\end{tabular}"])


def _products(_: random.Random) -> str:
    return "\n".join(f"{a} x {b} = {a * b}" for a in range(3, 12) for b in range(2, 13))


def _records(rng: random.Random) -> str:
    return json.dumps(
        [
            {"id": 500 + i, "name": name, "town": rng.choice(_TOWNS), "age": rng.randint(18, 80)}
            for i, name in enumerate(_people(rng, 30))
        ],
        indent=2,
    )


def _entities(rng: random.Random) -> str:
    """What LoopBench-DC asks for, done well: no entity twice."""
    kinds = ("Person", "Organization", "Location", "Event", "Other")
    names = [*_people(rng, 12), *_TOWNS[:8], *(f"{town} {_CRAFTS[i]}s' guild" for i, town in enumerate(_TOWNS[8:20]))]
    items = (
        {"name": name, "wikipedia url": f"/wiki/{name.replace(' ', '_')}", "type": rng.choice(kinds)} for name in names
    )
    return ",\n".join(map(json.dumps, items))


def _settings(rng: random.Random) -> str:
    return json.dumps(
        {
            part: {
                "port": rng.randint(1024, 9999),
                "workers": rng.randint(1, 16),
                "timeout": rng.randint(1, 90),
                "hosts": [f"{bird}.{part}.local" for bird in rng.sample(_BIRDS, 3)],
            }
            for part in rng.sample(_PARTS, len(_PARTS))
        },
        indent=2,
    )


def _events(rng: random.Random) -> str:
    pairs = _pairs(rng, _PARTS, _BIRDS, 36)
    parts = []
    for i, (part, bird) in enumerate(pairs):
        parts.append(
            json.dumps({"t": 17.25 * i + rng.randint(0, 9), "part": part, "host": bird, "ms": rng.randint(2, 900)})
        )
    return "\n".join(parts)


def _yaml(rng: random.Random) -> str:
    parts = []
    for i, (bird, colour) in enumerate(_pairs(rng, _BIRDS, _COLOURS, 32)):
        parts.append(
            f"- name: {bird}-{colour}\n  rack: {i + 10}\n  owner: {rng.choice(_FIRST)}\n  role: {rng.choice(_PARTS)}"
        )
    return "\n".join(parts)


def _xml(rng: random.Random) -> str:
    rows = []
    for colour, good in _pairs(rng, _COLOURS, _GOODS, 32):
        rows.append(
            f'  <item sku="{rng.randint(10**5, 10**6)}">\n    <name>{colour} {good}</name>\n'
            f"    <price>{rng.randint(1, 90)}.{rng.randint(0, 99):02d}</price>\n  </item>"
        )
    return "\n".join(["<catalogue>", *rows, "</catalogue>"])


def _sql(rng: random.Random) -> str:
    parts = []
    for i, name in enumerate(_people(rng, 34), 1):
        parts.append(
            f"INSERT INTO members (id, name, town, born) VALUES "
            f"({i}, '{name}', '{rng.choice(_TOWNS)}', '{_day(i * 11)}');"
        )
    return "\n".join(parts)


def _ini(rng: random.Random) -> str:
    parts = []
    for part, bird in _pairs(rng, _PARTS, _BIRDS, 28):
        parts.append(
            f"[{part}.{bird}]\nenabled = {rng.choice(('yes', 'no'))}\nport = {rng.randint(1024, 9999)}\n"
            f"path = /srv/{part}/{bird}"
        )
    return "\n\n".join(parts)


def _getters(rng: random.Random) -> str:
    lines = ["class Stock:"]
    for i, good in enumerate(_GOODS):
        lines.append(
            f"    def {good}_count(self) -> int:\n"
            f'        """How many {good}s there are on the {rng.choice(_COLOURS)} shelf."""\n'
            f'        return self._counts["{good}"] - {i}\n'
        )
    return "\n".join(lines)


def _tests(rng: random.Random) -> str:
    parts = []
    for town, craft in _pairs(rng, _TOWNS, _CRAFTS, 24):
        parts.append(
            f"def test_{craft}_of_{town.lower()}() -> None:\n    found = look_up({town!r})\n"
            f"    assert found.craft == {craft!r}\n    assert found.founded == {rng.randint(1100, 1990)}"
        )
    return "\n\n\n".join(parts)


def _switch(rng: random.Random) -> str:
    cases = []
    for i, (colour, bird) in enumerate(_pairs(rng, _COLOURS, _BIRDS, 45)):
        cases.append(f'    case {100 + i}: return "{colour} {bird}"; /* since {rng.randint(1900, 2020)} */')
    return "\n".join(["const char *name_of(int code) {", "  switch (code) {", *cases, "  }", '  return "?";', "}"])


def _css(rng: random.Random) -> str:
    parts = []
    for tree, good in _pairs(rng, _TREES, _GOODS, 34):
        parts.append(
            f".{tree}-{good} {{\n  color: #{rng.randrange(1 << 24):06x};\n  padding: {rng.randint(1, 24)}px;\n}}"
        )
    return "\n".join(parts)


def _imports(rng: random.Random) -> str:
    parts = []
    for (part, bird), (good, craft) in zip(
        _pairs(rng, _PARTS, _BIRDS, 40), _pairs(rng, _GOODS, _CRAFTS, 40), strict=True
    ):
        parts.append(f"from workshop.{part}.{bird} import {good.title()}{craft.title()}, make_{good}")
    return "\n".join(parts)


def _song(rng: random.Random) -> str:
    refrain = "Heave away, my hearties, the tide will not wait,\nheave away, my hearties, the boat is at the gate."
    verses = []
    for name, (town, craft), (colour, good), (bird, tree) in zip(
        _people(rng, 9),
        _pairs(rng, _TOWNS, _CRAFTS, 9),
        _pairs(rng, _COLOURS, _GOODS, 9),
        _pairs(rng, _BIRDS, _TREES, 9),
        strict=True,
    ):
        verses.append(
            f"I met {name} on the road to {town},\nwith a {colour} {good} and a {bird} on the {tree};\n"
            f"and {rng.choice(_FIRST)} the {craft} came down from the mill\n"
            f"to ask what the {good} was worth on the hill."
        )
    parts = []
    for verse in verses:
        parts.append(f"{verse}\n\n{refrain}")
    return "\n\n".join(parts)


def _counting(rng: random.Random) -> str:
    """On the n-th evening everything is told again that came before, as in songs of this kind."""
    gifts = []
    for colour, bird, tree in zip(rng.sample(_COLOURS, 8), rng.sample(_BIRDS, 8), rng.sample(_TREES, 8), strict=True):
        gifts.append(f"a {colour} {bird} in the {tree}")
    nights = "first second third fourth fifth sixth seventh eighth".split()
    parts = []
    for i, night in enumerate(nights):
        parts.append(
            f"On the {night} night of winter my neighbour showed to me\n" + ",\n".join(reversed(gifts[: i + 1])) + "."
        )
    return "\n\n".join(parts)


def _litany(rng: random.Random) -> str:
    wishes = ("grant them rest", "keep them warm", "lead them home", "hear their song")
    parts = []
    for name, (town, craft) in zip(_people(rng, 40), _pairs(rng, _TOWNS, _CRAFTS, 40), strict=True):
        parts.append(f"For {name} of {town}, the {craft}, {rng.choice(wishes)}.")
    return "\n".join(parts)


def _pantoum(rng: random.Random) -> str:
    """The second and fourth line of a verse come back as the first and third of the next."""
    lines = []
    for i, (bird, tree) in enumerate(_pairs(rng, _BIRDS, _TREES, 44)):
        lines.append(
            f"the {bird} went over the {tree} and was gone"
            if i % 2
            else f"a {bird} had slept in the {tree} of {rng.choice(_TOWNS)}"
        )
    parts = []
    for each in range(0, 40, 2):
        parts.append("\n".join((lines[each], lines[each + 2], lines[each + 1], lines[each + 3])))
    return "\n\n".join(parts)


def _steps(rng: random.Random) -> str:
    verbs = ("Wash", "Peel", "Fold", "Turn", "Press", "Oil", "Weigh", "Count")
    parts = []
    for i, (colour, good) in enumerate(_pairs(rng, _COLOURS, _GOODS, 34), 1):
        parts.append(
            f"{i}. {rng.choice(verbs)} the {colour} {good} and leave it for {rng.randint(2, 50)} minutes by the "
            f"{rng.choice(_TREES)}."
        )
    return "\n".join(parts)


def _glossary(rng: random.Random) -> str:
    parts = []
    for (good, colour), (town, craft) in zip(
        sorted(_pairs(rng, _GOODS, _COLOURS, 32)), _pairs(rng, _TOWNS, _CRAFTS, 32), strict=True
    ):
        parts.append(
            f"{good.title()} ({colour}): what the {craft} of {town} calls the {rng.choice(_PARTS)} of a "
            f"{rng.choice(_GOODS)}."
        )
    return "\n".join(parts)


def _references(rng: random.Random) -> str:
    parts = []
    for i, (name, (town, craft)) in enumerate(zip(_people(rng, 30), _pairs(rng, _TOWNS, _CRAFTS, 30), strict=True), 1):
        parts.append(
            f"[{i}] {name}. The {craft} and the {rng.choice(_BIRDS)}. {town} Quarterly, "
            f"{rng.randint(1, 60)}({rng.randint(1, 4)}), pp. {100 + 9 * i}-{105 + 9 * i + rng.randint(0, 9)}, "
            f"{rng.randint(1950, 2023)}."
        )
    return "\n".join(parts)


def _timetable(rng: random.Random) -> str:
    parts = []
    for i, (town, goal) in enumerate(_pairs(rng, _TOWNS[:14], _TOWNS[14:], 48)):
        parts.append(
            f"{5 + i // 3:02d}:{20 * (i % 3) + rng.randint(0, 19):02d}  {town} to {goal}, platform {rng.randint(1, 9)}"
        )
    return "\n".join(parts)


def _questions(rng: random.Random) -> str:
    parts = []
    for name, (colour, good) in zip(_people(rng, 32), _pairs(rng, _COLOURS, _GOODS, 32), strict=True):
        parts.append(
            f"Q: Who made the {colour} {good}?\nA: {name} of {rng.choice(_TOWNS)}, in {rng.randint(1700, 1990)}."
        )
    return "\n".join(parts)


def _family(rng: random.Random) -> str:
    names = _people(rng, 34)
    parts = []
    for a, b in pairwise(names):
        parts.append(
            f"And {a} was the parent of {b}, who lived in {rng.choice(_TOWNS)} for {rng.randint(20, 90)} years."
        )
    return "\n".join(parts)


def _server(rng: random.Random) -> str:
    parts = []
    for i, (part, bird) in enumerate(_pairs(rng, _PARTS, _BIRDS, 36)):
        parts.append(
            f"{_day(i // 9)}T{i % 24:02d}:{rng.randint(0, 59):02d}:{rng.randint(0, 59):02d}Z INFO {part}: served "
            f"{bird} in {rng.randint(2, 900)} ms (request {rng.randrange(1 << 24):06x})"
        )
    return "\n".join(parts)


def _build(rng: random.Random) -> str:
    pairs = _pairs(rng, _PARTS, _BIRDS, 48)
    parts = []
    for i, (part, bird) in enumerate(pairs, 1):
        parts.append(f"[{i:2}/{len(pairs)}] compiling {part}/{bird}.c ... ok ({rng.randint(10, 4000)} bytes)")
    return "\n".join(parts)


def _metrics(rng: random.Random) -> str:
    loss = 9.0
    lines = list[str]()
    for step in range(50):
        loss *= 0.93 + 0.06 * rng.random()
        lines.append(
            f"step {step * 50:5} | loss {loss:.4f} | lr {3e-4 * (1 - step / 60):.2e} | {rng.randint(900, 1400)} tok/s"
        )
    return "\n".join(lines)


_MAKERS: dict[str, Callable[[random.Random], str]] = {
    "table-markdown": _markdown,
    "table-csv": _csv,
    "table-league": _league,
    "table-latex": _latex,
    "table-products": _products,
    "data-json": _records,
    "data-entities": _entities,
    "data-settings": _settings,
    "data-events": _events,
    "data-yaml": _yaml,
    "data-xml": _xml,
    "data-sql": _sql,
    "data-ini": _ini,
    "code-getters": _getters,
    "code-tests": _tests,
    "code-switch": _switch,
    "code-css": _css,
    "code-imports": _imports,
    "refrain-song": _song,
    "refrain-counting": _counting,
    "refrain-litany": _litany,
    "refrain-pantoum": _pantoum,
    "list-steps": _steps,
    "list-glossary": _glossary,
    "list-references": _references,
    "list-timetable": _timetable,
    "list-questions": _questions,
    "list-family": _family,
    "log-server": _server,
    "log-build": _build,
    "log-metrics": _metrics,
}


def main(*, out: Path = FILE) -> None:
    write_atomic(out, lines())


if __name__ == "__main__":
    run(main)
