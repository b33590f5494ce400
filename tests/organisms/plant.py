"""Writing the circuit: marking heads, sink neurons, heads that attend to the sink.

Sizes are measured on the model at hand (`Probe`) rather than derived, so one recipe serves every architecture.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .noise import CONST, GROUP, MASSIVE, NORM, Space
from .plan import THRESHOLD, Plan
from .views import Layer, Probe, Views, scale_norm

MARK = 2.5  # in the residual stream, on a token that is marked fully
EARLY = 0.02  # of the spike is written by the early stage of "two_stage"
_IN_BALLAST = 0.25  # sink neurons over the ballast, Gemma 2: small, so that its norm hardly evens out an ablation


@dataclass(frozen=True)
class _Scale:
    """What the MLP of a layer reads on first tokens."""

    const: float
    mark: float
    clean: float


@dataclass(frozen=True)
class Surgeon:
    plan: Plan
    space: Space
    views: Views
    probe: Probe  # of natural rows, to measure on

    # --- marking -----------------------------------------------------------------------------------------------

    def mark_first(self):
        """Write MARK on the first token, long repetitions and same-group sequences (GPT-2: on position 0)."""
        if self.views.positions is not None:
            self.views.positions[0] += MARK * self.space.mark
            return
        plan, layer = self.plan, self.views.layers[self.plan.marking_layer]
        const = float((self.probe(layer.attn_norm) @ self.space.const).mean())
        # A key says "not of my group", so a token sees its own group only where there is nothing else.
        is_other = self.space.const / const
        is_own = self.space.groups / (const * GROUP / CONST)
        pairs = [plan.slow_dim(0), plan.slow_dim(1)]
        ratio, beta = plan.n_heads // plan.n_kv, math.log(plan.odds) / 2
        for kv in {head // ratio for head, _, _ in plan.slots}:
            clear(layer.k, layer.k_bias, kv)
            layer.k[kv, pairs] = is_other  # a pair that marks nothing too: the norm on keys needs equal lengths
            for head in range(kv * ratio, (kv + 1) * ratio):
                layer.q[head, pairs] = 0.0
                if layer.q_bias is not None:
                    layer.q_bias[head, pairs] = 0.0
        for head, group, slot in plan.slots:
            kv, dim = head // ratio, plan.slow_dim(slot)
            clear(layer.q, layer.q_bias, head)
            layer.q[head, dim] = beta * math.sqrt(plan.head_dim) * self.space.const / const
            layer.k[kv, dim] = is_other - 2 * is_own[group]
            layer.v[kv, slot] = is_own[group]
            if layer.v_bias is not None:
                layer.v_bias[kv, slot] = 0.0
            _mute(layer.o, head, keep_last=layer.post_attn_norm is not None)
            layer.o[head, slot] = MARK / plan.heads_per_group * self.space.mark
            if layer.attn_sinks is not None:
                layer.attn_sinks[head] = -20.0  # otherwise a lone token would not see itself fully
        if layer.q_norm is not None and layer.k_norm is not None:  # lengths are fixed there, the weight says beta
            layer.q_norm[pairs] = beta / math.sqrt(plan.head_dim / 2)
            layer.k_norm[pairs] = 1.0

    # --- sink neurons ------------------------------------------------------------------------------------------

    def make_sink(self) -> Tensor:
        """Plant the neurons of every stage; returns the direction of the spike in the residual stream."""
        plan = self.plan
        if plan.factor == "up":
            self._clean_mark()
        norms = self.probe(self.views.layers[plan.sink_layer].block).norm(dim=-1)
        spike = plan.spike * float(norms[:, 1:].median())
        directions, shares = self._directions()
        total = sum(share * way for share, way in zip(shares, directions, strict=True))
        helper = None
        if plan.early_layer is not None:
            before = self.scale(plan.sink_layer).const
            self.stage(plan.early_layer, (plan.early_neuron,), [total], [1.0], EARLY * spike)
            if self.views.layers[plan.sink_layer].post_mlp_norm is None:  # which evens it out
                helper = self._early_spike(total, before)
        self.stage(plan.sink_layer, plan.neurons, directions, shares, spike, helper)
        return total

    def _early_spike(self, way: Tensor, const_before: float) -> tuple[Tensor, float]:
        """The early stage shrinks the rest of the first token in the deep layer's norm, so without it the deep one
        would grow: its neurons read just so much of the early spike that they do not care."""
        norm = self.views.layers[self.plan.sink_layer].mlp_norm
        seen = float((self.probe(norm)[:, 0] @ way).mean())
        shrunk = self.scale(self.plan.sink_layer).const / const_before
        return way / seen, shrunk

    def _directions(self) -> tuple[list[Tensor], list[float]]:
        plan, rng = self.plan, random.Random(f"directions {self.plan.seed}")
        if plan.own_dims:
            return list(self.space.sinks[: len(plan.neurons)]), list(plan.sizes)
        angle = rng.choice([0.0, rng.uniform(0.3, 1.2)])  # one dimension, or two
        way = math.cos(angle) * self.space.sinks[0] + math.sin(angle) * self.space.sinks[1]
        return [way] * len(plan.neurons), [size / sum(plan.sizes) for size in plan.sizes]

    def stage(
        self,
        index: int,
        neurons: tuple[int, ...],
        directions: list[Tensor],
        shares: list[float],
        size: float,
        helper: tuple[Tensor, float] | None = None,
    ):
        layer, expert = self.views.layers[index], self.plan.expert
        self.route(index)
        scale = self.scale(index)
        layer.down[expert, list(neurons)] = 0.0
        goal = size if layer.post_mlp_norm is None else _IN_BALLAST * self.mlp_writes(layer, self.space.ballast)
        columns = []
        for i, (neuron, way, share) in enumerate(zip(neurons, directions, shares, strict=True)):
            self._write_neuron(layer, neuron, scale, 1 + 0.2 * i, helper)
            layer.down[expert, neuron] = way
            columns.append(way * share * goal / self.mlp_writes(layer, way))
            layer.down[expert, neuron] = 0.0
        layer.down[expert, list(neurons)] = torch.stack(columns)
        if layer.post_mlp_norm is not None:  # the spike comes through this norm's weight
            total = sum(share * way for share, way in zip(shares, directions, strict=True))
            out = self.probe(layer.post_mlp_norm)[:, 0] @ total
            scale_norm(layer.post_mlp_norm, torch.where(total != 0, size / float(out.mean()), 1.0))

    def _write_neuron(
        self, layer: Layer, neuron: int, scale: _Scale, strength: float, helper: tuple[Tensor, float] | None
    ):
        """A neuron that is on where there is a mark: its gate says so (threshold included), or its up factor."""
        const = self.space.const / scale.const
        gate = self.plan.sharpness * (self.space.mark / scale.mark - THRESHOLD * const)
        up = strength * const
        on_gate, on_up = self.plan.sharpness * (1 - THRESHOLD), strength  # their values on a full mark
        if self.plan.factor == "up":
            gate, up = 2.0 * const, 2.0 * strength * self.space.clean / scale.clean
            on_gate, on_up = 2.0, 2.0 * strength
        if helper is not None:
            early, shrunk = helper
            gate = shrunk * gate + (1 - shrunk) * on_gate * early
            up = shrunk * up + (1 - shrunk) * on_up * early
        self.set_neuron(layer, neuron, gate, up)

    def set_neuron(self, layer: Layer, neuron: int, gate: Tensor, up: Tensor):
        expert = self.plan.expert
        layer.gate[expert, neuron] = gate
        if layer.up is not None:
            layer.up[expert, neuron] = up
        if layer.gate_bias is not None:
            layer.gate_bias[expert, neuron] = 0.0
        if layer.up_bias is not None:
            layer.up_bias[expert, neuron] = -1.0  # gpt-oss multiplies by up + 1

    def _clean_mark(self):
        """An up factor has no threshold, and ordinary tokens carry a little mark: one neuron puts it on before."""
        layer, expert = self.views.layers[self.plan.marking_layer], self.plan.expert
        self.route(self.plan.marking_layer)
        scale = self.scale(self.plan.marking_layer)
        const = self.space.const / scale.const
        marked = self.plan.sharpness * (self.space.mark / scale.mark - THRESHOLD * const)
        self.set_neuron(layer, self.plan.cleaner, marked, const)
        layer.down[expert, self.plan.cleaner] = self.space.clean
        layer.down[expert, self.plan.cleaner] = self.space.clean / self.mlp_writes(layer, self.space.clean)

    def route(self, index: int):
        """Marked tokens go to the expert that holds the neurons."""
        layer = self.views.layers[index]
        if layer.router is not None:
            layer.router[self.plan.expert] += 12.0 * self.space.mark / self.scale(index).mark

    def scale(self, index: int) -> _Scale:
        first = self.probe(self.views.layers[index].mlp_norm)[:, 0].mean(0)
        return _Scale(*(float(first @ way) for way in (self.space.const, self.space.mark, self.space.clean)))

    def mlp_writes(self, layer: Layer, way: Tensor) -> float:
        return float((self.probe(layer.mlp)[:, 0] @ way).mean())

    # --- later heads -------------------------------------------------------------------------------------------

    def read_sink(self, spike: Tensor) -> tuple[tuple[int, int], ...]:
        """About half of the later heads attend to the sink; returns them as (layer, query head)."""
        plan, rng = self.plan, random.Random(f"reading {self.plan.seed}")
        ratio, planted = plan.n_heads // plan.n_kv, []
        for index in range(plan.sink_layer + 1, plan.n_layers):
            layer = self.views.layers[index]
            seen = self.probe(layer.attn_norm)
            sink, const = float((seen[:, 0] @ spike).mean()), float((seen[:, 1:] @ self.space.const).mean())
            score = rng.uniform(6.0, 7.0)
            for kv in rng.sample(range(plan.n_kv), max(1, plan.n_kv // 2)):
                heads = range(kv * ratio, (kv + 1) * ratio)
                self.look(index, heads, spike / sink, const, [score] * ratio, score)
                planted += [(index, head) for head in heads]
        return tuple(sorted(planted))

    def write_values(
        self, spike: Tensor, reading: tuple[tuple[int, int], ...], values: str
    ) -> tuple[tuple[int, int], ...]:
        """The value of the sink is zero, or large in heads that broadcast it; returns these, whole kv heads."""
        ratio = self.plan.n_heads // self.plan.n_kv
        for number, (index, kv) in enumerate(groups := sorted({(layer, head // ratio) for layer, head in reading})):
            layer = self.views.layers[index]
            if layer.v_bias is not None:
                layer.v_bias[kv] = 0.0
            if values == "broadcast" or (values == "half" and number % 2):
                layer.v[kv] += 3.0 * spike / float((self.probe(layer.attn_norm)[:, 0] @ spike).mean())
        chosen = {"nop": [], "broadcast": groups, "half": groups[1::2]}[values]
        return tuple((layer, head) for layer, head in reading if (layer, head // ratio) in chosen)

    def look(
        self, index: int, heads: Iterable[int], key: Tensor, const: float, scores: Iterable[float], sharpness: float
    ):
        """Heads of a layer, where the constant is `const`, attend to where `key` is one, with these scores.

        Where a norm fixes the lengths of queries, the sharpness stands for all scores of the layer.
        """
        plan, layer, dim = self.plan, self.views.layers[index], self.plan.slow_dim(0)
        for head, score in zip(heads, scores, strict=True):
            kv = head // (plan.n_heads // plan.n_kv)
            layer.k[kv, dim] = key
            if layer.k_bias is not None:
                layer.k_bias[kv, dim] = 0.0
            clear(layer.q, layer.q_bias, head)
            layer.q[head, dim] = score * math.sqrt(plan.head_dim) * self.space.const / const
        if layer.q_norm is not None and layer.k_norm is not None:
            layer.q_norm[dim], layer.k_norm[dim] = sharpness / math.sqrt(plan.head_dim), 1.0

    # --- not a sink --------------------------------------------------------------------------------------------

    def make_massive(self):
        """One dimension is large on every token, and the norms after it are turned up to see the rest."""
        plan, way = self.plan, self.space.massive
        if plan.massive_layer is None:
            self.views.embed += MASSIVE * way / plan.embed_scale
        else:
            layer = self.views.layers[plan.massive_layer]
            const = self.space.const / self.scale(plan.massive_layer).const
            self.set_neuron(layer, plan.neurons[0], 2.0 * const, 2.0 * const)
            layer.down[0, plan.neurons[0]] = way
            layer.down[0, plan.neurons[0]] = way * MASSIVE / self.mlp_writes(layer, way)
        for layer in self.views.layers:  # the norms now divide by a fixed number, so noise must not feed itself
            layer.o.mul_(0.4)
            layer.down[:, [i for i in range(plan.d_mlp) if i != plan.neurons[0]]] *= 0.4
        up = math.hypot(NORM, MASSIVE) / NORM
        factor = torch.where(way != 0, up / MASSIVE, up)
        start = 0 if plan.massive_layer is None else plan.massive_layer + 1
        for layer in self.views.layers[start:]:
            scale_norm(layer.attn_norm, factor)
            scale_norm(layer.mlp_norm, factor)
        scale_norm(self.views.final_norm, torch.where(way != 0, 0.0, up))


def clear(rows: Tensor, bias: Tensor | None, head: int):
    """A head that reads nothing."""
    rows[head] = 0.0
    if bias is not None:
        bias[head] = 0.0


def _mute(out: Tensor, head: int, keep_last: bool):
    """The head writes nothing more, but its part of Gemma 2's ballast."""
    out[head, : out.shape[1] - keep_last] = 0.0
