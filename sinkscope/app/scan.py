"""`scan` runs the most important measurements on one open model and writes its sink card; `demo` is a tour of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from sinkscope import __version__
from sinkscope.app.card import CARD, CardPart, SinkCard
from sinkscope.app.report import read_card, sections_of, why_missing
from sinkscope.bench.run import run_bench
from sinkscope.bench.table import BenchTable, tabulate_records
from sinkscope.errors import SinkscopeError
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.output import write_output
from sinkscope.files.store import Folder, Keyed
from sinkscope.loops.barcode import barcode
from sinkscope.loops.why import why
from sinkscope.measure import Setup
from sinkscope.models.checkpoints.config import parse_dtype
from sinkscope.models.target import Target
from sinkscope.opening.load import fits
from sinkscope.results.console import note
from sinkscope.results.notation import count_of
from sinkscope.results.pages import document
from sinkscope.results.result import Result
from sinkscope.sinks.attack import attack
from sinkscope.sinks.marking_heads import heads
from sinkscope.sinks.patch import patch_make
from sinkscope.sinks.precision import precision
from sinkscope.sinks.repeat import repeat
from sinkscope.sinks.spikes.find import circuit, find_sinks
from sinkscope.sparse.lines import lines

PAGE = "card.html"
clock = time.perf_counter
"""Seconds that a user waits."""


@dataclass(frozen=True)
class ScanPart:
    """A part of a scan.

    Attributes:
        name: Name of its function.
        command: Command that runs it alone.
        measure: Gives its result; it takes a `Setup` and the arguments.
        full: Its arguments.
        quick: Its arguments with --quick. None: it is then left out.
        streams: Whether it can run on a model that is read layer by layer.
        seconds: What it may take with --quick on a model of 135 million parameters; more on larger ones, in proportion.
    """

    name: str
    command: str
    measure: Callable[..., Result]
    full: Mapping[str, Any] = field(default_factory=dict)
    quick: Mapping[str, Any] | None = field(default_factory=dict)
    streams: bool = False
    seconds: float = 20

    @property
    def file(self) -> str:
        """Its file in the folder of a scan."""
        return self.name.replace("_", "-") + ".json"


def measure_bench(setup: Setup, *, task: str, methods: Sequence[str], max_new_tokens: int | None = None) -> BenchTable:
    """Return the table of a benchmark on an open model."""
    run = run_bench(setup.target, task, methods, max_new_tokens=max_new_tokens, seed=setup.seed)
    return tabulate_records([run])


GUARDED = ("full", "loopguard")
POLICIES = ("full", "random:0.25", "streaming:0.25", "h2o:0.25", "snapkv:0.25", "tova:0.25")
PARTS = (
    ScanPart("find_sinks", "find-sinks", find_sinks.on, streams=True, seconds=70),
    ScanPart("circuit", "circuit", circuit.on, quick={"max_repeats": 300}, seconds=30),
    ScanPart("heads", "heads", heads.on, quick={"n_tokens": 8}, streams=True),
    ScanPart("repeat", "repeat", repeat.on, quick={"max_repeats": 300}, streams=True),
    ScanPart("attack", "attack", attack.on, quick={"sequences": 8, "n_tokens": 96}),
    ScanPart("patch_make", "patch make", patch_make.on, quick=None),
    ScanPart("barcode", "barcode", barcode.on, quick={"max_new_tokens": 64}),
    ScanPart("why", "why", why.on, quick={"max_new_tokens": 64, "cuts": 3}),
    ScanPart("lines", "lines", lines.on, quick={"count": 3, "length": 192}),
    ScanPart(
        "loops",
        "bench --task loops:source=text",
        measure_bench,
        {"task": "loops:source=text:count=16", "methods": GUARDED, "max_new_tokens": 384},
        # the guard acts 64 tokens beyond two copies
        {"task": "loops:source=text:count=2", "methods": GUARDED, "max_new_tokens": 112},
        seconds=60,
    ),
    ScanPart(
        "policies",
        "bench --task text",
        measure_bench,
        {"task": "text:count=4:prompt=768:answer=32", "methods": POLICIES},
        # a quarter of the prompt is more than the 64 tokens that SnapKV always keeps
        {"task": "text:count=1:prompt=320:answer=12", "methods": POLICIES},
    ),
    ScanPart(
        "precision", "precision", precision.on, quick={"pieces": 3, "length": 16, "schemes": ["a8-tensor"]}, seconds=40
    ),
)
"""What a scan runs, in the order of the card."""
QUICK_SECONDS, SMALL = 125.0, 135e6  # what all parts may take with --quick, on a model of so many parameters


Outcomes = list[tuple[ScanPart, Result | str]]
"""Parts with their results, or with why there is none."""


@dataclass(frozen=True)
class FinishedPart(Keyed):
    """A part whose result is already in the folder."""

    name: str


@partial(checks_arguments, others=Setup.open)
def scan(
    model: Any = None,
    *,
    out: str | Path | None = None,
    quick: bool = False,
    against: str | Path | None = None,
    **settings: Any,
) -> SinkCard:
    """Run all measurements on a model and write its sink card: one page and a JSON file.

    The model is opened once. A model whose weights do not fit is read layer by layer; parts that need it whole are then
    left out, and the card says so. Every part is saved as it finishes, and the same command resumes after the last one.

    Args:
        model: A short name, hub id, folder or .gguf file; from Python also a live model. By default the bundled model.
        out: Folder for the results and the card. By default scan-NAME.
        quick: Use smaller numbers, and end each part after a time: about two minutes for a model of 135 million
            parameters, and in proportion for larger ones. The card says which parts were cut short.
        against: A card.json, or the folder of a scan, to compare with.
        settings: As for `sinkscope.measure.Setup.open`.

    Raises:
        SinkscopeError: The model cannot be opened, or the folder holds something else.
    """
    other = None if against is None else read_card(against)
    setup = Setup.open(model, **settings)
    target = setup.target
    target.shards.check_alone("scan")
    if not target.resident and fits(weight_bytes(target, settings.get("dtype")), target.device):  # else by layers
        setup = Setup.open(model, **settings, loading="whole")
    folder = Path(out or f"scan-{Path(setup.target.name).name}")
    decisive = _settings(setup, quick)
    with Folder(folder, decisive, FinishedPart, option="--out") as kept:
        try:
            outcomes = _outcomes(kept, folder, setup, quick)
        except KeyboardInterrupt:
            note(f"{folder} keeps {count_of(len(kept.records), 'finished part')}: the same command goes on from there")
            raise
        parts = tuple(card_part(part, outcome) for part, outcome in outcomes)
        card = SinkCard(quick=quick, parts=parts, model=setup.info(), settings=decisive, provenance=setup.provenance())
        if other is not None:
            card = card.compared(other)
        card.save(folder / CARD)
        write_output(folder / PAGE, _page(card, outcomes))
    note(f"Card: {folder / PAGE}")
    return card


def _outcomes(kept: Folder[FinishedPart], folder: Path, setup: Setup, quick: bool) -> Outcomes:
    """Each part with its result, measured now or kept from an earlier run; or with why there is none."""
    outcomes: Outcomes = []
    chosen = [part for part in PARTS if not quick or part.quick is not None]
    larger = max(1.0, sum(parameter.numel() for parameter in setup.target.hf.parameters()) / SMALL)
    left = QUICK_SECONDS * larger
    for number, part in enumerate(chosen):
        setup.progress(f"scan: {part.command}", number, len(chosen))
        outcome: Result | str | None = None
        if part.name in kept.records:
            with suppress(SinkscopeError):  # it is gone or damaged, and is measured again
                outcome = Result.load(folder / part.file)
        if outcome is None:
            began = clock()
            outcome = _measured(part, setup, min(part.seconds * larger, left) if quick else None)
            took = clock() - began
            left -= took
            if not sys.stderr.isatty():  # where there is no bar
                end = outcome if isinstance(outcome, str) else "done"
                note(f"scan {number + 1} of {len(chosen)}: {part.command}: {end} ({took:.0f} s)")
            if isinstance(outcome, Result):
                outcome.save(folder / part.file)
                kept.append([FinishedPart(part.name)])
        outcomes.append((part, outcome))
    return outcomes


class CutShortError(SinkscopeError):
    """A part of a scan took all of its time."""


@contextmanager
def at_most(target: Target, seconds: float | None) -> Iterator[None]:
    """Context manager in which passes of a model end in an error after `seconds`; None is no limit."""
    if seconds is None:
        yield
        return
    if seconds < 0:
        raise CutShortError("the parts before it took all the time")
    end = clock() + seconds

    def check(*_: object) -> None:
        if clock() > end:
            raise CutShortError(f"it was cut short after {seconds:.0f} s")

    with target.hooks(*((layer, "pre", check) for layer in target.layers)):
        yield


def _page(card: SinkCard, outcomes: Outcomes) -> str:
    """The card's page: its tiles, then the sections of a report: the card, open if it compares, and the parts."""
    results: dict[str, Result | str] = {CARD: card}
    results |= {part.file: outcome for part, outcome in outcomes if isinstance(outcome, Result)}
    sections, _ = sections_of(results, opened=(CARD if card.against else "", "find-sinks.json"))
    return document(f"Sink card of {card.model.name}", sections, kind=card.kind, first=card.first_screen())


def _settings(setup: Setup, quick: bool) -> dict[str, Any]:
    """Everything that determines the results of a folder."""
    return {
        "command": "scan",
        "quick": quick,
        "model": asdict(setup.info()),
        "device": setup.target.device.type,
        "dtype": str(setup.target.dtype).removeprefix("torch."),
        "bos": setup.bos is not None,
        "text": sha256(setup.text.encode()).hexdigest()[:16],
        "seed": setup.seed,
        "sinkscope": __version__,
    }


def _measured(part: ScanPart, setup: Setup, seconds: float | None) -> Result | str:
    """The result of a part, or why there is none; with --quick it ends after `seconds`."""
    if not part.streams and not setup.target.resident:
        return "it needs the whole model in memory"
    arguments = part.full if seconds is None else part.quick or {}
    setup = replace(setup, settings={}, started=time.perf_counter())
    try:
        with at_most(setup.target, seconds):
            return part.measure(setup, **arguments)
    except CutShortError as error:
        return f"{error}; `sinkscope {part.command}` alone has no bound"
    except Exception as error:
        return why_missing(error)


def card_part(part: ScanPart, outcome: Result | str) -> CardPart:
    """Return a part of the card: its conclusion and numbers, or why it has no result."""
    if isinstance(outcome, str):
        missing = f"not measured, because {outcome.rstrip('.')}."
        return CardPart(part.name, part.command, missing)
    numbers = tuple(number for number in outcome.numbers() if number.value is not None)
    return CardPart(part.name, part.command, outcome.conclusion(), numbers, tuple(outcome.cards()))


def weight_bytes(target: Target, dtype: torch.dtype | str | None = None) -> int:
    """Return the size of the weights in memory, in a dtype or that of the checkpoint."""
    kind = parse_dtype(dtype) or getattr(target.config, "dtype", None)
    if not isinstance(kind, torch.dtype):
        kind = target.dtype
    return kind.itemsize * sum(parameter.numel() for parameter in target.hf.parameters())


@checks_arguments
def demo(*, progress: Any = None) -> SinkCard:
    """Take a tour: scan the bundled model, and write one page of what each command finds.

    The page is sinkscope-demo/card.html.

    Args:
        progress: Called as `progress(what, done, total)`.
    """
    return scan(out="sinkscope-demo", quick=True, progress=progress)
