"""What passes the modules of a layer in a pass over a few tokens, and the sums that hold of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from sinkscope.models.adapters import Adapter, NotInferredError
from sinkscope.models.hooks import Args, Hook, Kwargs, first_tensor
from sinkscope.models.target import Target, longest_context

TOKENS = 20
"""Tokens of the text of a proof: more than every window and chunk of a small model."""
ROWS = 6
"""Rows of the batch: one intact, three with a turned head, one with random numbers in one head, one for the MLP."""
EXACT = 1e-3
"""Largest relative distance between two ways to one number, in float32."""
_ONE = 5e-3  # largest distance of a measured constant from 1 that rounding explains

RowValues = Float[Tensor, "row pos width"]
Paths = Mapping[str, Any]
"""Where a layer has its parts, by the fields of an adapter; None or nothing where it has none."""


# -- what passes -------------------------------------------------------------------------------------------------------


def by_row(tensor: Tensor) -> Tensor:
    """Return a tensor by row and position, which OPT and experts run together."""
    if tensor.ndim == 2:
        return rearrange(tensor, "(row pos) width -> row pos width", row=ROWS)
    return rearrange(tensor, "row pos ... -> row pos (...)")


def alike(hidden: Tensor) -> Tensor:
    """Return what enters a layer with the first row in every row, so that no edit of an earlier layer is seen."""
    rows = by_row(hidden)
    return rows[:1].expand_as(rows).clone().reshape(hidden.shape)


class Values:
    """What entered and left the modules of one layer, the first tensor of each.

    Attributes:
        layer: Number of the layer.
        paths: Where the layer has its parts, by the fields of an adapter; what is asked for by a field is there.
        ran: Whether it ran.
        kept: What passed, by path and "in", "out" or "rows" (of attention, returned beside the output).
    """

    def __init__(self, layer: int, paths: Paths) -> None:
        self.layer, self.paths = layer, paths
        self.ran = False
        self.kept: dict[tuple[str | None, str], Tensor] = {}

    def hooks(self, module: nn.Module, paths: Iterable[str]) -> list[Hook]:
        """Return hooks that keep what passes some modules of the layer, and the layer itself."""
        hooks = list[Hook]()
        for path in {"", *paths}:
            part = module.get_submodule(path)
            hooks.append((part, "pre", partial(self._enter, path)))
            hooks.append((part, "post", partial(self._leave, path)))
        return hooks

    def _enter(self, path: str, _module: Any, args: Args, kwargs: Kwargs) -> None:
        if not path and self.ran:
            raise NotInferredError(f"layer {self.layer} runs several times in a pass")
        self.ran = True
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                self._keep(path, "in", value)
                return

    def _leave(self, path: str, _module: Any, _args: Args, _kwargs: Kwargs, output: Any) -> None:
        self._keep(path, "out", first_tensor(output))
        if isinstance(output, tuple) and len(output) > 1:
            rows = output[1]
            if isinstance(rows, Tensor) and rows.ndim == 4:
                self.kept[path, "rows"] = rows.float()

    def _keep(self, path: str, side: str, tensor: Any) -> None:
        """Keep a copy, because some models add to it in place."""
        if not isinstance(tensor, Tensor) or tensor.ndim < 2:
            return
        if tensor.ndim > 2 or len(tensor) % ROWS == 0:
            self.kept[path, side] = by_row(tensor.detach()).float().clone()

    def entered(self, part: str) -> Any:
        """Return what entered a part, or the layer (""); None if there is no such part, or it did not run."""
        return self.kept.get((self.paths.get(part) if part else "", "in"))

    def left(self, *parts: str) -> Any:
        """Return what left the first of some parts that there are; as for `entered`."""
        for part in parts:
            path = self.paths.get(part) if part else ""
            if path is not None:
                return self.kept.get((path, "out"))
        return None

    def with_paths(self, paths: Paths) -> Values:
        """Return the same, with parts at other places."""
        values = Values(self.layer, paths)
        values.kept = self.kept
        return values


def read(target: Target, hooks: list[Hook], last: int, tap: AbstractContextManager[Any]) -> None:
    """Run a pass over some tokens, always the same ones, in equal rows; it ends at a layer."""
    vocabulary = int(next(target.embedding.parameters()).shape[0])
    least = min(16, vocabulary // 2)
    length = min(TOKENS, longest_context(target.config) or TOKENS)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(least, vocabulary, (1, length), generator=generator)
    with torch.no_grad(), tap, target.hooks(*hooks):
        target.forward(ids.expand(ROWS, -1), last_layer=last)


# -- sums --------------------------------------------------------------------------------------------------------------


@dataclass
class Sum:
    """Parts that add up to a total, each times a factor.

    Attributes:
        name: What the total is.
        total: The total.
        start: What the parts are added to; None: nothing.
        parts: The parts, by the field of an adapter that has the factor.
    """

    name: str
    total: RowValues
    start: RowValues | None
    parts: dict[str, Any] = field(default_factory=dict)

    def _fits(self) -> bool:
        for part in self.parts.values():
            if part is None or part.shape != self.total.shape:
                return False
        return True

    def fit(self) -> dict[str, float] | None:
        """Return the factors of the first row; None if the parts do not add up to the total, or one is none of it."""
        if not self.parts or not self._fits():
            return None
        wanted = self.total[0]
        if self.start is not None:
            wanted = wanted - self.start[0]
        wanted = wanted.double().flatten()
        columns = torch.stack([part[0].double().flatten() for part in self.parts.values()], 1)
        solution = torch.linalg.lstsq(columns, wanted[:, None]).solution[:, 0]
        error = (columns @ solution - wanted).abs().max()
        if not error <= EXACT * wanted.abs().max():
            return None
        factors = dict[str, float]()
        for name, factor in zip(self.parts, solution.tolist(), strict=True):
            if abs(factor) < _ONE:
                return None
            factors[name] = float(f"{factor:.4g}")
            if abs(factor - 1) < _ONE:
                factors[name] = 1.0
        return factors

    def off(self, adapter: Adapter) -> float:
        """Return the largest distance from the sum, relative to the largest number in it, of any token."""
        if not self._fits():
            return float("inf")
        added = list[Tensor]()
        for name, value in self.parts.items():
            added.append(value * getattr(adapter, name))
        if self.start is not None:
            added.append(self.start)
        error = self.total
        size = error.abs().amax(-1)
        for part in added:
            error = error - part
            size = torch.maximum(size, part.abs().amax(-1))
        off = error.abs().amax(-1) / size
        off = off.nan_to_num(torch.inf).where(size > 0, 0)
        return float(off.max())


def residual_sums(values: Values) -> list[Sum]:
    """Return the sums of the residual stream: up to between attention and MLP, and from there, or one of both."""
    start, end = values.entered(""), values.left("")
    mid = values.entered("mid")
    before, after = dict[str, Any](), dict[str, Any]()
    attn = values.left("attn_out", "attn")
    if attn is not None:
        before["attn_factor"] = attn
    written = _written(values)
    if written is not None:
        after["write_factor"] = written
    if mid is None or mid.shape != start.shape:
        return [Sum("hook_resid_post", end, start, before | after)]
    return [Sum("hook_resid_mid", mid, start, before), Sum("hook_resid_post", end, mid, after)]


def _is_beside(paths: Paths) -> bool:
    """Whether the shared expert is beside the mixture, and no part of it."""
    mixture = f"{paths.get('mlp')}.".lstrip(".")
    return paths.get("down") is not None and not f"{paths['down']}.".startswith(mixture)


def _written(values: Values) -> Any:
    """What the MLP writes: of a norm behind it, or of a mixture and the shared expert beside it."""
    total, down = values.left("post_mlp_norm", "mlp"), values.left("down")
    paths = values.paths
    if paths.get("post_mlp_norm") is None and paths.get("experts") is not None and _is_beside(paths):
        if total is None or down is None:
            return None
        return total + down
    return total


def mlp_sum(values: Values) -> Sum:
    """Return what the MLP gives as the sum of what down projections and experts give."""
    paths, down, gate = values.paths, values.left("down"), values.left("shared_gate")
    if paths.get("experts") is None:
        return Sum("mlp", values.left("mlp"), None, {"down_factor": down})
    total = Sum("mlp", values.left("mlp"), None, {"expert_factor": values.left("experts")})
    if down is None or _is_beside(paths) or paths["mlp"] == paths["experts"]:
        return total
    if gate is not None:
        down = down * gate.sigmoid()
    total.parts["shared_factor"] = down
    return total


def relative_error(change: Tensor, expected: Tensor, numbers: Tensor | None = None) -> float:
    """Return the largest distance from the expected change, relative to its size or, if larger, that of `numbers`."""
    size = expected.abs().max()
    if not size > 0:
        return float("inf")
    if numbers is not None:
        size = torch.maximum(size, numbers.abs().max())
    return float(((change - expected).abs().max() / size).nan_to_num(torch.inf))
