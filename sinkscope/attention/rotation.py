"""Rotary positions as the model turns with them, and scores by relative offset (Xu et al. 2026, Eq. 2 and 13)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """The rotation of one layer.

    Attributes:
        angle: `exp(i * omega_j * t)`, `[pos block]`, of unit length.
        scale: factor that rotary puts on queries and on keys (YaRN's attention factor; 1 elsewhere).
    """

    angle: Complex[Tensor, "pos block"]
    scale: float

    @classmethod
    def of(cls, cos: Float[Tensor, "pos turned"], sin: Float[Tensor, "pos turned"]) -> Rotation:
        """From the tables that the model hands to its attention, of positions 0, 1, 2, ...

        Most families write each frequency twice, one behind the other; gpt-oss writes it once.
        """
        half = cos.shape[-1] // 2
        if torch.equal(cos[:, :half], cos[:, half:]):
            cos, sin = cos[:, :half], sin[:, :half]
        angle = torch.complex(cos.float(), sin.float())
        scale = float(angle[0, 0].abs())
        return cls(angle / angle.abs().clamp_min(1e-12), scale)

    @property
    def turned(self) -> int:
        """How many of a head's dimensions take part; the rest is left alone (partial rotary)."""
        return 2 * self.angle.shape[1]

    def blocks(self, x: Float[Tensor, "*head d_head"]) -> Complex[Tensor, "*head block"]:
        """The pairs of dimensions that turn together, as complex numbers: those that do not turn come last, in pairs.

        The two of a pair lie half of the turned dimensions apart (as in Llama, NeoX and all families known here).
        """
        x = x.float()
        moving, still = x[..., : self.turned], x[..., self.turned :]
        return torch.cat([torch.complex(*(t.contiguous() for t in part.chunk(2, -1))) for part in (moving, still)], -1)

    def scores(
        self,
        query: Float[Tensor, "head query d_head"],
        key: Float[Tensor, "head key d_head"],
        query_pos: Int[Tensor, " query"],
        key_pos: Int[Tensor, " key"],
    ) -> Float[Tensor, "head query key"]:
        """Eq. 13 from queries and keys before rotary: only the offset of two positions enters.

        With the rotation of Eq. 12, `R(wt) q . R(wi) k = q . R(w (i - t)) k`: the sign of the offset is the opposite
        of what Eq. 2 and 13 print. Where it is turned by the wrong sign the scores are not the model's.
        """
        q, k = self.blocks(query), self.blocks(key)
        factor = self.factor(2 * k.shape[-1])
        rows: list[Tensor] = []
        for n, t in enumerate(query_pos.tolist()):
            offset = key_pos - t
            turn = self.angle[offset.abs()]
            turn = torch.where(offset[:, None] < 0, turn.conj(), turn)  # the table begins at position 0
            moved = torch.cat([turn, turn.new_ones(len(turn), k.shape[-1] - turn.shape[1])], 1) * factor
            rows.append((q[:, n, None].conj() * moved * k).sum(-1).real)
        return torch.stack(rows, 1)

    def factor(self, d_head: int) -> Float[Tensor, " block"]:
        """What a block's product is multiplied with in a score: the square of `scale` where it turns, else 1."""
        out = self.angle.real.new_ones(d_head // 2)
        out[: self.angle.shape[1]] = self.scale**2
        return out
