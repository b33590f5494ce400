"""Distance of n repetitions to the token alone (Yona et al. 2025, theorem 4.1, Fig. 5, appendix D).

The output of attention on a prefix and n repetitions is compared with its output on the repeated token alone. One
causal pass over the prefix and N repetitions contains every n up to N: position k + n - 1 sees the prefix and n copies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from einops import einsum, rearrange, reduce
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.files.notation import counted
from sinkscope.measure import Setup
from sinkscope.models.target import Target
from sinkscope.sinks.repetition.sweep import Sweep, SweepRows, curves_figure, rounded
from sinkscope.trace.attention import attention_rows

ROUNDING = 8.0  # distances below this many rounding errors of the largest output are ignored
KeepOutput = Callable[[int, Tensor, Tensor], None]
"""Called with a layer, the values of its heads `[pos head d_head]`, and the output of its attention `[pos d_model]`."""


@dataclass(frozen=True)
class DistanceReading:
    """L2 distance of the attention's output after n repetitions to its output on the token alone.

    The theorem bounds it in the first attention layer only, head by head, by `2 r k exp(delta) / n`: k is the number of
    tokens before the repetitions, r the largest norm of `v W_O` over the positions, delta the spread of the scores in
    the row. NaN stands for no bound.

    Attributes:
        outside: Why the theorem does not apply to the first layer of this model. None if it applies.
        distance: The distance, for each layer read.
        alone: Norm of the output on the token alone.
        bound: Bound in the first layer, the sum over its heads.
        closest: Largest ratio of a head's distance to its bound, over every n.
    """

    outside: str | None
    distance: Float[np.ndarray, "layer token n"]
    alone: Float[np.ndarray, "layer token"]
    bound: Float[np.ndarray, "token n"]
    closest: Float[np.ndarray, "token head"]

    @property
    def holds(self) -> bool | None:
        """Whether every head of the first layer stays within its bound at every n; None if there is no bound."""
        return None if self.outside is not None else bool(self.closest.max() <= 1)

    def relative(self, n: int) -> float:
        """Median over tokens of the first layer's distance at `counts[n]`, over the norm of the token alone."""
        return float(np.median(self.distance[0, :, n] / self.alone[0]))

    def conclusion(self, sweep: Sweep) -> str:
        """Whether repetition makes the token look like the token alone, beside one repetition and the bound."""
        start = self.relative(0)
        end = self.relative(-1)
        verdict = "does not converge"
        if end < start / 2:
            verdict = "converges"
        said = (
            f"Repetition {verdict} to the token alone: after {sweep.times} the first layer's output "
            f"differs from the token's own by {end:.2%}, after one by {start:.2%}"
        )
        if self.outside is not None:
            return f"{said}; no bound applies."
        bound = "within" if self.holds else "outside"
        return f"{said}, {bound} theorem 4.1's bound."

    def details(self, sweep: Sweep) -> list[str]:
        """What was read, and how close the bound is."""
        lines = [
            f"{len(sweep.before)} tokens stand before the repetitions; the distances are medians over "
            f"{counted(len(sweep.tokens), 'token')} in {counted(len(self.distance), 'layer')}."
        ]
        if self.outside is not None:
            lines.append(f"Theorem 4.1 does not apply to this model: {self.outside}.")
        else:
            lines.append(f"The head that comes closest to its bound reaches {self.closest.max():.1%} of it.")
        return lines

    def rows(self, sweep: Sweep) -> list[dict[str, Any]]:
        """One row per token and layer; the bound is that of the first layer."""
        table: list[dict[str, Any]] = []
        for row, token in enumerate(sweep.tokens):
            for layer in range(len(self.distance)):
                first_layer = layer == 0 and self.outside is None
                table.append(
                    {
                        "token": token,
                        "layer": layer,
                        "alone": self.alone[layer, row],
                        "first": self.distance[layer, row, 0],
                        "last": self.distance[layer, row, -1],
                        "bound": self.bound[row, -1] if first_layer else None,
                        "closest_to_bound": self.closest[row].max() if first_layer else None,
                    }
                )
        return table

    def draw(self, sweep: Sweep) -> Any:
        """Distance over n in the first, a middle and the last layer read, and the bound in the first."""
        panels: dict[str, np.ndarray] = {"layer 0": self.distance[0]}
        if self.outside is None:
            panels["bound in layer 0"] = self.bound
        for layer in sorted({len(self.distance) // 2, len(self.distance) - 1} - {0}):
            panels[f"layer {layer}"] = self.distance[layer]
        return curves_figure(sweep, panels, "distance")


@dataclass
class TokenDistances:
    """What one token gives, for every number of repetitions."""

    whole: Float[Tensor, "layer n"]
    alone: Float[Tensor, " layer"]
    heads: Float[Tensor, "head n"]
    head_alone: Float[Tensor, " head"]
    spread: Float[Tensor, "head n"]
    prefix: Float[Tensor, "head n"]

    @classmethod
    def zeros(cls, layers: int, heads: int, repeats: int) -> TokenDistances:
        """Numbers to be filled in."""
        by_head = [torch.zeros(heads, repeats) for _ in range(3)]
        return cls(torch.zeros(layers, repeats), torch.zeros(layers), by_head[0], torch.zeros(heads), *by_head[1:])


@dataclass(frozen=True)
class TokenBound:
    """The bound of theorem 4.1 for one token, and its distances where rounding is told from distance."""

    distance: Float[Tensor, "layer n"]
    bound: Float[Tensor, " n"]
    closest: Float[Tensor, " head"]


def read_distances(setup: Setup, rows: SweepRows, all_layers: bool) -> DistanceReading:
    """Compare n repetitions with the token alone.

    Args:
        setup: The model.
        rows: The sequences.
        all_layers: Read every layer, even if the model is not in memory; only the first has a bound.
    """
    target = setup.target
    layers = 1
    if all_layers or target.resident:
        layers = target.n_layers
    weights = output_weights(target)
    prefix = prefix_values(target, rows.ids[0, : rows.start], weights)
    outside = outside_theorem(target, rows.ids.shape[1])
    tokens: list[TokenDistances] = []
    bounds: list[TokenBound] = []
    for number, ids in enumerate(rows.ids, 1):
        token = token_distances(target, ids, rows.start, layers, weights)
        tokens.append(token)
        bounds.append(token_bound(target, token, rows.start, torch.maximum(prefix, token.head_alone)))
        setup.progress("repetitions", number, len(rows.ids))
    bound = torch.stack([one.bound for one in bounds])
    closest = torch.stack([one.closest for one in bounds])
    if outside is not None:
        bound = torch.full_like(bound, torch.nan)
        closest = torch.full_like(closest, torch.nan)
    places = rows.sweep.counts - 1
    return DistanceReading(
        outside=outside,
        distance=rounded(torch.stack([one.distance for one in bounds], dim=1)[:, :, places]),
        alone=rounded(torch.stack([token.alone for token in tokens], dim=1)),
        bound=rounded(bound[:, places]),
        closest=rounded(closest),
    )


def token_bound(target: Target, token: TokenDistances, before: int, largest: Float[Tensor, " head"]) -> TokenBound:
    """The bound of theorem 4.1, and distances that are more than rounding.

    Args:
        target: The model.
        token: The distances.
        before: Number of tokens before the repetitions.
        largest: Largest norm of `v W_O` of each head.
    """
    heads = token.heads
    whole = token.whole.clone()
    if not target.adapter.absolute_positions and not target.adapter.learned_sinks:
        # Without weight on the prefix both outputs are the token's value and differ only by rounding.
        gone = reduce(token.prefix == 0, "head n -> n", "all")
        heads = heads.masked_fill(gone, 0.0)
        whole[0] = whole[0].masked_fill(gone, 0.0)
    counts = torch.arange(1, heads.shape[1] + 1)
    bound = 2 * before * rearrange(largest, "head -> head 1") * token.spread.exp() / counts
    floor = rounding(target, torch.maximum(token.head_alone, largest.max()))
    ratio = torch.where(heads > rearrange(floor, "head -> head 1"), heads / bound, 0.0)
    return TokenBound(whole, reduce(bound, "head n -> n", "sum"), ratio.amax(-1))


@torch.no_grad()
def token_distances(
    target: Target, ids: Int[Tensor, " pos"], start: int, layers: int, weights: Float[Tensor, "head d_head d_model"]
) -> TokenDistances:
    """Run a token alone, then the prefix and its repetitions, and compare the outputs of attention."""
    repeats = len(ids) - start
    token = TokenDistances.zeros(layers, len(weights), repeats)
    lone: dict[int, tuple[Tensor, Tensor]] = {}

    def keep_lone(layer: int, z: Tensor, output: Tensor) -> None:
        lone[layer] = z, output
        token.alone[layer] = output.norm()
        if layer == 0:
            token.head_alone[:] = head_norms(z, weights)[:, 0]

    def compare(layer: int, z: Tensor, output: Tensor) -> None:
        lone_z, lone_output = lone[layer]
        token.whole[layer] = (output[start:] - lone_output).norm(dim=-1)
        if layer == 0:
            token.heads[:] = head_norms(z[start:] - lone_z, weights)

    def look(_layer: int, begin: int, probs: Tensor) -> None:
        end = begin + probs.shape[2]
        if end <= start:
            return
        first = max(begin, start)
        probs = probs[0, :, first - begin :]
        queries = torch.arange(first, end, device=probs.device)
        visible = torch.arange(probs.shape[-1], device=probs.device) <= rearrange(queries, "query -> query 1")
        lowest = torch.where(visible, probs, torch.inf).amin(-1)
        token.spread[:, first - start : end - start] = probs.amax(-1).log() - lowest.log()
        token.prefix[:, first - start : end - start] = probs[..., :start].sum(-1)

    attention_outputs(target, ids[-1:], layers, keep_lone)
    with attention_rows(target, look, layers=[0]):
        attention_outputs(target, ids, layers, compare)
    return token


def attention_outputs(target: Target, ids: Int[Tensor, " pos"], layers: int, keep: KeepOutput) -> None:
    """Run one sequence and call `keep` in float32 for each of the first layers."""

    def watch(layer: int) -> tuple[Any, str, Any]:
        def see(_module: object, inputs: tuple[Any, ...], _kwargs: object, output: Tensor) -> None:
            z = inputs[0].reshape(len(ids), target.n_heads, -1)
            keep(layer, z.float(), output.reshape(len(ids), -1).float())

        return target.output_projection(layer), "post", see

    with target.hooks(*[watch(layer) for layer in range(layers)]):
        target.forward(ids[None], upto=layers - 1)


def output_weights(target: Target) -> Float[Tensor, "head d_head d_model"]:
    """W_O of every head of the first layer, float32."""
    with target.loaded(0):
        width = target.n_heads * len(target.head_columns(0, 0))
        weight = target.rows_of(target.output_projection(0), width)
        return rearrange(weight.float(), "d_model (head d_head) -> head d_head d_model", head=target.n_heads)


def head_norms(
    z: Float[Tensor, "pos head d_head"], weights: Float[Tensor, "head d_head d_model"]
) -> Float[Tensor, "head pos"]:
    """Norm of what each head writes, one head at a time: all at once would be head x pos x d_model numbers."""
    norms: list[Tensor] = []
    for head, weight in enumerate(weights):
        norms.append(einsum(z[:, head], weight, "pos d_head, d_head d_model -> pos d_model").norm(dim=-1))
    return torch.stack(norms).cpu()


@torch.no_grad()
def prefix_values(
    target: Target, prefix: Int[Tensor, " pos"], weights: Float[Tensor, "head d_head d_model"]
) -> Float[Tensor, " head"]:
    """Largest norm of `v W_O` of each head over the tokens of the prefix, each alone, so attending to itself."""
    norms: list[Tensor] = []

    def keep(_layer: int, z: Tensor, _output: Tensor) -> None:
        norms.append(head_norms(z, weights))

    for position in range(len(prefix)):
        attention_outputs(target, prefix[position : position + 1], 1, keep)
    return torch.cat(norms, dim=1).amax(1)


def rounding(target: Target, size: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """The difference that rounding allows between two equal outputs of that size."""
    return ROUNDING * torch.finfo(target.dtype).eps * size


def outside_theorem(target: Target, length: int) -> str | None:
    """Why theorem 4.1 does not apply to sequences of that length; None if it applies."""
    if target.adapter.absolute_positions:
        return "absolute positions make a token's value depend on where it stands"
    if target.adapter.learned_sinks:
        return "learned sink logits take weight from the token alone, which repetition gives back"
    window = getattr(target.config, "sliding_window", None)
    kinds = getattr(target.config, "layer_types", None)
    if not window or (kinds and kinds[0] != "sliding_attention") or window >= length:
        return None
    return f"the first layer has a sliding window of {window} tokens, which the prefix leaves"
