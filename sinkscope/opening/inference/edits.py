"""Edits of an MLP that prove which modules it is made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from sinkscope.models.experts import experts_of
from sinkscope.models.hooks import Args, Hook, Kwargs, first_tensor, on_hidden, on_input, on_output
from sinkscope.models.neurons import column_factor, typical_neuron, w_out
from sinkscope.models.short_passes import relative_error
from sinkscope.models.target import Target

PASS_ROWS = 7
"""Rows of the batch: an intact one, three with a turned head of queries, keys or values, and three edited here."""
_MOVED, _TURNED, _SCALED = 4, 5, 6  # a neuron, what experts give, or `up` is
_FACTOR = -2.0  # of `up`; no gate follows it, be its activation odd, such as tanh, or linear above 0, such as ReLU
_ONE = 5e-3  # largest distance of a measured constant from 1 that rounding explains


@dataclass(eq=False)
class PassRecorder:
    """What passed a module, by row of the batch and position, in float32.

    Attributes:
        rows: What passed it; no numbers before it ran.
    """

    rows: Float[Tensor, "row pos width"] = field(default_factory=lambda: torch.empty(0, 0, 0))

    @property
    def ran(self) -> bool:
        """Whether the module ran."""
        return self.rows.numel() > 0

    def by_row(self, tensor: Tensor) -> Float[Tensor, "row pos width"]:
        """Return a tensor by row and position, which OPT and experts run together."""
        if tensor.ndim == 2:
            return rearrange(tensor, "(row pos) width -> row pos width", row=PASS_ROWS)
        return rearrange(tensor, "row pos ... -> row pos (...)")

    def keep(self, output: Any) -> None:
        """Keep a copy of what passes; some models add to it in place."""
        self.rows = self.by_row(first_tensor(output).detach()).float().clone()

    def edited(self, edit: Callable[[Tensor], None]) -> Callable[[Tensor], Tensor]:
        """Return a function that keeps what passes, after `edit` has changed its rows."""

        def keep_edited(tensor: Tensor) -> Tensor:
            rows = self.by_row(tensor).clone()
            edit(rows)
            self.keep(rows)
            return rows.reshape(tensor.shape)

        return keep_edited

    def change(self, row: int) -> Float[Tensor, "pos width"]:
        """Return what an edit of a row changed, beside the first row."""
        return self.rows[row] - self.rows[0]


def as_constant(constant: float) -> float:
    """Return a constant as an adapter states it."""
    if abs(constant) < _ONE:
        return 0.0
    if abs(constant - 1) < _ONE:
        return 1.0
    return float(f"{constant:.4g}")


class MlpEdits:
    """Edits of one MLP, in rows of a batch of their own, and what passed its modules in each row.

    At the input of the down projection, of a dense MLP or of a shared expert, a neuron is moved. The numbers that fused
    experts give change places. At the output of `up` of a dense MLP, every second neuron is multiplied by -2: only
    these may then change in post and, if `up` is the linear factor, by the same factor (those of the gate would not).

    Attributes:
        errors: Relative distances between the actual and the expected changes; infinite where they cannot be compared.
        factors: Constants between a down projection and what the MLP gives, as measured, by the adapter's fields.
    """

    def __init__(self, target: Target, layer: int) -> None:
        self.target, self.layer, self.adapter = target, layer, target.adapter
        self.errors = list[float]()
        self.factors = dict[str, float]()
        self.is_mixture = target.is_mixture(layer)
        self.post, self.experts, self.mlp, self.up, self.shared_gate = (PassRecorder() for _ in range(5))
        neuron: int | None = 0
        if target.has_part(layer, "down"):
            neuron = typical_neuron(target, layer)
        self.is_silent = neuron is None or not target.has_neurons(layer)
        self.neuron = neuron or 0

    def hooks(self) -> list[Hook]:
        """Return the hooks that edit and record."""
        target, layer = self.target, self.layer
        if self.is_silent:
            return []
        on_part = partial(target.part_hooks, layer)
        hooks = on_part("down", "pre", on_input(self.post.edited(self._move)))
        if self.is_mixture:
            turned = on_hidden(self.experts.edited(self._turn))
            hooks += on_part("experts", "post", self._recompute, turned)
        else:
            hooks += on_part("up", "post", on_hidden(self.up.edited(self._scale_up)))
        hooks += on_part("shared_gate", "post", on_output(self.shared_gate.keep))
        return hooks + target.on_mlp(layer, self.mlp.keep)

    def finish(self) -> None:
        """Compare the actual changes with the expected ones, at the end of the layer."""
        if self.is_silent:
            return
        if not (self.mlp.ran and (self.experts if self.is_mixture else self.post).ran):
            self.errors.append(math.inf)
            return
        if self.post.ran:
            column = w_out(self.target, self.layer, [self.neuron])[0]
            written = self.post.change(_MOVED)[:, self.neuron, None] * column.to(self.post.rows.device)
            if self.shared_gate.ran:
                written = written * self.shared_gate.rows[_MOVED].sigmoid()
            self._compare(_MOVED, written, "shared_factor" if self.is_mixture else "down_factor")
        if self.is_mixture and self.experts.rows.any():
            written = self.experts.change(_TURNED) * column_factor(self.target, self.layer, 0)
            self._compare(_TURNED, written, "expert_factor")
        if self.up.ran:
            self.errors.append(self._error_of_up())

    def _compare(self, row: int, written: Float[Tensor, "pos d_model"], name: str) -> None:
        """Compare what arrives after the MLP with what is written."""
        change = self.mlp.change(row) * self.adapter.write_factor
        self.errors.append(relative_error(change, written, self.mlp.rows))
        if written.any():
            ratio = (change * written).sum() / (written * written).sum()
            self.factors[name] = as_constant(float(ratio) * getattr(self.adapter, name)) or 1.0  # 0: it writes nothing

    def _error_of_up(self) -> float:
        if self.up.rows.shape[-1] != self.post.rows.shape[-1] * (1 + self.adapter.fused_gate_up):
            return math.inf
        post, change = self.post.rows[0], self.post.change(_SCALED)
        is_gated = self.target.is_gated(self.layer)
        if not self.up.rows[0].any() or (is_gated and not post.any()):  # weights of zero
            return 0.0
        expected_change = (post * (_FACTOR - 1) if is_gated else change).clone()
        expected_change[:, 1::2] = 0
        return relative_error(change, expected_change, post if is_gated else None)

    def _recompute(self, module: nn.Module, args: Args, kwargs: Kwargs, output: Any) -> None:
        """Compare what experts give with what they must give according to their layout."""
        experts = experts_of(module)
        if experts is not None:
            given = first_tensor(output).flatten(0, -2).float()
            try:
                computed = experts.output(experts.routed(args, kwargs)).float()
            except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
                self.errors.append(math.inf)  # they compute something else than an MLP each
            else:
                if given.any():
                    self.errors.append(relative_error(given, computed, given))

    def _move(self, post: Float[Tensor, "row pos neuron"]) -> None:
        # By the norm of the whole vector, so that rounding does not hide the move.
        post[_MOVED, :, self.neuron] += post[0].float().norm(dim=-1).clamp(min=1).to(post.dtype)

    def _scale_up(self, up: Float[Tensor, "row pos output"]) -> None:
        first = self.target.width(self.layer) if self.adapter.fused_gate_up else 0
        up[_SCALED, :, first::2] *= _FACTOR

    def _turn(self, given: Float[Tensor, "row pos d_model"]) -> None:
        given[_TURNED] = given[_TURNED].roll(1, -1)  # a change of size would be invisible after a norm
