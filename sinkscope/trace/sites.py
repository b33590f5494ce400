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
from sinkscope.models.adapters import Adapter
from sinkscope.models.target import Target, first_tensor


@dataclass(frozen=True)
class Site:
    """One place: `cut` takes the module's input or output to `[batch pos ...]`."""

    name: str
    layer: int | None
    module: nn.Module | None  # None: attention rows, which no module returns
    when: str = "post"
    cut: Callable[[Any], Tensor] = first_tensor


@dataclass(frozen=True)
class _Place:
    """Where a site of a layer is: a path of the adapter, and what of it is meant."""

    path: Callable[[Adapter], str | None]
    when: str = "post"
    cut: Callable[[Target, Tensor], Tensor] = lambda _, tensor: tensor


def _half(which: int) -> Callable[[Target, Tensor], Tensor]:
    """Gate or up, where one projection makes both."""
    return lambda target, tensor: tensor.chunk(2, -1)[which] if target.adapter.fused_gate_up else tensor


_PLACES = {
    "hook_resid_pre": _Place(lambda a: "", "pre"),
    "hook_attn_out": _Place(lambda a: a.post_attn_norm or a.attn),
    "hook_resid_mid": _Place(lambda a: a.mid, "pre"),
    "hook_mlp_out": _Place(lambda a: a.post_mlp_norm or a.mlp),
    "hook_resid_post": _Place(lambda a: ""),
    "mlp.hook_pre": _Place(lambda a: a.up if a.fused_gate_up else a.gate or a.up, cut=_half(0)),
    "mlp.hook_pre_linear": _Place(lambda a: a.up if a.fused_gate_up or a.gate else None, cut=_half(1)),
    "mlp.hook_post": _Place(lambda a: a.down, "pre"),
    "attn.hook_q": _Place(lambda a: a.q or a.fused_qkv, cut=lambda target, tensor: _projected(target, "q", tensor)),
    "attn.hook_k": _Place(lambda a: a.k or a.fused_qkv, cut=lambda target, tensor: _projected(target, "k", tensor)),
    "attn.hook_v": _Place(lambda a: a.v or a.fused_qkv, cut=lambda target, tensor: _projected(target, "v", tensor)),
    "attn.hook_z": _Place(lambda a: a.o, "pre", lambda target, tensor: tensor.unflatten(-1, (target.n_heads, -1))),
    "attn.hook_pattern": _Place(lambda a: ""),
}


def site_names(n_layers: int) -> list[str]:
    """Every name that `trace` knows, for a model of `n_layers` layers, in the order of the forward pass."""
    return ["hook_embed", *(f"blocks.{i}.{name}" for i in range(n_layers) for name in _PLACES)]


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
            shown = ", ".join(["hook_embed", *(f"blocks.L.{name}" for name in _PLACES)])
            raise SinkscopeError(
                f"site {pattern!r} matches nothing in a model of {target.n_layers} layers; there are {shown}"
            )
        chosen.update(matched)
    return [_site(target, name) for name in known if name in chosen]


def _site(target: Target, name: str) -> Site:
    if name == "hook_embed":
        return Site(name, None, target.embedding)
    _, number, part = name.split(".", 2)
    layer, place, a = int(number), _PLACES[part], target.adapter
    if part == "attn.hook_pattern":
        return Site(name, layer, None)
    if part.startswith("mlp.") and target.is_mixture(layer):
        raise UnsupportedError(
            f"site {name!r} is per expert on {a.model_type}: layer {layer} is a mixture of experts; "
            "use find_sinks for its neurons, or hook_mlp_out"
        )
    if a.model_type == "falcon" and part in ("attn.hook_q", "attn.hook_k", "attn.hook_v"):
        raise UnsupportedError(f"site {name!r} is not offered on falcon, whose layout of q, k, v has three variants")
    path = place.path(a)
    if path is None or (part == "hook_resid_mid" and getattr(target.config, "use_parallel_residual", False)):
        raise UnsupportedError(
            f"site {name!r} does not exist on {a.model_type}: that architecture has no separate place for it; "
            "leave it out of sites"
        )
    return Site(name, layer, target.sub(layer, path), place.when, lambda out: place.cut(target, first_tensor(out)))


def _projected(target: Target, which: str, tensor: Tensor) -> Tensor:
    """q, k or v before rotary, `[batch pos head d_head]`, of what a projection of its own or a common one returns."""
    a, index = target.adapter, "qkv".index(which)
    counts = [target.n_heads, target.n_kv_heads, target.n_kv_heads]
    if getattr(a, which) is not None:
        return tensor.unflatten(-1, (counts[index], -1))
    if a.model_type == "gpt_neox":  # q, k, v of one head lie side by side
        return tensor.unflatten(-1, (target.n_heads, 3, -1))[..., index, :]
    size = int(getattr(target.config, "head_dim", None) or target.d_model // target.n_heads)
    return tensor.split([count * size for count in counts], -1)[index].unflatten(-1, (counts[index], -1))
