"""Sums whose order does not matter, as a GPU needs them."""

from __future__ import annotations

import pytest
import torch

from sinkscope.lines.deterministic_scatter import add_at


def test_every_order_gives_the_same_bits():
    dtype = torch.float32
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(3, 5000, generator=generator, dtype=dtype).pow(20)
    values = values / values.sum(1, keepdim=True)
    index = torch.randint(0, 7, (3, 5000), generator=generator)
    plain = set()
    found = set()
    for seed in range(5):
        order = torch.randperm(5000, generator=torch.Generator().manual_seed(seed))
        into = torch.zeros(3, 7, dtype=dtype)
        given = index[:, order], values[:, order], 1.5
        plain.add(add_at(into.clone(), *given, in_order=True).numpy().tobytes())
        found.add(add_at(into.clone(), *given, in_order=False).numpy().tobytes())
    assert len(found) == 1 < len(plain), "the test needs numbers whose sum depends on the order"
    wanted = torch.zeros(3, 7, dtype=torch.float64).scatter_add_(1, index, values.double())
    off = add_at(torch.zeros(3, 7, dtype=dtype), index, values, 1.5, in_order=False).double() - wanted
    assert float((off / wanted).abs().max()) < 2 * torch.finfo(dtype).eps


def test_small_numbers_keep_their_digits_and_what_was_there_stays():
    into = torch.tensor([[-torch.inf, 2.0, 0.0]])
    found = add_at(into, torch.tensor([[1, 2, 2]]), torch.tensor([[-0.5, 3e-12, 4e-12]]), 100, in_order=False)
    assert found is into and found[0, 0] == -torch.inf and found[0, 1] == 1.5
    assert float(found[0, 2]) == pytest.approx(7e-12, rel=1e-4)
