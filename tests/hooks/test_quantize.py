"""Rounding, against plain hooks."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from intervention_kit import count_hooks
from organisms import Organism, organism
from organisms.decoders import decoder
from raw_kit import blocks
from refusals import refused
from rounding_kit import ByHand, divergence, enlarge, logs_by_hand
from torch.testing import assert_close

from sinkscope.errors import UnsupportedError
from sinkscope.hooks.edit import Quantize

TOKENS = {"positions": "first", "places": [(1, 7)]}
DOWN = {"llama": "mlp.down_proj", "gpt2": "mlp.c_proj"}


@cache
def model_of(family: str) -> Organism:
    return organism(family, 1)


@cache
def ids_of(family: str) -> torch.Tensor:
    return model_of(family).natural(3, 24)


# --- against plain hooks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "what"), [("llama", "activations"), ("gpt2", "activations"), ("llama", "kv")])
@pytest.mark.parametrize("scale", ["token", "tensor"])
def test_quantize_equals_rounding_by_hand(family, scale, what):
    model, ids = model_of(family).model, ids_of(family)
    neurons = [(1, 3), (2, 5)]
    exact = torch.zeros_like(ids, dtype=torch.bool)
    exact[:, 0] = exact[1, 7] = True
    how = ByHand(**{what: 6}, scale=scale, tokens=exact, neurons=neurons, layers=[0], down=DOWN[family])
    expected = logs_by_hand(model, ids, how)
    edit = Quantize(**{what: 6}, scale=scale, **TOKENS, neurons=neurons, layers=[0])
    with edit.on(model), torch.no_grad():
        found = model(ids, use_cache=False).logits.log_softmax(-1)
    assert_close(found, expected, atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        assert (model(ids).logits.log_softmax(-1) - expected).abs().max() > 1e-3
    assert count_hooks(model) == 0


def test_a_scale_for_all_tokens_keeps_the_largest_value_so_far():
    """The first token's own value sets the scale of a token that is read alone after it."""
    o, ids = organism("llama", 1), ids_of("llama")
    enlarge(o.model, o.truth.neurons)
    seen = []
    handle = blocks(o.model)[o.truth.neurons[0][0]].mlp.down_proj.register_forward_hook(
        lambda _m, args, _out: seen.append(args[0])
    )
    try:
        with Quantize(activations=8, scale="tensor").on(o.model), torch.no_grad():
            out = o.model(ids[:, :1], use_cache=True)
            o.model(ids[:, 1:2], past_key_values=out.past_key_values)
    finally:
        handle.remove()
    step = seen[0].abs().amax((1, 2), keepdim=True) / 127
    assert_close(seen[1] / step, (seen[1] / step).round(), atol=1e-3, rtol=0)
    assert (seen[1] == 0).float().mean() > 0.5


def test_rounding_everything_is_no_edit_that_never_acted(recwarn):
    o, ids = model_of("llama"), ids_of("llama")
    with Quantize(kv=4).on(o.model), torch.no_grad():
        o.model(ids)
    assert not [one for one in recwarn if "never acted" in str(one.message)]


def test_padding_and_other_rows_make_no_difference():
    o, ids = model_of("llama"), ids_of("llama")
    padded = torch.cat([torch.zeros(3, 4, dtype=torch.long), ids], 1)
    mask = (torch.arange(28) >= 4).long().expand(3, -1)
    for edit in (Quantize(activations=6, scale="tensor", positions="first"), Quantize(kv=4, scale="tensor")):
        with edit.on(o.model), torch.no_grad():
            alone = torch.cat([o.model(row[None]).logits for row in ids])
            batch = o.model(padded, attention_mask=mask).logits[:, 4:]
        assert divergence(alone.log_softmax(-1), batch.log_softmax(-1)).max() < 2e-5


def test_layers_without_an_mlp_are_rounded():
    """Of the four layers, two have no MLP, and layer 1 is a mixture."""
    model, ids = decoder("nemotron_h"), torch.tensor([[1, 5, 6, 7]])
    with torch.no_grad():
        plain = model(ids).logits
        with Quantize(activations=4, layers=[1]).on(model):
            assert (model(ids).logits - plain).abs().max() > 1e-3


# --- with others, and what it says -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, ("nothing is to be rounded", "activations=8")),
        ({"activations": 1}, ("1", "2")),
        ({"kv": 8, "places": [(1, 2), (3, 0)]}, ("places has (3, 0)", "3 rows", "from 0 to 2")),
        ({"kv": 8, "layers": [1.5]}, ("layers", "1.5")),
        ({"activations": 8, "layers": [99]}, ("layer 99",)),
        ({"activations": 8, "neurons": ["L1.N99999"]}, ("99999",)),
    ],
)
def test_wrong_settings_and_what_the_model_lacks_are_refused(fields, words):
    model = model_of("llama").model
    with refused(words=words), Quantize(**fields).on(model), torch.no_grad():
        model(ids_of("llama"))
    assert count_hooks(model) == 0


def test_experts_are_refused_but_their_keys_and_values_are_rounded():
    o = organism("mixtral", 0)
    with pytest.raises(UnsupportedError, match=r"mixture.*kv=8"), Quantize(activations=8).on(o.model):
        pass
    ids = o.natural(1, 8)
    with torch.no_grad():
        plain = o.model(ids).logits
        with Quantize(kv=4, positions=None).on(o.model) as run:  # None is no token, which for other edits is every one
            assert (o.model(ids).logits - plain).abs().max() > 1e-3
    assert run.summary() == "Quantize acted in 1 call."
