"""Up the layers once: norms at the first token and on typical text, which layers build a sink, and when to stop."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.models.target import Target, first_tensor
from sinkscope.progress import Progress

STAGE_SHARE = 0.01  # a stage adds at least this share of the first token's largest norm (definition of a stage)
STAGE_OUTLIER = 5.0  # ... and its MLP writes this many times the median of what it writes on typical text, along the
# spike (an early stage can be small against all that an MLP writes, but not along that direction) or at all
SINK_RATIO = 3.0  # a sink: the first token's norm is this many times the typical one
# Medians, and no high quantiles: some later positions are sinks, too (delimiters; without BOS the first tokens, as long
# as they are of one cluster), and must not hide the first one.
_SAMPLE = 64  # positions of typical text whose MLP output is kept for that comparison


@dataclass
class Walk:
    """What one pass over the layers saw; lists have one entry per layer read, norms are L2."""

    n_layers: int
    first: list[float] = field(default_factory=list)  # residual stream after the layer, first token (median of rows)
    typical: list[tuple[float, float, float]] = field(default_factory=list)  # 5 %, median, 95 % of later positions
    mlp_first: list[float] = field(default_factory=list)  # what the MLP adds, first token
    mlp_typical: list[float] = field(default_factory=list)  # ... median of later positions
    raw_first: list[float] = field(default_factory=list)  # output of the MLP itself, first token (notebook's rule)
    residual: list[Tensor] = field(default_factory=list)  # residual stream, first token (mean of rows), [d_model]
    written: list[Tensor] = field(default_factory=list)  # what the MLP adds, first token (mean of rows), [d_model]
    sample: list[Tensor] = field(default_factory=list)  # ... at some later positions, [position d_model]

    def stages(self) -> list[int]:
        """Layers whose MLP builds the first token's norm (DESIGN: stage), in order; empty: no sink."""
        if not self.first:
            return []
        peak = max(range(len(self.first)), key=self.first.__getitem__)
        largest, spike = self.first[peak], self.residual[peak] / self.residual[peak].norm()
        found: list[int] = []
        for i in range(len(self.first)):
            along = float(self.written[i] @ spike)
            usual = (self.sample[i] @ spike).abs().median().item()
            builds = along >= STAGE_SHARE * largest and along > STAGE_OUTLIER * usual
            grows = self.first[i] > (self.first[i - 1] if i else 0.0) + STAGE_SHARE * largest
            if builds or (grows and self.mlp_first[i] > STAGE_OUTLIER * self.mlp_typical[i]):
                found.append(i)
        return found if any(self.first[i] > SINK_RATIO * self.typical[i][1] for i in found) else []

    def sink_layer(self) -> int | None:
        """The stage that adds most."""
        return max(self.stages(), key=lambda i: self.mlp_first[i], default=None)

    def flat(self) -> bool:
        """No new stage for a third of the layers, at least three, after one was seen."""
        stages = self.stages()
        return bool(stages) and len(self.first) - 1 - stages[-1] >= max(3, math.ceil(self.n_layers / 3))

    def notebook_layer(self) -> int | None:
        """First layer whose MLP output at the first token exceeds mean + 2 sd over all layers.

        The rule of the notebook behind Yona et al. 2025, not of the paper. With n layers no z-score exceeds
        (n - 1) / sqrt(n), so it cannot fire for n < 6.
        """
        if len(self.first) < self.n_layers:
            return None
        norms = torch.tensor(self.raw_first)
        bar = norms.mean() + 2 * norms.std(correction=0)
        above = (norms > bar).nonzero().flatten().tolist()
        return above[0] if above else None


@torch.no_grad()
def walk(target: Target, ids: Int[Tensor, "row pos"], *, whole: bool, progress: Progress | None = None) -> Walk:
    """Run `ids` upward, layer by layer, and stop where the first token's norm has stayed flat (unless `whole`).

    Args:
        target: the model; layers of a streamed model are read as they are reached.
        ids: typical text; position 0 is the first token.
        whole: read every layer.
        progress: told of each layer.
    """
    seen = Walk(target.n_layers)
    pairs: list[tuple[Any, str, Any]] = []
    adapter = target.adapter

    def mlp_raw(_m: object, _a: object, _k: object, out: Any) -> None:
        seen.raw_first.append(_norms(first_tensor(out), ids.shape)[:, 0].median().item())

    def mlp_added(_m: object, _a: object, _k: object, out: Any) -> None:
        added = first_tensor(out).detach().reshape(*ids.shape, -1).float()
        seen.written.append(added[:, 0].mean(0).cpu())
        seen.sample.append(added[:, 1:].flatten(0, 1)[:_SAMPLE].cpu())
        norms = added.norm(dim=-1)
        seen.mlp_first.append(norms[:, 0].median().item())
        seen.mlp_typical.append(norms[:, 1:].flatten().median().item())

    def layer_done(_m: object, _a: object, _k: object, out: Any) -> None:
        norms = _norms(first_tensor(out), ids.shape)
        if not bool(norms.isfinite().all()):
            raise SinkscopeError(
                f"layer {len(seen.first)} of {target.name} gives infinite or NaN norms in {target.dtype}; "
                "try --dtype float32, and check the checkpoint"
            )
        seen.first.append(norms[:, 0].median().item())
        seen.residual.append(first_tensor(out).detach()[:, 0].float().mean(0).cpu())
        low, mid, high = norms[:, 1:].flatten().quantile(torch.tensor([0.05, 0.5, 0.95], device=norms.device)).tolist()
        seen.typical.append((low, mid, high))
        if progress is not None:
            progress("layers", len(seen.first), target.n_layers)
        if not whole and seen.flat():
            target.stop()

    for i in range(len(target.layers)):
        added = target.sub(i, adapter.post_mlp_norm or adapter.mlp)
        pairs += [(target.sub(i, adapter.mlp), "post", mlp_raw), (added, "post", mlp_added)]
        pairs.append((target.layers[i], "post", layer_done))
    with target.hooks(*pairs):
        target.forward(ids)
    return seen


def _norms(tensor: Tensor, shape: torch.Size) -> Tensor:
    return torch.linalg.vector_norm(tensor.detach().reshape(*shape, -1), dim=-1, dtype=torch.float32)
