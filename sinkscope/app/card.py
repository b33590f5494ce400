"""The sink card of a model: what a scan found."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sinkscope.results.headline import Headline, Verdict
from sinkscope.results.notation import word_list
from sinkscope.results.result import Result
from sinkscope.results.table import Row, Subject, column

CARD = "card.json"
NOTHING = "-"


@dataclass(frozen=True)
class CardPart:
    """One measurement of a scan.

    Attributes:
        name: Name of the measurement.
        command: Command that runs it alone.
        conclusion: What it found, or why there is no result.
        headlines: Its findings, each beside what it has to beat.
        measured: Whether there is a result.
        topic: What it is about, on the first screen of the card; of other parts empty.
    """

    name: str
    command: str
    conclusion: str
    headlines: tuple[Headline, ...] = ()
    measured: bool = True
    topic: str = ""

    @property
    def file(self) -> str:
        """The name of its file, beside the card."""
        return f"{self.name}.json"


@dataclass(frozen=True)
class FindingKey:
    """A finding of a part, by its number among them."""

    part: str
    number: int


@dataclass(frozen=True, kw_only=True)
class Finding(
    Row,
    table="findings",
    title="what was measured",
    note=f"{Verdict.NOT_SHOWN}: the control is as strong as the finding, within its margin; where lower is better, the "
    "finding has to be lower. In brackets: what the control is. No fair control: no other neurons write as much. Loss: "
    "nats a token more. The page says it in full.",
):
    """A finding of a scan, beside what it has to beat."""

    key: FindingKey
    subject: str

    found: str = column("found", "word", "The number, with its margin.")
    control: str = column("has to beat", "word", "The number of the strongest control, and what the control is.")
    verdict: str = column("verdict", "word", "Whether the finding is beyond its control by more than its margin.")

    @property
    def group(self) -> str:
        """The heading under which it stands."""
        return self.key.part

    @property
    def label(self) -> str:
        """What it is called."""
        return self.subject


@dataclass(frozen=True)
class PartKey:
    """The subject of a part, by which it is found in another scan."""

    part: str
    subject: Any

    def __str__(self) -> str:
        return f"{self.part}: {self.subject}"

    def shared(self, other: PartKey) -> float:
        """Return how much the subjects of one part share."""
        alike = self.part == other.part and type(self.subject) is type(other.subject)
        if not alike or not hasattr(self.subject, "shared"):
            return 0.0
        return float(self.subject.shared(other.subject))


@dataclass(frozen=True, kw_only=True)
class SinkCard(Result):
    """All findings of a scan.

    Attributes:
        quick: Whether the parts ran with smaller numbers.
        parts: The parts in the order of the card.
    """

    kind = "sink-card"

    quick: bool
    parts: tuple[CardPart, ...]

    @property
    def exit_code(self) -> int:
        """1 if nothing was measured."""
        return int(not any(part.measured for part in self.parts))

    def conclusion(self) -> str:
        """Return how many findings are beyond their controls, and which are not."""
        headlines = [headline for part in self.parts for headline in part.headlines]
        shown = [headline for headline in headlines if headline.verdict is Verdict.SHOWN]
        if not headlines:
            return self.parts[0].conclusion
        words = f"{len(shown)} of {len(headlines)} findings on {self.model.name} are beyond their controls"
        for verdict, title in ((Verdict.NOT_SHOWN, "not shown"), (Verdict.NO_CONTROL, "without a fair control")):
            others = [headline.subject for headline in headlines if headline.verdict is verdict]
            if others:
                words += f"; {title}: {word_list(others, 3)}"
        return f"{words}."

    def subjects(self) -> list[Subject]:
        """Return the findings, each beside what it has to beat."""
        rows: list[Finding] = []
        for part in self.parts:
            for number, headline in enumerate(part.headlines):
                key = FindingKey(part.name, number)
                rows.append(
                    Finding(
                        key=key,
                        subject=headline.subject,
                        found=headline.found,
                        control=headline.control,
                        verdict=headline.verdict.value,
                    )
                )
        return [Subject(title="", rows=tuple(rows), key="findings")] if rows else []

    def details(self) -> list[str]:
        """Return what parts without findings say."""
        lines = [f"{part.command}: {part.conclusion}" for part in self.parts if not part.headlines]
        if self.quick:
            lines.append("This was a quick scan: most parts rest on fewer samples.")
        return lines


def subjects_beside(card: SinkCard, folder: Path) -> list[Subject]:
    """Return what `compare` reads of a scan: the tables of its parts, from their files beside the card.

    A part whose file is gone is left out.
    """
    subjects: list[Subject] = []
    for part in card.parts:
        file = folder / part.file
        if not part.measured or not file.is_file():
            continue
        for subject in Result.load(file).compared():
            subjects.append(replace(subject, key=PartKey(part.name, subject.key or subject.title)))
    return subjects
