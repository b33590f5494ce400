"""Measure the two trained models, ship the planted one, and write the tables of its page, docs/bundled_model.md.

`python -m experiments.bundled.card --planted DIR --unplanted DIR`; `--measure DIR` only measures one run (its answer is
kept in DIR/measured.json and used afterwards).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from experiments.bundled import entry, facts
from experiments.drawn import markdown, put_table
from experiments.record import Row, record, value_of_each
from experiments.script import run as run_script
from sinkscope.errors import SinkscopeError
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
# What a model has to reach to be shipped.
COPYING, ENDING, LOOPING = 0.5, 0.5, 0.5
FRONT = """---
license: other
license_name: psf-2.0
library_name: transformers
pipeline_tag: text-generation
---

"""


def measured(run: Path, *, loops: bool) -> Row:
    kept = run / "measured.json"
    if not kept.exists():
        kept.write_text(json.dumps(facts.measure_run(run, loops=loops)) + "\n")
    return json.loads(kept.read_text())


def tables(planted: Row, unplanted: Row) -> dict[str, str]:
    """The tables of the page in Markdown, by the names of their places."""
    return {
        "losses": losses(planted, unplanted),
        "norms": norms(planted["norms"], unplanted["norms"]),
        "sinks": sinks(planted, unplanted),
        "conditions": conditions(planted["conditions"], unplanted["conditions"]),
    }


def losses(planted: Row, unplanted: Row) -> str:
    rows = [["windows of 512", f"{planted['valid_loss']:.3f}", f"{unplanted['valid_loss']:.3f}"]]
    for place, loss in planted["loss_by_position"].items():
        other = unplanted["loss_by_position"][place]
        rows.append([f"full context, positions {place}", f"{loss:.3f}", f"{other:.3f}"])
    return markdown(["validation loss (nats per token)", *BOTH], rows)


def norms(planted: Row, unplanted: Row) -> str:
    rows: list[list[str]] = []
    for layer, first in enumerate(planted["first_token_norm"]):
        low, high = planted["typical_5_percent"][layer], planted["typical_95_percent"][layer]
        typical = f"{planted['typical_norm'][layer]:.1f} ({low:.1f} to {high:.1f})"
        ratios = [f"{planted['ratio'][layer]:.1f}", f"{unplanted['ratio'][layer]:.2f}"]
        rows.append([str(layer), f"{first:,.1f}", typical, *ratios])
    return markdown(["after layer", "first token", "typical (5 to 95 %)", "ratio", "ratio, nothing planted"], rows)


def sinks(planted: Row, unplanted: Row) -> str:
    share, layers, rate = [], [], []
    for one in (planted, unplanted):
        share.append(f"{one['head_share']:.0%}")
        layers.append(str(one["heads_per_layer"]))
        rate.append(f"{one['sink_rate']['value']:.0%}")
    rows = [
        ["heads after layer 1 with mean first-token attention > 0.3", *share],
        ["such heads per layer", *layers],
        ["sink rate (eps 0.3, 64 tokens, all layers)", *rate],
    ]
    return markdown(["measurement", *BOTH], rows)


def conditions(planted: Row, unplanted: Row) -> str:
    rows = [
        ["random cycles after 8 copies, smallest of the periods", f">= {COPYING}"],
        ["previous-token score, best head", ""],
        ["induction score, best head", ""],
        ["loss on validation stories, nats per token", ""],
        [f"story openings, temperature {entry.TEMPERATURE}: end by themselves", f">= {ENDING:.0%}"],
        ["the same, greedy: end in a loop", ""],
    ]
    for found in planted["retrieval"].values():
        rows.append([f"retrieval, about {found['median_distance']:,.0f} tokens back", f"> {found['chance']:.0%}"])
    if "loopbench" in planted:
        rows.append(["LoopBench small, greedy: loop", f">= {LOOPING:.0%}"])
    for one in (planted, unplanted):
        reached = [f"{min(value_of_each(one['ditto'].values(), '8')):.2f}"]
        for name in ("previous_token", "induction"):
            head = one["heads"][name]
            reached.append(f"{head['score']:.2f} (L{head['layer']}.H{head['head']})")
        reached.append(f"{one['story_loss']['per_token']:.3f}")
        reached += [f"{one['sampled']['ended']:.0%}", f"{one['greedy']['looped']:.0%}"]
        for found in one["retrieval"].values():
            reached.append(f"{found['right']:.0%}")
        reached.append(looping(one))
        for row, value in zip(rows, reached, strict=False):  # without LoopBench there is one row less
            row.append(value)
    return markdown(["condition", "required", *BOTH], rows)


def looping(found: Row) -> str:
    """The share of LoopBench's prompts that loop."""
    groups = found.get("loopbench", {}).values()
    if not groups:
        return "not measured"
    count = sum(group["loop"] * group["runs"] for group in groups)
    return f"{count / sum(value_of_each(groups, 'runs')):.0%}"


def main(
    *,
    planted: Path | None = None,
    unplanted: Path | None = None,
    measure: Path | None = None,
    no_loops: bool = False,
    repository: Path = Path(),
) -> None:
    """Make what the module describes.

    Args:
        measure: Only measure this run.
        no_loops: Leave out the long generations.
    """
    torch.set_num_threads(1)
    if measure is not None:
        measured(measure, loops=not no_loops)
        return
    if planted is None or unplanted is None:
        raise SinkscopeError("give --planted and --unplanted, or --measure")
    folder = repository / "sinkscope" / "models" / "bundled"
    folder.mkdir(parents=True, exist_ok=True)
    for name in SHIPPED:
        shutil.copyfile(planted / name, folder / name)
    found = {}
    for name, one in (("planted", planted), ("unplanted", unplanted)):
        found[name] = measured(one, loops=not no_loops)
    page = repository / "docs" / "bundled_model.md"
    for name, table in tables(**found).items():
        put_table(page, f"bundled.card, {name}", table)
    write_atomic(folder / "README.md", FRONT + page.read_text(encoding="utf-8"))
    write_atomic(repository / "figures" / "bundled_model.json", record("bundled-model", found, {}))


if __name__ == "__main__":
    run_script(main)
