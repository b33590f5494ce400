"""Answers that repeat because they should: what was asked for, or what the form of a text brings; in two halves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

WORDS = ("north", "river", "stone", "paper", "green", "seven", "winter", "apple", "music", "silver", "table", "cloud")
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack", "Karen", "Leo")


@dataclass(frozen=True)
class HonestAnswer:
    """One answer.

    Attributes:
        form: What repeats in it.
        prompt: What was asked for.
        answer: The text.
    """

    form: str
    prompt: str
    answer: str


def lines(template: str, count: int) -> str:
    """So many lines of one template, in which {n} is the number, {word} and {name} change, {k} is a multiple."""
    made: list[str] = []
    for n in range(1, count + 1):
        made.append(template.format(n=n, word=WORDS[n % 12], name=NAMES[n % 12], k=7 * n, m=n % 3))
    return "\n".join(made)


FORMS: tuple[tuple[str, str, Callable[[], str]], ...] = (
    # what was asked for
    ("a word many times", "Repeat the word 'banana' 40 times.", lambda: "banana " * 40),
    (
        "a line ten times",
        "Write the sentence 'I will not be late again.' ten times.",
        lambda: "I will not be late again.\n" * 10,
    ),
    (
        "a numbered line",
        "Write 'I must do my homework.' 20 times and number the lines.",
        lambda: lines("{n}. I must do my homework.", 20),
    ),
    ("an emoji line", "Print a row of 60 stars.", lambda: "*" * 60),
    ("ha", "Laugh for a long time.", lambda: "ha" * 50 + "!"),
    ("a mantra", "Say 'om mani padme hum' fifteen times.", lambda: "om mani padme hum, " * 15),
    (
        "a chant",
        "Write a chant for our football team that repeats 'Go Lions go!' a dozen times.",
        lambda: "Go Lions go!\n" * 12,
    ),
    (
        "a counting rhyme",
        "Sing '10 green bottles' for me.",
        lambda: "\n".join(
            f"{n} green bottles hanging on the wall,\n{n} green bottles hanging on the wall,\n"
            f"And if one green bottle should accidentally fall,\nThere'll be {n - 1} green bottles hanging on the wall."
            for n in range(10, 0, -1)
        ),
    ),
    (
        "a birthday song",
        "Write the birthday song for Clara, twice.",
        lambda: (
            ("Happy birthday to you,\nHappy birthday to you,\nHappy birthday dear Clara,\nHappy birthday to you!\n\n")
            * 2
        ),
    ),
    ("zeros", "Give me a list of 64 zeros in Python.", lambda: "[" + ", ".join(["0"] * 64) + "]"),
    ("a matrix", "Write an 8 by 8 matrix of zeros.", lambda: "\n".join(["[0, 0, 0, 0, 0, 0, 0, 0],"] * 8)),
    ("a ruler", "Underline the title with a long line.", lambda: "Annual report\n" + "-" * 100),
    # what a form brings
    ("rows of a table", "| id | status | owner |\n|---|---|---|\n", lambda: lines("| {n} | open | none |", 16)),
    (
        "equal rows",
        "date,station,rain\n",
        lambda: "2024-07-01,Rome,0.0\n" + "\n".join(f"2024-07-{n:02},Rome,0.0" for n in range(2, 26)),
    ),
    ("empty cells", "| Mon | Tue | Wed | Thu | Fri |\n|---|---|---|---|---|\n", lambda: "|  |  |  |  |  |\n" * 12),
    (
        "form inputs",
        "<form>\n",
        lambda: lines('<label>Field {n}</label><input type="text" name="field{n}" required>', 10) + "\n</form>",
    ),
    ("options", "<select>\n", lambda: lines('<option value="{n}">{word}</option>', 14) + "\n</select>"),
    ("a litany", "A litany:\n", lambda: "\n".join(f"Holy {name}, pray for us." for name in NAMES)),
    (
        "a refrain",
        "A song:\n",
        lambda: "\n\n".join(
            f"The {word} is far and the road is long,\nOh carry me home, carry me home,\n"
            "Oh carry me home, carry me home."
            for word in WORDS[:5]
        ),
    ),
    (
        "assertions",
        "def test_square():\n",
        lambda: "\n".join(f"    assert square({n}) == {n * n}" for n in range(1, 13)),
    ),
    ("equal assertions", "def test_valid():\n", lambda: "\n".join(f'    assert is_valid("{word}")' for word in WORDS)),
    ("padding of an array", "ids = [101, 2054, 2003, ", lambda: ", ".join(["0"] * 50) + "]"),
    (
        "a log of passes",
        "$ pytest -v\n",
        lambda: "\n".join(f"tests/test_{word}.py::test_{word} PASSED" for word in WORDS),
    ),
    (
        "equal log lines",
        "$ tail -f worker.log\n",
        lambda: "\n".join(f"12:00:{n:02} INFO heartbeat ok" for n in range(1, 26)),
    ),
    ("a checklist", "Packing list:\n", lambda: lines("- [ ] {word}", 12)),
    (
        "JSON records",
        "[\n",
        lambda: ",\n".join(f'  {{"id": {n}, "active": true, "tags": []}}' for n in range(1, 13)) + "\n]",
    ),
    (
        "SQL inserts",
        "CREATE TABLE users (id INT, name TEXT);\n",
        lambda: lines("INSERT INTO users VALUES ({n}, '{name}');", 12),
    ),
    ("a multiplication table", "The table of seven:\n", lambda: lines("{n} x 7 = {k}", 15)),
    (
        "a dialogue of yes",
        "A shy witness:\n",
        lambda: "\n".join(f"Lawyer: Did you see the {word}?\nWitness: Yes." for word in WORDS),
    ),
    (
        "whereas",
        "RESOLUTION\n",
        lambda: "\n".join(f"WHEREAS the council has considered the matter of the {word}; and" for word in WORDS[:8]),
    ),
    ("a schedule", "Monday\n", lambda: "\n".join(f"{n:02}:00 - {n + 1:02}:00 Meeting" for n in range(8, 18))),
    ("a CSS list", "<style>\n", lambda: "\n".join(f".{word} {{\n  margin: 0;\n  padding: 0;\n}}" for word in WORDS)),
    # the forms that are reported
    ("a word in a loop", "Write the word 'yes' 30 times, separated by commas.", lambda: ", ".join(["yes"] * 30)),
    (
        "a promise",
        "Copy this eight times: 'I promise to keep my room clean and tidy.'",
        lambda: "I promise to keep my room clean and tidy.\n" * 8,
    ),
    ("a countdown", "Count down from 40.", lambda: ", ".join(str(n) for n in range(40, 0, -1))),
    ("dashes and dots", "Draw a border of 70 equal signs.", lambda: "=" * 70),
    ("la la", "Write the chorus with only 'la'.", lambda: "la la la la, la la la la,\n" * 6),
    ("a rosary", "Write the short prayer ten times.", lambda: "Lord, have mercy. Christ, have mercy.\n" * 10),
    (
        "a cheer",
        "Three cheers, please, five times over.",
        lambda: "Hip hip, hooray! Hip hip, hooray! Hip hip, hooray!\n" * 5,
    ),
    (
        "old macdonald",
        "Sing about the farm.",
        lambda: "\n".join(
            f"Old MacDonald had a farm, E-I-E-I-O.\nAnd on that farm he had a {animal}, E-I-E-I-O."
            for animal in ("cow", "pig", "duck", "horse", "sheep", "goat")
        ),
    ),
    (
        "lorem",
        "Fill three boxes with the same placeholder.",
        lambda: "Lorem ipsum dolor sit amet, consectetur adipiscing elit.\n" * 3,
    ),
    ("ones", "A vector of 48 ones:", lambda: "[" + ", ".join(["1.0"] * 48) + "]"),
    ("a board", "Print an empty chess board.", lambda: "\n".join(["| . | . | . | . | . | . | . | . |"] * 8)),
    ("a divider", "Separate the sections.", lambda: "\n\n".join(f"{word.title()}\n{'~' * 40}" for word in WORDS[:3])),
    ("a status table", "| host | ping | disk |\n|---|---|---|\n", lambda: lines("| web{n} | ok | ok |", 14)),
    ("constant columns", "id;country;currency\n", lambda: "\n".join(f"{n};DE;EUR" for n in range(1001, 1026))),
    ("blank lines of a form", "Signatures:\n", lambda: "Name: ____________ Date: ____________\n" * 8),
    (
        "check boxes",
        "<fieldset>\n",
        lambda: lines('<input type="checkbox" id="c{n}"><label for="c{n}">{word}</label>', 12),
    ),
    ("list items", "<ul>\n", lambda: lines("<li>{word}</li>", 12) + "\n</ul>"),
    (
        "blessings",
        "A blessing:\n",
        lambda: "\n".join(f"May you have {word}, and may you have peace." for word in WORDS[:9]),
    ),
    (
        "a villanelle",
        "A poem with a returning line:\n",
        lambda: "\n\n".join(
            f"The {a} was here before the {b} was known.\nDo not go far from all that you have grown."
            for a, b in zip(WORDS[:6], WORDS[6:], strict=True)
        ),
    ),
    ("mocks", "def setup():\n", lambda: "\n".join(f"    {word} = Mock()" for word in WORDS)),
    (
        "expectations",
        'describe("range", () => {\n',
        lambda: "\n".join(f"  expect(range.includes({n})).toBe(true);" for n in range(1, 11)),
    ),
    ("bytes", "unsigned char data[] = {", lambda: ", ".join(["0x00"] * 48) + "};"),
    ("installs", "$ npm install\n", lambda: "\n".join(f"added {word}@1.0.0" for word in WORDS)),
    (
        "pings",
        "$ ping example.org\n",
        lambda: "\n".join(f"64 bytes from 93.184.216.34: icmp_seq={n} ttl=56 time=11.{n % 4} ms" for n in range(1, 16)),
    ),
    ("a register", "Class register:\n", lambda: lines("{name}: present", 12)),
    ("coordinates", '"points": [\n', lambda: ",\n".join(f'  {{"x": {n}, "y": 0}}' for n in range(1, 16)) + "\n]"),
    ("grants", "-- permissions\n", lambda: lines("GRANT SELECT ON {word} TO reader;", 11)),
    ("an addition table", "Add one:\n", lambda: "\n".join(f"{n} + 1 = {n + 1}" for n in range(1, 21))),
    (
        "an interview of no",
        "Customs:\n",
        lambda: "\n".join(f"Officer: Any {word} to declare?\nTraveller: No, sir." for word in WORDS),
    ),
    (
        "clauses",
        "AGREEMENT\n",
        lambda: "\n".join(
            f"{n}. The tenant shall not, without written consent, remove the {word}."
            for n, word in enumerate(WORDS[:10], 1)
        ),
    ),
    ("a timetable", "Departures\n", lambda: "\n".join(f"{n:02}:15 Platform 4 Airport Express" for n in range(5, 22))),
    ("enum members", "class Color(Enum):\n", lambda: "\n".join(f"    {word.upper()} = auto()" for word in WORDS)),
)
HALVES = ("choose", "report")


def honest_answers(half: str) -> list[HonestAnswer]:
    """The answers of a half: the first 32 forms for choosing, the others, which are forms of their own, to report."""
    half_of_forms = FORMS[:32]
    if half == HALVES[1]:
        half_of_forms = FORMS[32:]
    return [HonestAnswer(form, prompt, answer()) for form, prompt, answer in half_of_forms]
