"""Line sums, a barcode, the atlas and the cluster attack at scale, on a GPU: 128k tokens, a vocabulary of 128k.

    python -m experiments.gpu.scale [--shape llama-3.1-8b] [--lengths 8192 32768 131072] [--out figures/gpu_scale.json]

Line sums are of random queries and keys with the heads of the shape; the others are of a checkpoint of that shape with
a planted circuit, and clusters are compared with the planted groups. A step that fails says why, and the next begins.
Needs torch, transformers, accelerate, jaxtyping, scikit-learn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from experiments.gpu.steps import Steps, kept, loaded
from experiments.make_shape import SHAPES, group_of
from experiments.record import Row
from experiments.script import run
from sinkscope.lines.attention import Scores
from sinkscope.lines.sums import line_sums
from sinkscope.loops.barcode import barcode
from sinkscope.models.target import Target
from sinkscope.sinks.attack.attack import attack
from sinkscope.sinks.attack.clusters import TokenClusters
from sinkscope.sinks.repetition.norm import AtlasReading
from sinkscope.sinks.repetition.repeat import repeat


def sums(shape: str, length: int, device: str, dtype: str) -> Row:
    """The sums of all lines of one layer; every row of attention sums to one."""
    d_model, _, _, heads, kv_heads, *_ = SHAPES[shape]
    d_head = d_model // heads
    generator = torch.Generator(device).manual_seed(0)
    kind = getattr(torch, dtype)
    query = torch.randn(heads, length, d_head, generator=generator, device=device, dtype=kind)
    key = torch.randn(kv_heads, length, d_head, generator=generator, device=device, dtype=kind)
    sums = line_sums(Scores(query, key, d_head**-0.5))
    right = bool(((sums.sum(-1) / length - 1).abs() < 1e-2).all())
    return {"length": length, "heads": heads, "right": right}


def coded(target: Target, prompt: int, steps: int) -> Row:
    """A barcode after a long prompt."""
    ids = [1, *(3 + place % 97 for place in range(prompt - 1))]
    code = barcode(target.hf, ids, max_new_tokens=steps, control=False)
    return {"positions": prompt + steps, "right": bool(code.rows())}


def atlas(target: Target, max_repeats: int | None) -> Row:
    """The repetition of every token."""
    reading = repeat(target.hf, tokens=["all"], max_repeats=max_repeats).reading
    assert isinstance(reading, AtlasReading)
    reached = np.sort(reading.repeats[~reading.resists])
    middle = None
    if len(reached):
        middle = int(reached[len(reached) // 2])
    return {"tokens": len(reading.ids), "reached": len(reached), "median_repeats": middle}


def attacked(target: Target, truth: Row, length: int, sequences: int) -> Row:
    """Clusters of all tokens, and an attack with long sequences of each."""
    clusters = attack(target.hf, sequences=0, lengths=[2]).clusters
    assert clusters is not None
    pools = {}
    for head in clusters.heads:
        pools[head] = clusters.tokens_of(head)
    result = attack(target.hf, clusters=pools, lengths=[length], sequences=sequences)
    share = agreement(clusters)
    right = share == 1 and result.sink_layer == truth["sink_layer"]
    return {"tokens": len(clusters.ids), "tokens_in_their_planted_group": share, "right": right}


def agreement(clusters: TokenClusters) -> float:
    """Share of all tokens that are served by the head which serves most of the group that was planted for them."""
    groups = group_of(torch.tensor(clusters.ids)).tolist()
    counts: Counter[tuple[float, int]] = Counter()
    for head, group in zip(clusters.head.tolist(), groups, strict=True):
        if np.isfinite(head):
            counts[head, group] += 1
    largest: dict[float, int] = {}
    for (head, _), count in counts.items():
        largest[head] = max(count, largest.get(head, 0))
    return sum(largest.values()) / max(len(clusters.ids), 1)


def main(
    *,
    shape: str = "llama-3.1-8b",
    folder: Path = Path("/tmp/sinkscope-planted"),
    lengths: Sequence[int] = (8192, 32768, 131072),
    prompt: int = 32768,
    steps: int = 256,
    max_repeats: int | None = None,
    attack: int = 512,
    sequences: int = 1000,
    device: str = "cuda",
    dtype: str = "bfloat16",
    out: Path = Path("figures/gpu_scale.json"),
) -> None:
    """Make what the module describes.

    Args:
        folder: Where the checkpoint is made.
        lengths: Of the line sums.
        prompt: Of the barcode.
        steps: Of the barcode.
        max_repeats: Of the atlas.
        attack: Tokens of an attack.
        sequences: Attacks.
    """
    settings = {"shape": shape, "prompt": prompt, "steps": steps, "max_repeats": max_repeats, "attack": attack}
    part = Steps("gpu-scale", out, {**settings, "sequences": sequences, "dtype": dtype}, device, dtype)
    for length in lengths:
        part.do(f"line sums at {length}", partial(sums, shape, length, device, dtype))
    checkpoint, truth = kept(shape, folder, dtype)
    target = loaded(checkpoint, device, dtype)
    part.do("barcode", partial(coded, target, prompt, steps))
    part.do("atlas", partial(atlas, target, max_repeats))
    part.do("attack", partial(attacked, target, truth, attack, sequences))
    part.end()


if __name__ == "__main__":
    run(main)
