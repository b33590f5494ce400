"""Steering: add a vector to the residual stream, or to what attention or an MLP writes into it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Finite, check_values, checked_value
from sinkscope.hooks.edit.hook_points import HookPoint, PlacedEdit, Values
from sinkscope.hooks.edit.sites import Positions, checked_positions, chosen_positions
from sinkscope.hooks.trace.sites import resolve
from sinkscope.models.hooks import device_copies
from sinkscope.models.target import Target

_WHERE = ("hook_embed", "hook_resid_pre", "hook_attn_out", "hook_mlp_out", "hook_resid_post")


@dataclass(frozen=True, eq=False)
class Add(PlacedEdit):
    """Add a vector to the residual stream at a site, in the prompt and in everything that is generated.

    Attributes:
        vector: `[d_model]`, a tensor or numbers.
        site: Site by its TransformerLens name: `hook_embed` (what the first layer reads, behind any multiplication or
            norm of the embedding), or `hook_resid_pre`, `hook_attn_out`, `hook_mlp_out`
            or `hook_resid_post` of a layer, as in "blocks.3.hook_resid_post". A pattern such as
            "blocks.*.hook_resid_post" adds the vector at every site that it matches.
        scale: Factor on the vector.
        positions: Positions to edit, counted from each row's first real token: None for all, "first", a number, several
            numbers, or a slice.

    Raises:
        SinkscopeError: The vector does not consist of finite numbers, its length differs from the residual stream's, or
            the site is none of these.

    Example:
        >>> Add([0.5, -0.5], "blocks.3.hook_resid_post", scale=2.0)
        Add(site='blocks.3.hook_resid_post', scale=2.0, positions=None)
    """

    vector: Any = field(repr=False)
    site: str
    scale: int | float = 1.0
    positions: Positions = None

    def __post_init__(self) -> None:
        vector = torch.empty(0)
        with suppress(TypeError, ValueError, RuntimeError):
            vector = torch.as_tensor(self.vector).detach()
        if vector.ndim != 1 or len(vector) == 0 or not bool(vector.isfinite().all()):
            raise SinkscopeError(
                f"vector of type {type(self.vector).__name__} and shape {tuple(vector.shape)}: expected finite "
                "numbers, one for each dimension of the residual stream"
            )
        check_values(str, site=self.site)
        checked_value(Finite, self.scale, "scale")
        object.__setattr__(self, "vector", vector.float())
        object.__setattr__(self, "positions", checked_positions(self.positions))

    def hook_points(self, target: Target) -> list[tuple[HookPoint, Callable[[Tensor], Tensor]]]:
        """Return the modules whose input or output the sites are, each with what is added there."""
        sites = resolve(target, self.site)
        if len(self.vector) != target.d_model:
            raise SinkscopeError(
                f"vector of {len(self.vector)} numbers: the residual stream of {target.name} has {target.d_model}"
            )
        points: list[tuple[HookPoint, Callable[[Tensor], Tensor]]] = []
        for site in sites:
            if site.name.rpartition(".")[2] not in _WHERE:
                raise SinkscopeError(
                    f"site {site.name!r}: a vector is added to the residual stream; expected {', '.join(_WHERE)}"
                )
            if site.name == "hook_embed":  # a model may multiply or normalise what its embedding gives
                (site,) = resolve(target, "blocks.0.hook_resid_pre")
            assert site.module is not None  # only attention rows have none
            added = device_copies(self.scale / site.factor * self.vector)  # what the module gives is multiplied before
            points.append((HookPoint(site.module, site.when), added))
        return points

    def edited(self, values: Values) -> Tensor:
        """Return the values with the vector added at the chosen positions."""
        chosen = chosen_positions(values.index, self.positions)
        return torch.where(chosen[..., None], values.old + values.of(values.index).to(values.old), values.old)
