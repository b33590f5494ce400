"""Read the adapter of a model off the model itself, by edits alone; no module's name is known beforehand.

One layer of each kind is called again and again with the input that it got in a pass over a few tokens. What an edit
of one module changes at the others tells which module is what:

1. the layers are the largest list of modules that runs;
2. the down projection of an MLP is linear. Its input changes in one place only when one output of an earlier linear
   module is edited, and does not change with the text while these earlier outputs are held;
3. moving one of its inputs must add a multiple of one column of its weight to the layer's output, directly or through
   a norm; `up` is the factor in which that input is linear;
4. experts are recomputed from hidden states, choice and weights;
5. attention is captured at transformers' attention interface: what moves queries, keys or values is a projection, and
   the output projection reads the heads side by side.

`models.probe` then proves the adapter on the model's own weights.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.models.adapters import Adapter, row_of
from sinkscope.models.config import cut_depth, first_line, new_model
from sinkscope.models.experts import Experts, experts_of
from sinkscope.models.probe import begins_at, probe, token_ids
from sinkscope.models.scope import shown_row
from sinkscope.models.target import (
    Args,
    Hook,
    Kwargs,
    Stop,
    Target,
    first_tensor,
    hidden_of,
    kind_of,
    on_hidden,
    on_input,
    replaced_forwards,
    with_hidden,
)

_LENGTH = 9
_POSITION = 5  # of the edits
_EDITED = (2, _POSITION)  # where an edit is followed to the residual stream: what multiplies it must be the same twice
_EXACT = 2e-3  # largest relative distance between what an edit changed and what it must change
_ROWS = 128  # of a weight in half precision that are converted at a time: they stay in the cache
_NEURONS = 16  # of which one is chosen to be edited
_SAMPLE_TOKENS = 64  # in the vocabulary of a model that is made to infer an adapter from it
_STEPS = (0.7, -0.9, 3.0, -3.0)  # of an output that is edited, until its effect shows (an activation may be flat)


class NotInferredError(Exception):
    """The message says what was not found, as the end of a sentence about the model."""


class NoAttentionError(NotInferredError):
    """There is nothing that an adapter could name."""


# -- one layer, called again ---------------------------------------------------------------------------------------


def _is_transposed(module: nn.Module) -> bool:
    return type(getattr(module, "base_layer", module)).__name__ == "Conv1D"


def _widths(module: nn.Module) -> tuple[int, int] | None:
    """Outputs and inputs of a linear module; None if it is something else."""
    module = getattr(module, "base_layer", module)  # of an adapter
    weight = getattr(module, "weight", None)
    if _is_transposed(module) and isinstance(weight, Tensor):
        return int(weight.shape[1]), int(weight.shape[0])
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return int(module.out_features), int(module.in_features)  # type: ignore[arg-type]
    return None


def _flat(value: Any) -> Float[Tensor, "token width"]:
    """A copy of the first floating-point tensor among a module's inputs, or in its output, or no token."""
    values: Sequence[Any] = [value]
    if isinstance(value, tuple | list):
        values = value
    for tensor in values:
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.ndim >= 2:
            return tensor.detach().clone().reshape(-1, tensor.shape[-1])
    return torch.empty(0, 0)


@dataclass(frozen=True, eq=False)
class _Passage:
    """What one module of a layer read and gave in one call."""

    path: str
    module: nn.Module
    read: Float[Tensor, "token inputs"]
    gave: Float[Tensor, "token outputs"]

    def is_linear_with(self, outputs: Sequence[int]) -> bool:
        """Whether this is a linear module with so many outputs, which saw every token."""
        widths = _widths(self.module)
        return widths is not None and widths[0] in outputs and len(self.gave) == _LENGTH


class _Stage:
    """A layer with the input that it got in a pass; `run` calls it again.

    Linear modules do not compute again what they know: nearly all of the time would go there.
    """

    def __init__(self, target: Target, number: int, args: Args, kwargs: Kwargs) -> None:
        self.target, self.number, self.layer = target, number, target.layers[number]
        self._args, self._kwargs = args, kwargs
        if target.dtype in (torch.float32, torch.float64):
            self._begin()
            return
        self._args, self._kwargs = _as_float32(args), _as_float32(kwargs)  # in half precision, edits drown in rounding
        try:
            self.layer = _in_float32(target.layers[number], shares=True)
            self._begin()
        except RuntimeError:  # some layers read the weight of a linear module themselves
            self.layer = _in_float32(target.layers[number], shares=False)
            self._begin()

    def _begin(self) -> None:
        """Call the layer for the first time."""
        self.hidden = hidden_of(self._args, self._kwargs)
        linear = [path for path, module in self.layer.named_modules() if _widths(module) is not None]
        self.paths = dict[nn.Module, str]()
        for path, module in self.layer.named_modules():
            if not any(path != outer and _contains(outer, path) for outer in linear):  # an adapter's parts are no parts
                self.paths[module] = path
        self._first = dict[nn.Module, tuple[Tensor, Tensor]]()  # what plain linear modules read and gave at first
        self.clean = list[_Passage]()
        self.output = self.run(*[(module, "post", self._note) for module in self.paths])
        self.d_model = self.output.shape[-1]

    def _note(self, module: nn.Module, args: Args, kwargs: Kwargs, output: Any) -> None:
        if module is not self.layer:
            self.clean.append(_Passage(self.paths[module], module, _flat((*args, *kwargs.values())), _flat(output)))

    def _remembering(self, module: nn.Module, held: bool, blind: bool) -> Callable[[Tensor], Tensor]:
        """The forward function of a linear module."""
        compute = partial(_linear, module, module.forward)

        def forward(hidden: Tensor) -> Tensor:
            if module not in self._first:
                self._first[module] = hidden.clone(), compute(hidden)
            read, gave = self._first[module]
            if read.shape == hidden.shape and (held or torch.equal(read, hidden)):
                return gave.clone()
            if blind:
                return hidden.new_zeros(*hidden.shape[:-1], gave.shape[-1])
            return compute(hidden)

        return forward

    def run(
        self, *hooks: Hook, shuffled: bool = False, held: Sequence[nn.Module] = (), blind: bool = False
    ) -> Float[Tensor, "token d_model"]:
        """Call the layer.

        Args:
            hooks: Hooks.
            shuffled: Put its input into another order.
            held: Linear modules that give what they gave at first.
            blind: Linear modules give zero if their input is another than at first.
        """
        hidden = self.hidden.clone()
        if shuffled:
            hidden = hidden.roll(2, 1)
        forwards = dict[nn.Module, Callable[..., Any]]()
        for module in self.layer.modules():
            if type(module) is nn.Linear or type(module).__name__ == "Conv1D":
                forwards[module] = self._remembering(module, module in held, blind)
        with replaced_forwards(forwards), self.target.hooks(*hooks):
            args, kwargs = with_hidden(self._args, self._kwargs, hidden)
            output = self.layer(*args, **kwargs)
        return first_tensor(output).detach().reshape(-1, hidden.shape[-1])

    def read_by(self, module: nn.Module, *hooks: Hook, **calling: Any) -> Float[Tensor, "token width"]:
        """What a module reads when the layer is called under hooks."""
        read = list[Tensor]()

        def see(_module: Any, args: Args, kwargs: Kwargs) -> None:
            read.append(_flat((*args, *kwargs.values())))
            Target.stop()

        with suppress(Stop):  # what comes behind the module is not computed
            self.run(*hooks, (module, "pre", see), **calling)
        return read[0]

    def changes(self, *hooks: Hook) -> dict[str, Float[Tensor, "_ _"]]:
        """What hooks change in the output of every module (""; the layer), where it has the width of the stream."""
        changes = dict[str, Tensor]()
        before = {passage.path: passage.gave for passage in self.clean}

        def see(module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
            path, now = self.paths[module], _flat(output)
            if path in before and now.shape == before[path].shape == (_LENGTH, self.d_model):
                changes[path] = now - before[path]

        watched: list[Hook] = [(module, "post", see) for module in self.paths]
        changes[""] = self.run(*hooks, *watched) - self.output
        return changes


def _in_float32(layer: nn.Module, shares: bool) -> nn.Module:
    """A copy of a layer that shares configurations, because the tap goes by them, and linear weights if it `shares`."""
    copied = dict[int, Any]()
    for module in layer.modules():
        config = getattr(module, "config", None)
        copied[id(config)] = config
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            is_shared = shares and type(module) is nn.Linear and tensor.ndim == 2
            copied[id(tensor)] = tensor if is_shared else _as_float32(tensor)
    return copy.deepcopy(layer, copied)


def _linear(module: Any, forward: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """What a linear module gives in float32; a weight in half precision is not copied as a whole."""
    if type(module) is not nn.Linear or module.weight.dtype == hidden.dtype:
        return forward(hidden)
    parts = [nn.functional.linear(hidden, rows.float()) for rows in module.weight.split(_ROWS)]
    given = torch.cat(parts, -1)
    if module.bias is not None:
        given += module.bias
    return given


def _as_float32(value: Any) -> Any:
    """Arguments with their floating-point tensors in float32."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.float()
    if isinstance(value, tuple | list):
        return type(value)([_as_float32(item) for item in value])
    if isinstance(value, dict):
        return {name: _as_float32(item) for name, item in value.items()}
    return value


def _edited(edit: Callable[[Tensor], Tensor | None], tensor: Tensor) -> Tensor | None:
    """A tensor after an edit of a copy `[token width]`; None if it is about something else than the tokens."""
    flat = tensor.clone(memory_format=torch.contiguous_format).view(-1, tensor.shape[-1])
    if len(flat) != _LENGTH:  # some modules run once more
        return None
    new = edit(flat)
    return (flat if new is None else new).view(tensor.shape)


def _edit_output(module: nn.Module, edit: Callable[[Tensor], Tensor | None]) -> Hook:
    """A hook that replaces a module's output; `edit` sees a copy, which it may change in place."""
    return module, "post", on_hidden(partial(_edited, edit))


def _move(columns: Any, by: float, tensor: Tensor) -> None:
    """Move some columns at the edited position, by multiples of the typical size."""
    tensor[_POSITION, columns] += by * tensor[_POSITION].abs().mean().clamp(min=1)


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

    mlp: str = ""
    factor: float = 1.0
    post_norm: str | None = None
    write_factor: float = 1.0
    weight: str | None = None
    adds: bool = True


@dataclass(frozen=True)
class _Mlp:
    """A down projection, what feeds it, and where its output goes.

    Attributes:
        down: The passage of the down projection.
        factors: Paths of the linear factor, or of both side by side, and of the gate; None where a norm stands behind
            their product, or there is no gate.
        is_fused: Whether one module gives gate and up side by side.
        write: Where its output goes.
    """

    down: _Passage
    factors: tuple[str | None, str | None]
    is_fused: bool
    write: _Write


def _mlp(stage: _Stage, is_alone: bool) -> _Mlp | None:
    """The MLP of a layer that all tokens go through, the widest if there are several; None if there is none."""
    failure: NotInferredError | None = None
    downs = [passage for passage in stage.clean if passage.is_linear_with((stage.d_model,))]
    for down in sorted(downs, key=lambda down: -down.read.shape[1]):
        layouts = _factors(stage, down)
        if layouts:
            try:
                factors = _named(stage, down, layouts)
                return _Mlp(down, factors, "halves" in layouts.values(), _write_of(stage, down, is_alone))
            except NotInferredError as error:
                failure = failure or error
    if failure is not None:
        raise failure
    return None


def _write_of(stage: _Stage, down: _Passage, is_alone: bool) -> _Write:
    """Where the output of a down projection goes."""
    neuron, column = _column(down)
    step = float(down.read[_POSITION].norm().clamp(min=1))

    def edit(tensor: Tensor) -> None:
        tensor[list(_EDITED), neuron] += step

    written = repeat(step * column, "d_model -> edited d_model", edited=len(_EDITED))
    return _write(stage, down.path, (down.module, "pre", on_input(partial(_edited, edit))), written, is_alone)


def _factors(stage: _Stage, down: _Passage) -> dict[str, str]:
    """What feeds a down projection: layout ("same", "halves") by path; empty if it is not fed by these alone."""
    plain, coupled = dict[str, str](), dict[str, str]()
    width = down.read.shape[1]
    for passage in stage.clean[: stage.clean.index(down)]:
        if len(down.read) == _LENGTH and passage.is_linear_with((width, 2 * width)):
            layout = _layout(stage, passage, down)
            if layout == "coupled":
                coupled[passage.path] = layout
            elif layout is not None:
                plain[passage.path] = layout
    if plain and _is_held_by(stage, list(plain), down):
        return plain
    if coupled and _is_held_by(stage, [*plain, *coupled], down):  # a norm in between couples the neurons of a token
        return coupled
    return {}


def _layout(stage: _Stage, passage: _Passage, down: _Passage) -> str | None:
    """How the input of `down` hangs on a module's outputs; None if not neuron by neuron and token by token."""
    neurons, outputs = down.read.shape[1], passage.gave.shape[1]
    columns = down.read[_POSITION].abs().topk(2).indices.tolist()  # a neuron at zero may not move, behind a ReLU
    if outputs == 2 * neurons:
        columns[1] += neurons
    layouts = set[str]()
    for column in columns:
        moved = _moved_by(stage, passage, column, down)
        if moved is None:
            continue
        token, neuron = moved.nonzero().unbind(1)
        if set(token.tolist()) != {_POSITION}:
            return None
        if len(neuron) > 1:
            layouts.add("coupled")
        elif int(neuron) != column % neurons:
            return None
        else:
            layouts.add("same" if outputs == neurons else "halves")
    if len(layouts) != 1:
        return None
    return layouts.pop()


def _moved_by(stage: _Stage, passage: _Passage, column: int, down: _Passage) -> Tensor | None:
    """Which inputs of `down` change when one output of a module is moved; None if none ever does."""
    for step in _STEPS:
        read = stage.read_by(down.module, _edit_output(passage.module, partial(_move, column, step)))
        change = (read - down.read).abs()
        if _size(change) > 1e-6:
            return change > max(1e-5 * (_size(down.read) + _size(change)), 1e-6)
    return None


def _is_held_by(stage: _Stage, paths: list[str], down: _Passage) -> bool:
    """Whether the input of `down` stays as it is with other hidden states, while the outputs of modules are held."""
    held = {passage.path: passage for passage in stage.clean if passage.path in paths}
    hooks = [_edit_output(passage.module, partial(_replaced, passage.gave)) for passage in held.values()]
    modules = [passage.module for passage in held.values()]
    read = stage.read_by(down.module, *hooks, shuffled=True, held=modules)
    return _size(read - down.read) <= 1e-4 * (1e-3 + _size(down.read))


def _replaced(clean: Tensor, _tensor: Tensor) -> Tensor:
    return clean


def _named(stage: _Stage, down: _Passage, layouts: dict[str, str]) -> tuple[str | None, str | None]:
    """Paths of `up`, in which the product is linear, and of the gate."""
    is_fused = "halves" in layouts.values()
    is_sum = len(layouts) > 2 or (len(layouts) == 2 and is_fused)
    if "coupled" in layouts.values() or is_sum:  # a norm stands behind the product, or no module gives a factor
        return None, None
    linear = [path for path in layouts if _is_linear_in(stage, down, path, layouts[path])]
    if is_fused and not linear:
        raise NotInferredError(f"the two halves of {next(iter(layouts))!r} are not gate and up in this order")
    up = [*linear, *reversed(layouts)][0]
    others = [path for path in layouts if path != up]
    return up, next(iter(others), None)


def _is_linear_in(stage: _Stage, down: _Passage, path: str, layout: str) -> bool:
    """Whether the input of `down` is linear in a module's output (its second half, if it gives two)."""
    module = stage.layer.get_submodule(path)
    first = down.read.shape[1] if layout == "halves" else 0
    changes = list[Tensor]()
    for step in (2.0, -2.0):
        edit = _edit_output(module, partial(_move, slice(first, None), step))
        changes.append(stage.read_by(down.module, edit) - down.read)
    return _size(changes[0] + changes[1]) <= 1e-3 * _size(changes[0])


def _column(passage: _Passage) -> tuple[int, Float[Tensor, " d_model"]]:
    """A neuron whose column is neither zero nor large, and the column: what a unit input writes, without the bias."""
    units = torch.eye(_NEURONS + 1, passage.read.shape[1]).to(passage.read)
    units[-1] = 0
    written = _linear(passage.module, passage.module.forward, units)
    columns = (written[:-1] - written[-1]).detach()
    neuron = int(columns.norm(dim=1).argsort()[_NEURONS // 2])
    return neuron, columns[neuron]


def _write(
    stage: _Stage, path: str, edit: Hook, written: Float[Tensor, "edited d_model"], is_alone: bool = False
) -> _Write:
    """Follow what an edit adds to the output of a module up to the layer's output.

    Args:
        stage: The layer.
        path: Path of the module.
        edit: The edit.
        written: What it adds, at the edited positions.
        is_alone: Whether the MLP gives nothing else, as a shared expert beside others does.

    Raises:
        NotInferredError: It does not get there as an addition.
    """
    changes = stage.changes(edit)
    layer = changes.pop("")
    expected = torch.zeros_like(layer)
    expected[list(_EDITED)] = written.to(layer)
    exact = dict[str, float]()
    gave = {passage.path: passage.gave for passage in stage.clean}
    for outer, change in changes.items():
        constant = _multiple(change, expected)
        if constant is None or not _contains(outer, path):
            continue
        beside = gave[outer] - constant * gave[path]  # some modules add the residual stream to it
        if not is_alone or _size(beside) <= _EXACT * _size(gave[outer]):
            exact[outer] = constant
    if path not in exact:
        raise NotInferredError(f"an edit of {path!r} does not add what its weights say")
    mlp = min(exact, key=len)
    factor = _rounded(exact[mlp])
    weight = _token_weight(stage, layer, changes[mlp])
    if weight is not None:
        return _Write(mlp, factor, weight=weight)
    may_differ = any(True for _ in stage.layer.buffers(recurse=False))  # such as a factor in front of every layer
    constant = _multiple(layer, changes[mlp])
    if constant is not None and not may_differ:
        return _Write(mlp, factor, write_factor=_rounded(constant))
    if not layer[list(_EDITED)].any():
        raise NotInferredError(f"what {mlp!r} writes does not reach the residual stream")
    norm = _norm_behind(stage, mlp, changes, layer)
    if norm is None and _spreads(layer) and abs((_multiple(stage.changes(edit, edit)[""], layer) or 0) - 2) > _EXACT:
        raise NotInferredError(f"what {mlp!r} gives is not added to the residual stream, but read by another part")
    adds = norm is not None and not may_differ and _is_same(layer, changes[norm])
    return _Write(mlp, factor, post_norm=norm, adds=adds)


def _norm_behind(stage: _Stage, mlp: str, changes: dict[str, Tensor], layer: Tensor) -> str | None:
    """Path of the module behind an MLP that treats each position alone: what it gives is added, or it reads the MLP."""
    given = next(passage.gave for passage in stage.clean if passage.path == mlp)
    readers = list[str]()
    for passage in stage.clean:
        change = changes.get(passage.path)
        is_around = _contains(passage.path, mlp) or _is_equal(passage.gave, stage.output)
        if change is None or is_around or _widths(passage.module) is not None:
            continue
        if _spreads(change):
            continue
        if _is_same(layer, change):
            return passage.path
        if _is_equal(passage.read, given) and not _is_equal(passage.gave, given):  # dropout gives what it reads
            readers.append(passage.path)
    return next(iter(readers), None)


def _spreads(change: Tensor) -> bool:
    """Whether a change reaches other positions; behind a norm of the residual stream itself it does not."""
    elsewhere = change.clone()
    elsewhere[list(_EDITED)] = 0
    return _size(elsewhere) > _EXACT * _size(change)


def _is_same(change: Tensor, other: Tensor) -> bool:
    return abs((_multiple(change, other) or 0) - 1) < _EXACT


def _contains(path: str, other: str) -> bool:
    return f"{other}.".startswith(f"{path}.")


def _token_weight(stage: _Stage, layer: Tensor, written: Tensor) -> str | None:
    """Path of the module whose sigmoid, one number for each token, multiplies what is written; None if none does."""
    edited = list(_EDITED)
    for passage in stage.clean:
        if passage.is_linear_with((1,)):
            expected = written * passage.gave.sigmoid()
            if _size((layer - expected)[edited]) <= _EXACT * _size(layer[edited]):
                return passage.path
    return None


def _rounded(constant: float) -> float:
    if abs(constant - 1) < _EXACT:
        return 1.0
    return float(f"{constant:.4g}")


# -- experts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Mixture:
    """Fused experts of a layer, and where their output goes."""

    path: str
    write: _Write


def _mixture(stage: _Stage) -> _Mixture | None:
    """The fused experts of a layer; None if it has none.

    Raises:
        NotInferredError: There are some, but what they give is not what their weights say.
    """
    other = ""
    for passage in stage.clean:
        experts = experts_of(passage.module)
        if experts is None or not len(passage.gave):
            continue
        if passage.gave.shape[-1] != stage.d_model:
            given, stream = passage.gave.shape[-1], stage.d_model
            raise NotInferredError(f"its experts give {given} numbers a token, and its residual stream has {stream}")
        if passage.gave.shape != stage.output.shape or not _is_recomputed(stage, passage, experts):
            other = other or type(passage.module).__name__
            continue
        shift = (passage.gave.roll(1, 1) - passage.gave)[list(_EDITED)]  # a change of size is invisible behind a norm

        def edit(tensor: Tensor, shift: Tensor = shift) -> None:
            tensor[list(_EDITED)] += shift

        return _Mixture(passage.path, _write(stage, passage.path, _edit_output(passage.module, edit), shift))
    if other:
        raise NotInferredError(f"its experts ({other}) compute something else than an MLP of the hidden states each")
    return None


def _is_recomputed(stage: _Stage, passage: _Passage, experts: Experts) -> bool:
    """Whether the output of fused experts is what their weights say."""
    outputs = list[Tensor]()

    def compute(_module: Any, args: Args, kwargs: Kwargs) -> None:
        outputs.append(experts.output(experts.routed(args, kwargs)))

    try:
        stage.run((passage.module, "pre", compute))
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    return _size(outputs[0] - passage.gave) <= _EXACT * _size(passage.gave)


# -- attention -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Heads:
    """The attention of a layer: paths by the adapter's fields, layout of a fused projection, learned sink logits."""

    paths: dict[str, str | None]
    layout: str | None
    has_sinks: bool


class _Tap:
    """What the attention tap sees while layers are called: queries, keys and values, which may be replaced behind."""

    def __init__(self) -> None:
        self._calls = list[Any]()
        self._compute: Callable[[Any], Any] | None = None
        self._is_last = False

    def see(self, call: Any) -> None:
        """The function that the tap calls with the attention of every layer."""
        call.compute = self._compute
        if not call.is_again:
            self._calls.append(call)
        if self._is_last:
            Target.stop()

    def calls(self, stage: _Stage, *hooks: Hook) -> list[Any]:
        """Every attention call of a layer."""
        self._calls = []
        stage.run(*hooks)
        return self._calls

    def first_call(self, stage: _Stage, *hooks: Hook) -> Any:
        """The first attention call of a layer, which ends there."""
        self._is_last = True
        with suppress(Stop):
            self.calls(stage, *hooks)
        self._is_last = False
        return self._calls[0]

    def replace(self, stage: _Stage, compute: Callable[[Any], Any], *hooks: Hook) -> None:
        """Call a layer with another output of its attention; only what is computed from it at once is right."""
        self._compute = compute
        stage.run(*hooks, blind=True)
        self._compute = None


def _attention(stage: _Stage, tap: _Tap) -> _Heads | None:
    """The attention of a layer, seen at the tap; None if the layer has none."""
    seen = tap.calls(stage)
    if not seen:
        return None
    if len(seen) > 1:
        raise NotInferredError(f"layer {stage.number} computes attention {len(seen)} times")
    clean = seen[0]
    attn = stage.paths[clean.module]
    roles = dict[str, str]()
    for passage in stage.clean:
        if not _contains(attn, passage.path) or _widths(passage.module) is None or len(passage.gave) != _LENGTH:
            continue
        edited = tap.first_call(stage, _edit_output(passage.module, _scramble))
        roles[passage.path] = _moved_inputs(clean, edited)
    paths: dict[str, str | None] = {"attn": attn, **_projections(stage, roles, clean)}
    paths["o"] = _output_projection(stage, tap)
    fused = paths["fused_qkv"]
    layout = None
    if fused is not None:
        layout = _layout_of_fused(stage, fused, clean)
    return _Heads(paths, layout, clean.settings.get("s_aux") is not None)


def _weighing(stage: _Stage) -> str | None:
    """Path of the module that returns attention weights as its second output; None if none does.

    Raises:
        NotInferredError: Tokens attend to later ones.
    """
    weights: dict[str, Tensor] = {}

    def see(module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        if isinstance(output, tuple | list) and len(output) > 1 and isinstance(output[1], Tensor):
            if output[1].shape[-2:] == (_LENGTH, _LENGTH):
                weights[stage.paths[module]] = output[1].clone()

    stage.run(*[(module, "post", see) for module in stage.paths])
    inside = [path for path in weights if path]
    if not inside:
        return None
    path = max(inside, key=len)
    if weights[path].triu(1).any():
        raise NotInferredError("its attention sees later tokens")
    return path


def _scramble(tensor: Tensor) -> None:
    noise = torch.randn(tensor.shape[1], generator=torch.Generator().manual_seed(1))
    tensor[_POSITION] += noise.to(tensor) * tensor[_POSITION].abs().mean().clamp(min=1e-2)


def _moved_inputs(before: Any, after: Any) -> str:
    """Which of q, k and v differ between two calls of attention."""
    moved = ""
    for name, then, now in (
        ("q", before.query, after.query),
        ("k", before.key, after.key),
        ("v", before.value, after.value),
    ):
        if then.shape == now.shape and _size(then - now) > 1e-6:
            moved += name
    return moved


def _projections(stage: _Stage, roles: dict[str, str], call: Any) -> dict[str, str | None]:
    """The projections by what they move; of several that move the same, the last is the projection.

    One that gives more than the heads, such as a gate beside the queries, is not named.
    """
    last = {role: path for path, role in roles.items()}
    paths = {"q": None, "k": None, "v": None, "fused_qkv": last.get("qkv")}
    for name, tensor in (("q", call.query), ("k", call.key), ("v", call.value)):
        if name in last and paths["fused_qkv"] is None:
            widths = _widths(stage.layer.get_submodule(last[name]))
            if widths is not None and widths[0] == tensor.shape[1] * tensor.shape[3]:
                paths[name] = last[name]
    return paths


def _layout_of_fused(stage: _Stage, path: str, call: Any) -> str | None:
    """How a module gives queries, keys and values: as at the first position, where rotary embeddings leave them."""
    (given,) = [passage.gave[0] for passage in stage.clean if passage.path == path]
    parts = [tensor[0, :, 0] for tensor in (call.query, call.key, call.value)]
    beside = torch.cat([part.flatten() for part in parts])
    if beside.shape == given.shape:
        if _size(beside - given) <= 1e-4 * _size(given):
            return "beside"
        if len(parts[0]) == len(parts[1]) and _size(torch.cat(parts, 1).flatten() - given) <= 1e-4 * _size(given):
            return "by head"
    return None


def _output_projection(stage: _Stage, tap: _Tap) -> str | None:
    """Path of the linear module that reads the heads side by side; None if there is none."""
    heads = 1

    def one_head(call: Any) -> tuple[Tensor, None]:
        nonlocal heads
        batch, heads, queries, _ = call.query.shape
        output = call.value.new_zeros(batch, queries, heads, call.value.shape[-1])
        output[0, _POSITION, 1 % heads] = 1
        output[0, _POSITION, 1 % heads, ::2] = -1  # with a mean of zero, for norms
        return output, None

    reads = dict[str, Tensor]()

    def see(module: Any, args: Args, kwargs: Kwargs) -> None:
        tensor = _flat((*args, *kwargs.values()))
        if len(tensor) == _LENGTH:
            reads[stage.paths[module]] = tensor

    tap.replace(stage, one_head, *[(module, "pre", see) for module in stage.paths if _widths(module) is not None])
    for passage in stage.clean:
        if passage.path in reads:
            moved = (reads[passage.path][_POSITION] - reads[passage.path][_POSITION - 1]).abs()
            if len(moved) % heads == 0 and moved.any():
                by_head = rearrange(moved, "(head d_head) -> head d_head", head=heads).sum(1)
                if by_head.argmax() == 1 % heads and by_head.sum() <= (1 + _EXACT) * by_head.max():
                    return passage.path
    return None


@dataclass(frozen=True)
class _Middle:
    """The module that reads the residual stream inside a layer, and the one that has written to it before."""

    reader: str
    writer: str


def _middle(stage: _Stage, mlp: str | None) -> _Middle | None:
    """Where the residual stream is read between attention, or what stands in its place, and the MLP, if it has one."""
    hidden = stage.hidden.detach().reshape(-1, stage.d_model)
    reads = {passage.path: passage.read for passage in stage.clean}
    for passage in stage.clean:
        if passage.path == mlp:
            return None
        if passage.read.shape != hidden.shape:
            continue
        added = passage.read - hidden
        if _size(added) <= 1e-6 * _size(hidden):
            continue
        writers = list[str]()
        for writer in stage.clean:
            if writer.gave.shape == hidden.shape and _multiple(added, writer.gave):
                writers.append(writer.path)
        if writers:
            around = [path for path in reads if _contains(path, passage.path)]
            readers = [path for path in around if _is_equal(reads[path], passage.read)]
            return _Middle(min(readers, key=len), min(writers, key=len))
    return None


# -- the model -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """What was found in the first layer of a kind.

    Attributes:
        number: Its number.
        parts: Paths of all of its modules.
        paths: Fields of the adapter that name a part of a layer.
        constants: Those that have one value for all layers; not those about parts that this layer does not have.
        adds: Whether what the MLP gives is simply added.
    """

    number: int
    parts: frozenset[str]
    paths: dict[str, str | None]
    constants: dict[str, Any]
    adds: bool

    @classmethod
    def of(cls, stage: _Stage, heads: _Heads | None) -> _Kind:
        """Find the MLP of a layer."""
        mixture = _mixture(stage)
        mlp = _mlp(stage, mixture is None)
        paths: dict[str, str | None] = {"mid": None}
        constants: dict[str, Any] = {}
        if mlp is not None:
            up, gate = mlp.factors
            paths |= {"down": mlp.down.path, "up": up, "gate": gate, "shared_gate": mlp.write.weight}
            constants["fused_gate_up"] = mlp.is_fused
            constants["transposed_down"] = _is_transposed(mlp.down.module)
            constants["down_factor"] = mlp.write.factor
        write = mlp.write if mlp else None
        if mixture is not None:
            if mlp is not None:
                constants["shared_factor"] = constants.pop("down_factor")
                _check_shared(mlp.write, mlp.down.path, mixture.write)
            write = mixture.write
            paths["experts"] = mixture.path
            constants["expert_factor"] = write.factor
        if write is not None:
            paths |= {"mlp": write.mlp, "post_mlp_norm": write.post_norm}
            constants["write_factor"] = write.write_factor
        middle = _middle(stage, paths.get("experts") or paths.get("down"))
        if middle is not None:
            paths |= {"mid": middle.reader, "attn": middle.writer}
        if heads is not None:
            paths |= heads.paths
            writer = "" if middle is None else middle.writer
            if writer and not _contains(paths["attn"] or "", writer) and writer != paths["o"]:
                paths["post_attn_norm"] = writer
        adds = write is None or write.adds
        return cls(stage.number, frozenset(stage.paths.values()) - {""}, paths, constants, adds)

    def distinction(self, rivals: list[_Kind]) -> str:
        """A part that layers of this kind have and layers of other kinds do not have.

        Raises:
            NotInferredError: There is none.
        """
        found = [path for path in self.paths.values() if path]
        for part in [*found, *sorted(self.parts, key=lambda part: (part.count("."), part))]:
            if not any(part in rival.parts for rival in rivals):
                return part
        raise NotInferredError(f"no part tells layer {self.number} from layers of other kinds")


def _check_shared(write: _Write, down: str, routed: _Write) -> None:
    """Refuse a shared expert that stands beside the mixture and is not added to what that gives."""
    if _contains(routed.mlp, down):
        return
    if replace(write, mlp="") != replace(routed, mlp="", factor=1.0):
        raise NotInferredError("its shared expert stands beside the mixture, and is not simply added to it")


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
    if isinstance(error, NoAttentionError):
        return UnsupportedError(
            f"model type {model.config.model_type!r} is not served: {error}", page="unsupported-model"
        )
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
            stages = _stages(target)
            heads = [_attention(stage, tap) for stage in stages]
        except (AttributeError, TypeError):  # some models outside the interface cannot run under its name
            stages, heads = list[_Stage](), list[_Heads | None]()
        if any(heads):
            return _merged(draft, stages, heads)
    with eager(target), _Softmax() as softmax:
        found = dict.fromkeys(_weighing(stage) for stage in _stages(target))
    path = "|".join(path for path in found if path is not None)
    if not path and softmax.is_there:
        raise NotInferredError("no module of its layers gives attention weights as its second output")
    if not path:
        raise NoAttentionError("no softmax attention was found in its layers, so there is no attention sink to find")
    outside = replace(target, adapter=replace(draft, attn=path, attention_interface=False))
    with eager(outside), listening(outside, tap.see):
        stages = _stages(outside)
        return _merged(outside.adapter, stages, [_attention(stage, tap) for stage in stages])


class _Softmax(TorchFunctionMode):
    """Sees whether a softmax is computed."""

    is_there = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.is_there = self.is_there or "softmax" in getattr(func, "__name__", "")
        return func(*args, **(kwargs or {}))


def _stack(model: nn.Module, names: dict[nn.Module, str]) -> str:
    """Path of the list of decoder layers: the largest list of as many as the configuration says, of those that run.

    Raises:
        NotInferredError: There is none.
    """
    config: Any = model.config
    depth = getattr(config.get_text_config(), "num_hidden_layers", None)
    sizes = dict[nn.Module, int]()
    for module in names:
        if isinstance(module, nn.ModuleList) and len(module) and (depth is None or len(module) == depth):
            sizes[module] = sum(parameter.numel() for parameter in module.parameters())
    if len(sizes) > 1 and not any(parameter.is_meta for parameter in model.parameters()):
        running = _running(model, list(sizes))
        sizes = {module: size for module, size in sizes.items() if module in running}
    if not sizes:
        raise NotInferredError(f"it has no list of {depth} layers, one for each that its configuration names")
    return names[max(sizes, key=lambda module: sizes[module])]


def _running(model: Any, stacks: list[Any]) -> set[nn.Module]:
    """Lists whose first module runs in a pass over token ids; image towers do not."""
    running = set[nn.Module]()
    hooks = [stack[0].register_forward_pre_hook(lambda *_, stack=stack: running.add(stack)) for stack in stacks]
    try:
        model(input_ids=torch.arange(16, 16 + _LENGTH, device=model.device)[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return running


def first_of_kinds(target: Target) -> list[int]:
    """The first layer of each kind: layers of a kind have parameters of the same names and shapes."""
    firsts = dict[str, int]()
    for number, layer in enumerate(target.layers):
        firsts.setdefault(kind_of(layer), number)
    return list(firsts.values())


def _stages(target: Target) -> list[_Stage]:
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
        target.forward(token_ids(target, _LENGTH))
    stages: list[_Stage] = []
    for number, (args, kwargs) in sorted(calls.items()):
        hidden = hidden_of(args, kwargs)
        if hidden.ndim != 3 or len(hidden) != 1:
            raise NotInferredError(f"it has several residual streams (their shape is {tuple(hidden.shape)})")
        if hidden.shape[1] != _LENGTH:
            raise NotInferredError(f"its layers get {hidden.shape[1]} tokens where the text has {_LENGTH}")
        stages.append(_Stage(target, number, args, kwargs))
    return stages


def _merged(draft: Adapter, stages: list[_Stage], heads: list[_Heads | None]) -> Adapter:
    """One adapter for all kinds of layers.

    Raises:
        NotInferredError: No layer has an MLP, or layers differ where a row has one value.
    """
    kinds = [_Kind.of(stage, of_layer) for stage, of_layer in zip(stages, heads, strict=True)]
    if not any("mlp" in kind.paths for kind in kinds):
        raise NotInferredError("no MLP was found in its layers")
    settings: dict[str, Any] = {}
    for name in dict.fromkeys(name for kind in kinds for name in kind.paths):
        settings[name] = _spec(name, kinds)
    for kind in kinds:
        for name, value in kind.constants.items():
            if settings.setdefault(name, value) != value:
                raise NotInferredError(f"{name!r} of the adapter is {settings[name]} in one layer, {value} in another")
    settings["adds"] = all(kind.adds for kind in kinds)
    layouts = {of_layer.layout for of_layer in heads if of_layer is not None and of_layer.paths["fused_qkv"]}
    if layouts:
        settings["qkv_layout"] = layouts.pop() if len(layouts) == 1 else None
    settings["learned_sinks"] = any(of_layer is not None and of_layer.has_sinks for of_layer in heads)
    target = stages[0].target
    layer = max(stages[-1].number, 1)  # one of another kind than the first may read what that has kept
    settings["from_any_layer"] = layer < len(target.layers) and begins_at(target, layer, layer)
    return replace(draft, **settings, absolute_positions=_is_absolute(target))


def _spec(name: str, kinds: list[_Kind]) -> str | None:
    """The path of a part, with alternatives for kinds of layers that have it elsewhere; None if no layer has it."""
    alternatives = dict[str, None]()
    for kind in kinds:
        path = kind.paths.get(name)
        if path is None:
            continue
        rivals = [other for other in kinds if other.paths.get(name) != path and path in other.parts]
        if name == "mid":  # where it was not found, it may be there all the same
            rivals = [other for other in rivals if other.paths[name] is not None]
        if rivals:
            path = f"{kind.distinction(rivals)}?{path}"
        alternatives[path] = None
    return "|".join(alternatives) or None


def _is_absolute(target: Target) -> bool:
    """Whether equal tokens enter the first layer as different vectors, so that positions are added before it."""
    steps = list[float]()

    def see(hidden: Tensor) -> None:
        steps.append(_size(hidden[0, -1] - hidden[0, -2]))
        target.stop()

    ids = token_ids(target, _LENGTH)
    with target.hooks((target.layers[0], "pre", on_input(see))):
        target.forward(torch.full_like(ids, int(ids[0, 0])))
    return steps[0] > 1e-6
