"""What it costs to infer an adapter at full width: time and memory beside the layers themselves.

    python -m experiments.bench_inference [SHAPE ...]

Each shape is a random model of two layers in bfloat16, in a process of its own. "infer" is inference alone, and "again"
the same in a second process, when the adapter has been kept. "live" is the first use of a live model: inference and the
proof of what was found, in the first layers. Writes figures/bench_inference.json; shapes that are named replace their
entries.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from experiments.record import Row, record
from experiments.script import run as run_script
from experiments.timing import memory_growth, seconds_of

DATA = Path(__file__).parents[1] / "figures/bench_inference.json"
SHAPES: dict[str, tuple[str, Row]] = {
    "llama-7b": (
        "llama",
        {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32},
    ),
    "gpt-oss-20b": ("gpt_oss", {"num_local_experts": 32}),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {
            **{"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128},
            **{"num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
        },
    ),
}
LIVE = ("llama-7b",)  # a proof passes through all experts of a layer, many times
REPEATS = 2


def model_of(shape: str) -> Any:
    """A random model of two layers; its weights are drawn coarsely, because only their sizes count here."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, sizes = SHAPES[shape]
    config = AutoConfig.for_model(model_type, **sizes)
    config.num_hidden_layers = 2
    config.vocab_size = 512
    config.pad_token_id = 0
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu").eval().requires_grad_(False)
    noise = 0.02 * torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and "norm" in name:
            parameter.fill_(1)
        else:
            flat = parameter.view(-1)
            for start in range(0, len(flat), len(noise)):
                part = flat[start : start + len(noise)]
                part.copy_(noise[: len(part)])
    for module in model.modules():  # what is not saved with the weights is empty as well
        if hasattr(module, "inv_freq"):
            fresh = type(module)(config=model.config)
            module.inv_freq = fresh.inv_freq
            module.original_inv_freq = fresh.inv_freq
    return model


def measure(shape: str, what: str) -> dict[str, float]:
    """CPU seconds of one step in this process, and how far its memory rose above what the model takes."""
    import torch

    torch.set_num_threads(1)
    from sinkscope.inference import find
    from sinkscope.inference.infer import infer
    from sinkscope.opening.live import target_of

    model = model_of(shape)
    small = model_of_two_layers()
    infer(small)  # so that imports are not counted
    work = partial(find.inferred_adapter, model)
    if what == "live":
        work = partial(target_of, model)
    grown, (seconds, _) = memory_growth(lambda: seconds_of(work, time.process_time))
    layer = 0
    for parameter in model.model.layers[0].parameters():
        layer += parameter.numel() * parameter.element_size()
    return {"seconds": seconds, "gigabytes": (grown or 0) / 1e9, "layer_gigabytes": layer / 1e9}


def model_of_two_layers() -> Any:
    """A tiny model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=64, pad_token_id=0, **sizes))


def main(shapes: Sequence[Literal[*SHAPES]] = tuple(SHAPES), *, measured: str | None = None) -> None:
    """Measure each shape in processes of their own, and write the record.

    Args:
        measured: Only measure this in a shape, as the script does itself in processes of their own.
    """
    if measured is not None:
        print(json.dumps(measure(shapes[0], measured)))
        return
    rows: Row = {}
    if DATA.is_file():
        rows = json.loads(DATA.read_text())["result"]["shapes"]
    for shape in shapes:
        row: Row = {}
        steps = ["infer", "again"]
        if shape in LIVE:
            steps.append("live")
        for what in steps:
            runs: list[dict[str, float]] = []
            with tempfile.TemporaryDirectory() as cache:
                environment = {**os.environ, "XDG_CACHE_HOME": cache, "OMP_NUM_THREADS": "1"}
                command = [sys.executable, "-m", "experiments.bench_inference", shape, "--measured", what]
                for repeat in range(REPEATS + (what == "again")):
                    if what != "again":
                        environment["XDG_CACHE_HOME"] = f"{cache}/{repeat}"
                    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                    runs.append(json.loads(done.stdout.splitlines()[-1]))
            if what == "again":
                runs = runs[1:]
            best = min(runs, key=lambda run: run["seconds"])
            row[what] = {name: round(number, 3) for name, number in best.items()}
            print(shape, what, row[what], flush=True)
        rows[shape] = row
        DATA.write_text(record("bench-inference", {"shapes": rows}, {"repeats": REPEATS, "threads": 1}))


if __name__ == "__main__":
    run_script(main)
