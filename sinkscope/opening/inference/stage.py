"""One layer, called again and again with the input that it got in a pass over a few tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sinkscope.models.hooks import Args, Hook, Kwargs, hidden_of, on_hidden, on_input, with_hidden
from sinkscope.models.target import Target

LENGTH = 9
_EQUAL = 4  # of them, at the end: they enter the first layer as different vectors if positions were added before it
POSITION = 5  # of the edits
EDITED = [1, 2, POSITION, 7]  # where an edit is followed to the residual stream: what multiplies it must be the same
EXACT = 2e-3  # largest relative distance between what an edit changed and what it must change
Fields = dict[str, str | bool | float | None]
"""What was found of a layer, by the fields of an adapter."""


def is_conv1d(module: nn.Module) -> bool:
    """Whether a linear module stores its weight input x output."""
    return type(getattr(module, "base_layer", module)).__name__ == "Conv1D"


def widths_of(module: nn.Module) -> tuple[int, int] | None:
    """Outputs and inputs of a linear module; None if it is something else."""
    linear: Any = getattr(module, "base_layer", module)  # of an adapter
    if is_conv1d(linear):
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
class Run:
    """What the modules of a layer read and gave in one call, by path ("" is the layer), and its attention calls."""

    read: dict[str, Float[Tensor, "token inputs"]]
    gave: dict[str, Float[Tensor, "token outputs"]]
    attention: list[Any]


class Tap:
    """Where attention that the tap sees goes, and what replaces its output."""

    def __init__(self) -> None:
        self.calls = list[Any]()
        self.compute: Callable[[Any], Any] | None = None

    def see(self, call: Any) -> None:
        """The function that the tap calls with the attention of every layer."""
        call.compute = self.compute
        if not call.is_repeated:
            self.calls.append(call)


class Stage:
    """A layer with the input that it got in a pass; `run` calls it again, in float32."""

    def __init__(self, target: Target, number: int, args: Args, kwargs: Kwargs, tap: Tap) -> None:
        self.target, self.number, self.layer, self._tap = target, number, target.layers[number], tap
        self._args, self._kwargs = args, kwargs
        if target.dtype not in (torch.float32, torch.float64):  # in half precision, edits drown in rounding
            self.layer = _in_float32(target, number)
            self._args, self._kwargs = _as_float32(args), _as_float32(kwargs)
        self.paths = dict[nn.Module, str]()
        linear = None
        for path, module in self.layer.named_modules():
            if linear is None or not contains(linear, path):  # an adapter's parts are no parts
                self.paths[module] = path
                linear = None if widths_of(module) is None else path
        self.clean = self.run()
        self.hidden = _flat(hidden_of(self._args, self._kwargs))

    def run(self, *hooks: Hook, compute: Callable[[Any], Any] | None = None) -> Run:
        """Call the layer under hooks; `compute` gives the output of its attention."""
        run = Run({}, {}, [])
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
            if len(flat) != LENGTH:  # some modules run once more
                return None
            return change(flat).view(tensor.shape)

        return self.layer.get_submodule(path), "post", on_hidden(changed)

    def run_to_derive(self, paths: Iterable[str], *, cuts: bool) -> tuple[Run, dict[str, Tensor]]:
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
            widths = widths_of(self.layer.get_submodule(path))
            if widths is not None and len(gave) == LENGTH and (outputs is None or widths[0] in outputs):
                paths.append(path)
        return paths


def derivatives(tensor: Tensor, weights: Tensor, zeros: dict[str, Tensor]) -> dict[str, Tensor]:
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


def largest(tensor: Tensor) -> float:
    """Largest absolute value."""
    return float(tensor.abs().max())


def is_equal(one: Tensor, other: Tensor) -> bool:
    """Whether shapes and numbers are the same."""
    return one.shape == other.shape and torch.equal(one, other)


def multiple(change: Tensor, of: Tensor, rounding: float = 0.0) -> float | None:
    """The constant c for which `change` is c times `of`, but for rounding; None if there is none."""
    square = float((of * of).sum())
    if square == 0:
        return None
    constant = float((change * of).sum()) / square
    if constant == 0 or largest(change - constant * of) > EXACT * largest(change) + rounding:
        return None
    return constant


def contains(path: str, other: str) -> bool:
    """Whether a module is another one or stands above it, by their paths."""
    return path == "" or f"{other}.".startswith(f"{path}.")


def rounded(constant: float) -> float:
    """A constant as an adapter states it."""
    if abs(constant - 1) < EXACT:
        return 1.0
    return float(f"{constant:.4g}")
