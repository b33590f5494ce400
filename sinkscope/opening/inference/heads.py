"""The attention of a layer: its projections and its heads, as attention gets them."""

from __future__ import annotations

from typing import Any

from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from sinkscope.models.stack import NotInferredError
from sinkscope.opening.inference.stage import EXACT, LENGTH, POSITION, Fields, Stage, contains, derivatives, largest


def heads_of(stage: Stage) -> Fields:
    """The attention of a layer, seen at the tap, by the adapter's fields; empty if the layer has none."""
    calls = stage.clean.attention
    if not calls:
        return {}
    if len(calls) > 1:
        raise NotInferredError(f"layer {stage.number} computes attention {len(calls)} times")
    call = calls[0]
    attn = stage.paths[call.module]
    fields: Fields = {"attn": attn, **dict.fromkeys(("q", "k", "v", "fused_qkv"))}
    fields["o"] = _output_projection(stage)
    fields["learned_sinks"] = call.settings.get("s_aux") is not None
    last = {role: path for path, role in _roles(stage, attn).items()}  # of several that move the same, the projection
    if "qkv" in last:
        fields["fused_qkv"] = last["qkv"]
        fields["qkv_layout"] = _layout_of_fused(stage.clean.gave[last["qkv"]], call)
        return fields
    for name, tensor in _inputs(call).items():
        # One that gives more than the heads, such as a gate beside the queries, is not named.
        if name in last and stage.clean.gave[last[name]].shape[1] == tensor.shape[1] * tensor.shape[3]:
            fields[name] = last[name]
    return fields


def _inputs(call: Any) -> dict[str, Float[Tensor, "1 head token width"]]:
    return {"q": call.query, "k": call.key, "v": call.value}


def _roles(stage: Stage, attn: str) -> dict[str, str]:
    """Which of q, k and v depend on the output of each linear module."""
    linear = [path for path in stage.linear() if contains(attn, path)]
    run, zeros = stage.run_to_derive(linear, cuts=False)
    roles = dict.fromkeys(linear, "")
    for name, tensor in _inputs(run.attention[0]).items():
        if tensor.requires_grad:
            for path in derivatives(tensor, tensor.roll(1, -1), zeros):  # a plain sum may be constant behind a norm
                roles[path] += name
    return roles


def weighing_module(stage: Stage) -> str | None:
    """Path of the module that returns attention weights as its second output; None if none does.

    Raises:
        NotInferredError: Tokens attend to later ones.
    """
    weights: dict[str, Tensor] = {}

    def see(module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        if isinstance(output, tuple | list) and len(output) > 1 and isinstance(output[1], Tensor):
            if output[1].shape[-2:] == (LENGTH, LENGTH) and module is not stage.layer:
                weights[stage.paths[module]] = output[1].clone()

    stage.run(*[(module, "post", see) for module in stage.paths])
    if not weights:
        return None
    path = max(weights, key=len)
    if weights[path].triu(1).any():
        raise NotInferredError("its attention sees later tokens")
    return path


def _layout_of_fused(gave: Float[Tensor, "token outputs"], call: Any) -> str | None:
    """How a module gives queries, keys and values, by the values, which nothing rotates on their way to attention."""
    heads, kv_heads = call.query.shape[1], call.value.shape[1]
    values = rearrange(call.value[0], "head token d_head -> token (head d_head)")
    layouts = {"beside": gave[:, -values.shape[1] :]}
    if heads == kv_heads and gave.shape[1] == 3 * values.shape[1]:
        by_head = rearrange(gave, "token (head qkv d_head) -> qkv token (head d_head)", head=heads, qkv=3)
        layouts["by head"] = by_head[2]
    for layout, given in layouts.items():
        if given.shape == values.shape and largest(given - values) <= 1e-4 * largest(values):
            return layout
    return None


def _output_projection(stage: Stage) -> str | None:
    """Path of the linear module that reads the heads side by side; None if there is none."""
    heads = stage.clean.attention[0].query.shape[1]
    second = 1 % heads

    def one_head(call: Any) -> tuple[Tensor, None]:
        output = call.value.new_zeros(1, LENGTH, heads, call.value.shape[-1])
        output[0, POSITION, second] = 1
        output[0, POSITION, second, ::2] = -1  # with a mean of zero, for norms
        return output, None

    read = stage.run(compute=one_head).read
    for path in stage.linear():
        moved = (read[path][POSITION] - read[path][POSITION - 1]).abs()
        if len(moved) % heads == 0 and moved.any():
            by_head = rearrange(moved, "(head d_head) -> head d_head", head=heads).sum(1)
            if by_head[second] * (1 + EXACT) >= by_head.sum():
                return path
    return None
