"""Line sums, a barcode and the atlas at scale, on a GPU: a text of 128k tokens, a vocabulary of 128k.

    python -m experiments.gpu.scale [--shape llama-3.1-8b] [--lengths 8192 32768 131072] [--out figures/gpu_scale.json]

Line sums are of random queries and keys with the heads of the shape; the barcode and the atlas are of a checkpoint of
that shape with a planted circuit. A step that fails says why, and the next begins. Needs torch, transformers,
accelerate, jaxtyping, scikit-learn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.gpu.circuits import row_of
from experiments.gpu.steps import Steps, kept, loaded, options
from experiments.make_shape import SHAPES
from sinkscope.attention.barcode import barcode
from sinkscope.lines.sums import Scores, line_sums
from sinkscope.sinks.repetition.repeat import repeat


def sums(shape: str, length: int, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The sums of all lines of one layer; every row of attention sums to one."""
    d, _, _, heads, kv_heads, *_ = SHAPES[shape]
    generator = torch.Generator(device).manual_seed(0)
    query, key = (
        torch.randn(count, length, d // heads, generator=generator, device=device, dtype=dtype)
        for count in (heads, kv_heads)
    )
    vertical, slash = line_sums(Scores(query, key, (d // heads) ** -0.5))
    right = all(bool(((part.sum(-1) / length - 1).abs() < 1e-2).all()) for part in (vertical, slash))
    return {"length": length, "heads": heads, "right": right}


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""

    def add(option: Any) -> None:
        option("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
        option("--folder", type=Path, default=Path("/tmp/sinkscope-planted"), help="where the checkpoint is made")
        option("--lengths", type=int, nargs="+", default=[8192, 32768, 131072])
        option("--prompt", type=int, default=32768, help="of the barcode")
        option("--steps", type=int, default=256, help="of the barcode")
        option("--max-repeats", type=int, help="of the atlas")

    args = options(__doc__, argv, "scale", add)
    device = torch.device(args.device)
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "folder", "lengths")}
    steps = Steps("gpu-scale", args.out, settings, device, args.dtype)
    for length in args.lengths:
        dtype = getattr(torch, args.dtype)
        steps.do(f"line sums at {length}", lambda length=length, dtype=dtype: sums(args.shape, length, device, dtype))
    folder, _ = kept(args.shape, args.folder, args.dtype)
    target = loaded(folder, device, args.dtype)
    ids = [1, *(3 + i % 97 for i in range(args.prompt - 1))]

    def coded() -> dict[str, Any]:
        found = barcode(target.hf, ids, max_new_tokens=args.steps, control=False)
        return {"positions": args.prompt + args.steps, "right": bool(found.rows())}

    steps.do("barcode", coded)
    steps.do("atlas", lambda: row_of(repeat(target.hf, tokens=["all"], max_repeats=args.max_repeats)))
    steps.end()


if __name__ == "__main__":
    main()
