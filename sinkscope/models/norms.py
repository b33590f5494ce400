"""Norms of residual streams."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def norms_of(tensor: Float[Tensor, ...]) -> Float[Tensor, ...]:
    """Return L2 norms in float32; no smaller type is summed in itself."""
    return torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.promote_types(tensor.dtype, torch.float32)).float()
