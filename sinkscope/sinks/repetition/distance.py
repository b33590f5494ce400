"""How far the output of attention on a prefix and n repetitions is from its output on the repeated token alone.

One causal pass over prefix and N repetitions holds every n up to N: position k + n - 1 sees the prefix and n copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sinkscope.models.target import Target, plain_weight
from sinkscope.trace.attention import attention_rows

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
ROUNDING = 8.0  # distances below this many rounding errors of the largest output are no distances


@dataclass(frozen=True)
class Single:
    """A layer on sequences of one token each, `u` of them: where attention has only itself to look at.

    Attributes:
        z: values of every query head, `[u head d_head]`.
        out: output of the attention, `[u d_model]`.
    """

    z: Tensor
    out: Tensor


@dataclass(frozen=True)
class SameNumbers:
    """From which n two outputs, rounded to `dtype`, are the same numbers.

    Attributes:
        dtype: "bfloat16" or "float16".
        repeats: smallest n from which all components are equal, up to the last n; None: not within it.
        expected: where they would be, were the distance to fall on as 1 / n (a power of two times the last n); only
            where the theorem speaks and the model runs in float32, and None where `repeats` is known.
    """

    dtype: str
    repeats: int | None
    expected: int | None


@dataclass(frozen=True)
class Seen:
    """One repeated token at one layer; every n from 1 to N.

    Attributes:
        row: of the batch.
        layer: which.
        whole: distance of the attention's outputs, `[n]`.
        heads: distance of what each head writes, `[head n]`.
        norm: of the single token's output.
        head_norms: of what each head writes there, `[head]`.
        same: from which n on both outputs are the same numbers.
    """

    row: int
    layer: int
    whole: Tensor
    heads: Tensor
    norm: float
    head_norms: Tensor
    same: tuple[SameNumbers, ...]


@torch.no_grad()
def singles(target: Target, tokens: list[int], layers: list[int]) -> dict[int, Single]:
    """Each token alone, all of them in one batch."""
    got: dict[int, Single] = {}

    def keep(layer: int, z: Tensor, out: Tensor) -> None:
        got[layer] = Single(z[:, 0], out[:, 0])

    _run(target, torch.tensor(tokens)[:, None], layers, keep)
    return got


@torch.no_grad()
def first_values(target: Target, single: Single) -> Tensor:
    """Norm of `v W_O` for every head and token, `[u head]`: a token alone has nothing but its own value to show."""
    w = head_outputs(target, 0)
    return torch.stack([(single.z[:, h] @ w[h]).norm(dim=-1) for h in range(len(w))], -1)


@torch.no_grad()
def distances(
    target: Target, prefix: list[int], words: list[int], n: int, alone: dict[int, Single]
) -> tuple[list[Seen], Tensor, Tensor]:
    """Prefix and `n` repetitions of each word, a row per word, in one pass up to the deepest layer of `alone`.

    Args:
        target: the model.
        prefix: ids in front of every row.
        words: ids to repeat.
        n: repetitions.
        alone: from `singles` for `words`, in their order.

    Returns:
        What was seen, row by row and layer by layer; and of the first layer's attention, `[row head n]`, the spread of
        the scores and the weight of the prefix.
    """
    k, layers = len(prefix), list(alone)
    ids = torch.tensor([prefix + [w] * n for w in words])
    delta, weight = (torch.zeros(len(words), target.n_heads, n) for _ in range(2))
    found: list[Seen] = []

    def look(_layer: int, first: int, probs: Tensor) -> None:
        last = first + probs.shape[2]
        if last <= k:
            return
        start = max(first, k)
        p = probs[:, :, start - first :]
        seen = torch.arange(p.shape[-1], device=p.device) <= torch.arange(start, last, device=p.device)[:, None]
        lowest = torch.where(seen, p, torch.inf).amin(-1)
        delta[:, :, start - k : last - k] = (p.amax(-1).log() - lowest.log()).cpu()
        weight[:, :, start - k : last - k] = p[..., :k].sum(-1).cpu()

    def keep(layer: int, z: Tensor, out: Tensor) -> None:
        w, one = head_outputs(target, layer), alone[layer]
        for row in range(len(words)):
            moved = z[row, k:] - one.z[row]
            heads = torch.stack([(moved[:, h] @ w[h]).norm(dim=-1) for h in range(len(w))])
            own = torch.stack([(one.z[row, h] @ w[h]).norm() for h in range(len(w))])
            whole = (out[row, k:] - one.out[row]).norm(dim=-1)
            same = tuple(_same(name, out[row, k:], one.out[row]) for name in DTYPES)
            found.append(Seen(row, layer, whole.cpu(), heads.cpu(), float(one.out[row].norm()), own.cpu(), same))

    with attention_rows(target, look, layers=[0]):
        _run(target, ids, layers, keep)
    return sorted(found, key=lambda s: (s.row, s.layer)), delta, weight


def _run(target: Target, ids: Tensor, layers: list[int], keep: Callable[[int, Tensor, Tensor], None]) -> None:
    """One pass; `keep(layer, z [row pos head d_head], output [row pos d_model])` in float32 for each layer."""
    heads = target.n_heads

    def hook(layer: int) -> Any:
        def see(_module: object, args: tuple[Any, ...], _kwargs: object, out: Tensor) -> None:
            z = args[0].reshape(*ids.shape, heads, -1).float()
            keep(layer, z, out.reshape(*ids.shape, -1).float())

        return see

    pairs = [(target.sub(i, target.adapter.o), "post", hook(i)) for i in layers]
    last = (target.layers[max(layers)], "post", lambda *_: target.stop())
    with target.hooks(*pairs, last):
        target.forward(ids)


def head_outputs(target: Target, layer: int) -> Tensor:
    """W_O of every head, `[head d_head d_model]`, float32."""
    with target.loaded(layer):
        o: Any = target.sub(layer, target.adapter.o)
        weight = plain_weight(o)
        if weight is not None:
            flat = weight if target.adapter.transposed_down else weight.T
        else:  # quantised or adapted: ask the module what unit inputs write; not by calling it, since hooks are on it
            eye = torch.eye(int(o.in_features), device=target.device, dtype=target.dtype)
            flat = o.forward(eye) - o.forward(torch.zeros_like(eye[:1]))
        return flat.float().unflatten(0, (target.n_heads, -1))


def rounding(target: Target, size: float) -> float:
    """What two equal outputs of that size may differ by."""
    return ROUNDING * torch.finfo(target.dtype).eps * size


def slope(distance: Tensor, floor: float) -> float | None:
    """Exponent of n in the last decade of a curve over n = 1, 2, ..: log-log least squares; None: nothing to fit."""
    n = torch.arange(1, len(distance) + 1, dtype=torch.float64)
    fit = (n >= len(distance) / 10) & (distance > floor)
    if len(distance) < 10 or not bool(fit[n >= len(distance) / 10].all()):
        return None
    x, y = n[fit].log(), distance[fit].double().log()
    x = x - x.mean()
    return float((x * (y - y.mean())).sum() / x.square().sum())


def _same(name: str, outs: Tensor, one: Tensor) -> SameNumbers:
    at = _same_from(outs, one, DTYPES[name])
    return SameNumbers(name, at, None if at is not None else _same_later(outs[-1], one, DTYPES[name], len(outs)))


def _same_from(outs: Tensor, one: Tensor, dtype: torch.dtype) -> int | None:
    other = (outs.to(dtype) != one.to(dtype)).any(-1).nonzero().flatten()
    first = int(other[-1]) + 2 if len(other) else 1
    return first if first <= len(outs) else None


def _same_later(last: Tensor, one: Tensor, dtype: torch.dtype, n: int) -> int | None:
    """Were the difference at `n` to fall as 1 / n: the power of two times n from which nothing of it is left."""
    for doubling in range(64):
        if bool(((one + (last - one) * math.ldexp(1.0, -doubling)).to(dtype) == one.to(dtype)).all()):
            return n << doubling
    return None
