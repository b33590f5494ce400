"""Check that a model's adapter names the right modules, and that recomputed attention equals the model's own.

Neurons and sites are checked in one pass over a few tokens, as `inference.sums` and `inference.edits` say. Attention is
checked in passes that stop after the first layers (`tap.proof`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sinkscope.errors import UnsupportedError
from sinkscope.models.adapters import PATHS
from sinkscope.models.loading.config import first_line
from sinkscope.models.modules.stack import first_of_kinds
from sinkscope.models.target import Target
from sinkscope.opening.inference.proof import attention_error
from sinkscope.opening.inference.sums import layer_sums


@dataclass
class ProbeReport:
    """What the probe found.

    Attributes:
        problem: What is wrong. None if nothing is.
        unproved: Why sites cannot be proved, by layer and the last part of their names.
    """

    problem: str | None = None
    unproved: dict[int, dict[str, str]] = field(default_factory=dict)


@torch.no_grad()
def probe(target: Target, *, every_layer: bool = True) -> ProbeReport:
    """Check on a few tokens that edits at the adapter's sites work as intended and attention is recomputed correctly.

    Args:
        target: The model, with an adapter. It is left unchanged.
        every_layer: Whether all layers are edited, and not only the first of each kind.

    Returns:
        What was found; `problem` says what is wrong. A wrong adapter does not raise an error.
    """
    tolerance = max(1e-3, 16 * torch.finfo(target.dtype).eps)
    if getattr(target.hf, "is_quantized", False):
        tolerance = max(tolerance, 0.2)
    report = ProbeReport()
    try:
        _check_paths(target)
        proved = layer_sums(target, list(range(target.n_layers)) if every_layer else first_of_kinds(target))
        report.unproved = {sums.layer: sums.problems for sums in proved}
        for sums in proved:
            if not all(error <= tolerance for error in sums.edits.errors):  # "not <=", so that NaN is wrong as well
                raise UnsupportedError("a moved neuron does not change the layer as the adapter says")
            if "hook_mlp_out" in sums.problems:
                reason = sums.problems["hook_mlp_out"]
                raise UnsupportedError(f"what the MLP gives is not added as the adapter says: {reason}")
        if not attention_error(target) <= tolerance:
            raise UnsupportedError("recomputed attention differs from the model's own")
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except UnsupportedError as wrong:
        report.problem = str(wrong)
    except Exception as error:
        report.problem = f"a forward pass raised {type(error).__name__}: {first_line(error)}"
    return report


def _check_paths(target: Target) -> None:
    """Refuse an adapter that names a part that no layer has."""
    adapter = target.adapter
    for name in PATHS:
        path = getattr(adapter, name)
        is_optional = path is None or (adapter.experts is not None and name in ("down", "up", "gate"))
        if not is_optional and not any(target.has_part(layer, name) for layer in range(target.n_layers)):
            raise UnsupportedError(f"the adapter names a module that is not there ({path!r} in no layer)")
