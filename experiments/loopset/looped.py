"""Texts that loop: what repeats after a healthy beginning, a function for each class.

Each function draws what comes after the beginning, and says where the loop ends if it is left again. A loop has about
600 to 1,500 words, because a model that loops goes on until its limit.
"""

from __future__ import annotations

import base64
import json
import random
import uuid
from collections.abc import Callable
from datetime import date, timedelta
from functools import partial

from experiments.loopset.words import NAMES, NOUNS, PLACES, VERBS, letters, paragraph, prose, sentence

WORDS = 700  # of a loop, at least
SCRIPTS = {  # letters of words; Chinese, Japanese, Thai, Lao, Khmer and Burmese are written without spaces
    "chinese": "我们在城市里看见了一条河流和很多古老的桥梁人民喜欢春天花园",
    "japanese": "わたしはまいにちがっこうへいきますきょうはとてもあついです",
    "thai": "กขคงจฉชซญดตถทธนบปผฝพฟภมยรลวสหอ",
    "lao": "ກຂຄງຈສຊຍດຕຖທນບປຜຝພຟມຢຣລວຫອ",
    "khmer": "កខគឃងចឆជឈញដឋឌណតថទធនបផពភមយរលវសហអ",
    "burmese": "ကခဂဃငစဆဇညတထဒဓနပဖဗဘမယရလဝသဟအ",
}
EMOJI = "😀😂🙏🔥🎉💡🚀🌍🍕🎵⚡🌸🐱🏆📚🧠🍀🌙⭐🛠"


def copies(piece: Callable[[int], str], between: str = " ", words: int = WORDS) -> str:
    """As many pieces as have so many words, 8 at least."""
    made: list[str] = []
    size = 0
    while size < words or len(made) < 8:
        made.append(piece(len(made)))
        size += max(1, len(made[-1].split()))
    return between.join(made)


def exact(rng: random.Random, smallest: int, largest: int) -> str:
    """So many words, again and again."""
    period = rng.randint(smallest, largest)
    words = prose(rng, period).split()[:period]
    return copies(lambda _: " ".join(words), words=max(WORDS, 4 * period))


def counters(rng: random.Random) -> str:
    """A number that goes up, before, in or after the same words."""
    said = sentence(rng).removesuffix(".")
    start = rng.randint(1, 300)
    forms = [
        lambda i: f"Step {start + i}: {said}.\n",
        lambda i: f"{start + i}. {said}\n",
        lambda i: f"{said} (attempt {start + i}).",
        lambda i: f"{said}, {start + i} times.",
    ]
    return copies(rng.choice(forms))


def ids(rng: random.Random) -> str:
    """Another random name in each copy."""
    said = sentence(rng).removesuffix(".")

    def fresh() -> str:
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))

    forms = [
        lambda _: f"Request {fresh()} failed. {said}. Trying again.\n",
        lambda _: f"{said} in {rng.getrandbits(40):010x}.",
        lambda _: f"Commit {rng.getrandbits(160):040x}: {said}.\n",
    ]
    return copies(rng.choice(forms))


def dates(rng: random.Random) -> str:
    """The next day or minute in each copy."""
    said = sentence(rng).removesuffix(".")
    first = date(2020, 1, 1) + timedelta(rng.randrange(2000))

    def day(i: int) -> date:
        return first + timedelta(i)

    forms = [
        lambda i: f"On {day(i):%B} {day(i).day}, {day(i).year}, {said[0].lower()}{said[1:]}.",
        lambda i: f"[{day(i).isoformat()}] {said}.\n",
        lambda i: f"At {i // 60 % 24:02d}:{i % 60:02d} {said[0].lower()}{said[1:]}.\n",
    ]
    return copies(rng.choice(forms))


def growing(rng: random.Random) -> str:
    """Each copy is the one before and a little more."""
    if rng.random() < 0.5:  # a word at a time: "very, very, very"
        word = rng.choice(NOUNS)
        said = sentence(rng).removesuffix(".")
        return copies(lambda i: f"{said}{f' and the {word}' * (i + 1)}.", words=2 * WORDS)
    said = []
    for _ in range(60):
        said.append(sentence(rng))
    return copies(lambda i: " ".join(said[: i + 2]) + "\n\n", words=2 * WORDS)


def paragraphs(rng: random.Random) -> str:
    """A paragraph with one other word in each copy."""
    words = paragraph(rng, 4).split()

    def copy(_: int) -> str:
        changed = list(words)
        changed[rng.randrange(len(words))] = rng.choice(NOUNS)
        return " ".join(changed)

    return copies(copy, "\n\n")


def abab(rng: random.Random) -> str:
    """Two paragraphs in turn."""
    two = []
    for _ in range(2):
        two.append(paragraph(rng, rng.randint(1, 3)))
    return copies(lambda i: two[i % 2], "\n\n")


def abac(rng: random.Random) -> str:
    """One paragraph, and one of several others, by chance, after each."""
    first = paragraph(rng, 1)
    others = []
    for _ in range(rng.randint(2, 4)):
        others.append(paragraph(rng, 1))
    return copies(lambda i: rng.choice(others) if i % 2 else first, "\n\n")


def shuffled(rng: random.Random) -> str:
    """The same words in another order in each copy."""
    words = sentence(rng).lower().removesuffix(".").split() + sentence(rng).lower().removesuffix(".").split()

    def copy(_: int) -> str:
        order = rng.sample(words, len(words))
        return " ".join(order).capitalize() + "."

    return copies(copy)


def edited(rng: random.Random) -> str:
    """A few words are inserted and deleted in each copy."""
    words = paragraph(rng, 2).split()

    def copy(_: int) -> str:
        changed = list(words)
        for _ in range(rng.randint(1, 3)):
            changed.insert(rng.randrange(len(changed)), rng.choice(NOUNS))
            del changed[rng.randrange(len(changed) - 1)]
        return " ".join(changed)

    return copies(copy)


def code(rng: random.Random) -> str:
    """A few lines of a program."""
    name, other = rng.sample(NOUNS, 2)
    bodies = [
        f"    if {name} is None:\n        return {other}\n    {name} = {other}.get({name!r})\n",
        f"def test_{name}():\n    assert {other}({name}) == {rng.randint(1, 99)}\n\n\n",
        f"        self.{name} = self.{other}({name}, {rng.randint(1, 9)})\n",
        f"import {name}\nfrom {other} import {rng.choice(VERBS)}\n",
    ]
    body = rng.choice(bodies)
    return copies(lambda _: body, "")


def json_rows(rng: random.Random) -> str:
    """The same object, or one with another number."""
    row = {"id": rng.randint(1, 500), "name": rng.choice(NAMES), "town": rng.choice(PLACES), "active": True}
    counts = rng.random() < 0.5

    def copy(i: int) -> str:
        return json.dumps({**row, "id": row["id"] + i} if counts else row)

    return copies(copy, ",\n")


def table(rng: random.Random, columns: int) -> str:
    """Rows of cells: the same, or with the number of the row."""
    cells = []
    for _ in range(columns):
        cells.append(rng.choice((rng.choice(NOUNS), str(rng.randint(1, 9999)), f"{rng.random():.2f}")))
    counts = rng.random() < 0.5
    start = rng.randint(1, 50)

    def row(i: int) -> str:
        if counts:
            cells[0] = str(start + i)
        return "| " + " | ".join(cells) + " |"

    return copies(row, "\n", WORDS + 20 * columns)


def white_space(rng: random.Random) -> str:
    """What a model writes in JSON mode when it does not find the end."""
    kinds = ["\n", "\n  ", " ", "\t\n", "\n\n    "]
    start = '{"name": "' + rng.choice(NAMES) + '",'
    if rng.random() < 0.5:
        piece = rng.choice(kinds)
        return start + piece * (3000 // len(piece))
    parts = []
    for _ in range(1200):
        parts.append(rng.choice(kinds))
    return start + "".join(parts)


def base64_(rng: random.Random) -> str:
    """Bytes that repeat, in lines or in one line."""
    raw = rng.randbytes(rng.randint(6, 90))
    line = base64.b64encode(raw).decode()
    if rng.random() < 0.5:
        return copies(lambda _: line, "\n", words=1) + f"\n{line}" * (6000 // len(line))
    return line.rstrip("=") * (6000 // len(line))


def emoji(rng: random.Random) -> str:
    """A few pictures, with a space or without, or with one exchanged now and then."""
    few = rng.sample(EMOJI, rng.randint(1, 9))
    between = rng.choice(("", " "))

    def copy(_: int) -> str:
        chosen = list(few)
        if len(few) > 5 and rng.random() < 0.15:
            chosen[rng.randrange(len(few))] = rng.choice(EMOJI)
        return between.join(chosen)

    return copies(copy, between, words=900 // len(few))


def script(rng: random.Random) -> str:
    """A sentence in one of six scripts that are written without spaces."""
    alphabet = SCRIPTS[rng.choice(sorted(SCRIPTS))]
    said = letters(rng, alphabet, rng.randint(8, 60)) + rng.choice(("。", "", " "))
    return said * (3000 // len(said))


def reconsiders(rng: random.Random) -> str:
    """Reasoning that takes the same doubt up again, in words that change a little."""
    thing, other = rng.sample(NOUNS, 2)
    verb = rng.choice(VERBS)
    number = rng.randint(3, 90)
    doubts = ("Wait,", "Hmm,", "But wait,", "Hold on,", "Actually,", "No,")
    starts = (
        "let me reconsider.", "let me check this again.", "maybe I missed something.", "that cannot be right.",
        "let me think about the question once more.", "I should read the problem again.",
    )  # fmt: skip
    fillers = ("", "", "then ", "therefore ", "I think ", "clearly ", "in that case ")

    def copy(_: int) -> str:
        middles = (
            f"The {thing} {verb} the {other}, so {rng.choice(fillers)}the answer should be {number}.",
            f"If the {thing} {verb} the {other}, {rng.choice(fillers)}the answer is {number}.",
            f"So {rng.choice(fillers)}the {thing} and the {other} give {number}.",
            f"We know that the {thing} {verb} the {other}, and {rng.choice(fillers)}this gives {number}.",
        )
        return f"{rng.choice(doubts)} {rng.choice(starts)} {rng.choice(middles)}"

    return copies(copy, rng.choice((" ", "\n\n")))


def left_again(rng: random.Random) -> str:
    """A loop that ends after a while; what follows is healthy."""
    period = rng.randint(2, 60)
    words = prose(rng, period).split()[:period]
    count = rng.randint(5, 9) + 60 // period
    return " ".join([" ".join(words)] * count) + " " + prose(rng, 300)


LOOPED: dict[str, Callable[[random.Random], str]] = {
    "exact, 1 to 12": partial(exact, smallest=1, largest=12),
    "exact, 13 to 80": partial(exact, smallest=13, largest=80),
    "exact, 81 to 400": partial(exact, smallest=81, largest=400),
    "counters": counters,
    "ids": ids,
    "dates": dates,
    "growing": growing,
    "paragraphs": paragraphs,
    "A-B-A-B": abab,
    "A-B-A-C": abac,
    "shuffled": shuffled,
    "edited": edited,
    "code": code,
    "JSON rows": json_rows,
    "table of 5": partial(table, columns=5),
    "table of 20": partial(table, columns=20),
    "white space": white_space,
    "base64": base64_,
    "emoji": emoji,
    "six scripts": script,
    "reconsiders": reconsiders,
    "left again": left_again,
}
