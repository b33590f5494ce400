"""The tokens of a vocabulary: which there are, and how they are shown."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sinkscope.models.target import Target
from sinkscope.sinks.first_token.tokens import single_token


def vocabulary(target: Target, strings: Sequence[str] | None) -> list[int]:
    """Ids of the strings; without strings every id that both the tokenizer and the embedding know.

    Raises:
        SinkscopeError: a string is not one token.
    """
    if strings:
        return list(dict.fromkeys(single_token(target.tokenizer, s) for s in strings))
    return list(range(min(len(target.tokenizer), int(target.config.vocab_size))))


def shown(target: Target, ids: Sequence[int]) -> tuple[str, ...]:
    """Each token as text; where it is none by itself (part of a character), as the tokenizer spells it."""
    texts = [str(target.tokenizer.decode([i])) for i in ids]
    return tuple(
        text if text and "\ufffd" not in text else str(target.tokenizer.convert_ids_to_tokens(i))
        for text, i in zip(texts, ids, strict=True)
    )


def draw(ids: list[int], count: int, seed: int) -> list[int]:
    """Some of `ids`, in random order."""
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed)).tolist()
    return [ids[i] for i in order[:count]]
