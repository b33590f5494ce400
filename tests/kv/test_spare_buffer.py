"""SpareBuffer behind long caches: the same numbers as copying, and nobody's tokens in another's cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sinkscope.interventions import growing_tensor as room
from sinkscope.kv.cache import CacheLayer


def _tokens(n: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(2, 3, n, 4, generator=generator), torch.rand(2, 3, n, 5, generator=generator)


def _same(layer: CacheLayer, expected: tuple[Tensor, Tensor]):
    assert torch.equal(layer.keys, expected[0]) and torch.equal(layer.values, expected[1])


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(room, "LONG", 4)
    monkeypatch.setattr(room, "SPARE", 3)
    with torch.no_grad():
        yield


def test_nothing_is_written_into_what_gradients_need():
    """Those of keys, and of queries alone: attention has kept the keys of every step."""
    layer, (keys, values) = CacheLayer(), _tokens(6, 0)
    layer.update(keys, values)
    layer.update(*_tokens(1, 1))
    assert layer.allocated > layer.slots
    query, one, scores = torch.ones(4, requires_grad=True), _tokens(1, 2)[0].requires_grad_(), torch.zeros(())
    with torch.enable_grad():
        for new in (_tokens(1, 1), (one, _tokens(1, 2)[1]), _tokens(1, 3)):
            held = layer.update(*new)[0]
            assert layer.allocated == layer.slots
            scores = scores + (held @ query).sum()
    scores.backward()
    assert query.grad is not None and bool((one.grad == 2).all())
    steps = [torch.cat([keys, _tokens(1, 1)[0], _tokens(1, 1)[0]], 2), one.detach(), _tokens(1, 3)[0]]
    torch.testing.assert_close(query.grad, sum((3 - n) * t.sum((0, 1, 2)) for n, t in enumerate(steps)))


def test_what_was_filled_in_inference_mode_is_not_written_outside_of_it():
    layer = CacheLayer()
    with torch.inference_mode():
        keys, values = _tokens(6, 0)
        layer.update(keys, values)
        one = _tokens(1, 1)
        layer.update(*one)
        assert layer.allocated > layer.slots
    two = _tokens(1, 2)
    with torch.no_grad():
        layer.update(*two)
    _same(layer, (torch.cat([keys, one[0], two[0]], 2), torch.cat([values, one[1], two[1]], 2)))
