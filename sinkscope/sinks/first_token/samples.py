"""First and later tokens, for training and for holding out, and a layer behind its attention at each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.console import Progress, silent
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.models.experts import bind, gate_up
from sinkscope.models.target import Target
from sinkscope.trace.run import trace

PER_TOKEN = 4  # later positions of one token at most, so that frequent words do not make up the class
CLEAR = 8  # without BOS the first few tokens may still be marked as the first is: later positions begin here
_LEAST = 2  # samples of a class on either side


@dataclass(frozen=True)
class Samples:
    """What is told apart.

    Attributes:
        firsts: tokens to put first.
        first_held: which of them are held out.
        ids: the texts.
        later: places in them, (row, position).
        later_held: which of these are held out.
        bos: BOS, if texts begin with it.
    """

    firsts: Int[Tensor, " first"]
    first_held: Bool[Tensor, " first"]
    ids: Int[Tensor, "row pos"]
    later: Int[Tensor, "later 2"]
    later_held: Bool[Tensor, " later"]
    bos: int | None

    @property
    def later_tokens(self) -> Int[Tensor, " later"]:
        """The tokens at the later places."""
        return self.ids[self.later[:, 0], self.later[:, 1]]


def draw_samples(ids: Int[Tensor, "row pos"], words: list[int], bos: int | None, seed: int) -> Samples:
    """Half of the tokens and half of the texts are held out; later positions are taken where both halves agree.

    Args:
        ids: typical text.
        words: tokens to put first, without BOS.
        bos: BOS, if texts begin with it.
        seed: of the draw.

    Raises:
        SinkscopeError: too few words or too short a text for both classes on both sides.
    """
    generator = torch.Generator().manual_seed(seed)
    firsts = torch.tensor(words)[torch.randperm(len(words), generator=generator)]
    held_token = torch.randint(2, (int(max(ids.max(), firsts.max())) + 1,), generator=generator).bool()
    held_token[firsts] = torch.arange(len(firsts)) % 2 == 1
    held_text = torch.randperm(len(ids), generator=generator) % 2 == 1

    start = CLEAR if bos is None else 1
    later, held, seen = [], [], dict[int, int]()
    for place in (torch.randperm(len(ids) * (ids.shape[1] - start), generator=generator)).tolist():
        row, pos = divmod(place, ids.shape[1] - start)
        token = int(ids[row, pos + start])
        if token == bos or bool(held_token[token] != held_text[row]) or seen.get(token, 0) == PER_TOKEN:
            continue
        seen[token] = seen.get(token, 0) + 1
        later.append((row, pos + start))
        held.append(bool(held_token[token]))
    made = Samples(firsts, held_token[firsts], ids, torch.tensor(later).view(-1, 2), torch.tensor(held).bool(), bos)
    for name, sides in (("first", made.first_held), ("later", made.later_held)):
        if min(int(sides.sum()), int((~sides).sum())) < _LEAST:
            raise SinkscopeError(
                f"{len(sides)} {name} tokens are too few to train on some and hold out others; give more words, or a "
                "longer --text"
            )
    return made


@dataclass(frozen=True)
class Factor:
    """Pre-activations by one input projection: "gate", "up", or "" where there is only one; of one expert."""

    name: str
    expert: int | None
    values: Float[Tensor, "n neuron"]


@dataclass(frozen=True)
class After:
    """A layer at `n` places.

    Attributes:
        resid: residual stream after the attention (`hook_resid_mid`; with parallel residual, where the MLP does not
            read it, `hook_resid_pre` + `hook_attn_out`).
        factors: of all neurons of the layer's MLP.
    """

    resid: Float[Tensor, "n d_model"]
    factors: tuple[Factor, ...]

    @classmethod
    def join(cls, *parts: After) -> After:
        """One after another."""
        columns = zip(*(p.factors for p in parts), strict=True)
        factors = tuple(Factor(c[0].name, c[0].expert, torch.cat([f.values for f in c])) for c in columns)
        return cls(torch.cat([p.resid for p in parts]), factors)


@torch.no_grad()
def after_attention(
    target: Target,
    layer: int,
    ids: Int[Tensor, "row pos"],
    places: Int[Tensor, "n 2"],
    batch_size: int,
    progress: Progress = silent,
) -> After:
    """The layer at `places`, (row, position) of `ids`, in their order."""
    a, mixture = target.adapter, target.is_mixture(layer)
    gated = a.gate is not None or a.fused_gate_up
    names = [] if mixture else [("gate", "hook_pre"), ("up", "hook_pre_linear")] if gated else [("", "hook_pre")]
    resid = [f"blocks.{layer}.hook_resid_mid"]
    try:
        trace(target, ids[:1, :1], resid)
    except UnsupportedError:
        resid = [f"blocks.{layer}.hook_resid_pre", f"blocks.{layer}.hook_attn_out"]
    found: dict[str, list[Tensor]] = {}
    order: list[Tensor] = []
    for start in range(0, len(ids), batch_size):
        rows = ids[start : start + batch_size]
        here = ((places[:, 0] >= start) & (places[:, 0] < start + len(rows))).nonzero().flatten()
        row, pos = places[here, 0] - start, places[here, 1]
        order.append(here)
        experts: list[Tensor] = []

        def keep(
            _module: object, args: tuple[Any, ...], kwargs: dict[str, Any], experts: list[Tensor] = experts
        ) -> None:
            experts.append(bind(args, kwargs)[0].detach())

        pairs = [(target.sub(layer, a.experts or ""), "pre", keep)] if mixture else []
        sites = [f"blocks.{layer}.mlp.{name}" for _, name in names]
        with target.hooks(*pairs):
            got = trace(target, rows, [*resid, *sites])
        parts = {"resid": sum(got[site].float() for site in resid)}
        parts |= {name: got[site].float() for (name, _), site in zip(names, sites, strict=True)}
        if mixture:
            parts["hidden"] = experts[0].reshape(*rows.shape, -1).cpu()
        for name, tensor in parts.items():
            found.setdefault(name, []).append(torch.as_tensor(tensor)[row, pos])
        progress("sequences", start + len(rows), len(ids))
    back = torch.cat(order).argsort()
    whole = {name: torch.cat(tensors)[back] for name, tensors in found.items()}
    factors = tuple(Factor(name, None, whole[name]) for name, _ in names)
    return After(whole["resid"], _experts(target, layer, whole["hidden"]) if mixture else factors)


def _experts(target: Target, layer: int, hidden: Float[Tensor, "n d_model"]) -> tuple[Factor, ...]:
    """Both factors of every expert, whether or not the router would have asked it, and of a shared one."""
    factors = []
    with target.loaded(layer):
        module: Any = target.sub(layer, target.adapter.experts or "")
        for expert in range(int(module.num_experts)):
            both = gate_up(module, expert, hidden.to(target.device))
            factors += [Factor(n, expert, v.float().cpu()) for n, v in zip(("gate", "up"), both, strict=True)]
        for name in ("gate", "up") if target.has_shared(layer) else ():
            factors.append(Factor(name, None, target.mlp_part(layer, name)(hidden.to(target.device)).float().cpu()))
    return tuple(factors)
