"""Questions about earlier turns for the recall model, whose answers are correct by construction.

A fact reads `fact KEY VALUE VALUE LINK`: the link is the key of the next fact of a chain, or `.` at its end. A turn
consists of `turnN`, filler words with facts among them, a question `ask KEY what was said` at the beginning, middle or
end, and `answer`. The correct answer follows the chain from the key: `VALUE VALUE LINK` per hop, up to and including
`.`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile, zip_longest
from operator import eq
from typing import Literal, get_args

from sinkscope.bench.answer import Answer, Batch
from sinkscope.bench.prompt import Prompt, Turn, with_controls
from sinkscope.bench.record import Metrics
from sinkscope.bench.task import Size, Task, register_task
from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Whole
from sinkscope.models.checkpoints.locate import RECALL
from sinkscope.models.target import Target

Position = Literal["begin", "middle", "end"]
POSITIONS: tuple[Position, ...] = get_args(Position)
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
_GAP = 3  # smallest number of filler words between facts, and at both ends


@register_task
@dataclass(frozen=True, kw_only=True)
class Recall(Task):
    """Dialogues for the recall model, with the question at each position.

    Attributes:
        count: Number of dialogues; their seeds count up from `first`.
        turns: Turns of each dialogue.
        total: Tokens of all turns of a dialogue, which have unequal lengths.
        least: Tokens of the shortest turn.
        hops: Number of facts in the chain of an answer.
        first: Seed of the first dialogue.
        positions: Positions of the question: begin, middle, end.
    """

    name = "recall"
    unit = "right answers"
    columns = ("prefix", "chance")
    budget = 256
    metric = "sinkscope.bench.tasks.recall:exact_until_end"
    model = RECALL

    count: Size = 10
    turns: Size = 3
    total: Size = 768
    least: Size = 48
    hops: Size = 2
    first: Whole = 0
    positions: tuple[Position, ...] = POSITIONS

    def prompts(self, target: Target) -> list[Prompt]:
        """Return each dialogue at each position."""
        prompts: list[Prompt] = []
        for position in self.positions:
            dialogues: list[Prompt] = []
            for seed in range(self.first, self.first + self.count):
                tokens = uneven(self.total, self.turns, seed, self.least)
                dialogues.append(
                    recall_dialogue(seed, turns=self.turns, tokens=tokens, hops=self.hops, position=position)
                )
            prompts += with_controls(dialogues)
        return prompts

    def score(self, target: Target, batch: Batch, turn: Turn, answer: Answer) -> Metrics:
        """Return exact answers, and the share of an answer before its first mistake: how far a chain was followed."""
        metrics = super().score(target, batch, turn, answer)
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
    for chain in chains:
        for key, link in pairwise([*chain, END]):
            facts[key] = _fact(rng, key, link)
    facts_by_turn = _placed(rng, lengths, chains, facts, keys[::-1])
    questions: list[Turn] = []
    for number, chain in enumerate(chains):
        pieces = _pieces(rng, facts_by_turn[number], lengths[number] - _FRAME)
        answer = [word for key in chain for word in facts[key][2:]]
        pieces.insert(_place(pieces, position), [ASK, chain[0], *QUESTION_END])
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

    for number, chain in enumerate(chains, 1):
        for key in chain:  # it stands in the turn that needs it or before
            places = free(number)
            if not places:
                raise SinkscopeError(
                    f"turn {number} and those before it have no place left for the facts of {len(chain)} hops a "
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
