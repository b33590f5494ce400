"""Policies on attention that is computed elsewhere: by the module itself or from latent vectors.

Truth is one pass over everything without a cache, whose attention modules get a mask made of the positions that were
kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from covering import every_nth, slow
from kv_kit import Drawn, Ragged, beside_ids, close, masks_of_run, prompts, run_policy
from organisms.decoders import decoder
from raw_kit import attention
from refusals import refused
from torch import Tensor

from sinkscope.kv import H2O, StreamingLLM
from sinkscope.kv.policy import LayerMoment
from sinkscope.lines.serve.progressive import Progressive
from sinkscope.lines.shapes import AShape
from sinkscope.opening.live import target_of

PROMPT, LENGTHS, STEPS = 70, [70, 57], 5  # more than every window and top-k
TOTAL = PROMPT + STEPS


def masked(model_type: str, shown: Tensor, heads: int):
    """A hook that gives an attention module a mask of the kind that it takes."""
    if shown.shape[1] > 1:
        shown = shown.repeat_interleave(heads // shown.shape[1], 1)
    if (shown == shown[:, :1]).all():
        shown = shown[:, :1]
    given = torch.zeros(shown.shape).masked_fill_(~shown, torch.finfo(torch.float32).min)
    if model_type == "mpt":
        given = ~shown
    return lambda _module, args, kwargs: (args, {**kwargs, "attention_mask": given})


POLICIES = {
    "drawn": Drawn,
    "ragged": Ragged,
    "h2o": H2O,
    "streaming": StreamingLLM,
    "progressive": partial(Progressive, every=2, after=0),
}
QUICK = """
bloom drawn 20
mpt progressive 20
gptj drawn 20
falcon ragged 20
"""
SLOW = """
bloom ragged 20
gpt_neo drawn 40
mpt drawn 20
codegen drawn 20
xglm streaming 20
gpt_neox_japanese h2o 20
"""


@pytest.mark.parametrize("case", [*QUICK.split("\n")[1:-1], *map(slow, SLOW.split("\n")[1:-1])])
def test_what_is_kept_is_what_is_seen(case):
    model_type, name, budget = case.split()
    policy = POLICIES[name](budget=int(budget))
    model = decoder(model_type)
    target = target_of(model)
    ids, mask = prompts(LENGTHS, STEPS)
    logits, kept = run_policy(policy, model, ids, mask, PROMPT)
    assert all(int(layer.sum(-1).max()) < PROMPT for layer in kept[-1])
    hooks = []
    for layer, shown in masks_of_run(model, kept, mask, PROMPT).items():
        hooks.append((target.sub(layer, "attn"), "pre", masked(model_type, shown, target.n_heads)))
    with target.hooks(*hooks), torch.no_grad():
        whole = model(input_ids=ids, use_cache=False, **beside_ids(model, mask, slice(0, TOTAL))).logits
    close(logits, whole[:, PROMPT - 1 :], 1e-4)


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


@pytest.mark.parametrize("model_type", every_nth("bloom gpt_neo mpt xglm gptj deepseek_v2 falcon".split(), 2))
@torch.no_grad()
def test_the_last_queries_vote_by_the_attention_of_the_model(model_type):
    model = decoder(model_type)
    ids = prompts([30])[0]
    known = dict(enumerate(attention(model, ids)[:, 0]))
    policy = Voting(budget=10, known=known, off={})
    with policy.on(model):
        cache = model(input_ids=ids, use_cache=True).past_key_values
        model(input_ids=ids[:, -1:], past_key_values=cache, use_cache=True)
    assert policy.off.keys() == known.keys() and max(policy.off.values()) < 1e-5


@pytest.mark.parametrize("model_type", every_nth(["gptj", "xglm", "bloom", "falcon"], 2))
@torch.no_grad()
def test_prompts_are_read_along_lines(model_type):
    """As in one pass with a mask of the lines; under a position bias they are read by the model's own attention."""
    target, ids = target_of(decoder(model_type)), prompts([60])[0]
    index = torch.arange(60)
    shown = (index <= index[:, None]) & ((index < 3) | (index > index[:, None] - 9))
    if model_type == "bloom":
        shown = torch.ones_like(shown).tril()
    hooks = []
    for layer in range(target.n_layers):
        hooks.append((target.sub(layer, "attn"), "pre", masked(model_type, shown[None, None], 1)))
    with target.hooks(*hooks):
        want = target.hf(input_ids=ids, use_cache=False).logits
    with AShape(first=3, local=9).on(target) as run:
        close(target.hf(input_ids=ids, use_cache=True).logits, want, 1e-4)
    reasons = {event.data.get("dense") for event in run.events if event.kind == "prefill"}
    assert reasons == ({"position bias"} if model_type == "bloom" else {None})


@pytest.mark.parametrize("model_type", ["deepseek_v32", "minimax_m3_vl_text"])
def test_the_keys_of_an_indexer_are_refused(model_type):
    with refused("the cache of .* holds no keys and values alone, or an indexer chooses among them: use another model"):
        StreamingLLM(budget=20).on(decoder(model_type)).__enter__()
