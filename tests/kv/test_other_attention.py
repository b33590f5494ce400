"""Attention that a module computes itself is read and edited, and no policy acts on it; latent vectors and indexers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from checkpoints import checkpoint
from kv_kit import Drawn, prompts
from organisms.decoders import byte_tokenizer, decoder
from organisms.examine import model_state
from raw_kit import attention
from refusals import refused
from torch import Tensor

import sinkscope as ss
from sinkscope.kv import H2O, Full, Observe, StreamingLLM
from sinkscope.kv.policy import LayerMoment
from sinkscope.lines.shapes import AShape
from sinkscope.loops.barcode import barcode
from sinkscope.opening.live import target_of

WAYS = [Full(), H2O(20), ss.LoopGuard(budget=20), ss.LoopServe(20), AShape(), Observe(lambda _: None)]


@pytest.mark.parametrize("model_type", ["bloom", "falcon", "gptj", "mpt", "gpt_neo"])
def test_nothing_acts_on_attention_inside_modules(model_type):
    model = decoder(model_type)
    target_of(model)
    before = model_state(model)
    entered = [way.on(model).__enter__ for way in WAYS]
    for act in [*entered, partial(barcode, model, ids=[5, 6, 7], tokenizer=byte_tokenizer())]:
        with refused(f"a model of type '{model_type}' computes attention inside its modules.*: use another model for"):
            act()
        assert model_state(model) == before


def test_a_command_says_which_models_policies_act_on(refusal):
    folder = str(checkpoint("falcon"))
    said = refusal(["generate", "poem", "--model", folder, "--policy", "streaming:8", "--guard"])
    assert "a model of type 'falcon' computes attention inside its modules" in said


@dataclass(frozen=True, kw_only=True)
class Voting(Drawn):
    """Compares the attention of the last queries with weights that are known, and notes how far they are off."""

    known: dict[int, Tensor]
    off: dict[int, float]

    def watch(self, session):
        session.window_queries(4)

    def scores(self, at: LayerMoment):
        rows = at.window_rows(4)
        self.off[at.layer] = float((rows[0] - self.known[at.layer][:, -4:]).abs().max())
        return super().scores(at)


@torch.no_grad()
def test_the_last_queries_vote_by_the_attention_of_a_model_with_latent_vectors():
    model = decoder("deepseek_v2")
    ids = prompts([30])[0]
    known = dict(enumerate(attention(model, ids)[:, 0]))
    policy = Voting(budget=10, known=known, off={})
    with policy.on(model):
        cache = model(input_ids=ids, use_cache=True).past_key_values
        model(input_ids=ids[:, -1:], past_key_values=cache, use_cache=True)
    assert policy.off.keys() == known.keys() and max(policy.off.values()) < 1e-5


@pytest.mark.parametrize("model_type", ["deepseek_v32", "minimax_m3_vl_text"])
def test_the_keys_of_an_indexer_are_refused(model_type):
    with refused("the cache of .* is not a plain key/value cache .*an indexer selects keys.*: use another model"):
        StreamingLLM(budget=20).on(decoder(model_type)).__enter__()
