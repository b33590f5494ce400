"""Prove by one pass over a few tokens that the parts of a model are where an adapter says.

1. What passes the modules of the first layer of each kind is kept, with gradients inside the layer.
2. The sums of the layer must hold: of the residual stream, and of what its MLP gives.
3. Each head of what attention reads must depend on that head of what a projection gives, and what the output
   projection reads on the heads of the attention, one by one. An MLP with a gate must be linear in `up`.
4. Attention and experts are computed again.

The proof runs on a small random model of the class, where nothing is alike by chance, and on the user's own model,
whose modules may have been replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.engine.attention import Attention
from sinkscope.engine.stock import eager
from sinkscope.engine.tap import Listener, tapped
from sinkscope.errors import UnsupportedError, first_line
from sinkscope.models.adapters import NotInferredError
from sinkscope.models.grouped_heads import head_projection, per_query_head
from sinkscope.models.hooks import Args, Hook, Kwargs, first_tensor, hidden_of, on_hidden, with_hidden
from sinkscope.models.target import Target, longest_context
from sinkscope.models.windows import ChunkWindow, layer_window

TOKENS = 20
"""Tokens of the text of a proof: more than every window and chunk of a small model."""
EXACT = 1e-3
"""Largest relative distance between two ways to one number, in float32."""
LATER = "later tokens"
"""What no layer of a causal model attends to."""
_IN_HALF = 4  # times the relative rounding of a number
_LOOSE = 4  # times the distance of sums, of what is computed again
_ONE = 5e-3  # largest distance of a measured constant from 1 that rounding explains
_MOST = 0.5  # least share of a head in all on which another depends; a norm over all heads mixes in a few per cent
_ATTENDED = {"q": "query", "k": "key", "v": "value"}

Paths = Mapping[str, Any]
"""Where a layer has its parts, by the fields of an adapter; None or nothing where it has none."""


# -- what passes -------------------------------------------------------------------------------------------------------


class Record:
    """What passes modules of one layer in one pass, and its attention.

    Args:
        target: The model.
        layer: Number of the layer.
        paths: The modules; None is all.

    Attributes:
        hooks: The hooks that keep it. Modules get copies, because some models add to a tensor in place.
        arguments: The arguments of each module, by path.
        into: The first tensor that entered each.
        output: What each gave.
        calls: What attention got.
        given: What attention gave, and the first call.
        rows: Rows of attention that was computed again.
    """

    def __init__(self, target: Target, layer: int, paths: Iterable[str] | None = None) -> None:
        self.layer = layer
        self.modules = dict(target.layers[layer].named_modules())
        self.hooks = list[Hook]()
        for path in {"", *(self.modules if paths is None else paths)}:
            module = target.layers[layer].get_submodule(path)
            self.hooks.append((module, "pre", partial(self._enter, path)))
            self.hooks.append((module, "post", partial(self._leave, path)))
        self.arguments: dict[str, tuple[Args, Kwargs]] = {}
        self.into, self.output = dict[str, Tensor](), dict[str, Any]()
        self.calls = list[Attention]()
        self.given: Tensor | None = None
        self.rows = list[Tensor]()

    def _enter(self, path: str, _module: Any, args: Args, kwargs: Kwargs) -> Any:
        self.arguments[path] = args, kwargs
        for value in (*args, *kwargs.values())[:1]:
            if isinstance(value, Tensor):
                self.into[path] = value.clone()
        if path:
            return None
        if path in self.output:
            raise NotInferredError(f"layer {self.layer} runs several times in a pass")
        torch.set_grad_enabled(True)
        self.into[path] = hidden_of(args, kwargs).detach().requires_grad_()
        return with_hidden(args, kwargs, self.into[path].clone())

    def _leave(self, path: str, _module: Any, _args: Any, _kwargs: Any, output: Any) -> Any:
        torch.set_grad_enabled(bool(path))
        self.output[path] = output
        return on_hidden(Tensor.clone)(None, (), {}, output) if isinstance(first_tensor(output), Tensor) else None

    def out(self, path: str | None) -> Any:
        """Return the first tensor that left a module; None if there is no such module, or it did not run."""
        return first_tensor(self.output.get(path)) if path else None

    def numbers(self, tensor: Any) -> Any:
        """Return the numbers [pos width] of a tensor, which OPT and experts have without a dimension for texts."""
        length = self.into[""].shape[-2]
        if not isinstance(tensor, Tensor) or tensor.ndim < 2 or tensor.numel() % length:
            return None
        return tensor.detach().float().reshape(length, -1)

    def entered(self, path: str | None) -> Any:
        """Return the numbers that entered a module; as for `out`."""
        return self.numbers(self.into.get(path) if path else None)

    def left(self, path: str | None) -> Any:
        """Return the numbers that left a module; as for `out`."""
        return self.numbers(self.out(path))


def text_of(target: Target) -> Int[Tensor, "1 pos"]:
    """Return the tokens of the text, always the same ones."""
    length = min(TOKENS, longest_context(target.config) or TOKENS)
    return ((torch.arange(length) + length) % int(target.config.vocab_size))[None]


def read(target: Target, records: Mapping[int, Record]) -> None:
    """Run a pass over some tokens, which ends at the last layer of the records, by layer.

    Raises:
        NotInferredError: A layer does not run, or not once.
    """

    def see(call: Attention) -> None:
        record = records.get(call.layer)
        if record is None:
            return
        if record.calls and not call.is_repeated:
            raise NotInferredError(f"layer {call.layer} computes attention twice")
        record.calls.append(call)
        if not call.is_repeated:
            record.given = output = call.stock(call.mask)[0]
            ahead = _dependence(output[:, 0], call.value)
            if ahead is not None and ahead[:, :, 1:].any():
                raise NotInferredError(f"layer {call.layer} attends to {LATER}")
            call.show(lambda rows: record.rows.append(rows.probs.detach().float()), gives_output=False)
            call.compute = lambda _: (output.clone(), None)

    tap: Any = nullcontext()
    if not _is_bridge(target):
        tap = tapped(target, Listener(see)) if target.adapter.attention_interface else eager(target)
    hooks = [hook for record in records.values() for hook in record.hooks]
    with torch.inference_mode(False), tap, target.hooks(*hooks):
        target.forward(text_of(target), last_layer=max(records))
    for layer, record in records.items():
        if "" not in record.into:
            raise NotInferredError(f"layer {layer} does not run in a pass over text")
        if record.into[""].shape[2:] != (target.d_model,):
            raise NotInferredError(f"its layers do not get one residual stream of width {target.d_model}")


def _is_bridge(target: Target) -> bool:
    """Whether it is a bridge, which computes attention itself."""
    return any(hasattr(target.sub(layer, "attn"), "original_component") for layer in target.attending[:1])


# -- sums --------------------------------------------------------------------------------------------------------------


@dataclass
class Sum:
    """Parts that add up to a total, each times a factor.

    Attributes:
        name: What the total is.
        total: The total.
        parts: The parts, by the field of an adapter that has the factor; None if one did not pass.
        start: What the parts are added to; None: nothing.
    """

    name: str
    total: Any
    parts: dict[str, Any]
    start: Any = None

    def off(self, factors: Mapping[str, Any]) -> float:
        """Return the largest distance from the sum, relative to the largest number in it, of any token."""
        if self.total is None:
            return float("inf")
        error, size = self.total, self.total.abs().amax(-1)
        added = [] if self.start is None else [self.start]
        for name, part in self.parts.items():
            if part is None or part.shape != error.shape:
                return float("inf")
            added.append(part * factors[name])
        for part in added:
            error = error - part
            size = torch.maximum(size, part.abs().amax(-1))
        off = (error.abs().amax(-1) / size).nan_to_num(torch.inf)
        return float(off.where(size > 0, 0).max())

    def fit(self) -> dict[str, float] | None:
        """Return the measured factors; None if the parts do not add up to the total, or one is none of it."""
        factors = dict.fromkeys(self.parts, 1.0)
        if not factors or self.off(factors) == float("inf"):
            return None
        wanted = self.total if self.start is None else self.total - self.start
        columns = torch.stack([part.double().flatten() for part in self.parts.values()], 1)
        solution = torch.linalg.lstsq(columns, wanted.double().flatten()[:, None]).solution[:, 0]
        for name, factor in zip(factors, solution.tolist(), strict=True):
            if abs(factor - 1) > _ONE:
                factors[name] = float(f"{factor:.4g}")
        is_sum = self.off(factors) <= EXACT and min(map(abs, factors.values())) >= _ONE
        return factors if is_sum else None


def residual_sums(record: Record, paths: Paths) -> list[Sum]:
    """Return the sums of the residual stream: up to between attention and MLP, and from there, or one of both."""
    start, end, mid = record.numbers(record.into[""]), record.numbers(first_tensor(record.output[""])), None
    attn = record.left(paths.get("attn_out") or paths.get("attn"))
    mlp = record.left(paths.get("post_mlp_norm") or paths.get("mlp"))
    if mlp is not None and paths.get("post_mlp_norm") is None and has_shared_beside(paths):
        mlp = mlp + record.left(paths["down"])
    before = {} if attn is None else {"attn_factor": attn}
    after = {} if mlp is None else {"write_factor": mlp}
    mid = record.entered(paths.get("mid"))
    if mid is None or mid.shape != start.shape:
        return [Sum("hook_resid_post", end, before | after, start)]
    return [Sum("hook_resid_mid", mid, before, start), Sum("hook_resid_post", end, after, mid)]


def has_shared_beside(paths: Paths) -> bool:
    """Return whether there is a shared expert beside the mixture, which is no part of it."""
    if paths.get("experts") is None or paths.get("down") is None:
        return False
    return not f"{paths['down']}.".startswith(f"{paths['mlp']}.".lstrip("."))


def mlp_sum(record: Record, paths: Paths) -> Sum:
    """Return what the MLP gives as the sum of what down projections and experts give."""
    total, down = record.left(paths.get("mlp")), record.left(paths.get("down"))
    if paths.get("experts") is None:
        return Sum("mlp", total, {"down_factor": down})
    parts = {"expert_factor": record.left(paths["experts"])}
    if down is not None and paths["mlp"] != paths["experts"] and not has_shared_beside(paths):
        gate = record.left(paths.get("shared_gate"))
        parts["shared_factor"] = down if gate is None else down * gate.sigmoid()
    return Sum("mlp", total, parts)


def relative_error(numbers: Tensor, expected: Tensor) -> float:
    """Return the largest distance from what is expected, relative to its size; infinity if nothing is."""
    off = (numbers - expected).detach().abs().max() / expected.detach().abs().max()
    return float(off.nan_to_num(torch.inf))


# -- comparing ---------------------------------------------------------------------------------------------------------


@dataclass
class Proof:
    """What a proof found.

    Attributes:
        problem: What is wrong. None if nothing is.
        unproved: Sites that cannot be proved, such as "blocks.3.attn.hook_z", and why.
    """

    problem: str | None = None
    unproved: dict[str, str] = field(default_factory=dict)


@torch.enable_grad()
def prove(target: Target, kinds: Sequence[int] | None = None, records: Mapping[int, Record] | None = None) -> Proof:
    """Prove the adapter of a model by one pass with plain hooks; the model is left as it was.

    Args:
        target: The model, with an adapter.
        kinds: For each layer, the number of the first one of its kind, for which it is proved. None: all are proved.
        records: What passed in the pass. None: it is run.

    Returns:
        What was found. A wrong adapter does not raise an error.
    """
    proof = Proof()
    kinds = range(target.n_layers) if kinds is None else kinds
    try:
        if records is None:
            records = {layer: Record(target, layer, target.paths[layer].values()) for layer in {*kinds}}
            read(target, records)
        found = {layer: _Comparison(target, records[layer]).problems for layer in {*kinds}}
        for layer, first in enumerate(kinds):
            proof.unproved |= {f"blocks.{layer}.{part}": reason for part, reason in found[first].items()}
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except (UnsupportedError, NotInferredError) as wrong:
        proof.problem = str(wrong)
    except Exception as error:  # a model may do anything in a pass
        proof.problem = f"a forward pass raised {type(error).__name__}: {first_line(error)}"
    return proof


def _dependence(numbers: Tensor, on: Tensor | None) -> Tensor | None:
    """How the sum of numbers depends on others; None if it does not."""
    if on is None or not on.requires_grad or not numbers.requires_grad:
        return None
    return torch.autograd.grad(numbers.sum(), on, retain_graph=True, allow_unused=True)[0]


def _is_by_head(parts: Sequence[Tensor], on: Tensor | None, split: Callable[[Tensor], Tensor]) -> bool:
    """Whether numbers of each head depend mostly on one head of others, in order; `split` gives [... head d_head]."""
    for number, part in enumerate(parts):
        change = _dependence(part, on)
        if change is None:
            return False
        heads = split(change.float())
        sizes = heads.square().flatten(0, -3).sum((0, 2))
        if heads.shape[-1] != part.shape[-1] or len(parts) % len(sizes):
            return False
        if not sizes[number * len(sizes) // len(parts)] > _MOST * sizes.sum():
            return False
    return True


def reads_heads(target: Target, record: Record, which: str, paths: Paths) -> bool:
    """Return whether the heads that attention reads depend on those of what a projection gives.

    Args:
        target: The model.
        record: What passed the layer.
        which: "q", "k" or "v".
        paths: Where the layer has its parts.
    """
    given = record.out(paths.get(which) or paths.get("fused_qkv"))
    with suppress(RuntimeError, ValueError):  # it cannot be split into heads
        for call in record.calls:
            if _is_by_head(getattr(call, _ATTENDED[which])[0], given, partial(head_projection, which, target)):
                return True
    return False


class _Comparison:
    """What passed one layer, compared with what an adapter says.

    Attributes:
        problems: Why sites cannot be proved, by the last part of their names.
    """

    def __init__(self, target: Target, record: Record) -> None:
        self.target, self.record, self.layer = target, record, record.layer
        self.paths, self.adapter = target.paths[record.layer], target.adapter
        self.problems = dict[str, str]()
        self._exact = max(EXACT, _IN_HALF * torch.finfo(target.dtype).eps)
        if self.layer in target.mixtures:
            self._check_experts()
        if "mlp" in self.paths:
            self._check_neurons()
        if self.layer in target.attending and not _is_bridge(target):
            for which in _ATTENDED:
                if not reads_heads(target, record, which, self.paths):
                    self.problems[f"attn.hook_{which}"] = "softmax attention is not seen to read its heads"
            rows = self._attention()
            if "o" in self.paths and not self._reads_heads(rows):
                self.problems["attn.hook_z"] = "the output projection does not read the heads side by side"
        self._check_residual()

    def _check_experts(self) -> None:
        """Experts give what their weights say."""
        path = self.paths["experts"]
        given = self.record.out(path)
        with self.target.loaded(self.layer):
            experts = self.target.experts(self.layer)
            computed = experts.output(experts.routed(*self.record.arguments[path])).view_as(given)
        if given.any() and not relative_error(given.float(), computed.float()) <= _LOOSE * self._exact:
            raise UnsupportedError("the experts do not give what their weights say")

    def _check_neurons(self) -> None:
        """What the MLP gives is what its down projections and experts give, by the factors of the adapter."""
        total = mlp_sum(self.record, self.paths)
        if "down" not in self.paths and "experts" not in self.paths:
            raise UnsupportedError("the adapter names a module that is not there (down or experts)")
        if total.total is None or not any(part is not None for part in total.parts.values()):
            self.problems["mlp.hook_post"] = "the modules of its MLP do not run"
        elif total.off(vars(self.adapter)) > self._exact or not self._is_linear():
            raise UnsupportedError("a moved neuron does not change the layer as the adapter says")

    def _is_linear(self) -> bool:
        """Whether neurons of a dense MLP have as many factors, and are linear in them if there is a gate."""
        up, post = self.record.out(self.paths.get("up")), self.record.into.get(self.paths.get("down", "."))
        if up is None or post is None or self.layer in self.target.mixtures:
            return True
        width, change = post.shape[-1], _dependence(post, up)
        if change is None or up.shape[-1] != (1 + self.adapter.fused_gate_up) * width:
            return False
        off = ((up * change)[..., -width:] - post).float().abs().max()
        return not self.target.is_gated(self.layer) or bool(off <= _LOOSE * self._exact * post.float().abs().max())

    def _attention(self) -> Tensor:
        """Attention that is computed again gives what the model's own gives; return its rows."""
        record, chunks = self.record, self.record.rows
        if not self.adapter.attention_interface:
            chunks = [rows.detach().float() for rows in record.output[self.paths["attn"]][1:2]]
        if not chunks:
            raise UnsupportedError(f"no attention was recomputed in layer {self.layer}")
        rows = torch.cat(chunks, 2)
        count = rows.shape[1]
        if count != self.target.n_heads:
            raise UnsupportedError(f"layer {self.layer} has {count} heads, and the configuration {self.target.n_heads}")
        if bool(rows.triu(1).any()):
            raise UnsupportedError(f"layer {self.layer} attends to {LATER}")
        window = layer_window(self.target.config, self.layer)
        if window is not None and not isinstance(window, ChunkWindow) and bool((rows.tril(-window) > 0).any()):
            self.problems["cache"] = "sees keys beyond the window of its configuration, which a cache drops"
        if record.given is not None and record.calls[0].own.is_known:  # else it is a function of the user's own
            values = per_query_head(record.calls[0].value.float(), count)
            if not relative_error((rows @ values).transpose(1, 2), record.given.float()) <= _LOOSE * self._exact:
                raise UnsupportedError("recomputed attention differs from the model's own")
        return rows

    def _reads_heads(self, rows: Tensor) -> bool:
        """Whether the output projection reads the heads side by side, by their dependence on heads or on values."""
        read, count = self.record.into.get(self.paths["o"]), self.target.n_heads
        if read is None:
            return True
        if read.shape[-1] % count:
            return False
        parts = read.unflatten(-1, (count, -1)).unbind(-2)
        if self.adapter.attention_interface:
            return _is_by_head(parts, self.record.given, lambda change: change)
        given = self.record.out(self.paths.get("v") or self.paths.get("fused_qkv"))
        for head, part in enumerate(parts):  # the first number of the last token is a sum of one of each token
            change = _dependence(part[..., -1, 0], given)
            if change is None:
                return False
            off = change.float().flatten(0, -2) - rows[0, head, -1, :, None]
            if not off.abs().amax(0).min() <= _LOOSE * self._exact:
                return False
        return True

    def _check_residual(self) -> None:
        """Each sum of the residual stream holds; a site without which it does not is refused."""
        for each in residual_sums(self.record, self.paths):
            is_whole = each.name == "hook_resid_post"
            if is_whole and not self.adapter.adds:
                continue
            if not is_whole and not each.parts:
                self.problems["hook_resid_mid"] = "nothing that is added before it is known"
                continue
            off = each.off(vars(self.adapter))
            if off <= self._exact:
                continue
            reason = f"{each.name} is not the sum of its parts (off by {off:.2g})"
            if "write_factor" in each.parts:
                raise UnsupportedError(f"what the MLP gives is not added as the adapter says: {reason}")
            for site in ["hook_attn_out"] if is_whole else ["hook_resid_mid", "hook_attn_out"]:
                self.problems.setdefault(site, reason)
