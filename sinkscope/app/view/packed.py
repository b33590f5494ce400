"""Arrays for a page: 8 bits a value, compressed, as text in JSON."""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, UInt8
from torch import Tensor

LEVELS = 255
DARKEST = 1e-9  # has the code 0; still smaller numbers are slow to take roots of


@dataclass(frozen=True)
class Packed:
    """An array of shares, from 0 to 1, in 8 bits each. The steps are smallest near zero.

    A value is `(code / 255) ** 2`, and its error is at most 1/255.

    Attributes:
        shape: Length of each axis.
        codes: The codes in row-major order, compressed with zlib, as base64.
    """

    shape: tuple[int, ...]
    codes: str

    @classmethod
    def of(cls, codes: UInt8[np.ndarray, "*axes"]) -> Packed:
        """Return the array that has these codes."""
        packer = zlib.compressobj(strategy=zlib.Z_RLE)  # for rows of attention smaller, and twice as fast
        packed = packer.compress(codes.tobytes()) + packer.flush()
        return cls(codes.shape, base64.b64encode(packed).decode())

    def array(self) -> Float[np.ndarray, "*axes"]:
        """Return the values."""
        codes = np.frombuffer(zlib.decompress(base64.b64decode(self.codes)), np.uint8)
        return ((codes / LEVELS) ** 2).reshape(self.shape)


def codes_of(shares: Float[Tensor, "*axes"]) -> UInt8[np.ndarray, "*axes"]:
    """Return the codes of shares; values below 0, and NaN, become 0, and values above 1 become 1."""
    return shares.nan_to_num(0).clamp_(DARKEST, 1).sqrt_().mul_(LEVELS).round_().byte().cpu().numpy()
