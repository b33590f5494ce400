"""Dialogues for the recall model: each turn states facts and asks a question; answers are correct by construction.

A fact reads `fact KEY VALUE VALUE LINK`: the link is the key of the next fact of a chain, or `.` at its end. A turn
consists of `turnN`, filler words with facts among them, a question `ask KEY what was said` at the beginning, middle or
end, and `answer`. The correct answer follows the chain from the key: `VALUE VALUE LINK` per hop, up to and including
`.`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, pairwise

from sinkscope.bench.dialogues.form import POSITIONS, Dialogue, DialogueTurn, Position
from sinkscope.errors import SinkscopeError

TASK = "recall"
BOS, UNK, PAD, END, FACT, ASK, ANSWER, UNKNOWN = "<s> <unk> <pad> . fact ask answer unknown".split()
"""`END` closes a chain of facts and ends an answer; `UNKNOWN` is the answer if nothing was stated."""

SPECIAL = (BOS, UNK, PAD, END, FACT, ASK, ANSWER, UNKNOWN)
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
TAIL = ("what", "was", "said")
"""Follows the key in a question, so that heads that look a few places back see the key alone."""
_FRAME = 4 + len(TAIL)  # tokens of a turn that are not context: marker, question, `answer`
_FACT = 5  # tokens of a fact
_GAP = 3  # smallest number of filler words between facts, and at both ends


def recall_dialogue(
    seed: int = 0,
    *,
    turns: int = 3,
    tokens: int | Sequence[int] = 256,
    hops: int = 2,
    distractors: int | None = None,
    stated: bool = True,
) -> Dialogue:
    """Build a dialogue; the same arguments give the same one. Its three variants differ only in the question's
    position.

    Args:
        seed: Seed of every random choice.
        turns: Number of turns, 1 to 16.
        tokens: Tokens of a turn's prompt (words, for this tokenizer; answers and BOS not counted), or one number for
            each turn.
        hops: Number of facts in the chain of an answer, which has 3 * hops tokens.
        distractors: Number of facts that no question asks about; None adds as many as keys and places allow.
        stated: If False, the last question asks about a key that was never stated, and its answer is `unknown .`.

    Raises:
        SinkscopeError: The facts do not fit, or a number is out of range.
    """
    lengths = _lengths(turns, tokens)
    rng = random.Random(f"recall {seed}")
    keys = list(KEYS)
    rng.shuffle(keys)
    chains = _chains(keys, turns, hops, stated)
    unsaid = {keys.pop()} if not stated else set[str]()

    facts = {
        key: [FACT, key, rng.choice(VALUES), rng.choice(VALUES), link]
        for chain in chains
        for key, link in zip(chain, [*chain[1:], END], strict=True)
    }
    told: list[list[str]] = [[] for _ in range(turns)]
    depends: list[set[int]] = []
    room = [(length - _FRAME - _GAP) // (_FACT + _GAP) for length in lengths]
    for turn, chain in enumerate(chains):
        places: set[int] = set()
        for key in chain:
            free = [t for t in range(turn + 1) if len(told[t]) < room[t]]
            if not free:
                raise SinkscopeError(
                    f"tokens={tokens!r}: turn {turn + 1} and those before it have no place left for the facts of "
                    f"{hops} hops a question; give more tokens, or fewer hops"
                )
            place = rng.choice(free)
            told[place].append(key)
            places.add(place)
        depends.append(places)
    _distract(rng, keys, facts, told, room, distractors)

    spoken: list[DialogueTurn] = []
    for turn, length in enumerate(lengths):
        last_unsaid = not stated and turn == turns - 1
        asked = min(unsaid) if last_unsaid else chains[turn][0]
        answer = [UNKNOWN, END] if last_unsaid else [word for key in chains[turn] for word in facts[key][2:]]
        pieces = _pieces(rng, [facts[key] for key in told[turn]], length - _FRAME)
        prompts: dict[Position, str] = {position: _say(turn, pieces, asked, position) for position in POSITIONS}
        needed = () if last_unsaid else tuple(sorted(depends[turn]))
        spoken.append(DialogueTurn(prompts, (" ".join(answer),), needed, not last_unsaid))
    return Dialogue(f"recall-{seed}", TASK, tuple(spoken))


def recall_dialogues(
    count: int, *, turns: int = 3, total: int = 768, hops: int = 2, seed: int = 0
) -> tuple[Dialogue, ...]:
    """Build several dialogues with turns of unequal length, as the commands do.

    Args:
        count: Number of dialogues; their seeds count up from `seed`.
        turns: Turns of each dialogue.
        total: Total tokens of all turns of a dialogue.
        hops: Number of facts in the chain of an answer.
        seed: Seed of the first dialogue.

    Raises:
        SinkscopeError: The facts do not fit, or a number is out of range.
    """
    return tuple(
        recall_dialogue(i, turns=turns, tokens=uneven(total, turns, i), hops=hops) for i in range(seed, seed + count)
    )


def uneven(total: int, turns: int, seed: int = 0, least: int = 48) -> tuple[int, ...]:
    """Random lengths of turns that add up to `total`, each at least `least`.

    Raises:
        SinkscopeError: `total` is less than `turns` times `least`.
    """
    if total < turns * least:
        raise SinkscopeError(
            f"total={total} tokens for {turns} turns of at least {least}: give {turns * least} or more, or fewer turns"
        )
    rng = random.Random(f"uneven {seed}")
    cuts = sorted(rng.randint(0, total - turns * least) for _ in range(turns - 1))
    edges = [0, *cuts, total - turns * least]
    return tuple(least + b - a for a, b in pairwise(edges))


def _lengths(turns: int, tokens: int | Sequence[int]) -> list[int]:
    if not 1 <= turns <= len(TURNS):
        raise SinkscopeError(f"turns={turns!r}: expected 1 to {len(TURNS)}, the turn markers of the recall model")
    lengths = [tokens] * turns if isinstance(tokens, int) else list(tokens)
    if len(lengths) != turns:
        raise SinkscopeError(f"tokens has {len(lengths)} numbers for {turns} turns: give one for each, or a single one")
    if min(lengths) < _FRAME + _GAP:
        raise SinkscopeError(f"tokens={min(lengths)}: a turn has at least {_FRAME + _GAP} tokens")
    return lengths


def _chains(keys: list[str], turns: int, hops: int, stated: bool) -> list[list[str]]:
    """The keys of each question's chain, taken from `keys`; without `stated` the last question has no chain."""
    asked = turns if stated else turns - 1
    if hops < 1 or asked * hops + (not stated) > len(keys):
        raise SinkscopeError(
            f"hops={hops!r} in {turns} turns: expected at least 1 and, since a key is used once, at most "
            f"{(len(keys) - (not stated)) // max(asked, 1)}"
        )
    return [[keys.pop() for _ in range(hops)] for _ in range(asked)]


def _distract(
    rng: random.Random,
    keys: list[str],
    facts: dict[str, list[str]],
    told: list[list[str]],
    room: list[int],
    wanted: int | None,
) -> None:
    """Facts that belong to no chain fill every turn to about the same share; their links lead to any stated key."""
    places = sum(room) - sum(map(len, told))
    most = min(len(keys), places)
    if wanted is not None and not 0 <= wanted <= most:
        raise SinkscopeError(f"distractors={wanted!r}: expected 0 to {most}, the keys and places that are left")
    for _ in range(most if wanted is None else wanted):
        turn = min((t for t in range(len(told)) if len(told[t]) < room[t]), key=lambda t: len(told[t]) / room[t])
        key = keys.pop()
        link = rng.choice([*facts, END])
        facts[key] = [FACT, key, rng.choice(VALUES), rng.choice(VALUES), link]
        told[turn].append(key)


def _pieces(rng: random.Random, facts: Sequence[list[str]], size: int) -> list[list[str]]:
    """A context of `size` words in pieces, between which a question may stand: single filler words and whole facts."""
    spare = size - _GAP - len(facts) * (_FACT + _GAP)
    shuffled = rng.sample(facts, len(facts))
    cuts = sorted(rng.randint(0, spare) for _ in shuffled)
    pieces: list[list[str]] = []
    before = 0
    for cut, fact in zip([*cuts, spare], [*shuffled, None], strict=True):
        pieces += [[rng.choice(FILLER)] for _ in range(_GAP + cut - before)]
        pieces += [fact] if fact else []
        before = cut
    return pieces


def _say(turn: int, pieces: Sequence[list[str]], asked: str, position: Position) -> str:
    starts = [0, *accumulate(map(len, pieces))]
    # A fact's link may be the key of the question, and heads that look a few places back would see both. So the
    # question never follows a fact directly.
    places = [i for i in range(1, len(pieces) + 1) if len(pieces[i - 1]) == 1]
    middle = min(places, key=lambda i: abs(starts[i] - starts[-1] // 2))
    at = {"begin": 0, "middle": middle, "end": len(pieces)}[position]
    parts = [*pieces[:at], [ASK, asked, *TAIL], *pieces[at:]]
    return " ".join([TURNS[turn], *(word for part in parts for word in part), ANSWER])
