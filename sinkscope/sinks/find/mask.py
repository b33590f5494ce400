"""Masks of sinks for other people's pipelines: the positions of any ids with a norm spike, or that heads attend to.

Each row runs alone and without its padding, and is judged as the survey judges typical text (`places`).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.measure import Setup
from sinkscope.models.checks import check_length
from sinkscope.models.inputs import read_inputs
from sinkscope.models.target import Target
from sinkscope.opening.open import open_target
from sinkscope.sinks.find.attention_received import LATER_QUERIES, attention_received
from sinkscope.sinks.find.layer_scan import LayerScan, scan_layers
from sinkscope.sinks.find.places import spike_places, stands_out
from sinkscope.sinks.find.survey import Survey
from sinkscope.sinks.tokens import TokenRows

LEAST_TYPICAL = 4  # tokens that a typical norm needs
Mask = Bool[Tensor, "batch pos"]


@torch.no_grad()
def sink_mask(model: object, ids: Any = None, *, attention_mask: Any = None, tokenizer: Any = None) -> Mask:
    """The positions of these ids with a norm spike, or that heads attend to as a sink, in one pass over each row.

    Nothing is assumed of a token or of a position. A position is in the mask if its norm is more than three times the
    typical one of its row after some layer (Sun et al. 2024), or if a twentieth of the heads attend to it, at the first
    position a hundredth, and at least two (Gu et al. 2024).

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
    """The residual dimensions that carry norm spikes: the fewest without which the norm no longer stands out.

    Typical text is read as by `find_sinks`. Of each spike the largest dimensions are taken, where it stands out most.

    Args:
        model: A live model, a name, or a Target. By default the model in the package.
        opening: How to open it and its text, as in `find_sinks`: `tokenizer`, `text`, `bos`, `dtype`, `device`.

    Returns:
        The dimensions, those of the first spike first, the largest first; empty if no norm stands out.

    Raises:
        SinkscopeError: The model or its text cannot be read.
    """
    survey = Survey.of(Setup.open(model, **opening))
    dims: list[int] = []
    for place in survey.spikes:
        dims += dims_of(survey.scan(place))
    return tuple(dict.fromkeys(dims))


def dims_of(scan: LayerScan) -> list[int]:
    """The fewest dimensions of a spike without which its norm no longer stands out, where it stands out most."""
    layer = int(scan.ratios.argmax())
    spike = scan.spike_after(layer).cpu().double()
    order = spike.abs().argsort(descending=True, stable=True)
    squares = spike[order].square()
    left = squares.flip(0).cumsum(0).flip(0).sqrt()  # the norm without those before each
    return order[stands_out(left, torch.tensor(scan.typical_norm[layer]))].tolist()


def _of_row(target: Target, ids: TokenRows) -> Mask:
    """The sinks of a row without padding."""
    received = attention_received(target, ids)
    if not bool(received.norms.isfinite().all()):
        raise SinkscopeError(f"{target.name} gives infinite or NaN norms in {target.dtype}: try float32")
    there = spike_places(received.norms)
    if not bool(there.any()) and ids.shape[1] >= LEAST_TYPICAL:  # massive dimensions may hide a spike
        there = spike_places(scan_layers(target, ids, whole=True).norms)
    end = max(0, ids.shape[1] - LATER_QUERIES)
    there[:, :end] |= received.places[:, :end]
    return there
