"""What an edit costs on ordinary text: next-token loss piece by piece, and the difference with its standard error."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from sinkscope.errors import SinkscopeError
from sinkscope.interventions.base import Intervention
from sinkscope.measure import PIECE, Setup
from sinkscope.models.target import Target
from sinkscope.progress import Progress, silent
from sinkscope.text import text_rows

CHARACTERS = 8  # of a token, at most: as in `text_rows`


@dataclass(frozen=True)
class Change:
    """A quantity with and without an edit, over paired samples.

    Attributes:
        before: without.
        after: with.
        difference: after - before.
        se: standard error of the difference, from the differences of the samples; None for a single one.
    """

    before: float
    after: float
    difference: float
    se: float | None


def under(edit: Intervention | None, target: Target) -> AbstractContextManager[Any]:
    """A `with` in which the edit acts, or nothing does."""
    return nullcontext() if edit is None else edit.on(target)


def held_out(made: Setup, pieces: int, length: int, texts: int = 4) -> Int[Tensor, "row pos"]:
    """Pieces of the typical text behind the part that neutral values are taken from.

    Raises:
        SinkscopeError: the text is too short for two pieces of 8 tokens.
    """
    tokenizer = made.target.tokenizer
    rest = made.text[CHARACTERS * texts * PIECE :]
    bos = made.bos
    length = min(length, made.target.max_positions or length)
    # A short text gives short pieces rather than none.
    count = len(tokenizer(rest[: CHARACTERS * pieces * length], add_special_tokens=False, verbose=False)["input_ids"])
    length = min(length, count // 2 + (bos is not None))
    if length < 8:
        raise SinkscopeError(
            f"the text has {len(made.text)} characters, and the first {CHARACTERS * texts * PIECE} of them are used to "
            "measure neutral values: give a longer --text, so that something is held out"
        )
    return text_rows(tokenizer, rest, pieces, length, bos)


@torch.no_grad()
def losses(
    target: Target,
    ids: Int[Tensor, "row pos"],
    edit: Intervention | None = None,
    batch_size: int = 8,
    progress: Progress = silent,
) -> Float[Tensor, " row"]:
    """Mean next-token loss of each piece in nats; what the first token predicts is left out, no patch touches it.

    Args:
        target: the model, whole.
        ids: pieces of text.
        edit: what to act under.
        batch_size: pieces at a time.
        progress: told of every batch.
    """
    out: list[Tensor] = []
    for start in range(0, len(ids), batch_size):
        rows = ids[start : start + batch_size].to(target.device)
        with under(edit, target):
            logits = target.hf(input_ids=rows, use_cache=False).logits
        each = functional.cross_entropy(
            logits[:, 1:-1].float().transpose(1, 2), rows[:, 2:].to(logits.device), reduction="none"
        )
        out.append(each.mean(1).cpu())
        progress("perplexity", min(start + batch_size, len(ids)), len(ids))
    return torch.cat(out)


def perplexity_change(before: Float[Tensor, " row"], after: Float[Tensor, " row"]) -> Change:
    """Perplexities of paired pieces; the standard error is that of the mean loss difference, times the perplexity."""
    first, second = float(before.double().mean().exp()), float(after.double().mean().exp())
    se = standard_error(after.double() - before.double())
    return Change(first, second, second - first, None if se is None else se * second)


def standard_error(samples: Float[Tensor, " n"]) -> float | None:
    """Of the mean; None for fewer than two samples."""
    return float(samples.std()) / math.sqrt(len(samples)) if len(samples) > 1 else None
