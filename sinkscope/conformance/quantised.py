"""The check of caches that round keys and values."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from transformers import DynamicCache

from sinkscope.conformance.flow import Flow
from sinkscope.conformance.kit import ApartError, FaultError, Kit, check
from sinkscope.conformance.models import kit_model
from sinkscope.conformance.recorder import Recorder
from sinkscope.conformance.subject import entered, made
from sinkscope.models.call_cache import cache_argument

Layers = dict[int, tuple[Tensor, Tensor]]
"""Of each layer, keys beside values as they were written and as they come back."""
_LOSS = 0.01  # nats
_BEYOND = 4.0  # times the worst of the other tokens


@check
def rounding_the_sink_costs_no_more_than_rounding_others(kit: Kit) -> str:
    """The error of keys and values at the first token, by what it costs, beside the same at other tokens."""
    expected = f"less than {_LOSS} nats, or than {_BEYOND:g} times what rounding another token costs"
    worst, control = 0.0, 0.0
    for flow in (Flow(steps=8), Flow(model="bundled", lengths=(48,), steps=8)):
        try:
            kit.outcome(replace(flow, steps=1))
        except FaultError as error:
            raise ApartError(f"keys and values cannot be read: {error.seen}") from None
        layers = _rounded(kit, flow)
        if not layers:
            raise ApartError("keys and values come back as they were written, those of the first token apart")
        exact = _after(flow, layers, None)
        own = _loss(_after(flow, layers, 0), exact)
        others: list[float] = []
        for column in range(3, flow.prompt, flow.prompt // 6):
            others.append(_loss(_after(flow, layers, column), exact))
        seen = f"{own:.2g} nats; at most {max(others):.2g} at {len(others)} other tokens"
        if own > _LOSS and own > _BEYOND * max(others):
            raise FaultError(expected, seen, flow)
        worst, control = max(worst, own), max(control, *others)
    return f"{worst:.2g} nats, at other tokens {control:.2g}"


@torch.no_grad()
def _rounded(kit: Kit, flow: Flow) -> Layers:
    """Keys and values of the prompt as they were written and as they come back; empty if at most the first changes."""
    model, ids = kit_model(flow.model), flow.tokens()[0]
    with entered(made(kit.factory, model, flow.prompt, None), model) as cache:
        recorder = Recorder(cache)
        for part in (ids[:, : flow.prompt], ids[:, flow.prompt : flow.prompt + 1]):
            model(input_ids=part, **cache_argument(model, cache))
    layers: Layers = {}
    same = True
    for layer, (written, handed) in recorder.pairs().items():
        before = torch.cat(written, -1)[:, :, : flow.prompt]
        after = torch.cat(handed, -1)[:, :, : flow.prompt]
        if before.shape != after.shape:
            raise ApartError(f"only {handed[0].shape[2]} of {written[0].shape[2]} tokens come back")
        same = same and torch.allclose(before[:, :, 1:], after[:, :, 1:], atol=1e-6)
        layers[layer] = (before, after)
    return {} if same else layers


@torch.no_grad()
def _after(flow: Flow, layers: Layers, column: int | None) -> Tensor:
    """Log-probabilities after the prompt, if one column of it is as the cache hands it out."""
    cache = DynamicCache()
    for layer, (written, handed) in layers.items():
        held = written.clone()
        if column is not None:
            held[:, :, column] = handed[:, :, column]
        keys, values = held.chunk(2, -1)
        cache.update(keys, values, layer)
    model = kit_model(flow.model)
    return model(input_ids=flow.tokens()[0][:, flow.prompt :], **cache_argument(model, cache)).logits.log_softmax(-1)


def _loss(logits: Tensor, exact: Tensor) -> float:
    return float((exact.exp() * (exact - logits)).sum(-1).mean())
