"""Prove by one pass over a few tokens that the parts of a model are where an adapter says.

1. What passes the parts of the first layer of each kind is kept, with gradients inside the layer.
2. The sums of the layer must hold: of the residual stream, and of what its MLP gives.
3. Each head of what attention reads must depend on that head of what a projection gives, and what the output
   projection reads on the heads of the attention, one by one. An MLP with a gate must be linear in `up`.
4. Attention and experts are computed again.

The proof runs on a small random model of the class, where nothing is alike by chance, and on the user's own model,
whose modules may have been replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from sinkscope.engine.attention import Attention, AttentionRows
from sinkscope.engine.stock import eager
from sinkscope.engine.tap import Listener, tapped
from sinkscope.errors import SinkscopeError, UnsupportedError, first_line
from sinkscope.models.adapters import NotInferredError
from sinkscope.models.hooks import Args, Kwargs, first_tensor, hidden_of, with_hidden
from sinkscope.models.layers import head_projection, layer_window, per_query_head
from sinkscope.models.target import Target, has_shared_beside

EXPECTED_MODEL = "give a decoder-only causal language model, such as llama-2-7b or gpt2"
_TOKENS = 20  # of the text of a proof: more than every window and chunk of a small model
_EXACT = 1e-3  # largest relative distance of a sum from its parts, in float32
_IN_HALF = 4  # times the relative rounding of a number
_LOOSE = 4  # times the distance of sums, of what is computed again
_NONE = 5e-3  # the least factor of what is a part of a sum
_MOST = 0.5  # least share of a head in all on which another depends; a norm over all heads mixes in a few per cent
_ATTENDED = {"q": "query", "k": "key", "v": "value"}

Numbers = Float[Tensor, "pos d_model"]


# -- what passes -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Record:
    """What passes the modules of one layer in one pass, and where its parts are said to be.

    Modules get copies of what is kept, because some models add to a tensor in place. Parts are named by the fields of
    an adapter; "" is the layer.

    Attributes:
        target: The model.
        layer: Number of the layer.
        paths: Where its parts are; None or nothing where it has none.
        arguments: The arguments of each module, by path.
        output: What each module gave, by path.
        call: What attention got, at first if it attends to other values as well.
        given: What attention gave.
        shown: Rows of attention that was computed again.
    """

    target: Target
    layer: int
    paths: Mapping[str, Any]
    arguments: dict[Any, tuple[Args, Kwargs]] = field(default_factory=dict)
    output: dict[Any, Any] = field(default_factory=dict)
    call: Attention | None = None
    given: Any = None
    shown: list[AttentionRows] = field(default_factory=list)

    @property
    def module(self) -> nn.Module:
        """The layer."""
        return self.target.layers[self.layer]

    @property
    def exact(self) -> float:
        """The largest relative distance of a sum from its parts, in the precision of the model."""
        return max(_EXACT, _IN_HALF * torch.finfo(self.target.dtype).eps)

    def enter(self, path: str, _module: Any, args: Args, kwargs: Kwargs) -> Any:
        """Keep what enters a module; in what enters the layer, gradients begin."""
        self.arguments[path] = tree_map_only(Tensor, Tensor.clone, (args, kwargs))
        if path:
            return None
        if path in self.output:
            raise NotInferredError(f"layer {self.layer} runs several times in a pass")
        torch.set_grad_enabled(True)
        start = hidden_of(args, kwargs).detach().requires_grad_()
        self.arguments[path] = with_hidden(args, kwargs, start)
        return with_hidden(args, kwargs, start.clone())

    def leave(self, path: str, _module: Any, _args: Any, _kwargs: Any, output: Any) -> Any:
        """Keep what leaves a module."""
        torch.set_grad_enabled(bool(path))
        self.output[path] = output
        return tree_map_only(Tensor, Tensor.clone, output)

    def path(self, part: str) -> Any:
        """Return the path of a part."""
        return self.paths.get(part) if part else ""

    def into(self, part: str) -> Any:
        """Return what entered a part; None if there is no such part, or it did not run."""
        args, kwargs = self.arguments.get(self.path(part), ((), {}))
        return next(iter((*args, *kwargs.values())), None)

    def left(self, part: str) -> Any:
        """Return what left a part; None if there is no such part, or it did not run."""
        return first_tensor(self.output.get(self.path(part)))

    def numbers(self, tensor: Any) -> Any:
        """Return the numbers [pos d_model] of a tensor that is as large as the residual stream; None of others."""
        stream = self.into("")
        if not isinstance(tensor, Tensor) or tensor.numel() != stream.numel():
            return None
        return tensor.detach().float().reshape(stream.shape[1:])

    def is_near(self, numbers: Tensor, expected: Tensor) -> bool:
        """Return whether numbers are what is expected, relative to the largest, in the precision of the model."""
        off, largest = (numbers.float() - expected.float()).abs().max(), expected.float().abs().max()
        return bool(off <= _LOOSE * self.exact * largest)


def text_of(target: Target) -> Int[Tensor, "1 pos"]:
    """Return the tokens of the text, always the same ones."""
    length = min(_TOKENS, target.max_positions or _TOKENS)
    return torch.arange(length, 2 * length)[None] % int(target.config.vocab_size)


@contextmanager
def as_not_inferred() -> Iterator[None]:
    """Context manager in which what a model raises in a pass, which may be anything, is a part that was not found."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError, SinkscopeError, NotInferredError):
        raise
    except Exception as error:
        raise NotInferredError(f"a forward pass raised {type(error).__name__}: {first_line(error)}") from None


@as_not_inferred()
def read(target: Target, layers: Iterable[int]) -> dict[int, Record]:
    """Return what passes some layers in a pass over some tokens, which ends at the last of them.

    The parts that the adapter names are read; where it names none for each layer yet, all modules.

    Raises:
        NotInferredError: A layer does not run, or not once.
    """
    records = {layer: Record(target, layer, target.paths[layer]) for layer in layers}

    def see(call: Attention) -> None:
        record = records.get(call.layer)
        if record is not None and record.call is None:
            record.call, record.given = call, call.stock(call.mask)[0]
            output = record.given.clone()
            call.show(record.shown.append, at_once=True)
            call.compute = lambda _: (output, None)

    tap = tapped(target, Listener(see)) if target.adapter.attention_interface else eager(target)
    hooks = list[Any]()
    for record in records.values():
        paths = record.paths.values() if target.adapter.rows else dict(record.module.named_modules())
        for path in {"", *paths}:
            module = record.module.get_submodule(path)
            hooks += [(module, "pre", partial(record.enter, path)), (module, "post", partial(record.leave, path))]
    with torch.inference_mode(False), tap, target.hooks(*hooks):
        target.forward(text_of(target), last_layer=max(records))
    for layer, record in records.items():
        if getattr(record.into(""), "shape", ())[2:] != (target.d_model,):
            raise NotInferredError(
                f"in a pass over text, layer {layer} does not get one residual stream of width {target.d_model}"
            )
    return records


# -- sums --------------------------------------------------------------------------------------------------------------


@dataclass
class Sum:
    """Parts that add up to a total.

    Attributes:
        name: What the total is.
        total: The total.
        parts: The parts, by the field of an adapter that has the factor; by "start", what they are added to.
    """

    name: str
    total: Numbers
    parts: dict[str, Any]

    def off(self, factors: Mapping[str, Any]) -> float:
        """Return the largest distance of the sum from the total, relative to the largest number in it, of any token."""
        added = torch.stack([part * factors.get(name, 1.0) for name, part in self.parts.items()])
        largest = torch.cat([self.total[None], added]).abs().amax((0, -1))
        off = (self.total - added.sum(0)).abs().amax(-1) / largest
        return float(off.nan_to_num(torch.inf).where(largest > 0, 0).max())

    def fit(self) -> dict[str, float]:
        """Return the measured factors; none if the parts do not add up to the total, or one is no part of it."""
        columns = torch.stack([part.double().flatten() for part in self.parts.values()], 1)
        measured = torch.linalg.lstsq(columns, self.total.double().flatten()[:, None]).solution[:, 0].tolist()
        factors = {name: float(f"{factor:.4g}") for name, factor in zip(self.parts, measured, strict=True)}
        factors["start"] = 1.0
        if min(map(abs, measured)) < _NONE or self.off(factors) > _EXACT:
            return {}
        return factors


def sums_of(record: Record) -> list[Sum]:
    """Return the sums of a layer: of what its MLP gives, if its modules run, and of the residual stream.

    Where it is not known what reads the residual stream between attention and MLP, that has one sum, and else two.
    """
    paths, sums = record.paths, list[Sum]()
    mlp, down, experts = [record.numbers(record.left(part)) for part in ("mlp", "down", "experts")]
    gate, is_beside = record.left("shared_gate"), has_shared_beside(paths)
    of_mlp = {"down_factor": down} if experts is None else {"expert_factor": experts}
    if experts is not None and down is not None and paths["mlp"] != paths["experts"] and not is_beside:
        of_mlp["shared_factor"] = down if gate is None else down * gate.detach().float().reshape(-1, 1).sigmoid()
    attn = record.numbers(record.left("attn_out" if paths.get("attn_out") else "attn"))
    mid, before = record.numbers(record.into("mid")), {"start": record.numbers(record.into("")), "attn_factor": attn}
    written = mlp
    if paths.get("post_mlp_norm"):
        written = record.numbers(record.left("post_mlp_norm"))
    elif is_beside and mlp is not None:
        written = mlp + down
    after = {**(before if mid is None else {"start": mid}), "write_factor": written}
    for name, total, parts in (
        ("mlp", mlp, of_mlp),
        ("hook_resid_mid", mid, before),
        ("hook_resid_post", record.numbers(record.left("")), after),
    ):
        there = {factor: part for factor, part in parts.items() if part is not None}
        if total is not None and there:
            sums.append(Sum(name, total, there))
    return sums


# -- comparing ---------------------------------------------------------------------------------------------------------


@torch.enable_grad()
@as_not_inferred()
def prove(target: Target, kinds: Sequence[int] | None = None) -> dict[str, str]:
    """Prove the adapter of a model by one pass with plain hooks; the model is left as it was.

    Args:
        target: The model, with an adapter.
        kinds: For each layer, the number of the first one of its kind, for which it is proved. None: all are proved.

    Returns:
        Sites that cannot be proved, such as "blocks.3.attn.hook_z", and why.

    Raises:
        NotInferredError: The adapter is wrong.
        UnsupportedError: The model is not causal.
    """
    kinds, unproved = kinds or range(target.n_layers), dict[str, str]()
    found = {layer: _problems(record) for layer, record in read(target, {*kinds}).items()}
    for layer, first in enumerate(kinds):
        unproved |= {f"blocks.{layer}.{part}": reason for part, reason in found[first].items()}
    return unproved


def _problems(record: Record) -> dict[str, str]:
    """Why sites of a layer cannot be proved, by the last part of their names.

    Raises:
        NotInferredError: The adapter is wrong.
    """
    problems, target, sums = dict[str, str](), record.target, sums_of(record)
    if record.layer in target.attending:
        problems = _of_attention(record)
    if record.layer in target.mixtures:
        _check_experts(record)
    elif not _is_linear(record):
        raise NotInferredError("a moved neuron does not change the layer as the adapter says")
    if "mlp" in record.paths and sums[0].name != "mlp":
        if not {"down", "experts"} & record.paths.keys():
            raise NotInferredError("the adapter names a module that is not there (down or experts)")
        problems["mlp.hook_post"] = "the modules of its MLP do not run"
    for each in sums:
        off = each.off(vars(target.adapter))
        if off <= record.exact or (each.name == "hook_resid_post" and not target.adapter.adds):
            continue
        reason = f"{each.name} is not the sum of its parts (off by {off:.2g})"
        if each.name == "mlp" or "write_factor" in each.parts:
            raise NotInferredError(f"a moved neuron does not change the layer as the adapter says: {reason}")
        problems |= {each.name: reason, "hook_attn_out": reason}
    return problems


def _check_experts(record: Record) -> None:
    """Refuse experts that give something else than their weights say."""
    target, given = record.target, record.left("experts")
    with target.loaded(record.layer):
        experts = target.experts(record.layer)
        computed = experts.output(*record.arguments[record.path("experts")])
    if not record.is_near(computed.view_as(given), given):
        raise NotInferredError("the experts do not give what their weights say")


def _is_linear(record: Record) -> bool:
    """Whether neurons of a dense MLP have as many factors, and are linear in them if there is a gate."""
    up, post, target = record.left("up"), record.into("down"), record.target
    if up is None or post is None:
        return True
    change = _dependence(post, up)
    if change is None or up.shape[-1] != (1 + target.adapter.fused_gate_up) * post.shape[-1]:
        return False
    return not target.is_gated(record.layer) or record.is_near((up * change)[..., -post.shape[-1] :], post)


# -- heads -------------------------------------------------------------------------------------------------------------


def _of_attention(record: Record) -> dict[str, str]:
    """Why sites of attention cannot be proved; nothing of a bridge, which computes attention itself.

    Raises:
        NotInferredError: Its rows do not give what the model's own gives.
        UnsupportedError: Tokens attend to later ones.
    """
    problems, target, call, layer = dict[str, str](), record.target, record.call, record.layer
    if hasattr(target.sub(layer, "attn"), "original_component"):
        return problems
    shown = [rows.probs for rows in record.shown]
    if not target.adapter.attention_interface:
        shown = [*record.output[record.path("attn")][1:2]]
    if not shown:
        raise NotInferredError(f"no attention was recomputed in layer {layer}")
    (rows,), count = shown, target.n_heads
    if rows.shape[1] != count:
        raise NotInferredError(f"layer {layer} has {rows.shape[1]} heads, and the configuration {count}")
    ahead = None if call is None else _dependence(record.given[:, 0], call.value)
    if rows.triu(1).any() or (ahead is not None and ahead[:, :, 1:].any()):
        raise UnsupportedError(
            f"{target.name} is not causal, because layer {layer} attends to later tokens: {EXPECTED_MODEL}"
        )
    if call is not None and call.own.is_known:  # else it is a function of the user's own
        computed = rows.float() @ per_query_head(call.value.float(), count)
        if not record.is_near(computed.transpose(1, 2), record.given):
            raise NotInferredError("recomputed attention differs from the model's own")
    window = layer_window(target.config, layer)
    if window is not None and rows.tril(-window).any():
        problems["cache"] = "sees keys beyond the window of its configuration, which a cache drops"
    for which in _ATTENDED:
        if not reads_heads(record, which):
            problems[f"attn.hook_{which}"] = "softmax attention is not seen to read its heads"
    if not _stand_side_by_side(record, rows):
        problems["attn.hook_z"] = "the output projection does not read the heads side by side"
    return problems


def _dependence(numbers: Tensor, on: Tensor | None) -> Tensor | None:
    """How the sum of numbers depends on others; None if it does not."""
    if on is None or not on.requires_grad or not numbers.requires_grad:
        return None
    return torch.autograd.grad(numbers.sum(), on, retain_graph=True, allow_unused=True)[0]


def _is_by_head(parts: Sequence[Tensor], on: Tensor | None, split: Callable[[Tensor], Tensor]) -> bool:
    """Whether numbers of each head depend mostly on one head of others, in order; `split` gives [... head _]."""
    for number, part in enumerate(parts):
        change = _dependence(part, on)
        if change is None:
            return False
        sizes = split(change.float()).square().sum(-1).flatten(0, -2).sum(0)
        if len(parts) % len(sizes) or not sizes[number * len(sizes) // len(parts)] > _MOST * sizes.sum():
            return False
    return True


def reads_heads(record: Record, which: str) -> bool:
    """Return whether the heads of "q", "k" or "v" that attention reads depend on those of what a projection gives."""
    given = record.left(which if record.paths.get(which) else "fused_qkv")
    if given is None or record.call is None:
        return False
    heads, split = getattr(record.call, _ATTENDED[which])[0], partial(head_projection, which, record.target)
    with suppress(RuntimeError, ValueError):  # it cannot be split into heads
        return split(given).shape[-1] == heads.shape[-1] and _is_by_head(heads, given, split)
    return False


def _stand_side_by_side(record: Record, rows: Tensor) -> bool:
    """Whether the output projection reads the heads side by side, by their dependence on heads, or on unseen rows."""
    given, count = record.into("o"), rows.shape[1]
    if given is None or given.shape[-1] % count:
        return given is None
    parts = given.unflatten(-1, (count, -1)).unbind(-2)
    if record.call is None:
        return _is_by_head(parts, rows, lambda change: change.transpose(1, 2))
    return _is_by_head(parts, record.given, lambda change: change)
