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

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sinkscope.engine.attention import Attention, relative_error
from sinkscope.engine.tap import attention_rows, listening
from sinkscope.models.experts import experts_of
from sinkscope.models.grouped_heads import head_projection
from sinkscope.models.hooks import Args, Hook, Kwargs, first_tensor, on_hidden, on_input
from sinkscope.models.neurons import column_factor, mlp_writers, on_mlp, typical_neuron, w_out
from sinkscope.models.target import Target

RowValues = Float[Tensor, "row pos width"]
PASS_ROWS = 7
"""Rows of the batch: one intact, three with a turned head (of queries, keys or values), three with an edited MLP."""
_TURNED = {"q": 1, "k": 2, "v": 3}  # rows in which a head of them is turned
_MOVED, _EXPERTS, _SCALED = 4, 5, 6  # rows in which a neuron is moved, what experts give is turned, `up` is scaled
_TOKENS = 6
_HEAD = 1  # the edited head, if a layer has two or more
_TOKEN = 2  # the one whose numbers are turned
_LARGE = 1000.0
_PASSES = 0.05  # largest relative distance of the stream from what entered, where that is large
_EXACT = 1e-3  # largest relative distance of a sum from what it must be, in float32
_IN_HALF = 4  # times the relative rounding of a number, in half precision

_FACTOR = -2.0  # of `up`; no gate follows it, be its activation odd, such as tanh, or linear above 0, such as ReLU
_ONE = 5e-3  # largest distance of a measured constant from 1 that rounding explains


def token_ids(target: Target, length: int) -> Int[Tensor, "1 pos"]:
    """Return some tokens, always the same ones."""
    vocabulary = int(next(target.embedding.parameters()).shape[0])
    generator = torch.Generator().manual_seed(0)
    return torch.randint(min(16, vocabulary // 2), vocabulary, (1, length), generator=generator).to(target.device)


class PassRecorder:
    """What passed a module, by row of the batch and position, in float32.

    Attributes:
        rows: What passed it; no numbers before it ran.
    """

    def __init__(self) -> None:
        self.rows: RowValues = torch.empty(0, 0, 0)

    @property
    def ran(self) -> bool:
        """Whether the module ran."""
        return self.rows.numel() > 0

    def by_row(self, tensor: Tensor) -> RowValues:
        """Return a tensor by row and position, which OPT and experts run together."""
        if tensor.ndim == 2:
            return rearrange(tensor, "(row pos) width -> row pos width", row=PASS_ROWS)
        return rearrange(tensor, "row pos ... -> row pos (...)")

    def keep(self, output: Tensor) -> None:
        """Keep a copy of what passes; some models add to it in place."""
        self.rows = self.by_row(output.detach()).float().clone()

    def edited(self, edit: Callable[[Tensor], None]) -> Callable[[Tensor], Tensor]:
        """Return a function that keeps what passes, after `edit` has changed its rows."""

        def keep_edited(tensor: Tensor) -> Tensor:
            rows = self.by_row(tensor).clone()
            edit(rows)
            self.keep(rows)
            return rows.reshape(tensor.shape)

        return keep_edited

    def change(self, row: int) -> Float[Tensor, "pos width"]:
        """Return what an edit of a row changed, beside the first row."""
        return self.rows[row] - self.rows[0]


def as_constant(constant: float) -> float:
    """Return a constant as an adapter states it."""
    if abs(constant) < _ONE:
        return 0.0
    if abs(constant - 1) < _ONE:
        return 1.0
    return float(f"{constant:.4g}")


class MlpEdits:
    """Edits of one MLP, in rows of a batch of their own, and what passed its modules in each row.

    At the input of the down projection, of a dense MLP or of a shared expert, a neuron is moved. The numbers that fused
    experts give change places. At the output of `up` of a dense MLP, every second neuron is multiplied by -2: only
    these may then change in post and, if `up` is the linear factor, by the same factor (those of the gate would not).

    Attributes:
        errors: Relative distances between the actual and the expected changes; infinite where they cannot be compared.
        factors: Constants between a down projection and what the MLP gives, as measured, by the adapter's fields.
    """

    def __init__(self, target: Target, layer: int) -> None:
        self.target, self.layer, self.adapter = target, layer, target.adapter
        self.errors = list[float]()
        self.factors = dict[str, float]()
        self.is_mixture = layer in target.mixtures
        self.post, self.experts, self.mlp, self.up, self.shared_gate = (PassRecorder() for _ in range(5))
        neuron: int | None = 0
        if "down" in target.paths[layer]:
            neuron = typical_neuron(target, layer)
        self.is_silent = neuron is None or layer not in target.with_neurons
        self.neuron = neuron or 0

    def hooks(self) -> list[Hook]:
        """Return the hooks that edit and record."""
        target, layer = self.target, self.layer
        if self.is_silent:
            return []
        on_part = partial(target.part_hooks, layer)
        hooks = on_part("down", "pre", on_input(self.post.edited(self._move)))
        if self.is_mixture:
            turned = on_hidden(self.experts.edited(self._turn))
            hooks += on_part("experts", "post", self._recompute, turned)
        else:
            hooks += on_part("up", "post", on_hidden(self.up.edited(self._scale_up)))
        hooks += on_part("shared_gate", "post", on_hidden(self.shared_gate.keep))
        return hooks + on_mlp(target, layer, self.mlp.keep)

    def finish(self) -> None:
        """Compare the actual changes with the expected ones, at the end of the layer."""
        if self.is_silent:
            return
        if not (self.mlp.ran and (self.experts if self.is_mixture else self.post).ran):
            self.errors.append(math.inf)
            return
        for recorder in (self.post, self.experts, self.mlp, self.up, self.shared_gate):
            recorder.rows = recorder.rows[:, :-1]  # the last token may be beyond float16 where no norm precedes the MLP
        if self.post.ran:
            column = w_out(self.target, self.layer, [self.neuron])[0]
            written = self.post.change(_MOVED)[:, self.neuron, None] * column.to(self.post.rows.device)
            if self.shared_gate.ran:
                written = written * self.shared_gate.rows[_MOVED].sigmoid()
            self._compare(_MOVED, written, "shared_factor" if self.is_mixture else "down_factor")
        if self.is_mixture and self.experts.rows.any():
            written = self.experts.change(_EXPERTS) * column_factor(self.target, self.layer, 0)
            self._compare(_EXPERTS, written, "expert_factor")
        if self.up.ran:
            self.errors.append(self._error_of_up())

    def _compare(self, row: int, written: Float[Tensor, "pos d_model"], name: str) -> None:
        """Compare what arrives after the MLP with what is written."""
        change = self.mlp.change(row) * self.adapter.write_factor
        self.errors.append(relative_error(change, written, self.mlp.rows))
        if written.any():
            ratio = (change * written).sum() / (written * written).sum()
            self.factors[name] = as_constant(float(ratio) * getattr(self.adapter, name)) or 1.0  # 0: it writes nothing

    def _error_of_up(self) -> float:
        if self.up.rows.shape[-1] != self.post.rows.shape[-1] * (1 + self.adapter.fused_gate_up):
            return math.inf
        post, change = self.post.rows[0], self.post.change(_SCALED)
        is_gated = self.target.is_gated(self.layer)
        if not self.up.rows[0].any() or (is_gated and not post.any()):  # weights of zero
            return 0.0
        expected_change = (post * (_FACTOR - 1) if is_gated else change).clone()
        expected_change[:, 1::2] = 0
        return relative_error(change, expected_change, post if is_gated else None)

    def _recompute(self, module: nn.Module, args: Args, kwargs: Kwargs, output: Any) -> None:
        """Compare what experts give with what they must give according to their layout."""
        experts = experts_of(module)
        if experts is not None:
            by_token = self.experts.by_row
            actual = by_token(first_tensor(output))[:, :-1].float()
            try:
                computed = by_token(experts.output(experts.routed(args, kwargs)))[:, :-1].float()
            except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
                self.errors.append(math.inf)  # they compute something else than an MLP each
            else:
                if actual.any():
                    self.errors.append(relative_error(actual, computed, actual))

    def _move(self, post: Float[Tensor, "row pos neuron"]) -> None:
        # By the norm of the whole vector, so that rounding does not hide the move.
        post[_MOVED, :, self.neuron] += post[0].float().norm(dim=-1).clamp(min=1).to(post.dtype)

    def _scale_up(self, up: Float[Tensor, "row pos output"]) -> None:
        first = self.target.width(self.layer) if self.adapter.fused_gate_up else 0
        up[_SCALED, :, first::2] *= _FACTOR

    def _turn(self, output: Float[Tensor, "row pos d_model"]) -> None:
        output[_EXPERTS] = output[_EXPERTS].roll(1, -1)  # a change of size would be invisible after a norm


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
    """Records what passes the modules of one layer, and says which sites cannot be proved.

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
            if adapter.qkv_layout is not None and which not in target.paths[layer]:
                part = "fused_qkv"
            hooks += on_part(part, "post", on_hidden(partial(self._turn, which)))
        hooks += on_part("o", "pre", on_input(self.heads.keep))
        hooks += on_part("o", "post", on_hidden(self.projected.keep))
        replaced = on_hidden(self.attn.edited(partial(self._replace, rows=1)))
        writer = "attn_out" if "attn_out" in target.paths[layer] else "attn"
        hooks += on_part(writer, "post", on_hidden(self.own_attn.keep), replaced)
        hooks += self.edits.hooks()
        replaced = on_hidden(self._replace_mlp)
        behind = on_part("post_mlp_norm", "post", replaced)
        if layer in target.with_neurons:
            hooks += behind or [(writer, "post", replaced) for writer in mlp_writers(target, layer)]
        hooks += on_part("mid", "pre", on_input(self.mid.keep))
        return [*hooks, (target.layers[layer], "post", on_hidden(self._finish))]

    def _replace(self, values: RowValues, rows: int) -> None:
        """Put random numbers in the place of what passes, of each row or the same ones of all."""
        values[:] = torch.randn(rows, *values.shape[1:], generator=self._generator).to(values)

    def _replace_entering(self, values: RowValues) -> None:
        self._replace(values, 1)
        values[:, -1] *= _LARGE

    def _replace_mlp(self, output: Tensor) -> Tensor:
        before = self.mlp.rows
        replaced = self.mlp.edited(partial(self._replace, rows=PASS_ROWS))(output)
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
        for which, part in (("q", call.query), ("k", call.key), ("v", call.value)):
            heads, width = self._turned.get(which, (1, 0))
            if part.shape[1] % heads or part.shape[3] != width:
                continue
            change = (part[_TURNED[which]] - part[0]).detach().float().abs().amax((1, 2))
            largest = part.float().abs().max()
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
        changes = (rows[1:] - rows[:1]).abs().amax(-1)[..., :-1]  # the last token attends to itself alone
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
        """Whether numbers change in exactly these places."""
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

    def _finish(self, output: Tensor) -> None:
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
            solution = torch.linalg.lstsq(columns, total[:, :-1].reshape(-1, 1).cpu().double()).solution
            for name, constant in zip(ran, solution[:, 0].tolist(), strict=True):
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
                projected = first_tensor(writer.forward(self.projected.rows.to(self.target.dtype))).float()
                off = self._off(self.own_attn.rows, projected)
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
