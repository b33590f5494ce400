"""Distance of n repetitions to the token alone (Yona et al. 2025, theorem 4.1, Fig. 5, appendix D).

The output of attention on a prefix and n repetitions is compared with its output on the repeated token alone. One
causal pass over the prefix and N repetitions contains every n up to N: position k + n - 1 sees the prefix and n copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from sinkscope.errors import UnsupportedError
from sinkscope.hooks.trace.run import trace
from sinkscope.models.grouped_heads import output_factors
from sinkscope.models.target import Target
from sinkscope.results.claims import Outcome
from sinkscope.sinks.repetition.result import Repeat
from sinkscope.sinks.repetition.sweep import Sweep, rounded
from sinkscope.sinks.tokens import TokenRows
from sinkscope.tap.observers import attention_rows

ROUNDING = 8.0  # distances below this many rounding errors of the largest output are ignored
OUTSIDE = (
    "Theorem 4.1 does not apply to this model: it is of softmax attention in the first layer, to all tokens, without "
    "absolute positions and learned sinks."
)


@torch.no_grad()
def read_distances(sweep: Sweep) -> Repeat:
    """Compare n repetitions with the token alone, in the first and the last layer that have softmax attention.

    The theorem bounds the distance in the first attention layer only, head by head, by `2 r k exp(delta) / n`: k is the
    number of tokens before the repetitions, r the largest norm of `v W_O` over the positions, delta the spread of the
    scores in the row. The claim is of the likeness in the first layer: 1 less the distance over the norm of the output
    on the token alone.
    """
    setup, target, before = sweep.setup, sweep.setup.target, sweep.before
    if not target.attending:
        raise UnsupportedError(f"no layer of {target.name} has softmax attention, so there is no distance to read")
    first, last = layers = [target.attending[0], target.attending[-1]]
    weights = output_factors(target, first)
    # Every token alone, so attending to itself: those of the prefix, then the repeated ones.
    values, outputs = attention_outputs(target, torch.cat([sweep.rows[0, :before], sweep.rows[:, -1]])[:, None], layers)
    sizes, alone = head_norms(values, weights), outputs[:, before:]
    read: list[Tensor] = []
    for number, ids in enumerate(sweep.rows):
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
        bound = 2 * before * largest[:, None] * spread[:, before:].exp() / torch.arange(1, sweep.count + 1)
        rounding = ROUNDING * torch.finfo(target.dtype).eps * largest.max()  # between two equal outputs
        closest = torch.where(heads > rounding, heads / bound, 0.0).amax(0)
        away = (output[:, before:] - alone[:, [number]]).norm(dim=-1)
        read.append(torch.stack([away[0], bound.sum(0), closest, away[1]]))
        setup.progress("repetitions", number + 1, len(sweep.rows))
    curves = torch.stack(read, 1)  # condition token n
    note = OUTSIDE
    if is_outside(target, first, sweep.rows.shape[1]):
        curves[1:3] = torch.nan
    else:
        most = float(curves[2].max())
        holds = "holds" if most <= 1 else "does not hold"
        note = f"The bound of theorem 4.1 {holds}: the head that comes closest to it reaches {most:.1%} of it."

    def like(away: Tensor) -> Tensor:
        return (1 - away / alone[0].norm(dim=-1)).nan_to_num(neginf=0)  # it may write nothing on the token alone

    def last_like(rows: TokenRows) -> Tensor:
        _, outputs = attention_outputs(target, rows, [first])
        return like((outputs[0].unflatten(0, rows.shape)[:, -1] - alone[0]).norm(dim=-1))

    outcome = Outcome(
        "likeness to the token alone", (first,), gives="make the first layer's output {} like that on the token alone"
    )
    in_first = f"layer {first}"
    return Repeat(
        read="distance",
        claims=(sweep.claim(outcome, like(curves[0, :, -1]), last_like),),
        notes=(note,),
        conditions=(in_first, f"bound in {in_first}", "closest head, of its bound", f"layer {last}"),
        values=rounded(curves[:, :, sweep.counts - 1]),
        **sweep.fields(),
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


def is_outside(target: Target, layer: int, length: int) -> bool:
    """Whether theorem 4.1 does not apply to a layer and sequences of that length."""
    window, kinds = getattr(target.config, "sliding_window", None), getattr(target.config, "layer_types", None)
    leaves = bool(window) and window < length and (not kinds or kinds[layer] == "sliding_attention")
    return layer > 0 or target.adapter.absolute_positions or bool(target.adapter.learned_sinks) or leaves
