"""Table 2 of Yona et al. 2025: benchmarks before and after the patch, the paper's beside what is measured here.

    python -m experiments.repeated_token.table2 [--models NAME[=FOLDER] ...] [--questions N]

Without options nothing is run and the measured columns say so. `--models llama-2-7b` measures the published weights,
which are downloaded if they are not there; `--models llama-2-7b=./weights` takes them from a folder. The patch holds
the neurons of the paper's Table 1. The paper gives neither shots nor metrics, nor which TruthfulQA and which ARC: every
metric of every candidate is printed, with the shots of the harness's own task files. Needs `pip install
-e ".[eval]"`, and the data sets, which the harness downloads.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from experiments.drawn import markdown
from experiments.record import Row, record
from experiments.repeated_token.harness import evaluate_tasks
from experiments.repeated_token.weights import ABSENT, measured
from experiments.script import run as run_script
from sinkscope.errors import SinkscopeError
from sinkscope.files.output import write_atomic
from sinkscope.hooks.edit import SinkPatch
from sinkscope.measure import Setup
from sinkscope.models.checkpoints.published import published
from sinkscope.sinks.reproduce.reproduce import known_as

MODELS = {  # short name here -> as printed in Table 2
    "llama-1-7b": "LLaMa-1-7B-HF",
    "llama-2-7b": "LLaMa-2-7B-HF",
    "mistral-7b-instruct-v0.1": "Mistral-7B-Instruct-v0.1",
}
PAPER = {  # benchmark -> (original, patched) of each model, in per cent
    "MMLU": ((29.81, 29.93), (41.20, 42.17), (53.41, 52.58)),
    "HellaSwag": ((56.97, 56.95), (57.12, 57.13), (56.23, 55.75)),
    "TruthfulQA": ((31.21, 29.38), (34.15, 34.39), (53.37, 52.26)),
    "WinoGrande": ((69.93, 69.93), (68.98, 69.06), (69.30, 68.82)),
    "AI2-ARC": ((41.89, 42.15), (43.52, 43.34), (50.17, 49.66)),
}
TASKS = {  # benchmark -> what it may have been, as lm-evaluation-harness calls it: (task, metric)
    "MMLU": (("mmlu", "acc"),),
    "HellaSwag": (("hellaswag", "acc"), ("hellaswag", "acc_norm")),
    "TruthfulQA": (("truthfulqa_mc1", "acc"), ("truthfulqa_mc2", "acc")),
    "WinoGrande": (("winogrande", "acc"),),
    "AI2-ARC": tuple((f"arc_{part}", metric) for part in ("easy", "challenge") for metric in ("acc", "acc_norm")),
}
HEAD = (
    "model",
    "benchmark",
    "original, paper",
    "patched, paper",
    "difference, paper",
    "task and metric here",
    "original, here",
    "patched, here",
    "difference, here",
    "random patch, here",
)


def table(measured_rows: dict[str, list[Row]]) -> str:
    """The table in Markdown."""
    lines: list[Sequence[str]] = []
    for column, (name, label) in enumerate(MODELS.items()):
        found = measured_rows.get(name)
        for benchmark, paper in PAPER.items():
            before, after = paper[column]
            printed = (label, benchmark, f"{before:.2f}", f"{after:.2f}", f"{after - before:+.2f}")
            if found is None:
                parts = []
                for t, m in TASKS[benchmark]:
                    parts.append(f"{t} {m}")
                lines.append((*printed, ", ".join(parts), *[ABSENT] * 4))
                continue
            scores = {}
            for row in found:
                scores[(row["task"], row["metric"])] = row
            for task, metric in TASKS[benchmark]:
                lines.append((*printed, f"{task} {metric}", *measured_cells(scores.get((task, metric)))))
    return markdown(HEAD, lines)


def measured_cells(row: Row | None) -> tuple[str, ...]:
    """The measured columns of the table, from a row of `evaluate_tasks`."""
    if row is None:
        return ("not measured",) * 4
    return (
        f"{100 * row['original']:.2f}",
        f"{100 * row['patched']:.2f}",
        in_points(row["difference"], row["difference_margin"]),
        in_points(row["random_difference"], row["random_margin"]),
    )


def in_points(difference: float, margin: float | None) -> str:
    """Return a difference in percentage points, with two standard errors where there are enough questions."""
    said = f"{100 * difference:+.2f}"
    return said if margin is None else f"{said} +- {100 * margin:.2f}"


def measure(name: str, model: object, questions: int | None, device: str | None, dtype: str | None) -> list[Row]:
    """`evaluate_tasks` with the neurons of the paper's Table 1 on every task of Table 2."""
    known = next(one for one in published() if (one.model, one.quantity) == (known_as(name), "neurons"))
    tasks = list(dict.fromkeys(task for some in TASKS.values() for task, _ in some))
    setup = Setup.open(model, device=device, dtype=dtype, loading="whole")
    return evaluate_tasks(setup, SinkPatch(sites=known.value), tasks, questions=questions)


def main(
    *,
    models: Sequence[str] = (),
    questions: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    keep: Path | None = None,
) -> None:
    """Make what the module describes.

    Args:
        models: Measure the published weights of these, or of NAME=FOLDER those in a folder.
        questions: Of each task; default: all.
        keep: Folder in which each result is kept as table2_NAME.json.
    """
    for entry in models:
        if entry.partition("=")[0] not in MODELS:
            raise SinkscopeError(f"--models {entry!r}: expected one of {', '.join(MODELS)}, or one of them =FOLDER")
    started = time.perf_counter()

    def evaluate(name: str, model: str) -> list[Row]:
        with torch.no_grad():
            rows = measure(name, model, questions, device, dtype)
        if keep is not None:
            text = record("table2", {"rows": rows}, {"model": name, "questions": questions}, started=started)
            write_atomic(keep / f"table2_{name}.json", text)
        return rows

    print(table(measured(models, evaluate)))


if __name__ == "__main__":
    run_script(main)
