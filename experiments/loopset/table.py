"""The table of rivals in the page about loops, from the result of `sinkscope loops compare`.

python -m experiments.loopset.table [--result figures/loops_compare.json] [--page docs/measure/loops.md]
"""

from __future__ import annotations

from pathlib import Path

from experiments.drawn import put_table
from experiments.script import run
from sinkscope.display.tables import percent
from sinkscope.loops.compare import DetectorScore, LoopComparison

COLUMNS = (
    *("rule", "recall", "in its worst class", "false alarms"),
    *("its delay", "ours on the same loops", "ours not later"),
)


def row(score: DetectorScore) -> str:
    """A line of the table; delays are mean numbers of characters, of the loops that both find."""
    cells = [score.detector, percent(score.recall), percent(score.lowest), percent(score.false_alarms)]
    for delay in (score.their_delay, score.our_delay):
        cells.append("-" if delay is None else f"{delay:.0f}")
    return f"| {' | '.join([*cells, percent(score.we_first)])} |"


def table(result: LoopComparison) -> str:
    """A line per rule."""
    head = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    return "\n".join([*head, *map(row, result.detectors)])


def main(*, result: Path = Path("figures/loops_compare.json"), page: Path = Path("docs/measure/loops.md")) -> None:
    """Make what the module describes."""
    put_table(page, "loopset.table", table(LoopComparison.load(result)))


if __name__ == "__main__":
    run(main)
