"""Input for a model: texts, token ids, or a tokenizer's output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import check_encodable
from sinkscope.models.checks import check_length, tokenizer_of
from sinkscope.models.target import Target
from sinkscope.models.text import note_second_bos, resolve_bos
from sinkscope.models.weights import plain_weight

_EXPECTED = (
    "expected a text, a list of texts, token ids as a list, lists or a tensor [batch pos], or what a tokenizer returned"
)

Ids = Int[Tensor, "batch pos"]


@dataclass(frozen=True)
class Inputs:
    """Rows of token ids.

    Attributes:
        ids: Token ids as given; rows of different lengths are padded on the right.
        mask: 1 for real tokens, 0 for padding. None if there is no padding.
    """

    ids: Ids
    mask: Ids | None

    def rows(self) -> list[list[int]]:
        """Return the real ids of each row."""
        if self.mask is None:
            return self.ids.tolist()
        return [row[real.bool()].tolist() for row, real in zip(self.ids, self.mask, strict=True)]


def read_inputs(
    target: Target,
    given: Any,
    mask: Any = None,
    *,
    bos: bool | None = None,
    special: bool = True,
) -> Inputs:
    """Read a user's input for a model.

    Args:
        target: The model, whose tokenizer encodes texts.
        given: One or several texts; ids as a list, lists, an array or a tensor; or a mapping such as a `BatchEncoding`,
            of which `input_ids` and `attention_mask` are read.
        mask: 1 for real tokens, 0 for padding; of a mapping, by default its `attention_mask`.
        bos: Whether texts begin with the BOS token. By default the tokenizer decides.
        special: Whether the tokenizer adds its special tokens to texts.

    Raises:
        SinkscopeError: The input is none of these or empty, an id or mask is invalid, or there is no tokenizer.
    """
    tokens = given
    if isinstance(given, Mapping):
        tokens = given.get("input_ids")
        if mask is None:
            mask = given.get("attention_mask")
    if tokens is None:
        raise SinkscopeError(f"no tokens are given: {_EXPECTED}")
    if isinstance(tokens, str):
        tokens = [tokens]
    if isinstance(tokens, list | tuple) and len(tokens) > 0 and all(isinstance(text, str) for text in tokens):
        rows = _encode(target, tokens, bos, special)
    elif bos is None:
        rows = _rows_of_ids(tokens)
    else:
        raise SinkscopeError(f"bos={bos}: token ids are read as they are given; give bos with texts")
    if isinstance(given, Mapping) and target.available_tokenizer is not None:  # tokenized with BOS by a template, too
        for number, row in enumerate(rows, 1):
            note_second_bos(row, resolve_bos(target.available_tokenizer, target.config, None), f"row {number}")
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    _check_ids(target, ids)
    lengths = torch.tensor([len(row) for row in rows])
    if mask is not None:
        if bool((lengths < ids.shape[1]).any()):
            raise SinkscopeError("attention_mask: rows of several lengths need none, the padding is added here")
        return Inputs(ids, _checked_mask(mask, ids))
    padding = torch.arange(ids.shape[1]) < lengths[:, None]
    return Inputs(ids, None if bool(padding.all()) else padding.long())


def read_row(target: Target, given: Any, what: str = "the input", *, special: bool = True) -> list[int]:
    """Return the ids of one text, or of one row of ids.

    Args:
        target: The model, whose tokenizer encodes a text.
        given: A text; or ids as a list, an array or a tensor.
        what: What it is, as errors name it.
        special: Whether the tokenizer adds its special tokens to a text.

    Raises:
        SinkscopeError: As for `read_inputs`; or there are several rows, or more tokens than the context holds.
    """
    if isinstance(given, list | tuple):
        given = [given]
    try:
        rows = read_inputs(target, given, special=special).rows()
    except SinkscopeError as error:
        raise SinkscopeError(f"{what}: {error}") from None
    if len(rows) > 1:
        raise SinkscopeError(f"{what} has {len(rows)} rows: expected one text, or one row of token ids")
    check_length(target, what, len(rows[0]))
    return rows[0]


def _checked_mask(given: Any, ids: Ids) -> Ids:
    """Return the user's attention mask as `[batch pos]`, if it fits the ids."""
    mask = torch.as_tensor(given)
    if mask.ndim == 1:
        mask = rearrange(mask, "pos -> 1 pos")
    is_binary = bool(((mask == 0) | (mask == 1)).all())
    if mask.shape != ids.shape or not is_binary or not bool(mask.bool().any(1).all()):
        raise SinkscopeError(
            f"attention_mask of shape {tuple(mask.shape)} for token ids of shape {tuple(ids.shape)}: expected 1 at "
            "real tokens and 0 at padding, and a real token in every row"
        )
    return mask.long()


def _encode(target: Target, texts: Sequence[str], bos: bool | None, special: bool) -> list[list[int]]:
    """Tokenize each text, with one BOS, none, or as the tokenizer decides."""
    tokenizer = tokenizer_of(target)
    bos_id = resolve_bos(tokenizer, target.config, bos or None)
    rows: list[list[int]] = []
    first = resolve_bos(tokenizer, target.config, None)
    for number, text in enumerate(texts, 1):
        if not text.strip():
            raise SinkscopeError(f"prompt {number} is empty: write at least one word")
        check_encodable(text, f"prompt {number}")
        row = [int(token) for token in tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]]
        if bos is not None and row[:1] == [bos_id]:
            row = row[1:]
        if bos and bos_id is not None:  # without one, it was refused above
            row = [bos_id, *row]
        if not row:
            raise SinkscopeError(f"prompt {number}: the tokenizer of {target.name} produces no token for it")
        note_second_bos(row, first, f"prompt {number}")
        rows.append(row)
    return rows


def _rows_of_ids(given: Any) -> list[list[int]]:
    """Return a list for each row of a tensor, an array, or lists; one row may be given alone."""
    rows = _as_lists(given)
    if not isinstance(rows, list):
        raise SinkscopeError(f"tokens of type {type(given).__name__}: {_EXPECTED}")
    if not any(isinstance(row, list) for row in rows):
        rows = [rows]
    for row in rows:
        if not isinstance(row, list) or not row:
            raise SinkscopeError(f"there is no token id in a row; {_EXPECTED}")
        for number in row:
            if type(number) is not int or abs(number) >> 63:
                raise SinkscopeError(f"token id {number!r}: expected whole numbers; {_EXPECTED}")
    return rows


def _as_lists(value: Any) -> Any:
    """Turn tensors, arrays and tuples into lists, also inside of others."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_as_lists(item) for item in value]
    return value


def _check_ids(target: Target, ids: Ids) -> None:
    """Refuse ids for which the embedding has no row."""
    size = int(target.config.vocab_size)
    weight = plain_weight(target.embedding)
    if weight is not None:
        size = len(weight)
    impossible = ids[(ids < 0) | (ids >= size)]
    if len(impossible) > 0:
        raise SinkscopeError(
            f"token id {int(impossible[0])} is none of {target.name}, whose embedding has {size:,} rows: "
            f"expected 0 to {size - 1:,}"
        )
