"""Prove the sites of a model by sums and edits, in one pass over a few tokens, by plain hooks.

What enters a layer, what its attention gives and what its MLP gives are replaced by random numbers of one size, each of
its own. Then the residual stream can only be what the adapter says if the layer really adds these parts to each other:
nothing is alike by chance, and nothing is too small to be seen. The rows of the batch differ in what the MLP gives. At
the last token, what enters a layer is a thousand times as large; it shows where only the MLP's part is known whether
the stream itself passes the layer as it is.

In three rows, the numbers of one head of the queries, keys or values change places at their site, for one token, which
no norm after it sees in other heads. Then exactly this head of what attention gets must change. Attention gives random
numbers in one head, and of what the output projection reads, only this head's part may differ between tokens.

A module outside transformers' attention interface does not show what it gets, and returns its rows. Then a query must
change exactly its own row in its head, a key the rows from its token on in its heads, and a value no row, but what the
output projection reads of these heads from its token on.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.models.grouped_heads import head_projection
from sinkscope.models.hooks import Hook, first_tensor, on_hidden, on_input, on_output
from sinkscope.models.short_passes import token_ids
from sinkscope.models.target import Target
from sinkscope.opening.inference.edits import PASS_ROWS, MlpEdits, PassRecorder, as_constant
from sinkscope.tap.call import Attention
from sinkscope.tap.tap import attention_rows, listening

RowValues = Float[Tensor, "row pos width"]
_TURNED = {"q": 1, "k": 2, "v": 3}  # rows in which a head of them is turned
_TOKENS = 6
_HEAD = 1  # the one that is edited, if there are two
_TOKEN = 2  # the one whose numbers are turned
_LARGE = 1000.0
_PASSES = 0.05  # largest relative distance of the stream from what entered, where that is large
_EXACT = 1e-3  # largest relative distance of a sum from what it must be, in float32
_IN_HALF = 4  # times the relative rounding of a number, in half precision


def layer_sums(target: Target, layers: list[int], *, measures: bool = False) -> list[LayerSums]:
    """Return the sums of some layers, after one pass.

    Args:
        target: The model, with an adapter. It is left unchanged.
        layers: The layers.
        measures: Whether the factors of attention and MLP are measured, and not those of the adapter.
    """
    checks = {layer: LayerSums(target, layer, measures) for layer in layers}
    hooks = list[Hook]()
    for check in checks.values():
        hooks += check.hooks()

    def see(call: Attention) -> None:
        if call.layer in checks:
            checks[call.layer].see(call)

    def see_rows(layer: int, _first: int, rows: Tensor) -> None:
        checks[layer].see_rows(rows)

    if target.adapter.attention_interface:
        tap = listening(target, see, proving=True)
    else:
        tap = attention_rows(target, see_rows, layers=layers, proving=True)
    with torch.no_grad(), tap, target.hooks(*hooks):
        target.forward(token_ids(target, _TOKENS).expand(PASS_ROWS, -1), last_layer=max(layers))
    return list(checks.values())


class LayerSums:
    """What passes the modules of one layer, and what of it cannot be proved.

    Attributes:
        problems: Why sites cannot be proved, by the last part of their names.
        factors: Constants between what attention and MLP give and what the layer adds, by the adapter's fields.
        edits: What edits of the MLP show.
    """

    def __init__(self, target: Target, layer: int, measures: bool) -> None:
        self.target, self.layer, self.measures = target, layer, measures
        self.tolerance = max(_EXACT, _IN_HALF * torch.finfo(target.dtype).eps)
        self.problems = dict[str, str]()
        self.factors = {"attn_factor": target.adapter.attn_factor, "write_factor": target.adapter.write_factor}
        self.pre, self.attn, self.mid, self.mlp = (PassRecorder() for _ in range(4))
        self.own_attn, self.projected, self.heads = (PassRecorder() for _ in range(3))  # what attention itself gives
        self.edits = MlpEdits(target, layer)
        self._generator = torch.Generator().manual_seed(layer)
        self._turned = dict[str, tuple[int, ...]]()  # how many heads a site has, and how wide
        self._count = 0  # query heads

    def hooks(self) -> list[Hook]:
        """Return hooks that replace, record, and compare at the end of the layer."""
        target, layer, adapter = self.target, self.layer, self.target.adapter
        on_part = partial(target.part_hooks, layer)
        hooks: list[Hook] = [(target.layers[layer], "pre", on_input(self.pre.edited(self._replace_entering)))]
        for which in _TURNED:
            part = which
            if adapter.qkv_layout is not None and not target.has_part(layer, which):
                part = "fused_qkv"
            hooks += on_part(part, "post", on_hidden(partial(self._turn, which)))
        hooks += on_part("o", "pre", on_input(self.heads.keep))
        hooks += on_part("o", "post", on_output(self.projected.keep))
        replaced = on_hidden(self.attn.edited(partial(self._replace, rows=1)))
        writer = "attn_out" if target.has_part(layer, "attn_out") else "attn"
        hooks += on_part(writer, "post", on_output(self.own_attn.keep), replaced)
        hooks += self.edits.hooks()
        replaced = on_hidden(self._replace_mlp)
        behind = on_part("post_mlp_norm", "post", replaced)
        if target.has_neurons(layer):
            hooks += behind or [(writer, "post", replaced) for writer in target.mlp_writers(layer)]
        hooks += on_part("mid", "pre", on_input(self.mid.keep))
        return [*hooks, (target.layers[layer], "post", on_output(self._finish))]

    def _replace(self, given: RowValues, rows: int) -> None:
        """Put random numbers in the place of what passes, of each row or the same ones of all."""
        given[:] = torch.randn(rows, *given.shape[1:], generator=self._generator).to(given)

    def _replace_entering(self, given: RowValues) -> None:
        self._replace(given, 1)
        given[:, -1] *= _LARGE

    def _replace_mlp(self, given: Tensor) -> Tensor:
        before = self.mlp.rows
        replaced = self.mlp.edited(partial(self._replace, rows=PASS_ROWS))(given)
        if before.shape == self.mlp.rows.shape:  # a shared expert stands beside a mixture
            self.mlp.rows += before
        return replaced

    # -- heads ---------------------------------------------------------------------------------------------------------

    def _turn(self, which: str, tensor: Tensor) -> Tensor:
        """Let the numbers of one head change places; until attention is seen to read them so, the site is refused."""
        self.problems[f"attn.hook_{which}"] = "softmax attention does not read the heads that are there"
        turned = tensor.clone()
        try:
            heads = head_projection(which, self.target, turned.view(PASS_ROWS, -1, turned.shape[-1]))
        except Exception:  # it cannot be split into heads
            return tensor
        self._turned[which] = tuple(heads.shape[2:])
        head = heads[_TURNED[which], _TOKEN, _HEAD % heads.shape[2]]
        head.copy_(head.roll(1, -1))
        return turned

    def see(self, call: Attention) -> None:
        """Compare what attention gets; let it give random numbers in one head."""
        for which, given in (("q", call.query), ("k", call.key), ("v", call.value)):
            heads, width = self._turned.get(which, (1, 0))
            if given.shape[1] % heads or given.shape[3] != width:
                continue
            change = (given[_TURNED[which]] - given[0]).detach().float().abs().amax((1, 2))
            largest = given.float().abs().max()
            if largest == 0 or self._is_where(change, self._own(which, change), largest):
                self.problems.pop(f"attn.hook_{which}", None)
        batch, count, tokens = call.query.shape[:3]
        self._count = count
        noise = torch.randn(1, tokens, call.value.shape[-1], generator=self._generator)
        output = call.value.new_zeros(batch, tokens, count, call.value.shape[-1])
        output[:, :, _HEAD % count] = (noise - noise.mean(-1, keepdim=True)).to(output)  # norms take off the mean
        call.compute = lambda _: (output, None)

    def see_rows(self, rows: Float[Tensor, "batch head query key"]) -> None:
        """Compare the rows that attention returns where it does not show what it gets."""
        self._count = rows.shape[1]
        changes = (rows[1:] - rows[:1]).abs().amax(-1)[..., :-1]  # the last token is too large to attend to others
        largest = changes[: len(_TURNED)].max()
        query = torch.arange(changes.shape[2], device=rows.device)
        for which, seen in (("q", query == _TOKEN), ("k", query >= _TOKEN), ("v", query < 0)):
            change = changes[_TURNED[which] - 1]
            if which in self._turned and self._is_where(change, self._own(which, change)[:, None] & seen, largest):
                self.problems.pop(f"attn.hook_{which}", None)

    def _own(self, which: str, change: Tensor) -> Bool[Tensor, " head"]:
        """The heads that read the turned one."""
        heads = self._turned[which][0]
        return torch.arange(len(change), device=change.device) * heads // len(change) == _HEAD % heads

    def _is_where(self, change: Tensor, where: Tensor, largest: Tensor) -> bool:
        """Whether numbers change in these places, and in no others."""
        return bool((change[where] > 0).all()) and bool((change[~where] <= self.tolerance * largest).all())

    def _prove_heads(self) -> None:
        """The output projection reads its heads side by side."""
        if not self.heads.ran or not self._count:
            return
        count, width = self._count, self.heads.rows.shape[-1]
        if not self.target.adapter.attention_interface:
            self._prove_values(count)
            return
        moved = (self.heads.rows - self.heads.rows[:, :1]).abs().amax((0, 1))
        by_head = moved.reshape(count, -1).amax(1) if width % count == 0 else moved
        if not by_head.sum() <= (1 + self.tolerance) * by_head[_HEAD % count]:
            self.problems["attn.hook_z"] = "the output projection does not read the heads side by side"

    def _prove_values(self, count: int) -> None:
        """Exactly the part of its own heads of what the output projection reads changes with the turned values."""
        change = (self.heads.rows[_TURNED["v"]] - self.heads.rows[0]).abs()[:-1]
        if "attn.hook_v" not in self.problems and "v" in self._turned and change.shape[-1] % count == 0:
            change = rearrange(change, "pos (head d_head) -> head pos d_head", head=count).amax(-1)
            later = torch.arange(change.shape[1], device=change.device) >= _TOKEN
            if self._is_where(change, self._own("v", change)[:, None] & later, change.max()):
                return
        for part in ("attn.hook_v", "attn.hook_z"):
            self.problems[part] = "the output projection is not seen to read the values of the heads side by side"

    # -- sums ----------------------------------------------------------------------------------------------------------

    def _finish(self, output: Any) -> None:
        """Compare at the end of the layer."""
        post = PassRecorder()
        post.keep(output)
        adapter, pre = self.target.adapter, self.pre.rows
        self.edits.finish()
        if self.measures:
            self._measure(post.rows)
        start, names = pre, ["hook_resid_pre"]
        attn = self.attn.rows * self.factors["attn_factor"]
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
            parts.append(self.mlp.rows * self.factors["write_factor"])
            names.append("hook_mlp_out")
        if adapter.adds:
            self._prove_post(post.rows, parts, names)
        elif self.mlp.ran and bool((post.rows == post.rows[:1]).all()):
            self.problems["hook_mlp_out"] = "it does not change what the layer gives"
        self._prove_heads()
        self._prove_projection()

    def _measure(self, post: RowValues) -> None:
        """The factors with which attention and MLP come nearest to what the layer gives."""
        start, parts = self.pre.rows, {"attn_factor": self.attn}
        if self.mid.ran:
            self._fit(self.mid.rows - start, parts)
            start, parts = self.mid.rows, {}
        self._fit(post - start, {**parts, "write_factor": self.mlp})

    def _fit(self, total: RowValues, parts: dict[str, PassRecorder]) -> None:
        ran = {name: part.rows[:, :-1].flatten() for name, part in parts.items() if part.rows.shape == total.shape}
        if ran:
            columns = torch.stack([*ran.values()], 1).cpu().double()
            found = torch.linalg.lstsq(columns, total[:, :-1].reshape(-1, 1).cpu().double()).solution
            for name, constant in zip(ran, found[:, 0].tolist(), strict=True):
                self.factors[name] = as_constant(constant) or 1.0  # 0: it is no part

    def _prove_post(self, post: RowValues, parts: list[Tensor], names: list[str]) -> None:
        off = self._off(post, *parts)
        if off <= self.tolerance:
            return
        claim = f"hook_resid_post is not {' + '.join(names)}"
        if "hook_attn_out" in names:
            self._must(off, claim, "hook_attn_out")
        if "hook_mlp_out" in names:  # where other parts are added too, what it gives may still be added as it is
            written = parts[-1]
            passed = self.pre.rows[:, -1:]
            others = (post - written)[:, -1:] - passed
            if bool(others.abs().max() <= _PASSES * passed.abs().max()):
                off = self._off(post[:1] - post[1:], written[:1] - written[1:])
            self._must(off, claim, "hook_mlp_out")

    def _prove_projection(self) -> None:
        """What the output projection gives is what attention adds, or what a norm after it reads."""
        if not self.projected.ran or not self.own_attn.ran:
            return
        off = self._off(self.own_attn.rows, self.projected.rows)
        if off > self.tolerance:
            writer: Any = self.target.sub(self.layer, "attn_out", "attn")
            with self.target.loaded(self.layer), suppress(Exception):  # it may be no norm
                given = first_tensor(writer.forward(self.projected.rows.to(self.target.dtype))).float()
                off = self._off(self.own_attn.rows, given)
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
        error = total[:, :-1]
        size = error.abs().amax((1, 2))
        for part in parts:
            size = torch.maximum(size, part[:, :-1].abs().amax((1, 2)))
            error = error - part[:, :-1]
        off = (error.abs().amax((1, 2)) / size).nan_to_num(torch.inf)
        return float(off.where(size > 0, 0).max())
