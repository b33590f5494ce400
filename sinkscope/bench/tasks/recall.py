"""Recall: dialogues with questions about facts of earlier turns, for the recall models.

A fact reads `fact KEY VALUE VALUE LINK`: the link is the key of the next fact of a chain, or `.` at its end. A turn
consists of `turnN`, filler words with facts among them, a question `ask KEY what was said` at the beginning, middle or
end, and `answer`. The correct answer follows the chain from the key: `VALUE VALUE LINK` per hop, up to and including
`.`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, product, takewhile
from operator import eq
from typing import Literal, get_args

from sinkscope.bench.answer import Batch
from sinkscope.bench.record import Answer, Metrics, Prompt, Turn
from sinkscope.bench.task import Size, Task
from sinkscope.bench.tasks.vocabulary import ANSWER, ASK, END, FACT, FILLER, GAP, KEYS, QUESTION_END, TURNS, VALUES
from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Whole
from sinkscope.models.checkpoints.checkpoint import RECALL
from sinkscope.models.inputs import check_length
from sinkscope.models.target import Target

Position = Literal["begin", "middle", "end"]
POSITIONS: tuple[Position, ...] = get_args(Position)
_FRAME = 4 + len(QUESTION_END)  # tokens of a turn that are not context: marker, question, `answer`
_FACT = 5  # tokens of a fact


@dataclass(frozen=True, kw_only=True)
class Recall(Task):
    """Questions about facts in dialogues.

    Attributes:
        lengths: Tokens of all turns of a dialogue, which have unequal lengths.
        samples: Number of dialogues for each length and position.
        seed: Seed of the first dialogue of each length and position; those of the others count up from it.
        turns: Turns of each dialogue.
        least: Tokens of the shortest turn.
        hops: Number of facts in the chain of an answer.
        positions: Positions of the questions: begin, middle, end.
    """

    name = "recall"
    unit = "right answers"
    columns = ("prefix",)
    budget = 256
    model = RECALL

    lengths: tuple[Size, ...] = (768,)
    samples: Size = 10
    seed: Whole = 0
    turns: Size = 3
    least: Size = 48
    hops: Size = 1
    positions: tuple[Position, ...] = POSITIONS

    def prompts(self, target: Target) -> list[Prompt]:
        """Return the dialogues, by position."""
        for length in self.lengths:  # before texts of this length are made
            check_length(target, "a prompt of recall", length, remedy="give other lengths")
        seeds = range(self.seed, self.seed + self.samples)
        dialogues: list[Prompt] = []
        for position, length, seed in product(self.positions, self.lengths, seeds):
            tokens = uneven(length, self.turns, seed, self.least)
            dialogues.append(recall_dialogue(seed, tokens=tokens, hops=self.hops, position=position))
        return dialogues

    def score(self, target: Target, batch: Batch, turn: Turn, answer: Answer) -> Metrics:
        """Return whether an answer is right, and the share of it before its first mistake: how far its chain went."""
        wanted, (answered, *_) = turn.answers[0].split(), answer.text.split(END)
        words = answer.text.replace(END, " ").split() + [END] * (answer.ended == "eos")
        right = takewhile(bool, map(eq, words, wanted))
        return {"score": float(answered.split() == wanted[:-1]), "prefix": sum(right) / len(wanted)}


def recall_dialogue(
    seed: int = 0, *, tokens: Sequence[int] = (256, 256, 256), hops: int = 2, position: Position = "end"
) -> Prompt:
    """Build a dialogue; the same arguments give the same one, and positions differ only in where questions stand.

    Args:
        seed: Seed of every random choice.
        tokens: Tokens of the prompt of each turn, 1 to 16 (words, for this tokenizer; answers and BOS not counted).
        hops: Number of facts in the chain of an answer, which has 3 * hops tokens.
        position: Position of the questions in their turns.

    Raises:
        SinkscopeError: The facts do not fit, or a number is out of range.
    """
    _check_numbers(tokens, hops)
    turns = len(tokens)
    rng = random.Random(f"recall {seed}")
    keys = list(KEYS)
    rng.shuffle(keys)
    chains = [[keys.pop() for _ in range(hops)] for _ in range(turns)]
    facts: dict[str, list[str]] = {}
    for chained in chains:
        for key, link in pairwise([*chained, END]):
            facts[key] = _fact(rng, key, link)
    placed = _PlacedFacts(rng, tokens)
    for turn, chained in enumerate(chains):
        for key in chained:
            placed.put_before(turn, facts[key])
    for key in keys[::-1]:  # facts that nobody asks about
        turn = placed.emptiest()
        if turn is not None:
            facts[key] = _fact(rng, key, rng.choice([*facts, END]))
            placed.facts[turn].append(facts[key])
    questions: list[Turn] = []
    for turn, chained in enumerate(chains):
        question = [ASK, chained[0], *QUESTION_END]
        words = _context(rng, placed.facts[turn], tokens[turn] - _FRAME, question, position)
        questions.append(Turn(f"{TURNS[turn]} {words} {ANSWER}", (_answer(chained, facts),)))
    return Prompt(f"recall-{seed} {position} {sum(tokens)}", tuple(questions), "recall", position)


def _answer(keys: Sequence[str], facts: Mapping[str, list[str]]) -> str:
    """The answer of a chain: what its facts say behind their keys."""
    words: list[str] = []
    for key in keys:
        words += facts[key][2:]
    return " ".join(words)


def _check_numbers(tokens: Sequence[int], hops: int) -> None:
    """Refuse lengths of turns and numbers of hops of which no dialogue can be made.

    Raises:
        SinkscopeError: There are too many or too few of them.
    """
    turns = len(tokens)
    if not 1 <= turns <= len(TURNS) or min(tokens) < _FRAME + GAP or not 0 < hops * turns < len(KEYS):
        raise SinkscopeError(
            f"tokens={tokens!r}, hops={hops!r}: expected 1 to {len(TURNS)} turns of at least {_FRAME + GAP} tokens "
            f"each, and from 1 to fewer than {len(KEYS)} hops in all, since a key is used once"
        )


class _PlacedFacts:
    """The facts that stand in each turn.

    Args:
        rng: Draws turns.
        tokens: Tokens of the prompt of each turn.
    """

    def __init__(self, rng: random.Random, tokens: Sequence[int]) -> None:
        self.facts: list[list[list[str]]] = [[] for _ in tokens]
        self._rng = rng
        self._room = [(length - _FRAME - GAP) // (_FACT + GAP) for length in tokens]

    def turns_with_room(self, end: int) -> list[int]:
        """Return the turns before `end` in which another fact can stand."""
        return [turn for turn in range(end) if len(self.facts[turn]) < self._room[turn]]

    def put_before(self, turn: int, fact: list[str]) -> None:
        """Put a fact into the turn that needs it or into one before.

        Raises:
            SinkscopeError: None of them has room.
        """
        turns = self.turns_with_room(turn + 1)
        if not turns:
            raise SinkscopeError(f"turn {turn + 1} and those before it have no place left: give more tokens")
        self.facts[self._rng.choice(turns)].append(fact)

    def emptiest(self) -> int | None:
        """Return the turn that is filled least, so that all are filled to about the same share; None: all are full."""
        turns = self.turns_with_room(len(self.facts))
        return min(turns, key=lambda turn: len(self.facts[turn]) / self._room[turn], default=None)


def _fact(rng: random.Random, key: str, link: str) -> list[str]:
    return [FACT, key, rng.choice(VALUES), rng.choice(VALUES), link]


def uneven(total: int, turns: int, seed: int = 0, least: int = 48) -> tuple[int, ...]:
    """Draw lengths of turns that add up to `total`, each at least `least`.

    Raises:
        SinkscopeError: `total` is less than `turns` times `least`.
    """
    spare = total - turns * least
    if spare < 0:
        raise SinkscopeError(f"{total} tokens for {turns} turns of at least {least}: give {turns * least} or more")
    rng = random.Random(f"uneven {seed}")
    cuts = sorted(rng.randint(0, spare) for _ in range(turns - 1))
    return tuple(least + end - start for start, end in pairwise([0, *cuts, spare]))


def _context(rng: random.Random, facts: Sequence[list[str]], size: int, question: list[str], position: Position) -> str:
    """A context of `size` words and a question between its pieces: single filler words and whole facts."""
    spare = size - GAP - len(facts) * (_FACT + GAP)
    shuffled = rng.sample(facts, len(facts))
    cuts = [0, *sorted(rng.randint(0, spare) for _ in facts), spare]
    pieces: list[list[str]] = []
    for (start, end), fact in zip(pairwise(cuts), [*shuffled, []], strict=True):
        pieces += [[rng.choice(FILLER)] for _ in range(GAP + end - start)]
        pieces.append(fact)
    starts = [0, *accumulate(map(len, pieces))]
    # A fact's link may be the key of the question, and heads that look a few places back would see both. So the
    # question never follows a fact directly.
    places = [place for place, piece in enumerate(pieces, 1) if len(piece) == 1]
    middle = min(places, key=lambda place: abs(starts[place] - size // 2))
    pieces.insert({"begin": 0, "middle": middle, "end": len(pieces)}[position], question)
    return " ".join(chain(*pieces))
