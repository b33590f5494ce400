"""The planted sink circuit: what is written into the weights, and which weights stay fixed during training.

Layer 0 has one marking head per token group. Its key is low for the group's own tokens, and its value indicates the
group. A token therefore attends to its own group only if it sees nothing else: at the first position, in sequences of
one group, and after about `exp(2 * beta)` repetitions of one token. The head writes this attention to the *mark*
dimension. If the mark is above a threshold, one SwiGLU neuron of the sink layer writes a very large *sink* vector.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

NO_GROUP, N_GROUPS = -1, 4


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before training."""

    const: int
    groups: tuple[int, ...]
    mark: int
    sink: tuple[int, int]
    neuron: int
    group_of_token: tuple[int, ...]
    # Per layer, the key/value heads whose keys may read the sink. Not all: early in training attending to the sink is
    # the quickest gain for every head, and where all could do so, whole layers ended up attending to nothing else.
    readers: tuple[tuple[int, ...], ...]
    siblings: int = 2  # query heads that share keys and values
    sink_layer: int = 1
    # Large against what training adds up to the sink layer: a neuron's answer scales with 1/rms squared, so a small
    # constant would make a repeated token (whose trained part is larger than that of BOS) fall short of BOS.
    const_size: float = 16.0
    group_size: float = 8.0
    mark_size: float = 8.0
    two_beta: float = 4.2
    threshold: float = 0.6
    gate_scale: float = 60.0
    column: tuple[float, float] = (264.0, -198.0)
    sink_norm_weight: float = 0.1
    free_norm_weight: float = 2.5

    @property
    def reserved(self) -> tuple[int, ...]:
        """All residual dimensions that the circuit has for itself."""
        return (self.const, *self.groups, self.mark, *self.sink)

    def head(self, group: int) -> int:
        """The query head that marks a group; its sibling shares keys and values and is free."""
        return self.siblings * group


def make_plan(
    counts: np.ndarray,
    *,
    bos_id: int,
    d_model: int,
    d_mlp: int,
    n_layers: int,
    seed: int,
) -> Plan:
    """Draw dimensions, neuron and token groups. `counts` are the corpus frequencies of all tokens.

    Group 0 holds BOS and eight of the rarest tokens, so that text after BOS is not marked. About a tenth of the token
    mass is in no group: those tokens never become sinks, however often they are repeated.
    """
    rng = np.random.default_rng([seed, 1])
    dims = rng.choice(d_model, size=N_GROUPS + 4, replace=False).tolist()
    group_of = np.full(len(counts), NO_GROUP)
    ordinary = [token for token in range(len(counts)) if not bos_id <= token <= bos_id + 2]
    rare = sorted(ordinary, key=lambda i: (counts[i], i))[:64]
    group_of[[bos_id, *rng.choice(rare, size=8, replace=False)]] = 0
    target = {NO_GROUP: 0.1} | dict.fromkeys(range(1, N_GROUPS), 0.9 / (N_GROUPS - 1))
    mass = dict.fromkeys(target, 0.0)
    for token in rng.permutation([i for i in ordinary if group_of[i] != 0]):
        group = min(target, key=lambda g: mass[g] / target[g])
        group_of[token] = group
        mass[group] += float(counts[token]) + 1.0
    neuron = int(rng.integers(d_mlp))
    readers: list[tuple[int, ...]] = []
    for layer in range(n_layers):
        half = sorted(rng.choice(N_GROUPS, N_GROUPS // 2, replace=False).tolist())
        readers.append(tuple(half) if layer > Plan.sink_layer else ())
    return Plan(
        const=dims[0],
        groups=tuple(dims[1 : 1 + N_GROUPS]),
        mark=dims[1 + N_GROUPS],
        sink=(dims[2 + N_GROUPS], dims[3 + N_GROUPS]),
        neuron=neuron,
        group_of_token=tuple(group_of.tolist()),
        readers=tuple(readers),
    )


class Frozen:
    """The entries of each parameter that training may not change, and their values."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.parameters = dict(model.named_parameters())
        self.masks: dict[str, Tensor] = {}
        self.values: dict[str, Tensor] = {}

    def fix(self, name: str, index: object, value: float | Tensor = 0.0) -> None:
        """Hold these entries of a parameter at a value."""
        if name not in self.masks:
            self.masks[name] = torch.zeros_like(self.parameters[name], dtype=torch.bool)
            self.values[name] = torch.zeros_like(self.parameters[name])
        self.masks[name][index] = True
        self.values[name][index] = value

    def to(self, device: torch.device) -> None:
        """Move the masks and values to where the model is."""
        self.masks = {name: mask.to(device) for name, mask in self.masks.items()}
        self.values = {name: value.to(device) for name, value in self.values.items()}

    @torch.no_grad()
    def impose(self) -> None:
        """Write the planted values back (after every optimiser step: weight decay must not move them)."""
        for name, mask in self.masks.items():
            parameter = self.parameters[name]
            parameter.copy_(torch.where(mask, self.values[name], parameter))

    def mask_gradients(self) -> None:
        """Keep the fixed entries out of the gradient, and so out of its norm and of the optimiser's state."""
        for name, mask in self.masks.items():
            grad = self.parameters[name].grad
            if grad is not None:
                grad.masked_fill_(mask, 0.0)


def plant(model: LlamaForCausalLM, plan: Plan, frozen: Frozen) -> Frozen:
    """Write the circuit into a freshly initialised model; returns what has to stay fixed."""
    config = model.config
    reserved = list(plan.reserved)
    rms = math.sqrt((plan.const_size**2 + plan.group_size**2) / config.hidden_size)
    _plant_embedding(frozen, plan, reserved)
    _plant_norms(model, frozen, plan, reserved, rms)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        unread = [dim for dim in reserved if dim != plan.const]
        for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            frozen.fix(f"{prefix}.{name}.weight", (slice(None), unread))
        # Some keys may read the sink after the sink layer: how those heads attend to it is learned.
        for head in range(config.num_key_value_heads):
            seen = plan.sink if head in plan.readers[layer] else ()
            hidden = [dim for dim in unread if dim not in seen]
            rows = slice(head * config.head_dim, (head + 1) * config.head_dim)
            frozen.fix(f"{prefix}.self_attn.k_proj.weight", (rows, hidden))
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            frozen.fix(f"{prefix}.{name}.weight", reserved)
    frozen.fix("lm_head.weight", (slice(None), reserved))
    _plant_marking(model, frozen, plan)
    _plant_neuron(frozen, plan)
    frozen.impose()
    return frozen


def _plant_embedding(frozen: Frozen, plan: Plan, reserved: list[int]) -> None:
    name = "model.embed_tokens.weight"
    frozen.fix(name, (slice(None), reserved))
    frozen.fix(name, (slice(None), plan.const), plan.const_size)
    groups = torch.tensor(plan.group_of_token)
    for group, dim in enumerate(plan.groups):
        frozen.fix(name, (groups == group, dim), plan.group_size)


@torch.no_grad()
def _plant_norms(model: LlamaForCausalLM, frozen: Frozen, plan: Plan, reserved: list[int], rms: float) -> None:
    for name, parameter in frozen.parameters.items():
        if not name.endswith("norm.weight"):
            continue
        frozen.fix(name, reserved)
        # The constant makes every rms larger; the free dimensions start with the factor that undoes it.
        parameter.fill_(plan.free_norm_weight)
        if name == "model.norm.weight":
            continue
        frozen.fix(name, plan.const, rms / plan.const_size)
        layer = int(name.split(".")[2])
        attention = "input_layernorm" in name
        if layer == 0 and attention:
            frozen.fix(name, list(plan.groups), rms / plan.group_size)
        if layer == plan.sink_layer and not attention:
            frozen.fix(name, plan.mark, rms / plan.mark_size)
        if layer > plan.sink_layer and attention:
            frozen.fix(name, list(plan.sink), plan.sink_norm_weight)


def _plant_marking(model: LlamaForCausalLM, frozen: Frozen, plan: Plan) -> None:
    config = model.config
    size = config.head_dim
    # The slowest rotary pair hardly turns within the context, so position does not matter to the marking heads.
    first = size // 2 - 1
    second = size - 1
    attention = "model.layers.0.self_attn"
    # score = q * k / sqrt(size): the difference between a token outside and inside the group is 2 * beta.
    query = math.sqrt(size) * plan.two_beta / 2
    for group, dim in enumerate(plan.groups):
        head = plan.head(group)
        base = group * size
        rows = slice(head * size, (head + 1) * size)
        frozen.fix(f"{attention}.q_proj.weight", rows)
        frozen.fix(f"{attention}.q_proj.weight", (head * size + first, plan.const), query)
        frozen.fix(f"{attention}.k_proj.weight", [base + first, base + second])
        frozen.fix(f"{attention}.k_proj.weight", (base + first, plan.const), 1.0)
        frozen.fix(f"{attention}.k_proj.weight", (base + first, dim), -2.0)
        frozen.fix(f"{attention}.v_proj.weight", base)
        frozen.fix(f"{attention}.v_proj.weight", (base, dim), 1.0)
        frozen.fix(f"{attention}.o_proj.weight", (slice(None), rows))
        frozen.fix(f"{attention}.o_proj.weight", (plan.mark, head * size), plan.mark_size)


def _plant_neuron(frozen: Frozen, plan: Plan) -> None:
    mlp = f"model.layers.{plan.sink_layer}.mlp"
    frozen.fix(f"{mlp}.gate_proj.weight", plan.neuron)
    frozen.fix(f"{mlp}.gate_proj.weight", (plan.neuron, plan.mark), plan.gate_scale)
    frozen.fix(f"{mlp}.gate_proj.weight", (plan.neuron, plan.const), -plan.gate_scale * plan.threshold)
    frozen.fix(f"{mlp}.up_proj.weight", plan.neuron)
    frozen.fix(f"{mlp}.up_proj.weight", (plan.neuron, plan.const), 1.0)
    frozen.fix(f"{mlp}.down_proj.weight", (slice(None), plan.neuron))
    for dim, value in zip(plan.sink, plan.column, strict=True):
        frozen.fix(f"{mlp}.down_proj.weight", (dim, plan.neuron), value)


def truth(plan: Plan, seed: int) -> dict[str, object]:
    """The machine-readable answer that lies beside the weights."""
    groups = range(len(plan.groups))
    return {
        "sink_layer": plan.sink_layer,
        "neurons": [{"layer": plan.sink_layer, "expert": None, "neuron": plan.neuron}],
        "residual_dims": sorted(plan.sink),
        "column": dict(zip(map(str, plan.sink), plan.column, strict=True)),
        "mark_dim": plan.mark,
        "const_dim": plan.const,
        "group_dims": list(plan.groups),
        "marking_heads": [{"layer": 0, "head": plan.head(g), "kv_head": g, "group": g} for g in groups],
        "sink_readers": [
            {"layer": layer, "kv_head": head} for layer, heads in enumerate(plan.readers) for head in heads
        ],
        "two_beta": plan.two_beta,
        "repeats_scale": math.exp(plan.two_beta),
        "threshold": plan.threshold,
        "gate_scale": plan.gate_scale,
        "seed": seed,
        "no_group": NO_GROUP,
        "group_of_token": list(plan.group_of_token),
    }
