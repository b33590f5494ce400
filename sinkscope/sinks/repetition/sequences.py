"""Sequences of repetitions: what stands before them, what is repeated, and how often the context allows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.sinks.first_token.locate import Setup
from sinkscope.sinks.first_token.tokens import pick_tokens, single_token

CYCLE = ("Another", "one", "bit", "es", "the", "dust")  # input of Fig. 3 of Yona et al. 2025
REPEATS = 1024  # by default, where the context holds them


@dataclass(frozen=True)
class Repetitions:
    """Sequences of one length: the same tokens before, then `count` repeated tokens.

    Attributes:
        labels: what is repeated, for readers.
        cycles: the ids repeated in turn.
        ids: the sequences.
        start: position of the first repetition.
        count: repetitions (of a cycle: tokens).
    """

    labels: tuple[str, ...]
    cycles: tuple[tuple[int, ...], ...]
    ids: Int[Tensor, "row pos"]
    start: int
    count: int


def check(max_repeats: int | None, batch_size: int, texts: int, seed: int) -> None:
    """Refuse numbers that mean nothing, before a model is opened.

    Raises:
        SinkscopeError: one of them is out of range.
    """
    if max_repeats is not None and max_repeats < 1:
        raise SinkscopeError(f"--max-repeats {max_repeats}: at least one repetition is needed; give 1 or more")
    if batch_size < 1:
        raise SinkscopeError(f"--batch-size {batch_size}: at least one sequence has to run; give 1 or more")
    if texts < 1:
        raise SinkscopeError(f"texts {texts}: at least one piece of text is needed; give 1 or more")
    if seed < 0:
        raise SinkscopeError(f"--seed {seed} is negative; give 0 or more")


def choose(
    made: Setup, tokens: Sequence[str] | None, prefix: str | None, paper: Sequence[str] = (), count: int = 5
) -> tuple[list[int], tuple[tuple[str, str], ...]]:
    """What to repeat: the given strings; else those of the paper; else words of the text.

    Words of the text take the place of those of the paper that are not one token here. None of them is in the prefix.

    Args:
        made: the model and its text.
        tokens: the strings asked for.
        prefix: what stands before the repetitions.
        paper: the strings the paper uses.
        count: words of the text, where there are no strings.

    Returns:
        The ids, and pairs of (wanted, used) for the replaced ones.

    Raises:
        SinkscopeError: a string asked for is not one token, or the text has too few words to replace with.
    """
    tokenizer, before = made.target.tokenizer, set(_prefix(made, prefix))
    if tokens:
        return pick_tokens(tokenizer, made.ids, tokens, made.seed), ()
    found: list[int | None] = []
    for string in paper:
        try:
            token = single_token(tokenizer, string)
        except SinkscopeError:
            token = None
        unknown = token is None or token == tokenizer.unk_token_id or token in found
        found.append(None if unknown else token)
    drawn = pick_tokens(tokenizer, made.ids, None, made.seed, count=count + len(before) + 2 * len(paper))
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


def _prefix(made: Setup, prefix: str | None) -> list[int]:
    return list(made.target.tokenizer(prefix, add_special_tokens=False)["input_ids"]) if prefix else []


def repetitions(
    made: Setup, cycles: Sequence[tuple[int, ...]], prefix: str | None, max_repeats: int | None, after: int = 0
) -> Repetitions:
    """BOS (or a word of the text, where there is neither BOS nor prefix), the prefix, and the repetitions.

    Args:
        made: the model and its text.
        cycles: the ids to repeat in turn, a tuple per sequence.
        prefix: text between BOS and the repetitions.
        max_repeats: number of repeated tokens; None: `REPEATS`, or what the context holds.
        after: positions of the context that are kept free for what follows.

    Raises:
        SinkscopeError: the prefix contains a repeated token, or the context is too short.
    """
    tokenizer, bos = made.target.tokenizer, made.bos
    repeated = {token for cycle in cycles for token in cycle}
    body = _prefix(made, prefix)
    if both := [t for t in body if t in repeated]:
        raise SinkscopeError(
            f"--prefix {prefix!r} contains the repeated token {tokenizer.decode([both[0]])!r}, so it would be one more "
            "repetition; take it out of the prefix or repeat another token"
        )
    before = ([] if bos is None else [bos]) + body
    if not before:  # the first token is marked whatever it is, so it must be none of the repeated ones
        before = [next((t for t in made.ids.flatten().tolist() if t not in repeated), 0)]
    context = made.target.max_positions or 1 << 30
    largest = context - len(before) - after
    if largest < 1:
        raise SinkscopeError(
            f"--prefix is {len(body)} tokens, which leaves no room for a repetition in the context of {context} "
            "tokens; give a shorter one"
        )
    if max_repeats is not None and max_repeats > largest:
        raise SinkscopeError(
            f"--max-repeats {max_repeats} does not fit the context of {context} tokens, {len(before) + after} of which "
            f"stand around the repetitions; the largest is {largest}"
        )
    count = min(REPEATS, largest) if max_repeats is None else max_repeats
    rows = [before + [cycle[i % len(cycle)] for i in range(count)] for cycle in cycles]
    labels = tuple(" ".join(word.strip() or repr(word) for word in single_words(tokenizer, c)) for c in cycles)
    return Repetitions(labels, tuple(cycles), torch.tensor(rows), len(before), count)


def single_words(tokenizer: Any, ids: Sequence[int]) -> tuple[str, ...]:
    """Each token as a string of its own."""
    return tuple(tokenizer.decode([i]) for i in ids)
