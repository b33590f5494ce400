"""`sinkscope reproduce`: published results beside what is measured here by their protocols."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import checked
from sinkscope.measure import Hidden, Option, Result, Setup
from sinkscope.models.checkpoints.names import find
from sinkscope.models.checkpoints.published import Published, published, read_published
from sinkscope.models.loading.config import float32_by_default
from sinkscope.models.text import put_before
from sinkscope.results.notation import count_of, word_form
from sinkscope.results.options import command
from sinkscope.results.tables import cell
from sinkscope.sinks.reproduce.protocols import PROTOCOLS
from sinkscope.sinks.spikes.survey import Survey, read_survey


@checked
class Compared(Published):
    """A published result beside what was measured.

    Attributes:
        measured: The same, measured here. None: it was not measured, or there is none.
        agrees: Whether it agrees. None: it was not measured.
        remark: Why it was not measured.
    """

    measured: Any = None
    agrees: bool | None = None
    remark: str | None = None

    @classmethod
    def of(cls, record: Published, setup: Setup, survey: Survey) -> Compared:
        """Measure a published result again."""
        if record.quantity not in PROTOCOLS:
            return cls(**vars(record), remark="no protocol here")
        try:
            measured = PROTOCOLS[record.quantity](setup, survey, record)
        except SinkscopeError as error:
            return cls(**vars(record), remark=f"not measured: {error}")
        return cls(**vars(record), measured=measured, agrees=record.fits(measured))


@dataclass(frozen=True, kw_only=True)
class Reproduction(Result):
    """Published results, and whether they agree with what was measured.

    Attributes:
        records: The results.
    """

    kind = "reproduce"
    columns = ("model", "quantity", "value", "measured", "agrees", "source")

    records: tuple[Compared, ...]

    @property
    def exit_code(self) -> int:
        """Return 1 if a result does not agree."""
        return int(any(one.agrees is False for one in self.records))

    def conclusion(self) -> str:
        """Say how many agree."""
        agree = [one.agrees for one in self.records]
        unmeasured = agree.count(None)
        if unmeasured == len(agree):
            return f"None of {count_of(unmeasured, 'published result')} was measured."
        said = f"Measured values agree with {agree.count(True)} of {len(agree) - unmeasured} published ones"
        if unmeasured:
            said += f"; {unmeasured} more {word_form(unmeasured, 'was', 'were')} not measured"
        return f"{said}."

    def details(self) -> list[str]:
        """Say what is remarked of each result."""
        remarked = [one for one in self.records if one.remark is not None]
        return [f"{one.quantity} {cell(one.value)} ({one.source}): {one.remark}." for one in remarked]


def known_as(name: str) -> str:
    """Return the short name of a model; of another one the last part of its name."""
    entry = find(name)
    return name.rpartition("/")[2].lower() if entry is None else entry.name


@command(words="reproduce", group="Sinks", help="Compare a model with what is published about it.")
@float32_by_default()
def reproduce(
    model: Annotated[Any, Option(argument=True, metavar="MODEL")] = None,
    records: Annotated[str | Path | None, Option(metavar="FILE")] = None,
    *,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    tokenizer: Hidden = None,
    progress: Hidden = None,
) -> Reproduction:
    """Measure what is published about a model, each result by its own protocol, and say whether it agrees.

    The exit status is 1 if one does not. Without a model, it lists what is published.

    Args:
        model: A short name, hub id, folder or .gguf file; from Python also a live model.
        records: TOML file with published results to compare with instead.
        revision: Branch, tag or commit on the hub.
        device: cpu, cuda, cuda:1 or mps. By default the first CUDA device, else the CPU.
        dtype: float32, bfloat16 or float16. By default the checkpoint's.
        tokenizer: Tokenizer for live models that carry none.
        progress: Called as `progress(what, done, total)`.

    Raises:
        SinkscopeError: A record is not valid, nothing is published about the model, or it cannot be opened.

    Example:
        sinkscope reproduce llama-2-7b
    """
    known = published() if records is None else read_published(records)
    if model is None:
        return Reproduction(records=tuple(Compared(**vars(record)) for record in known))
    opened = Setup.open(model, revision=revision, device=device, dtype=dtype, tokenizer=tokenizer, progress=progress)
    opened.target.shards.check_alone("reproduce")
    setup = Setup.open(opened.target, bos=bool(put_before(opened.tokenizer)), progress=progress)
    survey = read_survey(setup.target, setup.ids)
    name = known_as(setup.target.name)
    compared = [Compared.of(one, setup, survey) for one in known if known_as(one.model) == name]
    if not compared:
        raise SinkscopeError(f"nothing is published here about {setup.target.name}: give --records FILE")
    settings = {"records": records, "revision": revision}
    info, made = setup.info(), setup.provenance()
    return Reproduction(records=tuple(compared), model=info, settings=settings, provenance=made)
