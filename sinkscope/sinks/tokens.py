"""Words that are put first or repeated: conversion of strings to single tokens, and sequences of repetitions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.measure import Setup
from sinkscope.models.target import Target


def single_token(tokenizer: Any, string: str) -> int:
    """The id of a string that is a single token, either as written or with a space before it.

    Raises:
        SinkscopeError: The string is several tokens (the message lists them), no token, or unknown to the tokenizer.
    """
    unknown = None if string == getattr(tokenizer, "unk_token", None) else getattr(tokenizer, "unk_token_id", None)
    pieces: list[int] = []
    for form in (string, " " + string) if string else ():
        ids = tokenizer(form, add_special_tokens=False)["input_ids"]
        if len(ids) == 1 and ids[0] != unknown:
            return int(ids[0])
        pieces = pieces or ids
    if len(pieces) < 2:
        what = "is unknown to the tokenizer" if pieces else "is no token"
        raise SinkscopeError(f"{string!r} {what}; give a string that is one token")
    parts = ", ".join(repr(tokenizer.decode([i])) for i in pieces)
    raise SinkscopeError(f"{string!r} is {len(pieces)} tokens ({parts}); give a string that is one token")


def pick_tokens(tokenizer: Any, ids: Tensor, strings: Sequence[str] | None, seed: int, count: int = 5) -> list[int]:
    """Ids of the strings. Without strings, `count` words of the text, drawn with the seed.

    Args:
        tokenizer: Tokenizer of the model.
        ids: Typical text `[row pos]`. Nothing is drawn from the first column.
        strings: The strings to repeat.
        seed: Seed of the draw.
        count: How many to draw.
    """
    if strings:
        return [single_token(tokenizer, s) for s in strings]
    seen = ids[:, 1:].unique().tolist()
    special = set(tokenizer.all_special_ids)
    words = [i for i in seen if i not in special and len(tokenizer.decode([i]).strip()) > 2]
    words = words or [i for i in seen if i not in special]
    return draw(words, count, seed)


def draw(ids: list[int], count: int, seed: int) -> list[int]:
    """Some of `ids`, in random order."""
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed)).tolist()
    return [ids[i] for i in order[:count]]


def first_tokens(target: Target, ids: Tensor, count: int, seed: int, strings: Sequence[str] | None = None) -> list[int]:
    """Distinct tokens to put first: the strings, or else tokens of the text, then of the vocabulary.

    Args:
        target: The model, for its tokenizer and the size of its vocabulary.
        ids: Typical text `[row pos]`. Nothing is drawn from the first column.
        count: Maximum number of tokens.
        seed: Seed of the draw.
        strings: The strings to put first instead.
    """
    every = vocabulary(target, strings)
    if strings:
        return every
    special = set(target.tokenizer.all_special_ids)
    generator = torch.Generator().manual_seed(seed)
    seen = [i for i in ids[:, 1:].unique().tolist() if i not in special]
    rest = sorted(set(every) - special - set(seen))
    drawn = [pool[i] for pool in (seen, rest) for i in torch.randperm(len(pool), generator=generator).tolist()]
    return drawn[:count]


def vocabulary(target: Target, strings: Sequence[str] | None = None) -> list[int]:
    """Ids of the strings. Without strings, every id that both the tokenizer and the embedding know.

    Raises:
        SinkscopeError: A string is not a single token.
    """
    if strings:
        return list(dict.fromkeys(single_token(target.tokenizer, s) for s in strings))
    return list(range(min(len(target.tokenizer), int(target.config.vocab_size))))


def at_once_line(words: Sequence[str]) -> list[str]:
    """A line that says which tokens a median over repetitions leaves out; no line if it leaves out none."""
    names = ", ".join(map(repr, words[:12])) + (f" and {len(words) - 12} more" if len(words) > 12 else "")
    told = f"The median leaves out tokens whose first occurrence is already a sink, without repetition: {names}."
    return [told] if words else []


def and_(things: Sequence[object]) -> str:
    """The items of a list joined in words."""
    names = [str(thing) for thing in things]
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


CYCLE = ("Another", "one", "bit", "es", "the", "dust")  # input of Fig. 3 of Yona et al. 2025
REPEATS = 1024  # default, if the context holds that many


@dataclass(frozen=True)
class Repetitions:
    """Sequences of one length: the same preceding tokens, then `count` repeated tokens.

    Attributes:
        labels: Names of what is repeated, for readers.
        cycles: The ids that are repeated in turn.
        ids: The sequences.
        start: Position of the first repetition.
        count: Number of repetitions (for a cycle, of tokens).
    """

    labels: tuple[str, ...]
    cycles: tuple[tuple[int, ...], ...]
    ids: Int[Tensor, "row pos"]
    start: int
    count: int


def choose(
    setup: Setup, tokens: Sequence[str] | None, prefix: str | None, paper: Sequence[str] = (), count: int = 5
) -> tuple[list[int], tuple[tuple[str, str], ...]]:
    """What to repeat: the given strings, or else the paper's words, or else words of the text.

    If a word of the paper is not a single token here, a word of the text replaces it. Words of the text that occur in
    the prefix are not used.

    Args:
        setup: The model and its text.
        tokens: The strings requested.
        prefix: The text before the repetitions.
        paper: The strings that the paper uses.
        count: Number of words of the text, if there are no strings.

    Returns:
        The ids, and pairs of (wanted, used) for the replaced words.

    Raises:
        SinkscopeError: A requested string is not a single token, or the text has too few words for replacements.
    """
    tokenizer, before = setup.tokenizer, set(encode(setup, prefix))
    if tokens:
        return pick_tokens(tokenizer, setup.ids, tokens, setup.seed), ()
    found: list[int | None] = []
    for string in paper:
        token = known_token(tokenizer, string)
        found.append(None if token in found else token)
    drawn = pick_tokens(tokenizer, setup.ids, None, setup.seed, count=count + len(before) + 2 * len(paper))
    spare = [t for t in drawn if t not in found and t not in before]
    if not paper:
        return spare[:count] or drawn[:count], ()
    if len(spare) < found.count(None):
        lacking = ", ".join(repr(s) for s, t in zip(paper, found, strict=True) if t is None)
        raise SinkscopeError(
            f"{lacking}: not one token each for this tokenizer, and the text has too few words to take instead; give "
            "--token, or a longer --text"
        )
    chosen = [spare.pop(0) if t is None else t for t in found]
    pairs = zip(paper, found, chosen, strict=True)
    return chosen, tuple((s, tokenizer.decode([c])) for s, t, c in pairs if t is None)


def known_token(tokenizer: Any, string: str) -> int | None:
    """The id of a string that is a single token other than the unknown one, else None."""
    try:
        return single_token(tokenizer, string)
    except SinkscopeError:
        return None


def encode(setup: Setup, prefix: str | None) -> list[int]:
    """Ids of a prefix, without BOS."""
    return list(setup.tokenizer(prefix, add_special_tokens=False)["input_ids"]) if prefix else []


def refuse_repeated(setup: Setup, prefix: str | None, words: Collection[int]) -> None:
    """Refuse a prefix that contains a repeated word, because its first occurrence would count as a repetition.

    Raises:
        SinkscopeError: The prefix contains one.
    """
    for token in encode(setup, prefix):
        if token in words:
            raise SinkscopeError(
                f"--prefix {prefix!r} contains the repeated token {setup.tokenizer.decode([token])!r}, so it would be "
                "one more repetition; give another --prefix or --token"
            )


def prefixes(made: Setup, tokens: Sequence[int]) -> list[int]:
    """The token before each repeated token: BOS or, without BOS, another token of the text."""
    return [int(made.ids[made.ids != t][0]) if made.bos is None else made.bos for t in tokens]


def room(target: Target, asked: int | None, around: int = 1, most: int = REPEATS) -> int:
    """The number of repetitions: the number requested, or else `most` or what the context holds.

    Args:
        target: The model.
        asked: `--max-repeats`.
        around: Tokens of the sequence besides the repetitions; 1 is the token that stands first.
        most: The default.

    Raises:
        SinkscopeError: The context is too short.
    """
    largest, least = (target.max_positions or 1 << 30) - around, asked or 1
    remedy = f"the largest is {largest}" if largest > 0 else "give a shorter --prefix"
    target.check_length(
        f"a text of --max-repeats {least} and {around} tokens around them", least + around, remedy=remedy
    )
    return min(most, largest) if asked is None else asked


def repetitions(
    setup: Setup, cycles: Sequence[tuple[int, ...]], prefix: str | None, max_repeats: int | None, after: int = 0
) -> Repetitions:
    """BOS (or a word of the text, if there is neither BOS nor prefix), the prefix, and the repetitions.

    Args:
        setup: The model and its text.
        cycles: The ids to repeat in turn, one tuple per sequence.
        prefix: Text between BOS and the repetitions.
        max_repeats: Number of repeated tokens. None: `REPEATS`, or what the context holds.
        after: Positions of the context that are kept free for what follows.

    Raises:
        SinkscopeError: The prefix contains a repeated token, or the context is too short.
    """
    repeated = {token for cycle in cycles for token in cycle}
    refuse_repeated(setup, prefix, repeated)
    before = ([] if setup.bos is None else [setup.bos]) + encode(setup, prefix)
    if not before:  # any token in first place is marked, so it must not be a repeated one
        before = [next((t for t in setup.ids.flatten().tolist() if t not in repeated), 0)]
    count = room(setup.target, max_repeats, len(before) + after)
    rows = [before + [cycle[i % len(cycle)] for i in range(count)] for cycle in cycles]
    labels = tuple(" ".join(word.strip() or repr(word) for word in single_words(setup.tokenizer, c)) for c in cycles)
    return Repetitions(labels, tuple(cycles), torch.tensor(rows), len(before), count)


def single_words(tokenizer: Any, ids: Sequence[int]) -> tuple[str, ...]:
    """Each token as a string of its own."""
    return tuple(tokenizer.decode([i]) for i in ids)


def replaced_line(replaced: Sequence[tuple[str, str]]) -> list[str]:
    """A line that says which words replace words of the paper; no line if none was replaced."""
    pairs = ", ".join(f"{wanted!r} by {used!r}" for wanted, used in replaced)
    return [f"Words of the paper that are not one token here were replaced: {pairs}."] if pairs else []
