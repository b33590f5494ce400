"""Outputs of several methods side by side, as in appendix D of the LoopGuard paper.

    python -m experiments.loopguard.show RUN ... [--prompt dc-0000] [--characters 600]

Each RUN is a folder of `sinkscope bench --task loops`. Interventions are marked in the text.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sinkscope.bench.methods import order_of
from sinkscope.bench.record import BenchRecord, read_run
from sinkscope.files.plain import visible


def shown(record: BenchRecord, characters: int) -> str:
    """A heading, and the beginning and the end of the output."""
    metrics = record.metrics
    steps = [event["step"] for event in record.events if event["kind"] == "guard"]
    at = f", interventions at {', '.join(map(str, steps))}" if steps else ""
    loop = "a loop" if metrics["loop"] else "no loop"
    head = f"## {record.method}: {len(record.tokens)} tokens, ended by {record.ended}, {loop}{at}"
    text = visible(record.text)
    if len(text) > 2 * characters:
        text = f"{text[:characters]} [...] {text[-characters:]}"
    return f"{head}\n{text}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--prompt", help="id of the prompt; by default the first")
    parser.add_argument("--characters", type=int, default=600, help="of the beginning and of the end")
    args = parser.parse_args()
    records = [record for run in args.runs for record in read_run(run)]
    prompt = args.prompt or records[0].prompt
    for record in sorted(records, key=lambda each: order_of(each.method)):
        if record.prompt == prompt:
            print(shown(record, args.characters), end="\n\n")


if __name__ == "__main__":
    main()
