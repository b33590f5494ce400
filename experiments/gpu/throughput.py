"""Tokens a second of `generate` on a GPU under guard and policies, by the rows of the batch.

    python -m experiments.gpu.throughput [--shape lines-7b] [--rows 1 4 16 64] [--out figures/gpu_throughput.json]

Random weights of 7B shape, random prompts of equal length. Needs torch, transformers, accelerate, jaxtyping.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from experiments.gpu.overhead import methods, opened
from experiments.gpu.users import generated


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    numbers = {"prompt": 512, "new": 256, "budget": 256}
    args, steps, target = opened(__doc__, argv, "throughput", "rows", [1, 4, 16, 64], **numbers)
    for rows in args.rows:
        asked = argparse.Namespace(rows=rows, prompt=args.prompt, new=args.new)
        for name, edit in {"stock": None, **methods(args.budget)}.items():
            steps.do(f"{name}, {rows} rows", lambda edit=edit, asked=asked: generated(target, edit, asked))
    steps.end()


if __name__ == "__main__":
    main()
