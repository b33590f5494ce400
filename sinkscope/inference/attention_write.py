"""Where attention, or what stands in its place, adds to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sinkscope.inference.mlp import Write
from sinkscope.inference.stage import EXACT, Stage, contains, is_equal, largest, multiple, rounded
from sinkscope.models.hooks import on_input


@dataclass(frozen=True)
class AttentionWrite:
    """Where attention, or what stands in its place, adds to the residual stream.

    Attributes:
        writer: Path of the module whose output, times `factor`, is added.
        factor: That constant.
        mid: Path of the module that reads the sum; None if no module does before the layer gives it.
    """

    writer: str
    factor: float
    mid: str | None


def attention_write(stage: Stage, write: Write | None) -> AttentionWrite | None:
    """Find where attention adds to the residual stream: before the MLP, or beside it.

    Likeness in numbers does not suffice, because beside a small residual stream a norm of it looks like something that
    was added to it. So the stream and what the writer gives are both replaced, and the sum has to follow.

    Args:
        stage: The layer.
        write: What its MLP writes; None if it has none.
    """
    mlp = None
    if write is not None:
        mlp = write.post_norm or write.mlp
    for reader in _readers(stage, mlp):
        found = _writer(stage, reader, stage.clean.read[reader])
        if found is not None:
            return AttentionWrite(*found, _outermost(stage, reader))
    if write is None:
        found = _writer(stage, None, stage.clean.gave[""])
    elif write.adds and write.weight is None:
        beside = stage.clean.gave[""] - write.write_factor * stage.clean.gave[write.post_norm or write.mlp]
        found = _writer(stage, None, beside, mlp)
    else:
        found = None
    return None if found is None else AttentionWrite(*found, None)


def _readers(stage: Stage, mlp: str | None) -> list[str]:
    """Modules that may read the residual stream between the parts, each tensor once, in the order in which they ran."""
    read = stage.clean.read
    readers = list[str]()
    for path in read:
        if path == mlp:
            break
        is_new = read[path].shape == stage.hidden.shape and not is_equal(read[path], stage.hidden)
        if is_new and not any(is_equal(read[path], read[other]) for other in readers):
            readers.append(path)
    return readers


def _outermost(stage: Stage, reader: str) -> str:
    """The outermost module that reads the same as one inside."""
    read = stage.clean.read
    outer = [path for path in read if path and contains(path, reader) and is_equal(read[path], read[reader])]
    return min(outer, key=len)


def _writer(stage: Stage, reader: str | None, end: Tensor, mlp: str | None = None) -> tuple[str, float] | None:
    """The outermost module whose output is a constant part of a sum with what enters the layer, and that constant.

    Args:
        stage: The layer.
        reader: The module that reads the sum; None if it is the output of the layer.
        end: The sum.
        mlp: A module whose output is left as it was meanwhile.
    """
    gave, start = stage.clean.gave, stage.hidden
    added = end - start
    rounding = 8 * torch.finfo(start.dtype).eps * largest(start)
    if largest(added) <= rounding:
        return None
    for writer in sorted(gave, key=len):
        if not writer or gave[writer].shape != added.shape or is_equal(stage.clean.read[writer], gave[writer]):
            continue  # dropout gives what it reads
        if reader is not None and contains(writer, reader):
            continue
        if mlp is not None and (contains(mlp, writer) or contains(writer, mlp)):
            continue
        constant = multiple(added, gave[writer], rounding)
        if constant is not None and _is_sum(stage, reader, end, writer, constant, mlp):
            return writer, rounded(constant)
    return None


def _is_sum(stage: Stage, reader: str | None, end: Tensor, writer: str, constant: float, mlp: str | None) -> bool:
    """Whether the sum follows when what enters the layer and what the writer gives are both replaced."""
    generator = torch.Generator().manual_seed(0)

    def noise(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator).to(tensor) * max(largest(end), largest(tensor))

    gave = stage.clean.gave
    start, given = noise(stage.hidden), noise(gave[writer]) / max(1.0, abs(constant))
    hooks = [
        (stage.layer, "pre", on_input(lambda hidden: start.view_as(hidden))),
        stage.edit(writer, lambda _: given),
    ]
    expected = start + constant * given + (end - stage.hidden - constant * gave[writer])
    if mlp is not None:
        hooks.append(stage.edit(mlp, lambda _: gave[mlp]))
        expected = expected + stage.clean.gave[""] - end
    run = stage.run(*hooks)
    actual = run.gave[""] if reader is None else run.read[reader]
    return largest(actual - expected) <= EXACT * min(largest(start), abs(constant) * largest(given))
