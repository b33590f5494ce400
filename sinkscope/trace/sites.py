"""TransformerLens' names for the places of a model, resolved to modules of the plain model.

A site is a module, whether its input or its output is meant, and how the wanted tensor is cut out of it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.models.target import Target, first_tensor


@dataclass(frozen=True)
class Site:
    """One place: `cut` takes the module's input or output to `[batch pos ...]`."""

    name: str
    layer: int | None
    module: nn.Module | None  # None: attention rows, which no module returns
    when: str = "post"
    cut: Callable[[Any], Tensor] = first_tensor


_BLOCK_SITES = (
    "hook_resid_pre",
    "hook_attn_out",
    "hook_resid_mid",
    "hook_mlp_out",
    "hook_resid_post",
    "mlp.hook_pre",
    "mlp.hook_pre_linear",
    "mlp.hook_post",
    "attn.hook_q",
    "attn.hook_k",
    "attn.hook_v",
    "attn.hook_z",
    "attn.hook_pattern",
)


def site_names(n_layers: int) -> list[str]:
    """Every name that `trace` knows, for a model of `n_layers` layers, in the order of the forward pass."""
    return ["hook_embed", *(f"blocks.{i}.{name}" for i in range(n_layers) for name in _BLOCK_SITES)]


def resolve(target: Target, patterns: list[str]) -> list[Site]:
    """Sites matched by names or `fnmatch` patterns ("blocks.*.hook_resid_post"), in the order of the forward pass.

    Raises:
        SinkscopeError: a pattern matches nothing; the message shows names that exist.
        UnsupportedError: this architecture has no such place.
    """
    known = site_names(target.n_layers)
    chosen: set[str] = set()
    for pattern in patterns:
        matched = fnmatch.filter(known, pattern)
        if not matched:
            shown = ", ".join(["hook_embed", *(f"blocks.L.{name}" for name in _BLOCK_SITES)])
            raise SinkscopeError(
                f"site {pattern!r} matches nothing in a model of {target.n_layers} layers; there are {shown}"
            )
        chosen.update(matched)
    return [_site(target, name) for name in known if name in chosen]


def _site(target: Target, name: str) -> Site:
    if name == "hook_embed":
        return Site(name, None, target.embedding)
    _, number, part = name.split(".", 2)
    layer, a = int(number), target.adapter

    def sub(path: str | None) -> nn.Module:
        if path is None:
            raise UnsupportedError(
                f"site {name!r} does not exist on {a.model_type}: that architecture has no separate place for it; "
                "leave it out of sites"
            )
        return target.sub(layer, path)

    if part.startswith("mlp.") and target.is_mixture(layer):
        raise UnsupportedError(
            f"site {name!r} is per expert on {a.model_type}: layer {layer} is a mixture of experts; "
            "use find_sinks for its neurons, or hook_mlp_out"
        )
    match part:
        case "hook_resid_pre":
            return Site(name, layer, sub(""), "pre")
        case "hook_resid_post":
            return Site(name, layer, sub(""))
        case "hook_resid_mid":
            if getattr(target.config, "use_parallel_residual", False) or a.mid is None:
                return Site(name, layer, sub(None))
            return Site(name, layer, sub(a.mid), "pre")
        case "hook_attn_out":
            return Site(name, layer, sub(a.post_attn_norm or a.attn))
        case "hook_mlp_out":
            return Site(name, layer, sub(a.post_mlp_norm or a.mlp))
        case "mlp.hook_post":
            return Site(name, layer, sub(a.down), "pre")
        case "mlp.hook_pre":
            if a.fused_gate_up:
                return Site(name, layer, sub(a.up), cut=lambda t: t.chunk(2, -1)[0])
            return Site(name, layer, sub(a.gate or a.up))
        case "mlp.hook_pre_linear":
            if a.fused_gate_up:
                return Site(name, layer, sub(a.up), cut=lambda t: t.chunk(2, -1)[1])
            return Site(name, layer, sub(a.up if a.gate else None))
        case "attn.hook_z":
            heads = target.n_heads
            return Site(name, layer, sub(a.o), "pre", lambda t: t.unflatten(-1, (heads, -1)))
        case "attn.hook_pattern":
            return Site(name, layer, None)
        case _:
            return _projection(target, name, layer, part[-1], sub)


def _projection(target: Target, name: str, layer: int, which: str, sub: Callable[[str | None], nn.Module]) -> Site:
    """q, k or v before rotary, `[batch pos head d_head]`."""
    a = target.adapter
    heads = target.n_heads if which == "q" else target.n_kv_heads
    path = {"q": a.q, "k": a.k, "v": a.v}[which]
    if path is not None:
        return Site(name, layer, sub(path), cut=lambda t: t.unflatten(-1, (heads, -1)))
    index = "qkv".index(which)
    if a.model_type == "gpt_neox":  # q, k, v of one head lie side by side
        return Site(name, layer, sub(a.fused_qkv), cut=lambda t: t.unflatten(-1, (heads, 3, -1))[..., index, :])
    if a.model_type == "falcon":  # groups of query heads, then their key and value head
        raise UnsupportedError(f"site {name!r} is not offered on falcon, whose layout of q, k, v has three variants")
    size = target.d_model // target.n_heads
    if getattr(target.config, "head_dim", None):
        size = int(target.config.head_dim)
    widths = [target.n_heads * size, target.n_kv_heads * size, target.n_kv_heads * size]
    return Site(name, layer, sub(a.fused_qkv), cut=lambda t: t.split(widths, -1)[index].unflatten(-1, (heads, -1)))
