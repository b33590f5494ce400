"""Whether the printed thresholds part real loops from honest answers, and what others would do (App. B)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.papers.loopguard.runs import COUNT, NEW, Half, Source, loops, share
from experiments.papers.loopguard.verdicts import honest_texts
from sinkscope.errors import SinkscopeError
from sinkscope.loops import Monitor, MonitorSettings
from sinkscope.loops.text.monitor import PaperSettings, Settings
from sinkscope.measure import Mean, Natural, Result, Row, Setup, column, measurement, optional

PRINTED, COPIES = "as printed", "copies alone"
CHANGED: dict[str, tuple[Any, Any]] = {
    "votes": (1, 3),
    "theta_ttr": (0.1, 0.4),
    "theta_cr": (0.06, 0.24),
    "theta_conf": (0.8, 0.95),
    "streak": (3, 12),
    "theta_nov": (0.01, 0.04),
    "stall": (2, 8),
    "warmup": (32, 128),
}
"""Thresholds of Appendix B, halved or doubled one at a time."""
Read = tuple[Sequence[int], Sequence[float]]
"""The tokens of a text, and the largest probability behind each."""


@dataclass(frozen=True, kw_only=True)
class Alarms(
    Row,
    table="rules",
    title="alarms",
    note="Loops: outputs that end in three equal copies. Honest answers repeat because they were asked to. The gain is "
    "loops minus honest answers on the half for choosing, all others are of the half for reporting.",
):
    """In what a rule raises an alarm."""

    key: str
    loop: Mean = column("loops", "share", "Loops in which it raises an alarm.")
    honest: Mean = column("honest answers", "share", "Honest answers in which it raises an alarm.")
    healthy: Mean | None = optional("other outputs", "share", "Outputs without a loop in which it raises an alarm.")
    gain: Mean = column("gain, choosing", "points", "Loops minus honest answers on the half for choosing.")


@dataclass(frozen=True, kw_only=True)
class Thresholds(Result):
    """Alarms of the printed rule and of others on real loops, honest answers and other outputs."""

    rules: tuple[Alarms, ...]
    loops: int

    def conclusion(self) -> str:
        """Return what the printed rule finds, beside the rule that the other half chooses and that of copies."""
        printed, *changed, copies = self.rules
        best = max(changed, key=lambda row: row.gain.value)
        other = "no change of one threshold is better on the half for choosing"
        if best.gain.value > printed.gain.value:
            other = f"with {best.key}, chosen on the other half, {best.text('loop')} and {best.text('honest')}"
        return (
            f"The printed rule finds {printed.text('loop')} of {self.loops} loops and raises an alarm in "
            f"{printed.text('honest')} of honest answers; {other}. As a control, the rule of copies finds "
            f"{copies.text('loop')} and takes {copies.text('honest')} of honest answers for loops."
        )


def read(source: Source, half: Half) -> dict[str, list[Read]]:
    """Return loops, other outputs and honest answers of a half, with the largest probabilities."""
    texts: dict[str, list[Read]] = {"loop": [], "healthy": [], "honest": []}
    for record in source.outputs(["whole"], half)["whole"]:
        largest = source.largest(source.opening(record), record.tokens)
        texts["loop" if loops(record) else "healthy"].append((record.tokens, largest))
    encode = source.setup.tokenizer
    for text in honest_texts(half):
        ids = encode(text["answer"], add_special_tokens=False, verbose=False)["input_ids"]
        texts["honest"].append((ids, source.largest(encode(text["prompt"], verbose=False)["input_ids"], ids)))
    return texts


def alarmed(settings: Settings, texts: Sequence[Read]) -> Mean:
    """Return the share of texts in which a rule raises an alarm; tokens alone are read, and no words."""
    found: list[bool] = []
    for text in texts:
        monitor = Monitor(settings)
        found.append(any(monitor.update(token, largest).trigger for token, largest in zip(*text, strict=True)))
    return share(found)


@measurement(loading="whole")
def thresholds(setup: Setup, *, count: Natural = COUNT, new: Natural = NEW, runs: Path | None = None) -> Thresholds:
    """Look for alarms of the printed rule, with thresholds halved and doubled, in outputs and honest answers.

    Args:
        count: Number of openings of a half, a multiple of four.
        new: New tokens.
        runs: Folder in which outputs stay for this paper's other artefacts.
    """
    source = Source(setup, count, new, runs)
    choose, report = read(source, "choose"), read(source, "report")
    if not choose["loop"] or not report["loop"]:
        raise SinkscopeError(f"none of {count} outputs of {new} tokens of a half loops: give more --count or --new")
    rules: dict[str, Settings] = {PRINTED: PaperSettings()}
    for name, values in CHANGED.items():
        rules |= {f"{name} {value:g}": PaperSettings(**{name: value}) for value in values}
    rules[COPIES] = MonitorSettings()
    rows: list[Alarms] = []
    for done, (name, settings) in enumerate(rules.items()):
        setup.progress("rules", done, len(rules))
        means = {kind: alarmed(settings, texts) for kind, texts in report.items() if texts}
        gain = alarmed(settings, choose["loop"]).value - alarmed(settings, choose["honest"]).value
        rows.append(Alarms(key=name, gain=Mean(gain), **means))
    return Thresholds(rules=tuple(rows), loops=len(report["loop"]))
