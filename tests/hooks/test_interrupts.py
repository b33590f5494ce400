"""A call that is interrupted leaves nothing behind: neither for the next call inside the `with`, nor for later ones."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from edit_kit import EDITS, IDS, MASK
from intervention_kit import count_hooks
from kv_kit import model_of
from organisms.tiny import attention_names

from sinkscope.engine.attention import STOCK


def generated(model) -> torch.Tensor:
    settings = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return torch.stack(model.generate(IDS[:, :9], attention_mask=MASK[:, :9], **settings).logits)


@pytest.mark.parametrize(
    ("way", "path", "call", "error"),
    [
        ("patch and h2o", "model.layers.1.self_attn.o_proj", 4, KeyboardInterrupt),
        ("snapkv", "model.norm", 2, SystemExit),
        ("guard", "lm_head", 2, RuntimeError),
        ("loopserve", "model.layers.0", 1, GeneratorExit),
    ],
)
def test_an_interrupted_call_leaves_nothing_for_the_next(way, path, call, error):
    """Where a module runs for the so-manieth time."""
    model = model_of("llama", num_hidden_layers=3)
    plain, before, calls = generated(model), (count_hooks(model), attention_names(model), {}), []

    def interrupt(*_):
        calls.append(1)
        if len(calls) == call:
            raise error

    with EDITS[way].on(model):
        expected = generated(model)
        with model.get_submodule(path).register_forward_pre_hook(interrupt), suppress(error):
            generated(model)
        assert len(calls) == call and torch.equal(generated(model), expected)
    assert (count_hooks(model), attention_names(model), STOCK) == before
    assert torch.equal(generated(model), plain)
