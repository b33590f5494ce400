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
from torch import nn

from sinkscope.engine.stock import STOCK
from sinkscope.kv import H2O

IDS, MASK = prompts([9, 6])
STEPS = 4
LAYERS = 3


class Stop(BaseException):
    pass


@pytest.fixture(scope="module")
def model():
    return model_of("llama", num_hidden_layers=LAYERS)


def generated(model):
    return model.generate(
        IDS,
        attention_mask=MASK,
        max_new_tokens=STEPS,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )


def same(one, other) -> bool:
    scores = zip(one.scores, other.scores, strict=True)
    return torch.equal(one.sequences, other.sequences) and all(torch.equal(a, b) for a, b in scores)


def interrupted(model, place: nn.Module, call: int, error: type[BaseException]) -> None:
    """Generate until `place` runs for the so-manieth time, and is interrupted there."""
    calls = []

    def interrupt(*_):
        calls.append(1)
        if len(calls) == call:
            raise error

    handle = place.register_forward_pre_hook(interrupt)
    try:
        with suppress(error):
            generated(model)
    finally:
        handle.remove()
    assert len(calls) == call


PLACES = ["model.layers.0", "model.layers.1.self_attn.o_proj", "model.layers.2.mlp.down_proj", "model.norm", "lm_head"]
ERRORS = [KeyboardInterrupt, SystemExit, GeneratorExit, Stop, RuntimeError]


@pytest.mark.parametrize(("way", "path"), each_other(EDITS, PLACES, 2 * len(PLACES)))
def test_an_interrupted_call_leaves_nothing_for_the_next(way, path, model):
    number = [*EDITS].index(way) + PLACES.index(path)
    call, error = (1, 2, 4)[number % 3], ERRORS[number % 5]
    plain = generated(model)
    hooks, attention = count_hooks(model), attention_names(model)
    with EDITS[way].on(model):
        expected = generated(model)
        interrupted(model, model.get_submodule(path), call, error)
        again = generated(model)
        assert same(again, expected)
    assert (count_hooks(model), attention_names(model)) == (hooks, attention)
    assert STOCK == {}
    assert same(generated(model), plain)
    with H2O(budget=6).on(model) as run:  # every later policy came upon what was left
        generated(model)
    assert len(run.usage) == 1
