"""Candidates for sink neurons from the weights alone, without a forward pass.

A gated neuron writes `act(g x)(u x)` times its column of the down projection. Where the activation function is close to
the identity, this is a quadratic form of the normalised input `x`: the symmetric part of `g u^T`, of rank two, whose
eigenvalue of largest magnitude is `(|g||u| + |g.u|) / 2` (Sun, Canziani, LeCun, Zhu 2026: a directional quadratic
amplifier). A normalised input has length `sqrt(d_model)`, so the largest norm that the neuron can write is `d_model`
times that eigenvalue times the norm of its column. A neuron without a gate is linear in this regime: its largest norm
is `sqrt(d_model)` times the norm of its row times the norm of its column.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.measure import Positive, Result, Setup, measurement
from sinkscope.models.experts import in_rows
from sinkscope.models.target import Target
from sinkscope.sinks.first_token.result import Member
from sinkscope.sinks.first_token.neurons import column_norms, gain_of

_NORMS = ("post_attention_layernorm", "ln_mlp", "input_layernorm")  # norms before an MLP parallel to the attention


@dataclass(frozen=True)
class Candidate(Member):
    """A neuron whose weights allow it to write a large norm.

    Attributes:
        reach: Largest norm that the neuron can write for a normalised input.
        z: How many standard deviations log(reach) lies above the mean of its layer.
        cosine: Cosine between the neuron's gate row and its up row. None without a gate.
    """

    reach: float
    z: float
    cosine: float | None


@dataclass(frozen=True)
class LayerReach:
    """The neurons of a layer: median reach, largest reach and largest z."""

    layer: int
    median: float
    largest: float
    z: float


@dataclass(frozen=True, kw_only=True)
class NeuronScreen(Result):
    """Neurons ranked by what their weights allow them to write. The ranking is no proof of causality.

    Attributes:
        candidates: Candidate neurons, largest reach first, at most `top_k`.
        layers: Reach in every layer of the model.
        neurons: Number of neurons ranked.
    """

    kind: ClassVar[str] = "screen"

    candidates: tuple[Candidate, ...]
    layers: tuple[LayerReach, ...]
    neurons: int

    def conclusion(self) -> str:
        """The first candidate, beside the one after it, and what the ranking does not say."""
        first, *others = self.candidates
        beside = f"; the next is {others[0]} with {others[0].reach:.4g}" if others else ""
        return (
            f"By its weights alone, {first} can write most: a norm of up to {first.reach:.4g}, {first.z:.1f} "
            f"standard deviations above its layer{beside}; only find-sinks without --screen shows whether any makes a "
            "sink."
        )

    def details(self) -> list[str]:
        """How many neurons there are, and which layers they are in."""
        held = sorted({c.layer for c in self.candidates})
        where = f"layer{'s' * (len(held) > 1)} {', '.join(map(str, held))}"
        return [
            f"{self.neurons:,} neurons of {len(self.layers)} layers were ranked without a forward pass.",
            f"The first {len(self.candidates)} are in {where}.",
        ]


@measurement(
    group="Sinks",
    figure="sinkscope.figures.first_token:draw_screen",
    command="find-sinks",
    flag="screen",
    loading="stream",
    scan={
        "order": 30,
        "seconds": [0.1, 0.1],
        "numbers": {"first candidate's reach, in deviations": ["candidates.0.z", "candidates.1.z"]},
    },
)
def neuron_screen(setup: Setup, *, top_k: Positive = 8) -> NeuronScreen:
    """Rank all neurons by the norm that their weights allow them to write, without a forward pass; this is no proof.

    Every layer is read once. Gate and up rows include the gain of the norm before the MLP; columns of the down
    projection include that of the norm behind it, if there is one. Biases and the router of a mixture are left out.

    Args:
        top_k: Number of candidates shown.

    Example:
        sinkscope find-sinks --screen --model ./checkpoint
    """
    target, layers, found = setup.target, list[LayerReach](), list[Candidate]()
    neurons = 0
    for layer in range(target.n_layers):
        parts = reaches(target, layer)
        reach = torch.cat([part.reach for part in parts])
        log = reach.clamp(min=1e-30).log()  # reaches in a layer differ by many orders of magnitude
        z = (log - log.mean()) / log.std(correction=0).clamp(min=1e-12)
        neurons += len(reach)
        layers.append(LayerReach(layer, float(reach.median()), float(reach.max()), float(z.max())))
        width = len(parts[0].reach)
        for flat in reach.topk(min(top_k, len(reach))).indices.tolist():
            number = min(flat // width, len(parts) - 1)  # a shared expert comes last, and may have another width
            part, neuron = parts[number], flat - number * width
            cosine = None if part.cosine is None else float(part.cosine[neuron])
            found.append(Candidate(layer, part.expert, neuron, float(reach[flat]), float(z[flat]), cosine))
        setup.progress("layers", layer + 1, target.n_layers)
    best = sorted(found, key=lambda c: -c.reach)[:top_k]
    return NeuronScreen(candidates=tuple(best), layers=tuple(layers), neurons=neurons)


@dataclass(frozen=True)
class Reaches:
    """The neurons of a layer, or of one expert of it.

    Attributes:
        expert: Expert number. None if the layer is not a mixture.
        reach: Largest norm that each neuron can write for a normalised input.
        cosine: Cosine between gate and up row. None without a gate.
    """

    expert: int | None
    reach: Float[Tensor, " neuron"]
    cosine: Float[Tensor, " neuron"] | None


@torch.no_grad()
def reaches(target: Target, layer: int) -> list[Reaches]:
    """The largest norm that the neurons of a layer can write, by weights alone; per expert in a mixture."""
    found: list[Reaches] = []
    with target.loaded(layer):
        size, before = target.d_model, _effective(target, layer)
        for expert, rows in _rows(target, layer):
            inside = [before(part.float()) for part in rows]
            lengths = [part.norm(dim=-1) for part in inside]
            columns = column_norms(target, layer, expert).float()
            if len(rows) == 1:
                found.append(Reaches(expert, (math.sqrt(size) * lengths[0] * columns).cpu(), None))
                continue
            dot, both = (inside[0] * inside[1]).sum(-1), lengths[0] * lengths[1]
            reach = size * (both + dot.abs()) / 2 * columns
            found.append(Reaches(expert, reach.cpu(), (dot / both.clamp(min=1e-30)).cpu()))
    return found


def _rows(target: Target, layer: int) -> Iterator[tuple[int | None, list[Tensor]]]:
    """Per expert: the gate rows and the up rows, or the rows of the only input projection; `[neuron d_model]`."""
    a = target.adapter
    if target.is_mixture(layer):
        module: Any = target.sub(layer, a.experts or "")
        for expert in range(int(module.num_experts)):
            yield expert, [weight for weight, _ in in_rows(module, expert)]
    if not target.has_mlp(layer, None):
        return
    rows = [target.rows_of(target.mlp_part(layer, name), target.d_model) for name in ("gate", "up") if getattr(a, name)]
    yield None, list(rows[0].chunk(2)) if a.fused_gate_up else rows


def _effective(target: Target, layer: int) -> Any:
    """Rows as they act on a normalised vector before the norm's gain; behind a LayerNorm they are centred, too."""
    module: Any = target.layers[layer]
    path = target.adapter.mid
    if path == target.adapter.mlp:  # the MLP reads the residual stream itself
        return lambda rows: rows
    norm: Any = target.sub(layer, path) if path else next(getattr(module, n) for n in _NORMS if hasattr(module, n))
    gain = gain_of(target, norm)
    lifted = norm(torch.ones(1, target.d_model, device=target.device, dtype=target.dtype))[0].float()
    centred = bool((lifted - gain).abs().max() > 0.5 * gain.abs().max())  # a vector of ones is zero once centred

    def act(rows: Tensor) -> Tensor:
        scaled = rows * gain
        return scaled - scaled.mean(-1, keepdim=True) if centred else scaled

    return act
