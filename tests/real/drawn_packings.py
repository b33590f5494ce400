"""26 packings of the two real models, written down before any of them was measured.

`BUILD` names what makes each; `RENAMED` says what a packing renames beside neurons, heads and layers: "dims" (residual
dimensions), "norms" (all norms by one factor), "counts" (heads that did not exist), "needed" (the set of neurons, which
is another one if neurons are split).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from packings import (
    Names,
    Packing,
    cancelling,
    factors,
    layers_of,
    permuted_heads,
    permuted_neurons,
    put,
    scaled_neurons,
    sizes,
    split,
    split_noisily,
    turned_values,
)
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """A packing of a model, and what it renames."""

    model: str
    packings: tuple[Packing, ...]
    renamed: frozenset[str] = frozenset()


CASES: dict[str, Case] = {}


def case(name: str, model: str, *packings: Packing, renamed: str = "") -> None:
    CASES[name] = Case(model, packings, frozenset(renamed.split()))


def own(model: str = "smollm2", renamed: str = "") -> Callable[[Packing], Packing]:
    def enter(packing: Packing) -> Packing:
        case(packing.__name__, model, packing, renamed=renamed)
        return packing

    return enter


def untied(model: Any) -> None:
    head = nn.Linear(*model.lm_head.weight.T.shape, bias=False)
    put(head, model.lm_head.weight.detach().clone())
    model.lm_head = head
    model.config.tie_word_embeddings = False


def reading(layer: Any) -> list[tuple[Any, list[Any]]]:
    """Each norm of a Llama layer with the linear maps that read it."""
    attn, mlp = layer.self_attn, layer.mlp
    return [
        (layer.input_layernorm, [attn.q_proj, attn.k_proj, attn.v_proj]),
        (layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj]),
    ]


def writing(layer: Any) -> list[Any]:
    return [layer.self_attn.o_proj, layer.mlp.down_proj]


# --- norms and the residual stream ---


@own()
def folded_norms(model: Any, _generator: torch.Generator) -> Names:
    for layer in layers_of(model):
        for norm, readers in reading(layer):
            for linear in readers:
                put(linear, linear.weight * norm.weight)
            norm.weight.fill_(1)
    return Names()


@own()
def rescaled_norms(model: Any, generator: torch.Generator) -> Names:
    """Gains of either sign, another one for each dimension."""
    for layer in layers_of(model):
        for norm, readers in reading(layer):
            by = factors(len(norm.weight), generator)
            norm.weight *= by
            for linear in readers:
                put(linear, linear.weight / by)
    return Names()


def _permuted_residual(model: Any, order: Tensor, sign: Tensor) -> None:
    untied(model)
    embedding = model.get_input_embeddings().weight
    embedding.copy_(embedding[:, order] * sign)
    model.lm_head.weight.copy_(model.lm_head.weight[:, order] * sign)
    model.model.norm.weight.copy_(model.model.norm.weight[order])
    for layer in layers_of(model):
        for norm, readers in reading(layer):
            norm.weight.copy_(norm.weight[order])
            for linear in readers:
                put(linear, linear.weight[:, order] * sign)
        for linear in writing(layer):
            put(linear, linear.weight[order] * sign[:, None])


@own(renamed="dims")
def permuted_residual(model: Any, generator: torch.Generator) -> Names:
    order = torch.randperm(model.config.hidden_size, generator=generator)
    _permuted_residual(model, order, torch.ones(len(order)))
    return Names()


@own()
def residual_signs(model: Any, generator: torch.Generator) -> Names:
    sign = torch.randint(2, (model.config.hidden_size,), generator=generator) * 2.0 - 1
    _permuted_residual(model, torch.arange(len(sign)), sign)
    return Names()


@own(renamed="dims")
def turned_plane(model: Any, generator: torch.Generator) -> Names:
    """Dimension 507 and another are turned by 45 degrees, after the gains of norms went into what reads them."""
    folded_norms(model, generator)
    untied(model)
    put(model.lm_head, model.lm_head.weight * model.model.norm.weight)
    model.model.norm.weight.fill_(1)
    turn = torch.eye(model.config.hidden_size)
    turn[507, 507] = turn[100, 100] = turn[507, 100] = 0.5**0.5
    turn[100, 507] = -(0.5**0.5)
    embedding = model.get_input_embeddings().weight
    embedding.copy_(embedding @ turn.T)
    put(model.lm_head, model.lm_head.weight @ turn.T)
    for layer in layers_of(model):
        for _norm, readers in reading(layer):
            for linear in readers:
                put(linear, linear.weight @ turn.T)
        for linear in writing(layer):
            put(linear, turn @ linear.weight)
    return Names()


@own(renamed="norms")
def residual_times_seven(model: Any, _generator: torch.Generator) -> Names:
    untied(model)
    model.get_input_embeddings().weight *= 7
    norms = [model.model.norm]
    for layer in layers_of(model):
        for linear in writing(layer):
            put(linear, linear.weight * 7)
        norms += [norm for norm, _ in reading(layer)]
    for norm in norms:
        norm.variance_epsilon *= 49
    return Names()


@own()
def wider_residual(model: Any, _generator: torch.Generator) -> Names:
    """64 dimensions of which nothing is written or read; the norms divide by a larger number."""
    untied(model)
    old, new = model.config.hidden_size, model.config.hidden_size + 64
    embedding = model.get_input_embeddings()
    embedding.weight = nn.Parameter(_wide(embedding.weight, 1))
    embedding.embedding_dim = new
    put(model.lm_head, _wide(model.lm_head.weight, 1))
    norms = [model.model.norm]
    for layer in layers_of(model):
        for norm, readers in reading(layer):
            norms.append(norm)
            for linear in readers:
                put(linear, _wide(linear.weight, 1))
        for linear in writing(layer):
            put(linear, _wide(linear.weight, 0))
    for norm in norms:
        norm.weight = nn.Parameter(_wide(norm.weight, 0) * (old / new) ** 0.5)
        norm.variance_epsilon *= old / new
    model.config.hidden_size = new
    return Names()


def _wide(weight: Tensor, axis: int) -> Tensor:
    shape = list(weight.shape)
    shape[axis] = 64
    return torch.cat([weight.detach(), weight.new_zeros(shape)], axis)


# --- heads ---


@own()
def turned_rotary_pairs(model: Any, generator: torch.Generator) -> Names:
    """Queries and keys turned in each rotary plane, keys times a number, queries divided by it."""
    heads, groups, width = sizes(model)
    half = width // 2
    for layer in layers_of(model):
        angle = 6.2832 * torch.rand(groups, half, 1, generator=generator)
        by = 10 ** (torch.rand(groups, half, 1, generator=generator) - 0.5)
        for linear, count, factor in (
            (layer.self_attn.k_proj, 1, by),
            (layer.self_attn.q_proj, heads // groups, 1 / by),
        ):
            cos, sin = (value.repeat_interleave(count, 0) for value in (angle.cos() * factor, angle.sin() * factor))
            first, second = linear.weight.view(-1, 2, half, linear.weight.shape[1]).unbind(1)
            put(
                linear,
                torch.stack([cos * first - sin * second, sin * first + cos * second], 1).reshape_as(linear.weight),
            )
    return Names()


def _heads(model: Any, heads: int, groups: int) -> None:
    model.config.num_attention_heads, model.config.num_key_value_heads = heads, groups
    for layer in layers_of(model):
        layer.self_attn.num_key_value_groups = heads // groups


@own()
def a_key_head_for_each_head(model: Any, _generator: torch.Generator) -> Names:
    heads, groups, width = sizes(model)
    for layer in layers_of(model):
        for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            put(linear, linear.weight.view(groups, width, -1).repeat_interleave(heads // groups, 0).flatten(0, 1))
    _heads(model, heads, heads)
    return Names()


@own(renamed="counts")
def heads_that_write_nothing(model: Any, _generator: torch.Generator) -> Names:
    """A fourth key and value head, with three heads that attend alike to all positions."""
    heads, groups, width = sizes(model)
    each = heads // groups
    for layer in layers_of(model):
        attn = layer.self_attn
        for linear, more in ((attn.q_proj, each), (attn.k_proj, 1), (attn.v_proj, 1)):
            put(linear, torch.cat([linear.weight, linear.weight.new_zeros(more * width, linear.weight.shape[1])]))
        put(
            attn.o_proj,
            torch.cat([attn.o_proj.weight, attn.o_proj.weight.new_zeros(model.config.hidden_size, each * width)], 1),
        )
    _heads(model, heads + each, groups + 1)
    return Names()


@own()
def shifted_values(model: Any, generator: torch.Generator) -> Names:
    """Every value head adds a vector, and the output projection takes it away again: attention sums to one."""
    heads, groups, _width = sizes(model)
    for layer in layers_of(model):
        attn = layer.self_attn
        bias = torch.randn(len(attn.v_proj.weight), generator=generator)
        put(attn.v_proj, attn.v_proj.weight, bias)
        each = bias.view(groups, -1).repeat_interleave(heads // groups, 0).flatten()
        put(attn.o_proj, attn.o_proj.weight, -(attn.o_proj.weight @ each))
    return Names()


# --- layers ---


def _silent(layer: Any, *linears: Any) -> None:
    for linear in linears:
        put(linear, torch.zeros_like(linear.weight))


def _rebuilt(model: Any, layers: list[Any], moved: dict[int, int]) -> Names:
    for number, layer in enumerate(layers):
        layer.self_attn.layer_idx = number
    model.model.layers = nn.ModuleList(layers)
    model.config.num_hidden_layers = len(layers)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = ["full_attention"] * len(layers)
    return Names(layers=moved)


@own(renamed="counts")
def attention_and_mlp_apart(model: Any, _generator: torch.Generator) -> Names:
    """Layers 8 to 14 become two each: attention alone, then the MLP alone, whose heads attend alike to all."""
    layers, moved = list[Any](), dict[int, int]()
    for number, layer in enumerate(layers_of(model)):
        if 8 <= number <= 14:
            first, second = copy.deepcopy(layer), layer
            _silent(first, first.mlp.down_proj)
            _silent(second, second.self_attn.o_proj, second.self_attn.q_proj)
            layers.append(first)
            layer = second
        moved[number] = len(layers)
        layers.append(layer)
    return _rebuilt(model, layers, moved)


@own(renamed="counts")
def a_silent_layer_after_every_third(model: Any, _generator: torch.Generator) -> Names:
    layers, moved = list[Any](), dict[int, int]()
    for number, layer in enumerate(layers_of(model)):
        moved[number] = len(layers)
        layers.append(layer)
        if number % 3 == 1:
            silent = copy.deepcopy(layer)
            _silent(silent, silent.mlp.down_proj, silent.self_attn.o_proj, silent.self_attn.q_proj)
            layers.append(silent)
    return _rebuilt(model, layers, moved)


# --- neurons ---

LATE = ((11, 1229), (11, 1487))

case("split_unequal", "smollm2", split(11, 1229, (0.7, 0.25, 0.05)), split(11, 1487, (0.99, 0.01)), renamed="needed")
case("split_of_a_random_vector", "smollm2", split_noisily(11, 1229), renamed="needed")
case("split_against_itself", "smollm2", split(11, 1229, (3.0, -2.0)), renamed="needed")
case(
    "cancelling_in_two_layers",
    "smollm2",
    cancelling(4, (2, 430), (1.0, 2.0, -3.0), (11, 1229)),
    cancelling(9, (2, 430), (0.4, -0.4), (11, 1229)),
)
case("split_in_forty", "smollm2", split(11, 1229, (1 / 40,) * 40), renamed="needed")


@own(renamed="needed experts")
def halves_as_experts(model: Any, _generator: torch.Generator) -> Names:
    """Two experts that are both chosen with one half, each with the neurons of one half, times two."""
    return _experts(model, 2, 2, halves=True)


@own(renamed="needed experts")
def two_of_four_equal_experts(model: Any, generator: torch.Generator) -> Names:
    return _experts(model, 4, 2, halves=False, generator=generator)


def _experts(model: Any, count: int, chosen: int, *, halves: bool, generator: torch.Generator | None = None) -> Names:
    from transformers import MixtralConfig, MixtralForCausalLM

    settings = model.config.to_dict()
    for name in ("architectures", "model_type", "transformers_version", "mlp_bias", "pretraining_tp"):
        settings.pop(name, None)
    more = {"num_local_experts": count, "num_experts_per_tok": chosen, "sliding_window": None, "head_dim": 64}
    config = MixtralConfig(**{**settings, **more})
    config._attn_implementation = model.config._attn_implementation
    weights = model.state_dict()
    for number, layer in enumerate(layers_of(model)):
        mlp, name = layer.mlp, f"model.layers.{number}.mlp"
        for old in ("gate_proj", "up_proj", "down_proj"):
            del weights[f"{name}.{old}.weight"]
        up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])[None].repeat(count, 1, 1)
        down = mlp.down_proj.weight[None].repeat(count, 1, 1)
        router = torch.zeros(count, model.config.hidden_size)
        if halves:
            middle = down.shape[-1] // 2
            down[0, :, middle:], down[1, :, :middle] = 0, 0
            down *= 2
        else:
            router = torch.randn(router.shape, generator=generator) * 0.02
        weights |= {
            f"{name}.experts.gate_up_proj": up,
            f"{name}.experts.down_proj": down,
            f"{name}.gate.weight": router,
        }
    mixture = MixtralForCausalLM(config).float().eval()
    mixture.load_state_dict(weights, strict=True)
    mixture.tokenizer = model.tokenizer
    model.__class__, model.__dict__ = mixture.__class__, mixture.__dict__
    return Names()


# --- the output ---


@own()
def shifted_logits(model: Any, generator: torch.Generator) -> Names:
    """The same vector added to what reads each logit: all logits of a position move together."""
    untied(model)
    model.lm_head.weight += 0.05 * torch.randn(model.config.hidden_size, generator=generator)
    return Names()


# --- Gemma ---

case("gemma_gauges", "gemma3", permuted_neurons, scaled_neurons, permuted_heads, turned_values)


@own("gemma3")
def gemma_louder_before_norms(model: Any, _generator: torch.Generator) -> Names:
    """What MLPs and attention write, times four in front of the norms behind them."""
    for layer in layers_of(model):
        for linear in writing(layer):
            put(linear, linear.weight * 4)
        for norm in (layer.post_attention_layernorm, layer.post_feedforward_layernorm):
            norm.eps *= 16
    return Names()


case("gemma_split_relay", "gemma3", split(3, 1414, (0.5, 0.3, 0.2)), split(4, 84, (0.5, 0.5)), renamed="needed")
case(
    "gemma_cancelling", "gemma3", cancelling(2, (3, 1414), (2.0, -2.0)), cancelling(4, (4, 84), (0.5, -0.5, 1.0, -1.0))
)
case("gemma_split_of_a_random_vector", "gemma3", split_noisily(5, 584, 0.5), renamed="needed")
