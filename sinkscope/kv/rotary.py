"""Rotation of cached keys to other positions, for `positions="rebased"`."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.errors import UnsupportedError
from sinkscope.kv.cache import CacheLayer
from sinkscope.models.target import Target

_FIXED_ROPE = ("default", "linear", "llama3", "yarn")  # frequencies that do not depend on the length


class Rotary:
    """Rotates a model's keys to other positions.

    Raises:
        UnsupportedError: The model has no rotary positions, its rotary frequencies change with the length,
            or layers with a sliding window.
    """

    def __init__(self, target: Target) -> None:
        rotary: Any = getattr(target.base, "rotary_emb", None)
        frequencies: Any = getattr(rotary, "inv_freq", None)
        fixed = isinstance(frequencies, Tensor) and getattr(rotary, "rope_type", "default") in _FIXED_ROPE
        layer_types = getattr(target.config, "layer_types", None) or ["sliding_attention"]
        windowed = bool(getattr(target.config, "sliding_window", None)) and "sliding_attention" in layer_types
        if not fixed or windowed:
            raise UnsupportedError(
                f'positions="rebased" does not work on {target.name}: it needs rotary positions with one fixed set of '
                'frequencies and no window; use positions="original"',
                page="kv-session",
            )
        self._frequencies: Float[Tensor, " half"] = frequencies.float()

    def rebase(self, kv: CacheLayer, keep: Bool[Tensor, "batch kv_head slot"]) -> None:
        """Rotate the keys of kept tokens to contiguous positions. Call it before `evict`."""
        occupied = kv.pos >= 0
        kept = keep & occupied
        # The earlier positions were contiguous too, because this rule made them.
        shift = (kept.cumsum(-1) - occupied.cumsum(-1)).masked_fill(~kept, 0)
        angle = shift[..., None].float() * self._frequencies.to(shift.device)  # batch kv_head slot half
        cos, sin = angle.cos(), angle.sin()
        half = angle.shape[-1]
        keys = kv.keys.float()
        first, second, unrotated = keys[..., :half], keys[..., half : 2 * half], keys[..., 2 * half :]
        # Keys stay in float32 from now on. They are rotated at every step, and in half precision errors would add up.
        kv.keys = torch.cat([first * cos - second * sin, second * cos + first * sin, unrotated], -1)
        kv.rebased = True
