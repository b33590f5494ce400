"""Where a pass is edited: neurons, heads and whole outputs, each as the hook that gives an edit their values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from sinkscope.hooks.edit.expert_edit import expert_hook
from sinkscope.hooks.edit.sites import NeuronGroup
from sinkscope.models.hooks import Hook, beside, on_hidden, on_input
from sinkscope.models.target import Target

Edit = Callable[[Tensor], Tensor | None]
"""Gives new values `[... d]` for those that pass a place, or None to leave them."""


class Place(NamedTuple):
    """One place that values pass.

    Attributes:
        module: The module beside which they pass.
        when: "pre" if they enter it, "post" if they leave it.
        columns: The columns that are edited; None if all are.
        inside: For what never passes by itself: makes a torch hook with kwargs of an edit of it.
    """

    module: nn.Module
    when: str
    columns: list[int] | None = None
    inside: Callable[[Edit], Callable[..., Any]] | None = None

    def hook(self, edit: Edit) -> Hook:
        """The hook by which an edit acts here."""
        if self.inside is not None:
            return self.module, self.when, self.inside(edit)
        if self.when == "pre":
            return self.module, self.when, on_input(edit, self.columns)
        return self.module, self.when, on_hidden(edit, self.columns)

    def rows(self, where: Bool[Tensor, "row _ _"], new: Callable[[Float[Tensor, "row pos d"]], Tensor]) -> Hook:
        """The hook of a pass whose rows each have an edit of their own.

        Args:
            where: Which values are replaced.
            new: What replaces them, of a shape that expands to theirs.
        """
        there = beside(where)

        def replaced(values: Tensor) -> Tensor:
            rows = values.reshape(len(where), -1, values.shape[-1])  # experts and OPT run row and position together
            return torch.where(there(rows), new(rows).to(rows), rows).reshape(values.shape)

        return self.hook(replaced)


def heads_place(target: Target, layer: int, columns: list[int] | None = None) -> Place:
    """The outputs of all heads of a layer, side by side (`hook_z`), or some columns of them."""
    return Place(target.output_projection(layer), "pre", columns)


def neurons_place(target: Target, group: NeuronGroup, site: str = "post") -> Place:
    """Neurons of an MLP or of one expert: `hook_post`, or the linear factor with site="up"."""
    layer, expert, neurons = group[:3]
    if expert is not None:
        experts = target.experts(layer)
        return Place(experts.module, "post", inside=partial(expert_hook, experts, expert, neurons))
    if site == "post":
        return Place(target.sub(layer, "down"), "pre", neurons)
    first = 0
    module = target.sub(layer, "up")
    if target.adapter.fused_gate_up and target.kind == "bridge":  # it splits the fused projection into two
        module = target.sub(layer, "mlp").get_submodule("in")
    elif target.adapter.fused_gate_up:
        first = target.width(layer)
    return Place(module, "post", [first + neuron for neuron in neurons])
