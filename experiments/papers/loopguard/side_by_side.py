"""A loop's text under every cache and guard, with the values of the printed detector beside it (App. D)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from experiments.papers.loopguard.runs import COUNT, NEW, Source, acts_of, loops
from sinkscope.errors import SinkscopeError
from sinkscope.loops.text.monitor import Monitor
from sinkscope.loops.text.votes import PaperSettings
from sinkscope.measure import Mean, Natural, Result, Row, Setup, column, measurement, optional

SHOWN = ("whole", "streaming", "h2o", "random", "printed", "default")
EXCERPT = 160  # characters
RULE = PaperSettings()


@dataclass(frozen=True, kw_only=True)
class Side(
    Row,
    table="sides",
    title="the same opening",
    note=f"The detector votes at TTR below {RULE.theta_ttr}, CR below {RULE.theta_cr} and {RULE.streak} steps above "
    f"{RULE.theta_conf}; values at the last token, probabilities with the whole cache.",
):
    """What one method wrote, and what the printed detector says of it."""

    key: str
    ends: str = column("ends", "word", "Whether it ends in three equal copies, by itself, or goes on.")
    acts: Mean = column("acts", "count", "Interventions.")
    alarm: Mean | None = optional("alarm", "count", "Generated tokens at the detector's first alarm.")
    ttr: Mean = column("TTR", "number", "Type-token ratio of the last 256 tokens.")
    cr: Mean = column("CR", "number", "Compression ratio of the last 256 tokens.")
    sure: Mean = column("above 0.9", "count", "Last steps in a row whose largest probability is above 0.9.")
    words: str = column("last words", "word", "The end of the text.")


@dataclass(frozen=True, kw_only=True)
class SideBySide(Result):
    """The outputs of one opening whose text loops with the whole cache, under every method."""

    sides: tuple[Side, ...]
    opening: str

    def conclusion(self) -> str:
        """Return who still loops, and when the detector sees the loop of the whole cache."""
        whole, looping = self.sides[0], [row.key for row in self.sides if row.ends == "copies"]
        seen = "raises no alarm" if whole.alarm is None else f"raises its alarm after {whole.text('alarm')} tokens"
        acts = ", ".join(f"{row.key} acts {row.text('acts')} times" for row in self.sides[-2:])
        return (
            f"Of one opening that loops with the whole cache (TTR {whole.text('ttr')}, CR {whole.text('cr')} at the "
            f"end; the detector {seen}), these end in copies: {', '.join(looping)}; {acts}."
        )


@measurement(loading="whole")
def side_by_side(setup: Setup, *, count: Natural = COUNT, new: Natural = NEW, runs: Path | None = None) -> SideBySide:
    """Show the outputs of the first opening that loops with the whole cache, and the detector's values at their ends.

    Args:
        count: Number of openings, a multiple of four.
        new: New tokens.
        runs: Folder in which outputs stay for this paper's other artefacts.
    """
    source = Source(setup, count, new, runs)
    outputs = source.outputs(SHOWN)
    looping = [*map(loops, outputs["whole"])]
    if True not in looping:
        raise SinkscopeError(f"none of {count} outputs of {new} tokens ends in a loop: give more --new or --count")
    before = source.opening(outputs["whole"][looping.index(True)])
    rows: list[Side] = []
    for name, records in outputs.items():
        record, monitor = records[looping.index(True)], Monitor(RULE)
        largest = source.largest(before, record.tokens)
        steps = [monitor.update(*pair) for pair in zip(record.tokens, largest, strict=True)]
        alarm = next((Mean(float(step.step)) for step in steps if step.trigger), None)
        sure = len([*takewhile(lambda value: value > RULE.theta_conf, reversed(largest))])
        numbers = {"acts": len(acts_of(record)), "ttr": steps[-1].ttr, "cr": steps[-1].cr, "sure": sure}
        ends = "copies" if loops(record) else {"eos": "by itself", "cap": "goes on"}[record.ended]
        words = " ".join(record.text.split())[-EXCERPT:]
        means = {key: Mean(float(value)) for key, value in numbers.items()}
        rows.append(Side(key=name, ends=ends, alarm=alarm, words=words, **means))
    return SideBySide(sides=tuple(rows), opening=setup.tokenizer.decode(before, skip_special_tokens=True))
