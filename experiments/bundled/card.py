"""Measure the two trained models, ship the planted one, and write the tables of its page, docs/bundled_model.md.

`python -m experiments.bundled.card --planted DIR --unplanted DIR`
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from experiments.bundled import facts
from experiments.drawn import markdown, put_table
from experiments.record import Row, write_record
from experiments.script import run as run_script
from sinkscope.files.output import write_atomic

SHIPPED = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "circuit.json",
)
BOTH = ("planted", "nothing planted")
FRONT = """---
license: other
license_name: psf-2.0
library_name: transformers
pipeline_tag: text-generation
---

"""


def tables(planted: Row, unplanted: Row) -> dict[str, str]:
    """The tables of the page in Markdown, by the names of their places."""
    both = planted, unplanted
    losses = [["windows of 512", *(f"{one['valid_loss']:.3f}" for one in both)]]
    for place in planted["loss_by_position"]:
        losses.append([f"full context, positions {place}", *(f"{one['loss_by_position'][place]:.3f}" for one in both)])
    sinks = [
        ["heads after layer 1 with mean first-token attention > 0.3", *(f"{one['head_share']:.0%}" for one in both)],
        ["such heads per layer", *(str(one["heads_per_layer"]) for one in both)],
        ["sink rate (eps 0.3, 64 tokens, all layers)", *(f"{one['sink_rate']['value']:.0%}" for one in both)],
    ]
    return {
        "losses": markdown(["validation loss (nats per token)", *BOTH], losses),
        "sinks": markdown(["measurement", *BOTH], sinks),
    }


def main(*, planted: Path, unplanted: Path, repository: Path = Path()) -> None:
    torch.set_num_threads(1)
    folder = repository / "sinkscope" / "models" / "bundled"
    folder.mkdir(parents=True, exist_ok=True)
    for name in SHIPPED:
        shutil.copyfile(planted / name, folder / name)
    found = {"planted": facts.measure_run(planted), "unplanted": facts.measure_run(unplanted)}
    page = repository / "docs" / "bundled_model.md"
    for name, table in tables(**found).items():
        put_table(page, f"bundled.card, {name}", table)
    write_atomic(folder / "README.md", FRONT + page.read_text(encoding="utf-8"))
    write_record(repository / "figures" / "bundled_model.json", "bundled-model", found, {})


if __name__ == "__main__":
    run_script(main)
