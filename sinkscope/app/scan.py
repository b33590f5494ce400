"""`scan` runs the most important measurements on one open model and writes its sink card."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from sinkscope import __version__
from sinkscope.app.card import CARD, CardPart, SinkCard
from sinkscope.app.report import not_measured, sections_of, why_missing
from sinkscope.bench.benchmark import run as run_bench
from sinkscope.bench.table import BenchTable, tabulate_records
from sinkscope.errors import SinkscopeError
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.envelope import measurements, other_measurements
from sinkscope.files.output import write_output
from sinkscope.files.store import Kept, Keyed, check_folder, kept_in
from sinkscope.measure import Setup
from sinkscope.measure.measurement import TEXT_READ
from sinkscope.results.console import note
from sinkscope.results.pages import document, render
from sinkscope.results.result import Result

PAGE = "card.html"
TOUR = "sinkscope-demo"
"""Folder of a scan without a model."""


@dataclass(frozen=True)
class ScanPart:
    """A part of a scan.

    Attributes:
        name: What is typed with --only, and the name of its file.
        topic: What it is about, on the first screen of the card; of other parts empty.
        command: Command that runs it alone. Empty: it is the name.
        measure: Gives its result of a `Setup` and the arguments. None: the measurement of its name.
        full: Its arguments.
        quick: Its arguments with --quick. None: it is then left out.
        streams: Whether it can run on a model that is read layer by layer.
    """

    name: str
    topic: str = ""
    command: str = ""
    measure: Callable[..., Result] | None = None
    full: Mapping[str, Any] = field(default_factory=dict)
    quick: Mapping[str, Any] | None = field(default_factory=dict)
    streams: bool = False


def measure_bench(setup: Setup, **arguments: Any) -> BenchTable:
    """Return the table of a benchmark on an open model."""
    return tabulate_records([run_bench(setup.target, seed=setup.seed, progress=setup.progress, **arguments)])


GUARDED = ("full", "loopguard")
POLICIES = ("full", "random:0.25", "streaming:0.25", "h2o:0.25", "snapkv:0.25", "tova:0.25")
PARTS = (
    ScanPart("find-sinks", "Sink", streams=True),
    ScanPart("why-sink", "Circuit"),
    ScanPart("repeat", "Repetition", quick={"max_repeats": 300}, streams=True),
    ScanPart("attack", quick={"sequences": 8, "n_tokens": 96}),
    ScanPart("patch", quick=None),
    ScanPart("barcode", quick={"max_new_tokens": 64}),
    ScanPart("why-loop", quick={"max_new_tokens": 64, "cuts": 3}),
    ScanPart("lines", "Lines", quick={"count": 3, "length": 192}),
    ScanPart(
        "loops",
        "Loops",
        "bench --task loops:source=text",
        measure_bench,
        {"task": "loops:source=text:count=16", "methods": GUARDED, "max_new_tokens": 384},
        # the guard acts 64 tokens beyond two copies
        {"task": "loops:source=text:count=2", "methods": GUARDED, "max_new_tokens": 112},
    ),
    ScanPart(
        "policies",
        "Cache",
        "bench --task text",
        measure_bench,
        {"task": "text:count=4:prompt=768:answer=32", "methods": POLICIES},
        # a quarter of the prompt is more than the 64 tokens that SnapKV always keeps
        {"task": "text:count=1:prompt=320:answer=12", "methods": POLICIES},
    ),
)
"""What a scan runs, in the order of the card; after it, the measurements of other packages with their defaults."""
QUICK_TEXTS = 8
"""Texts of a survey with --quick, two of each kind."""


@dataclass(frozen=True)
class FinishedPart(Keyed):
    """A part whose result is already in the folder."""

    name: str


@partial(checks_arguments, settings_of=Setup.open)
def scan(
    model: Any = None,
    *,
    out: str | Path | None = None,
    quick: bool = False,
    only: Sequence[str] | None = None,
    **settings: Any,
) -> SinkCard:
    """Run all measurements on a model and write its sink card: one page and a JSON file.

    The model is opened once. A model whose weights do not fit is read layer by layer; parts that need it whole are then
    left out, and the card says so. Every part is saved as it finishes, and the same command resumes after the last one.

    Args:
        model: A short name, hub id, folder or .gguf file; from Python also a live model. By default a tour: the
            bundled model, quickly, with the page sinkscope-demo/card.html.
        out: Folder for the results and the card. By default scan-NAME.
        quick: Read fewer texts and measure less: a third to a tenth of the passes, the same number on any machine.
        only: Parts to run. By default all.
        settings: As for `sinkscope.measure.Setup.open`.

    Raises:
        SinkscopeError: A part is unknown, the model cannot be opened, or the folder holds something else.
    """
    if model is None and out is None:
        quick, out = True, TOUR
    parts = parts_to_run(quick, only)
    if out is not None:
        check_folder(out)
    settings.setdefault("loading", "fits")
    setup = Setup.open(model, **settings)
    setup.target.shards.check_alone("scan")
    folder = Path(out or f"scan-{Path(setup.target.name).name}")
    decisive = _settings(setup, quick)
    outcomes: dict[str, Result | str] = {}
    with kept_in(folder, decisive, FinishedPart) as finished:
        outcomes.update(finished_before(folder, finished))
        for number, part in enumerate(parts, 1):
            if part.name not in outcomes:
                outcome = _measured(part, setup, quick)
                outcomes[part.name] = outcome
                if isinstance(outcome, Result):
                    outcome.save(folder / f"{part.name}.json")
                    finished.append([FinishedPart(part.name)])
            outcome = outcomes[part.name]
            done = outcome if isinstance(outcome, str) else "done"
            note(f"scan {number} of {len(parts)}: {part.command or part.name}: {done}")
        card = write_card(folder, outcomes, setup, decisive)
    note(f"Card: {folder / PAGE}")
    return card


def finished_before(folder: Path, finished: Kept[FinishedPart]) -> dict[str, Result]:
    """Return the results of an earlier run in a folder, by the names of their parts."""
    results: dict[str, Result] = {}
    for part in every_part():
        if part.name in finished.records:
            with suppress(SinkscopeError):  # it is gone or damaged, and is measured again if it is asked for
                results[part.name] = Result.load(folder / f"{part.name}.json")
    return results


def write_card(
    folder: Path, outcomes: Mapping[str, Result | str], setup: Setup, settings: Mapping[str, Any]
) -> SinkCard:
    """Write the card of a folder and its page.

    Args:
        folder: The folder.
        outcomes: By the name of a part, its result, or why there is none.
        setup: The model.
        settings: Everything that determines the results, and whether they are quick.

    Returns:
        The card, with its parts in the order of `every_part`.
    """
    parts = [part for part in every_part() if part.name in outcomes]
    on_card = tuple(card_part(part, outcomes[part.name]) for part in parts)
    card = SinkCard(
        quick=settings["quick"],
        parts=on_card,
        model=setup.info(),
        settings=dict(settings),
        provenance=setup.provenance(),
    )
    card.save(folder / CARD)
    results: dict[str, Any] = {CARD: card}
    for part in parts:
        results[f"{part.name}.json"] = outcomes[part.name]
    sections, _ = sections_of(results, opened=("find-sinks.json",))
    tiles = render("results/pages/tiles.html", scan=card)  # for each topic a number, its control, a conclusion
    page = document(f"Sink card of {card.model.name}", sections, kind=card.kind, first=tiles)
    write_output(folder / PAGE, page)
    return card


def every_part() -> list[ScanPart]:
    """Return all parts in the order of the card; the measurements of other packages come last."""
    return [*PARTS, *(ScanPart(name.replace("_", "-")) for name in other_measurements())]


def parts_to_run(quick: bool, only: Sequence[str] | None) -> list[ScanPart]:
    """Return the parts that are run; without --only, --quick leaves some out.

    Raises:
        SinkscopeError: A name is that of no part.
    """
    every = {part.name: part for part in every_part()}
    if not only:
        return [part for part in every.values() if not (quick and part.quick is None)]
    for name in only:
        if name not in every:
            raise SinkscopeError(f"--only {name}: expected {', '.join(every)}")
    return [every[name] for name in every if name in only]


def _measured(part: ScanPart, setup: Setup, quick: bool) -> Result | str:
    """The result of a part, or why there is none."""
    if not part.streams and not setup.target.resident:
        return "it needs the whole model in memory"
    arguments = part.quick or {} if quick else part.full
    surveyed = QUICK_TEXTS if quick else setup.surveyed
    try:
        measure = part.measure or measurements()[part.name].load().on
        fresh = replace(setup, settings=dict(setup.settings), started=time.perf_counter(), surveyed=surveyed)
        return measure(fresh, **arguments)
    except Exception as error:
        return why_missing(error)


def _settings(setup: Setup, quick: bool) -> dict[str, Any]:
    """Everything that determines the results of a folder."""
    return {
        "command": "scan",
        "quick": quick,
        "model": asdict(setup.info()),
        "device": setup.target.device.type,
        "dtype": str(setup.target.dtype).removeprefix("torch."),
        "bos": setup.bos is not None,
        TEXT_READ: setup.text_read,
        "seed": setup.seed,
        "sinkscope": __version__,
    }


def card_part(part: ScanPart, outcome: Result | str) -> CardPart:
    """Return a part of the card: its conclusion and findings, or why it has no result."""
    command = part.command or part.name
    if isinstance(outcome, str):
        return CardPart(part.name, command, not_measured(outcome), measured=False, topic=part.topic)
    return CardPart(part.name, command, outcome.conclusion(), tuple(outcome.headlines()), topic=part.topic)
