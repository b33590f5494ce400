"""What work on a whole vocabulary shares: layers that stay in memory, and tokens as texts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from sinkscope.models.checkpoints.stream import StreamTarget
from sinkscope.models.target import Target


def digest_of(text: str) -> str:
    """A short digest that changes with the text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hold_layers(target: Target, layer: int) -> None:
    """Keep every layer up to `layer` of a streamed model in memory, because many passes go through all of them."""
    if isinstance(target, StreamTarget):
        target.store.resident = layer + 1


def token_texts(target: Target, ids: Sequence[int]) -> tuple[str, ...]:
    """Each token as text, or as the tokenizer spells it if it is no text by itself (part of a character)."""
    texts = []
    for token in ids:
        text = str(target.tokenizer.decode([token]))
        if not text or "\ufffd" in text:
            text = str(target.tokenizer.convert_ids_to_tokens(token))
        texts.append(text)
    return tuple(texts)
