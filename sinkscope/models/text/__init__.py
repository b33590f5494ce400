"""The texts of measurements: the neutral text, texts of four kinds, and their token ids behind BOS."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.errors import SinkscopeError, warn
from sinkscope.files.output import read_text

ONE_TOKEN, FEWEST_TOKENS = 0.9, 8  # refuse a text of 8 or more tokens if one token makes up more than 90 % of it
SHORT_TEXT = "a b"  # by which it is seen what a tokenizer puts before a text
KINDS = ("prose", "dialogue", "code", "tables")
Half = Literal["choose", "report"]
BETWEEN = "\n%%%\n"  # documents of a file, of which no two are pieces of one
MOST = 4  # texts of each kind


def typical_text(path: str | Path | None = None) -> str:
    """Return the neutral text: `path`, or the bundled English prose (Python's language reference, PSF licence).

    Raises:
        SinkscopeError: The file cannot be read, is not UTF-8, or is empty.
    """
    if path is None:
        return _shipped("typical.txt")
    text = read_text(str(path))
    if not text.strip():
        raise SinkscopeError(f"text file {str(path)!r} is empty; give a UTF-8 text file with some prose")
    return text


@cache
def _shipped(name: str) -> str:
    return resources.files("sinkscope.models.text").joinpath(name).read_text("utf-8")


@dataclass(frozen=True)
class Halves:
    """A text in two parts that share no character: what is chosen on the first is reported on the second.

    Attributes:
        choose: For what chooses: surveys, typical values, neutral values, anything whose outcome decides.
        report: For what is said of what was chosen.
    """

    choose: str
    report: str


def halves_of(text: str) -> Halves:
    """Cut a text in the middle, between two words if there are any."""
    middle = len(text) // 2
    space = re.compile(r"\s").search(text, middle)
    end = middle if space is None else space.start()
    return Halves(text[:end], text[end:])


def resolve_bos(tokenizer: Any, bos: bool | None) -> int | None:
    """Return the id of the token that sequences begin with; None for no BOS.

    Args:
        tokenizer: Determines the BOS token. If it names none, this is the first token that it puts before every text.
        bos: True requires a BOS token; False omits it; None uses it if the tokenizer has one.

    Raises:
        SinkscopeError: `bos=True`, but there is no BOS token.
    """
    if bos is False:
        return None
    bos_id = tokenizer.bos_token_id
    if bos_id is None:
        bos_id = next(iter(put_before(tokenizer)), None)
    if bos_id is None and bos:
        raise SinkscopeError("--bos: the tokenizer of this model has no BOS token; leave --bos out or use --no-bos")
    return bos_id


def put_before(tokenizer: Any) -> list[int]:
    """Return the special tokens that the tokenizer itself puts before every text."""
    plain = plain_ids(tokenizer, SHORT_TEXT)
    all_ids = tokenizer(SHORT_TEXT)["input_ids"]
    return all_ids[: all_ids.index(plain[0])] if plain and plain[0] in all_ids else []


def beginning(tokenizer: Any, bos: int | None) -> list[int]:
    """Return what stands before a text as the model is used: BOS and what the tokenizer puts there.

    Without BOS it is nothing.
    """
    if bos is None:
        return []
    put = put_before(tokenizer)
    return put if put[:1] == [bos] else [bos, *put]


def behind_beginning(tokenizer: Any, bos: int | None, ids: Sequence[int]) -> list[int]:
    """Return the ids of a text behind what stands before it; what a text begins with already is not put there again."""
    start = beginning(tokenizer, bos)
    if [*ids[: len(start)]] == start:
        return [*ids]
    return [*start, *ids]


def note_second_bos(ids: Sequence[int], bos: int | None, name: str) -> None:
    """Warn if a text begins with BOS and gets a second BOS in front."""
    if bos is not None and [*ids[:2]] == [bos, bos]:
        warn(
            f"{name} begins with BOS (id {bos}) twice, because it is in the text and is put before it: leave it out of "
            "the text, or give bos=False (--no-bos)"
        )


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text, without any that the tokenizer adds."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def text_rows(tokenizer: Any, text: str, rows: int, length: int, bos: int | None) -> Int[Tensor, "row pos"]:
    """Cut a text into up to `rows` consecutive pieces of `length` tokens, including what stands before a text.

    A piece that begins with it, as a chat in its template may, gets no second one.

    Raises:
        SinkscopeError: The text is too short for one piece, or this tokenizer turns it into one repeated token.
    """
    start = beginning(tokenizer, bos)
    body = length - len(start)
    # Eight characters a token is more than any tokenizer needs for prose, so a long text is not tokenized whole.
    ids = plain_ids(tokenizer, text[: 8 * rows * body])
    least = length if start and ids[: len(start)] == start else body
    if body < 1 or len(ids) < least:
        raise SinkscopeError(
            f"this tokenizer makes {len(ids)} tokens of the text, or of the half of it that is read; {least} are "
            f"needed for a piece of {length}: give a longer --text, of a kind that it knows"
        )
    pieces: list[list[int]] = []
    first = 0
    while len(pieces) < rows:
        if start and ids[first : first + len(start)] == start:
            first += len(start)
        if first + body > len(ids):
            break
        pieces.append(ids[first : first + body])
        first += body
    return _rows(start, pieces)


def _rows(start: list[int], pieces: list[list[int]]) -> Int[Tensor, "row pos"]:
    """Pieces of text, each behind what stands before a text.

    Raises:
        SinkscopeError: They are nearly all one token, mostly the unknown token: nothing can be compared with them.
    """
    tokens = torch.tensor(pieces, dtype=torch.long)
    share = int(tokens.unique(return_counts=True)[1].max()) / tokens.numel()
    if share > ONE_TOKEN and tokens.numel() >= FEWEST_TOKENS:
        raise SinkscopeError(f"{share:.0%} of the text is one token: give text that this tokenizer knows (--text)")
    return torch.cat([torch.tensor(start, dtype=torch.long).expand(len(tokens), -1), tokens], 1)


# -- four kinds --------------------------------------------------------------------------------------------------------


def kind_rows(tokenizer: Any, half: Half, rows: int, length: int, bos: int | None) -> Int[Tensor, "text pos"]:
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
    pieces: list[list[int]] = []
    for number in range(MOST):
        for kind in KINDS:
            documents = _shipped(f"kinds/{kind}.txt").removesuffix("\n").split(BETWEEN)
            of_half = documents[half == "report" :: 2]
            ids: list[int] = []
            for document in (*of_half[number:], *of_half[:number]):
                if len(ids) < body:
                    ids += plain_ids(tokenizer, document)
            if len(ids) < body:
                raise SinkscopeError(f"this tokenizer makes too few tokens of the {kind} in the package")
            pieces.append(ids[:body])
    return _rows(start, pieces[:rows])
