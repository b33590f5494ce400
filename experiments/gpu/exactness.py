"""What rounding costs on a GPU, and whether caches do there what they promise: `precision` and `check-cache`.

    python -m experiments.gpu.exactness [--model NAME] [--caches NAME ...] [--out figures/gpu_exactness.json]

Rounding is measured on the model in the package or another one: a coarser grid has to cost more. Caches are those of
`experiments.check_cache.right`; the models of the checks and their ids are made on the device. Needs torch,
transformers, accelerate, jaxtyping.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from experiments.check_cache import right
from experiments.gpu.steps import Steps
from experiments.record import Row
from experiments.script import run
from sinkscope.conformance.check_cache import check_cache
from sinkscope.sinks.precision.precision import precision


def rounding(model: str | None, pieces: int, length: int, device: str, dtype: str) -> Row:
    """The divergence that each scheme costs, and what keeping something exact regains."""
    found = precision(model, pieces=pieces, length=length, device=device, dtype=dtype)
    costs = found.costs
    is_right = 0 < costs["a8-token"] < costs["a8-tensor"] and 0 < costs["kv8"] < costs["kv4"]
    return {"kl": costs, "kept": found.rows(), "right": is_right}


def conforms(name: str, checks: Sequence[str], device: str) -> Row:
    """The verdicts of the checks on a cache."""
    tolerance = right.ROUNDING.get(name, 1e-3)
    with torch.device(device):
        found = check_cache(getattr(right, name), only=checks, tolerance=tolerance)
    verdicts = {one.check: one.verdict for one in found.checks}
    return {"verdicts": verdicts, "right": "fails" not in verdicts.values()}


def main(
    *,
    model: str | None = None,
    pieces: int = 16,
    length: int = 64,
    caches: Sequence[str] = ("dynamic_cache", "streaming_llm", "h2o", "ada_kv"),
    checks: Sequence[str] = (),
    device: str = "cuda",
    dtype: str = "bfloat16",
    out: Path = Path("figures/gpu_exactness.json"),
) -> None:
    """Make what the module describes.

    Args:
        model: Short name, hub id or folder; default: the model in the package.
        pieces: Pieces of held-out text.
        length: Tokens of a piece.
        caches: Names of caches.
        checks: Names of checks, with underscores; default: all.
    """
    steps = Steps("gpu-exactness", out, {"model": model, "pieces": pieces, "length": length}, device, dtype)
    steps.do("precision", partial(rounding, model, pieces, length, device, dtype))
    for name in caches:
        steps.do(f"check-cache, {name}", partial(conforms, name, checks, device))
    steps.end()


if __name__ == "__main__":
    run(main)
