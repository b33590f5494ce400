"""Words that are put first or repeated, as single tokens; sequences of repetitions; and held-out text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import check_encodable
from sinkscope.measure import Setup
from sinkscope.models.draws import some_of
from sinkscope.models.inputs import check_length
from sinkscope.models.target import Target
from sinkscope.models.text import text_rows

WORDS = 5  # words of the text that are repeated by default
MAX_REPEATS = 1024  # default of `--max-repeats`, if the context holds that many

TokenRows = Int[Tensor, "row pos"]
"""Sequences of token ids."""
PerToken = Float[np.ndarray, " token"]
"""A number for each of some tokens."""
Mask = Bool[Tensor, "text pos"]
"""Some positions of texts."""


def single_token(tokenizer: Any, string: str) -> int:
    """Return the id of a string that is a single token, either as written or with a space before it.

    Raises:
        SinkscopeError: The string is several tokens (the message lists them), no token, or unknown to the tokenizer.
    """
    check_encodable(string, repr(string))
    unknown = getattr(tokenizer, "unk_token_id", None)
    forms = [tokenizer(form, add_special_tokens=False)["input_ids"] for form in (string, f" {string}")]
    for ids in forms if string else ():
        if len(ids) == 1 and ids[0] != unknown:
            return int(ids[0])
    parts = [tokenizer.decode([token]) for token in forms[0]]
    raise SinkscopeError(f"{string!r} is not one known token here, but {parts}; give a string that is one token")


def pick_tokens(setup: Setup, strings: Sequence[str] | None = None) -> list[int]:
    """Return the ids of the strings. Without strings, draw five words of the text with the seed.

    Args:
        setup: The model and its text.
        strings: The strings to repeat.
    """
    tokenizer = setup.tokenizer
    if strings:
        return [single_token(tokenizer, s) for s in strings]
    ordinary = tokens_of_text(setup)
    words = [i for i in ordinary if len(tokenizer.decode([i]).strip()) > 2]
    return sample_tokens(words or ordinary, WORDS, setup.seed)


def tokens_of_text(setup: Setup) -> list[int]:
    """Return the different tokens of the text, without special ones and the first of each piece."""
    special = set(setup.tokenizer.all_special_ids)
    return [token for token in setup.ids[:, 1:].unique().tolist() if token not in special]


def sample_tokens(ids: list[int], count: int, seed: int) -> list[int]:
    """Draw some of `ids`, in random order, which the seed alone decides: all measurements name the same words."""
    return some_of(ids, count, torch.Generator().manual_seed(seed))


def token_texts(target: Target, ids: Sequence[int]) -> tuple[str, ...]:
    """Decode each token, or spell it as the tokenizer does if it is no text by itself (part of a character)."""
    texts = []
    for token in ids:
        text = str(target.tokenizer.decode([token]))
        if not text or "\ufffd" in text:
            text = str(target.tokenizer.convert_ids_to_tokens(token))
        texts.append(text)
    return tuple(texts)


def prefix_of(setup: Setup, tokens: Sequence[int]) -> list[int]:
    """Return what stands before repeated tokens: BOS or, without BOS, a token of the text that is not repeated."""
    if setup.bos is not None:
        return [setup.bos]
    return [next((token for token in setup.ids.flatten().tolist() if token not in tokens), 0)]


def repeated(before: Sequence[int], tokens: Sequence[int], count: int) -> TokenRows:
    """Make a row for each token: what stands before it, then its copies."""
    return torch.tensor([[*before, *[token] * count] for token in tokens])


def repetition_limit(target: Target, requested: int | None, around: int = 1) -> int:
    """Return the number of repetitions: the number requested, or else 1,024 or what the context holds.

    Args:
        target: The model.
        requested: `--max-repeats`.
        around: Tokens of the sequence besides the repetitions; 1 is the token that stands first.

    Raises:
        SinkscopeError: The context is too short.
    """
    least = requested or 1
    room = (target.max_positions or 1 << 30) - around
    tried = f"a text of --max-repeats {least} and {around} tokens around them"
    check_length(target, tried, least + around, remedy=f"there is room for {max(room, 0)}")
    return requested or min(MAX_REPEATS, room)


Pieces = Annotated[int, Field(ge=2)]
"""Number of pieces of held-out text; a single piece has no error."""
Length = Annotated[int, Field(ge=8)]
"""Tokens of a piece."""


def held_out(setup: Setup, pieces: int, length: int) -> TokenRows:
    """Cut pieces of the half of the typical text on which nothing is chosen.

    Raises:
        SinkscopeError: It is too short for two pieces.
    """
    length = min(length, setup.target.max_positions or length)
    ids = text_rows(setup.tokenizer, setup.halves.report, pieces, length, setup.bos)
    if len(ids) < 2:
        raise SinkscopeError(f"one piece of {length} tokens is held out, and 2 are needed: give a longer --text")
    return ids
