"""Outputs of several methods side by side, as in appendix D of the LoopGuard paper.

    python -m experiments.loopguard.show RUN ... [--prompt dc-0000] [--characters 600]

Each RUN is a folder of `sinkscope bench --task loops`. Interventions are marked in the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.script import run
from sinkscope.bench.methods import order_of
from sinkscope.bench.record import BenchRecord, read_run
from sinkscope.files.plain import visible


def shown(record: BenchRecord, characters: int) -> str:
    """A heading, and the beginning and the end of the output."""
    metrics = record.metrics
    steps = []
    for event in record.events:
        if event["kind"] == "guard":
            steps.append(event["step"])
    at = ""
    if steps:
        at = f", interventions at {', '.join(map(str, steps))}"
    loop = "no loop"
    if metrics["loop"]:
        loop = "a loop"
    head = f"## {record.method}: {len(record.tokens)} tokens, ended by {record.ended}, {loop}{at}"
    text = visible(record.text)
    if len(text) > 2 * characters:
        text = f"{text[:characters]} [...] {text[-characters:]}"
    return f"{head}\n{text}"


def main(runs: Sequence[Path], *, prompt: str | None = None, characters: int = 600) -> None:
    """Make what the module describes.

    Args:
        prompt: Id of the prompt; by default the first.
        characters: Of the beginning and of the end.
    """
    records = [record for run in runs for record in read_run(run)]
    chosen = prompt or records[0].prompt
    for record in sorted(records, key=lambda each: order_of(each.method)):
        if record.prompt == chosen:
            print(shown(record, characters), end="\n\n")


if __name__ == "__main__":
    run(main)
