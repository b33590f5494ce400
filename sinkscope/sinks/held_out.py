"""Text on which nothing was chosen, and what a whole model says of it."""

from __future__ import annotations

from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.measure import Setup
from sinkscope.models.target import Target
from sinkscope.models.text import text_rows
from sinkscope.sinks.tokens import TokenRows

Pieces = Annotated[int, Field(ge=2)]
"""Number of pieces of held-out text; of one alone there would be no error."""
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


@torch.no_grad()
def logits_of(target: Target, ids: TokenRows) -> Float[Tensor, "row pos vocab"]:
    """Return the logits of what follows each token, float32."""
    return target.hf(input_ids=ids.to(target.device), use_cache=False).logits.float()
