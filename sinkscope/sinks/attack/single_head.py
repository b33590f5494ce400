"""One head of the first layer at a time: tokens that stand alone, all other heads at their mean over later positions.

A token alone sees itself in every layer, so a batch row is one position: a whole vocabulary is a few thousand matrix
products. Rows are tokens times (heads + 2): intact, no head, and each head by itself. The edit is made on the input
of the layer's output projection, so norms, biases, and whatever lies between there and the sink neuron are the
model's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.models.target import Target, first_tensor
from sinkscope.sinks.attack.vocabulary import Columns
from sinkscope.sinks.first_token.ablation import view_layer
from sinkscope.trace.run import trace

_BEFORE = 16  # tokens of text before a token that stands at a later position


@dataclass(frozen=True)
class HeadWork:
    """For each token: how far the sink neuron fires by single heads (Yona et al. 2025, section 5.2, appendix B).

    Attributes:
        layer: of the sink neuron.
        neuron: its number, in a mixture `expert * d_mlp + neuron`.
        reference: its activation at the first token of natural text; activations are shares of it.
        threshold: a share from which it fires.
        mean: what each head's `hook_z` is on average at later positions of natural text, heads side by side.
        direction: of a linear discriminant of the residual stream after attention 0, first against later positions.
        offset: it says "first" where `x @ direction + offset > 0`.
    """

    layer: int
    neuron: int
    reference: float
    threshold: float
    mean: Float[Tensor, " d_heads"]
    direction: Float[Tensor, " d_model"]
    offset: float

    @torch.no_grad()
    def __call__(self, target: Target, items: list[int]) -> Columns:
        """Columns head, best, sufficing, intact, background, lda_fired, lda_quiet; an entry per token."""
        share, first = self.shares(target, items)
        alone = share[:, 2:]
        fires = alone >= self.threshold
        best, head = alone.max(1)
        return {
            "head": head.tolist(),
            "best": _rounded(best),
            "sufficing": fires.sum(1).tolist(),
            "intact": _rounded(share[:, 0]),
            "background": _rounded(share[:, 1]),
            "lda_fired": (first & fires).sum(1).tolist(),
            "lda_quiet": (first & ~fires).sum(1).tolist(),
        }

    @torch.no_grad()
    def shares(self, target: Target, items: list[int]) -> tuple[Tensor, Tensor]:
        """Activations over the reference, and the discriminant's side.

        Returns:
            `[token 2+head]`: intact, no head, each head alone; and `[token head]`, True for "first", each head alone.
        """
        heads, ways = target.n_heads, target.n_heads + 2
        ids = torch.tensor(items).repeat_interleave(ways)[:, None]
        width = len(self.mean) // heads
        keep = torch.zeros(ways, len(self.mean), dtype=torch.bool, device=target.device)
        keep[0] = True
        for h in range(heads):
            keep[2 + h, h * width : (h + 1) * width] = True

        def edit(_m: object, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            z = args[0].view(len(items), ways, -1)
            mean = self.mean.to(z)
            return (torch.where(keep.to(z.device), z, mean).view_as(args[0]), *args[1:]), kwargs

        after: list[Tensor] = []
        with target.hooks((target.sub(0, target.adapter.o), "pre", edit), *after_attention(target, after)):
            post = neuron_at(target, self.layer, self.neuron, ids)
        side = after[0][:, 0].float() @ self.direction.to(target.device) + self.offset > 0
        return (post / self.reference).view(len(items), ways).cpu(), side.view(len(items), ways)[:, 2:].cpu()


def after_attention(target: Target, kept: list[Tensor]) -> list[tuple[Any, str, Any]]:
    """Hooks that add to `kept` the stream after the attention of layer 0 (also where the MLP runs beside it)."""
    before: list[Tensor] = []

    def keep_before(_m: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        before.append((args[0] if args else kwargs["hidden_states"]).detach().clone())

    def keep_after(_m: object, _a: object, _k: object, out: Any) -> None:
        stream = before.pop()
        kept.append(stream + first_tensor(out).detach().view_as(stream))

    added = target.sub(0, target.adapter.post_attn_norm or target.adapter.attn)
    return [(target.layers[0], "pre", keep_before), (added, "post", keep_after)]


def neuron_at(target: Target, layer: int, neuron: int, ids: Int[Tensor, "row pos"]) -> Float[Tensor, " row_pos"]:
    """`hook_post` of one neuron at every position, from a pass that ends there."""
    if target.is_mixture(layer):
        return view_layer(target, layer, ids, torch.ones_like(ids, dtype=torch.bool)).post[:, neuron]
    site = f"blocks.{layer}.mlp.hook_post"
    return trace(target, ids, [site], lambda post: post[..., neuron].float())[site].flatten()


def later_mean(target: Target, ids: Int[Tensor, "row pos"]) -> Float[Tensor, " d_heads"]:
    """Mean of layer 0's `hook_z` over the later positions of a text, heads side by side."""
    site = "blocks.0.attn.hook_z"
    return trace(target, ids, [site], lambda z: z[:, 1:].flatten(2).float().mean((0, 1)))[site]


@torch.no_grad()
def first_direction(
    target: Target, ids: Int[Tensor, "row pos"], tokens: list[int], batch: int = 64
) -> tuple[Float[Tensor, " d_model"], float]:
    """A linear discriminant (Fisher's, shrunk) of the residual stream after attention 0 (Yona et al. 2025, figure 4).

    Each token stands once alone and once behind natural text, so that what a token is cannot tell the two apart.

    Args:
        target: the model.
        ids: natural text, whose first positions are what stands before.
        tokens: what is put at either place.
        batch: rows per pass.
    """
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    every = torch.tensor(tokens)[:, None]
    before = ids[torch.arange(len(every)) % len(ids), :_BEFORE]
    parts: list[Tensor] = []
    for rows in (*every.split(batch), *torch.cat([before, every], 1).split(batch)):
        after: list[Tensor] = []
        with target.hooks(*after_attention(target, after), (target.layers[0], "post", lambda *_: target.stop())):
            target.forward(rows)
        parts.append(after[0][:, -1].float().cpu())
    labels = torch.arange(2).repeat_interleave(len(every))
    fitted: Any = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto")
    fitted.fit(torch.cat(parts).numpy(), 1 - labels.numpy())
    return torch.tensor(fitted.coef_[0], dtype=torch.float32), float(fitted.intercept_[0])


def _rounded(values: Tensor) -> list[float]:
    """Four decimals: what another number of threads may change is beyond them."""
    return [round(v, 4) for v in values.tolist()]
