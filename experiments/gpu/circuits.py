"""Atlas of the vocabulary and cluster attack on a GPU: time and peak memory.

    python -m experiments.gpu.circuits [--model NAME|FOLDER] [--out figures/gpu_circuits.json] [--device cuda]

Without `--model` a 7B-shaped bfloat16 checkpoint with a planted sink is written first, to a temporary folder unless
`--folder` is given, and the answers are compared with what was planted. The atlas takes the whole vocabulary, the
attack 1,000 sequences of 512 tokens. Needs torch, transformers, accelerate, jaxtyping, scikit-learn; no network, no
TransformerLens, no nnsight.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.gpu.steps import measured, planted
from experiments.make_shape import group_of
from experiments.record import record
from experiments.script import run
from sinkscope.files.output import write_atomic
from sinkscope.opening.load import load
from sinkscope.sinks.attack.attack import ClusterAttack, cluster_attack
from sinkscope.sinks.attack.clusters import TokenClusters
from sinkscope.sinks.repetition.atlas import AtlasReading
from sinkscope.sinks.repetition.repeat import Repeat, repeat


def agreement(clusters: TokenClusters) -> float:
    """Share of all tokens that are served by the head which serves most of the group that was planted for them."""
    groups = group_of(torch.tensor(clusters.ids)).tolist()
    counts = Counter((head, group) for head, group in zip(clusters.head.tolist(), groups, strict=True) if head == head)
    largest: dict[float, int] = {}
    for (head, _), count in counts.items():
        largest[head] = max(count, largest.get(head, 0))
    return sum(largest.values()) / max(len(clusters.ids), 1)


def rows_of(attack: ClusterAttack) -> list[dict[str, Any]]:
    """The table of the attack."""
    return [{name: value for name, value in row.items() if name != "round_trip"} for row in attack.rows()]


def row_of(result: Repeat) -> dict[str, Any]:
    """What is kept of the repetition of every token."""
    atlas = result.reading
    assert isinstance(atlas, AtlasReading)
    reached = np.sort(atlas.repeats[~atlas.resists])
    middle = int(reached[len(reached) // 2]) if len(reached) else None
    return {
        "tokens": len(atlas.ids),
        "reached": len(reached),
        "median_repeats": middle,
        "max_repeats": atlas.max_repeats,
    }


def main(
    *,
    model: str | None = None,
    shape: str = "llama-2-7b",
    out: Path = Path("figures/gpu_circuits.json"),
    device: str = "cuda",
    length: int = 512,
    sequences: int = 1000,
    max_repeats: int | None = None,
    folder: Path | None = None,
) -> None:
    """Make what the module describes.

    Args:
        model: Short name, hub id or folder; default: a 7B-shaped planted checkpoint.
        shape: Shape of the planted checkpoint.
        length: Tokens of an attack.
        max_repeats: Of the atlas.
        folder: Where the planted checkpoint is kept; default: a temporary folder.
    """
    device, started = torch.device(device), time.perf_counter()
    made = planted(shape, folder, "bfloat16") if model is None else nullcontext((model, None))
    with made as (model, truth):
        # The probe looks at logits, and the planted checkpoint has no unembedding.
        live = load(model, backend="hf", device=device, dtype="bfloat16", probe=truth is None)
    clustered, of_clusters = measured(device, lambda: cluster_attack(live, sequences=0, lengths=[2]))
    clusters = clustered.clusters
    assert clusters is not None
    pools = {head: clusters.tokens_of(head) for head in clusters.heads}
    atlas, of_atlas = measured(device, lambda: repeat(live, tokens=["all"], max_repeats=max_repeats))
    attack, of_attack = measured(
        device, lambda: cluster_attack(live, clusters=pools, lengths=[length], sequences=sequences)
    )
    rows: dict[str, Any] = {
        "clusters": {**of_clusters, "tokens": len(clusters.ids), "served": int(np.isfinite(clusters.head).sum())},
        "atlas": {**of_atlas, **row_of(atlas)},
        "attack": {**of_attack, "sequences": sequences, "length": length, "rows": rows_of(attack)},
    }
    if truth is not None:
        rows["planted_sink_layer"] = truth["sink_layer"]
        rows["found_sink_layer"] = attack.sink_layer
        rows["tokens_in_their_planted_group"] = agreement(clusters)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    settings = {"model": attack.model.name, "shape": shape if truth else None, "hardware": name}
    text = record("gpu-circuits", rows, settings, started=started, device=device, dtype="bfloat16")
    print(text)
    write_atomic(out, text)


if __name__ == "__main__":
    run(main)
