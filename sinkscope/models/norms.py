"""Norms of residual streams."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def norm_of(resid: Float[Tensor, "... d_model"], without: Sequence[int] = ()) -> Float[Tensor, ...]:
    """Return the L2 norm of a residual stream, in float32, without some of its dimensions."""
    resid = resid.contiguous()  # equal values in one layout have equal norms
    if without:
        is_kept = torch.ones(resid.shape[-1], dtype=torch.bool, device=resid.device)
        is_kept[list(without)] = False
        resid = resid[..., is_kept]
    return norms_of(resid)


def norms_of(tensor: Float[Tensor, ...]) -> Float[Tensor, ...]:
    """Return L2 norms in float32; no smaller type is summed in itself."""
    return torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.promote_types(tensor.dtype, torch.float32)).float()
