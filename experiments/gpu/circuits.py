"""Atlas of the vocabulary and cluster attack on a GPU: time and peak memory.

    python -m experiments.gpu.circuits [--model NAME|FOLDER] [--out figures/gpu_circuits.json] [--device cuda]

Without `--model` a 7B-shaped bfloat16 checkpoint with a planted sink is written first, to a temporary folder unless
`--folder` is given, and the answers are compared with what was planted. The atlas takes the whole vocabulary, the
attack 1,000 sequences of 512 tokens. Needs torch, transformers, accelerate, jaxtyping, scikit-learn; no network, no
TransformerLens, no nnsight.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from experiments.gpu.steps import measured, planted
from experiments.make_shape import group_of
from experiments.record import record
from sinkscope.files.output import write_atomic
from sinkscope.models.load import load
from sinkscope.sinks.attack.attack import ClusterAttack, cluster_attack
from sinkscope.sinks.attack.clusters import TokenClusters, token_clusters
from sinkscope.sinks.repetition.atlas import SinkAtlas, sink_atlas


def agreement(found: TokenClusters) -> float:
    """Share of all tokens that are served by the head which serves most of the group that was planted for them."""
    group = group_of(torch.tensor(found.ids)).tolist()
    counts = Counter((h, g) for h, g in zip(found.head, group, strict=True) if h is not None)
    best = {head: max(n for (h, _), n in counts.items() if h == head) for head, _ in counts}
    return sum(best.values()) / max(len(found.ids), 1)


def rows_of(attack: ClusterAttack) -> list[dict[str, Any]]:
    """The table of the attack."""
    return [{k: v for k, v in row.items() if k != "round_trip"} for row in attack.rows()]


def row_of(atlas: SinkAtlas) -> dict[str, Any]:
    """What is kept of the atlas."""
    reached = sorted(n for n in atlas.repeats if n is not None)
    middle = reached[len(reached) // 2] if reached else None
    return {
        "tokens": len(atlas.ids),
        "reached": len(reached),
        "median_repeats": middle,
        "max_repeats": atlas.max_repeats,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="short name, hub id or folder; default: a 7B-shaped planted checkpoint")
    parser.add_argument("--shape", default="llama-2-7b", help="shape of the planted checkpoint")
    parser.add_argument("--out", type=Path, default=Path("figures/gpu_circuits.json"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--length", type=int, default=512, help="tokens of an attack")
    parser.add_argument("--sequences", type=int, default=1000)
    parser.add_argument("--max-repeats", type=int, help="of the atlas")
    parser.add_argument("--folder", type=Path, help="where the planted checkpoint is kept; default: a temporary folder")
    args = parser.parse_args(argv)
    device, started = torch.device(args.device), time.perf_counter()
    made = planted(args.shape, args.folder, "bfloat16") if args.model is None else nullcontext((args.model, None))
    with made as (model, truth):
        # The probe looks at logits, and the planted checkpoint has no unembedding.
        live = load(model, backend="hf", device=device, dtype="bfloat16", probe=truth is None)
    clusters, of_clusters = measured(device, lambda: token_clusters(live, sample=0))
    pools = {c.head: clusters.tokens_of(c.head) for c in clusters.clusters}
    atlas, of_atlas = measured(device, lambda: sink_atlas(live, max_repeats=args.max_repeats))
    attack, of_attack = measured(
        device, lambda: cluster_attack(live, clusters=pools, lengths=[args.length], sequences=args.sequences)
    )
    rows: dict[str, Any] = {
        "clusters": {**of_clusters, "tokens": len(clusters.ids), "served": sum(c.tokens for c in clusters.clusters)},
        "atlas": {**of_atlas, **row_of(atlas)},
        "attack": {**of_attack, "sequences": args.sequences, "length": args.length, "rows": rows_of(attack)},
    }
    if truth is not None:
        rows["planted_sink_layer"] = truth["sink_layer"]
        rows["found_sink_layer"] = attack.sink_layer
        rows["tokens_in_their_planted_group"] = agreement(clusters)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    settings = {"model": attack.model.name, "shape": args.shape if truth else None, "hardware": name}
    text = record("gpu-circuits", rows, settings, started=started, device=device, dtype="bfloat16")
    print(text)
    write_atomic(args.out, text)


if __name__ == "__main__":
    main()
