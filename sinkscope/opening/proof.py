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
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.engine.attention import Attention
from sinkscope.engine.stock import eager
from sinkscope.engine.tap import Listener, tapped
from sinkscope.errors import UnsupportedError, first_line
from sinkscope.models.adapters import NotInferredError
from sinkscope.models.hooks import Args, Hook, Kwargs, first_tensor, hidden_of, on_hidden, with_hidden
from sinkscope.models.layers import ChunkWindow, head_projection, layer_window, per_query_head
from sinkscope.models.target import Target, has_shared_beside, longest_context

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

Numbers = Float[Tensor, "pos d_model"]
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
        call: What attention got, at first if it attends to other values as well.
        given: What attention gave.
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
        self.into: dict[Any, Tensor] = {}
        self.output: dict[Any, Any] = {}
        self.call: Attention | None = None
        self.given: Any = None
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
        hidden = hidden_of(args, kwargs).detach().requires_grad_()
        self.into[path] = hidden
        return with_hidden(args, kwargs, hidden.clone())

    def _leave(self, path: str, module: Any, args: Args, kwargs: Kwargs, output: Any) -> Any:
        torch.set_grad_enabled(bool(path))
        self.output[path] = output
        if not isinstance(first_tensor(output), Tensor):
            return None
        return on_hidden(Tensor.clone)(module, args, kwargs, output)

    def numbers(self, tensor: Any) -> Any:
        """Return the numbers [pos d_model] of a tensor that is as large as the residual stream; None of others."""
        stream = self.into[""]
        if not isinstance(tensor, Tensor) or tensor.numel() != stream.numel():
            return None
        return tensor.detach().float().reshape(stream.shape[1:])

    def entered(self, path: Any) -> Any:
        """Return the numbers that entered a module; None if there is no such module, or it did not run."""
        return self.numbers(self.into.get(path))

    def left(self, path: Any) -> Any:
        """Return the numbers that left a module; as for `entered`."""
        return self.numbers(first_tensor(self.output.get(path)))


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
        if record is None or call.is_repeated:
            return
        if record.call is not None:
            raise NotInferredError(f"layer {call.layer} computes attention twice")
        output = call.stock(call.mask)[0]
        ahead = _dependence(output[:, 0], call.value)
        if ahead is not None and ahead[:, :, 1:].any():
            raise NotInferredError(f"layer {call.layer} attends to {LATER}")
        record.call, record.given = call, output
        call.show(lambda rows: record.rows.append(rows.probs.detach().float()), at_once=True)
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
        parts: The parts, by the field of an adapter that has the factor.
        start: What the parts are added to.
    """

    name: str
    total: Numbers
    parts: dict[str, Any]
    start: Numbers

    def off(self, factors: Mapping[str, Any]) -> float:
        """Return the largest distance from the sum, relative to the largest number in it, of any token."""
        error, added = self.total, [self.start, *(part * factors[name] for name, part in self.parts.items())]
        for part in added:
            error = error - part
        largest = torch.stack([self.total, *added]).abs().amax((0, -1))
        off = (error.abs().amax(-1) / largest).nan_to_num(torch.inf)
        return float(off.where(largest > 0, 0).max())

    def fit(self) -> dict[str, float] | None:
        """Return the measured factors; None if the parts do not add up to the total, or one is none of it."""
        if not self.parts:
            return None
        columns = torch.stack([part.double().flatten() for part in self.parts.values()], 1)
        wanted = (self.total - self.start).double().flatten()
        solution = torch.linalg.lstsq(columns, wanted[:, None]).solution[:, 0]
        factors = dict[str, float]()
        for name, factor in zip(self.parts, solution.tolist(), strict=True):
            if abs(factor) < _ONE:
                return None
            factors[name] = 1.0
            if abs(factor - 1) > _ONE:
                factors[name] = float(f"{factor:.4g}")
        return factors if self.off(factors) <= EXACT else None


def residual_sums(record: Record, paths: Paths) -> list[Sum]:
    """Return the sums of the residual stream: up to between attention and MLP, and from there, or one of both."""
    before, after = dict[str, Any](), dict[str, Any]()
    attn = record.left(paths.get("attn_out") or paths.get("attn"))
    if attn is not None:
        before["attn_factor"] = attn
    mlp = record.left(paths.get("post_mlp_norm") or paths.get("mlp"))
    if mlp is not None:
        after["write_factor"] = mlp
        if paths.get("post_mlp_norm") is None and has_shared_beside(paths):
            after["write_factor"] = mlp + record.left(paths["down"])
    start, mid, end = record.entered(""), record.entered(paths.get("mid")), record.left("")
    if mid is None:
        return [Sum("hook_resid_post", end, before | after, start)]
    return [Sum("hook_resid_mid", mid, before, start), Sum("hook_resid_post", end, after, mid)]


def mlp_sum(record: Record, paths: Paths) -> Sum | None:
    """Return what the MLP gives as the sum of what down projections and experts give; None if they do not run."""
    total, down, experts = [record.left(paths.get(part)) for part in ("mlp", "down", "experts")]
    if total is None or (down is None and experts is None):
        return None
    parts = {"down_factor": down} if experts is None else {"expert_factor": experts}
    if experts is not None and down is not None and paths["mlp"] != paths["experts"] and not has_shared_beside(paths):
        parts["shared_factor"] = down
        gate = first_tensor(record.output.get(paths.get("shared_gate")))
        if gate is not None:
            parts["shared_factor"] = down * gate.detach().float().reshape(-1, 1).sigmoid()
    return Sum("mlp", total, parts, torch.zeros_like(total))


def relative_error(numbers: Tensor, expected: Tensor) -> float:
    """Return the largest distance from what is expected, relative to its size; infinity if nothing is."""
    off = (numbers - expected).detach().abs().max() / expected.detach().abs().max()
    return float(off.nan_to_num(torch.inf))


# -- comparing ---------------------------------------------------------------------------------------------------------


@torch.enable_grad()
def prove(
    target: Target, kinds: Sequence[int] | None = None, records: Mapping[int, Record] | None = None
) -> dict[str, str]:
    """Prove the adapter of a model by one pass with plain hooks; the model is left as it was.

    Args:
        target: The model, with an adapter.
        kinds: For each layer, the number of the first one of its kind, for which it is proved. None: all are proved.
        records: What passed in the pass. None: it is run.

    Returns:
        Sites that cannot be proved, such as "blocks.3.attn.hook_z", and why.

    Raises:
        NotInferredError: The adapter is wrong.
    """
    kinds = range(target.n_layers) if kinds is None else kinds
    try:
        if records is None:
            records = {layer: Record(target, layer, target.paths[layer].values()) for layer in {*kinds}}
            read(target, records)
        found = {layer: _problems(target, records[layer]) for layer in {*kinds}}
    except (MemoryError, torch.OutOfMemoryError, NotInferredError):
        raise
    except UnsupportedError as wrong:
        raise NotInferredError(str(wrong)) from None
    except Exception as error:  # a model may do anything in a pass
        raise NotInferredError(f"a forward pass raised {type(error).__name__}: {first_line(error)}") from None
    unproved = dict[str, str]()
    for layer, first in enumerate(kinds):
        unproved |= {f"blocks.{layer}.{part}": reason for part, reason in found[first].items()}
    return unproved


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
    if record.call is None:
        return False
    given = first_tensor(record.output.get(paths.get(which) or paths.get("fused_qkv")))
    with suppress(RuntimeError, ValueError):  # it cannot be split into heads
        return _is_by_head(getattr(record.call, _ATTENDED[which])[0], given, partial(head_projection, which, target))
    return False


def _problems(target: Target, record: Record) -> dict[str, str]:
    """Why sites of a layer cannot be proved, by the last part of their names.

    Raises:
        UnsupportedError: The adapter is wrong.
    """
    problems, layer, paths = dict[str, str](), record.layer, target.paths[record.layer]
    if layer in target.mixtures:
        _check_experts(target, record)
    if "mlp" in paths and not _neurons_run(target, record):
        problems["mlp.hook_post"] = "the modules of its MLP do not run"
    if layer in target.attending and not _is_bridge(target):
        rows = _recomputed(target, record)
        window = layer_window(target.config, layer)
        if window is not None and not isinstance(window, ChunkWindow) and rows.tril(-window).any():
            problems["cache"] = "sees keys beyond the window of its configuration, which a cache drops"
        for which in _ATTENDED:
            if not reads_heads(target, record, which, paths):
                problems[f"attn.hook_{which}"] = "softmax attention is not seen to read its heads"
        if "o" in paths and not _stand_side_by_side(target, record, rows):
            problems["attn.hook_z"] = "the output projection does not read the heads side by side"
    for each in residual_sums(record, paths):
        problems = _unproved(target, each) | problems
    return problems


def _exact(target: Target) -> float:
    """The largest relative distance between two ways to one number, in the precision of a model."""
    return max(EXACT, _IN_HALF * torch.finfo(target.dtype).eps)


def _check_experts(target: Target, record: Record) -> None:
    """Refuse experts that give something else than their weights say."""
    path = target.paths[record.layer]["experts"]
    given = first_tensor(record.output[path])
    args, kwargs = record.arguments[path]
    with target.loaded(record.layer):
        experts = target.experts(record.layer)
        computed = experts.output(experts.routed(args, kwargs)).view_as(given)
    if given.any() and not relative_error(given.float(), computed.float()) <= _LOOSE * _exact(target):
        raise UnsupportedError("the experts do not give what their weights say")


def _neurons_run(target: Target, record: Record) -> bool:
    """Whether modules of the MLP run; what it gives is then what its neurons write, by the factors of the adapter."""
    paths = target.paths[record.layer]
    if "down" not in paths and "experts" not in paths:
        raise UnsupportedError("the adapter names a module that is not there (down or experts)")
    total = mlp_sum(record, paths)
    if total is None:
        return False
    if total.off(vars(target.adapter)) > _exact(target) or not _is_linear(target, record):
        raise UnsupportedError("a moved neuron does not change the layer as the adapter says")
    return True


def _is_linear(target: Target, record: Record) -> bool:
    """Whether neurons of a dense MLP have as many factors, and are linear in them if there is a gate."""
    paths, layer = target.paths[record.layer], record.layer
    if "up" not in paths or "down" not in paths or layer in target.mixtures:
        return True
    if _is_bridge(target) and paths["up"] not in record.output:  # it has parts of its own in place of a fused one
        return True
    up, post = first_tensor(record.output[paths["up"]]), record.into[paths["down"]]
    width = post.shape[-1]
    change = _dependence(post, up)
    if change is None or up.shape[-1] != (1 + target.adapter.fused_gate_up) * width:
        return False
    if not target.is_gated(layer):
        return True
    off = ((up * change)[..., -width:] - post).float().abs().max()
    return bool(off <= _LOOSE * _exact(target) * post.float().abs().max())


def _recomputed(target: Target, record: Record) -> Tensor:
    """The rows of attention, if they give what the model's own gives."""
    layer, chunks = record.layer, record.rows
    if not target.adapter.attention_interface:
        chunks = [rows.detach().float() for rows in record.output[target.paths[layer]["attn"]][1:2]]
    if not chunks:
        raise UnsupportedError(f"no attention was recomputed in layer {layer}")
    rows = torch.cat(chunks, 2)
    count = rows.shape[1]
    if count != target.n_heads:
        raise UnsupportedError(f"layer {layer} has {count} heads, and the configuration {target.n_heads}")
    if rows.triu(1).any():
        raise UnsupportedError(f"layer {layer} attends to {LATER}")
    if record.call is not None and record.call.own.is_known:  # else it is a function of the user's own
        values = per_query_head(record.call.value.float(), count)
        off = relative_error((rows @ values).transpose(1, 2), record.given.float())
        if not off <= _LOOSE * _exact(target):
            raise UnsupportedError("recomputed attention differs from the model's own")
    return rows


def _stand_side_by_side(target: Target, record: Record, rows: Tensor) -> bool:
    """Whether the output projection reads the heads side by side, by their dependence on heads or on values."""
    paths, count = target.paths[record.layer], target.n_heads
    given = record.into.get(paths["o"])
    if given is None:
        return True
    if given.shape[-1] % count:
        return False
    parts = given.unflatten(-1, (count, -1)).unbind(-2)
    if target.adapter.attention_interface:
        return _is_by_head(parts, record.given, lambda change: change)
    values = first_tensor(record.output.get(paths.get("v") or paths.get("fused_qkv")))
    for head, part in enumerate(parts):
        change = _dependence(part[..., -1, 0], values)  # of the last token, on some value of each token
        if change is None:
            return False
        off = change.float().flatten(0, -2) - rows[0, head, -1, :, None]
        if not off.abs().amax(0).min() <= _LOOSE * _exact(target):
            return False
    return True


def _unproved(target: Target, total: Sum) -> dict[str, str]:
    """The sites that are refused because a sum of the residual stream does not hold without them."""
    is_whole = total.name == "hook_resid_post"
    if not is_whole and not total.parts:
        return {"hook_resid_mid": "nothing that is added before it is known"}
    off = total.off(vars(target.adapter))
    if off <= _exact(target) or (is_whole and not target.adapter.adds):
        return {}
    reason = f"{total.name} is not the sum of its parts (off by {off:.2g})"
    if "write_factor" in total.parts:
        raise UnsupportedError(f"what the MLP gives is not added as the adapter says: {reason}")
    return dict.fromkeys(["hook_attn_out"] if is_whole else ["hook_resid_mid", "hook_attn_out"], reason)
