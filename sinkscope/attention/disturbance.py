"""Whether a small disturbance of a loop dies out (Xu et al. 2026, appendix A.3), by finite differences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.models.target import Target, first_tensor

ENERGY = 0.999  # of the hidden states, that the tail subspace holds


@dataclass(frozen=True)
class Decay:
    """What becomes of a disturbance that enters one layer during one period.

    Attributes:
        layer: whose input (`hook_resid_pre`) is disturbed.
        dimensions: of the tail subspace there.
        size: of the disturbance, over the length of the hidden state, at every position of the period.
        within: False: orthogonal to the tail subspace; True: inside it.
        change: root mean square over the directions of the change of the last hidden state, in the disturbed period
            and in each that follows, over its length.
        kept: share of the directions under which all tokens of the following periods are still the likeliest ones.
    """

    layer: int
    dimensions: int
    size: float
    within: bool
    change: tuple[float, ...]
    kept: float

    @property
    def contraction(self) -> float:
        """Change in the period after, over that in the disturbed one."""
        return self.change[1] / self.change[0] if self.change[0] else 0.0

    @property
    def rate(self) -> float | None:
        """Mean factor from one later period to the next: what repeats of it decide; None with a single one."""
        later = self.change[1:]
        if len(later) < 2 or not later[0]:
            return None
        return (later[-1] / later[0]) ** (1 / (len(later) - 1))


class Disturbed:
    """A model that has read a sequence up to its last periods, to be disturbed there again and again.

    Tokens go on as they did. As long as the likeliest token stays, this is what greedy decoding does: tokens are whole,
    so the only way from a hidden state to later steps is through the keys and values it left in the cache.
    """

    @torch.no_grad()
    def __init__(
        self, target: Target, ids: Int[Tensor, " pos"], period: int, periods: int, directions: int = 4, seed: int = 0
    ) -> None:
        """Read the sequence.

        Args:
            target: the model.
            ids: a sequence that ends in at least `2 * periods + 1` periods.
            period: tokens of a period.
            periods: how many follow the disturbed one.
            directions: random ones, each a row of a batch.
            seed: of the directions.
        """
        from transformers import DynamicCache

        self.target, self.period, self.periods, self.directions, self.seed = target, period, periods, directions, seed
        self.start = len(ids) - (periods + 1) * period
        self.rest = ids[None, self.start :].expand(directions + 1, -1)
        self.states: dict[int, Tensor] = {}  # entering each layer, row 0
        self.cache: Any = DynamicCache()  # without windows of its own, so that it can be cut back
        layers = [(module, "pre", self._keep(i)) for i, module in enumerate(target.layers)]
        with target.hooks(*layers):
            target.forward(ids[None, : self.start], past_key_values=self.cache, use_cache=True)
            self.cache.batch_repeat_interleave(directions + 1)
            self._pass()

    @torch.no_grad()
    def decay(self, layer: int, *, size: float, within: bool = False) -> Decay | None:
        """Disturb the input of `layer` for one period.

        Args:
            layer: whose input.
            size: of the disturbance, over the length of the hidden state, at every position of the period.
            within: inside the tail subspace instead of orthogonal to it.

        Returns:
            None where the tail subspace leaves no orthogonal direction.
        """
        period, hidden = self.period, self.states[layer]
        basis = _subspace(hidden[self.start - self.periods * period : self.start])
        if not within and basis.shape[0] == basis.shape[1]:
            return None
        noise = torch.randn(self.directions, period, basis.shape[1], generator=torch.Generator().manual_seed(self.seed))
        inside = noise @ basis.T @ basis
        noise = inside if within else noise - inside
        length = hidden[self.start : self.start + period].norm(dim=-1, keepdim=True)
        push = noise / noise.norm(dim=-1, keepdim=True) * length * size

        def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            states = (args[0] if args else kwargs["hidden_states"]).clone()
            states[1:, :period] += push.to(states)
            return ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})

        with self.target.hooks((self.target.layers[layer], "pre", hook)):
            out = self._pass()
        sizes = (out[1:] - out[:1]).float().norm(dim=-1) / out[:1].float().norm(dim=-1)
        change = sizes.square().unflatten(1, (self.periods + 1, period)).mean((0, 2)).sqrt()
        logits = self.target.hf.get_output_embeddings()
        said = torch.stack([logits(row[period:]).argmax(-1) for row in out])  # row by row: vocabularies are large
        kept = (said[1:] == said[:1]).all(1).float().mean()
        return Decay(layer, basis.shape[0], size, within, tuple(change.tolist()), float(kept))

    def _pass(self) -> Tensor:
        out = self.target.forward(self.rest, past_key_values=self.cache, use_cache=True).last_hidden_state
        self.cache.crop(-self.rest.shape[1])
        return out

    def _keep(self, layer: int) -> Any:
        def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen = first_tensor(args[0] if args else kwargs["hidden_states"])[0].float().cpu()
            self.states[layer] = torch.cat([self.states[layer], seen]) if layer in self.states else seen

        return hook


def _subspace(states: Float[Tensor, "pos d_model"]) -> Float[Tensor, "dimension d_model"]:
    """An orthonormal basis of the smallest subspace with `ENERGY` of the states' squared length."""
    _, singular, right = torch.linalg.svd(states, full_matrices=False)
    energy = singular.square().cumsum(0) / singular.square().sum()
    return right[: int((energy < ENERGY).sum()) + 1]
