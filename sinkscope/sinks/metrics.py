"""`sink_metrics`: what the sink of a model is on some ids, as a few numbers for a logger."""

from __future__ import annotations

from typing import Any

import torch

from sinkscope.errors import SinkscopeError
from sinkscope.models.hooks import evaluating
from sinkscope.models.inputs import check_length, read_inputs
from sinkscope.opening.load import open_target
from sinkscope.sinks.spikes.survey import Survey, read_survey
from sinkscope.sinks.thresholds import LEAST_TYPICAL


def sink_metrics(
    model: object, ids: Any = None, *, attention_mask: Any = None, tokenizer: Any = None
) -> dict[str, float]:
    """Measure the sink of a model on these ids in one pass, for the logger of a training loop.

    The model is left as it is: no gradient is made, no random number is drawn, and dropout is off meanwhile. Rows of
    one length are read together, and others apart, without their padding.

    Args:
        model: A live model, a name, or a Target.
        ids: Token ids `[batch pos]`, also as lists of several lengths; texts; or a tokenizer's output.
        attention_mask: 1 for real tokens, 0 for padding, `[batch pos]`.
        tokenizer: Tokenizer for texts, if the model carries none.

    Returns:
        `sink_rate`: share of the heads that give position 0 more than 0.3 of their attention (Gu et al. 2024), mean
        over rows; left out if no layer attends. `norm_ratio`: the largest norm of the residual stream after any layer
        over the typical one of this layer, the median, mean over rows; `norm_layer` and `norm_position`: where it is,
        in most rows.

    Raises:
        SinkscopeError: The ids or the mask are invalid for this model, a row is longer than its context, or all rows
            are too short for a typical norm.

    Example:
        wandb.log(ss.sink_metrics(model, batch["input_ids"]), step=step)
    """
    target = open_target(model, tokenizer)
    inputs = read_inputs(target, ids, attention_mask)
    by_length: dict[int, list[list[int]]] = {}
    for row in inputs.rows:
        by_length.setdefault(len(row), []).append(row)
    longest = max(by_length)
    check_length(target, "the longest row", longest)
    if longest < LEAST_TYPICAL:
        raise SinkscopeError(f"the longest row has {longest} tokens: a typical norm needs {LEAST_TYPICAL}, give more")
    with torch.no_grad(), evaluating(target.hf):  # a pass without dropout draws no random number
        surveys: list[Survey] = []
        for length, rows in by_length.items():
            if length >= LEAST_TYPICAL:
                surveys.append(read_survey(target, torch.tensor(rows), reads_mlp=False))
    return metrics_of(surveys)


def metrics_of(surveys: list[Survey]) -> dict[str, float]:
    """Return the numbers of `sink_metrics` from surveys of rows of one length each."""
    metrics: dict[str, float] = {}
    if surveys[0].target.attending:
        metrics["sink_rate"] = float(torch.cat([survey.sink_rate for survey in surveys]).mean())
    ratios: list[float] = []
    places: list[tuple[int, int]] = []
    for survey in surveys:
        for of_row in survey.ratios.unbind(1):
            layer, position = divmod(int(of_row.argmax()), of_row.shape[1])
            ratios.append(float(of_row.max()))
            places.append((layer, position))
    layer, position = max(dict.fromkeys(places), key=places.count)
    return metrics | {"norm_ratio": sum(ratios) / len(ratios), "norm_layer": layer, "norm_position": position}
