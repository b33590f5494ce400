"""The sites of a model: names of TransformerLens, and the modules at which they are."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.models.grouped_heads import head_projection
from sinkscope.models.hooks import first_tensor
from sinkscope.models.target import Target


class NoSiteError(UnsupportedError):
    """A layer has no such site; others may have it."""


@dataclass(frozen=True)
class Site:
    """One place in the model: `cut` maps the module's input or output to `[batch pos ...]`.

    After the last layer, `layer` is the number of layers. Where a layer adds what the module gives, it multiplies it by
    `factor`.
    """

    name: str
    layer: int | None
    module: nn.Module | None  # None: attention rows, which no module returns
    when: str = "post"
    cut: Callable[[Any], Tensor] = first_tensor
    factor: float = 1.0

    def shown(self, value: Any, shape: torch.Size) -> Tensor:
        """Return what the site shows of its module's input or output, in a pass over ids of this shape."""
        tensor = self.cut(first_tensor(value)) * self.factor
        if tensor.shape[:2] != shape:  # OPT runs batch and position together
            tensor = rearrange(tensor, "(batch pos) ... -> batch pos ...", batch=shape[0])
        return tensor


def _half(number: int, target: Target, tensor: Tensor) -> Tensor:
    """Gate (0) or up (1) of a module that may return both."""
    if target.adapter.fused_gate_up:
        return tensor.chunk(2, -1)[number]
    return tensor


def _heads(target: Target, tensor: Float[Tensor, "*n width"]) -> Float[Tensor, "*n head d_head"]:
    return rearrange(tensor, "... (head d_head) -> ... head d_head", head=target.n_heads)


@dataclass(frozen=True)
class _Place:
    """Where a site of a layer is: at the first of these parts that the layer has, and what of its input or output."""

    parts: tuple[str, ...]  # none: the layer itself
    when: str = "post"
    cut: Callable[[Target, Tensor], Tensor] | None = None
    factor: str | None = None  # field of the adapter


_PLACES = {
    "hook_resid_pre": _Place((), "pre"),
    "hook_attn_out": _Place(("attn_out", "attn"), factor="attn_factor"),
    "hook_resid_mid": _Place(("mid",), "pre"),
    "hook_mlp_out": _Place(("post_mlp_norm", "mlp"), factor="write_factor"),
    "hook_resid_post": _Place(()),
    "mlp.hook_pre": _Place(("gate", "up"), cut=partial(_half, 0)),
    "mlp.hook_pre_linear": _Place(("up",), cut=partial(_half, 1)),
    "mlp.hook_post": _Place(("down",), "pre"),
    "attn.hook_q": _Place(("q", "fused_qkv"), cut=partial(head_projection, "q")),
    "attn.hook_k": _Place(("k", "fused_qkv"), cut=partial(head_projection, "k")),
    "attn.hook_v": _Place(("v", "fused_qkv"), cut=partial(head_projection, "v")),
    "attn.hook_z": _Place(("o",), "pre", _heads),
    "attn.hook_pattern": _Place(()),
}
_LAST = ("ln_final", "logits")  # what the unembedding reads, and what it gives


def site_names(n_layers: int) -> list[str]:
    """Return all site names that `trace` accepts for a model of `n_layers` layers, in the order of the pass."""
    names = ["hook_embed"]
    for layer in range(n_layers):
        names += [f"blocks.{layer}.{place}" for place in _PLACES]
    return [*names, *_LAST]


Pattern = str | Callable[[str], bool]
"""Which sites are meant: a name, an `fnmatch` pattern of names, or a function that is true for their names."""


def resolve(target: Target, patterns: Pattern | Sequence[Pattern]) -> list[Site]:
    """Return sites that are meant by one or several patterns, in the order of the forward pass.

    A pattern takes the layers that have the site: in hybrid models, not all have attention.

    Raises:
        SinkscopeError: A pattern matches nothing; the message shows names that exist.
        UnsupportedError: This architecture has no such site, or the layer that is named has none.
    """
    names = site_names(target.n_layers)
    if isinstance(patterns, str) or callable(patterns):
        patterns = [patterns]
    chosen: dict[str, Site] = {}
    for pattern in patterns:
        if isinstance(pattern, str):
            matches = fnmatch.filter(names, pattern)
        else:
            matches = list(filter(pattern, names))
        if not matches:
            kinds = ", ".join(["hook_embed", *(f"blocks.L.{place}" for place in _PLACES), *_LAST])
            raise SinkscopeError(
                f"site {pattern!r} matches nothing in a model of {target.n_layers} layers; there are {kinds}"
            )
        chosen |= _in_layers(target, matches)
    return [chosen[name] for name in names if name in chosen]


def _in_layers(target: Target, names: Sequence[str]) -> dict[str, Site]:
    """The sites of these names in the layers that have them; each has to be in one."""
    found: dict[str, Site] = {}
    absent: dict[str, NoSiteError] = {}
    for name in names:
        try:
            found[name] = _site(target, name)
        except NoSiteError as error:
            absent.setdefault(name.split(".", 2)[-1], error)
    there = {name.split(".", 2)[-1] for name in found}
    for part, error in absent.items():
        if part not in there:
            raise error
    return found


def _site(target: Target, name: str) -> Site:
    if name == "hook_embed":
        return Site(name, None, target.embedding)
    if name == "ln_final":
        return Site(name, target.n_layers, target.base, cut=lambda output: output[0])
    if name == "logits":
        if not target.resident:
            raise UnsupportedError(
                f"site 'logits': {target.name} is read layer by layer, without its unembedding; load it whole with "
                "sinkscope.load(...)"
            )
        return Site(name, target.n_layers, target.hf, cut=lambda output: output.logits)
    _, number, part = name.split(".", 2)
    layer = int(number)
    if part.startswith("attn.") and not target.has_attention(layer):
        raise NoSiteError(
            f"site {name!r} is not offered: layer {layer} of {target.name} has no softmax attention; it is in layers "
            f"{', '.join(map(str, target.attending))}"
        )
    if part == "attn.hook_pattern":
        return Site(name, layer, None)
    place = _PLACES[part]
    cut = first_tensor if place.cut is None else partial(place.cut, target)
    factor = 1.0 if place.factor is None else getattr(target.adapter, place.factor)
    return Site(name, layer, _module(target, layer, part), place.when, cut, factor)


def _module(target: Target, layer: int, part: str) -> nn.Module:
    """The module of a site of a layer."""
    adapter, parts = target.adapter, _PLACES[part].parts
    unproved = dict(adapter.unproved)
    reason = unproved.get(f"blocks.{layer}.{part}", unproved.get("*"))
    if reason is not None:
        raise UnsupportedError(
            f"site 'blocks.{layer}.{part}' is not offered on {adapter.model_type}, because its place could not be "
            f"proved: {reason}; leave it out of sites, or mend the row of the adapter"
        )
    problem = ""
    if part.startswith("mlp.") and target.is_mixture(layer):
        problem = f"layer {layer} is a mixture, so it is per expert: use find_sinks for its neurons, or hook_mlp_out"
    elif "fused_qkv" in parts and adapter.fused_qkv is not None and adapter.qkv_layout is None:
        problem = "the layout of q, k and v in one module varies"
    elif not adapter.adds and (part == "hook_mlp_out" or (part == "hook_attn_out" and adapter.mid is None)):
        problem = "layers do more than add their parts"
    else:
        is_sum = part == "hook_mlp_out" and target.has_neurons(layer) and len(target.mlp_writers(layer)) > 1
        lacks_up = part == "mlp.hook_pre_linear" and not target.is_gated(layer)
        if is_sum or lacks_up or (parts and not target.has_part(layer, *parts)):
            problem = "no module gives it alone"
    if problem:
        raise NoSiteError(
            f"site 'blocks.{layer}.{part}' does not exist on {adapter.model_type}: {problem}; leave it out of sites"
        )
    return target.sub(layer, *parts) if parts else target.layers[layer]
