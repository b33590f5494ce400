"""One shape for the weights of every architecture: views, so that writing into them writes into the model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
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


@dataclass
class Views:
    embed: Tensor
    positions: Tensor | None
    layers: list[Layer]
    final_norm: nn.Module
    head: Tensor | None  # None: tied to the embedding


def views(model: PreTrainedModel) -> Views:
    config = model.config
    kind = config.model_type
    base = model.get_submodule(_BASES.get(kind, "model"))
    embed, positions, norm, blocks = _OUTSIDE.get(kind, ("embed_tokens", None, "norm", "layers"))
    make = partial(_named_layer, _NAMES[kind]) if kind in _NAMES else _llama_layer
    layers = map(make, base.get_submodule(blocks))
    embed, norm = base.get_submodule(embed), base.get_submodule(norm)
    if positions is not None:
        positions = base.get_submodule(positions).weight
    head = None if config.tie_word_embeddings else model.get_output_embeddings().weight
    return Views(embed.weight, positions, list(layers), norm, head)


def _heads(weight: Tensor, head_dim: int) -> Tensor:
    return weight.view(-1, head_dim, *weight.shape[1:])


def _llama_layer(block) -> Layer:
    """Llama and its relatives: norms after attention and MLP, mixtures, learned logits."""
    has_post_norms = hasattr(block, "post_feedforward_layernorm")
    mlp_norm = "post_attention_layernorm"
    if has_post_norms:
        mlp_norm = "pre_feedforward_layernorm"
    layer = _named_layer(Names(**_PLAIN, **_GATED, attn_norm="input_layernorm", mlp_norm=mlp_norm), block)
    attn = block.self_attn
    layer.attn_sinks = getattr(attn, "sinks", None)
    if hasattr(attn, "q_norm"):
        layer.q_norm, layer.k_norm = attn.q_norm.weight, attn.k_norm.weight
    if has_post_norms:
        layer.post_attn_norm, layer.post_mlp_norm = block.post_attention_layernorm, block.post_feedforward_layernorm
    return layer


def _weight(projection) -> Tensor:
    """[out, in]: GPT-2 keeps it the other way round."""
    return projection.weight.T if type(projection).__name__ == "Conv1D" else projection.weight


def _dense(gate, up, down) -> dict[str, Any]:
    seen = {"gate": _weight(gate)[None], "down": _weight(down).T[None]}
    if up is not None:
        seen["up"] = _weight(up)[None]
    if getattr(gate, "bias", None) is not None:
        seen["gate_bias"] = gate.bias[None]
    if getattr(down, "bias", None) is not None:
        seen["out_biases"] = (down.bias,)
    return seen


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


@dataclass(frozen=True)
class Names:
    """Where the parts of a block are. `fused` holds queries, keys and values."""

    attn: str
    o: str
    attn_norm: str
    mlp_norm: str
    mlp: str
    gate: str
    down: str
    up: str | None = None
    fused: str | None = None
    by_head: bool = True  # the fused rows of a head stand together
    norms: str | None = None  # of queries and keys


_PLAIN = {"attn": "self_attn", "o": "self_attn.o_proj", "mlp": "mlp"}
_GATED = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
_NAMES = {
    "gpt_neox": Names(
        "attention",
        "attention.dense",
        "input_layernorm",
        "post_attention_layernorm",
        "mlp",
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
        fused="attention.query_key_value",
    ),
    "gpt2": Names("attn", "attn.c_proj", "ln_1", "ln_2", "mlp", "mlp.c_fc", "mlp.c_proj", None, "attn.c_attn", False),
    "lfm2": Names(
        "self_attn",
        "self_attn.out_proj",
        "operator_norm",
        "ffn_norm",
        "feed_forward",
        "feed_forward.w1",
        "feed_forward.w2",
        "feed_forward.w3",
        norms="layernorm",
    ),
}
_BASES = {"gpt2": "transformer", "gpt_neox": "gpt_neox"}
_OUTSIDE = {  # the embeddings of tokens and positions, the last norm, and the layers
    "gpt2": ("wte", "wpe", "ln_f", "h"),
    "gpt_neox": ("embed_in", None, "final_layer_norm", "layers"),
    "lfm2": ("embed_tokens", None, "embedding_norm", "layers"),
}


def _named_layer(names: Names, block) -> Layer:
    """A block by its names; one without attention has no heads, and `o` is the way out of its mixer."""
    part = block.get_submodule
    mlp = part(names.mlp)
    attn = getattr(block, names.attn, None)
    if hasattr(mlp, "experts"):
        seen = _experts(mlp)
    else:
        seen = _dense(part(names.gate), names.up and part(names.up), part(names.down))
    outs = seen.pop("out_biases", ())
    seen |= {
        "block": block,
        "mlp": mlp,
        "attn_norm": part(names.attn_norm),
        "mlp_norm": part(names.mlp_norm),
    }
    if attn is None:
        empty = seen["gate"].new_zeros(0, 1, seen["gate"].shape[2])
        return Layer(**seen, q=empty, k=empty, v=empty, o=block.conv.out_proj.weight.T[None], out_biases=outs)
    out, hd = part(names.o), getattr(attn, "head_dim", None) or attn.head_size
    if names.fused is None:
        for name in ("q", "k", "v"):
            projection = getattr(attn, f"{name}_proj")
            seen[name] = _heads(projection.weight, hd)
            if projection.bias is not None:
                seen[f"{name}_bias"] = _heads(projection.bias, hd)
        if names.norms is not None:
            seen |= {f"{name}_norm": getattr(attn, f"{name}_{names.norms}").weight for name in ("q", "k")}
    else:
        fused = part(names.fused)
        shape, at = ((-1, 3, hd), 1) if names.by_head else ((3, -1, hd), 0)
        rows = _weight(fused).unflatten(0, shape)
        for number, name in enumerate(("q", "k", "v")):
            seen[name] = rows.select(at, number)
            if fused.bias is not None:
                seen[f"{name}_bias"] = fused.bias.view(shape).select(at, number)
    if out.bias is not None:
        outs = (out.bias, *outs)
    o = _weight(out).unflatten(1, (-1, hd)).permute(1, 2, 0)
    return Layer(**seen, o=o, out_biases=outs)


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
