"""Attention knockout, beside the plain model under a 4-D mask. The net of ways draws families, masks and caches."""

from __future__ import annotations

import pytest
import torch
from intervention_kit import bridge_of
from organisms import tiny_model
from refusals import refused

import sinkscope as ss
from sinkscope.hooks.edit.knockout import HideCells

IDS = torch.arange(5, 17)[None].repeat(2, 1) + torch.tensor([[0], [3]])
LENGTH = IDS.shape[1]


def under(model, hidden):
    """Logits of the plain model whose mask hides these cells `[batch query key]`."""
    if hidden.ndim == 3:
        hidden = hidden[:, None]
    sees = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & ~hidden
    with torch.no_grad():
        return model(input_ids=IDS, attention_mask=sees, use_cache=False).logits


def cells(keys, queries=None):
    """Cells of keys and queries at these positions, without a query's own."""
    hidden = torch.zeros(2, LENGTH, LENGTH, dtype=torch.bool)
    for key in keys:
        hidden[:, slice(None) if queries is None else queries, key] = True
    return hidden & ~torch.eye(LENGTH, dtype=torch.bool)


@pytest.mark.parametrize(
    ("edit", "hidden"),
    [
        (ss.Knockout("first"), cells([0])),
        (ss.Knockout([0, 3]), cells([0, 3])),
        (ss.Knockout(2, queries=slice(5, 8)), cells([2], slice(5, 8))),
        (ss.Knockout([6, 9], queries=[6, 9]), cells([6, 9], [6, 9])),
        (HideCells(cells([1, 4]) | torch.eye(LENGTH, dtype=torch.bool)), cells([1, 4])),
    ],
    ids=["first", "positions", "queries", "itself", "pairs"],
)
def test_a_knockout_of_a_bridge_is_a_mask(edit, hidden):
    """Of plain models the net draws this (`tests/ways`)."""
    bridge = bridge_of(*tiny_model("llama"))
    with torch.no_grad(), edit.on(bridge):
        got = bridge(IDS)
    torch.testing.assert_close(got, under(tiny_model("llama")[0], hidden), atol=2e-5, rtol=1e-4)


def test_heads_may_be_given_in_two_forms():
    model = tiny_model("llama")[0]
    logits = []
    for heads in ([(1, 2)], "L1.H2"):
        with torch.no_grad(), ss.Knockout("first", heads=heads).on(model):
            logits.append(model(input_ids=IDS).logits)
    assert torch.equal(*logits)
    with torch.no_grad():
        assert not torch.allclose(model(input_ids=IDS).logits, logits[0], atol=1e-4)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ss.Knockout(None), "keys=None: expected positions"),
        (lambda: ss.Knockout(cells([1])), 'keys .*expected "first", whole numbers from 0'),
        (lambda: ss.Knockout("last"), "keys 'last'"),
        (lambda: ss.Knockout("first", layers=[0], heads=["L1.H2"]), "heads name their layers"),
    ],
)
def test_bad_input_is_refused_in_a_line(make, said):
    with refused(said):
        make()
