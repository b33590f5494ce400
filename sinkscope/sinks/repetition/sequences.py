"""Sequences of repetitions: what stands before them, what is repeated, and how often the context allows it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.measure import Setup
from sinkscope.models.target import Target
from sinkscope.sinks.first_token.tokens import pick_tokens, single_token
from sinkscope.trace.run import trace

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


def choose(
    setup: Setup, tokens: Sequence[str] | None, prefix: str | None, paper: Sequence[str] = (), count: int = 5
) -> tuple[list[int], tuple[tuple[str, str], ...]]:
    """What to repeat: the given strings; else those of the paper; else words of the text.

    Words of the text take the place of those of the paper that are not one token here. None of them is in the prefix.

    Args:
        setup: the model and its text.
        tokens: the strings asked for.
        prefix: what stands before the repetitions.
        paper: the strings the paper uses.
        count: words of the text, where there are no strings.

    Returns:
        The ids, and pairs of (wanted, used) for the replaced ones.

    Raises:
        SinkscopeError: a string asked for is not one token, or the text has too few words to replace with.
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
    """The id of a string that is one token and not the unknown one, else None."""
    try:
        token = single_token(tokenizer, string)
    except SinkscopeError:
        return None
    return None if token == getattr(tokenizer, "unk_token_id", None) else token


def encode(setup: Setup, prefix: str | None) -> list[int]:
    """Ids of a prefix, without BOS."""
    return list(setup.tokenizer(prefix, add_special_tokens=False)["input_ids"]) if prefix else []


def refuse_repeated(setup: Setup, prefix: str | None, words: Collection[int]) -> None:
    """A prefix may not contain a repeated word, because its first occurrence would count as a repetition.

    Raises:
        SinkscopeError: it contains one.
    """
    for token in encode(setup, prefix):
        if token in words:
            raise SinkscopeError(
                f"--prefix {prefix!r} contains the repeated token {setup.tokenizer.decode([token])!r}, so it would be "
                "one more repetition; give another --prefix or --token"
            )


def room(target: Target, asked: int | None, around: int, most: int = REPEATS) -> int:
    """The number of repetitions: what was asked for, else `most` or what the context holds.

    Args:
        target: the model.
        asked: `--max-repeats`.
        around: tokens of the sequence beside the repetitions.
        most: the default.

    Raises:
        SinkscopeError: the context is too short.
    """
    context = target.max_positions or 1 << 30
    largest = context - around
    if largest < 1:
        raise SinkscopeError(
            f"{around} tokens around the repetitions leave no room for one in the context of {context} tokens; give a "
            "shorter --prefix"
        )
    if asked is not None and asked > largest:
        raise SinkscopeError(
            f"--max-repeats {asked} does not fit the context of {context} tokens, {around} of which stand around the "
            f"repetitions; the largest is {largest}"
        )
    return min(most, largest) if asked is None else asked


def repetitions(
    setup: Setup, cycles: Sequence[tuple[int, ...]], prefix: str | None, max_repeats: int | None, after: int = 0
) -> Repetitions:
    """BOS (or a word of the text, where there is neither BOS nor prefix), the prefix, and the repetitions.

    Args:
        setup: the model and its text.
        cycles: the ids to repeat in turn, a tuple per sequence.
        prefix: text between BOS and the repetitions.
        max_repeats: number of repeated tokens; None: `REPEATS`, or what the context holds.
        after: positions of the context that are kept free for what follows.

    Raises:
        SinkscopeError: the prefix contains a repeated token, or the context is too short.
    """
    repeated = {token for cycle in cycles for token in cycle}
    refuse_repeated(setup, prefix, repeated)
    before = ([] if setup.bos is None else [setup.bos]) + encode(setup, prefix)
    if not before:  # the first token is marked whatever it is, so it must be none of the repeated ones
        before = [next((t for t in setup.ids.flatten().tolist() if t not in repeated), 0)]
    count = room(setup.target, max_repeats, len(before) + after)
    rows = [before + [cycle[i % len(cycle)] for i in range(count)] for cycle in cycles]
    labels = tuple(" ".join(word.strip() or repr(word) for word in single_words(setup.tokenizer, c)) for c in cycles)
    return Repetitions(labels, tuple(cycles), torch.tensor(rows), len(before), count)


def single_words(tokenizer: Any, ids: Sequence[int]) -> tuple[str, ...]:
    """Each token as a string of its own."""
    return tuple(tokenizer.decode([i]) for i in ids)


def norms_after(
    target: Target, layer: int, ids: Int[Tensor, "row pos"], batch_size: int | None = None
) -> Float[Tensor, "row pos"]:
    """Norm of the residual stream after a layer at every position; the pass ends there."""
    site = f"blocks.{layer}.hook_resid_post"
    return trace(target, ids, [site], "norm", batch_size=batch_size)[site]


def until_half(norms: Float[Tensor, " repetition"], first: float) -> int | None:
    """The first number of repetitions whose norm reaches half of the first token's; None: it never does."""
    reached = (norms >= first / 2).nonzero().flatten()
    return int(reached[0]) + 1 if len(reached) else None


def replaced_line(replaced: Sequence[tuple[str, str]]) -> list[str]:
    """Which words of the paper other words stand for, as a line; no line where none was replaced."""
    pairs = ", ".join(f"{wanted!r} by {used!r}" for wanted, used in replaced)
    return [f"Words of the paper that are not one token here were replaced: {pairs}."] if pairs else []
