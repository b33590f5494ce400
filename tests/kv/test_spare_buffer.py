"""SpareBuffer after long caches: the same numbers as copying, with gradients and in inference mode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sinkscope.kv import growing_tensor as room
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.usage import allocated_slots


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
    """Attention has kept the keys of every step: those of 8 and of 9 slots."""
    layer, query = CacheLayer(), torch.ones(4, requires_grad=True)
    layer.update(*_tokens(6, 0))
    layer.update(*_tokens(1, 1))
    assert allocated_slots(layer) > layer.slots
    with torch.enable_grad():
        scores = [(layer.update(*_tokens(1, number))[0] @ query).sum() for number in (2, 3)]
        sum(scores).backward()
    assert allocated_slots(layer) == layer.slots == 9
    torch.testing.assert_close(query.grad, (layer.keys[:, :, :8].sum((0, 1, 2)) + layer.keys.sum((0, 1, 2))))


def test_what_was_filled_in_inference_mode_is_not_written_outside_of_it():
    layer = CacheLayer()
    with torch.inference_mode():
        keys, values = _tokens(6, 0)
        layer.update(keys, values)
        one = _tokens(1, 1)
        layer.update(*one)
        assert allocated_slots(layer) > layer.slots
    two = _tokens(1, 2)
    with torch.no_grad():
        layer.update(*two)
    _same(layer, (torch.cat([keys, one[0], two[0]], 2), torch.cat([values, one[1], two[1]], 2)))
