"""New positions for what a cache keeps: keys are rotated once more, by the distance they move."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from sinkscope.errors import UnsupportedError
from sinkscope.kv.cache import CacheLayer
from sinkscope.models.target import Target

_FIXED = ("default", "linear", "llama3", "yarn")  # frequencies that do not depend on the length


class Rotary:
    """Rotations of a model's keys.

    Raises:
        UnsupportedError: no rotary positions, frequencies that change with the length, layers with a window, or a
            TransformerBridge.
    """

    def __init__(self, target: Target) -> None:
        module: Any = getattr(target.base, "rotary_emb", None)
        frequencies: Any = getattr(module, "inv_freq", None)
        kinds = getattr(target.config, "layer_types", None)
        why = ""
        if module is None:
            why = "it has no rotary positions"
        elif target.kind == "bridge":
            why = "a TransformerBridge applies positions itself; load it with backend='hf'"
        elif getattr(target.config, "sliding_window", None) and (kinds is None or "sliding_attention" in kinds):
            why = "it has layers with a window, which counts true positions"
        elif getattr(module, "rope_type", "default") not in _FIXED or frequencies is None:
            why = f"its frequencies ({getattr(module, 'rope_type', 'per layer')!r}) are not one fixed set"
        if why:
            raise UnsupportedError(
                f'positions="rebased" does not work on {target.name}: {why}; use positions="original"',
                page="kv-session",
            )
        assert isinstance(frequencies, Tensor)
        self._frequencies = frequencies.float()

    def rebase(self, layer: int, kv: CacheLayer, keep: Bool[Tensor, "batch kv_head slot"]) -> None:
        """Turn the keys of what is kept to positions without gaps (call before `evict`)."""
        assert kv.keys is not None
        held = kv.pos >= 0
        kept = keep & held
        # Positions before were without gaps too, by the same rule.
        moved = (kept.cumsum(-1) - held.cumsum(-1)).where(kept, torch.zeros((), dtype=torch.long, device=kept.device))
        angle = moved[..., None].float() * self._frequencies.to(moved.device)
        cos, sin = angle.cos(), angle.sin()
        half = angle.shape[-1]
        a, b, rest = kv.keys.float().split([half, half, kv.keys.shape[-1] - 2 * half], -1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
        # In float32 from now on: keys turn at every step, and in half precision the rounding would add up.
        kv.keys, kv.rebased = turned, True
