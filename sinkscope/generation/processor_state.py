"""Whether processors of logits have changed since an earlier time, so that a text may not go back behind it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from hashlib import sha256
from types import FunctionType
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase


class _StatePickler(pickle.Pickler):
    """Writes what functions and objects hold: of a function its code's name and the values that it closes over."""

    def persistent_id(self, obj: Any) -> str | None:
        """Stand for a model or a tokenizer, which is large and keeps nothing of a text."""
        if isinstance(obj, nn.Module | PreTrainedTokenizerBase):
            return f"{type(obj).__name__} {id(obj)}"
        return None

    def reducer_override(self, obj: Any) -> Any:
        """Write a function by what it closes over, because pickle refuses functions within functions."""
        if not isinstance(obj, FunctionType):
            return NotImplemented
        values: list[Any] = []
        for cell in obj.__closure__ or ():
            try:
                values.append(cell.cell_contents)
            except ValueError:  # a name that has no value yet
                values.append(None)
        return dict, ([("name", obj.__qualname__), ("values", values), ("attributes", vars(obj))],)


def state_of(processors: Sequence[Any]) -> str | None:
    """Return a hash of everything that processors hold; None if something can be written down by no means.

    Two equal hashes of the same processors mean that nothing changed between them. Global variables are not read.

    Args:
        processors: Logits processors and stopping criteria.
    """
    written = io.BytesIO()
    try:
        _StatePickler(written).dump(list(processors))
    except Exception:  # objects of other packages refuse in many ways
        return None
    return sha256(written.getvalue()).hexdigest()
