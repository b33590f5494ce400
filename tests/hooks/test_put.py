"""Put: values of another prompt, against plain torch hooks, and put back where they came from."""

from __future__ import annotations

import pytest
import torch
from intervention_kit import logits
from organisms import tiny_model
from refusals import refused
from torch.testing import assert_close

import sinkscope as ss

IDS = torch.tensor([[1, 5, 6, 7, 8, 9], [1, 20, 21, 22, 23, 24]])
OTHER = torch.tensor([[1, 40, 41, 42, 43, 44]])
SITE = "blocks.1.hook_resid_post"


def test_values_of_another_prompt_are_put_as_by_a_plain_hook():
    """In padded rows at the same real positions, and in what `generate` reads."""
    model = tiny_model("llama")[0]
    values = ss.trace(model, OTHER, SITE)[SITE][0, [4, 2]]

    def put(_module, _args, output, columns=(4, 2)):
        hidden = output[0] if isinstance(output, tuple) else output
        hidden[:, columns] = values
        return output

    handle = model.model.layers[1].register_forward_hook(put)
    want = logits(model, IDS)
    written = model.generate(IDS, max_new_tokens=1, do_sample=False)
    handle.remove()
    assert not torch.equal(want, logits(model, IDS))
    with ss.Put(values, SITE, positions=[4, 2]).on(model) as run:
        assert_close(logits(model, IDS), want)
        assert run.counts["put"] > 0
        assert torch.equal(model.generate(IDS, max_new_tokens=1, do_sample=False), written)
        left = torch.cat([torch.full((2, 2), 3), IDS], 1)
        mask = (torch.arange(8) >= 2).long().expand(2, -1)
        padded = model(left, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
        assert_close(padded[:, 2:], want, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("model_type", ["llama", "granite", "gpt2"])
@pytest.mark.parametrize("part", ["hook_resid_pre", "hook_attn_out", "hook_mlp_out", "hook_resid_post"])
def test_values_at_their_own_place_change_nothing(model_type, part):
    """Also where a layer multiplies what it adds; all positions after the last layer give the other prompt's logits."""
    model = tiny_model(model_type)[0]
    site = f"blocks.1.{part}"
    want = logits(model, OTHER)
    with ss.Put(ss.trace(model, OTHER, site)[site][0], site, range(6)).on(model):
        assert_close(logits(model, OTHER), want, atol=1e-5, rtol=1e-4)
    last = "blocks.2.hook_resid_post"
    with ss.Put(ss.trace(model, OTHER, last)[last][0], last, range(6)).on(model):
        assert_close(logits(model, IDS[:1]), want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("values", "site", "positions", "says"),
    [
        (torch.zeros(2, 32), SITE, [1], "values of shape (2, 32) for 1 positions: expected finite numbers"),
        (torch.full((32,), torch.nan), SITE, 1, "expected finite numbers"),
        (torch.zeros(32), SITE, None, "positions=None: expected"),
        (torch.zeros(31), SITE, "first", "vector of 31 numbers"),
        (torch.zeros(32), "blocks.*.hook_resid_post", 0, "names several"),
        (torch.zeros(32), "hook_embed", 0, "expected a site of the residual stream, hook_resid_pre"),
    ],
)
def test_what_cannot_be_put_is_refused(values, site, positions, says):
    with refused(words=[says]):
        ss.Put(values, site, positions).on(tiny_model("llama")[0]).__enter__()
