"""The prompts of `needle`: what has to be found, at which depth, in how long a text, in three forms.

The tasks are those of RULER (Hsieh et al. 2024, arXiv 2404.06654), sections 3.1 and 3.2:

- needle: one statement in a haystack of noise (niah_single_1).
- multi-key: the same, with three more statements of the kind (niah_multikey_1, here in noise instead of essays).
- key-value: the haystack itself is statements of the kind (niah_multikey_3).
- tracking: variable tracking, a value and names that stand for it one after the other (vt).
- chain: ours; the value of the last name of such a chain, in a haystack of other statements.

The form "ruler" writes them in RULER's words, without its worked example, for any model that follows English. "recall"
writes them as facts and a question for the recall models, where a chain has two facts: the one that is asked about
links to the one with the answer. "facts" writes sentences such as the bundled model was trained on. The depth of a
prompt is that of the first statement that the answer needs, as a share of the haystack; further ones are spread evenly
from there to its end.
"""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, cycle, islice
from typing import Any

from sinkscope.bench.dialogues.recall import ANSWER, ASK, END, FACT, FILLER, KEYS, TAIL, TURNS, VALUES
from sinkscope.errors import SinkscopeError
from sinkscope.models.names import BUNDLED, RECALL, TWO_HOPS

TASKS = ("needle", "multi-key", "key-value", "tracking", "chain")
_LINKED, _FULL = TASKS[3:], ("key-value", "chain")  # several statements lead to the answer; other ones are the haystack
_OTHERS = 3  # statements beside the one that is asked for, multi-key
_HOPS = 4  # of RULER's chains
_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_COLOURS = "black blue brown golden gray green orange pink purple red silver white yellow".split()
_THINGS = (
    "apple bag ball bell book boat bowl box brush button cake candle cap car chair coat coin cup doll drum flag flower "
    "hat jar key kite knife lamp leaf letter map mirror nut pen pencil pillow plate ring rope shell ship shoe spoon "
    "star stick stone toy train umbrella"
).split()
_PLACES = (
    "attic barn basement bathroom bedroom cave cellar church city classroom desert field forest garage garden hall "
    "hospital hotel kitchen lake library market meadow museum office park river school shop station tower town valley "
    "village"
).split()


@dataclass(frozen=True)
class NeedlePrompt:
    """A prompt with its right answers.

    Attributes:
        id: task, length, depth and number.
        task: one of `TASKS`.
        length: most tokens, as asked for.
        depth: of the first statement that the answer needs, 0 to 1.
        text: the prompt.
        answers: strings, each of which has to be said.
    """

    id: str
    task: str
    length: int
    depth: float
    text: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class _Pieces:
    """What a prompt is made of; `others` are statements that nobody asks about."""

    head: str
    needles: Sequence[str]
    others: Iterator[str]
    filler: Iterator[str]
    tail: str
    answers: Sequence[str]


@dataclass(frozen=True)
class Form:
    """A way to write the tasks.

    Attributes:
        tasks: those that it has.
        new_tokens: longest answer.
        glue: text between pieces.
        pieces: of a task.
    """

    tasks: tuple[str, ...]
    new_tokens: int
    glue: str
    pieces: Callable[[str, random.Random], _Pieces]


def _recall(task: str, rng: random.Random) -> _Pieces:
    keys = rng.sample(KEYS, len(KEYS))
    asked, other = keys.pop(), keys.pop()
    gap = 3  # words between facts, for heads that look a few places back

    def words(number: int) -> str:
        return " ".join(rng.choice(FILLER) for _ in range(number))

    def fact(key: str, values: Sequence[str], link: str) -> str:
        return " ".join([FACT, key, *values, link, words(gap)])

    right = rng.sample(VALUES, 2)
    needles = [fact(asked, right, END)]
    if task in _LINKED:
        needles = [fact(other, right, END), fact(asked, rng.sample(VALUES, 2), other)]
    others = (fact(key, rng.sample(VALUES, 2), rng.choice([*KEYS, END])) for key in keys)
    tail = " ".join([ASK, asked, *TAIL, ANSWER])
    return _Pieces(f"{TURNS[0]} {words(gap)}", needles, others, (words(1) for _ in count()), tail, [" ".join(right)])


def _facts(task: str, rng: random.Random) -> _Pieces:
    things = [f"{rng.choice(_COLOURS)} {thing}" for thing in rng.sample(_THINGS, len(_THINGS))]
    places = rng.sample(_PLACES, len(_PLACES))
    found = [f"The {thing} was in the {place}." for thing, place in zip(things, places, strict=False)]
    tail = f"\nWhere was the {things[0]}? The {things[0]}"  # and not "was in the", so that decoding finds the place
    return _Pieces("", found[:1], iter(found[1:]), cycle([_NOISE]), tail, places[:1])


def _ruler(task: str, rng: random.Random) -> _Pieces:
    if task in _LINKED:
        return _variables(task, rng)
    kind = "uuid" if task == "key-value" else "number"

    def one(key: bool) -> str:
        if kind == "uuid":
            return str(uuid.UUID(int=rng.getrandbits(128), version=4))
        return f"{rng.choice(_COLOURS)}-{rng.choice(_THINGS)}" if key else str(rng.randrange(10**6, 10**7))

    def statement(key: str, value: str) -> str:
        return f"One of the special magic {kind}s for {key} is: {value}."

    key, value = one(True), one(False)
    head = (
        f"A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about "
        f"the {kind} afterwards."
    )
    what = f"he special magic {kind} for {key} mentioned in the provided text"
    others = (statement(other, one(False)) for other in iter(lambda: one(True), "") if other != key)
    return _Pieces(head, [statement(key, value)], others, cycle([_NOISE]), f"What is t{what}? T{what} is", [value])


def _variables(task: str, rng: random.Random) -> _Pieces:
    def some(letters: str) -> str:
        return "".join(rng.choices(letters, k=5))

    value, names = some(string.digits), [some(string.ascii_uppercase) for _ in range(_HOPS + 1)]
    needles = [f"VAR {name} = {said}" for name, said in zip(names, [value, *(f"VAR {n}" for n in names)], strict=False)]
    others = (f"VAR {some(string.ascii_uppercase)} = {some(string.digits)}" for _ in count())
    head = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n"
    tail = (
        f"Question: Find all variables that are assigned the value {value} in the text above. Answer: According to "
        f"the chain(s) of variable assignment in the text above, {len(names)} variables are assgined the value "
        f"{value}, they are: "
    )
    if task == "chain":
        tail = f"Question: What is the value of VAR {names[-1]} in the text above? Answer: VAR {names[-1]} ="
    return _Pieces(head, needles, others, cycle([_NOISE]), tail, [value] if task == "chain" else names)


FORMS = {
    "recall": Form(TASKS, 8, " ", _recall),
    "facts": Form(TASKS[:3], 8, " ", _facts),
    "ruler": Form(TASKS, 128, "\n", _ruler),
}
"""By name; `form_of` says which model has which."""


def form_of(model: str) -> str:
    """The form of prompts that a model of this package understands; RULER's for all others."""
    return {RECALL: "recall", TWO_HOPS: "recall", BUNDLED: "facts"}.get(model, "ruler")


def needle_prompt(
    tokenizer: Any, form: str, task: str, length: int, depth: float, seed: int = 0, number: int = 0
) -> NeedlePrompt:
    """A prompt, the same for the same arguments.

    Args:
        tokenizer: counts tokens.
        form: a name in `FORMS`.
        task: one of the form's.
        length: most tokens; the haystack fills them up to less than one of its pieces.
        depth: of the first statement that the answer needs, 0 to 1.
        seed: of everything that is drawn.
        number: of the prompt among those with the same task, length and depth.

    Raises:
        SinkscopeError: the length is too small for what has to stand there.
    """
    made = FORMS[form]
    name = f"{task} {length} {depth:g} {number}"
    rng = random.Random(f"{form} {name} {seed}")
    parts = made.pieces(task, rng)
    sizes: dict[str, int] = {}

    def size(text: str) -> int:
        return sizes.setdefault(text, len(tokenizer(made.glue + text, add_special_tokens=False)["input_ids"]))

    few = [] if task in _FULL else list(islice(parts.others, _OTHERS if task == "multi-key" else 0))
    room = length - 1 - sum(map(size, [parts.head, parts.tail, *parts.needles, *few]))
    if room < 0:
        raise SinkscopeError(f"length {length}: {task} needs {length - room} tokens at least; give longer prompts")
    hay: list[str] = []
    for piece in chain(parts.others if task in _FULL else (), parts.filler):
        room -= size(piece)
        if room < 0:
            break
        hay.append(piece)
    if task in _FULL:
        rng.shuffle(hay)  # statements may be fewer than there is room for
    for other in few:
        hay.insert(rng.randint(0, len(hay)), other)
    steps = len(parts.needles)
    places = [round(len(hay) * (depth + (1 - depth) * i / steps)) for i in range(steps)]
    for place, needle in reversed([*zip(places, parts.needles, strict=True)]):
        hay.insert(place, needle)
    text = made.glue.join([*([parts.head] if parts.head else []), *hay, parts.tail])
    return NeedlePrompt(name, task, length, depth, text, tuple(parts.answers))
