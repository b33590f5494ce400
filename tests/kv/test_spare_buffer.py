"""SpareBuffer after long caches: the same numbers as copying, with gradients and in inference mode."""

from __future__ import annotations

import pytest
import torch
from kv_kit import allocated_slots, append
from torch import Tensor

from sinkscope.kv import cache as room
from sinkscope.kv.cache import CacheLayer


def _tokens(n: int) -> tuple[Tensor, Tensor]:
    return torch.rand(2, 3, n, 4), torch.rand(2, 3, n, 5)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(room, "COPY_LIMIT", 4)
    monkeypatch.setattr(room, "SPARE", 3)
    with torch.no_grad():
        yield


def test_nothing_is_written_into_what_gradients_need():
    """Attention has kept the keys of every step: those of 8 and of 9 slots."""
    layer, query = CacheLayer(), torch.ones(4, requires_grad=True)
    append(layer, *_tokens(6))
    append(layer, *_tokens(1))
    assert allocated_slots(layer) > layer.slots
    with torch.enable_grad():
        scores = [(append(layer, *_tokens(1))[0] @ query).sum() for _ in range(2)]
        sum(scores).backward()
    assert allocated_slots(layer) == layer.slots == 9
    torch.testing.assert_close(query.grad, (layer.keys[:, :, :8].sum((0, 1, 2)) + layer.keys.sum((0, 1, 2))))


def test_what_was_filled_in_inference_mode_is_not_written_outside_of_it():
    layer = CacheLayer()
    given = [_tokens(6), _tokens(1), _tokens(1)]
    with torch.inference_mode():
        append(layer, *given[0])
        append(layer, *given[1])
        assert allocated_slots(layer) > layer.slots
    with torch.no_grad():
        append(layer, *given[2])
    keys, values = zip(*given, strict=True)
    assert torch.equal(layer.keys, torch.cat(keys, 2)) and torch.equal(layer.values, torch.cat(values, 2))


def test_copies_append_in_the_room_that_they_share_and_behind_its_end():
    layer = CacheLayer()
    append(layer, *_tokens(6))
    append(layer, *_tokens(1))
    pairs = [(layer, [layer.keys.clone()]), (layer.copy(), [layer.keys.clone()])]
    for _ in range(5):  # more than fit
        for each, keys in pairs:
            given = _tokens(1)
            append(each, *given)
            keys.append(given[0])
    for each, keys in pairs:
        assert torch.equal(each.keys, torch.cat(keys, 2))
