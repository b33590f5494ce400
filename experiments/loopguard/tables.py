"""LoopGuard's Tables 1 to 3: our rows first, each beside the paper's number, then the paper's rows that were not run.

    python -m experiments.loopguard.tables RUN ...

Each RUN is a folder of `sinkscope bench --task loops` (sets dc and ri), or of `sinkscope bench --task 2wiki.jsonl` with
prompts of `python -m experiments.loopbench.build`. "loop" is the paper's rule (Eq. 7).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.loopguard import paper
from experiments.script import run
from sinkscope.bench.table import BenchGroup, bench_table
from sinkscope.results.tables import percent


def table1(groups: Sequence[BenchGroup]) -> list[str]:
    """Loop rate, TTR, CR and length by set, model and method."""
    lines: list[str] = []
    measured: set[tuple[str, str, str]] = set()
    for group in groups:
        if group.set not in ("dc", "ri"):
            continue
        model = paper.published_model(group.model) or ""
        method = paper.without_budget(group.method)
        measured.add((group.set, model, method))
        printed = paper.TABLE1.get((group.set, model), {}).get(method)
        theirs = "paper: -"
        if printed:
            theirs = f"paper: loop {printed[3]:.1%}"
        metrics = group.metrics
        lines.append(
            f"{group.set} {group.model} {group.method}: loop {metrics['loop_paper']:.1%}, TTR {metrics['ttr']:.3f}, "
            f"CR {metrics['cr']:.3f}, length {metrics['length']:.0f}; {theirs}"
        )
    for (name, model), rows in paper.TABLE1.items():
        for method, (cr, ttr, length, loop) in rows.items():
            if (name, model, method) not in measured:
                lines.append(
                    f"{name} {model} {method}: not run; paper: loop {loop:.1%}, TTR {ttr}, CR {cr}, {length:.0f}"
                )
    return lines


def table2(groups: Sequence[BenchGroup]) -> list[str]:
    """F1 on 2WikiMultihopQA in per cent; the paper names no model."""
    lines: list[str] = []
    for group in groups:
        if group.set == "2wiki":
            printed = paper.TABLE2.get(paper.without_budget(group.method), "-")
            same = percent(group.metrics["same"])
            lines.append(
                f"{group.model} {group.method}: F1 {100 * group.score:.2f}, same as full {same}; paper: {printed}"
            )
    for method, f1 in paper.TABLE2.items():
        if not any(group.set == "2wiki" and paper.without_budget(group.method) == method for group in groups):
            lines.append(f"{method}: not run; paper: F1 {f1}")
    return lines


def table3(groups: Sequence[BenchGroup]) -> list[str]:
    """Loop rate and interventions of the variants; the paper names neither model nor set."""
    lines: list[str] = []
    for group in groups:
        if group.set in ("dc", "ri") and paper.without_budget(group.method) in {*paper.TABLE3, "loopguard"}:
            printed = paper.TABLE3.get(paper.without_budget(group.method))
            theirs = "-"
            if printed:
                theirs = f"loop {printed[0]:.1%}, {printed[1]} interventions"
            steps = group.metrics["interventions"] or 0.0
            lines.append(
                f"{group.set} {group.method}: loop {group.metrics['loop_paper']:.1%}, {steps:.1f}; paper: {theirs}"
            )
    for method, (loop, steps, _) in paper.TABLE3.items():
        if not any(paper.without_budget(group.method) == method for group in groups):
            lines.append(f"{method}: not run; paper: loop {loop:.1%}, {steps} interventions")
    return lines


def main(runs: Sequence[Path]) -> None:
    groups = bench_table(runs).groups
    for title, lines in (("Table 1", table1(groups)), ("Table 2", table2(groups)), ("Table 3", table3(groups))):
        print(title, *lines, sep="\n  ", end="\n\n")


if __name__ == "__main__":
    run(main)
