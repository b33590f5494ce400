"""Prove in one pass over a few tokens that the parts of a model are where an adapter says.

1. The same enters a layer in all rows of the batch. In some of them one thing is edited: the numbers of one head of the
   queries, keys or values change places; attention gives random numbers in one head and zeros in the others; every
   second output of `up` is multiplied.
2. In every row, the residual stream after a part must be the one before it and what the part adds.
3. What the MLP gives must be what its down projections and experts give. Experts are computed again from their weights.
4. Exactly the turned head of what attention reads must change, and of what the output projection reads exactly the
   part of the head with random numbers. After the edit of `up`, exactly every second neuron must change.
5. Attention is computed again from its queries, keys and values.

The proof runs on a small random model of the class, where nothing is alike by chance, and on the user's own model,
whose modules may have been replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from sinkscope.engine.attention import Attention, relative_error
from sinkscope.engine.tap import attention_rows, listening
from sinkscope.errors import UnsupportedError, first_line
from sinkscope.models.adapters import PATHS
from sinkscope.models.grouped_heads import head_projection, per_query_head
from sinkscope.models.hooks import Args, Hook, Kwargs, first_tensor, on_hidden, on_input
from sinkscope.models.neurons import mlp_writers, on_mlp
from sinkscope.models.numbering import misnumbered
from sinkscope.models.target import Target
from sinkscope.opening.sample import TOKENS, token_ids

_TURNED = {"q": 1, "k": 2, "v": 3}  # rows in which a head of them is turned
_NOISE, _SCALED = 4, 5  # rows in which attention gives random numbers in one head, and in which `up` is scaled
ROWS = 6
_HEAD = 1  # the edited head, if a layer has two or more
_TOKEN = 2  # the one whose numbers are turned
_FACTOR = -2.0  # of `up`; no gate follows it, be its activation odd, such as tanh, or linear above 0, such as ReLU
_EXACT = 1e-3  # largest relative distance between two ways to one number, in float32
_IN_HALF, _ATTENDED_IN_HALF = 4, 16  # times the relative rounding of a number, in half precision

RowValues = Float[Tensor, "row pos width"]


@dataclass
class Proof:
    """What a proof found.

    Attributes:
        problem: What is wrong. None if nothing is.
        unproved: Why sites cannot be proved, by layer and the last part of their names.
    """

    problem: str | None = None
    unproved: dict[int, dict[str, str]] = field(default_factory=dict)


@torch.no_grad()
def prove(target: Target, layers: Iterable[int] | None = None) -> Proof:
    """Prove the adapter of a model in one pass, by plain hooks; the model is left as it was.

    Args:
        target: The model, with an adapter.
        layers: The layers; None is all.

    Returns:
        What was found. A wrong adapter does not raise an error.
    """
    proof = Proof()
    numbers = sorted({*(range(target.n_layers) if layers is None else layers)})
    try:
        _check_paths(target)
        checks = {layer: LayerProof(target, layer) for layer in numbers}
        hooks = list[Hook]()
        for check in checks.values():
            hooks += check.hooks()
        with _attention(target, checks), target.hooks(*hooks):
            target.forward(token_ids(target, TOKENS).expand(ROWS, -1), last_layer=max(numbers))
        for check in checks.values():
            if not check.ran:
                raise UnsupportedError(f"layer {check.layer} does not run in a pass over text")
            if check.problems:
                proof.unproved[check.layer] = check.problems
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except UnsupportedError as wrong:
        proof.problem = str(wrong)
    except Exception as error:  # a model may do anything in a pass
        proof.problem = f"a forward pass raised {type(error).__name__}: {first_line(error)}"
    return proof


def _check_paths(target: Target) -> None:
    """Refuse an adapter that names a part that no layer has."""
    adapter = target.adapter
    for name in PATHS:
        path = getattr(adapter, name)
        is_optional = path is None or (adapter.experts is not None and name in ("down", "up", "gate"))
        if not is_optional and not any(name in paths for paths in target.paths):
            raise UnsupportedError(f"the adapter names a module that is not there ({path!r} in no layer)")


def _shows_attention(target: Target) -> bool:
    """Whether attention can be seen: a bridge computes its own, and layers may be numbered in another way."""
    for layer in target.attending[:1]:
        if hasattr(target.sub(layer, "attn"), "original_component"):
            return False
    return not misnumbered(target)


def _attention(target: Target, checks: dict[int, LayerProof]) -> AbstractContextManager[None]:
    """What shows the attention of a pass, where it can be told apart by layer."""
    if not _shows_attention(target):
        return nullcontext()
    attending = [layer for layer in checks if layer in target.attending]
    if not target.adapter.attention_interface:
        return attention_rows(
            target, lambda layer, _, rows: checks[layer].see_rows(rows), layers=attending, proving=True
        )

    def see(call: Attention) -> None:
        if call.layer in attending:
            checks[call.layer].see(call)

    return listening(target, see, proving=True)


class LayerProof:
    """Records what passes the modules of one layer, and compares at its end.

    Attributes:
        problems: Why sites cannot be proved, by the last part of their names.
        ran: Whether the layer ran.
    """

    def __init__(self, target: Target, layer: int) -> None:
        self.target, self.layer = target, layer
        self._attends = layer in target.attending and _shows_attention(target)
        eps = torch.finfo(target.dtype).eps
        self._tolerance = max(_EXACT, _IN_HALF * eps)
        self._attended = max(_EXACT, _ATTENDED_IN_HALF * eps)
        self.problems = dict[str, str]()
        self.ran = False
        self._values: dict[str, RowValues] = {}  # of each part that ran, in float32
        self._chunks = list[Tensor]()  # rows of attention
        self._turned = dict[str, tuple[int, ...]]()  # how many heads a site has, and how wide
        self._own: Tensor | None = None  # what attention gives by itself
        self._value: Tensor | None = None
        self._count = 0  # query heads

    def hooks(self) -> list[Hook]:
        """Return hooks that edit, record, and compare at the end of the layer."""
        target, layer, paths = self.target, self.layer, self.target.paths[self.layer]
        on_part = partial(target.part_hooks, layer)
        hooks: list[Hook] = [(target.layers[layer], "pre", on_input(self._enter))]
        if self._attends:
            for which in _TURNED:
                part = which
                if target.adapter.qkv_layout is not None and which not in paths:
                    part = "fused_qkv"
                hooks += on_part(part, "post", on_hidden(partial(self._turn, which)))
        hooks += on_part("o", "pre", on_input(self._keeping("heads")))
        hooks += on_part("o", "post", on_hidden(self._keeping("projected")))
        hooks += on_part("attn_out" if "attn_out" in paths else "attn", "post", on_hidden(self._keeping("attn")))
        hooks += on_part("mid", "pre", on_input(self._keeping("mid")))
        if layer in target.with_neurons:
            hooks += self._mlp_hooks()
        return [*hooks, (target.layers[layer], "post", on_hidden(self._finish))]

    def _mlp_hooks(self) -> list[Hook]:
        target, layer = self.target, self.layer
        on_part = partial(target.part_hooks, layer)
        hooks = on_part("down", "pre", on_input(self._keeping("post")))
        hooks += on_part("down", "post", on_hidden(self._keeping("down")))
        hooks += on_part("shared_gate", "post", on_hidden(self._keeping("shared_gate")))
        if layer in target.mixtures:
            hooks += on_part("experts", "post", self._recompute)
        else:
            hooks += on_part("up", "post", on_hidden(self._scale_up))
        hooks += on_mlp(target, layer, self._keeping("mlp"))
        return hooks + on_part("post_mlp_norm", "post", on_hidden(self._keeping("written")))

    # -- recording -----------------------------------------------------------------------------------------------------

    def _by_row(self, tensor: Tensor) -> Tensor:
        """A tensor by row and position, which OPT and experts run together."""
        if tensor.ndim == 2:
            return rearrange(tensor, "(row pos) width -> row pos width", row=ROWS)
        return rearrange(tensor, "row pos ... -> row pos (...)")

    def _keeping(self, part: str) -> Callable[[Tensor], None]:
        """A function that keeps a copy of what passes; some models add to it in place."""

        def keep(tensor: Tensor) -> None:
            self._values[part] = self._by_row(tensor.detach()).float().clone()

        return keep

    def _enter(self, hidden: Tensor) -> Tensor:
        """Let the same enter in every row, so that no edit of an earlier layer is seen."""
        if self.ran:
            raise UnsupportedError(f"layer {self.layer} runs several times in a pass")
        self.ran = True
        rows = self._by_row(hidden)
        shape, rows = hidden.shape, rows[:1].expand_as(rows).clone()
        self._keeping("pre")(rows)
        return rows.reshape(shape)

    def _scale_up(self, up: Tensor) -> Tensor:
        rows = self._by_row(up).clone()
        first = rows.shape[-1] // 2 if self.target.adapter.fused_gate_up else 0
        rows[_SCALED, :, first::2] *= _FACTOR
        self._keeping("up")(rows)
        return rows.reshape(up.shape)

    def _recompute(self, module: nn.Module, args: Args, kwargs: Kwargs, output: Any) -> None:
        """Compare what experts give with what their weights say."""
        given = self._by_row(first_tensor(output)).float()
        self._values["experts"] = given.clone()
        experts = self.target.experts(self.layer)
        try:
            computed = self._by_row(experts.output(experts.routed(args, kwargs))).float()
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            raise UnsupportedError("the experts compute something else than an MLP each") from None
        if given.any() and not relative_error(given, computed) <= self._attended:
            raise UnsupportedError("the experts do not give what their weights say")

    # -- heads ---------------------------------------------------------------------------------------------------------

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
        return bool((change[where] > 0).all()) and bool((change[~where] <= self._tolerance * largest).all())

    def _is_after(self, change: Tensor, heads: Tensor, queries: Tensor, largest: Tensor) -> bool:
        """Whether numbers `[head query]` change in some of these heads, and nowhere else but at these queries."""
        heads, queries = heads.to(change.device), queries.to(change.device)
        at = torch.where(queries, change, 0).amax(1)
        elsewhere = torch.where(heads[:, None] & queries, 0, change).max()
        has_changed = not queries.any() or bool((at[heads] > 0).any())  # others may attend elsewhere
        return has_changed and bool(elsewhere <= self._tolerance * largest)

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
        if self._own is not None and self._value is not None:
            weighted = (rows.float() @ per_query_head(self._value, self._count)).transpose(1, 2)
            if not relative_error(weighted, self._own) <= self._attended:
                raise UnsupportedError("recomputed attention differs from the model's own")
        elif not bool(((rows.sum(-1) - 1).abs() <= self._attended).all()):
            raise UnsupportedError("recomputed attention differs from the model's own")

    def _prove_heads(self) -> None:
        """The output projection reads its heads side by side."""
        if "heads" not in self._values or not self._count:
            return
        heads, count = self._values["heads"], self._count
        if not self.target.adapter.attention_interface:
            self._prove_values(heads, count)
            return
        moved = (heads[_NOISE] - heads[_NOISE, :1]).abs().amax(0)
        by_head = moved.reshape(count, -1).amax(1) if len(moved) % count == 0 else moved
        if not by_head.sum() <= (1 + self._tolerance) * by_head[_HEAD % count]:
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

    # -- sums ----------------------------------------------------------------------------------------------------------

    def _finish(self, output: Tensor) -> None:
        """Compare at the end of the layer."""
        self._keeping("end")(output)
        if self.layer in self.target.with_neurons:
            self._prove_neurons()
        self._prove_attention()
        self._prove_residual()
        self._prove_heads()
        self._prove_projection()
        if self.target.adapter.adds and "hook_mlp_out" in self.problems:
            reason = self.problems["hook_mlp_out"]
            raise UnsupportedError(f"what the MLP gives is not added as the adapter says: {reason}")
        self._values.clear()
        self._own = self._value = None
        self._chunks.clear()

    def _prove_neurons(self) -> None:
        """What the MLP gives is what its down projections and experts give, by the factors of the adapter."""
        values, adapter = self._values, self.target.adapter
        if "mlp" not in values or ("down" not in values and "experts" not in values):
            self.problems["mlp.hook_post"] = "the modules of its MLP do not run"
            return
        written = torch.zeros_like(values["mlp"])
        if "experts" in values:
            written = written + adapter.expert_factor * values["experts"]
        paths = self.target.paths[self.layer]
        holds_shared = paths.get("experts") == paths["mlp"] and len(mlp_writers(self.target, self.layer)) == 1
        if "down" in values and not holds_shared:
            down = values["down"]
            if "shared_gate" in values:
                down = down * values["shared_gate"].sigmoid()
            factor = adapter.shared_factor if self.layer in self.target.mixtures else adapter.down_factor
            written = factor * down + (written if written.shape == down.shape else 0)
        if self._off(values["mlp"], written) > self._tolerance or not self._scaled_up():
            raise UnsupportedError("a moved neuron does not change the layer as the adapter says")

    def _scaled_up(self) -> bool:
        """Whether exactly every second neuron has changed with `up`, and by the same factor if there is a gate."""
        up, post = self._values.get("up"), self._values["post"] if "post" in self._values else None
        if up is None or post is None:
            return True
        if up.shape[-1] != post.shape[-1] * (1 + self.target.adapter.fused_gate_up):
            return False
        change = post[_SCALED] - post[0]
        is_gated = self.target.is_gated(self.layer)
        if not up[0].any() or not post.any():  # weights of zero
            return True
        expected = (post[0] * (_FACTOR - 1) if is_gated else change).clone()
        expected[:, 1::2] = 0
        size = torch.maximum(post[0].abs().max(), change.abs().max())
        return bool((change - expected).abs().max() <= self._attended * size)

    def _prove_residual(self) -> None:
        """Each sum of the residual stream holds; a site without which it does not is refused."""
        values, adapter = self._values, self.target.adapter
        start, names = values["pre"], ["hook_resid_pre"]
        attn = values["attn"] * adapter.attn_factor if "attn" in values else None
        if "mid" in values:
            if attn is not None:
                off = self._off(values["mid"], start, attn)
                claim = "hook_resid_mid is not hook_resid_pre + hook_attn_out"
                self._must(off, claim, "hook_resid_mid", "hook_attn_out")
            else:
                self.problems["hook_resid_mid"] = "nothing that is added before it is known"
            start, names = values["mid"], ["hook_resid_mid"]
        elif attn is not None:
            start, names = start + attn if attn.shape == start.shape else attn, ["hook_resid_pre", "hook_attn_out"]
        parts, mlp = [start], values.get("written", values.get("mlp"))
        if mlp is not None:
            parts.append(mlp * adapter.write_factor)
            names.append("hook_mlp_out")
        if not adapter.adds:
            return
        off = self._off(values["end"], *parts)
        claim = f"hook_resid_post is not {' + '.join(names)}"
        self._must(off, claim, *[name for name in names if name in ("hook_attn_out", "hook_mlp_out")])

    def _prove_projection(self) -> None:
        """What the output projection gives is what attention adds, or what a norm after it reads."""
        projected, attn = self._values.get("projected"), self._values.get("attn")
        if projected is None or attn is None:
            return
        off = self._off(attn, projected)
        if off > self._tolerance:
            writer: Any = self.target.sub(self.layer, "attn_out", "attn")
            with self.target.loaded(self.layer), suppress(Exception):  # it may be no norm
                off = self._off(attn, first_tensor(writer.forward(projected.to(self.target.dtype))).float())
        self._must(off, "hook_attn_out cannot be computed from it", "attn.hook_z")

    def _must(self, off: float, claim: str, *parts: str) -> None:
        if off <= self._tolerance:  # NaN is wrong as well
            return
        for part in parts:
            self.problems.setdefault(part, f"{claim} (off by {off:.2g})")

    def _off(self, total: Tensor, *parts: Tensor) -> float:
        """Largest distance from a sum, relative to the largest number in it, of any token."""
        if any(part.shape != total.shape for part in parts):
            return float("inf")
        error = total
        size = error.abs().amax(-1)
        for part in parts:
            size = torch.maximum(size, part.abs().amax(-1))
            error = error - part
        off = (error.abs().amax(-1) / size).nan_to_num(torch.inf)
        return float(off.where(size > 0, 0).max())
