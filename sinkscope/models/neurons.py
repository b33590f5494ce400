"""Neurons and heads of a layer: their values, what each writes to the residual stream, and where both can be edited.

Neurons of a mixture are numbered `expert * d_mlp + neuron`; those of a shared expert follow after all of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from sinkscope.errors import UnsupportedError
from sinkscope.models.hooks import Args, Hook, Kwargs, first_tensor, hidden_of, on_hidden, on_input, with_hidden
from sinkscope.models.target import LayerInput, Target, has_shared_beside
from sinkscope.models.weights import Experts, Routed, brought, input_columns
from sinkscope.results.notation import Neuron


def norms_of(tensor: Float[Tensor, ...]) -> Float[Tensor, ...]:
    """Return L2 norms in float32; no smaller type is summed in itself."""
    return torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.promote_types(tensor.dtype, torch.float32)).float()


def mlp_writers(target: Target, layer: int) -> list[nn.Module]:
    """Return the modules whose sum is what the MLP gives: one, or a mixture and the shared expert beside it."""
    writers = [target.sub(layer, "mlp")]
    if has_shared_beside(target.paths[layer]):
        writers.append(target.sub(layer, "down"))
    return writers


def on_mlp(target: Target, layer: int, see: Callable[[Tensor], None]) -> list[Hook]:
    """Return hooks by which `see` gets what the MLP gives, before any norm after it."""
    writers = mlp_writers(target, layer)
    outputs: list[Tensor] = []

    def keep(output: Tensor) -> None:
        outputs.append(output)
        if len(outputs) == len(writers):
            total = outputs[0].clone()  # some layers add to it in place
            for other in outputs[1:]:
                total += other.view_as(total)
            outputs.clear()
            see(total)

    return [(writer, "post", on_hidden(keep)) for writer in writers]


@dataclass(frozen=True)
class LayerView:
    """A layer at `n` positions.

    Attributes:
        layer: Number of the layer.
        mlp: Output of the MLP, before any norm after it; times the factor that the layer puts on it.
        post: `hook_post`; in a mixture, times the weight in `routing`.
        routing: Weight of every expert, 0 for those not chosen; the shared expert comes last, if there is one. None if
            the layer is not a mixture.
    """

    layer: int
    mlp: Float[Tensor, "n d_model"]
    post: Float[Tensor, "n neuron"]
    routing: Float[Tensor, "n expert"] | None = None

    def at(self, some: Bool[Tensor, " n"]) -> LayerView:
        """Return the layer at some of these positions."""
        routing = None if self.routing is None else self.routing[some.to(self.routing.device)]
        chosen = some.to(self.post.device)
        return LayerView(self.layer, self.mlp[chosen], self.post[chosen], routing)


@torch.no_grad()
def view_layer(
    target: Target,
    layer: int,
    ids: Int[Tensor, "row pos"],
    where: Bool[Tensor, "row pos"],
    start: LayerInput | None = None,
) -> LayerView:
    """Return the layer at the positions marked in `where`, from a pass that ends at this layer.

    Args:
        target: The model.
        layer: The layer.
        ids: The texts.
        where: The positions.
        start: What entered a layer up to this one when these texts were read; the pass begins there.
    """
    target.check_neurons(layer)
    chosen = where.flatten()
    parts: dict[str, Tensor] = {}

    def keep(part: str, value: Tensor) -> None:
        tensor = value.detach().flatten(0, -2)
        parts[part] = tensor[chosen.to(tensor.device)].float()

    def keep_experts(module: nn.Module, args: Args, kwargs: Kwargs, _output: Any) -> None:
        with brought(module):
            experts = target.experts(layer)
            routed = experts.routed(args, kwargs)
            keep("routing", routed.weight)
            parts["of experts"] = _of_experts(experts, routed, chosen)

    hooks = on_mlp(target, layer, partial(keep, "mlp"))
    hooks += target.part_hooks(layer, "down", "pre", on_input(partial(keep, "post")))
    hooks += target.part_hooks(layer, "shared_gate", "post", on_hidden(partial(keep, "gate")))
    if layer in target.mixtures:
        hooks += target.part_hooks(layer, "experts", "post", keep_experts)
    with target.hooks(*hooks):
        target.forward(ids, last_layer=layer, start=start)
    mlp, post, routing = parts["mlp"] * target.adapter.write_factor, parts.get("of experts"), parts.get("routing")
    if post is None or routing is None:
        return LayerView(layer, mlp, parts["post"])
    if "post" in parts:
        shared = parts["post"]
        weight = parts["gate"].sigmoid() if "gate" in parts else torch.ones_like(shared[:, :1])
        post, routing = torch.cat([post, shared * weight], 1), torch.cat([routing, weight], 1)
    return LayerView(layer, mlp, post, routing)


def _of_experts(experts: Experts, routed: Routed, chosen: Tensor) -> Tensor:
    """The neurons of all experts for the chosen tokens, times the routing weight; 0 where an expert was not chosen."""
    chosen = chosen.to(routed.weight.device)
    routing = routed.weight[chosen].float()
    post = torch.zeros(*routing.shape, experts.width, device=routing.device)
    for expert in range(experts.count):
        rows = routing[:, expert].nonzero().flatten()
        if len(rows):
            values = experts.post(expert, routed.entering(expert)[chosen][rows])
            post[rows, expert] = values.float() * routing[rows, expert, None]
    return post.flatten(1)


def flat_number(target: Target, layer: int, expert: int | None, neuron: int) -> int:
    """Return the number of a neuron in a `LayerView`."""
    if expert is None:
        expert = target.n_experts(layer)
    return expert * target.d_mlp + neuron


def expert_and_neuron(target: Target, layer: int, number: int) -> tuple[int | None, int]:
    """Return the inverse of `flat_number`.

    The expert is None if the layer is not a mixture, and for a shared expert.
    """
    count = target.n_experts(layer)
    expert = min(number // target.d_mlp, count)
    return None if expert == count else expert, number - expert * target.d_mlp


def gain_of(target: Target, norm: Any) -> Float[Tensor, " d_model"]:
    """Return the factor of a norm for each dimension, however it is stored: probed by a vector of mean 0, square 1."""
    signs = torch.ones(target.d_model, device=target.device, dtype=target.dtype)
    signs[1::2] = -1
    positive, negative = norm(torch.stack([signs, -signs])).float()
    return (positive - negative) / 2 * signs.float()


@torch.no_grad()
def columns(target: Target, layer: int, neurons: Int[Tensor, " k"]) -> Float[Tensor, "k d_model"]:
    """Return columns of the down projection, float32: what each neuron writes when its `hook_post` is 1.

    Routing weight and sigmoid gate are not included, constant factors up to the residual stream (or up to a norm after
    the MLP) are.

    Args:
        target: The model.
        layer: The layer.
        neurons: Numbers of a `LayerView`.
    """
    adapter, count = target.adapter, target.n_experts(layer)
    experts = (neurons // target.d_mlp).clamp(max=count)
    written = torch.zeros(len(neurons), target.d_model, device=neurons.device)
    with target.loaded(layer):
        for expert in experts.unique().tolist():
            own = experts == expert
            numbers = (neurons[own] - expert * target.d_mlp).tolist()
            if expert < count:
                factor, of_expert = adapter.expert_factor, target.experts(layer).columns(expert, numbers)
            else:
                factor = adapter.shared_factor if count else adapter.down_factor
                of_expert = input_columns(target, target.sub(layer, "down"), numbers)
            written[own] = (of_expert.float() * (factor * adapter.write_factor)).to(neurons.device)
    return written


def neutral_post(target: Target, text: LayerView, number: int) -> float:
    """Return the median `hook_post` of a neuron on typical text; of a routed expert, over the tokens that chose it."""
    post = text.post[:, number]
    if text.routing is None:
        return float(post.median())
    expert, _ = expert_and_neuron(target, text.layer, number)
    weight = text.routing[:, -1 if expert is None else expert]  # the last weight is the shared expert's
    chosen = weight > 0
    if not bool(chosen.any()):
        return 0.0
    return float((post[chosen] / weight[chosen]).median())


Added = Callable[[Float[Tensor, "row pos d_model"]], Float[Tensor, "row pos d_model"]]
"""Gives how much of the residual stream after a layer is not there if the MLP gives zero."""


def keep_call(target: Target, layer: int, calls: list[Added]) -> Hook:
    """Return a hook that keeps the call of a layer, which does not simply add what its MLP gives."""

    def keep(_module: Any, args: Args, kwargs: Kwargs) -> None:
        hidden = hidden_of(args, kwargs).clone()  # some layers add to it in place
        args, kwargs = with_hidden(args, kwargs, hidden)

        @torch.no_grad()
        def added(resid: Tensor) -> Tensor:
            silenced = mlp_writers(target, layer)[0], "post", on_hidden(torch.zeros_like)
            with target.loaded(layer), target.hooks(silenced):
                return resid - first_tensor(target.layers[layer].forward(*args, **kwargs))

        calls.append(added)

    return target.layers[layer], "pre", keep


# -- hook points -------------------------------------------------------------------------------------------------------


def groups_of(sites: Iterable[Neuron]) -> list[list[Neuron]]:
    """Return the sites, each once, grouped by MLP or expert: one hook edits those of a group."""
    groups: dict[tuple[int, int | None], list[Neuron]] = {}
    for site in dict.fromkeys(sites):
        groups.setdefault((site.layer, site.expert), []).append(site)
    return [*groups.values()]


Edit = Callable[[Tensor], Tensor | None]
"""Takes the values `[... d]` at a hook point and returns new ones; None leaves them."""


class HookPoint(NamedTuple):
    """A point of a pass at which values can be read and edited.

    Attributes:
        module: The module beside which they pass.
        when: "pre" if they enter it, "post" if they leave it.
        columns: The columns that are edited; None if all are.
        inside: Makes a torch hook with kwargs of an edit of values that never pass as a tensor.
    """

    module: nn.Module
    when: str = "post"
    columns: list[int] | None = None
    inside: Callable[[Edit], Callable[..., Any]] | None = None

    def hook(self, edit: Edit) -> Hook:
        """Return the hook by which an edit acts here."""
        if self.inside is not None:
            return self.module, self.when, self.inside(edit)
        make = on_input if self.when == "pre" else on_hidden
        return self.module, self.when, make(edit if self.columns is None else _on_columns(edit, self.columns))

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


def _on_columns(edit: Edit, columns: list[int]) -> Edit:
    """The edit of a whole tensor that acts on some of its columns."""
    places = torch.tensor(columns)

    def edited(values: Tensor) -> Tensor | None:
        nonlocal places
        places = places.to(values.device)  # they are moved once, not in every call
        new = edit(values[..., places])
        # A copy, because autograd and other modules may need the caller's tensor.
        return None if new is None else values.index_copy(-1, places, new.to(values.dtype))

    return edited


def heads_point(target: Target, layer: int, columns: list[int] | None = None) -> HookPoint:
    """Return the outputs of all heads of a layer, side by side (`hook_z`), or some columns of them.

    Raises:
        UnsupportedError: The heads of the layer could not be proved.
    """
    reason = dict(target.adapter.unproved).get(f"blocks.{layer}.attn.hook_z")
    if reason is not None:
        raise UnsupportedError(f"the heads of layer {layer} of {target.name} are not offered: {reason}")
    return HookPoint(target.sub(layer, "o"), "pre", columns)


def neurons_point(target: Target, sites: Sequence[Neuron], site: str = "post") -> HookPoint:
    """Return neurons of one MLP or expert: `hook_post`, or the linear factor with site="up".

    Raises:
        UnsupportedError: The MLP of the layer could not be proved.
    """
    layer, expert, neurons = sites[0].layer, sites[0].expert, [each.neuron for each in sites]
    target.check_neurons(layer)
    if expert is not None:
        experts = target.experts(layer)
        return HookPoint(experts.module, inside=partial(_expert_hook, experts, expert, neurons))
    if site == "post":
        return HookPoint(target.sub(layer, "down"), "pre", neurons)
    if target.adapter.fused_gate_up:
        neurons = [target.width(layer) + neuron for neuron in neurons]
    return HookPoint(target.sub(layer, "up"), "post", neurons)


_EDITED: Any = WeakTensorKeyDictionary()
"""What hooks of a call left in neurons of experts, for the next hook, by what entered the experts."""


def _expert_hook(experts: Experts, expert: int, neurons: list[int], edit: Edit) -> Callable[..., Any]:
    """The forward hook, with kwargs, by which `edit` acts on an expert; its module holds `experts`."""

    def corrected(module: Any, args: Args, kwargs: Kwargs, output: Any) -> Any:
        edited: dict[tuple[int, int], Tensor] = _EDITED.setdefault((*args, *kwargs.values())[0], {})
        with brought(module):
            routed = experts.routed(args, kwargs)
            post = experts.post(expert, routed.entering(expert))[:, neurons]
            written = experts.columns(expert, neurons).to(post.dtype)
        for number, neuron in enumerate(neurons):
            post[:, number] = edited.get((expert, neuron), post[:, number])
        new = edit(post)
        if new is None:
            return None
        new = new.to(post.dtype)
        edited.update({(expert, neuron): new[:, number] for number, neuron in enumerate(neurons)})
        change = ((new - post) * routed.weight[:, expert, None]).to(post.dtype) @ written
        return on_hidden(lambda hidden: hidden + change.view_as(hidden))(module, args, kwargs, output)

    return corrected
