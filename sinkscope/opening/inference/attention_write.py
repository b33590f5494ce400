"""Where attention, or what stands in its place, adds to the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor

from sinkscope.models.hooks import on_input
from sinkscope.opening.inference.mlp import Write
from sinkscope.opening.inference.stage import Fields, Run, Stage, contains, is_equal, largest, multiple, rounded


def attention_write(stage: Stage, write: Write | None) -> Fields:
    """Find where attention adds to the residual stream: before the MLP, or beside it.

    The layer is called with random numbers whose sizes differ between tokens. Beside the residual stream of a pass, a
    norm of it could look like something that was added to it; of these numbers, no norm is a constant multiple.

    Args:
        stage: The layer.
        write: What its MLP writes; None if it has none.

    Returns:
        By the adapter's fields: "attn", the module whose output is added, "attn_factor", and "mid", the module that
        reads the sum, None if no module does before the layer gives it. Empty: nothing is added.
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(stage.hidden.shape, generator=generator).to(stage.hidden) * stage.hidden.std()
    start = noise * torch.linspace(0.5, 2, len(noise), device=noise.device)[:, None]
    run = stage.run((stage.layer, "pre", on_input(lambda hidden: start.view_as(hidden))))
    mlp = None
    if write is not None:
        mlp = write.post_norm or write.mlp
    for reader in _readers(run, start, mlp):
        found = _writer(run, start, reader, run.read[reader])
        if found:
            return {**found, "mid": _outermost(run, reader)}
    if write is None:
        return _writer(run, start, None, run.gave[""])
    if write.adds and write.weight is None:
        beside = run.gave[""] - write.write_factor * run.gave[write.post_norm or write.mlp]
        return _writer(run, start, None, beside, mlp)
    return {}


def _readers(run: Run, start: Tensor, mlp: str | None) -> list[str]:
    """Modules that may read the residual stream between the parts, each tensor once, in the order in which they ran."""
    read = run.read
    readers = list[str]()
    for path in read:
        if path == mlp:
            break
        is_new = read[path].shape == start.shape and not is_equal(read[path], start)
        if is_new and not any(is_equal(read[path], read[other]) for other in readers):
            readers.append(path)
    return readers


def _outermost(run: Run, reader: str) -> str:
    """The outermost module that reads the same as one inside."""
    read = run.read
    outer = [path for path in read if path and contains(path, reader) and is_equal(read[path], read[reader])]
    return min(outer, key=len)


def _writer(run: Run, start: Tensor, reader: str | None, end: Tensor, mlp: str | None = None) -> Fields:
    """The outermost module whose output is a constant part of a sum with what enters the layer, and that constant.

    Args:
        run: A call of the layer.
        start: What entered it.
        reader: The module that reads the sum; None if it is the output of the layer.
        end: The sum.
        mlp: A module whose output is no part of the sum.
    """
    gave = run.gave
    added = end - start
    rounding = 8 * torch.finfo(start.dtype).eps * largest(start)
    if largest(added) <= rounding:
        return {}
    for writer in sorted(gave, key=len):
        if not writer or gave[writer].shape != added.shape or is_equal(run.read[writer], gave[writer]):
            continue  # dropout gives what it reads
        if reader is not None and contains(writer, reader):
            continue
        if mlp is not None and (contains(mlp, writer) or contains(writer, mlp)):
            continue
        constant = multiple(added, gave[writer], rounding)
        if constant is not None:
            return {"attn": writer, "attn_factor": rounded(constant), "mid": None}
    return {}
