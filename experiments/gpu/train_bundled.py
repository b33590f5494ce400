"""Train a member of the bundled model's family on a GPU, with and without its circuit, and measure sink, loops, guard.

    python -m experiments.gpu.train_bundled --out DIR --stories FILE [--size base] [--device cuda]

One command, unattended: the recipe of `experiments.train_bundled` with larger steps, on stories that
`experiments.bundled.stories` sampled. An interrupted run goes on where it stopped. DIR gets a folder for each model, a
folder of answers for each, and family.json: whether `find-sinks` finds the planted neuron; survival of runs until they
collapse (Fig. 2 b of the LoopGuard paper); loops and costs with and without the guard. Afterwards
`python -m experiments.bundled.card --planted DIR/planted --unplanted DIR/unplanted` ships the model. Needs torch,
transformers, tokenizers, jaxtyping; no TransformerLens, no nnsight, no network.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Literal

from experiments import train_bundled
from experiments.bundled.training import SIZES
from experiments.gpu.steps import Steps
from experiments.loopguard import figure2
from experiments.record import Row
from experiments.script import run
from sinkscope.bench.table import bench_table
from sinkscope.sinks.spikes.find_sinks import find_sinks


def sinks(folder: Path, device: str) -> Row:
    """The needed neurons; those of a model with a circuit have to hold the planted one."""
    found = find_sinks(str(folder), device=device)
    needed = sorted(neuron.site for neuron in found.needed)
    row: Row = {"neurons": needed}
    circuit = folder / "circuit.json"
    if not circuit.is_file():
        return row
    planted = {(n["layer"], n["neuron"]) for n in json.loads(circuit.read_text())["neurons"]}
    return {**row, "right": planted <= set(needed)}


def loops(folder: Path, answers: Path, new: int, device: str) -> Row:
    """Survival of greedy answers, and what the guard changes."""
    words = ["--model", str(folder), "--task", "loops:source=text", "--methods", "full,loopguard", "--device", device]
    words += ["--batch-size", "32", "--max-new-tokens", str(new), "--out", str(answers)]
    subprocess.run([sys.executable, "-m", "sinkscope", "bench", *words], check=True, stdout=sys.stderr)
    measured = figure2.measure(answers)
    return {"collapse": measured["collapse"], "alarm": measured["alarm"], "table": bench_table([answers]).rows()}


def main(
    *,
    out: Path,
    stories: Path,
    steps: int = 8000,
    tokens_per_step: int = 32_768,
    size: Literal[*SIZES] = "base",
    seed: int = 0,
    new: int = 1000,
    device: str = "cuda",
    no_control: bool = False,
) -> None:
    """Make what the module describes.

    Args:
        out: Folder for checkpoints and results.
        new: Tokens of an answer.
        no_control: Leave out the model without a circuit.
    """
    out.mkdir(parents=True, exist_ok=True)
    settings: Row = {"size": size, "steps": steps, "tokens_per_step": tokens_per_step, "seed": seed, "new": new}
    measured = Steps("gpu-family", out / "family.json", settings, device, "float32")
    for name in ("planted", "unplanted")[: 2 - no_control]:
        folder = out / name
        train_bundled.main(
            out=folder,
            stories=stories,
            size=size,
            steps=steps,
            seed=seed,
            unplanted=name == "unplanted",
            resume=True,
            tokens_per_step=tokens_per_step,
            device=device,
        )
        measured.do(f"{name}: sink", partial(sinks, folder, device))
        measured.do(f"{name}: loops", partial(loops, folder, out / f"answers-{name}", new, device))
    measured.end()


if __name__ == "__main__":
    run(main)
