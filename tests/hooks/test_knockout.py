"""Attention knockout, beside the plain model under a 4-D mask. The net of ways draws families, masks and caches."""

from __future__ import annotations

from contextlib import nullcontext

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


@pytest.mark.parametrize(
    "edit",
    [
        ss.Knockout("first", layers=[1]),
        ss.Knockout("first", heads=[(0, 1), (1, 2)]),
        ss.Knockout([3], queries=slice(9, 15)),
        HideCells(cells([1, 4])[:1]),
    ],
    ids=["layer", "heads", "queries", "pairs"],
)
def test_a_cache_of_fixed_size_hides_what_a_growing_one_does(edit):
    """Its masks are wider than the text, so that a call's queries are not their last columns."""
    model = tiny_model("llama")[0]
    said = []
    for kind in (None, "dynamic", "static"):
        with nullcontext() if kind is None else edit.on(model):
            said.append(
                model.generate(
                    IDS[:1], max_new_tokens=6, min_new_tokens=6, do_sample=False, output_logits=True, pad_token_id=0,
                    return_dict_in_generate=True, cache_implementation=kind,
                )
            )  # fmt: skip
    plain, growing, fixed = (torch.stack(one.logits) for one in said)
    torch.testing.assert_close(fixed, growing, atol=1e-5, rtol=1e-4)
    assert (growing[0] - plain[0]).abs().max() > 1e-3


def test_heads_may_be_given_in_two_forms():
    model = tiny_model("llama")[0]
    logits = []
    for heads in ([(1, 2)], "L1.H2"):
        with torch.no_grad(), ss.Knockout("first", heads=heads).on(model):
            logits.append(model(input_ids=IDS).logits)
    assert torch.equal(*logits)
    with torch.no_grad():
        assert not torch.allclose(model(input_ids=IDS).logits, logits[0], atol=1e-4)


def test_other_heads_see_the_key():
    model = tiny_model("llama")[0]
    hidden = cells([0])[:, None].repeat(1, model.config.num_attention_heads, 1, 1)
    hidden[:, [0, 3]] = False
    want = under(model, hidden)
    with (
        torch.no_grad(),
        ss.Knockout(
            "first", heads=[(layer, head) for layer in range(model.config.num_hidden_layers) for head in (1, 2)]
        ).on(model),
    ):
        torch.testing.assert_close(model(input_ids=IDS).logits, want, atol=2e-5, rtol=1e-4)


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


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (ss.Knockout("first", layers=[9]), "layer 9 is not in"),
        (ss.Knockout("first", heads=[(0, 99)]), "head 99 is not in"),
    ],
)
def test_a_model_without_these_heads_is_refused(edit, said):
    with refused(said), edit.on(tiny_model("llama")[0]):
        pass
