"""Masks of sinks for other people's pipelines: the positions of any ids with a norm spike, or that heads attend to.

Each row runs alone and without its padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.hooks.trace import resolve, trace
from sinkscope.measure import Setup
from sinkscope.models.inputs import check_length, read_inputs
from sinkscope.opening.load import open_target
from sinkscope.sinks.spikes.spike import attended, find_spikes
from sinkscope.sinks.spikes.survey import ratios_of, read_survey, survey_of
from sinkscope.sinks.thresholds import LEAST_TYPICAL, STANDS_OUT
from sinkscope.sinks.tokens import Mask


@torch.no_grad()
def sink_mask(
    model: object, ids: Any = None, *, site: str | None = None, attention_mask: Any = None, tokenizer: Any = None
) -> Mask:
    """Mark the positions of these ids that are sinks: at one site by their norm, or in the whole model.

    A position is in the mask of a site if its norm there is more than three times the typical one of its row (Sun et
    al. 2024). Without a site, it is in the mask if this holds after any layer, or if a twentieth of the heads attend to
    it, at the first position a hundredth, and at least two (Gu et al. 2024). Nothing is assumed of a token or of a
    position.

    Args:
        model: A live model, a name, or a Target.
        ids: Token ids `[batch pos]`, also as lists of several lengths; texts; or a tokenizer's output.
        site: Where you use the mask, by a name of `ss.trace` such as "blocks.14.hook_resid_post". None: anywhere;
            models with spikes of several layers may have them at other positions in each.
        attention_mask: 1 for real tokens, 0 for padding, `[batch pos]`. Padding is no sink, and no row depends on it.
        tokenizer: Tokenizer for texts, if the model carries none.

    Returns:
        True at sinks, in the shape of the ids and on their device.

    Each row is read alone, in one pass. It needs four tokens for a typical norm, the median. Attention to a position is
    judged by the queries after it: at least 16.

    Raises:
        SinkscopeError: The ids or the mask are invalid for this model, or a row is longer than its context; there is no
            such site, or it has attention rows and no value for each position.
    """
    target = open_target(model, tokenizer)
    inputs = read_inputs(target, ids, attention_mask)
    rows = inputs.rows
    check_length(target, "the longest row", max(map(len, rows)))
    real = torch.ones_like(inputs.ids, dtype=torch.bool)
    if inputs.mask is not None:
        real = inputs.mask.bool()
    if site is not None:
        named, *more = resolve(target, site)
        if more or named.point is None:
            problem = "names several" if more else "has attention rows"
            raise SinkscopeError(f"site {site!r} {problem}: expected one with a value for each position")
    at_place = torch.zeros_like(real)
    for number, row in enumerate(rows):
        if len(row) < LEAST_TYPICAL:
            continue
        row_ids = torch.tensor([row])
        if site is None:
            survey = read_survey(target, row_ids, reads_mlp=False)
            sinks = (survey.ratios[:, 0] > STANDS_OUT).any(0) | attended(survey)[0]
        else:
            sinks = ratios_of(trace(target, row_ids, [site])[site].flatten(2)[None])[0, 0] > STANDS_OUT
        at_place[number, real[number]] = sinks
    return at_place.to(ids.device if isinstance(ids, Tensor) else "cpu")


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
    survey = survey_of(setup)
    spikes = find_spikes(survey, setup.tokenizer)
    spikes.sort(key=lambda spike: -spike.size)
    return tuple(dict.fromkeys(dim for spike in spikes for dim in spike.dims))
