"""Rounding: what a model computes with has a few bits, as in a quantised model, except where it is to stay exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.records import Whole, check_fields, checked_value
from sinkscope.hooks.edit.edits import PlacedEdit, Values
from sinkscope.hooks.edit.sites import (
    Positions,
    SiteLike,
    checked_positions,
    chosen_positions,
    listed,
    site_of,
)
from sinkscope.hooks.trace import resolve
from sinkscope.models.hook_points import HookPoint
from sinkscope.models.inputs import check_site
from sinkscope.models.target import Target

Bits = Annotated[int, Field(ge=2, le=16)]


class _Rounded(NamedTuple):
    """Values that are rounded: their heads (what enters a module is one), the bits, and channels that stay exact."""

    heads: Callable[[Tensor], Tensor]
    bits: int
    exact: list[int]


@dataclass(frozen=True, kw_only=True)
class Quantize(PlacedEdit):
    """Round activations, or keys and values, to a few bits, in the prompt and in everything that is generated.

    A number becomes the nearest multiple of a scale, which is the largest absolute value that it has to hold, divided
    by `2 ** (bits - 1) - 1` (symmetric rounding to integers). Numbers are stored as before, so this shows what rounding
    costs and saves no memory. Weights are not changed.

    Attributes:
        activations: Bits of the inputs of every linear module of the decoder layers. None leaves them exact.
        kv: Bits of keys and values, as they are projected (keys before rotary), with a scale for each kv head. None
            leaves them exact.
        scale: "token": each token has a scale of its own. "tensor": the tokens of a row share the scale of the largest
            value of the row so far, which a sink token may set for all.
        positions: Tokens that stay exact and set no scale, counted from each row's first real token: "first", a number,
            several numbers, or a slice, such as `slice(0, 4)`. None: none.
        places: The same for single rows: pairs of a row of the batch and a position.
        neurons: Neurons whose values, as inputs of the down projection, stay exact and set no scale: (layer, neuron) or
            "L1.N338".
        layers: Decoder layers that stay exact.

    Raises:
        SinkscopeError: Nothing is to be rounded, or the model has no such place, neuron or layer, or the batch no
            such row.
        UnsupportedError: The inputs of experts cannot be seen, or the model has no separate keys and values.

    Example:
        >>> Quantize(activations=8, scale="tensor", neurons=["L1.N338"], positions="first").neurons
        (Neuron(layer=1, expert=None, neuron=338),)
    """

    activations: Bits | None = None
    kv: Bits | None = None
    scale: Literal["token", "tensor"] = "token"
    positions: Positions = ()
    places: Sequence[tuple[Whole, Whole]] = ()
    neurons: Sequence[SiteLike] = ()
    layers: Sequence[Whole] = ()

    def __post_init__(self) -> None:
        positions = checked_positions(self.positions)
        object.__setattr__(self, "positions", () if positions is None else positions)
        object.__setattr__(self, "neurons", tuple(map(site_of, listed("neurons", self.neurons))))
        for name, kind in (("places", tuple[tuple[Whole, Whole], ...]), ("layers", tuple[Whole, ...])):
            object.__setattr__(self, name, checked_value(kind, getattr(self, name), name))
        check_fields(self)
        if self.activations is None and self.kv is None:
            raise SinkscopeError("Quantize: nothing is to be rounded; give activations=8 or kv=8, in bits")

    @property
    def remembers(self) -> str:
        """The largest values so far, if they set the scale."""
        return "the largest values of the row" if self.scale == "tensor" else ""

    @property
    def by_token(self) -> bool:
        """Whether every token may change the scale."""
        return self.scale == "tensor"

    @property
    def acts_at(self) -> None:
        """None: all values are rounded, except at `positions`."""

    def hook_points(self, target: Target) -> list[tuple[HookPoint, _Rounded]]:
        """Return the inputs of linear modules, and the outputs of the projections of keys and values."""
        for layer in self.layers:
            check_site(target, layer)
        channels: dict[int, list[int]] = {}
        for neuron in map(site_of, self.neurons):
            check_site(target, neuron.layer, neuron.neuron, neuron.expert)
            channels.setdefault(neuron.layer, []).append(neuron.neuron)
        points: list[tuple[HookPoint, _Rounded]] = []
        for layer, block in enumerate(target.layers):
            if layer in self.layers:
                continue
            if self.activations is not None:
                if layer in target.mixtures:
                    raise UnsupportedError(
                        f"layer {layer} of {target.name} is a mixture whose experts are one module, so that the inputs "
                        f"of their projections are not seen: add {layer} to layers, or round keys and values only "
                        "(kv=8)"
                    )
                down = target.sub(layer, "down") if "down" in target.paths[layer] else None
                down = getattr(down, "original_component", down)  # also below a bridge's wrapper
                for module in block.modules():
                    if isinstance(module, nn.Linear | Conv1D):
                        exact = channels.get(layer, []) if module is down else []
                        points.append((HookPoint(module, "pre"), _Rounded(_as_one_head, self.activations, exact)))
        if self.kv is not None:
            for site in resolve(target, "blocks.*.attn.hook_[kv]"):  # some layers read the keys of earlier ones
                if site.layer not in self.layers:
                    assert site.module is not None  # only attention rows have none
                    points.append((HookPoint(site.module, site.when), _Rounded(site.cut, self.kv, [])))
        return points

    def edited(self, values: Values) -> Float[Tensor, "batch pos d"]:
        """Round the values, except at exact positions and channels."""
        index, of = values.index, values.of
        old = of.heads(values.old)
        exact = self._exact_tokens(index)[..., None, None].expand_as(old).clone()
        exact[..., of.exact] = True
        largest = self._largest(old.masked_fill(exact, 0), values)
        new = values.old.clone()
        of.heads(new).copy_(torch.where(exact, old, round_values(old, largest, of.bits)))
        return new

    def _exact_tokens(self, index: Int[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
        """Tokens that stay exact, and padding, which sets no scale."""
        exact = chosen_positions(index, self.positions) | (index < 0)
        for row, position in self.places:
            if row >= len(index):
                raise SinkscopeError(
                    f"places has ({row}, {position}), and the batch has {len(index)} rows: expected pairs of a row, "
                    f"from 0 to {len(index) - 1}, and a position"
                )
            exact[row] |= index[row] == position
        return exact

    def _largest(
        self, rounded: Float[Tensor, "batch pos head width"], values: Values
    ) -> Float[Tensor, "batch _ head 1"]:
        """The largest absolute value of each token and head, or of all tokens of a row so far."""
        largest = rounded.float().abs().amax(-1, keepdim=True)
        if self.scale == "token":
            return largest
        values.step.check_read("the largest of their values", 'round with scale="token"')
        so_far = values.step.state.add((*values.key, "largest"), largest, values.step.past)
        return so_far.amax(1, keepdim=True)


def _as_one_head(values: Tensor) -> Tensor:
    return values.unsqueeze(-2)


def round_values(
    values: Float[Tensor, "*n width"], largest: Float[Tensor, "*#n #width"], bits: int
) -> Float[Tensor, "*n width"]:
    """Round to multiples of a step, by which numbers up to `largest` become integers of `bits` bits."""
    step = (largest.float() / (2 ** (bits - 1) - 1)).clamp(min=torch.finfo(torch.float32).tiny)
    return ((values.float() / step).round() * step).to(values.dtype)
