"""Texts that repeat themselves because they should, a function for each class. None of them is a loop."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from datetime import datetime, timedelta

from experiments.loopset.words import ADJECTIVES, NAMES, NOUNS, PLACES, VERBS, sentence
from sinkscope.models.text import typical_text

MANY = 45


def refrains(rng: random.Random) -> str:
    """A song with a chorus, a villanelle, or a song that grows by a line in each verse."""
    form = rng.choice(("chorus", "villanelle", "growing"))
    lines = []
    for _ in range(4):
        lines.append(sentence(rng).removesuffix("."))
    if form == "chorus":
        parts: list[str] = []
        for _ in range(rng.randint(5, 8)):
            parts.append("\n".join(sentence(rng).removesuffix(".") for _ in range(4)))
            parts.append("\n".join(lines))
        return "\n\n".join(parts)
    if form == "villanelle":
        verses = []
        for i in range(12):
            verses.append(f"{sentence(rng)}\n{sentence(rng)}\n{lines[i % 2]}")
        return "\n\n".join(verses)
    things = rng.sample(NOUNS, 9)
    parts = []
    for thing in things:
        parts.append(f"the {thing} that {rng.choice(VERBS)} the")
    name = rng.choice(NAMES)
    return "\n\n".join("This is " + "\n".join(reversed(parts[: i + 1])) + f" house of {name}." for i in range(9))


def logs(rng: random.Random) -> str:
    """Lines of a server, a build or a program, with times, numbers, names and a few kinds of messages."""
    now = datetime(2024, rng.randint(1, 12), rng.randint(1, 28), rng.randint(0, 23), rng.randint(0, 59))
    form = rng.choice(("server", "build", "program", "beats"))
    paths = [f"/{rng.choice(NOUNS)}/{rng.choice(NOUNS)}" for _ in range(12)]
    lines: list[str] = []
    for _ in range(2 * MANY):
        now += timedelta(seconds=rng.randint(0, 90), milliseconds=rng.randrange(1000))
        if form == "server":
            parts = []
            for _ in range(4):
                parts.append(str(rng.randint(1, 254)))
            address = ".".join(parts)
            call = f"{rng.choice(('GET', 'GET', 'POST', 'PUT'))} {rng.choice(paths)}?id={rng.randint(1, 9999)}"
            state = rng.choice((200, 200, 200, 304, 404))
            lines.append(f'{address} - - [{now:%d/%b/%Y:%H:%M:%S}] "{call} HTTP/1.1" {state} {rng.randint(90, 9999)}')
        elif form == "build":
            lines.append(f"[{rng.randint(1, 99):2}%] Building C object src/{rng.choice(NOUNS)}_{rng.choice(NOUNS)}.c.o")
        elif form == "beats":
            beat = f"node {rng.randint(1, 5)} is alive, load {rng.random() * 3:.2f}"
            other = f"{rng.choice(NOUNS)} synchronised with {rng.choice(PLACES)}"
            lines.append(f"{now:%H:%M:%S} {beat if rng.random() < 0.85 else other}")
        else:
            level = rng.choice(("INFO", "INFO", "INFO", "DEBUG", "WARNING"))
            messages = [
                f"worker {rng.randint(1, 9)} finished job {rng.randint(1, 9999)} in {rng.randint(3, 900)} ms",
                f"{rng.choice(NAMES)} logged in from {rng.choice(PLACES)}",
                f"{rng.choice(NOUNS)} queue has {rng.randint(0, 60)} entries, {rng.randint(0, 9)} late",
                f"cache of {rng.choice(NOUNS)} cleared after {rng.random() * 90:.1f} s",
            ]
            lines.append(f"{now:%Y-%m-%d %H:%M:%S},{now.microsecond // 1000:03d} {level} {rng.choice(messages)}")
    return "\n".join(lines)


def matrices(rng: random.Random) -> str:
    """Numbers in rows, some of them mostly zero, or a table of products."""
    form = rng.choice(("small", "sparse", "float", "products"))
    rows: list[str] = []
    for i in range(MANY):
        if form == "small":
            parts = []
            for _ in range(12):
                parts.append(str(rng.randint(0, 9)))
            rows.append("[" + ", ".join(parts) + "],")
        elif form == "sparse":
            parts = []
            for _ in range(16):
                parts.append(str(int(rng.random() < 0.1)))
            rows.append(" ".join(parts))
        elif form == "float":
            parts = []
            for _ in range(8):
                parts.append(f"{rng.gauss(0, 3):8.4f}")
            rows.append("  ".join(parts))
        else:
            parts = []
            for k in range(1, 11):
                parts.append(f"{i + 1} x {k} = {(i + 1) * k}")
            rows.append("\n".join(parts))
    return "\n".join(rows)


def legal(rng: random.Random) -> str:
    """Clauses that share their phrases."""
    parties = rng.sample(("the Seller", "the Buyer", "the Agent", "the Lender", "the Tenant", "the Licensee"), 2)
    duties = [
        f"{verb} the {noun}"
        for verb in ("deliver", "inspect", "insure", "return", "maintain", "pay for")
        for noun in NOUNS
    ]
    conditions = (
        "subject to the terms of this Agreement",
        "without the prior written consent of the other party",
        "within the period stated in Schedule A",
        "at its own cost and expense",
        "unless otherwise required by applicable law",
        "upon written notice to the other party",
    )
    clauses: list[str] = []
    for i in range(1, 34):
        party = rng.choice(parties)
        duty, other = rng.sample(duties, 2)
        clause = f"{i // 6 + 1}.{i % 6 + 1} {party.capitalize()} shall {duty}, {rng.choice(conditions)}, and shall "
        clauses.append(f"{clause}not {other} {rng.choice(conditions)}.")
    return "\n".join(clauses)


def lists(rng: random.Random) -> str:
    """A numbered list, bullets with a colon, questions and answers, or a schedule."""
    form = rng.choice(("numbered", "bullets", "questions", "schedule", "template"))
    lines: list[str] = []
    for i in range(1, MANY):
        noun, other = rng.sample(NOUNS, 2)
        if form == "numbered":
            lines.append(f"{i}. {sentence(rng)}")
        elif form == "bullets":
            lines.append(f"- **{noun.capitalize()} {other}**: {rng.choice(ADJECTIVES)}, from {rng.choice(PLACES)}")
        elif form == "template":
            lines.append(f"Item {i}: The {noun} belongs to {rng.choice(NAMES)} and stands in the {other}.")
        elif form == "questions":
            lines.append(f"Q: Which {noun} {rng.choice(VERBS)} the {other}?\nA: The {rng.choice(ADJECTIVES)} one.")
        else:
            lines.append(f"{6 + i // 4:02d}:{i % 4 * 15:02d} {noun} from {rng.choice(PLACES)}, platform {i % 9 + 1}")
    return "\n".join(lines)


def tests(rng: random.Random) -> str:
    """Tests of a program, or their report."""
    form = rng.choice(("code", "report", "cases"))
    lines: list[str] = []
    for _ in range(MANY):
        a, b, c = rng.sample(NOUNS, 3)
        if form == "code":
            value = rng.randint(-50, 50)
            lines.append(
                f"def test_{a}_{b}():\n    {c} = {a.capitalize()}({value})\n    assert {c}.{b}() == {value * 2}\n"
            )
        elif form == "report":
            state = rng.choice(("PASSED", "PASSED", "PASSED", "FAILED", "SKIPPED"))
            lines.append(f"tests/test_{a}.py::test_{b}_{c} {state} [{rng.randint(1, 100):3d}%]")
        else:
            lines.append(f'    ("{a}", {rng.randint(0, 99)}, "{b} {c}"),')
    return "\n".join(lines)


def data(rng: random.Random) -> str:
    """JSON, CSV, or a table of records."""
    form = rng.choice(("json", "csv", "markdown"))
    rows: list[str] = []
    for i in range(MANY):
        name = rng.choice(NAMES)
        town = rng.choice(PLACES)
        noun = rng.choice(NOUNS)
        number = rng.randint(18, 990)
        if form == "json":
            rows.append(json.dumps({"id": 100 + i, "name": name, "town": town, "item": noun, "amount": number}))
        elif form == "csv":
            rows.append(f"{100 + i},{name},{town},{noun},{number},{rng.random():.3f}")
        else:
            rows.append(f"| {100 + i} | {name} | {town} | {noun} | {number} |")
    return "\n".join(rows)


def english(rng: random.Random) -> str:
    """A stretch of documentation."""
    text = typical_text()
    start = rng.randrange(len(text) - 8000)
    return text[start : start + 6000]


def reasoning(rng: random.Random) -> str:
    """Steps of a calculation or of a proof that goes on."""
    lines: list[str] = []
    form = rng.choice(("algebra", "cases", "thoughts"))
    for i in range(1, 26):
        a = rng.randint(2, 12)
        x = rng.randint(1, 20)
        b = rng.randint(1, 30)
        noun, other = rng.sample(NOUNS, 2)
        if form == "algebra":
            lines.append(f"({i}) {a}x + {b} = {a * x + b}, so {a}x = {a * x}, and x = {x}.")
        elif form == "cases":
            lines.append(f"Case {i}: {a} divides {a * x}, but {b} leaves {b % a}, so {noun} holds and {other} fails.")
        else:
            lines.append(
                f"Let me look at the {noun}. {sentence(rng)} So the {other} is {rng.choice(ADJECTIVES)}. Wait, "
                f"the {rng.choice(NOUNS)} also {rng.choice(VERBS)} it."
            )
    return "\n".join(lines)


HONEST: dict[str, Callable[[random.Random], str]] = {
    "refrains": refrains,
    "logs": logs,
    "matrices": matrices,
    "legal": legal,
    "lists": lists,
    "tests": tests,
    "data": data,
    "prose": english,
    "reasoning": reasoning,
}
