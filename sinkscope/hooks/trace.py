"""`trace`: run a model once and stream its sites, which have TransformerLens' names; nothing else is kept."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.engine.run import held
from sinkscope.engine.tap import attention_rows
from sinkscope.errors import SinkscopeError, UnsupportedError, warn
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.records import Natural
from sinkscope.models.hooks import Hook, first_tensor, forward_parameters
from sinkscope.models.inputs import Inputs, read_inputs
from sinkscope.models.layers import head_projection
from sinkscope.models.neurons import HookPoint, mlp_writers
from sinkscope.models.target import Target
from sinkscope.opening.load import target_of

MOST_ROWS = 8
"""Rows whose padding a warning says, at most."""


class NoSiteError(UnsupportedError):
    """A layer has no such site; others may have it."""


@dataclass(frozen=True)
class Site:
    """A hook point with a name: `cut` maps what passes it to `[batch pos ...]`.

    The embedding is of layer 0, and after the last layer, `layer` is the number of layers. Where a layer adds what the
    module gives, it multiplies it by `factor`.
    """

    name: str
    layer: int
    point: HookPoint | None  # None: attention rows, which pass no module
    cut: Callable[[Any], Tensor] = first_tensor
    factor: float = 1.0

    def shown(self, value: Any, shape: torch.Size) -> Tensor:
        """Return what the site shows of its module's input or output, in a pass over ids of this shape."""
        tensor = self.cut(value) * self.factor
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
    """Where a layer has a site: at the input or output of the first of these parts that it has."""

    parts: tuple[str, ...]  # none: the layer itself
    when: str = "post"
    cut: Callable[[Target, Tensor], Tensor] | None = None
    is_scaled: bool = False  # a layer multiplies what it adds by the adapter's factor


_PLACES = {
    "hook_resid_pre": _Place((), "pre"),
    "hook_attn_out": _Place(("attn_out", "attn"), is_scaled=True),
    "hook_resid_mid": _Place(("mid",), "pre"),
    "hook_mlp_out": _Place(("post_mlp_norm", "mlp"), is_scaled=True),
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


def resolve(target: Target, patterns: str | Sequence[str]) -> list[Site]:
    """Return sites that are meant by one or several patterns, in the order of the forward pass.

    A pattern takes the sites that there are: in hybrid models, not all layers have attention.

    Raises:
        SinkscopeError: A pattern matches nothing; the message shows names that exist.
        UnsupportedError: This architecture has no such site, or the layer that is named has none.
    """
    names = site_names(target.n_layers)
    chosen: dict[str, Site] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matches = fnmatch.filter(names, pattern)
        if not matches:
            raise SinkscopeError(
                f"site {pattern!r} matches nothing in a model of {target.n_layers} layers; the first has "
                f"{', '.join(site_names(1))}"
            )
        absent: list[NoSiteError] = []
        for name in matches:
            try:
                chosen[name] = _site(target, name)
            except NoSiteError as error:
                absent.append(error)
        if len(absent) == len(matches):
            raise absent[-1]
    return [chosen[name] for name in names if name in chosen]


def _site(target: Target, name: str) -> Site:
    if name == "hook_embed":
        return Site(name, 0, HookPoint(target.embedding))
    if name == "ln_final":
        return Site(name, target.n_layers, HookPoint(target.base), cut=lambda output: output[0])
    if name == "logits":
        return Site(name, target.n_layers, HookPoint(target.hf), cut=lambda output: output.logits)
    _, number, part = name.split(".", 2)
    layer, place, adapter = int(number), _PLACES[part], target.adapter
    reason = target.unproved.get(name, target.unproved.get("*"))
    if reason is not None and part != "attn.hook_pattern":
        raise UnsupportedError(
            f"site {name!r} is not offered on {adapter.model_type}, because its place could not be proved: {reason}; "
            "leave it out of sites"
        )
    problem = _problem(target, layer, part)
    if problem:
        raise NoSiteError(f"site {name!r} does not exist on {adapter.model_type}: {problem}; leave it out of sites")
    if part == "attn.hook_pattern":
        return Site(name, layer, None)
    module = target.sub(layer, *place.parts) if place.parts else target.layers[layer]
    cut = first_tensor if place.cut is None else partial(place.cut, target)
    factor = adapter.write_factor if place.is_scaled else 1.0
    return Site(name, layer, HookPoint(module, place.when), cut, factor)


def _problem(target: Target, layer: int, part: str) -> str:
    """Why a layer has no such site; "" if it has."""
    adapter, parts = target.adapter, _PLACES[part].parts
    if part.startswith("attn.") and layer not in target.attending:
        layers = ", ".join(map(str, target.attending))
        return f"layer {layer} of {target.name} has no softmax attention; it is in layers {layers}"
    if part.startswith("mlp.") and layer in target.mixtures:
        return f"layer {layer} is a mixture, so it is per expert: use find_sinks for its neurons, or hook_mlp_out"
    if not adapter.adds and (part == "hook_mlp_out" or (part == "hook_attn_out" and "mid" not in target.paths[layer])):
        return "layers do more than add their parts"
    is_sum = part == "hook_mlp_out" and layer in target.with_neurons and len(mlp_writers(target, layer)) > 1
    lacks_up = part == "mlp.hook_pre_linear" and not target.is_gated(layer)
    is_absent = bool(parts) and target.paths[layer].keys().isdisjoint(parts)
    return "no module gives it alone" if is_sum or lacks_up or is_absent else ""


Reducer = Callable[[Tensor], Tensor]
"""Takes a site's tensor `[batch pos ...]` (rows of attention: `[batch head query key]`), keeps the batch dimension."""


@checks_arguments
def trace(
    model: object,
    tokens: Any,
    sites: str | Sequence[str] = (),
    reduce: Reducer | None = None,
    *,
    attention_mask: Any = None,
    batch_size: Natural | None = None,
    tokenizer: Any = None,
) -> dict[str, Tensor]:
    """Run the model once and return each site's reduced tensor, on the CPU.

    Args:
        model: Plain Hugging Face, TransformerBridge, nnsight, or a Target.
        tokens: Ids `[batch pos]`, also as a list or lists; one or several texts; or a tokenizer's output. Rows of
            different lengths are padded on the right, and a warning says which positions are padding.
        sites: TransformerLens names, or patterns such as `"blocks.*.hook_resid_post"`.
            `site_names(n_layers)` lists all: `hook_embed`; in each layer
            `blocks.L.` with `hook_resid_pre`, `hook_attn_out`, `hook_resid_mid`, `hook_mlp_out`, `hook_resid_post`,
            `mlp.hook_pre`, `mlp.hook_pre_linear`, `mlp.hook_post`, `attn.hook_q`, `attn.hook_k`, `attn.hook_v`,
            `attn.hook_z` and `attn.hook_pattern`; `ln_final`, the input of the unembedding, and `logits`, its output.
            `attn.hook_pattern` is recomputed while fast attention runs.
        reduce: A function of one tensor, padding included, such as `lambda tensor: tensor.norm(dim=-1)`. It runs inside
            the hook, layer by layer, so only its result is kept. None keeps the whole tensor.
        attention_mask: 1 for real tokens, 0 for padding, `[batch pos]`.
        batch_size: Rows per forward pass. None runs all at once.
        tokenizer: Tokenizer for texts, if the model carries none.

    Returns:
        The tensor of each site by its name, in the order of the forward pass; the first dimension is the batch.

    The pass ends after the deepest site. The model is left unchanged.

    Raises:
        SinkscopeError: Tokens are invalid for this model, or a site is unknown.
        UnsupportedError: This architecture has no such site.
    """
    target = target_of(model, tokenizer)
    if not sites:
        raise SinkscopeError('no site is given: expected names such as sites=["blocks.*.hook_resid_post"]')
    rows = read_inputs(target, tokens, attention_mask)
    if rows.was_padded:
        _say_padding(rows)
    wanted = resolve(target, sites)
    size = batch_size or len(rows.ids)
    passes: list[dict[str, Tensor]] = []
    with held(target):
        for start in range(0, len(rows.ids), size):
            mask = None if rows.mask is None else rows.mask[start : start + size].to(target.device)
            passes.append(_pass(target, rows.ids[start : start + size], mask, wanted, reduce))
    for site in wanted:
        if site.name not in passes[0]:
            raise UnsupportedError(
                f"site {site.name!r} was never reached on this {target.kind} model, because its module did not run (a "
                "bridge replaces those that fuse several projections); leave it out of sites"
            )
    return {site.name: torch.cat([passed[site.name] for passed in passes]) for site in wanted}


def _say_padding(rows: Inputs) -> None:
    """Say which positions of rows of different lengths hold no tokens of theirs."""
    longest = rows.ids.shape[1]
    padded: list[str] = []
    for number, row in enumerate(rows.rows):
        if len(row) < longest:
            padded.append(f"row {number} from position {len(row)} on")
    shown = ", ".join(padded[:MOST_ROWS])
    if len(padded) > MOST_ROWS:
        shown += f" and {len(padded) - MOST_ROWS} others"
    warn(f"rows have different lengths, and the shorter ones are padded on the right: {shown}; leave these values out")


def _pass(
    target: Target, ids: Int[Tensor, "batch pos"], mask: Tensor | None, sites: list[Site], reduce: Reducer | None
) -> dict[str, Tensor]:
    """Run the model to the deepest site, and return what passes each, reduced."""
    passed: dict[str, Tensor] = {}

    def keep(name: str, tensor: Tensor) -> None:
        if name not in passed:  # a copy: Falcon adds into its MLP's output after the hook has seen it
            reduced = tensor if reduce is None else reduce(tensor)
            passed[name] = reduced.detach().to("cpu", copy=True)

    hooks: list[Hook] = []
    of_rows: dict[int, str] = {}
    deepest = 0
    for site in sites:
        deepest = site.layer
        if site.point is None:
            of_rows[deepest] = site.name
            continue

        def read(value: Any, site: Site = site) -> None:
            keep(site.name, site.shown(value, ids.shape))

        hooks.append(site.point.hook(read))
    rows = nullcontext()
    if of_rows:
        rows = attention_rows(target, lambda rows: keep(of_rows[rows.layer], rows.probs), layers=list(of_rows))
    positions: dict[str, Any] = {}
    if mask is not None and "position_ids" in forward_parameters(type(target.base)):
        positions["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0)  # else padding on the left is counted
    last_layer = deepest if deepest < target.n_layers else None
    unembed = any(module is target.hf for module, _, _ in hooks)
    with rows, target.hooks(*hooks):
        target.forward(ids, mask, unembed=unembed, last_layer=last_layer, **positions)
    return passed
