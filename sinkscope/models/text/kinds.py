"""The package's own texts of four kinds, for what is surveyed: no two of them are pieces of one document."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.models.text import beginning, check_varied

KINDS = ("prose", "dialogue", "code", "tables")
Half = Literal["choose", "report"]
BETWEEN = "\n%%%\n"  # documents of a file
MOST = 4  # texts of each kind


@dataclass(frozen=True)
class TextRows:
    """Texts of equal length.

    Attributes:
        ids: Their tokens.
        kinds: The kind of each text; empty words for texts of the user's own.
    """

    ids: Int[Tensor, "text pos"]
    kinds: tuple[str, ...]


@cache
def documents(kind: str) -> tuple[str, ...]:
    """Return the documents of a kind."""
    text = resources.files("sinkscope.models.text").joinpath("kinds", f"{kind}.txt").read_text("utf-8")
    return tuple(text.removesuffix("\n").split(BETWEEN))


def kind_rows(tokenizer: Any, half: Half, rows: int, length: int, bos: int | None) -> TextRows:
    """Return texts of four kinds in turn, each the beginning of a document of its own.

    Documents with even numbers are for what chooses, the others for what is reported. A document that is shorter than
    a text is followed by the next documents of its kind and half.

    Args:
        tokenizer: Reads the documents.
        half: Which half of the documents is read.
        rows: Number of texts; at most four of each kind are there.
        length: Tokens of a text, including what stands before it.
        bos: The token that texts begin with. None: none.

    Raises:
        SinkscopeError: There is no room for text, or this tokenizer turns it into one repeated token.
    """
    start = beginning(tokenizer, bos)
    body = length - len(start)
    if body < 1:
        raise SinkscopeError(f"pieces of {length} tokens have no room for text: give a model with a longer context")
    pieces, kinds = list[list[int]](), list[str]()
    for number in range(MOST):
        for kind in KINDS:
            own = documents(kind)[half == "report" :: 2]
            piece = _piece(tokenizer, (*own[number:], *own[:number]), body)
            if piece is not None and number < len(own):
                pieces.append([*start, *piece])
                kinds.append(kind)
            elif number == 0:
                raise SinkscopeError(f"this tokenizer makes fewer than {body} tokens of the {kind} in the package")
    tokens = torch.tensor(pieces[:rows], dtype=torch.long)
    check_varied(tokenizer, tokens[:, len(start) :])
    return TextRows(tokens, tuple(kinds[:rows]))


def _piece(tokenizer: Any, documents: Iterable[str], length: int) -> list[int] | None:
    """The first tokens of documents, one after another; None if they have fewer."""
    ids: list[int] = []
    for document in documents:
        ids += tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= length:
            return ids[:length]
    return None
