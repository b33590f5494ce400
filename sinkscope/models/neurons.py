"""Neurons and heads of a layer: their values, what each writes to the residual stream, and where both can be edited.

Neurons of a mixture are numbered `expert * d_mlp + neuron`; those of a shared expert follow after all of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from sinkscope.models.arithmetic import product
from sinkscope.models.hooks import Args, Hook, Kwargs, first_tensor, hidden_of, on_hidden, with_hidden
from sinkscope.models.target import LayerInput, Target, has_shared_beside
from sinkscope.models.weights import Experts, brought, input_columns, input_width
from sinkscope.results.notation import Neuron


def mlp_writers(target: Target, layer: int) -> list[nn.Module]:
    """Return the modules whose sum is what the MLP adds: one, or a mixture and the shared expert beside it."""
    writers = [target.sub(layer, "post_mlp_norm", "mlp")]
    if "post_mlp_norm" not in target.paths[layer] and has_shared_beside(target.paths[layer]):
        writers.append(target.sub(layer, "down"))
    return writers


class LayerView(NamedTuple):
    """A layer at `n` positions.

    Attributes:
        layer: Number of the layer.
        post: `hook_post`; in a mixture, times the weight in `routing`.
        routing: Weight of every expert, 0 for those not chosen; that of the dense MLP, or of a shared expert, is last.
        before_norm: What the norm behind the MLP reads. None: there is no such norm.
    """

    layer: int
    post: Float[Tensor, "n neuron"]
    routing: Float[Tensor, "n expert"]
    before_norm: Float[Tensor, "n d_model"] | None


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
    target.check_proved(layer, "mlp.hook_post", "neurons")
    chosen = where.flatten()
    parts: dict[str, Tensor] = {}

    def keep(part: str, value: Tensor) -> None:
        tensor = value.flatten(0, -2)
        parts[part] = tensor[chosen.to(tensor.device)].float()

    def keep_experts(module: nn.Module, args: Args, kwargs: Kwargs, _output: Any) -> None:
        with brought(module):
            experts = target.experts(layer)
            entering, weight = experts.routed(args, kwargs, chosen.cpu())
            parts["routing"] = weight.float()
            parts["experts"] = experts.values(entering, weight).flatten(1)

    hooks: list[Hook] = []
    for part, when in (("down", "pre"), ("shared_gate", "post"), ("post_mlp_norm", "pre")):
        if part in target.paths[layer]:
            hooks.append(on_hidden(target.sub(layer, part), when, partial(keep, part)))
    if layer in target.mixtures:
        hooks.append((target.sub(layer, "experts"), "post", keep_experts))
    with target.hooks(*hooks):
        target.forward(ids, last_layer=layer, start=start)
    return view_of_parts(layer, parts)


def view_of_parts(layer: int, parts: Mapping[str, Tensor]) -> LayerView:
    """Return the view of a layer.

    Args:
        layer: The layer.
        parts: What was kept: "experts" and "routing" of a mixture, "down" of a dense MLP or shared expert and the
            "shared_gate" on it, and "post_mlp_norm", what a norm behind the MLP reads.
    """
    post: list[Tensor] = []
    routing: list[Tensor] = []
    if "experts" in parts:
        post.append(parts["experts"])
        routing.append(parts["routing"])
    if "down" in parts:
        shared = parts["down"]
        weight = parts["shared_gate"].sigmoid() if "shared_gate" in parts else torch.ones_like(shared[:, :1])
        post.append(shared * weight)
        routing.append(weight)
    return LayerView(layer, torch.cat(post, 1), torch.cat(routing, 1), parts.get("post_mlp_norm"))


def number_of(target: Target, neuron: Neuron) -> int:
    """Return the number of a neuron in a `LayerView`."""
    expert = target.n_experts(neuron.layer) if neuron.expert is None else neuron.expert
    return expert * target.d_mlp + neuron.neuron


def neuron_at(target: Target, layer: int, number: int) -> Neuron:
    """Return the neuron of a number of a `LayerView`."""
    count = target.n_experts(layer)
    expert = min(number // target.d_mlp, count)
    return Neuron(layer, None if expert == count else expert, number - expert * target.d_mlp)


def gain_of(target: Target, norm: Any) -> Float[Tensor, " d_model"]:
    """Return the factor of a norm for each dimension, however it is stored: probed by a vector of mean 0, square 1."""
    signs = torch.ones(target.d_model, device=target.device, dtype=target.dtype)
    signs[1::2] = -1
    return (norm(signs) - norm(0 * signs)).float() * signs.float()


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
            is_of_expert = experts == expert
            numbers = (neurons[is_of_expert] - expert * target.d_mlp).tolist()
            if expert < count:
                factor, of_expert = adapter.expert_factor, target.experts(layer).down[expert, numbers]
            else:
                factor = adapter.shared_factor if count else adapter.down_factor
                of_expert = input_columns(target, target.sub(layer, "down"), numbers)
            written[is_of_expert] = (of_expert.float() * (factor * adapter.write_factor)).to(neurons.device)
    return written


def neutral_post(target: Target, view: LayerView, where: Bool[Tensor, " n"], number: int) -> float:
    """Return the median `hook_post` of a neuron at some positions; of a routed expert, at those that chose it."""
    chosen_positions = where.to(view.post.device)
    weight = view.routing[chosen_positions, min(number // target.d_mlp, view.routing.shape[1] - 1)]
    post, chosen = view.post[chosen_positions, number], weight > 0
    return float((post[chosen] / weight[chosen]).median()) if bool(chosen.any()) else 0.0


def before_mlp(target: Target, layer: int, see: Callable[[Float[Tensor, "row pos d_model"]], None]) -> Hook:
    """Return a hook by which `see` gets what a layer that is about to run would give if its MLP gave zero."""

    def hook(module: Any, args: Args, kwargs: Kwargs) -> None:
        args, kwargs = with_hidden(args, kwargs, hidden_of(args, kwargs).clone())  # some layers add to it in place
        silenced = [on_hidden(writer, "post", torch.zeros_like) for writer in mlp_writers(target, layer)]
        with target.loaded(layer), target.hooks(*silenced):
            see(first_tensor(module.forward(*args, **kwargs)))

    return target.layers[layer], "pre", hook


# -- hook points -------------------------------------------------------------------------------------------------------


def groups_of(sites: Iterable[Neuron]) -> list[list[Neuron]]:
    """Return the sites, each once, grouped by MLP or expert: one hook edits those of a group."""
    return [list(group) for _, group in groupby(sorted({*sites}, key=str), attrgetter("layer", "expert"))]


Edit = Callable[[Tensor], Tensor | None]
"""Takes the values `[... d]` at a hook point and returns new ones; None leaves them."""


class HookPoint(NamedTuple):
    """A point of a pass at which values can be read and edited.

    Attributes:
        module: The module beside which they pass.
        when: "pre" if they enter it, "post" if they leave it.
        columns: The columns that are edited; None if all are.
        expert: Expert in a mixture, which is the module, if they are its neurons.
    """

    module: nn.Module
    when: str = "post"
    columns: Int[Tensor, " some"] | None = None
    expert: int | None = None

    def hook(self, edit: Edit) -> Hook:
        """Return the hook by which an edit acts here."""
        if self.columns is not None:
            edit = _on_columns(edit, self.columns)
        if self.expert is not None:
            return self.module, self.when, partial(_in_expert, self.expert, edit)
        return on_hidden(self.module, self.when, edit)

    def rows(self, where: Bool[Tensor, "row _ _"], new: Tensor) -> Hook:
        """Return the hook of a pass whose rows each have an edit of their own.

        Args:
            where: Which values are replaced.
            new: What replaces them, of a shape that expands to theirs.
        """

        def replaced(values: Tensor) -> Tensor:
            rows = values.reshape(len(where), -1, values.shape[-1])  # experts and OPT run row and position together
            return torch.where(where.to(rows.device), new.to(rows), rows).reshape(values.shape)

        return self.hook(replaced)


def _on_columns(edit: Edit, columns: Int[Tensor, " some"]) -> Edit:
    """The edit of a whole tensor that acts on some of its columns."""

    def edited(values: Tensor) -> Tensor | None:
        places = columns.to(values.device)  # most are there already
        new = edit(values[..., places])
        # A copy, because autograd and other modules may need the caller's tensor.
        return None if new is None else values.index_copy(-1, places, new.to(values.dtype))

    return edited


def heads_point(target: Target, layer: int, head: int | None = None) -> HookPoint:
    """Return the outputs of all heads of a layer, side by side (`hook_z`), or that of one.

    Raises:
        UnsupportedError: The heads of the layer could not be proved.
    """
    target.check_proved(layer, "attn.hook_z", "heads")
    module, columns = target.sub(layer, "o"), None
    if head is not None:
        width = input_width(module) // target.n_heads  # layers may have heads of different widths
        columns = torch.arange(head * width, (head + 1) * width, device=target.device)
    return HookPoint(module, "pre", columns)


def neurons_point(target: Target, sites: Sequence[Neuron], site: str = "post") -> HookPoint:
    """Return neurons of one MLP or expert: `hook_post`, or the linear factor with site="up".

    Raises:
        UnsupportedError: The MLP of the layer could not be proved.
    """
    layer, expert = sites[0].layer, sites[0].expert
    neurons = torch.tensor([site_of_neuron.neuron for site_of_neuron in sites], device=target.device)
    target.check_proved(layer, "mlp.hook_post", "neurons")
    if expert is not None:
        return HookPoint(target.experts(layer).module, "post", neurons, expert)
    if site == "post":
        return HookPoint(target.sub(layer, "down"), "pre", neurons)
    if target.adapter.fused_gate_up:
        neurons = neurons + target.width(layer)
    return HookPoint(target.sub(layer, "up"), "post", neurons)


_EDITED: Any = WeakTensorKeyDictionary()
"""The neurons of experts as hooks of a call have left them, for the next hook, by what entered the experts."""


def _in_expert(expert: int, edit: Edit, module: Any, args: Args, kwargs: Kwargs, output: Any) -> Any:
    """The forward hook of experts, with kwargs, by which an edit acts on the neurons of one of them."""
    experts = Experts(module)
    edited: dict[int, Tensor] = _EDITED.setdefault((*args, *kwargs.values())[0], {})
    with brought(module):
        entering, weight = experts.routed(args, kwargs)
        post = edited[expert] if expert in edited else experts.post(expert, entering[expert])
        new = edit(post)
        if new is None:
            return None
        down = experts.down[expert]
        change = product(((new - post) * weight[:, expert, None]).to(down), down)
    edited[expert] = new
    add = on_hidden(module, "post", lambda hidden: hidden + change.view_as(hidden).to(hidden))[2]
    return add(module, args, kwargs, output)
