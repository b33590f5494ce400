"""One shape for the weights of every architecture: views, so that writing into them writes into the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


@dataclass
class Layer:
    """Views of one layer: heads are [head, dim, d_model], neurons [expert, neuron, d_model], one expert if dense."""

    block: nn.Module
    attn_norm: nn.Module
    mlp_norm: nn.Module
    mlp: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    gate: Tensor  # of an MLP without gate: its only way in
    down: Tensor
    up: Tensor | None = None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    out_biases: tuple[Tensor, ...] = ()  # [..., d_model], added to the residual stream
    router: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    post_attn_norm: nn.Module | None = None  # Gemma 2: on the branch, before it is added
    post_mlp_norm: nn.Module | None = None
    attn_sinks: Tensor | None = None  # gpt-oss: learned logits beside the keys
    shared: Layer | None = None  # the same layer with the neurons of its shared expert, as one dense MLP
    shared_gate: Tensor | None = None  # [1, d_model]


@dataclass
class Views:
    embed: Tensor
    positions: Tensor | None
    layers: list[Layer]
    final_norm: nn.Module
    head: Tensor | None  # None: tied to the embedding


def views(model: PreTrainedModel) -> Views:
    config = model.config
    if config.model_type == "gpt2":
        base = model.transformer
        layers, embed, positions, norm = map(_gpt2_layer, base.h), base.wte, base.wpe.weight, base.ln_f
    elif config.model_type == "gpt_neox":
        base = model.gpt_neox
        layers, embed, positions, norm = map(_neox_layer, base.layers), base.embed_in, None, base.final_layer_norm
    else:
        base = model.model
        layers, embed, positions, norm = map(_llama_layer, base.layers), base.embed_tokens, None, base.norm
    head = None if config.tie_word_embeddings else model.get_output_embeddings().weight
    return Views(embed.weight, positions, list(layers), norm, head)


def _heads(weight: Tensor, head_dim: int) -> Tensor:
    return weight.view(-1, head_dim, *weight.shape[1:])


def _llama_layer(block) -> Layer:
    attn, hd = block.self_attn, block.self_attn.head_dim
    biases = {
        f"{name}_bias": _heads(proj.bias, hd)
        for name, proj in (("q", attn.q_proj), ("k", attn.k_proj), ("v", attn.v_proj))
        if proj.bias is not None
    }
    post_norms = hasattr(block, "pre_feedforward_layernorm")
    qk_norm = hasattr(attn, "q_norm")
    mlp = _experts(block.mlp) if hasattr(block.mlp, "experts") else _dense(block.mlp)
    out_biases = (() if attn.o_proj.bias is None else (attn.o_proj.bias,)) + mlp.pop("out_biases", ())
    layer = Layer(
        block=block,
        attn_norm=block.input_layernorm,
        mlp_norm=block.pre_feedforward_layernorm if post_norms else block.post_attention_layernorm,
        mlp=block.mlp,
        q=_heads(attn.q_proj.weight, hd),
        k=_heads(attn.k_proj.weight, hd),
        v=_heads(attn.v_proj.weight, hd),
        o=attn.o_proj.weight.view(attn.o_proj.weight.shape[0], -1, hd).permute(1, 2, 0),
        out_biases=out_biases,
        q_norm=attn.q_norm.weight if qk_norm else None,
        k_norm=attn.k_norm.weight if qk_norm else None,
        post_attn_norm=block.post_attention_layernorm if post_norms else None,
        post_mlp_norm=block.post_feedforward_layernorm if post_norms else None,
        attn_sinks=getattr(attn, "sinks", None),
        **mlp,
        **biases,
    )
    if hasattr(block.mlp, "shared_expert"):
        layer.shared = replace(layer, router=None, out_biases=(), **_dense(block.mlp.shared_expert))
        layer.shared_gate = block.mlp.shared_expert_gate.weight
    return layer


def _dense(mlp) -> dict[str, Any]:
    return {"gate": mlp.gate_proj.weight[None], "up": mlp.up_proj.weight[None], "down": mlp.down_proj.weight.T[None]}


def _experts(mlp) -> dict[str, Any]:
    experts = mlp.experts
    both, down = experts.gate_up_proj, experts.down_proj
    if hasattr(mlp, "router"):  # gpt-oss: [expert, d_model, 2 * neuron], gate and up in turns, with biases
        bias = experts.gate_up_proj_bias
        return {
            "gate": both[..., ::2].transpose(1, 2),
            "up": both[..., 1::2].transpose(1, 2),
            "gate_bias": bias[:, ::2],
            "up_bias": bias[:, 1::2],
            "down": down,
            "out_biases": (experts.down_proj_bias,),
            "router": mlp.router.weight,
        }
    half = both.shape[1] // 2
    return {"gate": both[:, :half], "up": both[:, half:], "down": down.transpose(1, 2), "router": mlp.gate.weight}


def _neox_layer(block) -> Layer:
    attn, hd = block.attention, block.attention.head_size
    qkv = attn.query_key_value.weight.view(-1, 3, hd, attn.query_key_value.weight.shape[1])
    bias = attn.query_key_value.bias.view(-1, 3, hd)
    return Layer(
        block=block,
        attn_norm=block.input_layernorm,
        mlp_norm=block.post_attention_layernorm,
        mlp=block.mlp,
        q=qkv[:, 0],
        k=qkv[:, 1],
        v=qkv[:, 2],
        o=attn.dense.weight.view(attn.dense.weight.shape[0], -1, hd).permute(1, 2, 0),
        gate=block.mlp.dense_h_to_4h.weight[None],
        down=block.mlp.dense_4h_to_h.weight.T[None],
        q_bias=bias[:, 0],
        k_bias=bias[:, 1],
        v_bias=bias[:, 2],
        gate_bias=block.mlp.dense_h_to_4h.bias[None],
        out_biases=(attn.dense.bias, block.mlp.dense_4h_to_h.bias),
    )


def _gpt2_layer(block) -> Layer:
    attn, hd = block.attn, block.attn.head_dim  # Conv1D keeps its weight as [in, out]
    d = attn.c_attn.weight.shape[0]
    qkv = attn.c_attn.weight.view(d, 3, -1, hd).permute(1, 2, 3, 0)
    bias = attn.c_attn.bias.view(3, -1, hd)
    return Layer(
        block=block,
        attn_norm=block.ln_1,
        mlp_norm=block.ln_2,
        mlp=block.mlp,
        q=qkv[0],
        k=qkv[1],
        v=qkv[2],
        o=attn.c_proj.weight.view(-1, hd, d),
        gate=block.mlp.c_fc.weight.T[None],
        down=block.mlp.c_proj.weight[None],
        q_bias=bias[0],
        k_bias=bias[1],
        v_bias=bias[2],
        gate_bias=block.mlp.c_fc.bias[None],
        out_biases=(attn.c_proj.bias, block.mlp.c_proj.bias),
    )


def set_norm(norm: nn.Module, factor: Tensor, bias: Tensor | None = None):
    """Make `factor` what the norm multiplies by: Gemma's norms keep one less than that."""
    gemma = "Gemma" in type(norm).__name__
    norm.weight.copy_(factor - 1.0 if gemma else factor)
    if bias is not None and getattr(norm, "bias", None) is not None:
        norm.bias.copy_(bias)


def scale_norm(norm: nn.Module, factor: Tensor):
    offset = 1.0 if "Gemma" in type(norm).__name__ else 0.0
    norm.weight.copy_((norm.weight + offset) * factor - offset)


class Probe:
    """What leaves a module in a forward pass over `tokens` with the weights as they are now; the pass ends there."""

    def __init__(self, model: PreTrainedModel, tokens: Tensor):
        self.model, self.tokens = model, tokens

    def __call__(self, module: nn.Module) -> Tensor:
        """The output of `module` (the first one, of several)."""

        def stop(_module: nn.Module, _args, output):
            raise _Seen(output[0] if isinstance(output, tuple) else output)

        handle = module.register_forward_hook(stop)
        try:
            with torch.no_grad():
                self.model(self.tokens, use_cache=False)
        except _Seen as seen:
            return seen.output
        finally:
            handle.remove()
        raise AssertionError("the model does not run this module")


class _Seen(Exception):  # noqa: N818  (it says that all is well)
    """Ends a forward pass that has come far enough."""

    def __init__(self, output: Tensor):
        super().__init__()
        self.output = output
