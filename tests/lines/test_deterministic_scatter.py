"""Sums whose order does not matter, as a GPU needs them."""

from __future__ import annotations

import pytest
import torch

from sinkscope.lines.deterministic_scatter import add_at


def test_every_order_gives_the_same_bits():
    values = torch.rand(3, 5000).pow(20)
    values = values / values.sum(1, keepdim=True)
    index = torch.randint(0, 7, (3, 5000))
    sums = {True: set(), False: set()}
    for _ in range(5):
        order = torch.randperm(5000)
        for in_order, seen in sums.items():
            total = add_at(torch.zeros(3, 7), index[:, order], values[:, order], 1.5, in_order=in_order)
            seen.add(total.numpy().tobytes())
    assert len(sums[False]) == 1 < len(sums[True]), "the test needs numbers whose sum depends on the order"
    wanted = torch.zeros(3, 7, dtype=torch.float64).scatter_add_(1, index, values.double())
    found = add_at(torch.zeros(3, 7), index, values, 1.5, in_order=False)
    torch.testing.assert_close(found.double(), wanted, rtol=2 * torch.finfo(torch.float32).eps, atol=0)


def test_small_numbers_keep_their_digits_and_what_was_there_stays():
    into = torch.tensor([[-torch.inf, 2.0, 0.0]])
    found = add_at(into, torch.tensor([[1, 2, 2]]), torch.tensor([[-0.5, 3e-12, 4e-12]]), 100, in_order=False)
    assert found is into and found[0, 0] == -torch.inf and found[0, 1] == 1.5
    assert float(found[0, 2]) == pytest.approx(7e-12, rel=1e-4)
