"""`sinkscope reproduce`: published results beside what is measured here by their protocols."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import plain
from sinkscope.measure import Hidden, Option, Result, Setup, Whole
from sinkscope.models.checkpoints.hub import cached_models
from sinkscope.models.checkpoints.names import find
from sinkscope.models.checkpoints.published import Published, published, read_published
from sinkscope.results.notation import count_of, word_list
from sinkscope.results.options import command
from sinkscope.results.tables import Table
from sinkscope.sinks.reproduce.protocols import PROTOCOLS, Reading


@dataclass(frozen=True)
class Compared:
    """A published result beside what was measured.

    Attributes:
        record: What is published.
        measured: The same by its protocol. None: it was not measured, or nothing was found.
        agrees: Whether it agrees. None: it was not measured.
        remark: Why it was not measured, and which other sources it contradicts.
    """

    record: Published
    measured: Any
    agrees: bool | None
    remark: str


@dataclass(frozen=True, kw_only=True)
class Reproduction(Result):
    """Published results, and whether they agree with what was measured.

    Attributes:
        records: The results.
        models: How many models have published results.
        on_disk: Those whose weights are on this disk, if no model was measured.
    """

    kind: ClassVar[str] = "reproduce"
    columns: ClassVar[tuple[str, ...]] = ("model", "quantity", "expected", "measured", "agrees", "source")
    glossary: ClassVar = {
        "expected": "The published value",
        "source": "Who reports it",
        "primary": "Whether the source itself was read",
        "protocol": "How it is measured",
    }

    records: tuple[Compared, ...]
    models: int
    on_disk: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """1 if a result does not agree."""
        return int(any(one.agrees is False for one in self.records))

    def conclusion(self) -> str:
        """How many agree, or which models are there."""
        if not self.model.n_layers:
            here = word_list(self.on_disk) or "none"
            return f"Of {count_of(self.models, 'model')} with published results, these are on this disk: {here}."
        verdicts = [one.agrees for one in self.records]
        return (
            f"Of {count_of(len(verdicts), 'published result')} of {self.model.name}, {verdicts.count(True)} agree, "
            f"{verdicts.count(False)} do not, and {verdicts.count(None)} were not measured."
        )

    def rows(self) -> Table:
        """One row per published result."""
        rows: Table = []
        for one in self.records:
            record = plain(one.record)
            row = {name: record.pop(name) for name in ("model", "quantity")}
            row |= {"expected": _in_words(record.pop("value")), "measured": _in_words(plain(one.measured))}
            row |= {"agrees": one.agrees, "remark": one.remark or None, **record, "protocol": None}
            if one.record.quantity in PROTOCOLS:
                row["protocol"] = PROTOCOLS[one.record.quantity].__doc__
            rows.append(row)
        return rows


def _in_words(value: Any) -> Any:
    """A value in one cell: lists keep their brackets."""
    if isinstance(value, list):
        return str(value)
    return value


def known_as(name: str) -> str:
    """The short name of a model; of another one the last part of its name."""
    entry = find(name)
    if entry is not None:
        return entry.name
    return name.rpartition("/")[2].lower()


def compared(record: Published, beside: Sequence[Published], reading: Reading | None) -> Compared:
    """A published result beside what is measured now, if a model is given, and beside other results."""
    measured, agrees, remarks = None, None, []
    try:
        if record.quantity not in PROTOCOLS:
            remarks.append("no protocol here")
        elif reading is not None:
            measured = PROTOCOLS[record.quantity](reading, record)
            agrees = record.agrees(measured)
    except SinkscopeError as error:
        remarks.append(f"not measured: {error}")
    remarks += [f"contradicts {other.source}" for other in beside if record.contradicts(other)]
    return Compared(record, measured, agrees, "; ".join(remarks))


@command(words="reproduce", group="Sinks", help="Compare a model with what is published about it.")
def reproduce(
    model: Annotated[Any, Option(argument=True, metavar="MODEL")] = None,
    records: Annotated[str | Path | None, Option(metavar="FILE")] = None,
    *,
    every: Annotated[bool, Option(name="--list")] = False,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    text: Annotated[str | Path | None, Option(metavar="FILE")] = None,
    seed: Whole = 0,
    tokenizer: Hidden = None,
    progress: Hidden = None,
) -> Reproduction:
    """Measure what is published about a model, each result by its own protocol, and say whether it agrees.

    The exit status is 1 if one does not. Without a model, it lists what is published of models on this disk.

    Args:
        model: A short name, hub id, folder or .gguf file; from Python also a live model.
        records: TOML file with published results to compare with instead.
        every: List the results, of a model or of all, and measure nothing.
        revision: Branch, tag or commit on the hub.
        device: cpu, cuda, cuda:1 or mps. By default the first CUDA device, else the CPU.
        dtype: float32, bfloat16 or float16. By default the checkpoint's.
        text: File of typical text. By default the bundled neutral text.
        seed: Seed of the random tokens.
        tokenizer: Tokenizer for live models that carry none.
        progress: Called as `progress(what, done, total)`.

    Raises:
        SinkscopeError: A record is not valid, nothing is published about the model, or it cannot be opened.

    Example:
        sinkscope reproduce llama-2-7b
        sinkscope reproduce --list
    """
    known = published() if records is None else read_published(records)
    models = {known_as(record.model) for record in known}
    if every or model is None:
        on_disk = {known_as(name) for name in cached_models()} & models
        wanted = models if every else on_disk
        if model is not None:
            wanted = {known_as(str(model))}
        listed = [compared(record, known, None) for record in known if known_as(record.model) in wanted]
        return Reproduction(records=tuple(listed), models=len(models), on_disk=tuple(sorted(on_disk)))
    setup = Setup.open(
        model,
        revision=revision,
        device=device,
        dtype=dtype,
        text=text,
        seed=seed,
        tokenizer=tokenizer,
        progress=progress,
        texts=1,
    )
    name, reading = known_as(setup.target.name), Reading(setup)
    if name not in models:
        raise SinkscopeError(f"nothing is published here about {setup.target.name}: give --records FILE, or see --list")
    return Reproduction(
        model=setup.info(),
        settings={"records": records, "revision": revision, "seed": seed},
        provenance=setup.provenance(),
        records=tuple(compared(record, known, reading) for record in known if known_as(record.model) == name),
        models=len(models),
    )
