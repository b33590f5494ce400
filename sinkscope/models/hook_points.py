"""Points of a pass at which values can be edited: the neurons of an MLP or expert, and the outputs of heads."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from sinkscope.models.experts import Experts
from sinkscope.models.hooks import Hook, on_hidden, on_input
from sinkscope.models.target import Target
from sinkscope.models.weights import brought
from sinkscope.results.notation import Neuron


class NeuronGroup(NamedTuple):
    """The neurons of one MLP or expert that one hook edits, by number and by address."""

    layer: int
    expert: int | None
    neurons: list[int]
    sites: list[Neuron]


def groups_of(sites: Iterable[Neuron]) -> list[NeuronGroup]:
    """Return the sites, each once, grouped by MLP."""
    groups: dict[tuple[int, int | None], NeuronGroup] = {}
    for site in dict.fromkeys(sites):
        group = groups.setdefault((site.layer, site.expert), NeuronGroup(site.layer, site.expert, [], []))
        group.neurons.append(site.neuron)
        group.sites.append(site)
    return list(groups.values())


class _LatestCall(threading.local):
    """The call in which the thread is, identified by its input, and the values that earlier hooks left in it."""

    hidden: Callable[[], Tensor | None] = staticmethod(lambda: None)
    edited: dict[tuple[int, int, int], Tensor]  # by id of the module, expert and neuron


_latest = _LatestCall()


def expert_hook(
    experts: Experts, expert: int, neurons: list[int], edit: Callable[[Tensor], Tensor | None]
) -> Callable[..., Any]:
    """Return the forward hook, with kwargs, by which `edit` acts on an expert; its module holds `experts`."""

    def corrected(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        entering = (*args, *kwargs.values())[0]
        if _latest.hidden() is not entering:
            _latest.hidden, _latest.edited = weakref.ref(entering), {}
        edited = _latest.edited
        with brought(module):
            routed = experts.routed(args, kwargs)
            factors = experts.factors(expert, routed.entering(expert), neurons)
            post = experts.activate(*factors).clone()
            written = experts.columns(expert, neurons).to(post.dtype)
        keys = [(id(module), expert, neuron) for neuron in neurons]
        for number, key in enumerate(keys):
            if key in edited:
                post[:, number] = edited[key]
        new = edit(post)
        if new is None:
            return None
        new = new.to(post.dtype)
        edited.update(zip(keys, new.unbind(1), strict=True))
        change = (new - post) * routed.weight[:, expert, None]
        change = change.to(post.dtype) @ written
        return on_hidden(lambda hidden: hidden + change.view_as(hidden))(module, args, kwargs, output)

    return corrected


Edit = Callable[[Tensor], Tensor | None]
"""Takes the values `[... d]` at a hook point and returns new ones; None leaves them."""


class HookPoint(NamedTuple):
    """A point of a pass at which values can be edited.

    Attributes:
        module: The module beside which they pass.
        when: "pre" if they enter it, "post" if they leave it.
        columns: The columns that are edited; None if all are.
        inside: Makes a torch hook with kwargs of an edit of values that never pass as a tensor.
    """

    module: nn.Module
    when: str
    columns: list[int] | None = None
    inside: Callable[[Edit], Callable[..., Any]] | None = None

    def hook(self, edit: Edit) -> Hook:
        """Return the hook by which an edit acts here."""
        if self.inside is not None:
            return self.module, self.when, self.inside(edit)
        if self.when == "pre":
            return self.module, self.when, on_input(edit, self.columns)
        return self.module, self.when, on_hidden(edit, self.columns)

    def rows(self, where: Bool[Tensor, "row _ _"], new: Callable[[Float[Tensor, "row pos d"]], Tensor]) -> Hook:
        """Return the hook of a pass whose rows each have an edit of their own.

        Args:
            where: Which values are replaced.
            new: What replaces them, of a shape that expands to theirs.
        """

        def replaced(values: Tensor) -> Tensor:
            rows = values.reshape(len(where), -1, values.shape[-1])  # experts and OPT run row and position together
            return torch.where(where.to(rows.device), new(rows).to(rows), rows).reshape(values.shape)

        return self.hook(replaced)


def heads_point(target: Target, layer: int, columns: list[int] | None = None) -> HookPoint:
    """Return the outputs of all heads of a layer, side by side (`hook_z`), or some columns of them."""
    return HookPoint(target.sub(layer, "o"), "pre", columns)


def neurons_point(target: Target, group: NeuronGroup, site: str = "post") -> HookPoint:
    """Return neurons of an MLP or of one expert: `hook_post`, or the linear factor with site="up".

    Raises:
        UnsupportedError: The MLP of the layer could not be proved.
    """
    target.check_neurons(group.layer)
    if group.expert is not None:
        experts = target.experts(group.layer)
        return HookPoint(experts.module, "post", inside=partial(expert_hook, experts, group.expert, group.neurons))
    if site == "post":
        return HookPoint(target.sub(group.layer, "down"), "pre", group.neurons)
    first = 0
    if target.adapter.fused_gate_up:
        first = target.width(group.layer)
    return HookPoint(target.sub(group.layer, "up"), "post", [first + neuron for neuron in group.neurons])
