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
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from einops import repeat
from jaxtyping import Float, Int
from torch import Tensor, nn

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.models import experts as expert_parts
from sinkscope.models.adapters import Adapter, row_of
from sinkscope.models.config import cut_depth
from sinkscope.models.probe import probe
from sinkscope.models.scope import shown_row
from sinkscope.models.target import Target, first_tensor, kind_of

_LENGTH = 9
_POSITION = 5  # of the edits
_EDITED = (2, _POSITION)  # where an edit is followed to the residual stream: what multiplies it must be the same twice
_EXACT = 2e-3  # largest relative distance between what an edit changed and what it must change
_STEPS = (0.7, -0.9, 3.0, -3.0)  # of an output that is edited, until its effect shows (an activation may be flat)

_Hook = tuple[nn.Module, str, Any]


class NotInferredError(Exception):
    """The message says what was not found, as the end of a sentence about the model."""


# -- one layer, called again ---------------------------------------------------------------------------------------


def _widths(module: nn.Module) -> tuple[int, int] | None:
    """Outputs and inputs of a linear module; None if it is something else."""
    weight = getattr(module, "weight", None)
    if type(module).__name__ == "Conv1D" and isinstance(weight, Tensor):
        return int(weight.shape[1]), int(weight.shape[0])
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return int(module.out_features), int(module.in_features)  # type: ignore[arg-type]
    return None


def _flat(value: Any) -> Tensor | None:
    """The first floating-point tensor among a module's inputs, or in its output, as `[token width]`."""
    values: Sequence[Any] = [value]
    if isinstance(value, tuple | list):
        values = value
    for tensor in values:
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.ndim >= 2:
            return tensor.detach().reshape(-1, tensor.shape[-1])
    return None


@dataclass(frozen=True, eq=False)
class _Passage:
    """What one module of a layer read and gave in one call."""

    path: str
    module: nn.Module
    read: Float[Tensor, "_ _"] | None
    gave: Float[Tensor, "_ _"] | None

    def is_linear_with(self, outputs: Sequence[int]) -> bool:
        """Whether this is a linear module with so many outputs, which saw every token."""
        widths = _widths(self.module)
        return widths is not None and widths[0] in outputs and self.gave is not None and len(self.gave) == _LENGTH


class _Stage:
    """A layer with the input that it got in a pass; `run` calls it again."""

    def __init__(self, target: Target, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.target, self.number, self.layer = target, number, target.layers[number]
        self._args, self._kwargs = args, kwargs
        if target.dtype not in (torch.float32, torch.float64):  # in half precision, edits drown in rounding
            self.layer = _in_float32(self.layer)
            self._args, self._kwargs = _as_float32(args), _as_float32(kwargs)
        self.paths = {module: path for path, module in self.layer.named_modules()}
        self.clean = list[_Passage]()
        hooks = [(module, "post", self._note) for module in self.paths]
        self.output = self.run(*hooks)
        self.d_model = self.output.shape[-1]

    def _note(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if module is self.layer:
            return
        gave = _flat(output)
        if gave is not None:
            gave = gave.clone()
        read = _flat((*args, *kwargs.values()))
        if read is not None:
            read = read.clone()
        self.clean.append(_Passage(self.paths[module], module, read, gave))

    @property
    def hidden(self) -> Float[Tensor, "1 pos d_model"]:
        """The input of the layer."""
        if self._args:
            return self._args[0]
        return self._kwargs["hidden_states"]

    def run(self, *hooks: _Hook, shuffled: bool = False) -> Float[Tensor, "token d_model"]:
        """Call the layer; `shuffled` puts its input into another order."""
        hidden = self.hidden.clone()
        if shuffled:
            hidden = hidden.roll(2, 1)
        with self.target.hooks(*hooks):
            if self._args:
                output = self.layer(hidden, *self._args[1:], **self._kwargs)
            else:
                output = self.layer(**{**self._kwargs, "hidden_states": hidden})
        return first_tensor(output).detach().reshape(-1, hidden.shape[-1])

    def read_by(self, module: nn.Module, *hooks: _Hook, shuffled: bool = False) -> Float[Tensor, "token width"]:
        """What a module reads when the layer is called under hooks."""
        read = list[Tensor]()

        def see(_module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            tensor = _flat((*args, *kwargs.values()))
            assert tensor is not None
            read.append(tensor.clone())

        self.run(*hooks, (module, "pre", see), shuffled=shuffled)
        return read[0]

    def changes(self, *hooks: _Hook) -> dict[str, Float[Tensor, "_ _"]]:
        """What hooks change in the output of every module (""; the layer), where it has the width of the stream."""
        changes = dict[str, Tensor]()
        before = {passage.path: passage.gave for passage in self.clean}

        def see(module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
            path, now = self.paths[module], _flat(output)
            then = before.get(path)
            if path and then is not None and now is not None and now.shape == then.shape:
                if now.shape == (_LENGTH, self.d_model):
                    changes[path] = now - then

        watched: list[_Hook] = [(module, "post", see) for module in self.paths]
        changes[""] = self.run(*hooks, *watched) - self.output
        return changes


def _in_float32(layer: nn.Module) -> nn.Module:
    """A copy of a layer; configurations are shared, because the tap goes by them."""
    configs: list[Any] = [getattr(module, "config", None) for module in layer.modules()]
    return copy.deepcopy(layer, {id(config): config for config in configs}).float()


def _as_float32(value: Any) -> Any:
    """Arguments with their floating-point tensors in float32."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.float()
    if isinstance(value, tuple | list):
        return type(value)([_as_float32(item) for item in value])
    if isinstance(value, dict):
        return {name: _as_float32(item) for name, item in value.items()}
    return value


def _edit_output(module: nn.Module, edit: Callable[[Tensor], Tensor | None]) -> _Hook:
    """A hook that replaces a module's output; `edit` sees a copy `[token width]`, which it may change in place."""

    def hook(_module: Any, _args: Any, _kwargs: Any, output: Any) -> Any:
        tensor = first_tensor(output)
        flat = tensor.clone(memory_format=torch.contiguous_format).view(-1, tensor.shape[-1])
        new = edit(flat)
        flat = (flat if new is None else new).view(tensor.shape)
        if isinstance(output, tuple | list):
            return type(output)([flat, *output[1:]])
        return flat

    return module, "post", hook


def _edit_input(module: nn.Module, edit: Callable[[Tensor], None]) -> _Hook:
    def hook(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        flat = args[0].clone(memory_format=torch.contiguous_format)
        edit(flat.view(-1, flat.shape[-1]))
        return (flat, *args[1:]), kwargs

    return module, "pre", hook


def _move(columns: Any, by: float, tensor: Tensor) -> None:
    """Move some columns at the edited position, by multiples of the typical size."""
    tensor[_POSITION, columns] += by * tensor[_POSITION].abs().mean().clamp(min=1)


def _size(tensor: Tensor) -> float:
    return float(tensor.abs().max())


def _is_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and one.shape == other.shape and torch.equal(one, other)


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
    """

    mlp: str
    factor: float
    post_norm: str | None = None
    write_factor: float = 1.0
    weight: str | None = None


@dataclass
class _Mlp:
    """A down projection, what feeds it, and where its output goes.

    Attributes:
        down: The passage of the down projection.
        up: Path of the linear factor, or of both factors side by side; None if a norm stands behind the product.
        gate: Path of the other factor.
        is_fused: Whether `up` gives gate and up side by side.
        write: Where its output goes.
    """

    down: _Passage
    up: str | None = None
    gate: str | None = None
    is_fused: bool = False
    write: _Write | None = None


def _mlp(stage: _Stage, is_alone: bool) -> _Mlp | None:
    """The MLP of a layer that all tokens go through, the widest if there are several; None if there is none."""
    factors_of = list[tuple[int, _Mlp, dict[str, str]]]()
    for index, down in enumerate(stage.clean):
        widths = _widths(down.module)
        if widths is None or widths[0] != stage.d_model or down.read is None or len(down.read) != _LENGTH:
            continue
        width = widths[1]
        before = [passage for passage in stage.clean[:index] if passage.is_linear_with((width, 2 * width))]
        factors = _factors(stage, before, down)
        if factors:
            factors_of.append((width, _Mlp(down), factors))
    if not factors_of:
        return None
    factors_of.sort(key=lambda item: item[0])
    _, mlp, factors = factors_of[-1]
    _name_factors(stage, mlp, factors)
    neuron, column = _column(mlp.down)
    assert mlp.down.read is not None
    step = float(mlp.down.read[_POSITION].float().norm().clamp(min=1))

    def edit(tensor: Tensor) -> None:
        tensor[list(_EDITED), neuron] += step

    written = repeat(step * column, "d_model -> edited d_model", edited=len(_EDITED))
    mlp.write = _write(stage, mlp.down.path, _edit_input(mlp.down.module, edit), written, is_alone)
    return mlp


def _factors(stage: _Stage, before: list[_Passage], down: _Passage) -> dict[str, str]:
    """What feeds a down projection: layout ("same", "halves") by path; empty if it is not fed by these alone."""
    plain, coupled = dict[str, str](), dict[str, str]()
    for passage in before:
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
    assert down.read is not None and passage.gave is not None
    neurons, outputs = down.read.shape[1], passage.gave.shape[1]
    columns = [3, neurons - 2]
    if outputs == 2 * neurons:
        columns = [3, neurons + 3]
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
    assert down.read is not None
    for step in _STEPS:
        read = stage.read_by(down.module, _edit_output(passage.module, partial(_move, column, step)))
        change = (read - down.read).abs()
        if _size(change) > 1e-6:
            return change > max(1e-5 * (_size(down.read) + _size(change)), 1e-6)
    return None


def _is_held_by(stage: _Stage, paths: list[str], down: _Passage) -> bool:
    """Whether the input of `down` stays as it is with other hidden states, while the outputs of modules are held."""
    assert down.read is not None
    held = {passage.path: passage for passage in stage.clean if passage.path in paths}
    hooks = [_edit_output(passage.module, partial(_replaced, passage.gave)) for passage in held.values()]
    read = stage.read_by(down.module, *hooks, shuffled=True)
    return _size(read - down.read) <= 1e-4 * (1e-3 + _size(down.read))


def _replaced(clean: Tensor | None, _tensor: Tensor) -> Tensor | None:
    return clean


def _name_factors(stage: _Stage, mlp: _Mlp, factors: dict[str, str]) -> None:
    """Tell `up`, in which the product is linear, from the gate."""
    if "coupled" in factors.values():
        return
    linear = [path for path in factors if _is_linear_in(stage, mlp, path, factors[path])]
    mlp.is_fused = "halves" in factors.values()
    if mlp.is_fused and not linear:
        raise NotInferredError(f"the two halves of {next(iter(factors))!r} are not gate and up in this order")
    mlp.up = [*linear, *reversed(factors)][0]
    others = [path for path in factors if path != mlp.up]
    if others:
        mlp.gate = others[0]


def _is_linear_in(stage: _Stage, mlp: _Mlp, path: str, layout: str) -> bool:
    """Whether the input of `down` is linear in a module's output (its second half, if it gives two)."""
    module = stage.layer.get_submodule(path)
    assert mlp.down.read is not None
    first = mlp.down.read.shape[1] if layout == "halves" else 0
    reads: list[Tensor] = []
    for step in (0.0, 2.0, -2.0):
        edit = _edit_output(module, partial(_move, slice(first, None), step))
        reads.append(stage.read_by(mlp.down.module, edit)[_POSITION])
    middle, higher, lower = reads
    return _size(higher + lower - 2 * middle) <= 1e-3 * _size(higher - middle)


def _column(passage: _Passage) -> tuple[int, Tensor]:
    """A neuron whose column is neither zero nor large, and the column."""
    widths = _widths(passage.module)
    assert widths is not None
    weight = getattr(passage.module, "weight", None)
    device = None if passage.gave is None else passage.gave.device
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        unit = torch.zeros(2, widths[1], device=device, dtype=None if passage.gave is None else passage.gave.dtype)
        unit[0, 3] = 1
        written = passage.module(unit)
        return 3, (written[0] - written[1]).detach().float()
    if weight.shape[0] != widths[0] or type(passage.module).__name__ == "Conv1D":
        weight = weight.T
    neuron = int(weight.norm(dim=0).argsort()[widths[1] // 2])
    return neuron, weight[:, neuron].detach().float()


def _multiple_is_not(output: Tensor | None, of: Tensor | None, constant: float) -> bool:
    assert output is not None and of is not None
    return output.shape != of.shape or _size(output - constant * of) > _EXACT * _size(output)


def _write(
    stage: _Stage, path: str, edit: _Hook, written: Float[Tensor, "edited d_model"], is_alone: bool = False
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
    for outer, change in changes.items():
        constant = _multiple(change, expected)
        if constant is not None and _contains(outer, path):
            exact[outer] = constant
    if path not in exact:
        raise NotInferredError(f"an edit of {path!r} does not add what its weights say")
    if is_alone:  # some modules add the residual stream to it
        gave = {passage.path: passage.gave for passage in stage.clean}
        for outer, constant in list(exact.items()):
            if _multiple_is_not(gave[outer], gave[path], constant):
                del exact[outer]
    mlp = min(exact, key=len)
    factor = _rounded(exact[mlp])
    weight = _token_weight(stage, layer, changes[mlp])
    if weight is not None:
        return _Write(mlp, factor, weight=weight)
    constant = _multiple(layer, changes[mlp])
    if constant is not None:
        return _Write(mlp, factor, write_factor=_rounded(constant))
    norms = [norm for norm, change in changes.items() if abs((_multiple(layer, change) or 0) - 1) < _EXACT]
    if not norms:
        raise NotInferredError(f"what {mlp!r} writes does not reach the residual stream as one addition")
    norm = max(norms, key=lambda norm: norm.count("."))
    layer[list(_EDITED)] = 0
    if _size(layer) > _EXACT * _size(written):
        raise NotInferredError(f"{norm!r} mixes what its MLPs write over positions")
    return _Write(mlp, factor, post_norm=norm)


def _contains(path: str, other: str) -> bool:
    return f"{other}.".startswith(f"{path}.")


def _token_weight(stage: _Stage, layer: Tensor, written: Tensor) -> str | None:
    """Path of the module whose sigmoid, one number for each token, multiplies what is written; None if none does."""
    edited = list(_EDITED)
    for passage in stage.clean:
        if passage.is_linear_with((1,)) and passage.gave is not None:
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
    """The fused experts of a layer; None if it has none."""
    for passage in stage.clean:
        weights = [tensor for tensor in passage.module.parameters(recurse=False) if tensor.ndim == 3]
        if sum(stage.d_model in weight.shape[1:] for weight in weights) < 2 or passage.gave is None:
            continue
        _check_experts(stage, passage)
        shift = (passage.gave.roll(1, 1) - passage.gave)[list(_EDITED)]  # a change of size is invisible behind a norm

        def edit(tensor: Tensor, shift: Tensor = shift) -> None:
            tensor[list(_EDITED)] += shift

        return _Mixture(passage.path, _write(stage, passage.path, _edit_output(passage.module, edit), shift))
    return None


def _check_experts(stage: _Stage, passage: _Passage) -> None:
    """Recompute the output of fused experts from what they are called with.

    Raises:
        NotInferredError: It is not what they give.
    """
    module: Any = passage.module
    calls = list[tuple[Any, ...]]()

    def see(_module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        calls.append((*args, *kwargs.values()))

    stage.run((module, "pre", see))
    try:
        hidden, chosen, weights = expert_parts.bind(calls[0], {})
        hidden = hidden.reshape(-1, hidden.shape[-1])
        output = torch.zeros_like(hidden)
        for token, slot in torch.cartesian_prod(torch.arange(len(hidden)), torch.arange(chosen.shape[1])).tolist():
            expert = int(chosen[token, slot])
            gate, up = expert_parts.gate_up(module, expert, hidden[token : token + 1])
            post = expert_parts.activate(module, gate, up)
            written = post @ expert_parts.columns(module, expert, list(range(post.shape[1])))
            if getattr(module, "has_bias", False):
                written = written + module.down_proj_bias[expert]
            output[token] += weights[token, slot] * written[0]
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise NotInferredError(f"its experts ({type(module).__name__}) keep their weights in another layout") from error
    assert passage.gave is not None
    if _size(output - passage.gave) > _EXACT * _size(passage.gave):
        raise NotInferredError(f"its experts ({type(module).__name__}) compute something else than a gated MLP each")


# -- attention -----------------------------------------------------------------------------------------------------


@dataclass
class _Heads:
    """The attention of a layer, by module paths."""

    attn: str
    q: str | None = None
    k: str | None = None
    v: str | None = None
    fused: str | None = None
    o: str = ""
    has_sinks: bool = False


class _Tap:
    """What the attention tap sees while layers are called: queries, keys and values, which may be replaced behind."""

    def __init__(self) -> None:
        self._calls = list[Any]()
        self._compute: Callable[[Any], Any] | None = None

    def see(self, call: Any) -> None:
        """The function that the tap calls with the attention of every layer."""
        call.compute = self._compute
        self._calls.append(call)

    def calls(self, stage: _Stage, *hooks: _Hook, compute: Callable[[Any], Any] | None = None) -> list[Any]:
        """Every attention call of a layer, whose output `compute` replaces if it is given."""
        self._calls = []
        self._compute = compute
        stage.run(*hooks)
        self._compute = None
        return self._calls


def _attention(stage: _Stage, tap: _Tap) -> _Heads | None:
    """The attention of a layer, seen at the tap; None if the layer has none."""
    seen = tap.calls(stage)
    if not seen:
        return None
    if len(seen) > 1:
        raise NotInferredError(f"layer {stage.number} attends {len(seen)} times")
    clean = seen[0]
    heads = _Heads(stage.paths[clean.module], has_sinks=clean.settings.get("s_aux") is not None)
    roles = dict[str, str]()
    for passage in stage.clean:
        if not _contains(heads.attn, passage.path) or _widths(passage.module) is None or passage.gave is None:
            continue
        if len(passage.gave) != _LENGTH:
            continue
        edited = tap.calls(stage, _edit_output(passage.module, _scramble))
        roles[passage.path] = _moved_inputs(clean, edited[0])
    _name_projections(stage, heads, roles, clean)
    heads.o = _output_projection(stage, tap)
    return heads


def _opaque_attention(stage: _Stage) -> _Heads | None:
    """Attention outside the interface: a module whose second output are weights; o reads what they weight."""
    weights: dict[str, Tensor] = {}

    def see(module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        if isinstance(output, tuple | list) and len(output) > 1 and isinstance(output[1], Tensor):
            if output[1].shape[-2:] == (_LENGTH, _LENGTH):
                weights[stage.paths[module]] = output[1].clone()

    watched: list[_Hook] = [(module, "post", see) for module in stage.paths]
    stage.run(*watched)
    inside = [path for path in weights if path]
    if not inside:
        return None
    heads = _Heads(max(inside, key=len))
    clean = weights[heads.attn]
    linear = [part for part in stage.clean if _contains(heads.attn, part.path) and _widths(part.module) is not None]
    for passage in linear:
        stage.run(_edit_output(passage.module, _scramble), *watched)
        moved = (weights[heads.attn] - clean).abs().amax((0, 1)) > 1e-6
        if moved[:_POSITION].any():
            raise NotInferredError("its attention sees later tokens")
        if moved[_POSITION + 1 :, _POSITION].any() and moved[_POSITION, : _POSITION - 1].any():
            heads.fused = heads.fused or passage.path
        elif moved[_POSITION + 1 :].any():
            heads.k = passage.path
        elif moved.any():
            heads.q = passage.path
        elif passage is not linear[-1]:
            heads.v = passage.path
    heads.o = linear[-1].path
    return heads


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


def _name_projections(stage: _Stage, heads: _Heads, roles: dict[str, str], call: Any) -> None:
    """Name the projections by what they move; of several that move the same, the last is the projection.

    One that gives more than the heads, such as a gate beside the queries, is not named.
    """
    last = {role: path for path, role in roles.items() if role}
    heads.fused = last.get("qkv")
    if heads.fused is not None:
        return
    for name, tensor in (("q", call.query), ("k", call.key), ("v", call.value)):
        path = last.get(name)
        if path is None:
            continue
        widths = _widths(stage.layer.get_submodule(path))
        if widths is not None and widths[0] == tensor.shape[1] * tensor.shape[3]:
            setattr(heads, name, path)


def _output_projection(stage: _Stage, tap: _Tap) -> str:
    """Path of the linear module that reads the heads side by side.

    Raises:
        NotInferredError: There is none.
    """
    read = list[dict[str, Tensor]]()
    for head in (None, 1):

        def replaced(call: Any, head: int | None = head) -> tuple[Tensor, None]:
            batch, count, queries, _ = call.query.shape
            output = call.value.new_zeros(batch, queries, count, call.value.shape[-1])
            if head is not None:
                output[0, _POSITION, min(head, count - 1)] = 1
            return output, None

        passed = dict[str, Tensor]()

        def see(module: Any, args: Any, kwargs: dict[str, Any], passed: dict[str, Tensor] = passed) -> None:
            tensor = _flat((*args, *kwargs.values()))
            if tensor is not None:
                passed[stage.paths[module]] = tensor.clone()

        linear = [module for module in stage.paths if _widths(module) is not None]
        tap.calls(stage, *[(module, "pre", see) for module in linear], compute=replaced)
        read.append(passed)
    for passage in stage.clean:
        path = passage.path
        if path in read[0] and path in read[1] and read[0][path].shape == read[1][path].shape:
            if _size(read[0][path] - read[1][path]) > 0:
                return path
    raise NotInferredError(f"no linear module reads the heads of layer {stage.number}")


@dataclass(frozen=True)
class _Middle:
    """The module that reads the residual stream inside a layer, and the one that has written to it before."""

    reader: str
    writer: str


def _middle(stage: _Stage) -> _Middle | None:
    """Where the residual stream is read between attention, or what stands in its place, and the MLP."""
    hidden = stage.hidden.detach().reshape(-1, stage.d_model)
    reads = {passage.path: passage.read for passage in stage.clean}
    for passage in stage.clean:
        if passage.read is None or passage.read.shape != hidden.shape:
            continue
        added = passage.read - hidden
        if _size(added) <= 1e-6 * _size(hidden):
            continue
        writers = list[str]()
        for writer in stage.clean:
            if writer.gave is not None and writer.gave.shape == hidden.shape and _multiple(added, writer.gave):
                writers.append(writer.path)
        if writers:
            around = [path for path in reads if _contains(path, passage.path)]
            readers = [path for path in around if _is_equal(reads[path], passage.read)]
            return _Middle(min(readers, key=len), min(writers, key=len))
    return None


# -- the model -----------------------------------------------------------------------------------------------------


@dataclass
class _Kind:
    """What was found in the first layer of a kind."""

    stage: _Stage
    mlp: _Mlp | None
    mixture: _Mixture | None
    heads: _Heads | None
    middle: _Middle | None

    @classmethod
    def of(cls, stage: _Stage, heads: _Heads | None) -> _Kind:
        """Find the MLP of a layer."""
        mixture = _mixture(stage)
        return cls(stage, _mlp(stage, mixture is None), mixture, heads, _middle(stage))

    @property
    def post_attn_norm(self) -> str | None:
        """The norm between attention and residual stream."""
        if self.heads is None or self.middle is None or _contains(self.heads.attn, self.middle.writer):
            return None
        return self.middle.writer

    def check(self, row: Adapter) -> None:
        """Refuse a row whose paths lead to other parts in this kind of layer than were found in it.

        Raises:
            NotInferredError: Some do.
        """
        part = self.mixture or self.mlp
        found: dict[str, str | None] = {}
        if part is not None and part.write is not None:
            found |= {"mlp": part.write.mlp, "post_mlp_norm": part.write.post_norm}
            found["experts"] = None if self.mixture is None else self.mixture.path
        if self.mlp is not None and self.mixture is None:
            found |= {"down": self.mlp.down.path, "up": self.mlp.up, "gate": self.mlp.gate}
        if self.heads is not None:
            found |= {"attn": self.heads.attn, "o": self.heads.o, "post_attn_norm": self.post_attn_norm}
        paths = set(self.stage.paths.values())
        for name, path in found.items():
            alternatives = (getattr(row, name) or "").split("|")
            there = [alternative for alternative in alternatives if alternative and alternative in paths]
            if there[:1] != [path] and (there or path is not None):
                raise NotInferredError(f"layer {self.stage.number} has another {name} than the layers before it")
            if name == "post_mlp_norm" and path is None and row.post_mlp_norm is not None:
                raise NotInferredError("only some of its layers have a norm behind the MLP")


_INFERRED: dict[str, Adapter] = {}  # proved, by the configuration of the model that they were inferred from


def adapter_of(hf: Any, kind: str = "hf") -> Adapter:
    """The adapter of a model: its row if there is one, or else what is inferred from the model, once per configuration.

    A model whose modules are wrapped, or that holds no weights, is not called itself: a small one of its configuration
    is, with the first layers only.

    Args:
        hf: The plain Hugging Face model.
        kind: Of the object that it is inside of ("hf", "bridge", "nnsight").

    Raises:
        UnsupportedError: Nothing could be inferred, or the probe refuses it.
    """
    row = row_of(hf.config.model_type) or _INFERRED.get(_key(hf))
    if row is not None:
        return row
    model = hf
    if kind == "bridge" or any(parameter.is_meta for parameter in hf.parameters()):
        model = _sample(hf)
    return inferred_for(Target(model, model, "hf", Adapter("inferred"), name=hf.config.model_type))


def inferred_for(target: Target) -> Adapter:
    """The adapter that is inferred from a target, which needs none yet, and proved on it.

    Raises:
        UnsupportedError: Nothing could be inferred, or the probe refuses it.
    """
    key = _key(target.hf)
    if key not in _INFERRED:
        adapter = infer(target.hf)
        problem = probe(replace(target, adapter=adapter)).problem
        if problem is not None:
            raise UnsupportedError(
                f"model type {adapter.model_type!r} has no adapter, and the inferred one is refused: {problem}; change "
                f"what is wrong and register it: sinkscope.models.adapters.register({shown_row(adapter)})",
                page="unsupported-model",
            )
        _INFERRED[key] = adapter
    return _INFERRED[key]


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
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(hf.config)
    draft = Target(hf, hf, "hf", Adapter("", layers=stack_of(hf)))
    depth = max(first_of_kinds(draft)) + 1
    cut_depth(config.get_text_config(), max(depth, 2))
    with torch.random.fork_rng(devices=[]):
        return AutoModelForCausalLM.from_config(config).float().eval().requires_grad_(False)


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
        first_line = (str(error).splitlines() or [""])[0]
        error = NotInferredError(f"a pass raised {type(error).__name__}: {first_line}")
        raise _not_inferred(model, error) from None


def _infer(model: Any) -> Adapter:
    from sinkscope.trace.attention import eager, listening

    names = {module: name for name, module in model.named_modules()}
    stack = _stack(model, names)
    base = stack
    while base and "input_ids" not in inspect.signature(model.get_submodule(base).forward).parameters:
        base = base.rpartition(".")[0]
    draft = Adapter("inferred", base=base, layers=stack, embed=names[model.get_input_embeddings()])
    target = Target(model, model, "hf", draft)
    tap = _Tap()
    try:
        with listening(target, tap.see):
            kinds = [_Kind.of(stage, _attention(stage, tap)) for stage in _stages(target)]
    except (AttributeError, TypeError):  # some models outside the interface cannot run under its name
        kinds = list[_Kind]()
    if any(kind.heads is not None for kind in kinds):
        return _merged(draft, kinds)
    with eager(target):
        kinds = [_Kind.of(stage, _opaque_attention(stage)) for stage in _stages(target)]
    return replace(_merged(draft, kinds), attention_interface=False)


def _token_ids(target: Target) -> Int[Tensor, "1 pos"]:
    rows = int(next(target.embedding.parameters()).shape[0])
    generator = torch.Generator().manual_seed(0)
    return torch.randint(min(16, rows // 2), rows, (1, _LENGTH), generator=generator).to(target.device)


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
    calls = dict[int, tuple[tuple[Any, ...], dict[str, Any]]]()

    def keep(number: int, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if number in calls:
            raise NotInferredError(f"layer {number} runs several times in a pass")
        calls[number] = _without_cache(args, kwargs)

    hooks: list[_Hook] = [(target.layers[number], "pre", partial(keep, number)) for number in firsts]
    with target.hooks(*hooks):
        target.forward(_token_ids(target), upto=max(firsts))
    stages: list[_Stage] = []
    for number, (args, kwargs) in sorted(calls.items()):
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.ndim != 3 or hidden.shape[:2] != (1, _LENGTH):
            raise NotInferredError(f"its residual stream has the shape {tuple(hidden.shape)}: it is not a single one")
        stages.append(_Stage(target, number, args, kwargs))
    return stages


def _without_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call; its hidden states are copied, because some layers add to them in place."""
    if args:
        return (args[0].clone(), *args[1:]), dict(kwargs)
    return args, {**kwargs, "hidden_states": kwargs["hidden_states"].clone()}


def _joined(paths: Sequence[str | None]) -> str | None:
    """Alternatives, in the order of the layers."""
    different = dict.fromkeys(path for path in paths if path is not None)
    if not different:
        return None
    return "|".join(different)


def _merged(draft: Adapter, kinds: list[_Kind]) -> Adapter:
    """One adapter for all kinds of layers."""
    row = _with_attention(_with_mlps(draft, kinds), kinds)
    for kind in kinds:
        kind.check(row)
    return row


def _with_mlps(draft: Adapter, kinds: list[_Kind]) -> Adapter:
    """The row with the MLPs, experts and shared experts of all kinds of layers.

    Raises:
        NotInferredError: There are none, or they differ where a row has one value.
    """
    dense = _dense_mlps(kinds)
    mixtures = [kind.mixture for kind in kinds if kind.mixture is not None]
    dense_writes = [mlp.write for mlp in dense if mlp.write is not None]
    expert_writes = [mixture.write for mixture in mixtures]
    writes = [*dense_writes, *expert_writes]
    if not writes:
        raise _without_mlps(kinds)
    row = replace(
        draft,
        mlp=_joined([write.mlp for write in writes]),
        post_mlp_norm=_joined([write.post_norm for write in writes]),
        write_factor=_same("factor on what an MLP writes", [write.write_factor for write in writes]),
        down_factor=_same("factor behind the down projection", [write.factor for write in dense_writes]),
        expert_factor=_same("factor behind the experts", [write.factor for write in expert_writes]),
        transposed_down=any(type(mlp.down.module).__name__ == "Conv1D" for mlp in dense),
    )
    if dense:
        row = replace(
            row,
            down=_joined([mlp.down.path for mlp in dense]),
            up=_joined([mlp.up for mlp in dense]),
            gate=_joined([mlp.gate for mlp in dense]),
            fused_gate_up=_same("layout of gate and up", [mlp.is_fused for mlp in dense]),
        )
    if mixtures:
        row = replace(row, experts=_joined([mixture.path for mixture in mixtures]))
    shared = _shared_experts(kinds)
    if shared:
        row = _with_shared(row, shared, bool(dense))
    return row


def _without_mlps(kinds: list[_Kind]) -> NotInferredError:
    if all(kind.heads is None for kind in kinds):
        return NotInferredError("it has neither softmax attention nor MLPs, so there is no attention sink to find")
    return NotInferredError("no MLP was found in its layers")


def _dense_mlps(kinds: list[_Kind]) -> list[_Mlp]:
    """The MLPs of layers without a mixture."""
    return [kind.mlp for kind in kinds if kind.mlp is not None and kind.mixture is None]


def _shared_experts(kinds: list[_Kind]) -> list[_Mlp]:
    """The experts of mixtures that every token goes through.

    Raises:
        NotInferredError: One stands beside the mixture.
    """
    shared: list[_Mlp] = []
    for kind in kinds:
        if kind.mixture is None or kind.mlp is None:
            continue
        if not _contains(kind.mixture.write.mlp, kind.mlp.down.path):
            raise NotInferredError("its shared expert stands beside the mixture, so that no module gives their sum")
        shared.append(kind.mlp)
    return shared


def _with_attention(row: Adapter, kinds: list[_Kind]) -> Adapter:
    """The row with the attention of all kinds of layers, and what stands in its place in others.

    Raises:
        NotInferredError: No kind has attention.
    """
    heads = [kind.heads for kind in kinds if kind.heads is not None]
    if not heads:
        raise NotInferredError("no attention that returns its weights was found")
    attending = [kind.stage.paths.values() for kind in kinds if kind.heads is not None]
    mixers = [part.attn for part in heads]
    for kind in kinds:
        if kind.heads is None and kind.middle is not None:
            mixer = kind.middle.writer
            if not any(mixer in paths for paths in attending):
                mixers.append(mixer)
    return replace(
        row,
        attn=_joined(mixers),
        q=_joined([part.q for part in heads]),
        k=_joined([part.k for part in heads]),
        v=_joined([part.v for part in heads]),
        fused_qkv=_joined([part.fused for part in heads]),
        o=_joined([part.o for part in heads]),
        mid=_joined([kind.middle.reader for kind in kinds if kind.middle is not None]),
        post_attn_norm=_joined([kind.post_attn_norm for kind in kinds]),
        attends=_only_where_attended(kinds),
        learned_sinks=any(part.has_sinks for part in heads),
        absolute_positions=_is_absolute(kinds[0].stage.target),
    )


def _only_where_attended(kinds: list[_Kind]) -> str | None:
    """A part that all layers with attention have and no other layer has; None if every layer has attention.

    Raises:
        NotInferredError: There is none.
    """
    parts = [set(kind.stage.paths.values()) for kind in kinds if kind.heads is not None]
    others = [set(kind.stage.paths.values()) for kind in kinds if kind.heads is None]
    if not others:
        return None
    for path in sorted(set.intersection(*parts), key=len):
        if not any(path in other for other in others):
            return path
    raise NotInferredError("no part tells its layers with attention from the others")


def _same(what: str, values: list[Any]) -> Any:
    """The value that all layers have.

    Raises:
        NotInferredError: They differ.
    """
    different = list(dict.fromkeys(values)) or [1.0]
    if len(different) > 1:
        raise NotInferredError(f"the {what} differs between its layers ({', '.join(map(str, different))})")
    return different[0]


def _moved_path(path: str | None, folder: str, root: str) -> str | None:
    """A path below `folder`, as it would be below `root`."""
    if path is None:
        return None
    return root + path.removeprefix(folder)


def _with_shared(row: Adapter, shared: list[_Mlp], has_dense: bool) -> Adapter:
    """The row with the expert that every token goes through, whose parts are called as those of a dense MLP."""
    mlp = shared[0]
    if not has_dense:
        root = row.mlp
        folder = mlp.down.path.rpartition(".")[0]
        row = replace(
            row,
            down=root + mlp.down.path.removeprefix(folder),
            up=_moved_path(mlp.up, folder, root),
            gate=_moved_path(mlp.gate, folder, root),
            fused_gate_up=mlp.is_fused,
        )
    tail = row.down.removeprefix(row.mlp)
    folder = mlp.down.path.removesuffix(tail)
    if not mlp.down.path.endswith(tail) or row.up != _moved_path(mlp.up, folder, row.mlp):
        raise NotInferredError("its shared expert is laid out in another way than its dense MLPs")
    factor = _same("factor behind the shared expert", [mlp.write.factor for mlp in shared if mlp.write is not None])
    return replace(
        row, shared=folder, shared_gate=None if mlp.write is None else mlp.write.weight, shared_factor=factor
    )


def _is_absolute(target: Target) -> bool:
    """Whether equal tokens enter the first layer as different vectors, so that positions are added before it."""
    entering = list[Tensor]()

    def keep(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entering.append(args[0] if args else kwargs["hidden_states"])

    ids = _token_ids(target)
    with target.hooks((target.layers[0], "pre", keep)):
        target.forward(torch.full_like(ids, int(ids[0, 0])), upto=0)
    return _size(entering[0][0, -1] - entering[0][0, -2]) > 1e-6
