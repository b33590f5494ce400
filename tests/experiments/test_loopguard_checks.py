"""The check of lemma 1: numbers against their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from einops import repeat
from organisms import tiny_model
from torch import Tensor

from experiments.loopguard import rotary
from sinkscope.models.target import Target
from sinkscope.opening.live import target_of

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "attention_factor": 1.3,
}
FAMILIES = {
    "llama": {},
    "gpt_oss": {"rope_parameters": {**YARN, "truncate": False}},
    "gpt_neox": {},  # partial rotary
    "gemma2": {},
    "qwen3": {},
}


def ids_of(length: int, seed: int = 1) -> Tensor:
    return torch.randint(4, 90, (length,), generator=torch.Generator().manual_seed(seed))


def attention_of(target: Target, scores: Tensor, layer: int) -> Tensor:
    """Attention as the model makes it of unscaled scores."""
    module = target.sub(layer, target.adapter.attn)
    scores = scores * float(module.scaling)
    cap = getattr(target.config, "attn_logit_softcapping", None)
    if cap:
        scores = torch.tanh(scores / cap) * cap
    scores = scores.masked_fill(~torch.ones(scores.shape[-2:]).tril().bool(), -math.inf)
    if target.adapter.learned_sinks:
        extra = repeat(module.sinks.detach(), "head -> head query 1", query=scores.shape[1])
        return torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
    return scores.softmax(-1)


@pytest.mark.parametrize("family", list(FAMILIES))
@torch.no_grad()
def test_scores_by_offset_give_the_models_own_attention(family):
    """Eq. 13 from unrotated queries and keys, against eager attention; with the printed sign it fails."""
    model, tokenizer = tiny_model(family, **FAMILIES[family])
    target = target_of(model, tokenizer)
    ids, at = ids_of(14), torch.arange(14)  # shorter than every window
    parts = rotary.tails(target, ids, [0, 2], 4)
    model.set_attn_implementation("eager")
    attentions = model(ids[None], output_attentions=True).attentions
    for layer, part in parts.items():
        query, key = part.pairs[False]
        ours = attention_of(target, part.rotation.scores(query, key, at, at), layer)
        torch.testing.assert_close(ours, attentions[layer][0], rtol=1e-4, atol=1e-5)
        printed = rotary.Rotation(part.rotation.angle.conj(), part.rotation.scale).scores(query, key, at, at)
        assert float((attention_of(target, printed, layer) - attentions[layer][0]).abs().max()) > 0.01
        assert part.rotation.scale == pytest.approx(1.3 if family == "gpt_oss" else 1.0, rel=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_the_numbers_of_a_shift_equal_their_definitions(family):
    """Scores as Eq. 13 gives them, the bound of Eq. 15 over all pairs of the tail, and it holds for any shift."""
    model, tokenizer = tiny_model(family)
    ids, tail, shift = torch.cat([ids_of(10, 2), ids_of(4, 3).repeat(12)]), 4, 5
    part = rotary.tails(target_of(model, tokenizer), ids, [1], tail)[1]
    query, key = part.pairs[False]
    n, at = len(ids), torch.arange(len(ids))
    scores = part.rotation.scores(query, key, at, at)
    q, k, factor = part.rotation.blocks(query).abs(), part.rotation.blocks(key).abs(), part.rotation.factor(32)
    t = torch.arange(n - tail, n)[:, None]
    i = t - torch.arange(tail)
    delta_q = (query[:, t] - query[:, t - shift]).norm(dim=-1).amax((1, 2))
    delta_k = (key[:, i] - key[:, i - shift]).norm(dim=-1).amax((1, 2))
    dq, dk = delta_q[:, None, None, None], delta_k[:, None, None, None]
    each = k[:, i - shift] * dq + q[:, t - shift] * dk + dq * dk
    change = (scores[:, t, i] - scores[:, t - shift, i - shift]).abs().mean((1, 2))
    bound = (factor[: each.shape[-1]] * each).sum(-1).mean((1, 2))
    numbers = part.shifted(shift)
    for name, wanted in {"delta_q": delta_q, "delta_k": delta_k, "change": change, "bound": bound}.items():
        torch.testing.assert_close(numbers[name], wanted, rtol=1e-3, atol=0, check_dtype=False)
    assert (numbers["whole_bound"] <= numbers["bound"]).all()
    for other in (1, 7, 12):
        assert float(part.shifted(other)["tightness"].max()) <= 1
    assert float(part.numbers(4)["error"].max()) < 1e-5
