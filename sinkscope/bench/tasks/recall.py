"""Recall: facts in a longer text and a question about one of them, as a dialogue or as a needle in a haystack.

Dialogues ask the recall model about earlier turns. A fact reads `fact KEY VALUE VALUE LINK`: the link is the key of the
next fact of a chain, or `.` at its end. A turn consists of `turnN`, filler words with facts among them, a question
`ask KEY what was said` at the beginning, middle or end, and `answer`. The correct answer follows the chain from the
key: `VALUE VALUE LINK` per hop, up to and including `.`.

Needles are prompts by kind, depth and length of the text (RULER, Hsieh et al. 2024, arXiv 2404.06654):

- needle: one statement in a haystack of noise (niah_single_1).
- multi-key: the same, with three more statements of the same kind (niah_multikey_1, but in noise instead of essays).
- key-value: the haystack itself consists of such statements (niah_multikey_3).
- tracking: variable tracking, a value and a chain of names that refer to it (vt).
- chain: our own kind; it asks for the value of the last name of such a chain, in a haystack of other statements.

The recall models read facts as above; their chains have two facts, and the fact that is asked about links to the one
with the answer. Any other model reads simple sentences, of the first three kinds. The depth of a needle is that of the
first statement that the answer needs, as a share of the haystack; further statements are spread evenly from there to
the end.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, chain, cycle, islice, pairwise, product, takewhile, zip_longest
from operator import eq
from typing import Any, Literal, get_args

from sinkscope.bench.answer import Answer, Batch
from sinkscope.bench.prompt import Prompt, Turn, with_controls
from sinkscope.bench.record import Metrics
from sinkscope.bench.task import Size, Task, register_task
from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Share, Whole
from sinkscope.models.checkpoints.locate import RECALL, TWO_HOPS
from sinkscope.models.inputs import check_length
from sinkscope.models.target import Target

Position = Literal["begin", "middle", "end"]
POSITIONS: tuple[Position, ...] = get_args(Position)
Kind = Literal["dialogue", "needle", "multi-key", "key-value", "tracking", "chain"]
DIALOGUE = "dialogue"
NEEDLES: tuple[Kind, ...] = ("needle", "multi-key", "key-value", "tracking", "chain")
LINKED = ("tracking", "chain")
"""Needles in which several statements lead to the answer; the recall models alone read them."""
CROWDED = ("key-value", "chain")
"""Needles whose haystack consists of other statements."""
SPECIAL = tuple("<s> <unk> <pad> . fact ask answer unknown".split())
BOS, UNK, PAD, END, FACT, ASK, ANSWER, UNKNOWN = SPECIAL
"""`END` closes a chain of facts and ends an answer; `UNKNOWN` is the answer if nothing was stated."""
TURNS: tuple[str, ...] = tuple(f"turn{i}" for i in range(1, 17))
KEYS: tuple[str, ...] = tuple(
    """adam alba anna axel bela bruno carla cesar clara dana david diego edith elena emil erik eva felix fiona frida
    georg gina greta hanna hugo ida igor ines ivan jana jonas julia karl katya lara lena leo lotte luca maja marco
    maria mila nadia nils nina nora olaf olga oscar otto paula petra rosa ruth samir sara sofia tamar theo vera viktor
    wanda xenia""".split()
)
VALUES: tuple[str, ...] = tuple(
    """anchor apple arrow basket bell bottle bread bridge brush button cabin candle carpet castle chair clock coat
    coin compass copper cotton crown cup diamond door drum engine feather fiddle flag flute fork garden glass glove
    hammer harbor hat honey iron jacket kettle key lamp lantern lemon letter mirror needle onion paper pearl pencil
    pillow pipe plum ribbon ring rope saddle shovel spoon table violin""".split()
)
FILLER: tuple[str, ...] = tuple(
    """the a and of to in it was that had on at with for from by as but then there when while after before near over
    under again once more some few many each all both still just only even also very never always
    often soon later today morning evening night day week month summer winter spring autumn rain snow wind sun cloud
    river lake hill field forest road street town village house market station train boat horse dog cat bird fish tree
    leaf stone sand sea sky star moon people child friend neighbor farmer baker teacher doctor sailor driver walked
    stood looked waited talked laughed carried opened closed found left came went stayed turned began worked slept
    listened remembered old young small large quiet bright cold warm slow what said""".split()
)
QUESTION_END = ("what", "was", "said")
"""Follows the key in a question, so that heads that look a few places back see the key alone."""
_FRAME = 4 + len(QUESTION_END)  # tokens of a turn that are not context: marker, question, `answer`
_FACT = 5  # tokens of a fact
_GAP = 3  # smallest number of filler words between facts, and at both ends, for heads that look a few places back
_OTHERS = 3  # further statements in multi-key
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


@register_task
@dataclass(frozen=True, kw_only=True)
class Recall(Task):
    """Questions about facts in dialogues, or needles by depth and length of the prompt.

    Attributes:
        kinds: Kinds of prompts: dialogue, or kinds of needles.
        lengths: Tokens of all turns of a dialogue, which have unequal lengths; of a needle's prompt, at most.
        samples: Number of dialogues for each length and position, or of needles for each kind, length and depth.
        seed: Seed of every random choice; those of dialogues count up from it.
        turns: Turns of each dialogue.
        least: Tokens of the shortest turn.
        hops: Number of facts in the chain of a dialogue's answer.
        positions: Positions of a dialogue's questions: begin, middle, end.
        depths: Positions of the first statement that a needle's answer needs, from 0 to 1.
    """

    name = "recall"
    unit = "right answers"
    columns = ("prefix", "chance")
    budget = 256
    metric = "sinkscope.bench.tasks.recall:exact_until_end"
    model = RECALL

    kinds: tuple[Kind, ...] = (DIALOGUE,)
    lengths: tuple[Size, ...] = (768,)
    samples: Size = 10
    seed: Whole = 0
    turns: Size = 3
    least: Size = 48
    hops: Size = 1
    positions: tuple[Position, ...] = POSITIONS
    depths: tuple[Share, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)

    def prompts(self, target: Target) -> list[Prompt]:
        """Return the prompts of each kind."""
        for length in self.lengths:  # before texts of this length are made
            check_length(target, "a prompt of recall", length, remedy="give other lengths")
        prompts: list[Prompt] = []
        for kind in self.kinds:
            if kind == DIALOGUE:
                for position in self.positions:
                    prompts += with_controls(self._dialogues(position))
            else:
                prompts += with_controls(self._needles(target, kind))
        return prompts

    def _dialogues(self, position: Position) -> list[Prompt]:
        dialogues: list[Prompt] = []
        for length, seed in product(self.lengths, range(self.seed, self.seed + self.samples)):
            tokens = uneven(length, self.turns, seed, self.least)
            dialogue = recall_dialogue(seed, turns=self.turns, tokens=tokens, hops=self.hops, position=position)
            if len(self.lengths) > 1:
                dialogue = replace(dialogue, id=f"{dialogue.id} {length}", about={"length": length})
            dialogues.append(dialogue)
        return dialogues

    def _needles(self, target: Target, kind: Kind) -> list[Prompt]:
        reads_facts = target.name in (RECALL, TWO_HOPS)
        if kind in LINKED and not reads_facts:
            raise SinkscopeError(f"kinds={kind}: for {target.name} there are {', '.join((DIALOGUE, *NEEDLES[:3]))}")
        needles: list[Prompt] = []
        for length, depth, number in product(self.lengths, self.depths, range(self.samples)):
            needles.append(needle_prompt(target.tokenizer, reads_facts, kind, length, depth, self.seed, number))
        return needles

    def new_tokens(self, target: Target) -> int:
        """Return 64 for dialogues, and 8 for needles, which is enough for one statement."""
        return 64 if DIALOGUE in self.kinds else 8

    def score(self, target: Target, batch: Batch, turn: Turn, answer: Answer) -> Metrics:
        """Return exact answers, and the share of one before its first mistake: how far a dialogue's chain went."""
        metrics = super().score(target, batch, turn, answer)
        if turn.metric:  # a needle
            return metrics
        said = answer.text.replace(END, " ").split() + [END] * (answer.ended == "eos")
        wanted = turn.answers[0].split()
        right = takewhile(bool, map(eq, said, wanted))
        return {**metrics, "prefix": sum(right) / len(wanted)}


def exact_until_end(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the output has the words of an answer before the end mark, which decoders may leave out."""
    words = text.partition(END)[0].split()
    return float(any(words == answer.partition(END)[0].split() for answer in answers))


def recall_dialogue(
    seed: int = 0,
    *,
    turns: int = 3,
    tokens: int | Sequence[int] = 256,
    hops: int = 2,
    position: Position = "end",
) -> Prompt:
    """Build a dialogue; the same arguments give the same one, and positions differ only in where questions stand.

    Args:
        seed: Seed of every random choice.
        turns: Number of turns, 1 to 16.
        tokens: Tokens of a turn's prompt (words, for this tokenizer; answers and BOS not counted), or one number for
            each turn.
        hops: Number of facts in the chain of an answer, which has 3 * hops tokens.
        position: Position of the questions in their turns.

    Raises:
        SinkscopeError: The facts do not fit, or a number is out of range.
    """
    lengths = [tokens] * turns if isinstance(tokens, int) else list(tokens)
    fits = 1 <= turns <= len(TURNS) and len(lengths) == turns and min(lengths) >= _FRAME + _GAP
    if not fits or hops < 1 or turns * hops >= len(KEYS):
        raise SinkscopeError(
            f"turns={turns!r}, tokens={tokens!r}, hops={hops!r}: expected 1 to {len(TURNS)} turns of at least "
            f"{_FRAME + _GAP} tokens each, one number of tokens or one for each turn, and fewer than {len(KEYS)} hops "
            "in all, since a key is used once"
        )
    rng = random.Random(f"recall {seed}")
    keys = list(KEYS)
    rng.shuffle(keys)
    chains = [[keys.pop() for _ in range(hops)] for _ in range(turns)]
    facts: dict[str, list[str]] = {}
    for chained in chains:
        for key, link in pairwise([*chained, END]):
            facts[key] = _fact(rng, key, link)
    facts_by_turn = _placed(rng, lengths, chains, facts, keys[::-1])
    questions: list[Turn] = []
    for number, chained in enumerate(chains):
        pieces = _pieces(rng, facts_by_turn[number], lengths[number] - _FRAME)
        answer = [word for key in chained for word in facts[key][2:]]
        pieces.insert(_place(pieces, position), [ASK, chained[0], *QUESTION_END])
        words = " ".join(" ".join(piece) for piece in pieces)
        questions.append(Turn(f"{TURNS[number]} {words} {ANSWER}", (" ".join(answer),)))
    return Prompt(f"recall-{seed} {position}", tuple(questions), "recall", position)


def _placed(
    rng: random.Random,
    lengths: Sequence[int],
    chains: Sequence[Sequence[str]],
    facts: dict[str, list[str]],
    others: Sequence[str],
) -> list[list[list[str]]]:
    """The facts of each turn: those of the chains, then facts about other keys, which are added to `facts`."""
    room = [(length - _FRAME - _GAP) // (_FACT + _GAP) for length in lengths]
    facts_by_turn: list[list[list[str]]] = [[] for _ in lengths]

    def free(count: int) -> list[int]:
        return [turn for turn in range(count) if len(facts_by_turn[turn]) < room[turn]]

    for number, chained in enumerate(chains, 1):
        for key in chained:  # it stands in the turn that needs it or before
            places = free(number)
            if not places:
                raise SinkscopeError(
                    f"turn {number} and those before it have no place left for the facts of {len(chained)} hops a "
                    "question: give more tokens, or fewer hops"
                )
            facts_by_turn[rng.choice(places)].append(facts[key])
    for key in others:  # every turn is filled to about the same share
        places = free(len(lengths))
        if not places:
            break
        turn = min(places, key=lambda each: len(facts_by_turn[each]) / room[each])
        facts[key] = _fact(rng, key, rng.choice([*facts, END]))
        facts_by_turn[turn].append(facts[key])
    return facts_by_turn


def _fact(rng: random.Random, key: str, link: str) -> list[str]:
    return [FACT, key, rng.choice(VALUES), rng.choice(VALUES), link]


def uneven(total: int, turns: int, seed: int = 0, least: int = 48) -> tuple[int, ...]:
    """Draw lengths of turns that add up to `total`, each at least `least`.

    Raises:
        SinkscopeError: `total` is less than `turns` times `least`.
    """
    spare = total - turns * least
    if spare < 0:
        raise SinkscopeError(
            f"total={total} tokens for {turns} turns of at least {least}: give {turns * least} or more, or fewer turns"
        )
    rng = random.Random(f"uneven {seed}")
    cuts = sorted(rng.randint(0, spare) for _ in range(turns - 1))
    return tuple(least + end - start for start, end in pairwise([0, *cuts, spare]))


def _pieces(rng: random.Random, facts: Sequence[list[str]], size: int) -> list[list[str]]:
    """A context of `size` words in pieces, between which a question may stand: single filler words and whole facts."""
    spare = size - _GAP - len(facts) * (_FACT + _GAP)
    shuffled = rng.sample(facts, len(facts))
    cuts = [0, *sorted(rng.randint(0, spare) for _ in facts), spare]
    pieces: list[list[str]] = []
    for (start, end), fact in zip_longest(pairwise(cuts), shuffled):
        pieces += [[rng.choice(FILLER)] for _ in range(_GAP + end - start)]
        if fact is not None:
            pieces.append(fact)
    return pieces


def _place(pieces: Sequence[list[str]], position: Position) -> int:
    """The piece before which the question stands."""
    if position != "middle":
        return {"begin": 0, "end": len(pieces)}[position]
    starts = [0, *accumulate(map(len, pieces))]
    middle = starts[-1] // 2
    # A fact's link may be the key of the question, and heads that look a few places back would see both. So the
    # question never follows a fact directly.
    places = [place for place, piece in enumerate(pieces, 1) if len(piece) == 1]
    return min(places, key=lambda place: abs(starts[place] - middle))


@dataclass(frozen=True)
class Haystack:
    """What a prompt is made of.

    Attributes:
        head: Text before the haystack.
        needles: Statements that the answer needs.
        others: Statements that nobody asks about.
        filler: Pieces of the haystack.
        tail: The question.
        answer: String that must appear in the answer.
    """

    head: str
    needles: Sequence[str]
    others: Iterator[str]
    filler: Iterator[str]
    tail: str
    answer: str


def needle_prompt(
    tokenizer: Any, facts: bool, kind: str, length: int, depth: float, seed: int = 0, number: int = 0
) -> Prompt:
    """Build a prompt; the same arguments always give the same prompt.

    Args:
        tokenizer: Counts tokens.
        facts: Whether it is for the recall models; else it has sentences.
        kind: One of `NEEDLES`; with sentences one of the first three.
        length: Maximum tokens; the haystack fills them, leaving less than one of its pieces.
        depth: Depth of the first statement that the answer needs, 0 to 1.
        seed: Seed of every random choice.
        number: Number of the prompt among those with the same kind, length and depth.

    Raises:
        SinkscopeError: The length is too small for the required statements.
    """
    name = f"{kind} {length} {depth:g} {number}"
    rng = random.Random(f"{'recall' if facts else 'facts'} {name} {seed}")
    parts = _facts(kind, rng) if facts else _sentences(rng)

    @cache
    def size(text: str) -> int:
        return len(tokenizer(f" {text}", add_special_tokens=False)["input_ids"])

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
    count, steps = len(hay), len(parts.needles)
    for step in reversed(range(steps)):
        hay.insert(round(count * (depth + (1 - depth) * step / steps)), parts.needles[step])
    text = " ".join([parts.head, *hay, parts.tail]).lstrip()
    turn = Turn(text, (parts.answer,), metric="contains")
    return Prompt(name, (turn,), "needle", kind, {"length": length, "depth": depth})


def _facts(kind: str, rng: random.Random) -> Haystack:
    keys = rng.sample(KEYS, len(KEYS))
    asked, other = keys.pop(), keys.pop()

    def words(number: int) -> str:
        return " ".join(rng.choice(FILLER) for _ in range(number))

    def fact(key: str, values: Sequence[str], link: str) -> str:
        return " ".join([FACT, key, *values, link, words(_GAP)])

    def others() -> Iterator[str]:
        for key in keys:
            yield fact(key, rng.sample(VALUES, 2), rng.choice([*KEYS, END]))

    right = rng.sample(VALUES, 2)
    needles = [fact(asked, right, END)]
    if kind in LINKED:
        needles = [fact(other, right, END), fact(asked, rng.sample(VALUES, 2), other)]
    tail = " ".join([ASK, asked, *QUESTION_END, ANSWER])
    head = f"{TURNS[0]} {words(_GAP)}"
    return Haystack(head, needles, others(), iter(lambda: words(1), ""), tail, " ".join(right))


def _sentences(rng: random.Random) -> Haystack:
    things = [f"{rng.choice(_COLOURS)} {thing}" for thing in rng.sample(_THINGS, len(_THINGS))]
    places = rng.sample(_PLACES, len(_PLACES))
    facts = [f"The {thing} was in the {place}." for thing, place in zip(things, places, strict=False)]
    # The prompt does not end in "was in the", so that decoding finds the place.
    tail = f"\nWhere was the {things[0]}? The {things[0]}"
    return Haystack("", facts[:1], iter(facts[1:]), cycle([_NOISE]), tail, places[0])
