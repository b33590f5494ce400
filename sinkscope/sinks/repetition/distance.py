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
from sinkscope.sinks.repetition.sweep import Sweep
from sinkscope.sinks.tokens import TokenRows

ROUNDING = 8.0  # distances below this many rounding errors of the largest output are ignored
OUTSIDE = (
    "Theorem 4.1 does not apply to this model: it is of softmax attention in the first layer, without absolute "
    "positions and learned sinks."
)


@torch.no_grad()
def read_distances(sweep: Sweep) -> Repeat:
    """Compare n repetitions with the token alone, in the first and the last layer that have softmax attention.

    The theorem bounds the distance in the first attention layer only, head by head, by `2 r k exp(delta) / n`: k is the
    number of tokens before the repetitions, r the largest norm of `v W_O` over the positions, delta the spread of the
    scores in the row. The claim is of the likeness in the first layer: 1 less the distance over the norm of the output
    on the token alone.
    """
    target, before = sweep.setup.target, sweep.before
    if not target.attending or target.shards.size > 1:
        raise UnsupportedError(f"{target.name} has no softmax attention, or is split over processes: use one process")
    first, last = layers = [target.attending[0], target.attending[-1]]
    # Every token alone, so attending to itself: those of the prefix, then the repeated ones.
    singles = torch.cat([sweep.rows[0, :before], sweep.rows[:, -1]])[:, None]
    own, *alone = attention_outputs(target, singles, layers)
    heads, *outputs = attention_outputs(target, sweep.rows, layers)
    pattern = f"blocks.{first}.attn.hook_pattern"
    spread = trace(target, sweep.rows, [pattern], spread_of, batch_size=1)[pattern][..., before:].mT  # exp(delta)
    sizes = own.norm(dim=-1)
    largest = torch.maximum(sizes[:before].amax(0), sizes[before:])  # token 1 head
    bound = 2 * before * largest * spread / torch.arange(1, sweep.count + 1)[:, None]
    away = (heads[:, before:] - own[before:]).norm(dim=-1)  # token n head
    rounding = ROUNDING * torch.finfo(target.dtype).eps * largest.max()  # between two equal outputs
    closest = torch.where(away > rounding, away / bound, 0.0).amax(-1)
    distances = [(output[:, before:] - one[before:]).norm(dim=-1) for output, one in zip(outputs, alone, strict=True)]
    curves = torch.stack([distances[0], bound.sum(-1), closest, distances[1]])
    note = OUTSIDE
    if first > 0 or target.adapter.absolute_positions or target.adapter.learned_sinks:
        curves[1:3] = torch.nan
    else:
        holds = "holds" if closest.max() <= 1 else "does not hold"
        note = f"The bound of theorem 4.1 {holds}: the head that comes closest to it reaches {closest.max():.1%} of it."

    def like(output: Float[Tensor, "token n d_model"]) -> Float[Tensor, "token n"]:
        single = alone[0][before:]
        distance = (output - single).norm(dim=-1)
        return (1 - distance / single.norm(dim=-1)).nan_to_num(neginf=0)  # it may write nothing on the token alone

    def read(rows: TokenRows) -> Float[Tensor, "token n"]:
        return like(attention_outputs(target, rows, [first])[1])

    gives = "make the first layer's output {} like that on the token alone"
    outcome = Outcome("likeness to the token alone", (first,), gives=gives)
    in_first = f"layer {first}"
    return Repeat(
        read="distance",
        claims=(sweep.claim(outcome, like(outputs[0])[:, -1], read),),
        notes=(note,),
        conditions=(in_first, f"bound in {in_first}", "closest head, of its bound", f"layer {last}"),
        values=curves[:, :, sweep.counts - 1].numpy(),
        **sweep.fields(),
    )


def attention_outputs(target: Target, rows: TokenRows, layers: Sequence[int]) -> list[Tensor]:
    """What each head of the first of some layers writes, `[row pos head width]`; and the attention of each layer.

    The width of a head stands for d_model, without a change of norms. All are float32.
    """
    sites = [f"blocks.{layer}.attn.hook_z" for layer in layers]
    mixed, factors = trace(target, rows, sites, batch_size=1), output_factors(target, layers[0])
    written = [einsum(mixed[sites[0]].float(), factors, "row pos head d_head, head d_head width -> row pos head width")]
    for layer, site in zip(layers, sites, strict=True):
        with target.loaded(layer):
            output = target.sub(layer, "o")(mixed[site].flatten(2).to(target.device))
        written.append(output.float().cpu())
    return written


def spread_of(rows: Float[Tensor, "row head query key"]) -> Float[Tensor, "row head query"]:
    """The largest attention of each query over the smallest to a key that it sees."""
    return rows.amax(-1) / rows.where(rows > 0, torch.inf).amin(-1)
