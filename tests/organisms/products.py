"""What a layer really multiplies in its attention, seen as torch is called, beside the sites of its heads.

The model runs with its own eager attention. A product of `[... query d_head]` and `[... d_head key]`, whose softmax is
taken, has the queries and keys; the product of that softmax has the values, and gives the heads.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .additions import followed

_PRODUCTS = {"matmul", "__matmul__", "bmm", "baddbmm"}


class Products(TorchFunctionMode):
    """Follows the attention of one call of a layer.

    Attributes:
        query, key, value: `[head token width]`; None until they are seen.
        heads: What the rows times the values give.
        rows: `[head query key]`; None where torch does not show them.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.query: Tensor | None = None
        self.key: Tensor | None = None
        self.value: Tensor | None = None
        self.heads: Tensor | None = None
        self.rows: Tensor | None = None
        self.linear: list[tuple[Tensor, Tensor]] = []  # what went into linear maps, and what came out
        self._factors: tuple[Tensor, Tensor] | None = None
        self._has_rows = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        square = (self.tokens, self.tokens)
        if name in ("linear", "addmm"):
            entering = args[0] if name == "linear" else args[1]
            self.linear.append((entering.detach().clone(), result.detach().clone()))
        if name == "scaled_dot_product_attention":  # some models have no eager attention
            self.query, self.key, self.value, self.heads = map(_flat, (*args[:3], result))
        elif name in _PRODUCTS:
            tensors = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, Tensor)]
            left, right = tensors[-2:]
            if self._has_rows and tuple(left.shape[-2:]) == square:
                self._has_rows = False
                assert self._factors is not None
                self.query, self.key = [_flat(part) for part in (self._factors[0], self._factors[1].mT)]
                self.rows, self.value, self.heads = _flat(left), _flat(right), _flat(result)
            elif tuple(result.shape[-2:]) == square and result.ndim > 2:
                self._factors = (left.detach().clone(), right.detach().clone())
        widths = (self.tokens, self.tokens + 1)  # with a learned sink, whose column is dropped
        if name == "softmax" and self._factors is not None and result.shape[-2] == self.tokens:
            if result.shape[-1] not in widths:
                return result
            self._has_rows = True
        return result


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().reshape(-1, *tensor.shape[-2:])


def products_of(model: Any, layers: list[torch.nn.Module], ids: Tensor) -> list[Products]:
    """Of each layer in a pass with eager attention: its products."""
    before = model.config._attn_implementation
    with suppress(Exception):
        model.set_attn_implementation("eager")
    seen = followed(model, layers, ids, lambda _: Products(ids.shape[1]))
    with suppress(Exception):
        model.set_attn_implementation(before)
    return [products for products, _, _ in seen]


def head_verdicts(
    given: dict[str, Tensor | None], products: Products, layer: torch.nn.Module, added: list[Tensor]
) -> dict[str, str]:
    """Of the sites of queries, keys, values and heads that are offered, what is wrong, or "" if nothing is.

    Rotations leave products at one position as they are, so the scores of tokens with themselves are computed from
    queries and keys, after the norms that the layer has for them by name.
    """
    verdicts: dict[str, str] = {}
    offered = {name[-1]: tensor[0] for name, tensor in given.items() if "attn." in name and tensor is not None}
    if products.query is None or products.key is None or products.value is None:
        return {f"attn.hook_{which}": "there is no softmax attention in this layer" for which in offered}
    truth = {"q": products.query, "k": products.key, "v": products.value}
    if "z" in offered:
        verdicts["attn.hook_z"] = _verdict_of_heads(offered["z"], products, layer, added)
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for which in "qkv":
        if which not in offered:
            continue
        real, site = truth[which].transpose(0, 1), offered[which]  # [token head width]
        repeats = real.shape[1] // site.shape[1] if site.ndim == 3 else 0
        if repeats < 1 or real[:, ::repeats].shape != site.shape:
            verdicts[f"attn.hook_{which}"] = f"of shape {tuple(site.shape)}, attention gets {tuple(real.shape)}"
            continue
        real = real[:, ::repeats]
        best = ""
        for one, other in _behind_norms(site, real, which, layer):
            best = _multiple(one, other) if which == "v" else _multiple(_gram(one), _gram(other))
            pairs[which] = one, other
            if not best:
                break
        verdicts[f"attn.hook_{which}"] = best
    if "q" in pairs and "k" in pairs and not verdicts["attn.hook_q"] and not verdicts["attn.hook_k"]:
        scores: list[Tensor] = []
        for q, k in zip(pairs["q"], pairs["k"], strict=True):
            scores.append((q * k.repeat_interleave(q.shape[1] // k.shape[1], 1)).sum(-1))
        verdict = _multiple(*scores)
        for which in "qk":
            verdicts[f"attn.hook_{which}"] = verdict and f"the scores: {verdict}"
    return verdicts


def _verdict_of_heads(site: Tensor, products: Products, layer: torch.nn.Module, added: list[Tensor]) -> str:
    """Heads are rows times values, or these times a gate, or what goes into a linear map that the layer adds."""
    assert products.heads is not None
    tokens = site.shape[0]
    for order in (products.heads.transpose(0, 1), products.heads):
        if order.shape != site.shape:
            continue
        is_gated = bool(((site * order >= 0) & (site.abs() <= order.abs() + 1e-6)).all())
        if is_gated or not _multiple(site, order):
            return ""
    norms = [module for module in layer.modules() if "Norm" in type(module).__name__]
    for entering, leaving in products.linear:
        if entering.numel() != site.numel() or not torch.allclose(entering.reshape(site.shape), site, atol=1e-5):
            continue
        written = [leaving.reshape(tokens, -1)]
        for module in norms:
            if getattr(module, "weight", torch.empty(0)).shape == leaving.shape[-1:]:
                with torch.no_grad():
                    written.append(module(written[0]))
        for part in added:
            if any(part.numel() == one.numel() and not _multiple(one, part.reshape(tokens, -1)) for one in written):
                return ""
    return "neither rows times values, nor what is mapped to what the layer adds"


def _gram(heads: Tensor) -> Tensor:
    return torch.einsum("thd,tgd->thg", heads, heads)


def _behind_norms(site: Tensor, real: Tensor, which: str, layer: torch.nn.Module) -> list[tuple[Tensor, Tensor]]:
    """What a site holds and what attention gets, in each way in which a norm of the layer may stand between them.

    Norms are found by their names. One before the rotation is applied to the site; the gain of one after the rotation
    is taken off what attention gets, and the site is normalised without it.
    """
    pairs = [(site, real)]
    names = ["q_norm", "query_norm", "q_layernorm", "query_layernorm"]
    if which == "k":
        names = ["k_norm", "key_norm", "k_layernorm", "key_layernorm"]
    elif which == "v":
        names = ["v_norm"]
    for path, module in layer.named_modules():
        name = path.rpartition(".")[2]
        if name in names:
            for shape in (site.shape, (site.shape[0], -1)):
                with suppress(Exception), torch.no_grad():
                    pairs.append((module(site.reshape(1, *shape)).reshape(site.shape), real))
        if name in [*names, "qk_norm"] and which != "v":
            size = site.pow(2).mean(-1, keepdim=True).sqrt()
            gain = getattr(module, "weight", None)
            if gain is None:
                pairs.append((site / size, real))
            elif gain.shape == real.shape[-1:]:
                pairs.append((site / size, real / gain))
    return pairs


def _multiple(one: Tensor, other: Tensor) -> str:
    square = float((one * one).sum())
    if square == 0:
        return "" if not bool(other.any()) else "zero"
    constant = float((one * other).sum()) / square
    off = float((other - constant * one).abs().max() / other.abs().max().clamp(min=1e-30))
    return "" if off <= 5e-3 and constant > 0 else f"off by {off:.2g}"
