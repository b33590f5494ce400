"""Prove the sites of a model by sums, in one pass over a few tokens, by plain hooks.

What enters a layer, what its attention gives and what its MLP gives are replaced by random numbers of one size, each of
its own. Then the residual stream can only be what the adapter says if the layer really adds these parts to each other:
nothing is alike by chance, and nothing is too small to be seen. The batch has two rows, which differ in what the MLP
gives. At the last token, what enters a layer is a thousand times as large; it shows where only the MLP's part is known
whether the stream itself passes the layer as it is.

Queries and keys are rotated on their way to the scores, but products of heads at one position are the same before and
behind any rotation. By them, queries and keys are compared with those that attention gets.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from sinkscope.models.grouped_heads import head_projection
from sinkscope.models.hooks import Args, Hook, Kwargs, first_tensor, on_hidden, on_input, on_output
from sinkscope.models.target import Target
from sinkscope.opening.inference.passing import Passing
from sinkscope.tap.call import Attention
from sinkscope.tap.tap import listening

Rows = Float[Tensor, "row pos width"]
_ROWS = 2
_TOKENS = 4
_LARGE = 1000.0
_PASSES = 0.05  # largest relative distance of the stream from what entered, where that is large
_EXACT = 1e-3  # largest relative distance of a sum from what it must be, in float32
_IN_HALF = 4  # times the relative rounding of a number, in half precision


def unproved_sites(target: Target, ids: Int[Tensor, "1 pos"], layers: list[int]) -> dict[str, str]:
    """The sites of some layers that the adapter names, but that cannot be proved, by name, and why.

    Args:
        target: The model, with an adapter. It is left unchanged.
        ids: A few tokens.
        layers: The layers.
    """
    tolerance = max(_EXACT, _IN_HALF * torch.finfo(target.dtype).eps)
    checks = {layer: _LayerSums(target, layer, tolerance) for layer in layers}
    hooks = list[Hook]()
    for check in checks.values():
        hooks += check.hooks()
    rows = ids[:, :_TOKENS].expand(_ROWS, -1)
    with torch.no_grad():
        if target.kind == "bridge":  # its attention is its own
            with target.hooks(*hooks):
                target.forward(rows, upto=max(layers))
        else:

            def see(call: Attention) -> None:
                if call.layer in checks and not call.is_repeated:
                    checks[call.layer].see(call.query, call.key, call.value)

            with listening(target, see), target.hooks(*hooks):
                target.forward(rows, upto=max(layers))
    problems = dict[str, str]()
    for layer, check in checks.items():
        for part, problem in check.problems.items():
            problems[f"blocks.{layer}.{part}"] = problem
    return problems


class _LayerSums:
    """What passes the modules of one layer, and what of it cannot be proved.

    Attributes:
        problems: Why sites cannot be proved, by the last part of their names.
    """

    def __init__(self, target: Target, layer: int, tolerance: float) -> None:
        self.target, self.layer, self.tolerance = target, layer, tolerance
        self.problems = dict[str, str]()
        self.pre, self.attn, self.mid, self.mlp = (Passing(_ROWS) for _ in range(4))
        self.own_attn, self.projected = (Passing(_ROWS) for _ in range(2))  # what attention itself gives
        self._generator = torch.Generator().manual_seed(layer)
        self._heads = _Heads(target, layer, tolerance)

    def hooks(self) -> list[Hook]:
        """Hooks that replace, record, and compare at the end of the layer."""
        target, layer, adapter = self.target, self.layer, self.target.adapter
        hooks: list[Hook] = [(target.layers[layer], "pre", on_input(partial(self._replace, self.pre, same=True)))]
        if target.kind != "bridge":
            hooks += self._heads.hooks()
        if target.has_part(layer, adapter.o) and adapter.o:
            hooks.append((target.sub(layer, adapter.o), "post", on_output(self.projected.keep)))
        if target.has_part(layer, adapter.behind_attn):
            writer = target.sub(layer, adapter.behind_attn)
            hooks += [
                (writer, "post", on_output(self.own_attn.keep)),
                (writer, "post", on_hidden(partial(self._replace, self.attn, same=True))),
            ]
        if target.has_neurons(layer) and len(target.mlp_writers(layer)) == 1:
            writer = target.sub(layer, adapter.behind_mlp)
            hooks.append((writer, "post", on_hidden(partial(self._replace, self.mlp, same=False))))
        if adapter.mid is not None and target.has_part(layer, adapter.mid):
            hooks.append((target.sub(layer, adapter.mid), "pre", on_input(self.mid.keep)))
        hooks.append((target.layers[layer], "post", on_output(self._finish)))
        return hooks

    def see(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Called with what attention gets."""
        self._heads.see(query, key, value)

    def _replace(self, passing: Passing, tensor: Tensor, same: bool) -> Tensor:
        """Put random numbers in the place of what passes; the same ones in both rows, or not."""
        rows = passing.by_row(tensor).clone()
        count = 1 if same else _ROWS
        noise = torch.randn(count, *rows.shape[1:], generator=self._generator)
        if passing is self.pre:
            noise[:, -1] *= _LARGE
        rows[:] = noise.to(rows)
        passing.keep(rows)
        return rows.reshape(tensor.shape)

    def _finish(self, output: Any) -> None:
        """Compare at the end of the layer."""
        post = Passing(_ROWS)
        post.keep(output)
        adapter, pre = self.target.adapter, self.pre.rows
        start, names = pre, ["hook_resid_pre"]
        attn = self.attn.rows * adapter.attn_factor
        if self.mid.ran:
            if self.attn.ran:
                off = self._off(self.mid.rows, pre, attn)
                self._must(
                    off, "hook_resid_mid is not hook_resid_pre + hook_attn_out", "hook_resid_mid", "hook_attn_out"
                )
            else:
                self.problems["hook_resid_mid"] = "nothing that is added before it is known"
            start, names = self.mid.rows, ["hook_resid_mid"]
        elif self.attn.ran:
            start, names = pre + attn, ["hook_resid_pre", "hook_attn_out"]
        parts = [start]
        if self.mlp.ran:
            parts.append(self.mlp.rows * adapter.write_factor)
            names.append("hook_mlp_out")
        elif self.target.has_neurons(self.layer):  # a shared expert stands beside the mixture, and no module gives both
            parts = []
        if parts and adapter.adds:
            self._prove_post(post.rows, parts, names)
        self._heads.finish()
        self.problems |= self._heads.problems
        self._prove_heads()

    def _prove_post(self, post: Rows, parts: list[Tensor], names: list[str]) -> None:
        off = self._off(post, *parts)
        if off <= self.tolerance:
            return
        claim = f"hook_resid_post is not {' + '.join(names)}"
        if "hook_attn_out" in names:
            self._must(off, claim, "hook_attn_out")
        if "hook_mlp_out" in names:  # where other parts are added too, what it gives may still be added as it is
            written = parts[-1]
            passed = self.pre.rows[:, -1:]
            beside = (post - written)[:, -1:] - passed
            if bool(beside.abs().max() <= _PASSES * passed.abs().max()):
                off = self._off(post[:1] - post[1:], written[:1] - written[1:])
            self._must(off, claim, "hook_mlp_out")

    def _prove_heads(self) -> None:
        """What the output projection gives is what attention adds, or what a norm behind it reads."""
        if not self.projected.ran or not self.own_attn.ran:
            return
        given, projected = self.own_attn.rows, self.projected.rows
        off = 1.0
        if given.shape == projected.shape:
            off = self._off(given, projected)
        if off > self.tolerance:
            writer: Any = self.target.sub(self.layer, self.target.adapter.behind_attn)
            with self.target.loaded(self.layer), suppress(Exception):  # it may be no norm
                given_of = first_tensor(writer.forward(projected.to(self.target.dtype))).float()
                if given_of.shape == given.shape:
                    off = self._off(given, given_of)
        self._must(off, "hook_attn_out cannot be computed from it", "attn.hook_z")

    def _must(self, off: float, claim: str, *parts: str) -> None:
        if off <= self.tolerance:  # NaN is wrong as well
            return
        for part in parts:
            self.problems.setdefault(part, f"{claim} (off by {off:.2g})")

    def _off(self, total: Tensor, *parts: Tensor) -> float:
        """Largest distance from a sum, relative to the largest number in it, of any row, without the last token."""
        if any(part.shape != total.shape for part in parts):
            return float("inf")
        worst = 0.0
        for row in range(len(total)):
            error = total[row, :-1]
            size = error.abs().max()
            for part in parts:
                size = torch.maximum(size, part[row, :-1].abs().max())
                error = error - part[row, :-1]
            if not size > 0:
                continue
            worst = max(worst, float((error.abs().max() / size).nan_to_num(torch.inf)))
        return worst


class _Heads:
    """Queries, keys and values of a layer at their sites, and where attention gets them.

    Attributes:
        problems: Why sites cannot be proved.
    """

    def __init__(self, target: Target, layer: int, tolerance: float) -> None:
        self.target, self.layer, self.tolerance = target, layer, tolerance
        self.problems = dict[str, str]()
        self._at_site = dict[str, Float[Tensor, "row pos head d_head"]]()
        self._norms: list[tuple[Tensor, Tensor]] = []

    def hooks(self) -> list[Hook]:
        """Hooks that record what the sites hold, and what norms make of it."""
        target, layer = self.target, self.layer
        hooks = list[Hook]()
        projections = [target.adapter.fused_qkv, target.adapter.q, target.adapter.k, target.adapter.v]
        if not any(target.has_part(layer, path) for path in projections if path):
            return hooks
        for which in "qkv":
            path = getattr(target.adapter, which)
            if target.adapter.qkv_layout is not None:
                path = path or target.adapter.fused_qkv
            if path and target.has_part(layer, path):
                hooks.append((target.sub(layer, path), "post", partial(self._keep_site, which)))
        for module in target.layers[layer].modules():
            if not any(True for _ in module.children()):
                hooks.append((module, "post", self._keep_norm))
        return hooks

    def _keep_site(self, which: str, _module: nn.Module, _args: Args, _kwargs: Kwargs, output: Any) -> None:
        tensor = first_tensor(output).detach().reshape(_ROWS, -1, first_tensor(output).shape[-1])
        try:
            self._at_site[which] = head_projection(which, self.target, tensor).float().clone()
        except Exception as error:
            self.problems[f"attn.hook_{which}"] = f"it cannot be split into heads ({type(error).__name__})"

    def _keep_norm(self, module: nn.Module, args: Args, _kwargs: Kwargs, output: Any) -> None:
        if not len(args) or not isinstance(args[0], Tensor) or not isinstance(output, Tensor):
            return
        is_linear = any(parameter.ndim > 1 for parameter in module.parameters())
        if not is_linear and args[0].shape == output.shape and args[0].is_floating_point():
            self._norms.append((args[0].detach().float().clone(), output.detach().float().clone()))

    def see(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Compare the sites with what attention gets, `[row head pos d_head]`."""
        pairs = dict[str, tuple[Tensor, Tensor]]()
        for which, tensor in (("q", query), ("k", key), ("v", value)):
            if which not in self._at_site:
                continue
            behind = rearrange(tensor.detach().float(), "row head pos d_head -> row pos head d_head")
            site, behind = self._between_norms(self._at_site[which], behind)
            repeats = behind.shape[2] // max(site.shape[2], 1)
            once = behind[:, :, :: max(repeats, 1)]  # some repeat each kv head for every query head
            if site.shape == once.shape:
                pairs[which] = site, once
            else:
                self.problems[f"attn.hook_{which}"] = (
                    f"attention gets {behind.shape[2]} heads of {behind.shape[3]} numbers, and the module gives "
                    f"{site.shape[2]} of {site.shape[3]}"
                )
        self._compare(pairs)
        self._at_site.clear()
        self._norms.clear()

    def _compare(self, pairs: dict[str, tuple[Tensor, Tensor]]) -> None:
        if "v" in pairs:
            self._must("v", *pairs["v"], "the values that attention gets are others")
        rotated = [which for which in ("q", "k") if which in pairs]
        for which in rotated:
            for other in dict.fromkeys((which, rotated[0])):
                site, behind = (
                    torch.einsum("rphd,rpgd->rphg", one, two)
                    for one, two in zip(pairs[other], pairs[which], strict=True)
                )
                self._must(which, site, behind, "the scores cannot be recomputed from it")

    def _must(self, which: str, site: Tensor, behind: Tensor, claim: str) -> None:
        """Refuse a site whose numbers are not a constant multiple of what attention gets."""
        square = (site * site).sum()
        off = float("inf")
        if square > 0:
            constant = (site * behind).sum() / square
            off = float((behind - constant * site).abs().max() / behind.abs().max().clamp(min=1e-30))
        elif not behind.any():
            off = 0.0
        if not off <= 2 * self.tolerance:
            self.problems.setdefault(f"attn.hook_{which}", f"{claim} (off by {off:.2g})")

    def finish(self) -> None:
        """To be called at the end of the layer: what was not compared is refused."""
        for which in self._at_site:
            self.problems.setdefault(f"attn.hook_{which}", "no softmax attention of this layer reads it")
        self._at_site.clear()
        self._norms.clear()

    def _between_norms(
        self, site: Float[Tensor, "row pos head d_head"], behind: Float[Tensor, "row pos other_head other_d_head"]
    ) -> tuple[Tensor, Tensor]:
        """What norms behind the site make of what it holds, and what norms before attention read."""
        unused = list[tuple[Tensor, Tensor]]()
        for entering, leaving in self._norms:
            held = _exchanged(entering, leaving, site)
            if held is None:
                unused.append((entering, leaving))
            else:
                site = held
        for entering, leaving in reversed(unused):
            held = _exchanged(leaving, entering, behind)
            if held is not None:
                behind = held
        return site, behind


def _exchanged(one: Tensor, other: Tensor, held: Float[Tensor, "row pos head d_head"]) -> Tensor | None:
    """What stands in `other` where `one` is what is held, with heads before or behind positions; None if it is not."""
    if one.numel() != held.numel():
        return None
    if torch.equal(one.reshape(held.shape), held):
        return other.reshape(held.shape)
    rows, positions, heads, width = held.shape
    if one.ndim == 4 and torch.equal(one.reshape(rows, heads, positions, width).transpose(1, 2), held):
        return other.reshape(rows, heads, positions, width).transpose(1, 2)
    return None
