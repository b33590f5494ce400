"""Needle in a haystack: prompts by kind, depth and length of the text (RULER, Hsieh et al. 2024, arXiv 2404.06654).

- needle: one statement in a haystack of noise (niah_single_1).
- multi-key: the same, with three more statements of the same kind (niah_multikey_1, but in noise instead of essays).
- key-value: the haystack itself consists of such statements (niah_multikey_3).
- tracking: variable tracking, a value and a chain of names that refer to it (vt).
- chain: our own kind; it asks for the value of the last name of such a chain, in a haystack of other statements.

The wording "ruler" is RULER's, without its worked example, for any model that follows English. "recall" writes facts
and a question for the recall models; its chains have two facts, and the fact that is asked about links to the one with
the answer. "facts" writes sentences like those the bundled model was trained on. The depth of a prompt is that of the
first statement that the answer needs, as a share of the haystack; further statements are spread evenly from there to
the end.
"""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, cycle, islice, product
from typing import Any, ClassVar, Literal

from sinkscope.bench.answer import Answer, Batch, BenchModel
from sinkscope.bench.prompt import Prompt, Turn, single, with_controls
from sinkscope.bench.record import Metrics
from sinkscope.bench.scores import share
from sinkscope.bench.task import Task
from sinkscope.bench.tasks.recall import ANSWER, ASK, END, FACT, FILLER, KEYS, TAIL, TURNS, VALUES
from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Natural, Whole
from sinkscope.models.names import BUNDLED, RECALL, TWO_HOPS
from sinkscope.models.target import Target

Kind = Literal["needle", "multi-key", "key-value", "tracking", "chain"]
KINDS: tuple[Kind, ...] = ("needle", "multi-key", "key-value", "tracking", "chain")
LINKED = ("tracking", "chain")
"""Kinds in which several statements lead to the answer."""
CROWDED = ("key-value", "chain")
"""Kinds whose haystack consists of other statements."""
_OTHERS = 3  # further statements in multi-key
_HOPS = 4  # hops in RULER's chains
_FACT_GAP = 3  # words between facts, for heads that look a few places back
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
class Haystack:
    """What a prompt is made of.

    Attributes:
        head: Text before the haystack.
        needles: Statements that the answer needs.
        others: Statements that nobody asks about.
        filler: Pieces of the haystack.
        tail: The question.
        answers: Strings that must appear in the answer.
    """

    head: str
    needles: Sequence[str]
    others: Iterator[str]
    filler: Iterator[str]
    tail: str
    answers: Sequence[str]


@dataclass(frozen=True)
class Wording:
    """A wording of the kinds.

    Attributes:
        kinds: Kinds that it supports.
        new_tokens: Maximum length of an answer.
        glue: Text between pieces.
        build: Returns the pieces of a kind.
    """

    kinds: tuple[Kind, ...]
    new_tokens: int
    glue: str
    build: Callable[[str, random.Random], Haystack]


@dataclass(frozen=True, kw_only=True)
class Needle(Task):
    """Retrieval by depth and length of the prompt.

    Attributes:
        kinds: Kinds of prompts; none: all kinds of the wording.
        lengths: Maximum prompt lengths in tokens.
        depths: Positions of the first statement that the answer needs, from 0 to 1.
        samples: Number of prompts per kind, length and depth.
        wording: recall, facts or ruler; by default the one that suits the model.
        seed: Seed of every random choice.
    """

    name: ClassVar[str] = "needle"
    said: ClassVar[str] = "finds {:.0%}"
    columns: ClassVar[tuple[str, ...]] = ("chance",)

    kinds: tuple[Kind, ...] = ()
    lengths: tuple[Natural, ...] = (640, 1024, 1536, 2048)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: Natural = 1
    wording: Literal["recall", "facts", "ruler"] | None = None
    seed: Whole = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lengths or not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            raise SinkscopeError(f"depths={self.depths}: expected numbers from 0.0 to 1.0, and at least one length")

    def _wording(self, target: Target) -> str:
        return self.wording or wording_of(target.name)

    def prompts(self, target: Target) -> list[Prompt]:
        """A prompt for every length, kind, depth and sample."""
        wording = self._wording(target)
        supported = WORDINGS[wording].kinds
        for kind in self.kinds:
            if kind not in supported:
                raise SinkscopeError(f"kinds={kind}: the wording {wording} has {', '.join(supported)}")
        for length in self.lengths:  # before texts of this length are made
            target.check_length("a prompt of needle", length, remedy="give other lengths")
        prompts: list[Prompt] = []
        for kind in self.kinds or supported:
            alike: list[Prompt] = []
            for length, depth, number in product(self.lengths, self.depths, range(self.samples)):
                alike.append(needle_prompt(target.tokenizer, wording, kind, length, depth, self.seed, number))
            prompts += with_controls(alike)
        return prompts

    def new_tokens(self, target: Target) -> int:
        """RULER's 128, and 8 in the other wordings."""
        return WORDINGS[self._wording(target)].new_tokens

    def score(self, model: BenchModel, batch: Batch, ids: list[int], turn: Turn, answer: Answer) -> Metrics:
        """Share of the expected strings in the answer, and of those of another prompt of the same kind."""
        chance = share(answer.text, turn.control) if turn.control else None
        return {"score": share(answer.text, turn.answers), "chance": chance}


def wording_of(model: str) -> str:
    """The wording that a model of this package understands; RULER's for all other models."""
    return {RECALL: "recall", TWO_HOPS: "recall", BUNDLED: "facts"}.get(model, "ruler")


def needle_prompt(
    tokenizer: Any, wording: str, kind: str, length: int, depth: float, seed: int = 0, number: int = 0
) -> Prompt:
    """Build a prompt; the same arguments always give the same prompt.

    Args:
        tokenizer: Counts tokens.
        wording: A name in `WORDINGS`.
        kind: One of the wording's kinds.
        length: Maximum tokens; the haystack fills them, leaving less than one of its pieces.
        depth: Depth of the first statement that the answer needs, 0 to 1.
        seed: Seed of every random choice.
        number: Number of the prompt among those with the same kind, length and depth.

    Raises:
        SinkscopeError: The length is too small for the required statements.
    """
    words = WORDINGS[wording]
    name = f"{kind} {length} {depth:g} {number}"
    rng = random.Random(f"{wording} {name} {seed}")
    parts = words.build(kind, rng)
    sizes: dict[str, int] = {}

    def size(text: str) -> int:
        if text not in sizes:
            sizes[text] = len(tokenizer(words.glue + text, add_special_tokens=False)["input_ids"])
        return sizes[text]

    few: list[str] = []
    if kind == "multi-key":
        few = list(islice(parts.others, _OTHERS))
    room = length - 1 - sum(map(size, [parts.head, parts.tail, *parts.needles, *few]))
    if room < 0:
        raise SinkscopeError(f"length {length}: {kind} needs {length - room} tokens at least; give longer prompts")
    hay: list[str] = []
    for piece in chain(parts.others if kind in CROWDED else (), parts.filler):
        room -= size(piece)
        if room < 0:
            break
        hay.append(piece)
    if kind in CROWDED:
        rng.shuffle(hay)  # statements may be fewer than there is room for
    for other in few:
        hay.insert(rng.randint(0, len(hay)), other)
    steps = len(parts.needles)
    places = [round(len(hay) * (depth + (1 - depth) * step / steps)) for step in range(steps)]
    for place, needle in reversed(list(zip(places, parts.needles, strict=True))):
        hay.insert(place, needle)
    head = [parts.head] if parts.head else []
    text = words.glue.join([*head, *hay, parts.tail])
    return single(name, text, parts.answers, "needle", kind, length=length, depth=depth)


def _recall(kind: str, rng: random.Random) -> Haystack:
    keys = rng.sample(KEYS, len(KEYS))
    asked, other = keys.pop(), keys.pop()

    def words(number: int) -> str:
        return " ".join(rng.choice(FILLER) for _ in range(number))

    def fact(key: str, values: Sequence[str], link: str) -> str:
        return " ".join([FACT, key, *values, link, words(_FACT_GAP)])

    def others() -> Iterator[str]:
        for key in keys:
            yield fact(key, rng.sample(VALUES, 2), rng.choice([*KEYS, END]))

    right = rng.sample(VALUES, 2)
    needles = [fact(asked, right, END)]
    if kind in LINKED:
        needles = [fact(other, right, END), fact(asked, rng.sample(VALUES, 2), other)]
    tail = " ".join([ASK, asked, *TAIL, ANSWER])
    head = f"{TURNS[0]} {words(_FACT_GAP)}"
    return Haystack(head, needles, others(), (words(1) for _ in count()), tail, [" ".join(right)])


def _facts(kind: str, rng: random.Random) -> Haystack:
    things = [f"{rng.choice(_COLOURS)} {thing}" for thing in rng.sample(_THINGS, len(_THINGS))]
    places = rng.sample(_PLACES, len(_PLACES))
    facts = [f"The {thing} was in the {place}." for thing, place in zip(things, places, strict=False)]
    # The prompt does not end in "was in the", so that decoding finds the place.
    tail = f"\nWhere was the {things[0]}? The {things[0]}"
    return Haystack("", facts[:1], iter(facts[1:]), cycle([_NOISE]), tail, places[:1])


def _ruler(kind: str, rng: random.Random) -> Haystack:
    if kind in LINKED:
        return _variables(kind, rng)
    unit = "uuid" if kind == "key-value" else "number"

    def key() -> str:
        return value() if unit == "uuid" else f"{rng.choice(_COLOURS)}-{rng.choice(_THINGS)}"

    def value() -> str:
        if unit == "uuid":
            return str(uuid.UUID(int=rng.getrandbits(128), version=4))
        return str(rng.randrange(10**6, 10**7))

    def statement(name: str) -> str:
        return f"One of the special magic {unit}s for {name} is: {value()}."

    def others() -> Iterator[str]:
        while True:
            name = key()
            if name != asked:
                yield statement(name)

    asked = key()
    needle = statement(asked)
    right = needle.rpartition(": ")[2].removesuffix(".")
    head = (
        f"A special magic {unit} is hidden within the following text. Make sure to memorize it. I will quiz you about "
        f"the {unit} afterwards."
    )
    what = f"he special magic {unit} for {asked} mentioned in the provided text"
    return Haystack(head, [needle], others(), cycle([_NOISE]), f"What is t{what}? T{what} is", [right])


def _variables(kind: str, rng: random.Random) -> Haystack:
    def some(letters: str) -> str:
        return "".join(rng.choices(letters, k=5))

    def others() -> Iterator[str]:
        while True:
            yield f"VAR {some(string.ascii_uppercase)} = {some(string.digits)}"

    value = some(string.digits)
    names = [some(string.ascii_uppercase) for _ in range(_HOPS + 1)]
    needles = [f"VAR {names[0]} = {value}"]
    for name, source in zip(names[1:], names, strict=False):
        needles.append(f"VAR {name} = VAR {source}")
    head = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n"
    if kind == "chain":
        tail = f"Question: What is the value of VAR {names[-1]} in the text above? Answer: VAR {names[-1]} ="
        return Haystack(head, needles, others(), cycle([_NOISE]), tail, [value])
    tail = (
        f"Question: Find all variables that are assigned the value {value} in the text above. Answer: According to "
        f"the chain(s) of variable assignment in the text above, {len(names)} variables are assgined the value "
        f"{value}, they are: "
    )
    return Haystack(head, needles, others(), cycle([_NOISE]), tail, names)


WORDINGS = {
    "recall": Wording(KINDS, 8, " ", _recall),
    "facts": Wording(KINDS[:3], 8, " ", _facts),
    "ruler": Wording(KINDS, 128, "\n", _ruler),
}
"""By name; `wording_of` says which model has which."""
