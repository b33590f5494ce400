"""Prove in one pass over a few tokens that the parts of a model are where an adapter says.

1. The same enters a layer in all rows of the batch. In some of them one thing is edited: the numbers of one head of the
   queries, keys or values change places; attention gives random numbers in one head and zeros in the others; every
   second output of `up` is multiplied.
2. In every row, the sums of the layer must hold: of the residual stream, and of what its MLP gives.
3. Exactly the turned head of what attention reads must change, and of what the output projection reads exactly the
   part of the head with random numbers. After the edit of `up`, exactly every second neuron must change.
4. Attention and experts are computed again.

The proof runs on a small random model of the class, where nothing is alike by chance, and on the user's own model,
whose modules may have been replaced.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from sinkscope.engine.attention import Attention
from sinkscope.engine.stock import eager
from sinkscope.engine.tap import Listener, tapped
from sinkscope.errors import UnsupportedError, first_line
from sinkscope.models.adapters import PATHS, NotInferredError
from sinkscope.models.grouped_heads import head_projection, per_query_head
from sinkscope.models.hooks import Args, Hook, Kwargs, first_tensor, on_hidden, on_input
from sinkscope.models.target import Target
from sinkscope.models.windows import ChunkWindow, layer_window, misnumbered
from sinkscope.opening.sums import EXACT, ROWS, Values, alike, by_row, mlp_sum, read, relative_error, residual_sums

_TURNED, _NOISE, _SCALED = {"q": 1, "k": 2, "v": 3}, 4, 5  # rows
_HEAD = 1  # the edited head, if a layer has two or more
_TOKEN = 2  # the one whose numbers are turned
_FACTOR = -2.0  # of `up`; no gate follows it, be its activation odd, such as tanh, or linear above 0, such as ReLU
_IN_HALF, _ATTENDED_IN_HALF = 4, 16  # times the relative rounding of a number, in half precision


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
        for layer in range(max(numbers) + 1):
            hooks.append((target.layers[layer], "pre", on_input(alike)))  # a later one may read its keys and values
            if layer in checks:
                hooks += checks[layer].hooks()
        read(target, hooks, max(numbers), _tap(target, checks))
        for check in checks.values():
            if not check.values.ran:
                raise UnsupportedError(f"layer {check.layer} does not run in a pass over text")
            if check.problems:
                proof.unproved[check.layer] = check.problems
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except (UnsupportedError, NotInferredError) as wrong:
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


def _tap(target: Target, checks: dict[int, LayerProof]) -> AbstractContextManager[Any]:
    """What shows the attention of a pass, where it can be told apart by layer."""
    if not _shows_attention(target):
        return nullcontext()
    if not target.adapter.attention_interface:
        return eager(target)

    def see(call: Attention) -> None:
        if call.layer in checks and call.layer in target.attending:
            checks[call.layer].see(call)

    return tapped(target, Listener(see))


class LayerProof:
    """Edits and keeps what passes the modules of one layer, and compares at its end.

    Attributes:
        problems: Why sites cannot be proved, by the last part of their names.
        values: What passed.
    """

    def __init__(self, target: Target, layer: int) -> None:
        self.target, self.layer = target, layer
        self.problems = dict[str, str]()
        self.values = Values(layer, target.paths[layer])
        eps = torch.finfo(target.dtype).eps
        self._tolerance = max(EXACT, _IN_HALF * eps)
        self._attended = max(EXACT, _ATTENDED_IN_HALF * eps)
        self._attends = layer in target.attending and _shows_attention(target)
        self._chunks = list[Tensor]()  # rows of attention
        self._heads = dict[str, torch.Size]()  # how many heads a turned site has, and how wide
        self._own: Tensor | None = None  # what attention gives by itself
        self._value: Tensor | None = None

    def hooks(self) -> list[Hook]:
        """Return hooks that edit, keep, and compare at the end of the layer."""
        target, layer, paths = self.target, self.layer, self.values.paths
        on_part = partial(target.part_hooks, layer)
        hooks = list[Hook]()
        for which in _TURNED if self._attends else ():
            self.problems[f"attn.hook_{which}"] = "softmax attention is not seen to read the heads that are there"
            part = which
            if which not in paths and target.adapter.qkv_layout is not None:
                part = "fused_qkv"
            if target.adapter.attention_interface:
                hooks += on_part(part, "post", on_hidden(partial(self._turn, which)))
        if layer in target.mixtures:
            hooks += on_part("experts", "post", self._recompute)
        elif layer in target.with_neurons:
            hooks += on_part("up", "post", on_hidden(self._scale_up))
        hooks += self.values.hooks(target.layers[layer], paths.values())
        hooks.append((target.layers[layer], "post", on_hidden(self._finish)))
        return hooks

    # -- edits ---------------------------------------------------------------------------------------------------------

    def _turn(self, which: str, tensor: Tensor) -> Tensor:
        """Let the numbers of one head change places."""
        turned = tensor.clone()
        try:
            heads = head_projection(which, self.target, turned.view(ROWS, -1, turned.shape[-1]))
        except Exception:  # it cannot be split into heads
            return tensor
        self._heads[which] = heads.shape[2:]
        head = heads[_TURNED[which], _TOKEN, _HEAD % heads.shape[2]]
        rolled = head.roll(1, -1)
        if torch.equal(rolled, head):  # a head of zeros
            del self.problems[f"attn.hook_{which}"]
        head.copy_(rolled)
        return turned

    def _scale_up(self, up: Tensor) -> Tensor:
        rows = by_row(up).clone()
        first = 0
        if self.target.adapter.fused_gate_up:
            first = rows.shape[-1] // 2
        rows[_SCALED, :, first::2] *= _FACTOR
        return rows.reshape(up.shape)

    def _recompute(self, _module: nn.Module, args: Args, kwargs: Kwargs, output: Any) -> None:
        """Compare what experts give with what their weights say."""
        experts = self.target.experts(self.layer)
        given = first_tensor(output)
        try:
            computed = experts.output(experts.routed(args, kwargs)).view_as(given)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            raise UnsupportedError("the experts compute something else than an MLP each") from None
        if given.any() and not relative_error(given.float(), computed.float()) <= self._attended:
            raise UnsupportedError("the experts do not give what their weights say")

    def see(self, call: Attention) -> None:
        """Compare what attention gets; let it give random numbers in one head of one row."""
        self._compare("q", call.query)
        self._compare("k", call.key)
        self._compare("v", call.value)
        if call.is_repeated:
            return
        output = call.stock(call.mask)[0]
        if call.own.is_known:  # a function of the user's own has no part in the proof
            self._own = output.detach().float()
        self._value = call.value.detach().float()
        call.show(lambda rows: self._chunks.append(rows.probs), gives_output=False)
        generator = torch.Generator().manual_seed(self.layer)
        noise = torch.randn(len(output[0]), output.shape[-1], generator=generator)
        noise -= noise.mean(-1, keepdim=True)  # as norms do
        changed = output.clone()
        changed[_NOISE] = 0
        changed[_NOISE, :, _HEAD % output.shape[2]] = noise.to(output)
        call.compute = lambda _: (changed, None)

    def _compare(self, which: str, part: Tensor) -> None:
        """Prove a site if exactly those heads of what attention gets change that read the turned one."""
        heads, width = self._heads.get(which, (1, 0))
        count = part.shape[1]
        if count % heads or part.shape[3] != width:
            return
        change = (part[_TURNED[which]] - part[0]).detach().float()
        change = change.abs().amax((1, 2)).cpu()
        reading = torch.arange(count) * heads // count == _HEAD % heads
        least = self._tolerance * part.abs().max().float().cpu()
        if bool((change[reading] > 0).all()) and bool((change[~reading] <= least).all()):
            self.problems.pop(f"attn.hook_{which}", None)

    # -- comparing -----------------------------------------------------------------------------------------------------

    def _finish(self, _output: Tensor) -> None:
        """Compare at the end of the layer."""
        if self.layer in self.target.with_neurons:
            self._prove_neurons()
        if self._attends:
            rows = self._prove_attention()
            self._prove_heads(rows)
        self._prove_residual()
        self.values.kept.clear()
        self._chunks.clear()
        self._own = self._value = None

    def _prove_neurons(self) -> None:
        """What the MLP gives is what its down projections and experts give, by the factors of the adapter."""
        total = mlp_sum(self.values)
        there = [part for part in total.parts.values() if part is not None]
        if total.total is None or not there:
            self.problems["mlp.hook_post"] = "the modules of its MLP do not run"
        elif total.off(self.target.adapter) > self._tolerance or not self._scaled_up():
            raise UnsupportedError("a moved neuron does not change the layer as the adapter says")

    def _scaled_up(self) -> bool:
        """Whether exactly every second neuron has changed with `up`, and by the same factor if there is a gate."""
        up, post = self.values.left("up"), self.values.entered("down")
        if up is None or post is None or self.layer in self.target.mixtures:
            return True
        halves = 1 + self.target.adapter.fused_gate_up
        if up.shape[-1] != halves * post.shape[-1]:
            return False
        if not up[0].any() or not post.any():  # weights of zero
            return True
        change = post[_SCALED] - post[0]
        expected = change.clone()
        if self.target.is_gated(self.layer):
            expected = post[0] * (_FACTOR - 1)
        expected[:, 1::2] = 0
        size = torch.maximum(post[0].abs().max(), change.abs().max())
        error = (change - expected).abs().max()
        return bool(error <= self._attended * size)

    def _prove_attention(self) -> Tensor:
        """Attention that is computed again gives what the model's own gives; return its rows."""
        target, layer = self.target, self.layer
        returned = self.values.kept.get((self.values.paths["attn"], "rows"))
        if returned is not None and not target.adapter.attention_interface:
            self._chunks.append(returned)
        if not self._chunks:
            raise UnsupportedError(f"no attention was recomputed in layer {layer}")
        rows = torch.cat(self._chunks, 2)
        count = rows.shape[1]
        if count != target.n_heads:
            raise UnsupportedError(f"layer {layer} has {count} heads, and the configuration {target.n_heads}")
        if rows.shape[-2] != rows.shape[-1]:
            raise UnsupportedError(f"recomputed attention has shape {tuple(rows.shape)}")
        if bool((rows.triu(1) > 0).any()):
            raise UnsupportedError(f"the attention of layer {layer} sees later tokens")
        window = layer_window(target.config, layer)
        if window is not None and not isinstance(window, ChunkWindow):
            beyond = rows.tril(-window)
            if bool((beyond > 0).any()):
                self.problems["cache"] = "sees keys beyond the window of its configuration, which a cache drops"
        if self._own is None or self._value is None:
            off = (rows.sum(-1) - 1).abs().max()
        else:
            weighted = rows.float() @ per_query_head(self._value, count)
            off = relative_error(weighted.transpose(1, 2), self._own)
        if not off <= self._attended:
            raise UnsupportedError("recomputed attention differs from the model's own")
        return rows

    def _prove_heads(self, rows: Tensor) -> None:
        """The output projection reads its heads side by side."""
        given, count = self.values.entered("o"), self.target.n_heads
        if given is None:
            return
        is_beside = given.shape[-1] % count == 0
        if is_beside:
            heads = rearrange(given, "row pos (head d_head) -> row head pos d_head", head=count)
            if self.target.adapter.attention_interface:
                moved = (heads[_NOISE] - heads[_NOISE, :, :1]).abs().amax((1, 2))
                is_beside = bool(moved.sum() <= (1 + self._tolerance) * moved[_HEAD % count])
            else:
                is_beside = self._holds_values(rows, heads)
        if not is_beside:
            self.problems["attn.hook_z"] = "the output projection does not read the heads side by side"

    def _holds_values(self, rows: Tensor, heads: Tensor) -> bool:
        """Whether heads are values that some projection gives, weighted by the rows."""
        width = heads.shape[-1]
        given = self.values.left("v", "fused_qkv")
        if given is None or given.shape[-1] < width:
            return False
        pieces = given.unfold(-1, width, 1)  # [row pos place d_head]
        first = heads[0, :, 0]  # the first token reads itself alone
        place = torch.cdist(first, pieces[0, 0]).argmin(-1)
        values = pieces[:, :, place].transpose(1, 2)
        return relative_error(rows @ values, heads) <= self._attended

    def _prove_residual(self) -> None:
        """Each sum of the residual stream holds; a site without which it does not is refused."""
        adapter = self.target.adapter
        for each in residual_sums(self.values):
            off = each.off(adapter)
            reason = f"{each.name} is not the sum of its parts (off by {off:.2g})"
            sites = ["hook_resid_mid", "hook_attn_out"]
            if each.name == "hook_resid_post":
                if not adapter.adds:
                    continue
                sites = ["hook_attn_out"]
            elif not each.parts:
                self.problems["hook_resid_mid"] = "nothing that is added before it is known"
                continue
            if off <= self._tolerance:
                continue
            if "write_factor" in each.parts:
                raise UnsupportedError(f"what the MLP gives is not added as the adapter says: {reason}")
            for site in sites:
                self.problems.setdefault(site, reason)
