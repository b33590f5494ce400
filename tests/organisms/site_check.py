"""Compare the sites that sinkscope serves of a model with what its layers really add and multiply.

1. A function mode of torch follows plain passes with the model's own eager attention: what enters each layer, each
   addition to it, what leaves it, and the queries, keys and values that attention multiplies.
2. A site of the residual stream must be one of these values, and a part of a layer one of those that are added.
3. `Add` at a site of the last layer must change the residual stream by the vector, where it shows first.
4. If one head of a site of queries, keys or values changes, exactly the heads that read it must change in what is
   multiplied. Each head of `hook_z`, which may be gated or normalized, must be most like that head of attention.

No module's path is used.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from ways.model_copies import Original

import sinkscope as ss
from sinkscope.errors import SinkscopeError
from sinkscope.hooks.trace import resolve
from sinkscope.models.hooks import first_tensor
from sinkscope.models.target import Target
from sinkscope.opening.load import target_of

IDS = torch.arange(20, 32)[None]
RESIDUAL = ("hook_resid_pre", "hook_attn_out", "hook_resid_mid", "hook_mlp_out", "hook_resid_post")
HEADS = ("attn.hook_q", "attn.hook_k", "attn.hook_v", "attn.hook_z")
_ADDITIONS = {"add", "add_", "__add__", "__radd__", "__iadd__"}
_PRODUCTS = {"matmul", "__matmul__", "bmm", "baddbmm"}
_TOKEN = 5  # the one that is edited


# -- what a layer does -------------------------------------------------------------------------------------------------


class Seen(TorchFunctionMode):
    """What one call of a layer adds to the residual stream, and what its attention multiplies.

    A product of `[... query d_head]` and `[... d_head key]` has the queries and keys; the next product that begins with
    `[... query key]` has the values, and gives the heads.

    Attributes:
        stream: What enters, and each sum, with what was added to the stream until then.
        output: What the layer returns.
        parts: Of the attention, if there is one: queries "q", keys "k", values "v" and heads "z" `[head token width]`,
            and "rows" `[head query key]`.
    """

    def __init__(self, entered: Tensor) -> None:
        super().__init__()
        self.stream: list[tuple[Tensor, list[Tensor]]] = [(entered.clone(), [])]
        self.output: Any = None
        self.parts: dict[str, Tensor] = {}
        self._factors: dict[str, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        added = self._added(tensors) if name in _ADDITIONS and len(tensors) == 2 else []
        result = func(*args, **kwargs)
        if added:
            self.stream.append((result.clone().reshape(added[0].shape), added))
        if name == "scaled_dot_product_attention":  # some models have no eager attention
            self.parts = dict(zip("qkvz", map(_flat, (*tensors[:3], result)), strict=True))
        elif name in _PRODUCTS and result.ndim > 2:
            left, right = map(_flat, tensors[-2:])
            square = self.stream[0][0].shape[1:2] * 2
            if result.shape[-2:] == square:
                self._factors = {"q": left, "k": right.mT}
            elif left.shape[-2:] == square:
                self.parts = {**self._factors, "v": right, "z": _flat(result), "rows": left}
        return result

    def _added(self, tensors: list[Tensor]) -> list[Tensor]:
        """What was added until one of two tensors of the residual stream, and the other one; empty if neither is."""
        for one, other in (tensors, tensors[::-1]):
            for value, added in self.stream:
                if one.numel() == other.numel() == value.numel() and torch.equal(one.flatten(), value.flatten()):
                    return [*added, other.clone().reshape(value.shape)]
        return []

    @property
    def values(self) -> list[Tensor]:
        """The residual stream in the order of the layer: what enters, each sum, and what leaves."""
        return [*(value for value, _ in self.stream), first_tensor(self.output)]

    def until(self, value: Tensor) -> list[Tensor]:
        """What was added one after the other until the residual stream had a value."""
        for one, added in self.stream[1:]:
            if is_close(value, one):
                return added
        return [value - self.stream[0][0]]


def _flat(tensor: Tensor) -> Tensor:
    return tensor.clone().reshape(-1, *tensor.shape[-2:])


def is_close(one: Tensor, other: Tensor) -> bool:
    """Whether tensors are equal up to rounding, relative to the largest number."""
    return one.shape == other.shape and bool((one - other).abs().max() <= 1e-5 * other.abs().max())


def eager(model: Any) -> Any:
    """A copy of a model with its own eager attention, if it has one."""
    model = Original(model).copy()
    with suppress(Exception):
        model.set_attn_implementation("eager")
    return model


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """The decoder layers: the list of modules of the configured depth, with most parameters, that runs over text."""
    ran = set[torch.nn.Module]()
    handle = register_module_forward_hook(lambda module, *_: ran.add(module))
    model(input_ids=IDS, use_cache=False)
    handle.remove()
    depth = model.config.get_text_config().num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == depth and m[0] in ran]
    return list(max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters())))


@torch.no_grad()
def seen_of(model: Any, layers: list[torch.nn.Module], ids: Tensor = IDS) -> list[Seen]:
    """What each layer does in a plain pass."""
    seen = list[Seen]()
    handles = []

    def enter(_module: Any, args: Any, kwargs: Any) -> None:
        seen.append(Seen(args[0] if args else kwargs["hidden_states"]))
        seen[-1].__enter__()

    def leave(_module: Any, _args: Any, output: Any) -> None:
        seen[-1].__exit__(None, None, None)
        seen[-1].output = output

    for layer in layers:
        handles += [layer.register_forward_pre_hook(enter, with_kwargs=True), layer.register_forward_hook(leave)]
    model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


# -- sites -------------------------------------------------------------------------------------------------------------


@dataclass
class SiteReport:
    """Of one model: sites that are right, wrong, and not offered, with the reason."""

    right: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)


@torch.no_grad()
def check_sites(model: Any) -> SiteReport:
    """Compare every site of every layer that holds a part of the residual stream, or queries, keys, values or heads.

    Vectors are added at the sites of the last layer.
    """
    model = eager(model)
    report, target, layers = SiteReport(), target_of(model), decoder_layers(model)
    for number, seen in enumerate(seen_of(model, layers)):
        given = dict[str, Tensor]()
        for part in (*RESIDUAL, *HEADS):
            site = f"blocks.{number}.{part}"
            try:
                given[part] = ss.trace(target, IDS, site)[site]
            except SinkscopeError as error:
                report.refused[site] = str(error)
        wrong = _wrong_sums(seen, given)
        for part, value in given.items():
            site, layer = f"blocks.{number}.{part}", layers[number]
            is_right = part not in wrong
            if part in HEADS:
                is_right = bool(seen.parts) and _is_of_heads(target, site, value, layer, seen.parts)
            # What is added between the parts does not stay in the stream.
            elif is_right and layer is layers[-1] and part != "hook_resid_mid":
                is_right = _adds(target, site, layer, seen)
            (report.right if is_right else report.wrong).append(site)
    return report


def _wrong_sums(seen: Seen, given: dict[str, Tensor]) -> list[str]:
    """The sites of the residual stream that do not hold what the layer has there."""
    pre, attn, mid, mlp, post = RESIDUAL
    entered, *sums, left = seen.values
    places = {pre: [entered], mid: [value for value in sums if not is_close(value, left)], post: [left]}
    wrong = [part for part, values in places.items() if part in given and not _is_among(given[part], values)]
    added = seen.until(left)
    expected = [(added, [attn, mlp])]
    if mid in given:
        before = seen.until(given[mid])
        expected = [(before, [attn]), (added[len(before) :], [mlp])]
    for summands, names in expected:  # parts are together what is added, or each is a summand, if a layer adds more
        parts = [given[name] for name in names if name in given]
        together = [torch.stack([torch.zeros_like(left), *tensors]).sum(0) for tensors in (parts, summands)]
        if not is_close(*together) and not all(_is_among(part, summands) for part in parts):
            wrong += names
    return wrong


def _is_among(value: Tensor, values: list[Tensor]) -> bool:
    return any(is_close(value, one) for one in values)


def _adds(target: Target, site: str, layer: torch.nn.Module, intact: Seen) -> bool:
    """Whether `Add` at a site of a layer adds just the vector to the residual stream."""
    vector = torch.randn(target.d_model, generator=torch.Generator().manual_seed(2))
    with ss.Add(vector, site).on(target):
        (edited,) = seen_of(target.hf, [layer])
    for new, old in zip(edited.values, intact.values, strict=True):
        if (new - old).abs().max() > 1e-3:  # where it shows first
            return is_close(new - old, vector.expand_as(old))
    return False


def _is_of_heads(target: Target, name: str, given: Tensor, layer: torch.nn.Module, intact: dict[str, Tensor]) -> bool:
    """Whether a site holds the queries "q", keys "k", values "v" or heads "z" of a layer.

    Args:
        target: The model.
        name: The site.
        given: What it holds `[1 token head width]`.
        layer: The layer.
        intact: The parts of its attention.
    """
    (site,), own, count = resolve(target, name), intact[name[-1]], given.shape[2]
    if name.endswith("z"):
        one, other = [normalize(part.flatten(1)) for part in (given[0].transpose(0, 1), own)]
        likeness = one @ other.T
        return bool((likeness.diagonal() > likeness.amax(1) - 1e-5).all())  # heads of a group may be equal
    for head in (0, count - 1):

        def turn(value: Tensor, head: int = head) -> Tensor:
            new = value.clone()
            part = site.cut(new).view(-1, *given.shape[2:])[_TOKEN, head]
            part.copy_(part.roll(1))
            return new

        with target.hooks(site.point.hook(turn)):
            (seen,) = seen_of(target.hf, [layer])
        changed = (seen.parts[name[-1]] - own).abs().amax((1, 2)) > 1e-5 * own.abs().max()
        if not torch.equal(changed, torch.arange(len(own)) * count // len(own) == head):
            return False
    return True
