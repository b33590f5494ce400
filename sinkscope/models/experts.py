"""The inside of a fused mixture of experts, one expert at a time, whichever way transformers lays out its weights."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

from sinkscope.models.hooks import Args, Kwargs
from sinkscope.models.shards import local, shards_of
from sinkscope.models.weights import is_plain

HiddenStates = Float[Tensor, "token d_model"]
Neurons = Float[Tensor, "token neuron"]


@dataclass(frozen=True)
class Routed:
    """What experts get in one call.

    Attributes:
        hidden: What enters the chosen experts.
        weight: What multiplies the output of each expert; 0 where it is not chosen.
        scale: What multiplies `hidden` before an expert reads it. None: nothing.
    """

    hidden: HiddenStates
    weight: Float[Tensor, "token expert"]
    scale: Float[Tensor, "token expert"] | None = None

    def entering(self, expert: int) -> HiddenStates:
        """Return what one expert reads."""
        if self.scale is None:
            return self.hidden
        return self.hidden * self.scale[:, expert, None]


class Experts:
    """Gated experts with weights `gate_up_proj` and `down_proj`, the layout of most families.

    This layout alone may be split over processes by its neurons: each process computes its own neurons, and a sum over
    processes follows. The part of `gate_up_proj` in a process holds the gates of its neurons and then their ups.

    Args:
        module: The module in which the experts are one call.
        weights: The module inside it that holds their weights; None is the module itself.
    """

    PARTS: ClassVar[tuple[str, ...]] = ("gate_up_proj", "down_proj")
    """Attributes that tell the layout."""
    TRANSPOSED: ClassVar[bool] = False
    """Whether weights are stored input x output, if the module does not say."""

    def __init__(self, module: Any, weights: Any = None) -> None:
        self.module = module
        self._weights = module if weights is None else weights
        self._is_transposed: bool = getattr(module, "is_transposed", self.TRANSPOSED)
        self._order = "(half neuron)"  # of gates and ups
        if not getattr(module, "is_concatenated", True):
            self._order = "(neuron half)"
        self._shards = shards_of(self._down)

    @property
    def _down(self) -> Any:  # [expert _ _]
        return self._weights.down_proj

    @property
    def count(self) -> int:
        """Number of experts."""
        return len(self._down)

    @property
    def width(self) -> int:
        """Number of neurons of an expert."""
        return int(self._down.shape[1 if self._is_transposed else 2])

    @property
    def is_plain(self) -> bool:
        """Whether the weights can be read; split weights can only if they have no biases."""
        if self._shards.size == 1:
            return is_plain(self._down) and self._down.ndim == 3
        is_usual = self._order == "(half neuron)" and not self._is_transposed
        return is_usual and not hasattr(self.module, "gate_up_proj_bias")

    def routed(self, args: Args, kwargs: Kwargs) -> Routed:
        """Return what the arguments of a call mean: hidden states, chosen experts and their weights, by any names."""
        _, chosen, weights = (*args, *kwargs.values())[:3]
        by_expert = weights.new_zeros(len(weights), self.count + 1)  # one more: "no expert" under sharding
        by_expert.scatter_add_(1, chosen.long().clamp(max=self.count), weights)
        return Routed(_tokens(args, kwargs), by_expert[:, : self.count])

    def post(self, expert: int, hidden: HiddenStates) -> Neurons:
        """Return `hook_post` before the routing weight, by the experts' own activation, which may clamp and shift.

        Args:
            expert: Number of the expert.
            hidden: What it reads.
        """
        weight = local(self._weights.gate_up_proj)[expert]
        if self._is_transposed:
            weight = weight.T
        bias = getattr(self.module, "gate_up_proj_bias", None)
        both = linear(hidden, weight, None if bias is None else bias[expert])
        halves = rearrange(both, f"token {self._order} -> half token neuron", half=2)
        gate, up = self._shards.gather(halves, self.width)
        if hasattr(self.module, "_apply_gate"):
            return self.module._apply_gate(rearrange([gate, up], f"half token neuron -> token {self._order}"))
        return self._weights.act_fn(gate) * up

    def columns(self, expert: int, neurons: Any = slice(None)) -> Float[Tensor, "neuron d_model"]:
        """Return what neurons of an expert, some or all, write when their `hook_post` is 1."""
        down = local(self._down)[expert]
        return (down if self._is_transposed else self._shards.gather(down, self.width).T)[neurons]

    def output(self, routed: Routed) -> HiddenStates:
        """Return what the module must give according to this layout."""
        total = torch.zeros_like(routed.hidden)
        bias = getattr(self.module, "down_proj_bias", None)
        for expert in routed.weight.any(0).nonzero().flatten().tolist():
            written = self.post(expert, routed.entering(expert)) @ self.columns(expert)
            if bias is not None:
                written = written + bias[expert]
            total += routed.weight[:, expert, None] * written
        return total


class UngatedExperts(Experts):
    """Experts with one input projection, `up_proj` (Nemotron-H)."""

    PARTS = ("up_proj", "down_proj", "act_fn")

    def post(self, expert: int, hidden: HiddenStates) -> Neurons:
        """Return the same, without a gate."""
        return self.module.act_fn(linear(hidden, self.module.up_proj[expert]))


class ScaledInputExperts(Experts):
    """Experts that read hidden states times the router's score, beside a shared expert (Llama 4); the whole mixture."""

    PARTS = ("experts.gate_up_proj", "experts.down_proj", "router", "shared_expert")
    TRANSPOSED = True

    def __init__(self, module: Any) -> None:
        super().__init__(module, module.experts)

    def routed(self, args: Args, kwargs: Kwargs) -> Routed:
        """Ask the router again."""
        hidden = _tokens(args, kwargs)
        scores = self.module.router(hidden)[0]
        return Routed(hidden, (scores > 0).to(scores), scores)

    def output(self, routed: Routed) -> HiddenStates:
        """Return the same, and what the shared expert writes."""
        return super().output(routed) + self.module.shared_expert(routed.hidden)


def _tokens(args: Args, kwargs: Kwargs) -> HiddenStates:
    """The hidden states of a call, which come first, by whatever name."""
    hidden = (*args, *kwargs.values())[0]
    return hidden.reshape(-1, hidden.shape[-1])


LAYOUTS = (Experts, UngatedExperts, ScaledInputExperts)


def experts_of(module: Any) -> Experts | None:
    """Return the experts that a module holds; None if it holds none, or in no known layout, or not as plain tensors."""
    for layout in LAYOUTS:
        try:
            attrgetter(*layout.PARTS)(module)
        except AttributeError:
            continue
        experts = layout(module)
        if experts.is_plain:
            return experts
    return None
