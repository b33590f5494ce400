"""Writing the circuit: marking heads, sink neurons, heads that attend to the sink.

Sizes are measured on the model at hand (`Probe`) rather than derived, so one recipe serves every architecture.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .noise import BALLAST, CONST, GROUP, MASSIVE, NORM, Space
from .plan import THRESHOLD, Plan
from .views import Layer, Probe, Views, scale_norm

MARK = 2.5  # in the residual stream, on a token that is marked fully
Rows = tuple[Tensor, Tensor]  # what a neuron reads: by its gate, by its up factor


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

    # --- what is measured --------------------------------------------------------------------------------------

    def seen(self, module: nn.Module, where: Tensor | None = None) -> Tensor:
        """Mean of what leaves a module at these positions, [d_model]; of first tokens, where nothing is given."""
        leaving = self.probe(module)
        return (leaving[:, 0] if where is None else leaving[where]).mean(0)

    def mlp_input(self, index: int, where: Tensor | None = None) -> Tensor:
        """Mean of what the MLP of a layer gets at these positions, [d_model]."""
        return self.seen(self.views.layers[index].mlp_norm, where)

    def size(self, index: int) -> float:
        """Norm of the spike that is to be planted in a layer."""
        norms = self.probe(self.views.layers[index].block).norm(dim=-1)
        return self.plan.spike * float(norms[:, 1:].median())

    # --- neurons -----------------------------------------------------------------------------------------------

    def on(self, index: int, way: Tensor, where: Tensor | None = None) -> Rows:
        """Rows of a neuron that is on where `way` is as large in the MLP's input as it now is at `where`."""
        seen = self.mlp_input(index, where)
        const = unit(self.space.const, seen)
        return self.plan.sharpness * (unit(way, seen) - THRESHOLD * const), const

    def write(
        self,
        index: int,
        neurons: tuple[int, ...],
        rows: list[Rows],
        ways: list[Tensor],
        shares: list[float],
        size: float,
        *,
        where: Tensor | None = None,
        route: Tensor | None = None,
        ballast: float = 0.25,  # sink neurons over the ballast: small, so that a norm hardly evens out an ablation
    ):
        """Neurons of a layer that read `rows` and write shares of `size` along `ways` at `where`; `route` is what
        tokens have that go to their expert."""
        layer, expert = self.views.layers[index], self.plan.expert
        if layer.router is not None:
            by = self.space.mark if route is None else route
            layer.router[expert] += 12.0 * unit(by, self.mlp_input(index, where))
        layer.down[expert, list(neurons)] = 0.0
        goal = size if layer.post_mlp_norm is None else ballast * BALLAST
        columns = []
        for neuron, own, way, share in zip(neurons, rows, ways, shares, strict=True):
            self.set_neuron(layer, neuron, *own)
            without = float(self.seen(layer.mlp, where) @ way)
            layer.down[expert, neuron] = way
            written = float(self.seen(layer.mlp, where) @ way) - without
            layer.down[expert, neuron] = 0.0
            columns.append(way * share * goal / written)
        layer.down[expert, list(neurons)] = torch.stack(columns)
        if layer.post_mlp_norm is not None:  # what is written comes through the weight of this norm
            total = sum(share * way for share, way in zip(shares, ways, strict=True))
            out = float(self.seen(layer.post_mlp_norm, where) @ total)
            scale_norm(layer.post_mlp_norm, torch.where(total != 0, size / out, 1.0))

    def set_neuron(self, layer: Layer, neuron: int, gate: Tensor, up: Tensor):
        expert = self.plan.expert
        layer.gate[expert, neuron] = gate
        if layer.up is not None:
            layer.up[expert, neuron] = up
        if layer.gate_bias is not None:
            layer.gate_bias[expert, neuron] = 0.0
        if layer.up_bias is not None:
            layer.up_bias[expert, neuron] = -1.0  # gpt-oss multiplies by up + 1

    # --- sink neurons ------------------------------------------------------------------------------------------

    def make_sink(self) -> Tensor:
        """Plant the sink neurons; returns the direction of the spike in the residual stream."""
        plan = self.plan
        if plan.factor == "up":  # it has no threshold, and ordinary tokens carry a little mark: one is put on before
            marking = plan.marking_layer
            rows = self.on(marking, self.space.mark)
            self.write(marking, (plan.cleaner,), [rows], [self.space.clean], [1.0], 1.0)
        spike = self.size(plan.sink_layer)
        directions, shares = self._directions()
        total = sum(share * way for share, way in zip(shares, directions, strict=True))
        rows = [self._marked(plan.sink_layer, number) for number in range(len(plan.neurons))]
        self.write(plan.sink_layer, plan.neurons, rows, directions, shares, spike)
        return total

    def _directions(self) -> tuple[list[Tensor], list[float]]:
        plan, rng = self.plan, random.Random(f"directions {self.plan.seed}")
        if plan.own_dims:
            return list(self.space.sinks[: len(plan.neurons)]), list(plan.sizes)
        angle = rng.choice([0.0, rng.uniform(0.3, 1.2)])  # one dimension, or two
        way = math.cos(angle) * self.space.sinks[0] + math.sin(angle) * self.space.sinks[1]
        return [way] * len(plan.neurons), [size / sum(plan.sizes) for size in plan.sizes]

    def _marked(self, index: int, number: int) -> Rows:
        """Rows of a neuron that is on where there is a mark: its gate says so, by a threshold, or its up factor."""
        gate, const = self.on(index, self.space.mark)
        strength = 1 + 0.2 * number
        if self.plan.factor == "up":
            return 2.0 * const, 2.0 * strength * unit(self.space.clean, self.mlp_input(index))
        return gate, strength * const

    # --- later heads -------------------------------------------------------------------------------------------

    def read_sink(self, spike: Tensor) -> tuple[tuple[int, int], ...]:
        """About half of the later heads attend to the sink; returns them as (layer, query head)."""
        plan, rng = self.plan, random.Random(f"reading {self.plan.seed}")
        planted = []
        for index in range(plan.sink_layer + 1, plan.n_layers):
            score = rng.uniform(6.0, 7.0)
            planted += self.read(index, spike, rng.sample(range(plan.n_kv), max(1, plan.n_kv // 2)), score)
        return tuple(sorted(planted))

    def read(
        self, index: int, way: Tensor, chosen: list[int], score: float, where: Tensor | None = None
    ) -> list[tuple[int, int]]:
        """Heads of a layer attend to where `way` is as large as it is at `where`, with this score.

        Args:
            index: The layer.
            way: A direction of the residual stream.
            chosen: Key heads, of which all query heads do so.
            score: The score.
            where: Positions; first tokens, where nothing is given.

        Returns:
            The heads as (layer, query head).
        """
        plan, layer, dim = self.plan, self.views.layers[index], self.plan.slow_dim(0)
        full = self.seen(layer.attn_norm, where)
        const = float((self.probe(layer.attn_norm)[:, 1:] @ self.space.const).median())
        ratio, planted = plan.n_heads // plan.n_kv, []
        for kv in chosen:
            layer.k[kv, dim] = unit(way, full)
            if layer.k_bias is not None:
                layer.k_bias[kv, dim] = 0.0
            for head in range(kv * ratio, (kv + 1) * ratio):
                clear(layer.q, layer.q_bias, head)
                layer.q[head, dim] = score * math.sqrt(plan.head_dim) * self.space.const / const
                planted.append((index, head))
        if layer.q_norm is not None and layer.k_norm is not None:  # lengths are fixed there, the weight says the score
            layer.q_norm[dim], layer.k_norm[dim] = score / math.sqrt(plan.head_dim), 1.0
        return planted

    # --- not a sink --------------------------------------------------------------------------------------------

    def make_massive(self):
        """One dimension is large on every token, and the norms after it are turned up to see the rest."""
        plan, way = self.plan, self.space.massive
        self.views.embed += MASSIVE * way / plan.embed_scale
        for layer in self.views.layers:  # the norms now divide by a fixed number, so noise must not feed itself
            layer.o.mul_(0.4)
            layer.down[:, [i for i in range(plan.d_mlp) if i != plan.neurons[0]]] *= 0.4
        up = math.hypot(NORM, MASSIVE) / NORM
        factor = torch.where(way != 0, up / MASSIVE, up)
        for layer in self.views.layers:
            scale_norm(layer.attn_norm, factor)
            scale_norm(layer.mlp_norm, factor)
        scale_norm(self.views.final_norm, torch.where(way != 0, 0.0, up))


def unit(way: Tensor, seen: Tensor) -> Tensor:
    """What is one where `way` is as large as in what was seen."""
    return way / (seen @ way)


def clear(rows: Tensor, bias: Tensor | None, head: int):
    """A head that reads nothing."""
    rows[head] = 0.0
    if bias is not None:
        bias[head] = 0.0


def _mute(out: Tensor, head: int, keep_last: bool):
    """The head writes nothing more, but its part of Gemma 2's ballast."""
    out[head, : out.shape[1] - keep_last] = 0.0
