"""A call that is interrupted leaves nothing behind: neither for the next call inside the `with`, nor for later ones."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from covering import each_other
from edit_kit import EDITS
from intervention_kit import count_hooks
from kv_kit import model_of, prompts
from organisms.tiny import attention_names

from sinkscope.engine.stock import STOCK
from sinkscope.kv import H2O

IDS, MASK = prompts([9, 6])
PLACES = ["model.layers.0", "model.layers.1.self_attn.o_proj", "model.layers.2.mlp.down_proj", "model.norm", "lm_head"]
ERRORS = [KeyboardInterrupt, SystemExit, GeneratorExit, RuntimeError]


def generated(model) -> torch.Tensor:
    settings = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return torch.stack(model.generate(IDS, attention_mask=MASK, **settings).logits)


def interrupted(model, path: str, call: int, error: type[BaseException]) -> None:
    """Generate until a module runs for the so-manieth time, and is interrupted there."""
    calls = []

    def interrupt(*_):
        calls.append(1)
        if len(calls) == call:
            raise error

    handle = model.get_submodule(path).register_forward_pre_hook(interrupt)
    with suppress(error):
        generated(model)
    handle.remove()
    assert len(calls) == call


@pytest.mark.parametrize(("way", "path"), each_other(EDITS, PLACES, 2 * len(PLACES)))
def test_an_interrupted_call_leaves_nothing_for_the_next(way, path):
    model = model_of("llama", num_hidden_layers=3)
    number = [*EDITS].index(way) + PLACES.index(path)
    plain, hooks, attention = generated(model), count_hooks(model), attention_names(model)
    with EDITS[way].on(model):
        expected = generated(model)
        interrupted(model, path, (1, 2, 4)[number % 3], ERRORS[number % 4])
        assert torch.equal(generated(model), expected)
    assert (count_hooks(model), attention_names(model), STOCK) == (hooks, attention, {})
    assert torch.equal(generated(model), plain)
    with H2O(budget=6).on(model) as run:  # every later policy came upon what was left
        generated(model)
    assert len(run.usage) == 1
