"""`find_sinks` on a GPU: time and peak memory, whole model in memory and streamed.

    python -m experiments.gpu.find_sinks [--model NAME|FOLDER] [--out figures/gpu_find_sinks.json] [--device cuda]

Without `--model` a 7B-shaped bfloat16 checkpoint with a planted sink is written first, to a temporary folder unless
`--folder` is given, and the answer is compared with what was planted. Needs torch, transformers, accelerate,
jaxtyping; no network, no TransformerLens, no nnsight.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from experiments.gpu.steps import measured, planted
from experiments.record import record
from experiments.script import run
from sinkscope.files.output import write_atomic
from sinkscope.opening.load import load
from sinkscope.sinks.first_token.find import FindSinks, find_sinks


def row(found: FindSinks, numbers: dict[str, float | int]) -> dict[str, Any]:
    """What is kept of a run."""
    rate = found.sink_rate
    return {
        **numbers,
        "sink_layer": found.sink_layer,
        "neurons": [n.site for n in found.causal],
        "set_drop": found.set_drop,
        "set_control_drop": found.set_control_drop,
        "layers_read": found.layers_read,
        "n_layers": found.model.n_layers,
        "repeats": found.repeats.median,
        "sink_rate": None if rate is None else rate.value,
    }


def main(
    *,
    model: str | None = None,
    shape: str = "llama-2-7b",
    out: Path = Path("figures/gpu_find_sinks.json"),
    device: str = "cuda",
    folder: Path | None = None,
) -> None:
    """Make what the module describes.

    Args:
        model: Short name, hub id or folder; default: a 7B-shaped planted checkpoint.
        shape: Shape of the planted checkpoint.
        folder: Where the planted checkpoint is kept; default: a temporary folder.
    """
    device, started = torch.device(device), time.perf_counter()
    made = planted(shape, folder, "bfloat16") if model is None else nullcontext((model, None))
    with made as (model, truth):
        streamed = measured(device, lambda: find_sinks(model, device=device, dtype="bfloat16"))
        # The planted checkpoint has no unembedding, so nothing reaches its logits and the probe would refuse it.
        live, loading = measured(
            device, lambda: load(model, backend="hf", device=device, dtype="bfloat16", probe=truth is None)
        )
        whole = measured(device, lambda: find_sinks(live))
    rows = {"streamed": row(*streamed), "in_memory": row(*whole), "seconds_to_load_whole": loading["seconds"]}
    if truth is not None:
        sites = [(n["layer"], n["neuron"]) for n in truth["neurons"]]
        rows["planted"] = sites
        rows["found_what_was_planted"] = all(
            {n.site for n in found.causal} == set(sites) for found in (streamed[0], whole[0])
        )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    settings = {"model": streamed[0].model.name, "shape": shape if truth else None, "hardware": name}
    text = record("gpu-find-sinks", rows, settings, started=started, device=device, dtype="bfloat16")
    print(text)
    write_atomic(out, text)


if __name__ == "__main__":
    run(main)
