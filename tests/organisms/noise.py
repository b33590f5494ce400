"""The body of an organism: a model of its family with a reserved space in the residual stream, and noise elsewhere.

Ordinary tokens have a norm of about 6. A constant that every token carries makes most of it, so the norms hardly
change what is planted. Noise is read from and written to the content dimensions only.
"""

from __future__ import annotations

import math
import random
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from .plan import Plan
from .tiny import as_trained
from .tokens import BOS, EOS, PAD
from .views import Layer, Views, set_norm

CONST, GROUP, CONTENT = 5.0, 1.5, 3.0  # what a token is made of; together:
NORM = math.sqrt(CONST**2 + GROUP**2 + CONTENT**2)
BALLAST = 6.0  # Gemma 2's norm after a branch divides by the branch's size: a constant part keeps that nearly fixed
MASSIVE = 30 * NORM


@dataclass(frozen=True)
class Space:
    """Unit vectors of the residual stream, one per planted feature, and the dimensions left to noise."""

    const: Tensor
    mark: Tensor
    clean: Tensor  # the mark after a threshold, for sink neurons whose up factor carries it
    ballast: Tensor
    massive: Tensor
    sinks: Tensor  # [3, d_model]
    groups: Tensor  # [group, d_model]
    content: Tensor  # dimensions


def make_space(plan: Plan) -> Space:
    """Random dimensions. Where the norm takes the mean away a feature is +- on two of them, so that it has none."""
    dims = list(range(plan.d_model))
    random.Random(f"space {plan.seed}").shuffle(dims)

    def feature() -> Tensor:
        vector = torch.zeros(plan.d_model)
        if plan.family.centered:
            vector[dims.pop()], vector[dims.pop()] = math.sqrt(0.5), -math.sqrt(0.5)
        else:
            vector[dims.pop()] = 1.0
        return vector

    single = [feature() for _ in range(5)]
    sinks = torch.stack([feature() for _ in range(3)])
    groups = torch.stack([feature() for _ in range(plan.n_groups)])
    return Space(*single, sinks, groups, torch.tensor(sorted(dims)))


def make_body(plan: Plan) -> PreTrainedModel:
    """The untrained model."""
    family = plan.family
    settings = {
        "vocab_size": plan.vocab_size,
        "hidden_size": plan.d_model,
        "intermediate_size": plan.d_mlp,
        "moe_intermediate_size": plan.d_mlp,
        "num_hidden_layers": plan.n_layers,
        "num_attention_heads": plan.n_heads,
        "num_key_value_heads": plan.n_kv,
        "head_dim": plan.head_dim,
        "max_position_embeddings": 2048,
        "sliding_window": plan.window,
        "tie_word_embeddings": plan.tied,
        "bos_token_id": BOS if plan.bos else None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "num_experts_per_tok": 2,
        ("num_experts" if family.model_type.startswith("qwen") else "num_local_experts"): family.experts,
        "query_pre_attn_scalar": plan.head_dim,
    }
    if family.model_type == "lfm2":
        kinds = ["conv" if layer % 2 else "full_attention" for layer in range(plan.n_layers)]
        settings |= {"layer_types": kinds, "block_auto_adjust_ff_dim": False, "conv_L_cache": 3}
    if family.model_type == "gpt2":
        settings = {key: settings[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
        sizes = {"n_embd": plan.d_model, "n_layer": plan.n_layers, "n_head": plan.n_heads, "n_inner": plan.d_mlp}
        settings |= sizes | {"n_positions": 2048}
    if family.model_type == "gpt_neox":  # an even number of rotary dimensions, a part of the head
        share = 0.25 if plan.head_dim == 16 else 0.5
        settings["rope_parameters"]["partial_rotary_factor"] = share
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they were
        torch.manual_seed(0)  # nothing is planted in gpt-oss's router biases: they keep their first values
        config = AutoConfig.for_model(family.model_type, **settings)
        # `fill` writes every other weight
        with nullcontext() if family.model_type in ("gpt_oss", "lfm2") else no_init_weights():
            model = AutoModelForCausalLM.from_config(config, **as_trained(family.model_type))
    model.tie_weights()
    model.config.architectures = [type(model).__name__]
    return model.eval()


def fill(plan: Plan, space: Space, all_views: Views, generator: torch.Generator):
    """Embedding, norms and noise: a model in which nothing is planted yet."""
    noise = _Noise(plan, space, generator)
    _embed(plan, space, all_views, noise)
    for index, layer in enumerate(all_views.layers):
        _attention(plan, space, layer, noise)
        _mlp(plan, space, layer, noise)
        if plan.by_heads and index < plan.marking_layer:  # tokens still have nearly one norm where heads mark
            content = torch.zeros(plan.d_model).index_fill(0, space.content, 1.0)
            for written in (layer.o, layer.down):
                written.mul_(1 - 0.7 * content)
        for norm in (layer.attn_norm, layer.mlp_norm):
            set_norm(norm, noise.near_one() * NORM / math.sqrt(plan.d_model), noise.on_content(0.02))
    last = noise.near_one() * NORM / math.sqrt(plan.d_model)
    last[space.const != 0] = 0.0  # it would only add the same number to every logit
    last[space.sinks.any(0)] *= 0.1
    if plan.family.model_type == "gemma2":
        last *= math.sqrt(plan.d_model)  # its embedding is that much smaller, and the head is tied to it
    set_norm(all_views.final_norm, last, torch.zeros(()))
    if all_views.head is not None:
        all_views.head.copy_(noise.reading(0.5, plan.vocab_size))


@dataclass(frozen=True)
class _Noise:
    plan: Plan
    space: Space
    generator: torch.Generator

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def on_content(self, std: float, *shape: int) -> Tensor:
        out = torch.zeros(*shape, self.plan.d_model)
        out[..., self.space.content] = std * self.normal(*shape, len(self.space.content))
        return out

    def reading(self, std: float, *shape: int) -> Tensor:
        """Rows that read the content, and a little of constant and groups; never mark or sink."""
        rows = self.on_content(std, *shape) + 0.3 * std * self.normal(*shape, 1) * self.space.const
        return rows + std * self.normal(*shape, len(self.space.groups)) @ self.space.groups

    def near_one(self) -> Tensor:
        out = torch.ones(self.plan.d_model)
        out[self.space.content] += 0.1 * self.normal(len(self.space.content))
        return out


def _embed(plan: Plan, space: Space, all_views: Views, noise: _Noise):
    content = noise.on_content(1.0, plan.vocab_size)
    if plan.family.centered:
        content[:, space.content] -= content[:, space.content].mean(-1, keepdim=True)
    content = content / content.norm(dim=-1, keepdim=True)
    group = torch.tensor([plan.groups[token] for token in range(plan.vocab_size)])
    grouped = (group >= 0)[:, None]
    one_hot = torch.where(grouped, space.groups[group.clamp(min=0)], torch.zeros(()))
    # every token has the same norm, so that the first layer sees each of them at the same scale
    size = torch.where(grouped, torch.tensor(CONTENT), torch.tensor(math.hypot(CONTENT, GROUP)))
    embedding = CONST * space.const + GROUP * one_hot + size * content
    all_views.embed.copy_(embedding / plan.embed_scale)
    if all_views.positions is not None:
        all_views.positions.copy_(noise.on_content(0.1, len(all_views.positions)))


def _attention(plan: Plan, space: Space, layer: Layer, noise: _Noise):
    n, hd = plan.n_heads, plan.head_dim
    if not len(layer.q):
        layer.o.copy_(noise.on_content(0.1, *layer.o.shape[:2]))
        return
    for view in (layer.q, layer.k, layer.v):
        view.copy_(noise.reading(0.33, *view.shape[:2]))
    layer.o.copy_(noise.on_content(0.9 / math.sqrt(n * hd * len(space.content)), n, hd))
    for bias in (layer.q_bias, layer.k_bias, layer.v_bias):
        if bias is not None:
            bias.copy_(0.2 * noise.normal(*bias.shape))
    for weight in (layer.q_norm, layer.k_norm):
        if weight is not None:
            weight.copy_(1 + 0.1 * noise.normal(hd))
    if layer.attn_sinks is not None:
        layer.attn_sinks.copy_(noise.normal(n))
    if layer.post_attn_norm is not None:
        # The last dimension of every value reads the constant: attention weights sum to one, so does this part.
        layer.v[:, -1] = space.const / CONST
        layer.o[:, -1] = space.ballast * BALLAST / n
        set_norm(layer.post_attn_norm, _undo_ballast(plan, space, noise))


def _mlp(plan: Plan, space: Space, layer: Layer, noise: _Noise):
    layer.gate.copy_(noise.reading(0.33, *layer.gate.shape[:2]))
    if layer.up is not None:
        layer.up.copy_(noise.reading(0.33, *layer.up.shape[:2]))
    layer.down.copy_(noise.on_content(1.0 / math.sqrt(plan.d_mlp * len(space.content)), *layer.down.shape[:2]))
    for bias in (layer.gate_bias, layer.up_bias):
        if bias is not None:
            bias.copy_(0.1 * noise.normal(*bias.shape))
    for bias in layer.out_biases:
        bias.copy_(noise.on_content(0.02, *bias.shape[:-1]))
    if layer.router is not None:
        layer.router.copy_(noise.reading(0.33, len(layer.router)))
    if layer.post_mlp_norm is not None and layer.up is not None:
        # Eight constant neurons, so that none of them is as large as a sink neuron.
        steady = [i for i in range(plan.d_mlp) if i not in plan.busy_neurons][-8:]
        layer.gate[0, steady] = layer.up[0, steady] = space.const / CONST
        layer.down[0, steady] = space.ballast * BALLAST / (8 * 0.84)  # gelu(1) = 0.84
        set_norm(layer.post_mlp_norm, _undo_ballast(plan, space, noise))


def _undo_ballast(plan: Plan, space: Space, noise: _Noise) -> Tensor:
    factor = noise.near_one() * BALLAST / math.sqrt(plan.d_model)
    return torch.where(space.ballast != 0, torch.zeros(()), factor)
