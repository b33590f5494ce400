"""Distance of n repetitions to the token alone (Yona et al. 2025, theorem 4.1, Fig. 5, appendix D).

The output of attention on a prefix and n repetitions is compared with its output on the repeated token alone. One
causal pass over the prefix and N repetitions contains every n up to N: position k + n - 1 sees the prefix and n copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from sinkscope.errors import UnsupportedError
from sinkscope.hooks.trace.run import trace
from sinkscope.measure import Setup
from sinkscope.models.grouped_heads import output_factors
from sinkscope.models.target import Target
from sinkscope.results.claims import Outcome
from sinkscope.results.style import long_table
from sinkscope.results.tables import Table
from sinkscope.sinks.repetition.sweep import Reading, Sweep, beside_copies, claim_of_copies, rounded
from sinkscope.sinks.tokens import TokenRows
from sinkscope.tap.observers import attention_rows

ROUNDING = 8.0  # distances below this many rounding errors of the largest output are ignored


@dataclass(frozen=True, kw_only=True)
class DistanceReading(Reading):
    """L2 distance of the attention's output after n repetitions to its output on the token alone.

    Layers without softmax attention are left out; "the first layer" is the first of the others.

    The theorem bounds it in the first attention layer only, head by head, by `2 r k exp(delta) / n`: k is the number of
    tokens before the repetitions, r the largest norm of `v W_O` over the positions, delta the spread of the scores in
    the row. NaN stands for no bound. The claim is of the likeness in the first layer: 1 less the distance over the norm
    of the output on the token alone.

    Attributes:
        sweep: What was repeated.
        layers: The layers that were read.
        outside: Why the theorem does not apply to the first layer of this model. None if it applies.
        distance: The distance, for each layer read.
        alone: Norm of the output on the token alone.
        bound: Bound in the first layer, the sum over its heads.
        closest: Largest ratio of a head's distance to its bound, over every n.
    """

    sweep: Sweep
    layers: tuple[int, ...]
    outside: str | None
    distance: Float[np.ndarray, "layer token n"]
    alone: Float[np.ndarray, "layer token"]
    bound: Float[np.ndarray, "token n"]
    closest: Float[np.ndarray, "token head"]

    @property
    def holds(self) -> bool:
        """Whether every head of the first layer stays within its bound at every n; false if there is no bound."""
        return bool(self.closest.max() <= 1)

    def facts(self) -> list[str]:
        """Whether the bound holds, and how close it is."""
        if self.outside is not None:
            return [f"Theorem 4.1 does not apply to this model: {self.outside}."]
        holds = "holds" if self.holds else "does not hold"
        closest = f"the head that comes closest to it reaches {self.closest.max():.1%} of it"
        return [f"The bound of theorem 4.1 {holds}: {closest}."]

    def rows(self) -> Table:
        """One row per layer and token."""
        columns = {"alone": self.alone, "first": self.distance[:, :, 0], "last": self.distance[:, :, -1]}
        return long_table(columns, layer=self.layers, token=self.sweep.tokens)

    def draw(self) -> Any:
        """Distance over n in the first and the last layer read, and the bound in the first."""
        panels = {f"layer {self.layers[0]}": self.distance[0], f"bound in layer {self.layers[0]}": self.bound}
        panels[f"layer {self.layers[-1]}"] = self.distance[-1]
        return self.sweep.curves(np.array(list(panels.values())), list(panels), "distance")


@torch.no_grad()
def read_distances(setup: Setup, sweep: Sweep, rows: TokenRows, all_layers: bool) -> DistanceReading:
    """Compare n repetitions with the token alone.

    Args:
        setup: The model.
        sweep: What is repeated.
        rows: The sequences.
        all_layers: Read every layer, even if the model is not in memory; only the first has a bound.
    """
    target = setup.target
    layers = target.attending
    if not layers:
        raise UnsupportedError(f"no layer of {target.name} has softmax attention, so there is no distance to read")
    if not all_layers and not target.resident:
        layers = layers[:1]
    first, before = layers[0], len(sweep.before)
    weights = output_factors(target, first)
    # Every token alone, so attending to itself: those of the prefix, then the repeated ones.
    values, outputs = attention_outputs(target, torch.cat([rows[0, :before], rows[:, -1]])[:, None], layers)
    sizes, alone = head_norms(values, weights), outputs[:, before:]
    distances = []
    bounds = []
    closest = []
    for number, ids in enumerate(rows):
        spread = torch.zeros(len(weights), len(ids))

        def look(_layer: int, begin: int, probs: Tensor, spread: Tensor = spread) -> None:
            end = begin + probs.shape[2]
            visible = torch.ones(end, probs.shape[-1], dtype=torch.bool, device=probs.device).tril()[begin:]
            lowest = torch.where(visible, probs[0], torch.inf).amin(-1)
            spread[:, begin:end] = (probs[0].amax(-1).log() - lowest.log()).cpu()

        with attention_rows(target, look, layers=[first]):
            z, output = attention_outputs(target, ids[None], layers)
        heads = head_norms(z[before:] - values[before + number], weights)
        largest = sizes[:, [*range(before), before + number]].amax(1)
        bound = 2 * before * largest[:, None] * spread[:, before:].exp() / torch.arange(1, len(ids) - before + 1)
        rounding = ROUNDING * torch.finfo(target.dtype).eps * largest.max()  # between two equal outputs
        distances.append((output[:, before:] - alone[:, [number]]).norm(dim=-1))
        bounds.append(bound.sum(0))
        closest.append(torch.where(heads > rounding, heads / bound, 0.0).amax(-1))
        setup.progress("repetitions", number + 1, len(rows))
    norms = alone.norm(dim=-1)
    texts = beside_copies(setup, rows, before)
    last = [attention_outputs(target, each, [first])[1][0].unflatten(0, each.shape)[:, -1] for each in texts]
    like = 1 - (torch.stack(last) - alone[0]).norm(dim=-1) / norms[0]
    like = like[:, like.isfinite().all(0)]  # it may write nothing on the token alone
    outside = outside_theorem(target, first, rows.shape[1])
    gives = "make the first layer's output {} like that on the token alone"
    outcome = Outcome("likeness to the token alone", (first,), gives=gives)
    applies = torch.nan if outside is not None else 1.0
    return DistanceReading(
        sweep=sweep,
        layers=tuple(layers),
        outside=outside,
        distance=rounded(torch.stack(distances, dim=1)[:, :, sweep.counts - 1]),
        alone=rounded(norms),
        bound=rounded(applies * torch.stack(bounds)[:, sweep.counts - 1]),
        closest=rounded(applies * torch.stack(closest)),
        claims=(claim_of_copies(sweep.max_repeats, outcome, like),) if like.numel() else (),
    )


def attention_outputs(
    target: Target, rows: TokenRows, layers: Sequence[int]
) -> tuple[Float[Tensor, "row_pos head d_head"], Float[Tensor, "layer row_pos d_model"]]:
    """What the heads of the first of some layers mix, and what the attention of each writes, in float32.

    Args:
        target: The model.
        rows: The sequences, whose positions come one after the other.
        layers: The layers.
    """
    if target.shards.size > 1:
        raise UnsupportedError(
            f"distances call the output projections of {target.name} by themselves, which are split over processes: "
            "load it in one process (device_map= spreads it over devices)"
        )
    sites = [f"blocks.{layer}.attn.hook_z" for layer in layers]
    mixed = trace(target, rows, sites, lambda z: z.flatten(0, 1))
    written = []
    for layer, site in zip(layers, sites, strict=True):
        with target.loaded(layer):
            output = target.output_projection(layer)(mixed[site].flatten(1).to(target.device))
        written.append(output.float().cpu())
    return mixed[sites[0]].float(), torch.stack(written)


def head_norms(
    z: Float[Tensor, "pos head d_head"], weights: Float[Tensor, "head d_head width"]
) -> Float[Tensor, "head pos"]:
    """Norm of what each head writes."""
    return einsum(z, weights, "pos head d_head, head d_head width -> head pos width").norm(dim=-1).cpu()


def outside_theorem(target: Target, layer: int, length: int) -> str | None:
    """Why theorem 4.1 does not apply to a layer and sequences of that length; None if it applies."""
    if layer > 0:
        return f"other layers come before layer {layer}, the first with attention, and they tell the copies apart"
    if target.adapter.absolute_positions:
        return "absolute positions make a token's value depend on where it stands"
    if target.adapter.learned_sinks:
        return "learned sink logits take weight from the token alone, which repetition gives back"
    window = getattr(target.config, "sliding_window", None)
    kinds = getattr(target.config, "layer_types", None)
    if not window or (kinds and kinds[layer] != "sliding_attention") or window >= length:
        return None
    return f"the first layer has a sliding window of {window} tokens, which the prefix leaves"
