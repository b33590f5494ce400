"""Tokens a second of `generate` on a GPU under guard and policies, by the rows of the batch.

    python -m experiments.gpu.throughput [--shape lines-7b] [--rows 1 4 16 64] [--out figures/gpu_throughput.json]

Random weights of 7B shape, random prompts of equal length. Needs torch, transformers, accelerate, jaxtyping.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from experiments.gpu.overhead import methods
from experiments.gpu.steps import Steps, model_of
from experiments.gpu.users import generated
from experiments.script import run


def main(
    *,
    shape: str = "lines-7b",
    rows: Sequence[int] = (1, 4, 16, 64),
    prompt: int = 512,
    new: int = 256,
    budget: int = 256,
    device: str = "cuda",
    dtype: str = "bfloat16",
    out: Path = Path("figures/gpu_throughput.json"),
) -> None:
    """Make what the module describes.

    Args:
        rows: Of the batch.
        prompt: Tokens of a prompt.
        new: Tokens that are generated.
    """
    settings = {"shape": shape, "prompt": prompt, "new": new, "budget": budget, "dtype": dtype}
    steps = Steps("gpu-throughput", out, settings, device, dtype)
    target = model_of(None, shape, device, dtype)
    for count in rows:
        for name, edit in {"stock": None, **methods(budget)}.items():
            steps.do(f"{name}, {count} rows", partial(generated, target, edit, count, prompt, new))
    steps.end()


if __name__ == "__main__":
    run(main)
