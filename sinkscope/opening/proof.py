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

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from sinkscope.engine.attention import Attention, AttentionRows, eager
from sinkscope.engine.tap import Listener, tapped
from sinkscope.models.adapters import NotInferredError
from sinkscope.models.arithmetic import product
from sinkscope.models.hooks import Args, Hook, Kwargs, first_tensor, hidden_of, with_hidden
from sinkscope.models.layers import head_projection, layer_window, per_query_head
from sinkscope.models.target import LayerInput, Target, has_shared_beside

_TOKENS = 20  # of the text of a proof: more than every window and chunk of a small model
_EXACT = 1e-3  # largest relative distance of a sum from its parts, in float32
_IN_HALF = 4  # times the relative rounding of a number
_LOOSE = 4  # times the distance of sums, of what is computed again
_NONE = 5e-3  # the least factor of what is a part of a sum
_MOST = 0.5  # least share of a head in all on which another depends; a norm over all heads mixes in a few per cent
_ATTENDED = {"q": "query", "k": "key", "v": "value"}


# -- what passes -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Record:
    """What passes the modules of one layer in one pass, and where its parts are said to be.

    Modules get copies of what is kept, because some models add to a tensor in place. Parts are named as in an adapter.

    Attributes:
        target: The model.
        layer: Number of the layer.
        paths: Where its parts are; None or nothing where it has none.
        arguments: The arguments of each module, by path.
        outputs: What each module gave, by path.
        call: What attention got, at first if it attends to other values as well.
        attended: What attention gave.
        computed_rows: Rows of attention that was computed again.
    """

    target: Target
    layer: int
    paths: Mapping[str, Any]
    arguments: dict[Any, tuple[Args, Kwargs]] = field(default_factory=dict)
    outputs: dict[Any, Any] = field(default_factory=dict)
    call: Attention | None = None
    attended: Any = None
    computed_rows: list[AttentionRows] = field(default_factory=list)

    @property
    def module(self) -> nn.Module:
        """The layer."""
        return self.target.layers[self.layer]

    @property
    def rows(self) -> Any:
        """Rows of the attention; None if there are none."""
        return self.rows_of(self.paths.get("attn"))

    def rows_of(self, path: str | None) -> Any:
        """Return rows of attention: those that were computed again, or that the module at a path gave; None without."""
        if self.target.adapter.attention_interface:
            return self.computed_rows[0].probs if self.computed_rows else None
        output = self.outputs.get(path)
        return output[1] if isinstance(output, tuple) and len(output) > 1 else None

    @property
    def exact(self) -> float:
        """The largest relative distance of a sum from its parts, in the precision of the model."""
        return max(_EXACT, _IN_HALF * torch.finfo(self.target.dtype).eps)

    def hooks(self) -> list[Hook]:
        """Return the hooks by which it is kept what passes the parts, or all modules where no parts are said."""
        paths = {*self.paths.values()} if len(self.paths) > 1 else dict(self.module.named_modules())
        hooks: list[Hook] = []
        for path in paths:
            module = self.module.get_submodule(path)
            hooks.append((module, "pre", partial(self.enter, path)))
            hooks.append((module, "post", partial(self.leave, path)))
        return hooks

    def enter(self, path: str, _module: Any, args: Args, kwargs: Kwargs) -> Any:
        """Keep what enters a module; in what enters the layer, gradients begin."""
        if not path:
            if path in self.outputs:
                raise NotInferredError(f"layer {self.layer} runs several times in a pass")
            torch.set_grad_enabled(True)
            args, kwargs = with_hidden(args, kwargs, hidden_of(args, kwargs).detach().requires_grad_())
        self.arguments[path] = args, kwargs
        return tree_map_only(Tensor, Tensor.clone, (args, kwargs))

    def leave(self, path: str, _module: Any, _args: Any, _kwargs: Any, output: Any) -> Any:
        """Keep what leaves a module."""
        torch.set_grad_enabled(bool(path))
        self.outputs[path] = output
        return tree_map_only(Tensor, Tensor.clone, output)

    def input_of(self, part: str) -> Any:
        """Return what entered a part; None if there is no such part, or it did not run."""
        args, kwargs = self.arguments.get(self.paths.get(part), ((), {}))
        return next(iter((*args, *kwargs.values())), None)

    def output_of(self, part: str) -> Any:
        """Return what left a part; None if there is no such part, or it did not run."""
        return first_tensor(self.outputs.get(self.paths.get(part)))

    def numbers(self, tensor: Any) -> Any:
        """Return the numbers [pos d_model] of a tensor that is as large as the residual stream; None of others."""
        stream = self.input_of("")
        if not isinstance(tensor, Tensor) or tensor.numel() != stream.numel():
            return None
        return tensor.detach().float().reshape(stream.shape[1:])

    def is_near(self, numbers: Tensor, expected: Tensor) -> bool:
        """Return whether numbers are what is expected, relative to the largest, in the precision of the model."""
        most = _LOOSE * self.exact * float(expected.detach().abs().max())
        return torch.allclose(numbers.float(), expected.float(), rtol=0, atol=most)


def read(target: Target, layers: Iterable[int], start: LayerInput | None = None) -> dict[int, Record]:
    """Return what passes some layers in a pass over some tokens, which ends at the last of them.

    The parts that the adapter names are read; where it names none for a layer, all modules.

    Args:
        target: The model.
        layers: The layers.
        start: Where the pass begins. None: with the tokens.

    Raises:
        NotInferredError: A layer does not run, or not once.
    """
    records = {layer: Record(target, layer, target.paths[layer]) for layer in layers}
    length = min(_TOKENS, target.max_positions or _TOKENS)
    ids = torch.arange(length, 2 * length)[None] % int(target.config.vocab_size)

    def see(call: Attention) -> None:
        record = records.get(call.layer)
        if record is not None and record.call is None:
            record.call = call
            record.attended = call.stock(call.mask)[0]
            output = record.attended.clone()
            call.show(record.computed_rows.append, at_once=True)
            call.compute = lambda _: (output, None)

    tap = tapped(target, Listener(see)) if target.adapter.attention_interface else eager(target)
    hooks: list[Hook] = []
    for record in records.values():
        hooks += record.hooks()
    with torch.inference_mode(False), tap, target.hooks(*hooks):
        target.forward(ids, last_layer=max(records), start=start)
    for layer, record in records.items():
        if getattr(record.input_of(""), "shape", ())[2:] != (target.d_model,):
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
        factors: For each part, the field of an adapter that has its factor; "start" for what they are added to.
        numbers: The total, and the parts.
    """

    name: str
    factors: Sequence[str]
    numbers: Float[Tensor, "n pos d_model"]

    def off(self, factors: Mapping[str, Any]) -> float:
        """Return the largest distance of the sum from the total, relative to the largest number in it, of any token."""
        scales = [1.0, *[factors.get(name, 1.0) for name in self.factors]]
        scaled = self.numbers * self.numbers.new_tensor(scales)[:, None, None]
        off, largest = (scaled[0] - scaled[1:].sum(0)).abs().amax(-1), scaled.abs().amax((0, -1))
        return float((off / largest).nan_to_num(torch.inf).where(largest > 0, 0).max())

    def fit(self) -> dict[str, float]:
        """Return the measured factors; none if the parts do not add up to the total, or one is no part of it."""
        total, *parts = self.numbers.double().flatten(1)
        measured = torch.linalg.lstsq(torch.stack(parts, 1), total[:, None]).solution[:, 0].tolist()
        factors = {name: float(f"{factor:.4g}") for name, factor in zip(self.factors, measured, strict=True)}
        factors.pop("start", None)
        return {} if min(map(abs, measured)) < _NONE or self.off(factors) > _EXACT else factors


@dataclass(frozen=True, eq=False)
class Passed:
    """The tensors of a layer that are as large as the residual stream; None of a part that it does not have.

    Attributes:
        start: What enters the layer.
        middle: What is read between attention and MLP.
        end: What leaves the layer.
        attention: What attention writes, after a norm behind it.
        mlp: What the MLP gives.
        mlp_norm: What a norm behind the MLP gives.
        down: What the down projection gives, of a dense MLP or of a shared expert.
        experts: What the routed experts give.
    """

    start: Any
    middle: Any
    end: Any
    attention: Any
    mlp: Any
    mlp_norm: Any
    down: Any
    experts: Any

    @classmethod
    def through(cls, record: Record) -> Passed:
        """Return those of a layer."""
        attention = "attn_out" if record.paths.get("attn_out") else "attn"
        return cls(
            start=record.numbers(record.input_of("")),
            middle=record.numbers(record.input_of("mid")),
            end=record.numbers(record.output_of("")),
            attention=record.numbers(record.output_of(attention)),
            mlp=record.numbers(record.output_of("mlp")),
            mlp_norm=record.numbers(record.output_of("post_mlp_norm")),
            down=record.numbers(record.output_of("down")),
            experts=record.numbers(record.output_of("experts")),
        )


def sums_of(record: Record) -> list[Sum]:
    """Return the sums of a layer: of what its MLP gives, if its modules run, and of the residual stream.

    Where it is not known what reads the residual stream between attention and MLP, that has one sum, and else two.
    """
    passed = Passed.through(record)
    sums = [sum_of_mlp(record, passed)]
    written = written_by_mlp(record, passed)
    if passed.middle is None:
        if passed.attention is not None:
            written.append(passed.attention)
        added = torch.stack(written).sum(0) if written else None
        sums.append(sum_of("hook_resid_post", passed.end, {"start": passed.start, "write_factor": added}))
    else:
        added = torch.stack(written).sum(0) if written else None
        of_middle = {"start": passed.start, "write_factor": passed.attention}
        sums.append(sum_of("hook_resid_mid", passed.middle, of_middle))
        sums.append(sum_of("hook_resid_post", passed.end, {"start": passed.middle, "write_factor": added}))
    return [known for known in sums if known is not None]


def sum_of(name: str, total: Any, parts: Mapping[str, Any]) -> Sum | None:
    """Return a sum; None if its total or all of its parts are not there.

    Args:
        name: What the total is.
        total: The total.
        parts: The parts, by the field of an adapter that has their factor.
    """
    known = {factor: part for factor, part in parts.items() if part is not None}
    if total is None or not known:
        return None
    return Sum(name, [*known], torch.stack([total, *known.values()]))


def sum_of_mlp(record: Record, passed: Passed) -> Sum | None:
    """Return the sum of what an MLP gives: of its down projection, of experts, or of these and a shared expert."""
    down = passed.down
    gate = record.output_of("shared_gate")
    if passed.experts is not None and (has_shared_beside(record.paths) or is_all_experts(record)):
        down = None  # what it gives is added elsewhere
    elif gate is not None and down is not None:
        down = down * gate.detach().float().reshape(-1, 1).sigmoid()
    factor = "down_factor" if passed.experts is None else "shared_factor"
    return sum_of("mlp", passed.mlp, {factor: down, "expert_factor": passed.experts})


def is_all_experts(record: Record) -> bool:
    """Return whether the module of the MLP is that of the experts."""
    return record.paths["mlp"] == record.paths["experts"]


def written_by_mlp(record: Record, passed: Passed) -> list[Tensor]:
    """Return what is added to the stream for an MLP: by a norm behind it, or by the MLP and a shared expert."""
    if record.paths.get("post_mlp_norm"):
        parts = [passed.mlp_norm]
    elif has_shared_beside(record.paths):
        parts = [passed.mlp, passed.down]
    else:
        parts = [passed.mlp]
    return [part for part in parts if part is not None]


# -- comparing ---------------------------------------------------------------------------------------------------------


@torch.enable_grad()
def prove(target: Target, kinds: Sequence[int]) -> dict[str, str]:
    """Prove the adapter of a model by one pass with plain hooks; the model is left as it was.

    Args:
        target: The model, with an adapter.
        kinds: For each layer, the number of the first one of its kind, for which it is proved.

    Returns:
        Sites that cannot be proved, such as "blocks.3.attn.hook_z", and why.

    Raises:
        NotInferredError: The adapter is wrong.
    """
    problems = {layer: _problems(record) for layer, record in read(target, {*kinds}).items()}
    unproved: dict[str, str] = {}
    for layer, first in enumerate(kinds):
        for part, reason in problems[first].items():
            unproved[f"blocks.{layer}.{part}"] = reason
    return unproved


def _problems(record: Record) -> dict[str, str]:
    """Why sites of a layer cannot be proved, by the last part of their names.

    Raises:
        NotInferredError: The adapter is wrong.
    """
    problems: dict[str, str] = {}
    target = record.target
    sums = sums_of(record)
    if record.layer in target.attending:
        problems = _of_attention(record)
    if not _writes(record):
        raise NotInferredError("a moved neuron does not change the layer as the adapter, or the experts' weights, say")
    if "mlp" in record.paths and sums[0].name != "mlp":
        problems["mlp.hook_post"] = "the modules of its MLP do not run"
    for total in sums:
        off = total.off(vars(target.adapter))
        if off <= record.exact or (total.name == "hook_resid_post" and not target.adapter.adds):
            continue
        reason = f"{total.name} is not the sum of its parts (off by {off:.2g})"
        if total.name != "hook_resid_mid":
            raise NotInferredError(f"a moved neuron does not change the layer as the adapter says: {reason}")
        problems |= {total.name: reason, "hook_attn_out": reason}
    return problems


def _writes(record: Record) -> bool:
    """Whether experts give what their weights say; of a dense MLP, whether its neurons have the factors that they need.

    There are as many in `up` as in what enters `down`, which is linear in them if there is a gate.
    """
    target = record.target
    layer = record.layer
    up = record.output_of("up")
    post = record.input_of("down")
    if layer in target.mixtures:
        output = record.output_of("experts")
        with target.loaded(layer):
            experts = target.experts(layer)
            computed = experts.output(*record.arguments[record.paths["experts"]])
        return record.is_near(computed.view_as(output), output)
    if up is None or post is None:
        return True
    change = _dependence(post, up)
    if change is None or up.shape[-1] != (1 + target.adapter.fused_gate_up) * post.shape[-1]:
        return False
    return not target.is_gated(layer) or record.is_near((up * change)[..., -post.shape[-1] :], post)


# -- heads -------------------------------------------------------------------------------------------------------------


def _of_attention(record: Record) -> dict[str, str]:
    """Why sites of attention cannot be proved; nothing of a bridge, which computes attention itself.

    Raises:
        NotInferredError: It is not what is computed again.
    """
    problems: dict[str, str] = {}
    target = record.target
    call = record.call
    rows: Any = record.rows
    if hasattr(target.sub(record.layer, "attn"), "original_component"):
        return problems
    is_right = record.rows is not None and rows.shape[1] == target.n_heads and not rows.triu(1).any()
    if is_right and call is not None:
        computed = product(rows.float(), per_query_head(call.value.float(), target.n_heads))
        is_right = record.is_near(computed.transpose(1, 2), record.attended)
    if not is_right:
        raise NotInferredError(
            f"layer {record.layer} does not attend as it is computed again, over the keys up to each query with the "
            f"{target.n_heads} heads of the configuration"
        )
    window = layer_window(target.config, record.layer)
    if window is not None and rows.tril(-window).any():
        problems["cache"] = "sees keys beyond the window of its configuration, which a cache drops"
    for which in "qkvz":
        if not reads_heads(record, which):
            problems[f"attn.hook_{which}"] = "its heads are not seen to be those of softmax attention, one by one"
    return problems


def _dependence(numbers: Tensor, on: Tensor) -> Any:
    """How the sum of numbers depends on others; None if it does not."""
    if not (numbers.requires_grad and on.requires_grad):
        return None
    return torch.autograd.grad(numbers.sum(), on, retain_graph=True, allow_unused=True)[0]


@dataclass(frozen=True, eq=False)
class HeadPair:
    """Heads, and what each of them should depend on alone.

    Attributes:
        heads: The heads, one after another.
        source: What they are made of.
        split: Splits what is as large as the source into heads, `[... head number]`.
    """

    heads: Tensor
    source: Tensor
    split: Callable[[Tensor], Tensor]

    def is_one_by_one(self) -> bool:
        """Return whether each head depends mostly on the one head of the source that has its place."""
        for number, head in enumerate(self.heads):
            dependence = _dependence(head, self.source)
            if dependence is None:
                return False
            sizes = self.split(dependence.float()).square().sum(-1).flatten(0, -2).sum(0)
            if len(self.heads) % len(sizes):
                return False
            if not sizes[number * len(sizes) // len(self.heads)] > _MOST * sizes.sum():
                return False
        return True


def reads_heads(record: Record, which: str) -> bool:
    """Return whether heads depend mostly on one head each, in order.

    Args:
        record: What passed the layer.
        which: "q", "k" or "v": those that attention reads, on what a projection gives; "z": those that the output
            projection reads side by side, on those of attention, or on its rows.
    """
    pair = _heads_put_together(record) if which == "z" else _heads_of_projection(record, which)
    return pair is not None and pair.is_one_by_one()


def _heads_put_together(record: Record) -> HeadPair | None:
    """What the output projection reads, and what attention gave, or its rows; None if it is not split into heads."""
    entering = record.input_of("o")
    source = record.rows if record.call is None else record.attended
    if not isinstance(entering, Tensor) or not isinstance(source, Tensor):
        return None
    head_axis = 1 if record.call is None else -2
    with suppress(RuntimeError):  # its width is no multiple of the number of heads
        heads = entering.unflatten(-1, (record.target.n_heads, -1)).movedim(-2, 0)
        return HeadPair(heads, source, partial(torch.movedim, source=head_axis, destination=-2))
    return None


def _heads_of_projection(record: Record, which: str) -> HeadPair | None:
    """What attention reads, and what a projection gave; None if it has no such heads."""
    source = record.output_of(which if record.paths.get(which) else "fused_qkv")
    if record.call is None or not isinstance(source, Tensor):
        return None
    heads = getattr(record.call, _ATTENDED[which])[0]
    split = partial(head_projection, which, record.target)
    with suppress(RuntimeError):  # its width is no multiple of the number of heads
        if split(source).shape[-1] == heads.shape[-1]:
            return HeadPair(heads, source, split)
    return None
