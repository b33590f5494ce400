"""Entering and leaving: what is refused, what stays behind (nothing), and what goes together."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch
from intervention_kit import bridge_of
from kv_kit import decode, prompts
from kv_kit import shallow_of as model_of
from organisms.examine import model_state
from organisms.tiny import tiny_model
from refusals import refused
from transformers import DynamicCache

import sinkscope as ss
from sinkscope.engine import attention
from sinkscope.kv import TOVA, Full, Observe, StreamingLLM
from sinkscope.loops.guard import LoopGuard
from sinkscope.opening.load import target_of
from sinkscope.sparse.progressive import Progressive
from sinkscope.sparse.serve import LoopServe
from sinkscope.sparse.shapes import AShape, TriShape

IDS, MASK = prompts([14, 9], 4)


def ignore(_):
    pass


@contextmanager
def unchanged(model):
    """What is done inside leaves a model as it was."""
    hf = target_of(model).hf

    def state():
        attributes = [sorted(vars(module)) for module in hf.modules()]
        return model_state(hf), attributes, dict(attention.STOCK)

    before = state()
    yield
    assert state() == before


STREAMING = StreamingLLM(budget=9)


@pytest.mark.parametrize(
    ("name", "edit", "said"),
    [
        ("llama", STREAMING | TOVA(budget=9), "StreamingLLM and TOVA would both"),
        ("llama", STREAMING | LoopServe(budget=8, first=0), "LoopServe"),
        ("llama", LoopGuard() | LoopGuard(anchors=4), "two guards"),
        ("llama", AShape() | TriShape(), "AShape and TriShape would both decide how prompts are read"),
        ("llama", Observe(ignore, layers=[2]), "layer 2 of .* has no softmax attention; these have: 0, 1"),
        ("bridge", ss.Knockout("first"), "a TransformerBridge computes its own attention.*plain Hugging Face"),
    ],
)
def test_unsupported_models_are_refused_at_the_with(name, edit, said):
    model = bridge_of(model_of("llama"), tiny_model("llama")[1]) if name == "bridge" else model_of(name)
    with unchanged(model), refused(said):
        edit.on(model).__enter__()


def test_a_model_inside_a_with_takes_no_other_policy(model):
    with unchanged(model), refused("already inside a `with`"), Full().on(model), STREAMING.on(model):
        pass


def test_a_thread_that_has_ended_holds_nothing_and_a_block_may_be_left_in_another_thread(model):
    block = STREAMING.on(model)
    with unchanged(model):
        entering = threading.Thread(target=block.__enter__)
        entering.start()
        entering.join()
        with TOVA(budget=8).on(model) as run:
            decode(model, IDS, MASK, 14)
        assert run.usage and not block.usage
        leaving = threading.Thread(target=block.__exit__, args=(None, None, None))
        leaving.start()
        leaving.join()


@pytest.mark.parametrize(
    ("edit", "settings", "said"),
    [
        (LoopGuard(), {"num_beams": 2}, "num_beams=1"),
        (LoopGuard(), {"prompt_lookup_num_tokens": 3}, "assist"),
        (Progressive(budget=8, every=2, after=0), {"num_beams": 3}, "num_beams=1"),
        (STREAMING, {"use_cache": False}, "use_cache=False.*generate with use_cache=True"),
        (AShape(first=4, local=8), {"prompt_lookup_num_tokens": 3}, "AShape would read these as a prompt"),
        (AShape(first=4, local=8), {"use_cache": False}, "without a cache each call is one"),
    ],
)
def test_unsupported_generation_is_refused(edit, settings, said, model):
    """Nothing is left of the refused call."""
    ids = IDS[:1]
    with unchanged(model), edit.on(model):
        with refused(said):
            model.generate(ids, max_new_tokens=8, **settings)
        assert model.generate(ids, max_new_tokens=4).shape[1] == ids.shape[1] + 4


def test_a_later_mask_that_hides_tokens_read_before_is_named(model):
    """As `generate` makes it, without a mask, of tokens that equal the padding token."""
    pad_id = model.config.pad_token_id
    first = torch.tensor([[1, 5, 6, pad_id, 8, 9]])
    cache = DynamicCache()
    both = torch.cat([first, torch.tensor([[12, 13, 14]])], 1)
    with StreamingLLM(budget=6).on(model), torch.no_grad():
        model(first, attention_mask=torch.ones_like(first), past_key_values=cache)
        with refused("hides 1 token that earlier calls have read; .*pad_token_id .*: pass attention_mask"):
            model.generate(both, past_key_values=cache, max_new_tokens=2)
        model.generate(both, attention_mask=torch.ones_like(both), past_key_values=cache, max_new_tokens=2)
