"""Masks of sinks for other people's pipelines: the positions of any ids with a norm spike, or that heads attend to.

Each row runs alone and without its padding, and is judged as the survey judges typical text (`places`).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from sinkscope.measure import Setup
from sinkscope.models.checks import check_length
from sinkscope.models.inputs import read_inputs
from sinkscope.models.target import Target
from sinkscope.opening.open import open_target
from sinkscope.sinks.spikes.find import attended, find_spikes
from sinkscope.sinks.spikes.survey import read_survey, survey_of
from sinkscope.sinks.thresholds import LEAST_TYPICAL, STANDS_OUT
from sinkscope.sinks.tokens import TokenRows

Mask = Bool[Tensor, "batch pos"]


@torch.no_grad()
def sink_mask(model: object, ids: Any = None, *, attention_mask: Any = None, tokenizer: Any = None) -> Mask:
    """Mark the positions of these ids with a norm spike, or that heads attend to as a sink, in one pass over each row.

    Nothing is assumed of a token or of a position. A position is in the mask if its norm is more than three
    times the typical one of its row after some layer (Sun et al. 2024), or if a twentieth of
    the heads attend to it, at the first position a hundredth, and at least two (Gu et al. 2024).

    Args:
        model: A live model, a name, or a Target.
        ids: Token ids `[batch pos]`, also as lists of several lengths; texts; or a tokenizer's output.
        attention_mask: 1 for real tokens, 0 for padding, `[batch pos]`. Padding is no sink, and no row depends on it.
        tokenizer: Tokenizer for texts, if the model carries none.

    Returns:
        True at sinks, in the shape of the ids and on their device.

    A row needs four tokens for a typical norm, the median. Attention to a position is judged by the queries after it,
    of which there have to be 16.

    Raises:
        SinkscopeError: The ids or the mask are invalid for this model, or a row is longer than its context.
    """
    target = open_target(model, tokenizer, needed=False)
    inputs = read_inputs(target, ids, attention_mask)
    rows = inputs.rows()
    check_length(target, "the longest row", max(map(len, rows)))
    real = torch.ones_like(inputs.ids, dtype=torch.bool)
    if inputs.mask is not None:
        real = inputs.mask.bool()
    there = torch.zeros_like(real)
    for number, row in enumerate(rows):
        there[number, real[number]] = _of_row(target, torch.tensor([row]))[0]
    return there.to(ids.device if isinstance(ids, Tensor) else "cpu")


def sink_dims(model: object = None, **opening: Any) -> tuple[int, ...]:
    """Return the residual dimensions that carry norm spikes: each holds a tenth of a spike's square after its peak.

    Typical text is read as by `find_sinks`, whose result has these dimensions for each spike. What other dimensions
    hold may still stand out: where that matters, leave out positions instead (`sink_mask`).

    Args:
        model: A live model, a name, or a Target. By default the model in the package.
        opening: How to open it and its text, as in `find_sinks`: `tokenizer`, `text`, `bos`, `dtype`, `device`.

    Returns:
        The dimensions, those of the largest spike first; empty if no norm stands out.

    Raises:
        SinkscopeError: The model or its text cannot be read.
    """
    setup = Setup.open(model, **opening)
    survey = survey_of(setup, setup.bos)
    spikes = find_spikes(survey, setup.tokenizer)
    spikes.sort(key=lambda spike: -spike.size)
    return tuple(dict.fromkeys(dim for spike in spikes for dim in spike.dims))


def _of_row(target: Target, ids: TokenRows) -> Mask:
    """Mark the sinks of a row without padding."""
    there = torch.zeros_like(ids, dtype=torch.bool)
    if ids.shape[1] < 2:
        return there
    survey = read_survey(target, ids)
    if ids.shape[1] >= LEAST_TYPICAL:
        there |= (survey.ratios > STANDS_OUT).any(0)
    return there | attended(survey)
