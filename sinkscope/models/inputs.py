"""What a user gives to a model (texts, token ids, a tokenizer's output) or asks of it (layers, neurons), checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from jaxtyping import Int
from pydantic import Field
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import check_encodable, plain
from sinkscope.files.records import checked_value
from sinkscope.models.target import Target
from sinkscope.models.text import note_second_bos, resolve_bos
from sinkscope.models.weights import is_plain
from sinkscope.results.notation import Neuron


def tokenizer_of(target: Target) -> Any:
    """Return the tokenizer.

    Raises:
        SinkscopeError: There is none.
    """
    if target.available_tokenizer is None:
        raise SinkscopeError(
            f"{target.name} carries no tokenizer; pass tokenizer=AutoTokenizer.from_pretrained(...), or put the "
            "tokenizer's files beside the weights"
        )
    return target.available_tokenizer


def check_site(
    target: Target, layer: int, neuron: int | None = None, expert: int | None = None, *, head: int | None = None
) -> None:
    """Refuse a layer, neuron, expert or query head that the model does not have.

    Raises:
        SinkscopeError: A number is out of range, an expert is missing, or the layer has no experts.
    """
    _check_number(target, "layer", layer, target.n_layers)
    _check_number(target, "head", head, target.n_heads)
    if neuron is None:
        return
    is_mixture = layer in target.mixtures
    if is_mixture != (expert is not None) and not (is_mixture and "down" in target.paths[layer]):
        is_like = "a mixture of experts; give (layer, expert, neuron)"
        if not is_mixture:
            is_like = "one MLP without experts; give (layer, neuron)"
        raise SinkscopeError(f"{Neuron(layer, expert, neuron)}: layer {layer} of {target.name} is {is_like}")
    _check_number(target, "expert", expert, target.n_experts(layer))
    _check_number(target, "neuron", neuron, target.width(layer, expert))


def _check_number(target: Target, what: str, value: int | None, count: int) -> None:
    if value is not None and not 0 <= value < count:
        raise SinkscopeError(f"{what} {value} is not in {target.name}: give one from 0 to {count - 1}")


def attending_layers(target: Target, layers: Sequence[int] | None) -> list[int]:
    """Return layers that attend with a softmax, in order; None selects all of them.

    Raises:
        SinkscopeError: The list is empty, or names a layer that the model does not have or that does not attend.
    """
    wanted = target.attending if layers is None else sorted({*layers})
    if not wanted:
        raise SinkscopeError("no layer was given: expected at least one")
    for layer in wanted:
        check_site(target, layer)
        if layer not in target.attending:
            attending = ", ".join(map(str, target.attending))
            raise SinkscopeError(f"layer {layer} of {target.name} has no softmax attention; these have: {attending}")
    return wanted


def check_length(target: Target, what: str, tokens: int, new: int = 0, remedy: str = "shorten it") -> None:
    """Refuse a text that does not fit the context together with the tokens that are to follow it.

    Args:
        what: The text, as the message names it.
        tokens: Length of the text.
        new: Number of tokens that are to follow.
        remedy: What to do about a text that is too long.

    Raises:
        SinkscopeError: It does not fit.
    """
    limit = target.max_positions
    if limit is None or tokens + new <= limit:
        return
    length = f"{tokens} tokens" + f" and {new} more are to come" * (new > 0)
    if new > 0 and tokens < limit:
        remedy += f", or ask for at most {limit - tokens} new tokens"
    raise SinkscopeError(f"{what} has {length}, but the context of {target.name} is {limit}: {remedy}")


def end_ids(target: Target) -> list[int]:
    """Return ids after which generation ends, as the model's generation configuration says."""
    ends = getattr(getattr(target.hf, "generation_config", None), "eos_token_id", None)
    if ends is None:
        return []
    what = f"eos_token_id of the generation_config of {target.name}"
    return checked_value(list[int], [ends] if isinstance(ends, int) else ends, what, strict=True)


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


def read_inputs(target: Target, inputs: Any, mask: Any = None, *, special: bool = True) -> Inputs:
    """Read a user's input for a model.

    Args:
        target: The model, whose tokenizer encodes texts.
        inputs: One or several texts; ids as a list, lists, an array or a tensor; or a mapping with `input_ids` and
            `attention_mask`, such as a `BatchEncoding`.
        mask: 1 for real tokens, 0 for padding; of a mapping, by default its `attention_mask`.
        special: Whether the tokenizer adds its special tokens to texts.

    Raises:
        SinkscopeError: The input is none of these or empty, an id or mask is invalid, or there is no tokenizer.
    """
    if isinstance(inputs, Mapping):
        mask = inputs.get("attention_mask") if mask is None else mask
        inputs = inputs.get("input_ids")
    if isinstance(inputs, str):
        inputs = [inputs]
    if isinstance(inputs, list | tuple) and len(inputs) > 0 and all(isinstance(text, str) for text in inputs):
        inputs = _encoded(target, inputs, special)
    rows = _checked_rows(target, inputs)
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    if len({*map(len, rows)}) == 1:
        return Inputs(ids, None if mask is None else _checked_mask(mask, ids))
    if mask is not None:
        raise SinkscopeError("attention_mask: rows of several lengths need none, the padding is added here")
    return Inputs(ids, pad_sequence([torch.ones(len(row), dtype=torch.long) for row in rows], batch_first=True))


def read_row(
    target: Target, inputs: Any, what: str = "the input", *, special: bool = True, any_length: bool = False
) -> list[int]:
    """Return the ids of one text, or of one row of ids.

    Args:
        target: The model, whose tokenizer encodes a text.
        inputs: A text; or ids as a list, an array or a tensor.
        what: What it is, as errors name it.
        special: Whether the tokenizer adds its special tokens to a text.
        any_length: Whether it may be longer than the context, because it is shortened.

    Raises:
        SinkscopeError: As for `read_inputs`; or there are several rows, or more tokens than the context holds.
    """
    if isinstance(inputs, list | tuple):
        inputs = [inputs]
    try:
        rows = read_inputs(target, inputs, special=special).rows()
    except SinkscopeError as error:
        raise SinkscopeError(f"{what}: {error}") from None
    if len(rows) > 1:
        raise SinkscopeError(f"{what} has {len(rows)} rows: expected one text, or one row of token ids")
    if not any_length:
        check_length(target, what, len(rows[0]))
    return rows[0]


def _checked_mask(values: Any, ids: Ids) -> Ids:
    """Return the user's attention mask as `[batch pos]`, if it fits the ids."""
    mask = torch.empty(0)
    with suppress(TypeError, ValueError, RuntimeError):  # it holds no numbers
        mask = torch.atleast_2d(torch.as_tensor(values))
    if mask.shape != ids.shape or not ((mask == 0) | (mask == 1)).all() or not mask.any(1).all():
        raise SinkscopeError(
            f"attention_mask of shape {tuple(mask.shape)} for token ids of shape {tuple(ids.shape)}: expected 1 at "
            "real tokens and 0 at padding, and a real token in every row"
        )
    return mask.long()


def _encoded(target: Target, texts: Sequence[str], special: bool) -> list[list[int]]:
    """The tokens of each text."""
    tokenizer = tokenizer_of(target)
    bos = resolve_bos(tokenizer, target.config, None)
    rows: list[list[int]] = []
    for number, text in enumerate(texts, 1):
        check_encodable(text, f"prompt {number}")
        rows.append(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
        if not rows[-1] or not text.strip():
            raise SinkscopeError(f"prompt {number} is empty: write at least one word that {target.name} has tokens for")
        note_second_bos(rows[-1], bos, f"prompt {number}")
    return rows


def _checked_rows(target: Target, ids: Any) -> list[list[int]]:
    """Return a list for each row of a tensor, an array, or lists, of ids for which the embedding has a row."""
    rows = ids
    with suppress(SinkscopeError):  # it is of no kind that holds numbers
        rows = plain(ids)
    if isinstance(rows, list) and not any(isinstance(row, list) for row in rows):
        rows = [rows]
    weight = getattr(target.embedding, "weight", None)
    size = len(weight) if is_plain(weight) else int(target.config.vocab_size)
    row = Annotated[list[Annotated[int, Field(ge=0, lt=size)]], Field(min_length=1)]
    return checked_value(list[row], rows, "tokens", strict=True)
