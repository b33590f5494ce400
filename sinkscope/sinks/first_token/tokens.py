"""Strings to single tokens, and words worth repeating."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.models.target import Target


def single_token(tokenizer: Any, string: str) -> int:
    """The id of a string that is one token, as written or with a space before it.

    Raises:
        SinkscopeError: it is several tokens (the message says which), none, or unknown to the tokenizer.
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
    """Ids of the strings; without strings, `count` words of the text, drawn by the seed.

    Args:
        tokenizer: of the model.
        ids: typical text `[row pos]`; the first column is not drawn from.
        strings: what to repeat.
        seed: of the draw.
        count: how many to draw.
    """
    if strings:
        return [single_token(tokenizer, s) for s in strings]
    seen = ids[:, 1:].unique().tolist()
    special = set(tokenizer.all_special_ids)
    words = [i for i in seen if i not in special and len(tokenizer.decode([i]).strip()) > 2]
    words = words or [i for i in seen if i not in special]
    order = torch.randperm(len(words), generator=torch.Generator().manual_seed(seed)).tolist()
    return [words[i] for i in order[:count]]


def first_tokens(target: Target, ids: Tensor, count: int, seed: int, strings: Sequence[str] | None = None) -> list[int]:
    """Different tokens to put first: the strings; without strings, tokens of the text, then of the vocabulary.

    Args:
        target: the model, for its tokenizer and the size of its vocabulary.
        ids: typical text `[row pos]`; the first column is not drawn from.
        count: how many at most.
        seed: of the draw.
        strings: what to put first instead.
    """
    if strings:
        return list(dict.fromkeys(single_token(target.tokenizer, s) for s in strings))
    special = set(target.tokenizer.all_special_ids)
    size = min(len(target.tokenizer), int(target.config.vocab_size))
    generator = torch.Generator().manual_seed(seed)
    seen = [i for i in ids[:, 1:].unique().tolist() if i not in special]
    rest = sorted(set(range(size)) - special - set(seen))
    drawn = [pool[i] for pool in (seen, rest) for i in torch.randperm(len(pool), generator=generator).tolist()]
    return drawn[:count]


def at_once_line(words: Sequence[str]) -> list[str]:
    """Which tokens a median over repetitions leaves out, as a line; no line where it leaves out none."""
    names = ", ".join(map(repr, words[:12])) + (f" and {len(words) - 12} more" if len(words) > 12 else "")
    told = f"The median leaves out tokens whose first occurrence is already a sink, without repetition: {names}."
    return [told] if words else []


def and_(things: Sequence[object]) -> str:
    """A list in words."""
    names = [str(thing) for thing in things]
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
