"""Distance of n repetitions to the token alone (Yona et al. 2025, theorem 4.1, Fig. 5, appendix D).

The output of attention on a prefix and n repetitions is compared with its output on the repeated token alone. One
causal pass over the prefix and N repetitions contains every n up to N: position k + n - 1 sees the prefix and n copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.errors import UnsupportedError
from sinkscope.measure import Setup
from sinkscope.models.modules.down_projections import input_columns
from sinkscope.models.target import Target
from sinkscope.results.style import long_table
from sinkscope.results.tables import Table
from sinkscope.sinks.repetition.sweep import Reading, Sweep, rounded
from sinkscope.sinks.tokens import TokenRows
from sinkscope.tap.observers import attention_rows

ROUNDING = 8.0  # distances below this many rounding errors of the largest output are ignored
KeepOutput = Callable[[int, Tensor, Tensor], None]
"""Called with a layer, the values of its heads `[pos head d_head]`, and the output of its attention `[pos d_model]`."""


@dataclass(frozen=True)
class DistanceReading(Reading):
    """L2 distance of the attention's output after n repetitions to its output on the token alone.

    Layers without softmax attention are left out; "the first layer" is the first of the others.

    The theorem bounds it in the first attention layer only, head by head, by `2 r k exp(delta) / n`: k is the number of
    tokens before the repetitions, r the largest norm of `v W_O` over the positions, delta the spread of the scores in
    the row. NaN stands for no bound.

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
    def holds(self) -> bool | None:
        """Whether every head of the first layer stays within its bound at every n; None if there is no bound."""
        return None if self.outside is not None else bool(self.closest.max() <= 1)

    def conclusion(self) -> str:
        """Whether repetition makes the token look like the token alone, beside one repetition and the bound."""
        bound = "; no bound applies"
        if self.outside is None:
            bound = f", {'within' if self.holds else 'outside'} theorem 4.1's bound"
        start, *_, end = np.median(self.distance[0], axis=0)
        size = np.median(self.alone[0])
        if size == 0:
            return (
                f"The attention of layer {self.layers[0]} writes nothing for a token alone; after {self.sweep.times} "
                f"its output differs from that by {end:.4g}, after one by {start:.4g}{bound}."
            )
        start, *_, end = np.median(self.distance[0].T / self.alone[0], axis=1)
        verdict = "brings" if end < start else "does not bring"
        return (
            f"Repetition {verdict} the first layer's output nearer to the token alone: after {self.sweep.times} "
            f"it differs by {end:.2%}, after one by {start:.2%}{bound}."
        )

    def details(self) -> list[str]:
        """How close the bound is."""
        bound = f"The head that comes closest to its bound reaches {self.closest.max():.1%} of it."
        if self.outside is not None:
            bound = f"Theorem 4.1 does not apply to this model: {self.outside}."
        return [bound]

    def rows(self) -> Table:
        """One row per layer and token."""
        columns = {"alone": self.alone, "first": self.distance[:, :, 0], "last": self.distance[:, :, -1]}
        return long_table(columns, layer=self.layers, token=self.sweep.tokens)

    def draw(self) -> Any:
        """Distance over n in the first, a middle and the last layer read, and the bound in the first."""
        first = f"layer {self.layers[0]}"
        panels: dict[str, np.ndarray] = {first: self.distance[0]}
        if self.outside is None:
            panels[f"bound in {first}"] = self.bound
        for number in sorted({len(self.layers) // 2, len(self.layers) - 1} - {0}):
            panels[f"layer {self.layers[number]}"] = self.distance[number]
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
    layers = list(filter(target.has_attention, range(target.n_layers)))
    if not layers:
        raise UnsupportedError(f"no layer of {target.name} has softmax attention, so there is no distance to read")
    if not all_layers and not target.resident:
        layers = layers[:1]
    before = len(sweep.before)
    weights = output_weights(target, layers[0])
    values = []
    outputs = []

    def keep(_layer: int, z: Tensor, output: Tensor) -> None:
        values.append(z)
        outputs.append(output)

    # Every token alone, so attending to itself: those of the prefix, then the repeated ones.
    attention_outputs(target, torch.cat([rows[0, :before], rows[:, -1]])[:, None], layers, keep)
    sizes = head_norms(values[0], weights)
    alone = torch.stack(outputs)[:, before:]
    distances = []
    bounds = []
    closest = []
    for number, ids in enumerate(rows):
        value = values[0][before + number]
        distance, heads, spread = token_distances(target, ids, before, value, alone[:, number], layers, weights)
        largest = torch.maximum(sizes[:, :before].amax(1), sizes[:, before + number])
        bound = (
            2 * before * rearrange(largest, "head -> head 1") * spread.exp() / torch.arange(1, len(ids) - before + 1)
        )
        rounding = ROUNDING * torch.finfo(target.dtype).eps * largest.max()  # between two equal outputs
        distances.append(distance)
        bounds.append(bound.sum(0))
        closest.append(torch.where(heads > rounding, heads / bound, 0.0).amax(-1))
        setup.progress("repetitions", number + 1, len(rows))
    outside = outside_theorem(target, layers[0], rows.shape[1])
    applies = torch.nan if outside is not None else 1.0
    return DistanceReading(
        sweep,
        layers=tuple(layers),
        outside=outside,
        distance=rounded(torch.stack(distances, dim=1)[:, :, sweep.counts - 1]),
        alone=rounded(alone.norm(dim=-1)),
        bound=rounded(applies * torch.stack(bounds)[:, sweep.counts - 1]),
        closest=rounded(applies * torch.stack(closest)),
    )


def token_distances(
    target: Target,
    ids: Int[Tensor, " pos"],
    before: int,
    value: Float[Tensor, "head d_head"],
    alone: Float[Tensor, "layer d_model"],
    layers: Sequence[int],
    weights: Float[Tensor, "head d_head d_model"],
) -> tuple[Float[Tensor, "layer n"], Float[Tensor, "head n"], Float[Tensor, "head n"]]:
    """Run a prefix and repetitions, and compare with the token alone.

    Args:
        target: The model.
        ids: The prefix and the repetitions.
        before: Length of the prefix.
        value: Values of the first layer's heads on the token alone.
        alone: Output of each layer's attention on the token alone.
        layers: The layers.
        weights: W_O of the first of them.

    Returns:
        The distance of each layer, that of each head of the first layer, and the spread of the scores there.
    """
    repeats = len(ids) - before
    distance = torch.zeros(len(alone), repeats)
    heads = torch.zeros(len(weights), repeats)
    spread = torch.zeros(len(weights), repeats)

    def compare(layer: int, z: Tensor, output: Tensor) -> None:
        number = layers.index(layer)
        distance[number] = (output[before:] - alone[number]).norm(dim=-1)
        if number == 0:
            heads[:] = head_norms(z[before:] - value, weights)

    def look(_layer: int, begin: int, probs: Tensor) -> None:
        first = max(begin, before)
        probs = probs[0, :, first - begin :]
        queries = torch.arange(first, first + probs.shape[1], device=probs.device)
        visible = torch.arange(probs.shape[-1], device=probs.device) <= rearrange(queries, "query -> query 1")
        lowest = torch.where(visible, probs, torch.inf).amin(-1)
        spread[:, queries.cpu() - before] = (probs.amax(-1).log() - lowest.log()).cpu()

    with attention_rows(target, look, layers=[layers[0]]):
        attention_outputs(target, ids[None], layers, compare)
    return distance, heads, spread


def attention_outputs(target: Target, rows: TokenRows, layers: Sequence[int], keep: KeepOutput) -> None:
    """Run sequences and call `keep` in float32 for each of some layers, with the positions of all sequences."""

    def watch(layer: int) -> tuple[Any, str, Any]:
        def see(_module: object, inputs: tuple[Any, ...], _kwargs: object, output: Tensor) -> None:
            z = inputs[0].reshape(rows.numel(), target.n_heads, -1)
            keep(layer, z.float(), output.reshape(rows.numel(), -1).float())

        return target.output_projection(layer), "post", see

    with target.hooks(*map(watch, layers)):
        target.forward(rows, upto=layers[-1])


def output_weights(target: Target, layer: int) -> Float[Tensor, "head d_head d_model"]:
    """W_O of every head of a layer, float32."""
    with target.loaded(layer):
        columns = input_columns(target, target.output_projection(layer)).float()
        return rearrange(columns, "(head d_head) d_model -> head d_head d_model", head=target.n_heads)


def head_norms(
    z: Float[Tensor, "pos head d_head"], weights: Float[Tensor, "head d_head d_model"]
) -> Float[Tensor, "head pos"]:
    """Norm of what each head writes, one head at a time: all at once would be head x pos x d_model numbers."""
    norms = []
    for head, weight in enumerate(weights):
        norms.append(einsum(z[:, head], weight, "pos d_head, d_head d_model -> pos d_model").norm(dim=-1))
    return torch.stack(norms).cpu()


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
