"""Read the adapter of a model off the model itself; no module's name is known beforehand.

One layer of each kind is called again and again with the input that it got in a pass over a few tokens:

1. the layers are the largest list of modules;
2. the down projection of an MLP is linear. An input of it depends on one output of earlier linear modules at its token,
   or on one in each half, and on nothing else: derivatives say so. `up` is the factor in which that input is linear;
3. what is added to the output of the down projection, or of experts, must arrive as a constant multiple at the layer's
   output, directly or through a norm;
4. experts are recomputed from hidden states, choice and weights;
5. attention is captured at transformers' attention interface: a linear module on which queries, keys or values depend
   is a projection, and the output projection reads the heads side by side.

`models.probe` then proves the adapter on the model's own weights.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.models.adapters import PATHS, Adapter, row_of
from sinkscope.models.config import cut_depth, first_line, new_model
from sinkscope.models.experts import experts_of
from sinkscope.models.probe import begins_at, probe, token_ids
from sinkscope.models.scope import shown_row
from sinkscope.models.target import (
    Args,
    Hook,
    Kwargs,
    Target,
    hidden_of,
    kind_of,
    on_hidden,
    on_input,
    with_hidden,
)

_LENGTH = 9
_EQUAL = 4  # of them, at the end: they enter the first layer as different vectors if positions were added before it
_POSITION = 5  # of the edits
_EDITED = [1, 2, _POSITION, 7]  # where an edit is followed to the residual stream: what multiplies it must be the same
_EXACT = 2e-3  # largest relative distance between what an edit changed and what it must change
_IF_MIXED = {"learned_sinks": True, "adds": False, "qkv_layout": None}  # where layers differ
_SAMPLE_TOKENS = 64  # in the vocabulary of a model that is made to infer an adapter from it


class NotInferredError(Exception):
    """The message says what was not found, as the end of a sentence about the model."""


# -- one layer, called again ---------------------------------------------------------------------------------------


def _is_transposed(module: nn.Module) -> bool:
    return type(getattr(module, "base_layer", module)).__name__ == "Conv1D"


def _widths(module: nn.Module) -> tuple[int, int] | None:
    """Outputs and inputs of a linear module; None if it is something else."""
    linear: Any = getattr(module, "base_layer", module)  # of an adapter
    if _is_transposed(linear):
        return linear.nf, linear.nx
    if hasattr(linear, "in_features") and hasattr(linear, "out_features"):
        return linear.out_features, linear.in_features
    return None


def _flat(value: Any) -> Float[Tensor, "token width"]:
    """A copy of the first floating-point tensor among a module's inputs, or in its output, or no token."""
    values: Sequence[Any] = [value]
    if isinstance(value, tuple | list):
        values = value
    for tensor in values:
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.ndim >= 2:
            return tensor.clone().reshape(-1, tensor.shape[-1])
    return torch.empty(0, 0)


@dataclass(frozen=True, eq=False)
class _Run:
    """What the modules of a layer read and gave in one call, by path ("" is the layer), and its attention calls."""

    read: dict[str, Float[Tensor, "token inputs"]]
    gave: dict[str, Float[Tensor, "token outputs"]]
    attention: list[Any]


class _Tap:
    """Where attention that the tap sees goes, and what replaces its output."""

    def __init__(self) -> None:
        self.calls = list[Any]()
        self.compute: Callable[[Any], Any] | None = None

    def see(self, call: Any) -> None:
        """The function that the tap calls with the attention of every layer."""
        call.compute = self.compute
        if not call.is_again:
            self.calls.append(call)


class _Stage:
    """A layer with the input that it got in a pass; `run` calls it again, in float32."""

    def __init__(self, target: Target, number: int, args: Args, kwargs: Kwargs, tap: _Tap) -> None:
        self.target, self.number, self.layer, self._tap = target, number, target.layers[number], tap
        self._args, self._kwargs = args, kwargs
        if target.dtype not in (torch.float32, torch.float64):  # in half precision, edits drown in rounding
            self.layer = _in_float32(target, number)
            self._args, self._kwargs = _as_float32(args), _as_float32(kwargs)
        self.paths = dict[nn.Module, str]()
        linear = None
        for path, module in self.layer.named_modules():
            if linear is None or not _contains(linear, path):  # an adapter's parts are no parts
                self.paths[module] = path
                linear = None if _widths(module) is None else path
        self.clean = self.run()
        self.hidden = _flat(hidden_of(self._args, self._kwargs))
        self.heads = _attention(self)

    def run(self, *hooks: Hook, compute: Callable[[Any], Any] | None = None) -> _Run:
        """Call the layer under hooks; `compute` gives the output of its attention."""
        run = _Run({}, {}, [])
        self._tap.calls, self._tap.compute = run.attention, compute

        def note(module: nn.Module, args: Args, kwargs: Kwargs, output: Any) -> None:
            path = self.paths[module]
            run.read[path] = _flat((*args, *kwargs.values()))
            run.gave[path] = _flat(output)

        args, kwargs = with_hidden(self._args, self._kwargs, hidden_of(self._args, self._kwargs).clone())
        with self.target.hooks(*hooks, *[(module, "post", note) for module in self.paths]):
            self.layer(*args, **kwargs)
        return run

    def edit(self, path: str, change: Callable[[Float[Tensor, "token outputs"]], Tensor]) -> Hook:
        """A hook that replaces what a module gives."""

        def changed(tensor: Tensor) -> Tensor | None:
            flat = tensor.reshape(-1, tensor.shape[-1])
            if len(flat) != _LENGTH:  # some modules run once more
                return None
            return change(flat).view(tensor.shape)

        return self.layer.get_submodule(path), "post", on_hidden(changed)

    def run_to_derive(self, paths: Iterable[str], *, cuts: bool) -> tuple[_Run, dict[str, Tensor]]:
        """Call the layer with zeros added to what modules give, by which the results can be derived.

        Args:
            paths: The modules.
            cuts: What a module gives counts as given, whatever it depends on, and zeros ("") are added to what enters
                the layer as well.

        Returns:
            What passed the modules, and the zeros.
        """
        zeros = dict[str, Tensor]()

        def add(path: str, tensor: Tensor) -> Tensor:
            zeros[path] = torch.zeros_like(tensor, requires_grad=True)
            if cuts:
                tensor = tensor.detach()
            return tensor + zeros[path]

        hooks = [self.edit(path, partial(add, path)) for path in paths]
        if cuts:
            hooks.append((self.layer, "pre", on_input(partial(add, ""))))
        with torch.enable_grad():
            return self.run(*hooks), zeros

    def linear(self, outputs: Sequence[int] | None = None) -> list[str]:
        """Linear modules with so many outputs, or any number, that saw every token, in the order in which they ran."""
        paths = list[str]()
        for path, gave in self.clean.gave.items():
            widths = _widths(self.layer.get_submodule(path))
            if widths is not None and len(gave) == _LENGTH and (outputs is None or widths[0] in outputs):
                paths.append(path)
        return paths


def _derivatives(tensor: Tensor, weights: Tensor, zeros: dict[str, Tensor]) -> dict[str, Tensor]:
    """The derivative of a weighted sum with respect to what was added, by path; only those that are not zero."""
    slopes = torch.autograd.grad(tensor, list(zeros.values()), weights, retain_graph=True, allow_unused=True)
    pairs = zip(zeros, slopes, strict=True)
    return {path: slope for path, slope in pairs if slope is not None and slope.any()}


def _in_float32(target: Target, number: int) -> nn.Module:
    """A copy of a layer that shares configurations, because the tap goes by them."""
    layer = target.layers[number]
    copied = dict[int, Any]()
    with target.loaded(number):
        for module in layer.modules():
            config = getattr(module, "config", None)
            copied[id(config)] = config
        for tensor in [*layer.parameters(), *layer.buffers()]:
            copied[id(tensor)] = _as_float32(tensor)
        return copy.deepcopy(layer, copied)


def _as_float32(value: Any) -> Any:
    """Arguments with their floating-point tensors in float32."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.float()
    if isinstance(value, tuple | list):
        return type(value)([_as_float32(item) for item in value])
    if isinstance(value, dict):
        return {name: _as_float32(item) for name, item in value.items()}
    return value


def _size(tensor: Tensor) -> float:
    return float(tensor.abs().max())


def _is_equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _multiple(change: Tensor, of: Tensor) -> float | None:
    """The constant c for which `change` is c times `of`; None if there is none."""
    square = float((of * of).sum())
    if square == 0:
        return None
    constant = float((change * of).sum()) / square
    if constant == 0 or _size(change - constant * of) > _EXACT * _size(change):
        return None
    return constant


def _contains(path: str, other: str) -> bool:
    return path == "" or f"{other}.".startswith(f"{path}.")


# -- the MLP -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Write:
    """Where the output of a down projection, or of fused experts, goes.

    Attributes:
        mlp: Path of the outermost module whose output changes by it, times `factor`.
        factor: That constant.
        post_norm: Path of the norm behind it.
        write_factor: Constant between what the MLP, or the norm, gives and what the layer adds.
        weight: If it is not constant, the path of the module whose sigmoid multiplies it.
        adds: Whether the layer simply adds it.
    """

    mlp: str
    factor: float
    post_norm: str | None = None
    write_factor: float = 1.0
    weight: str | None = None
    adds: bool = True


def _mlp(stage: _Stage, is_alone: bool) -> tuple[dict[str, Any], _Write] | None:
    """The MLP of a layer that all tokens go through, the widest if there are several; None if there is none.

    Returns:
        Fields of the adapter, and where its output goes.
    """
    failure: NotInferredError | None = None
    downs = stage.linear([stage.clean.gave[""].shape[1]])
    for down in sorted(downs, key=lambda path: -stage.clean.read[path].shape[1]):
        try:
            factors = _factors(stage, down)
            if factors is not None:
                is_transposed = _is_transposed(stage.layer.get_submodule(down))
                return {"down": down, "transposed_down": is_transposed, **factors}, _write(stage, down, is_alone)
        except NotInferredError as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return None


def _factors(stage: _Stage, down: str) -> dict[str, Any] | None:
    """What feeds a down projection, by the adapter's fields; None if linear modules alone do not."""
    width = stage.clean.read[down].shape[1]
    order = list(stage.clean.gave)
    before = [path for path in stage.linear([width, 2 * width]) if order.index(path) < order.index(down)]
    run, zeros = stage.run_to_derive(before, cuts=True)
    post = run.read[down]
    neuron = int(post[_POSITION].abs().argmax())  # one at zero may not move, behind a ReLU
    weights = torch.zeros_like(post)
    weights[_POSITION, neuron] = 1
    slopes = _derivatives(post, weights, zeros)
    if not slopes or "" in slopes:
        return None
    is_coupled = False  # by a norm in between
    for slope in slopes.values():
        token, column = slope.nonzero().unbind(1)
        if bool((token != _POSITION).any()):
            return None
        is_coupled = is_coupled or bool((column % width != neuron).any())
    paths = [path for path in before if path in slopes]
    is_fused = not is_coupled and any(slope.shape[1] == 2 * width for slope in slopes.values())
    fields: dict[str, Any] = {"up": None, "gate": None, "fused_gate_up": is_fused}
    if is_coupled or len(paths) > 2 - is_fused:  # no module gives a factor
        return fields
    fields["up"] = paths[-1]
    for path in reversed(paths):
        if _is_linear_in(stage, down, path, width):
            fields["up"] = path
            break
    else:
        if is_fused:
            raise NotInferredError(f"the two halves of {paths[0]!r} are not gate and up in this order")
    if len(paths) == 2:
        paths.remove(fields["up"])
        (fields["gate"],) = paths
    return fields


def _is_linear_in(stage: _Stage, down: str, path: str, width: int) -> bool:
    """Whether the input of `down` is linear in a module's output, or in its second half, if it gives two."""
    post = stage.clean.read[down]
    change = torch.zeros_like(post)
    for step in (2, -2):

        def move(given: Tensor, step: int = step) -> Tensor:
            given = given.clone()
            given[:, -width:] += step * given.abs().mean().clamp(min=1)
            return given

        change += stage.run(stage.edit(path, move)).read[down] - post
    return _size(change) <= 1e-3 * _size(post)


def _write(stage: _Stage, path: str, is_alone: bool = False) -> _Write:
    """Follow what is added to the output of a module up to the layer's output.

    Args:
        stage: The layer.
        path: Path of the module.
        is_alone: Whether the MLP gives nothing else, as a shared expert beside others does.

    Raises:
        NotInferredError: It does not get there as an addition.
    """
    clean = stage.clean.gave
    shift = torch.zeros_like(clean[path])
    shift[_EDITED] = (clean[path].roll(1, 1) - clean[path])[_EDITED]  # a change of size is invisible behind a norm
    changes = _changes(stage, path, shift)
    layer = changes.pop("")
    exact = dict[str, float]()
    for outer, change in changes.items():
        constant = _multiple(change, shift)
        if constant is None or not _contains(outer, path):
            continue
        beside = clean[outer] - constant * clean[path]  # some modules add the residual stream to it
        if not is_alone or _size(beside) <= _EXACT * _size(clean[outer]):
            exact[outer] = constant
    if not exact:
        raise NotInferredError(f"the output of {path!r} is zero")
    mlp = min(exact, key=len)
    factor = _rounded(exact[mlp])
    for weight in stage.linear([1]):  # a shared expert may have a weight for each token
        expected = changes[mlp] * clean[weight].sigmoid()
        if _size(layer - expected) <= _EXACT * _size(layer):
            return _Write(mlp, factor, weight=weight)
    may_differ = any(True for _ in stage.layer.buffers(recurse=False))  # such as a factor in front of every layer
    constant = _multiple(layer, changes[mlp])
    if constant is not None and not may_differ:
        return _Write(mlp, factor, write_factor=_rounded(constant))
    if not layer[_EDITED].any():
        raise NotInferredError(f"what {mlp!r} writes does not reach the residual stream")
    norm, is_same = _norm_of_write(stage, mlp, changes, layer)
    if is_same:
        return _Write(mlp, factor, post_norm=norm, adds=not may_differ)
    if norm is None and _spreads(layer) and not _is_same(_changes(stage, path, 2 * shift)[""], 2 * layer):
        raise NotInferredError(f"what {mlp!r} gives is not added to the residual stream, but read by another part")
    return _Write(mlp, factor, post_norm=norm, adds=False)


def _norm_of_write(stage: _Stage, mlp: str, changes: dict[str, Tensor], layer: Tensor) -> tuple[str | None, bool]:
    """The norm behind an MLP, if there is one, and whether what it gives is added to the residual stream as it is."""
    clean = stage.clean.gave
    reader = None
    for norm, change in changes.items():
        is_around = _contains(norm, mlp) or _is_equal(clean[norm], clean[""])
        if is_around or _spreads(change) or _widths(stage.layer.get_submodule(norm)) is not None:
            continue
        if _is_same(layer, change):
            return norm, True
        if reader is None and _is_equal(stage.clean.read[norm], clean[mlp]) and not _is_equal(clean[norm], clean[mlp]):
            reader = norm  # dropout gives what it reads
    return reader, False


def _changes(stage: _Stage, path: str, shift: Tensor) -> dict[str, Float[Tensor, "token d_model"]]:
    """What an addition to a module's output changes in what modules as wide as the residual stream give."""
    run = stage.run(stage.edit(path, lambda given: given + shift))
    clean = stage.clean.gave
    return {outer: gave - clean[outer] for outer, gave in run.gave.items() if gave.shape == clean[""].shape}


def _spreads(change: Tensor) -> bool:
    """Whether a change reaches other positions; behind a norm of the residual stream itself it does not."""
    elsewhere = change.clone()
    elsewhere[_EDITED] = 0
    return _size(elsewhere) > _EXACT * _size(change)


def _is_same(change: Tensor, other: Tensor) -> bool:
    return abs((_multiple(change, other) or 0) - 1) < _EXACT


def _rounded(constant: float) -> float:
    if abs(constant - 1) < _EXACT:
        return 1.0
    return float(f"{constant:.4g}")


def _experts(stage: _Stage) -> str | None:
    """The module of a layer that holds fused experts; None if there is none.

    Raises:
        NotInferredError: There is one, but what it gives is not what its weights say.
    """
    other = ""
    for path, gave in stage.clean.gave.items():
        module = stage.layer.get_submodule(path)
        if experts_of(module) is None or not len(gave):
            continue
        if gave.shape == stage.hidden.shape and _is_recomputed(stage, path):
            return path
        other = other or type(module).__name__
    if other:
        raise NotInferredError(f"its experts ({other}) compute something else than an MLP of the hidden states each")
    return None


def _is_recomputed(stage: _Stage, path: str) -> bool:
    """Whether the output of fused experts is what their weights say."""
    outputs = list[Tensor]()

    def compute(module: Any, args: Args, kwargs: Kwargs) -> None:
        experts = experts_of(module)
        if experts is not None:
            outputs.append(experts.output(experts.routed(args, kwargs)))

    try:
        stage.run((stage.layer.get_submodule(path), "pre", compute))
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    gave = stage.clean.gave[path]
    return _size(outputs[0] - gave) <= _EXACT * _size(gave)


# -- attention -----------------------------------------------------------------------------------------------------


def _attention(stage: _Stage) -> dict[str, Any]:
    """The attention of a layer, seen at the tap, by the adapter's fields; empty if the layer has none."""
    calls = stage.clean.attention
    if not calls:
        return {}
    if len(calls) > 1:
        raise NotInferredError(f"layer {stage.number} computes attention {len(calls)} times")
    call = calls[0]
    attn = stage.paths[call.module]
    last = {role: path for path, role in _roles(stage, attn).items()}  # of several that move the same, the projection
    fused = last.get("qkv")
    fields: dict[str, Any] = {"attn": attn, "q": None, "k": None, "v": None, "fused_qkv": fused}
    if fused is not None:
        fields["qkv_layout"] = _layout_of_fused(stage.clean.gave[fused], call)
    for name, tensor in _inputs(call).items():
        # One that gives more than the heads, such as a gate beside the queries, is not named.
        if fused is None and name in last:
            if stage.clean.gave[last[name]].shape[1] == tensor.shape[1] * tensor.shape[3]:
                fields[name] = last[name]
    fields["o"] = _output_projection(stage)
    fields["learned_sinks"] = call.settings.get("s_aux") is not None
    return fields


def _inputs(call: Any) -> dict[str, Float[Tensor, "1 head token width"]]:
    return {"q": call.query, "k": call.key, "v": call.value}


def _roles(stage: _Stage, attn: str) -> dict[str, str]:
    """Which of q, k and v depend on the output of each linear module."""
    linear = [path for path in stage.linear() if _contains(attn, path)]
    run, zeros = stage.run_to_derive(linear, cuts=False)
    roles = dict.fromkeys(linear, "")
    for name, tensor in _inputs(run.attention[0]).items():
        if tensor.requires_grad:
            for path in _derivatives(tensor, tensor.roll(1, -1), zeros):  # a plain sum may be constant behind a norm
                roles[path] += name
    return roles


def _weighing(stage: _Stage) -> str | None:
    """Path of the module that returns attention weights as its second output; None if none does.

    Raises:
        NotInferredError: Tokens attend to later ones.
    """
    weights: dict[str, Tensor] = {}

    def see(module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        if isinstance(output, tuple | list) and len(output) > 1 and isinstance(output[1], Tensor):
            if output[1].shape[-2:] == (_LENGTH, _LENGTH) and module is not stage.layer:
                weights[stage.paths[module]] = output[1].clone()

    stage.run(*[(module, "post", see) for module in stage.paths])
    if not weights:
        return None
    path = max(weights, key=len)
    if weights[path].triu(1).any():
        raise NotInferredError("its attention sees later tokens")
    return path


def _layout_of_fused(gave: Float[Tensor, "token outputs"], call: Any) -> str | None:
    """How a module gives queries, keys and values: as at the first position, where rotary embeddings leave them."""
    parts = [tensor[0, :, 0] for tensor in _inputs(call).values()]
    layouts = {"beside": torch.cat([part.flatten() for part in parts])}
    if len(parts[0]) == len(parts[1]):
        layouts["by head"] = torch.cat(parts, 1).flatten()
    for layout, given in layouts.items():
        if given.shape == gave[0].shape and _size(given - gave[0]) <= 1e-4 * _size(given):
            return layout
    return None


def _output_projection(stage: _Stage) -> str | None:
    """Path of the linear module that reads the heads side by side; None if there is none."""
    heads = stage.clean.attention[0].query.shape[1]
    second = 1 % heads

    def one_head(call: Any) -> tuple[Tensor, None]:
        output = call.value.new_zeros(1, _LENGTH, heads, call.value.shape[-1])
        output[0, _POSITION, second] = 1
        output[0, _POSITION, second, ::2] = -1  # with a mean of zero, for norms
        return output, None

    read = stage.run(compute=one_head).read
    for path in stage.linear():
        moved = (read[path][_POSITION] - read[path][_POSITION - 1]).abs()
        if len(moved) % heads == 0 and moved.any():
            by_head = rearrange(moved, "(head d_head) -> head d_head", head=heads).sum(1)
            if by_head[second] * (1 + _EXACT) >= by_head.sum():
                return path
    return None


def _middle(stage: _Stage, mlp: str | None) -> tuple[str, str] | None:
    """Where the residual stream is read between attention, or what stands in its place, and the MLP, if it has one.

    Returns:
        Path of the module that reads it, and of the one that has written to it before.
    """
    read, gave = stage.clean.read, stage.clean.gave
    for path in gave:
        if path == mlp:
            return None
        if read[path].shape != stage.hidden.shape:
            continue
        added = read[path] - stage.hidden
        if _size(added) <= 1e-6 * _size(stage.hidden):
            continue
        writers = [writer for writer in gave if gave[writer].shape == added.shape and _multiple(added, gave[writer])]
        if writers:
            readers = [
                outer for outer in read if outer and _contains(outer, path) and _is_equal(read[outer], read[path])
            ]
            return min(readers, key=len), min(writers, key=len)
    return None


# -- the model -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """What was found in the first layer of a kind.

    Attributes:
        number: Its number.
        parts: Paths of all of its modules.
        fields: Fields of the adapter; not those about parts that this layer does not have.
    """

    number: int
    parts: frozenset[str]
    fields: dict[str, Any]

    @classmethod
    def of(cls, stage: _Stage) -> _Kind:
        """Find the MLP of a layer, beside its attention."""
        heads = stage.heads
        fields: dict[str, Any] = {"mid": None}
        experts = _experts(stage)
        mlp = _mlp(stage, experts is None)
        write = None
        if mlp is not None:
            of_mlp, write = mlp
            fields |= {**of_mlp, "shared_gate": write.weight}
            fields["down_factor" if experts is None else "shared_factor"] = write.factor
        if experts is not None:
            routed = _write(stage, experts)
            # A shared expert inside the mixture is part of what that gives; one beside it has to be added like it.
            if write is not None and not _contains(routed.mlp, fields["down"]):
                if replace(write, mlp=routed.mlp) != replace(routed, factor=1.0):
                    raise NotInferredError("its shared expert stands beside the mixture, and is not simply added to it")
            write = routed
            fields |= {"experts": experts, "expert_factor": write.factor}
        if write is not None:
            fields |= {"mlp": write.mlp, "post_mlp_norm": write.post_norm}
            fields |= {"write_factor": write.write_factor, "adds": write.adds}
        middle = _middle(stage, experts or fields.get("down"))
        if middle is not None:
            fields["mid"], writer = middle
            fields["attn"] = heads.get("attn", writer)
            if heads and not _contains(fields["attn"], writer) and writer != heads["o"]:
                fields["post_attn_norm"] = writer
        return cls(stage.number, frozenset(stage.paths.values()) - {""}, fields | heads)

    def distinction(self, rivals: list[_Kind]) -> str:
        """A part that layers of this kind have and layers of other kinds do not have.

        Raises:
            NotInferredError: There is none.
        """
        own = [path for name, path in self.fields.items() if name in PATHS and path]
        for part in [*own, *sorted(self.parts, key=lambda part: (part.count("."), part))]:
            if not any(part in rival.parts for rival in rivals):
                return part
        raise NotInferredError(f"no part tells layer {self.number} from layers of other kinds")


DRAFT = Adapter("")
"""What a `Target` has until its adapter is known."""
_INFERRED: dict[str, Adapter] = {}  # by the configuration of the model that they were inferred from


def adapter_of(target: Target, *, proves: bool = True) -> Adapter:
    """The adapter of a model: its row if there is one, or else what is inferred from the model, once per configuration.

    A model whose modules are wrapped or quantised, or that holds no weights, is not called itself: a small one of its
    configuration is, with the first layers only.

    Args:
        target: The model; its own adapter is not read.
        proves: Whether what is inferred is proved at once, in the first layers.

    Raises:
        UnsupportedError: Nothing could be inferred, or the probe refuses it.
    """
    hf = target.hf
    key = _key(hf)
    adapter = row_of(hf.config.model_type) or _INFERRED.get(key)
    if adapter is not None:
        return adapter
    if target.is_elsewhere or target.kind == "bridge" or getattr(hf, "is_quantized", False):
        sample = _sample(hf)
        target = Target(sample, sample, "hf", DRAFT)
    adapter = _inferred(target.hf)
    _INFERRED[key] = adapter
    if proves:
        prove(replace(target, adapter=adapter), whole=False)
    return adapter


def _inferred(hf: Any) -> Adapter:
    """What is inferred from a model, or, where that fails, from one with other weights: zeros may show nothing."""
    try:
        return infer(hf)
    except UnsupportedError:
        with suppress(Exception):
            return infer(_sample(hf))
        raise


def prove(target: Target, *, whole: bool = True) -> None:
    """Raise if `probe` finds a problem. Models with weights on meta are skipped.

    Raises:
        UnsupportedError: There is a problem; the message says what, and what to try.
    """
    if target.is_elsewhere:
        return
    problem = probe(target, whole=whole).problem
    if problem is None:
        return
    adapter = target.adapter
    if _INFERRED.pop(_key(target.hf), None) is not None and target.kind == "hf":
        raise UnsupportedError(
            f"model type {adapter.model_type!r} has no adapter, and the inferred one is refused: {problem}; change "
            f"what is wrong and register it: sinkscope.models.adapters.register({shown_row(adapter)})",
            page="unsupported-model",
        )
    other = 'try backend="hf", or '
    if target.kind == "hf":
        other = ""
    raise UnsupportedError(
        f"the load-time probe of this {target.config.model_type} model failed ({target.kind}): {problem}; "
        f"{other}report it with the model's name; probe=False loads it all the same",
        page="probe-failed",
    )


def stack_of(hf: nn.Module) -> str:
    """Path of the list of decoder layers.

    Raises:
        UnsupportedError: There is none.
    """
    model: Any = hf
    row = row_of(model.config.model_type)
    if row is not None:
        return row.layers
    try:
        return _stack(hf, {module: name for name, module in hf.named_modules()})
    except NotInferredError as error:
        raise _not_inferred(model, error) from None


def _not_inferred(model: Any, error: NotInferredError) -> UnsupportedError:
    return UnsupportedError(
        f"model type {model.config.model_type!r} has no adapter, and none could be inferred: {error}; write one with "
        "sinkscope.models.adapters.register (see docs/extending.md)",
        page="unsupported-model",
    )


def _key(hf: Any) -> str:
    """What models of one class and configuration have in common."""
    config = hf.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype", "architectures"):
        config.pop(name, None)
    return f"{type(hf).__name__} {sorted(config.items(), key=str)}"


def _sample(hf: Any) -> Any:
    """A random model of a configuration, with its first layer of each kind and those before it."""
    config = copy.deepcopy(hf.config)
    text = config.get_text_config()
    draft = Target(hf, hf, "hf", replace(DRAFT, layers=stack_of(hf)))
    depth = max(first_of_kinds(draft)) + 1
    cut_depth(text, max(depth, 2))
    text.vocab_size, text.pad_token_id = _SAMPLE_TOKENS, 0
    with torch.random.fork_rng(devices=[]):
        return new_model(config).float().eval().requires_grad_(False)


def infer(hf: nn.Module) -> Adapter:
    """Infer the adapter of a model from a few passes over a few tokens. The model is left as it was.

    Args:
        hf: The plain Hugging Face model. Of a model whose layers are read from disk, only the first layer of each kind
            and the ones before it are read.

    Raises:
        UnsupportedError: Some part was not found; the message says which.
    """
    model: Any = hf
    model_type = str(model.config.model_type)
    try:
        with torch.no_grad():
            return replace(_infer(model), model_type=model_type)
    except (MemoryError, torch.OutOfMemoryError, SinkscopeError):
        raise
    except NotInferredError as error:
        raise _not_inferred(model, error) from None
    except Exception as error:  # a model may do anything in a pass
        error = NotInferredError(f"a pass raised {type(error).__name__}: {first_line(error)}")
        raise _not_inferred(model, error) from None


def _infer(model: Any) -> Adapter:
    from sinkscope.trace.attention import eager, listening

    names = {module: name for name, module in model.named_modules()}
    stack = _stack(model, names)
    base = stack
    while base and "input_ids" not in inspect.signature(model.get_submodule(base).forward).parameters:
        base = base.rpartition(".")[0]
    draft = replace(DRAFT, base=base, layers=stack, embed=names[model.get_input_embeddings()])
    target = Target(model, model, "hf", draft)
    tap = _Tap()
    with listening(target, tap.see):
        try:
            stages = _stages(target, tap)
        except (AttributeError, TypeError):  # some models outside the interface cannot run under its name
            stages = list[_Stage]()
        if any(stage.heads for stage in stages):
            return _merged(draft, stages)
    with eager(target):
        found = dict.fromkeys(_weighing(stage) for stage in _stages(target, tap))
    path = "|".join(path for path in found if path is not None)
    if not path:
        raise NotInferredError(
            "no softmax attention was found in its layers, neither at transformers' interface nor as the second output "
            "of a module"
        )
    outside = replace(target, adapter=replace(draft, attn=path, attention_interface=False))
    with eager(outside), listening(outside, tap.see):
        return _merged(outside.adapter, _stages(outside, tap))


def _stack(model: Any, names: dict[nn.Module, str]) -> str:
    """Path of the list of decoder layers: the largest list of as many as the configuration says, of those that run.

    Raises:
        NotInferredError: There is none.
    """
    depth = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    sizes = dict[nn.ModuleList, int]()
    for module in names:
        if isinstance(module, nn.ModuleList) and len(module) and depth in (None, len(module)):
            sizes[module] = sum(parameter.numel() for parameter in module.parameters())
    if len(sizes) > 1 and not any(parameter.is_meta for parameter in model.parameters()):
        running = list[nn.Module]()  # image towers do not
        hooks: list[Hook] = [(stack[0], "pre", lambda module, *_: running.append(module)) for stack in sizes]
        with Target(model, model, "hf", DRAFT).hooks(*hooks):
            model(input_ids=torch.arange(16, 16 + _LENGTH, device=model.device)[None], use_cache=False)
        sizes = {stack: size for stack, size in sizes.items() if stack[0] in running}
    if not sizes:
        raise NotInferredError(f"it has no list of {depth} layers, one for each that its configuration names")
    return names[max(sizes, key=lambda stack: sizes[stack])]


def first_of_kinds(target: Target) -> list[int]:
    """The first layer of each kind: layers of a kind have parameters of the same names and shapes."""
    firsts = dict[str, int]()
    for number, layer in enumerate(target.layers):
        firsts.setdefault(kind_of(layer), number)
    return list(firsts.values())


def _stages(target: Target, tap: _Tap) -> list[_Stage]:
    """The first layer of each kind, with the input that it gets."""
    firsts = first_of_kinds(target)
    calls = dict[int, tuple[Args, Kwargs]]()

    def keep(number: int, _module: Any, args: Args, kwargs: Kwargs) -> None:
        if number in calls:
            raise NotInferredError(f"layer {number} runs several times in a pass")
        hidden = hidden_of(args, kwargs).clone()  # some layers add to it in place
        calls[number] = with_hidden(args, kwargs, hidden)
        if number == max(firsts):
            target.stop()

    with target.hooks(*[(target.layers[number], "pre", partial(keep, number)) for number in firsts]):
        ids = token_ids(target, _LENGTH)
        ids[:, -_EQUAL:] = ids[:, -1:]
        target.forward(ids)
    stages: list[_Stage] = []
    for number, (args, kwargs) in sorted(calls.items()):
        hidden = hidden_of(args, kwargs)
        if hidden.ndim != 3 or hidden.shape[:2] != (1, _LENGTH):
            raise NotInferredError(
                f"its layers do not get one residual stream of {_LENGTH} tokens, but of shape {tuple(hidden.shape)}"
            )
        stages.append(_Stage(target, number, args, kwargs, tap))
    return stages


def _merged(draft: Adapter, stages: list[_Stage]) -> Adapter:
    """One adapter for all kinds of layers.

    Raises:
        NotInferredError: No layer has an MLP, or layers differ where a row has one value.
    """
    kinds = [_Kind.of(stage) for stage in stages]
    settings: dict[str, Any] = {}
    for name in dict.fromkeys(name for kind in kinds for name in kind.fields):
        values = list(dict.fromkeys(kind.fields[name] for kind in kinds if name in kind.fields))
        if name in PATHS:
            settings[name] = _spec(name, kinds)
        elif len(values) == 1:
            settings[name] = values[0]
        elif name in _IF_MIXED:
            settings[name] = _IF_MIXED[name]
        else:
            raise NotInferredError(f"{name!r} of the adapter is {values[0]} in one layer, {values[1]} in another")
    if "mlp" not in settings:
        raise NotInferredError("no MLP was found in its layers")
    target = stages[0].target
    layer = max(stages[-1].number, 1)  # one of another kind than the first may read what that has kept
    settings["from_any_layer"] = layer < len(target.layers) and begins_at(target, layer, layer)
    return replace(draft, **settings, absolute_positions=_has_positions(target))


def _has_positions(target: Target) -> bool:
    """Whether one token enters the first layer otherwise at any two positions."""
    entering = list[Tensor]()
    ids = token_ids(target, 1).expand(1, _LENGTH)
    with target.hooks((target.layers[0], "pre", on_input(entering.append))):
        target.forward(ids, upto=0)
    stream = _flat(entering[0])
    return _size(stream - stream[:1]) > 1e-6


def _spec(name: str, kinds: list[_Kind]) -> str | None:
    """The path of a part, with alternatives for kinds of layers that have it elsewhere; None if no layer has it."""
    alternatives = dict[str, None]()
    for kind in kinds:
        path = kind.fields.get(name)
        if path is None:
            continue
        rivals = [other for other in kinds if other.fields.get(name) != path and path in other.parts]
        if name == "mid":  # where it was not found, it may be there all the same
            rivals = [other for other in rivals if other.fields[name] is not None]
        if rivals:
            path = f"{kind.distinction(rivals)}?{path}"
        alternatives[path] = None
    return "|".join(alternatives) or None
