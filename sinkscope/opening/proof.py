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
from torch import Tensor, nn

from sinkscope.engine.attention import Attention, relative_error
from sinkscope.engine.tap import attention_rows, listening
from sinkscope.errors import UnsupportedError, first_line
from sinkscope.models.adapters import PATHS
from sinkscope.models.hooks import Args, Hook, Kwargs, first_tensor, on_hidden, on_input
from sinkscope.models.neurons import holds_shared, on_mlp
from sinkscope.models.target import Target
from sinkscope.opening.heads import ROWS, SCALED, HeadProof, RowValues, by_row, shows_attention
from sinkscope.opening.sample import TOKENS, token_ids

_FACTOR = -2.0  # of `up`; no gate follows it, be its activation odd, such as tanh, or linear above 0, such as ReLU
_EXACT = 1e-3  # largest relative distance between two ways to one number, in float32
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
        for check in checks.values():
            hooks += check.hooks()
        for layer in range(max(numbers)):
            if layer not in checks:  # a later one may read its keys and values
                hooks.append((target.layers[layer], "pre", on_input(_alike)))
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


def _alike(hidden: Tensor) -> Tensor:
    """What enters a layer, with that of the first row in every row, so that no edit of an earlier layer is seen."""
    rows = by_row(hidden)
    return rows[:1].expand_as(rows).clone().reshape(hidden.shape)


def _check_paths(target: Target) -> None:
    """Refuse an adapter that names a part that no layer has."""
    adapter = target.adapter
    for name in PATHS:
        path = getattr(adapter, name)
        is_optional = path is None or (adapter.experts is not None and name in ("down", "up", "gate"))
        if not is_optional and not any(name in paths for paths in target.paths):
            raise UnsupportedError(f"the adapter names a module that is not there ({path!r} in no layer)")


def _attention(target: Target, checks: dict[int, LayerProof]) -> AbstractContextManager[None]:
    """What shows the attention of a pass, where it can be told apart by layer."""
    if not shows_attention(target):
        return nullcontext()
    attending = [layer for layer in checks if layer in target.attending]
    if not target.adapter.attention_interface:
        return attention_rows(
            target, lambda layer, _, rows, __: checks[layer].heads.see_rows(rows), layers=attending, proving=True
        )

    def see(call: Attention) -> None:
        if call.layer in attending:
            checks[call.layer].heads.see(call)

    return listening(target, see, proving=True)


class LayerProof:
    """Records what passes the modules of one layer, and compares at its end.

    Attributes:
        problems: Why sites cannot be proved, by the last part of their names.
        ran: Whether the layer ran.
    """

    def __init__(self, target: Target, layer: int) -> None:
        self.target, self.layer = target, layer
        eps = torch.finfo(target.dtype).eps
        self._tolerance = max(_EXACT, _IN_HALF * eps)
        self._attended = max(_EXACT, _ATTENDED_IN_HALF * eps)
        self.problems = dict[str, str]()
        self.ran = False
        self._values: dict[str, RowValues] = {}  # of each part that ran, in float32
        self.heads = HeadProof(target, layer, self.problems, exact=self._tolerance, attended=self._attended)

    def hooks(self) -> list[Hook]:
        """Return hooks that edit, record, and compare at the end of the layer."""
        target, layer, paths = self.target, self.layer, self.target.paths[self.layer]
        on_part = partial(target.part_hooks, layer)
        hooks: list[Hook] = [(target.layers[layer], "pre", on_input(self._enter))]
        hooks += self.heads.hooks()
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

    def _keeping(self, part: str) -> Callable[[Tensor], None]:
        """A function that keeps a copy of what passes; some models add to it in place."""

        def keep(tensor: Tensor) -> None:
            self._values[part] = by_row(tensor.detach()).float().clone()

        return keep

    def _enter(self, hidden: Tensor) -> Tensor:
        """Let the same enter in every row, and keep it."""
        if self.ran:
            raise UnsupportedError(f"layer {self.layer} runs several times in a pass")
        self.ran = True
        same = _alike(hidden)
        self._keeping("pre")(same)
        return same

    def _scale_up(self, up: Tensor) -> Tensor:
        rows = by_row(up).clone()
        first = rows.shape[-1] // 2 if self.target.adapter.fused_gate_up else 0
        rows[SCALED, :, first::2] *= _FACTOR
        self._keeping("up")(rows)
        return rows.reshape(up.shape)

    def _recompute(self, module: nn.Module, args: Args, kwargs: Kwargs, output: Any) -> None:
        """Compare what experts give with what their weights say."""
        given = by_row(first_tensor(output)).float()
        self._values["experts"] = given.clone()
        experts = self.target.experts(self.layer)
        try:
            computed = by_row(experts.output(experts.routed(args, kwargs))).float()
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            raise UnsupportedError("the experts compute something else than an MLP each") from None
        if given.any() and not relative_error(given, computed) <= self._attended:
            raise UnsupportedError("the experts do not give what their weights say")

    # -- sums ----------------------------------------------------------------------------------------------------------

    def _finish(self, output: Tensor) -> None:
        """Compare at the end of the layer."""
        self._keeping("end")(output)
        if self.layer in self.target.with_neurons:
            self._prove_neurons()
        self.heads.finish()
        self._prove_residual()
        self._prove_projection()
        if self.target.adapter.adds and "hook_mlp_out" in self.problems:
            reason = self.problems["hook_mlp_out"]
            raise UnsupportedError(f"what the MLP gives is not added as the adapter says: {reason}")
        self._values.clear()
        del self.heads

    def _prove_neurons(self) -> None:
        """What the MLP gives is what its down projections and experts give, by the factors of the adapter."""
        values, adapter = self._values, self.target.adapter
        if "mlp" not in values or ("down" not in values and "experts" not in values):
            self.problems["mlp.hook_post"] = "the modules of its MLP do not run"
            return
        written = torch.zeros_like(values["mlp"])
        if "experts" in values:
            written = written + adapter.expert_factor * values["experts"]
        if "down" in values and not holds_shared(self.target, self.layer):
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
        change = post[SCALED] - post[0]
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
        if off > self._tolerance and "attn_out" in self.target.paths[self.layer]:
            norm: Any = self.target.sub(self.layer, "attn_out")
            with self.target.loaded(self.layer), suppress(Exception):  # it may be no norm
                off = self._off(attn, first_tensor(norm.forward(projected.to(self.target.dtype))).float())
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
