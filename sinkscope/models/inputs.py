"""Input for a model: texts, token ids, or a tokenizer's output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.models.target import Target, plain_weight

_EXPECTED = (
    "expected a text, a list of texts, token ids as a list, lists or a tensor [batch pos], or what a tokenizer returned"
)
_UNREAD = ("token_type_ids", "offset_mapping", "special_tokens_mask", "overflow_to_sample_mapping", "length")


@dataclass(frozen=True)
class Inputs:
    """Rows of token ids.

    Attributes:
        ids: Token ids as given; rows of different lengths are padded on the right.
        mask: 1 for real tokens, 0 for padding. None if there is no padding.
        texts: Texts from which the ids were made. None if ids were given.
    """

    ids: Int[Tensor, "batch pos"]
    mask: Int[Tensor, "batch pos"] | None
    texts: tuple[str, ...] | None

    def rows(self) -> list[list[int]]:
        """The real ids of each row."""
        if self.mask is None:
            return self.ids.tolist()
        return [row[real.bool()].tolist() for row, real in zip(self.ids, self.mask, strict=True)]


def read_inputs(
    target: Target,
    given: Any = None,
    more: Mapping[str, Any] | None = None,
    *,
    bos: bool | None = None,
    special: bool = True,
    page: str | None = None,
) -> Inputs:
    """Read a user's input for a model.

    Args:
        target: The model, whose tokenizer encodes texts.
        given: One or several texts; ids as a list, lists, an array or a tensor; or a mapping such as a `BatchEncoding`.
        more: Entries of such a mapping given as keyword arguments: `input_ids`, `attention_mask`.
        bos: Whether texts begin with the BOS token. By default the tokenizer decides.
        special: Whether the tokenizer adds its special tokens to texts.
        page: Documentation page to name in errors.

    Raises:
        SinkscopeError: The input is none of these or empty, an id or mask is invalid, or there is no tokenizer.
    """
    parts = {key: value for key, value in (more or {}).items() if value is not None}
    if isinstance(given, Mapping):
        parts, given = {**given, **parts}, None
    if given is None:
        given = parts.pop("input_ids", None)
    elif "input_ids" in parts:
        raise SinkscopeError("tokens and input_ids are both given: give one of them", page=page)
    mask = parts.pop("attention_mask", None)
    if odd := [key for key in parts if key not in _UNREAD]:
        raise SinkscopeError(f"{odd[0]}: there is no such argument; inputs are input_ids and attention_mask", page=page)
    if given is None:
        raise SinkscopeError(f"no tokens are given: {_EXPECTED}", page=page)
    texts = [given] if isinstance(given, str) else given
    if isinstance(texts, list | tuple) and texts and all(isinstance(text, str) for text in texts):
        return _of_texts(target, list(texts), bos, special, mask, page)
    if bos is not None:
        raise SinkscopeError(f"bos={bos}: token ids are read as they are given; give bos with texts", page=page)
    ids, filled = _ids(given, page)
    if mask is not None and filled is not None:
        raise SinkscopeError("attention_mask: rows of several lengths need none, the padding is added here", page=page)
    _check_ids(target, ids, page)
    return Inputs(ids, filled if mask is None else _mask(mask, ids, page), None)


def read_row(target: Target, given: Any, what: str = "", *, special: bool = True) -> list[int]:
    """The ids of one text, or of one row of ids.

    Args:
        target: The model, whose tokenizer encodes a text.
        given: A text; or ids as a list, an array or a tensor.
        what: What it is, as errors name it.
        special: Whether the tokenizer adds its special tokens to a text.

    Raises:
        SinkscopeError: As for `read_inputs`; or there are several rows, or more tokens than the context holds.
    """
    try:
        rows = read_inputs(target, [given] if isinstance(given, list | tuple) else given, special=special).rows()
    except SinkscopeError as error:
        raise SinkscopeError(f"{what}: {error}" if what else str(error), page=error.page) from None
    if len(rows) > 1:
        raise SinkscopeError(f"{what or 'the input'} has {len(rows)} rows: expected one text, or one row of token ids")
    target.check_length(what or "the input", len(rows[0]))
    return rows[0]


def _mask(given: Any, ids: Int[Tensor, "batch pos"], page: str | None) -> Int[Tensor, "batch pos"]:
    mask = torch.as_tensor(given)
    mask = mask.view(1, -1) if mask.ndim == 1 else mask
    if mask.shape != ids.shape:
        raise SinkscopeError(
            f"attention_mask has another shape than the token ids, {tuple(mask.shape)} beside {tuple(ids.shape)}: give "
            "1 or 0 for each token",
            page=page,
        )
    if not bool(((mask == 0) | (mask == 1)).all()) or not bool(mask.any(1).all()):
        raise SinkscopeError(
            "attention_mask: expected 1 at real tokens and 0 at padding, and a real token in every row",
            page=page,
        )
    return mask.long()


def _of_texts(target: Target, texts: list[str], bos: bool | None, special: bool, mask: Any, page: str | None) -> Inputs:
    if mask is not None:
        raise SinkscopeError("attention_mask: texts need none, the padding is added here", page=page)
    tok = target.need_tokenizer()
    if bos and tok.bos_token_id is None:
        raise SinkscopeError(
            f"--bos: the tokenizer of {target.name} has no BOS token; leave --bos out or use --no-bos", page=page
        )
    rows = []
    for i, text in enumerate(texts):
        if not text.strip():
            raise SinkscopeError(f"prompt {i + 1} is empty: write at least one word", page=page)
        row = [int(token) for token in tok(text, add_special_tokens=special, verbose=False)["input_ids"]]
        if bos is not None and tok.bos_token_id is not None:
            rest = row[1:] if row[:1] == [tok.bos_token_id] else row
            row = [tok.bos_token_id, *rest] if bos else rest
        if not row:
            raise SinkscopeError(f"prompt {i + 1}: the tokenizer of {target.name} produces no token for it", page=page)
        rows.append(row)
    return Inputs(*_filled(rows), tuple(texts))


def _ids(given: Any, page: str | None) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"] | None]:
    """Ids, and a mask if rows had to be padded."""
    if isinstance(given, list | tuple) and given and all(isinstance(row, list | tuple) for row in given):
        if not all(given):
            raise SinkscopeError(f"there is no token id in a row; {_EXPECTED}", page=page)
        if wrong := [i for row in given for i in row if not _is_id(i)]:
            raise SinkscopeError(f"token id {wrong[0]!r}: expected whole numbers from 0; {_EXPECTED}", page=page)
        return _filled([list(row) for row in given])
    try:
        rows = [torch.as_tensor(row) for row in given] if isinstance(given, list | tuple) else []
        ids = torch.stack(rows) if rows else torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise SinkscopeError(f"tokens of type {type(given).__name__}: {_EXPECTED}", page=page) from None
    ids = ids.view(1, -1) if ids.ndim == 1 else ids
    if ids.ndim != 2 or not ids.numel() or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        kind = str(ids.dtype).removeprefix("torch.")
        raise SinkscopeError(f"token ids of shape {tuple(ids.shape)} and type {kind}: {_EXPECTED}", page=page)
    return ids.long(), None


def _is_id(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 1 << 63


def _filled(rows: Sequence[list[int]]) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"] | None]:
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    if min(map(len, rows)) == width:
        return ids, None
    return ids, torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])


def _check_ids(target: Target, ids: Int[Tensor, "batch pos"], page: str | None) -> None:
    weight = plain_weight(target.embedding)
    size = int(target.config.vocab_size) if weight is None else len(weight)
    low, high = (int(end) for end in ids.aminmax())
    if low < 0 or high >= size:
        raise SinkscopeError(
            f"token id {low if low < 0 else high} is none of {target.name}, whose embedding has {size:,} rows: "
            f"expected 0 to {size - 1:,}",
            page=page,
        )
