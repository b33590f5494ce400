"""Tokens a second of `generate` on a GPU under guard and policies, by the rows of the batch.

    python -m experiments.gpu.throughput [--shape lines-7b] [--rows 1 4 16 64] [--out figures/gpu_throughput.json]

Random weights of 7B shape, random prompts of equal length. Needs torch, transformers, accelerate, jaxtyping.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from experiments.bench_lines import SHAPES
from experiments.gpu.loopserve import model_of
from experiments.gpu.overhead import methods
from experiments.gpu.steps import Steps, options
from experiments.gpu.users import generated


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""

    def add(option: Any) -> None:
        option("--shape", default="lines-7b", choices=sorted(SHAPES))
        option("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
        option("--prompt", type=int, default=512)
        option("--new", type=int, default=256)
        option("--budget", type=int, default=256)

    args = options(__doc__, argv, "throughput", add)
    args.model, device = None, torch.device(args.device)
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "model", "rows")}
    steps, target = Steps("gpu-throughput", args.out, settings, device, args.dtype), model_of(args)
    for rows in args.rows:
        asked = argparse.Namespace(rows=rows, prompt=args.prompt, new=args.new)
        for name, edit in {"stock": None, **methods(args.budget)}.items():
            steps.do(f"{name}, {rows} rows", lambda edit=edit, asked=asked: generated(target, edit, asked, device))
    steps.end()


if __name__ == "__main__":
    main()
