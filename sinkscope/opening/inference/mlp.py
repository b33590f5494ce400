"""The MLP of a layer, its experts, and what they write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.models.experts import experts_of
from sinkscope.models.hooks import Args, Kwargs
from sinkscope.models.stack import NotInferredError
from sinkscope.opening.inference.stage import (
    EDITED,
    EXACT,
    POSITION,
    Fields,
    Stage,
    contains,
    derivatives,
    is_conv1d,
    is_equal,
    largest,
    multiple,
    rounded,
    widths_of,
)


@dataclass(frozen=True)
class Write:
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


def mlp_of(stage: Stage, is_alone: bool) -> tuple[Fields, Write | None]:
    """The MLP of a layer that all tokens go through, the widest if there are several, and where its output goes."""
    failure: NotInferredError | None = None
    downs = stage.linear([stage.clean.gave[""].shape[1]])
    for down in sorted(downs, key=lambda path: -stage.clean.read[path].shape[1]):
        try:
            factors = _factors(stage, down)
            if factors:
                is_transposed = is_conv1d(stage.layer.get_submodule(down))
                fields = {"down": down, "transposed_down": is_transposed, **factors}
                return fields, write_of(stage, down, is_alone)
        except NotInferredError as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return {}, None


def _factors(stage: Stage, down: str) -> Fields:
    """The modules whose outputs are multiplied to the input of a down projection; empty if linear ones alone do not."""
    width = stage.clean.read[down].shape[1]
    order = list(stage.clean.gave)
    before = [path for path in stage.linear([width, 2 * width]) if order.index(path) < order.index(down)]
    run, zeros = stage.run_to_derive(before, cuts=True)
    post = run.read[down]
    neuron = int(post[POSITION].abs().argmax())  # one at zero may not move, behind a ReLU
    weights = torch.zeros_like(post)
    weights[POSITION, neuron] = 1
    slopes = derivatives(post, weights, zeros)
    if not slopes or "" in slopes:
        return {}
    is_coupled = False  # by a norm in between
    for slope in slopes.values():
        token, column = slope.nonzero().unbind(1)
        if bool((token != POSITION).any()):
            return {}
        is_coupled = is_coupled or bool((column % width != neuron).any())
    paths = [path for path in before if path in slopes]
    is_fused = not is_coupled and any(slope.shape[1] == 2 * width for slope in slopes.values())
    if is_coupled or len(paths) > 2 - is_fused:  # no module gives a factor
        return {"up": None, "gate": None, "fused_gate_up": is_fused}
    up = paths[-1]
    for path in reversed(paths):
        if _is_linear_in(stage, down, path, width):
            up = path
            break
    else:
        if is_fused:
            raise NotInferredError(f"the two halves of {paths[0]!r} are not gate and up in this order")
    gate = None
    if len(paths) == 2:
        paths.remove(up)
        (gate,) = paths
    return {"up": up, "gate": gate, "fused_gate_up": is_fused}


def _is_linear_in(stage: Stage, down: str, path: str, width: int) -> bool:
    """Whether the input of `down` is linear in a module's output, or in its second half, if it gives two."""
    post = stage.clean.read[down]
    change = torch.zeros_like(post)
    for step in (2, -2):

        def move(given: Tensor, step: int = step) -> Tensor:
            given = given.clone()
            given[:, -width:] += step * given.abs().mean().clamp(min=1)
            return given

        change += stage.run(stage.edit(path, move)).read[down] - post
    return largest(change) <= 1e-3 * largest(post)


def write_of(stage: Stage, path: str, is_alone: bool = False) -> Write:
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
    shift[EDITED] = (clean[path].roll(1, 1) - clean[path])[EDITED]  # a change of size is invisible behind a norm
    changes = _changes(stage, path, shift)
    layer = changes.pop("")
    exact = dict[str, float]()
    for outer, change in changes.items():
        constant = multiple(change, shift)
        if constant is None or not contains(outer, path):
            continue
        beside = clean[outer] - constant * clean[path]  # some modules add the residual stream to it
        if not is_alone or largest(beside) <= EXACT * largest(clean[outer]):
            exact[outer] = constant
    if not exact:
        raise NotInferredError(f"the output of {path!r} is zero")
    mlp = min(exact, key=len)
    factor = rounded(exact[mlp])
    for weight in stage.linear([1]):  # a shared expert may have a weight for each token
        expected = changes[mlp] * clean[weight].sigmoid()
        if largest(layer - expected) <= EXACT * largest(layer):
            return Write(mlp, factor, weight=weight)
    may_differ = any(True for _ in stage.layer.buffers(recurse=False))  # such as a factor in front of every layer
    constant = multiple(layer, changes[mlp])
    if constant is not None and not may_differ:
        return Write(mlp, factor, write_factor=rounded(constant))
    if not layer[EDITED].any():
        raise NotInferredError(f"what {mlp!r} writes does not reach the residual stream")
    norm, is_same = _norm_of_write(stage, mlp, changes, layer)
    if is_same:
        return Write(mlp, factor, post_norm=norm, adds=not may_differ)
    if norm is None and _spreads(layer) and not _is_same(_changes(stage, path, 2 * shift)[""], 2 * layer):
        raise NotInferredError(f"what {mlp!r} gives is not added to the residual stream, but read by another part")
    return Write(mlp, factor, post_norm=norm, adds=False)


def _norm_of_write(stage: Stage, mlp: str, changes: dict[str, Tensor], layer: Tensor) -> tuple[str | None, bool]:
    """The norm behind an MLP, if there is one, and whether what it gives is added to the residual stream as it is."""
    clean = stage.clean.gave
    reader = None
    for norm, change in changes.items():
        is_around = contains(norm, mlp) or is_equal(clean[norm], clean[""])
        if is_around or _spreads(change) or widths_of(stage.layer.get_submodule(norm)) is not None:
            continue
        if _is_same(layer, change):
            return norm, True
        if reader is None and is_equal(stage.clean.read[norm], clean[mlp]) and not is_equal(clean[norm], clean[mlp]):
            reader = norm  # dropout gives what it reads
    return reader, False


def _changes(stage: Stage, path: str, shift: Tensor) -> dict[str, Float[Tensor, "token d_model"]]:
    """What an addition to a module's output changes in what modules as wide as the residual stream give."""
    run = stage.run(stage.edit(path, lambda given: given + shift))
    clean = stage.clean.gave
    return {outer: gave - clean[outer] for outer, gave in run.gave.items() if gave.shape == clean[""].shape}


def _spreads(change: Tensor) -> bool:
    """Whether a change reaches other positions; behind a norm of the residual stream itself it does not."""
    elsewhere = change.clone()
    elsewhere[EDITED] = 0
    return largest(elsewhere) > EXACT * largest(change)


def _is_same(change: Tensor, other: Tensor) -> bool:
    return abs((multiple(change, other) or 0) - 1) < EXACT


def experts_path(stage: Stage) -> str | None:
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


def _is_recomputed(stage: Stage, path: str) -> bool:
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
    return largest(outputs[0] - gave) <= EXACT * largest(gave)
