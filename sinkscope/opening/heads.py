"""Prove the heads of a layer by edits in rows of a batch, and attention by computing it again."""

from __future__ import annotations

from functools import partial

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.engine.attention import Attention, relative_error
from sinkscope.errors import UnsupportedError
from sinkscope.models.grouped_heads import head_projection, per_query_head
from sinkscope.models.hooks import Hook, on_hidden, on_input
from sinkscope.models.numbering import misnumbered
from sinkscope.models.target import Target
from sinkscope.models.windows import ChunkWindow, layer_window
from sinkscope.opening.sample import TOKENS

ROWS = 6
"""Rows of the batch: one intact, three with a turned head, one with random numbers in one head, one for the MLP."""
SCALED = 5
"""The row of the MLP."""
_TURNED, _NOISE = {"q": 1, "k": 2, "v": 3}, 4
_HEAD = 1  # the edited head, if a layer has two or more
_TOKEN = 2  # the one whose numbers are turned

RowValues = Float[Tensor, "row pos width"]


def by_row(tensor: Tensor) -> Tensor:
    """Return a tensor by row and position, which OPT and experts run together."""
    if tensor.ndim == 2:
        return rearrange(tensor, "(row pos) width -> row pos width", row=ROWS)
    return rearrange(tensor, "row pos ... -> row pos (...)")


def shows_attention(target: Target) -> bool:
    """Return whether attention can be seen: a bridge computes its own, and layers may be numbered in another way."""
    for layer in target.attending[:1]:
        if hasattr(target.sub(layer, "attn"), "original_component"):
            return False
    return not misnumbered(target)


class HeadProof:
    """Records what the heads of one layer read and give.

    Args:
        target: The model.
        layer: The layer.
        problems: Where it is noted why sites cannot be proved, by the last part of their names.
        exact: Largest relative distance between two ways to one number.
        attended: The same of numbers that attention gives.
    """

    def __init__(self, target: Target, layer: int, problems: dict[str, str], *, exact: float, attended: float) -> None:
        self.target, self.layer, self.problems = target, layer, problems
        self._exact, self._attended = exact, attended
        self._attends = layer in target.attending and shows_attention(target)
        self._read: RowValues | None = None  # what the output projection reads
        self._chunks = list[Tensor]()  # rows of attention
        self._turned = dict[str, tuple[int, ...]]()  # how many heads a site has, and how wide
        self._own: Tensor | None = None  # what attention gives by itself
        self._value: Tensor | None = None
        self._count = 0  # query heads

    def hooks(self) -> list[Hook]:
        """Return hooks that turn a head, and record."""
        hooks = self.target.part_hooks(self.layer, "o", "pre", on_input(self._keep))
        for which in _TURNED if self._attends else ():
            part = which
            if self.target.adapter.qkv_layout is not None and which not in self.target.paths[self.layer]:
                part = "fused_qkv"
            hooks += self.target.part_hooks(self.layer, part, "post", on_hidden(partial(self._turn, which)))
        return hooks

    def _keep(self, heads: Tensor) -> None:
        self._read = by_row(heads.detach()).float().clone()

    def finish(self) -> None:
        """Compare at the end of the layer.

        Raises:
            UnsupportedError: Attention is not what sinkscope recomputes.
        """
        self._prove_attention()
        self._prove_heads()

    def _turn(self, which: str, tensor: Tensor) -> Tensor:
        """Let the numbers of one head change places; until attention is seen to read them so, the site is refused."""
        site = f"attn.hook_{which}"
        self.problems[site] = "softmax attention does not read the heads that are there"
        turned = tensor.clone()
        try:
            heads = head_projection(which, self.target, turned.view(ROWS, -1, turned.shape[-1]))
        except Exception:  # it cannot be split into heads
            return tensor
        self._turned[which] = tuple(heads.shape[2:])
        head = heads[_TURNED[which], _TOKEN, _HEAD % heads.shape[2]]
        rolled = head.roll(1, -1)
        if torch.equal(rolled, head):  # a head of zeros
            del self.problems[site]
        head.copy_(rolled)
        return turned

    def see(self, call: Attention) -> None:
        """Compare what attention gets; let it give random numbers in one head of one row."""
        for which, part in (("q", call.query), ("k", call.key), ("v", call.value)):
            heads, width = self._turned.get(which, (1, 0))
            if part.shape[1] % heads == 0 and part.shape[3] == width:
                change = (part[_TURNED[which]] - part[0]).detach().float().abs().amax((1, 2))
                if self._is_where(change, self._reading(which, len(change)), part.float().abs().max()):
                    self.problems.pop(f"attn.hook_{which}", None)
        if call.is_repeated:
            return
        self._count = call.query.shape[1]
        if call.own.is_known:
            output = call.stock(call.mask)[0]
            self._own, self._value = output.detach().float(), call.value.detach().float()
            call.show(lambda _, rows: self._chunks.append(rows), gives_output=False)
        else:  # a function of the user's own, which has no part in a proof
            output = call.recomputed()[0]
        noise = torch.randn(len(output[0]), output.shape[-1], generator=torch.Generator().manual_seed(self.layer))
        changed = output.clone()
        changed[_NOISE] = 0
        changed[_NOISE, :, _HEAD % self._count] = (noise - noise.mean(-1, keepdim=True)).to(output)  # as norms do
        call.compute = lambda _: (changed, None)

    def see_rows(self, rows: Float[Tensor, "batch head query key"]) -> None:
        """Compare the rows that attention returns where it does not show what it gets."""
        self._count = rows.shape[1]
        self._chunks.append(rows)
        changes = (rows[1:] - rows[:1]).abs().amax(-1)
        largest = changes[: len(_TURNED)].max()
        query = torch.arange(changes.shape[2], device=rows.device)
        for which, may in (("q", query == _TOKEN), ("k", query >= _TOKEN), ("v", query < 0)):
            change = changes[_TURNED[which] - 1]
            if which in self._turned and self._is_after(change, self._reading(which, len(change)), may, largest):
                self.problems.pop(f"attn.hook_{which}", None)

    def _reading(self, which: str, count: int) -> Bool[Tensor, " head"]:
        """The heads that read the turned one."""
        heads = self._turned[which][0] if which in self._turned else 1
        return torch.arange(count) * heads // count == _HEAD % heads

    def _is_where(self, change: Tensor, where: Tensor, largest: Tensor) -> bool:
        """Whether numbers change in exactly these places."""
        where = where.to(change.device)
        return bool((change[where] > 0).all()) and bool((change[~where] <= self._exact * largest).all())

    def _is_after(self, change: Tensor, heads: Tensor, queries: Tensor, largest: Tensor) -> bool:
        """Whether numbers `[head query]` change in some of these heads, and nowhere else but at these queries."""
        heads, queries = heads.to(change.device), queries.to(change.device)
        at = torch.where(queries, change, 0).amax(1)
        elsewhere = torch.where(heads[:, None] & queries, 0, change).max()
        has_changed = not queries.any() or bool((at[heads] > 0).any())  # others may attend elsewhere
        return has_changed and bool(elsewhere <= self._exact * largest)

    def _prove_attention(self) -> None:
        """Attention that is computed again gives what the model's own gives."""
        target = self.target
        if not self._count:
            if self._attends:
                raise UnsupportedError(f"no attention was recomputed in layer {self.layer}")
            return
        if self._count != target.n_heads:
            raise UnsupportedError(
                f"layer {self.layer} has {self._count} heads, and the configuration {target.n_heads}"
            )
        if not self._chunks:
            return
        rows = torch.cat(self._chunks, 2)
        if rows.shape[-2:] != (TOKENS, TOKENS):
            raise UnsupportedError(f"recomputed attention has shape {tuple(rows.shape)}")
        window = layer_window(target.config, self.layer)
        if window is not None and not isinstance(window, ChunkWindow) and bool((rows.tril(-window) > 0).any()):
            self.problems["cache"] = "sees keys beyond the window of its configuration, which a cache drops"
        if self._own is not None and self._value is not None:
            weighted = (rows.float() @ per_query_head(self._value, self._count)).transpose(1, 2)
            if not relative_error(weighted, self._own) <= self._attended:
                raise UnsupportedError("recomputed attention differs from the model's own")
        elif not bool(((rows.sum(-1) - 1).abs() <= self._attended).all()):
            raise UnsupportedError("recomputed attention differs from the model's own")

    def _prove_heads(self) -> None:
        """The output projection reads its heads side by side."""
        heads, count = self._read, self._count
        if heads is None or not count:
            return
        if not self.target.adapter.attention_interface:
            self._prove_values(heads, count)
            return
        moved = (heads[_NOISE] - heads[_NOISE, :1]).abs().amax(0)
        by_head = moved.reshape(count, -1).amax(1) if len(moved) % count == 0 else moved
        if not by_head.sum() <= (1 + self._exact) * by_head[_HEAD % count]:
            self.problems["attn.hook_z"] = "the output projection does not read the heads side by side"

    def _prove_values(self, heads: RowValues, count: int) -> None:
        """Exactly the part of its own heads of what the output projection reads changes with the turned values."""
        change = (heads[_TURNED["v"]] - heads[0]).abs()
        if "attn.hook_v" not in self.problems and "v" in self._turned and change.shape[-1] % count == 0:
            change = rearrange(change, "pos (head d_head) -> head pos d_head", head=count).amax(-1)
            if self._is_after(change, self._reading("v", count), torch.arange(TOKENS) >= _TOKEN, change.max()):
                return
        for part in ("attn.hook_v", "attn.hook_z"):
            self.problems[part] = "the output projection is not seen to read the values of the heads side by side"
