"""The return type of every measurement: frozen, with the model, the settings and the provenance of the result."""

from __future__ import annotations

import html
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import import_module, metadata
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import write_output
from sinkscope.files.plain import parse_json, pathless, plain, visible
from sinkscope.files.records import build
from sinkscope.files.tables import WIDTH, Grid, cell, glossary, strings

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


_PACKAGES = ("torch", "transformers", "transformer_lens", "nnsight")


@dataclass(frozen=True)
class Provenance:
    """How a result was made.

    Attributes:
        argv: The command, with relative paths or base names.
        versions: Versions of python, sinkscope, and of torch, transformers, transformer_lens and nnsight if they were
            used.
        device: Device name in torch's notation.
        dtype: Data type of the model.
        attention: Attention implementation that the model ran with.
        bos: Whether sequences began with BOS. None if that has no meaning.
        seed: Seed of every random choice.
        seconds: Time from start to result.
        peak_memory_bytes: Largest memory of this process so far; on cuda, the largest memory allocated there.
    """

    argv: tuple[str, ...]
    versions: dict[str, str]
    device: str
    dtype: str
    attention: str
    bos: bool | None
    seed: int
    seconds: float
    peak_memory_bytes: int | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "argv", tuple(pathless(word) for word in self.argv))


def versions() -> dict[str, str]:
    """Versions of python, sinkscope, and the libraries that were used."""
    own = {"python": platform.python_version(), "sinkscope": _version("sinkscope")}
    return own | {name: _version(name) for name in _PACKAGES if name in sys.modules}


def provenance(
    *,
    started: float,
    device: object,
    dtype: object,
    attention: str,
    bos: bool | None,
    seed: int,
    argv: Sequence[str] | None = None,
) -> Provenance:
    """Collect the provenance at the end of a measurement.

    Args:
        started: `time.perf_counter()` at the beginning of the measurement.
        device: Torch device, or its name.
        dtype: Torch dtype, or its name.
        attention: Attention implementation that the model ran with.
        bos: Whether sequences began with BOS.
        seed: Seed of every random choice.
        argv: The command. By default that of this process.
    """
    return Provenance(
        argv=tuple(sys.argv if argv is None else argv),
        versions=versions(),
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        attention=attention,
        bos=bos,
        seed=seed,
        seconds=round(time.perf_counter() - started, 3),
        peak_memory_bytes=peak_memory(str(device)),
    )


def peak_memory(device: str = "cpu") -> int | None:
    """Largest memory so far in bytes: resident memory of this process, or memory allocated on a cuda device."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    try:  # unlike getrusage, not inherited from the process that started this one
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


def _version(name: str) -> str:
    if name == "sinkscope":  # a source tree may not be installed
        from sinkscope import __version__

        return __version__
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return str(getattr(sys.modules[name], "__version__", "unknown"))


__all__ = ["Grid", "ModelInfo", "Number", "Provenance", "Result", "cell", "provenance"]

SCHEMA = 1
UNKNOWN = 0.1  # share of unknown tokens from which results carry a warning
R = TypeVar("R", bound="Result")  # the shape checks of the tests refuse typing.Self
_KINDS: dict[str, type[Result]] = {}
_ENVELOPE = ("model", "settings", "provenance")


@dataclass(frozen=True)
class ModelInfo:
    """The model that was measured. The fingerprint is computed from the configuration and a sample of the weights."""

    name: str
    family: str
    n_layers: int
    d_model: int
    d_mlp: int
    fingerprint: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", pathless(self.name))


@dataclass(frozen=True)
class Number:
    """A number of a result by which two models are compared, as on a sink card.

    Attributes:
        label: What it is, in a few words.
        value: The number. None: it was not measured.
        control: The same number for the control, if there is one.
        margin: Two standard errors over texts. None: differences of this number are not judged.
    """

    label: str
    value: float | None
    control: float | None = None
    margin: float | None = None


UNKNOWN_MODEL = ModelInfo("unknown", "unknown", 0, 0, 0, "")
UNKNOWN_PROVENANCE = Provenance((), {}, "unknown", "unknown", "unknown", None, 0, 0.0, None)


@dataclass(frozen=True, kw_only=True)
class Result:
    """Base of all results. A subclass is a frozen dataclass that states its `kind`; its own fields are the result.

    Fields are numbers, strings, None, tuples, dicts with string keys, and dataclasses of these: values that a JSON file
    returns unchanged after saving (tensors are written as lists). `settings` is converted to such plain values on
    creation.

    Attributes:
        model: The model that was measured.
        settings: The arguments that produced the result.
        provenance: How, when and on which device it was made.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"arbitrary_types_allowed": True}  # arrays
    kind: ClassVar[str] = "result"
    percent: ClassVar[tuple[str, ...]] = ()  # columns that tables show in per cent
    table_of: ClassVar[str] = ""  # field whose records are the rows; empty: the first field that holds records
    table_without: ClassVar[tuple[str, ...]] = ()  # fields of a record that are not shown as columns
    table_rows: ClassVar[int] = 64  # number of rows that are printed
    columns: ClassVar[tuple[str, ...]] = ()  # columns shown if not all fit; empty: the first that fit
    glossary: ClassVar[dict[str, str]] = {}  # meaning of columns that no docstring describes
    page: ClassVar[str] = ""  # page of the documentation, relative to docs/, without .md; empty: measure/KIND
    drawing: ClassVar[Callable[[Any], Any] | str | None] = None  # or module:function, imported when it is drawn

    model: ModelInfo = UNKNOWN_MODEL
    settings: dict[str, Any] = field(default_factory=dict)
    provenance: Provenance = UNKNOWN_PROVENANCE

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in vars(cls):
            cls.claim(cls.kind)

    @classmethod
    def claim(cls, kind: str) -> None:
        """Register this class for the results of a kind.

        Raises:
            SinkscopeError: The kind belongs to another class.
        """
        there = _KINDS.get(kind)
        if there is not None and (there.__module__, there.__qualname__) != (cls.__module__, cls.__qualname__):
            raise SinkscopeError(f"kind {kind!r} already belongs to {there.__qualname__}: give the new result its own")
        cls.kind = kind
        _KINDS[kind] = cls

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", plain(self.settings, scrub=True))

    def fill_in(self, model: ModelInfo, settings: dict[str, Any], provenance: Provenance) -> None:
        """Set the parts that the function of a measurement leaves open; the decorator calls it once."""
        object.__setattr__(self, "model", model)
        object.__setattr__(self, "settings", plain(settings, scrub=True))
        object.__setattr__(self, "provenance", provenance)

    def to_dict(self) -> dict[str, Any]:
        """The envelope: schema, kind, model, result, settings, provenance. Plain JSON: NaN and inf become None."""
        result = {f.name: plain(getattr(self, f.name)) for f in fields(self) if f.name not in _ENVELOPE}
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            "model": plain(self.model),
            "result": result,
            "settings": plain(self.settings),
            "provenance": plain(self.provenance),
        }

    def to_json(self, **also: Result) -> str:
        """`to_dict` as one indented JSON object with a final newline; the entries of `also` are added by name."""
        whole = {**self.to_dict(), **{key: other.to_dict() for key, other in also.items()}}
        return json.dumps(whole, indent=1, allow_nan=False) + "\n"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write `to_json` to `path`, completely or not at all. It may replace an earlier result, but no other file.

        Raises:
            SinkscopeError: The file cannot be written, or holds something else; it is then unchanged.
        """
        return write_output(path, self.to_json())

    @classmethod
    def load(cls: type[R], path: str | os.PathLike[str]) -> R:
        """Read a file written by `save` or `--json`; the result has the class of its kind.

        Raises:
            SinkscopeError: The file cannot be read, is not such a file, or holds another kind than this class.
        """
        return cls.from_dict(read_json(path), os.path.basename(os.fspath(path)) or os.fspath(path))

    @classmethod
    def from_dict(cls: type[R], data: Any, name: str = "data") -> R:
        """The result whose `to_dict` is `data`. Error messages refer to it as `name`.

        Raises:
            SinkscopeError: `data` is not such an envelope.
        """
        if not isinstance(data, dict) or "schema" not in data or "kind" not in data:
            raise SinkscopeError(f"{name} is not a result of sinkscope: expected an object with schema and kind")
        if data["schema"] != SCHEMA:
            raise SinkscopeError(
                f"{name} has schema {data['schema']!r}, this version reads {SCHEMA}: install the version that wrote it "
                "or make it again"
            )
        kind = str(data["kind"])
        if kind not in _KINDS and kind in _kind_modules():
            import_module(_kind_modules()[kind])
        found = _KINDS.get(kind)
        if found is None:
            known = ", ".join(sorted(known_kinds()))
            raise SinkscopeError(f"{name} holds the unknown kind {kind!r}: this version knows {known}")
        if not issubclass(found, cls):
            raise SinkscopeError(f"{name} holds {kind!r}, expected {cls.kind!r}: use Result.load for any kind")
        parts = {key: data.get(key) for key in _ENVELOPE}
        inside = data.get("result")
        if not isinstance(inside, dict):
            raise SinkscopeError(f"{name} has no result: expected an object of {kind!r}")
        return build(found, {**inside, **parts}, name)

    def rows(self) -> list[dict[str, Any]]:
        """The result as a table, one dict per row: the records of a field, or else one row of the plain fields.

        A rate in a record becomes three columns: the rate and the lower and upper end of its interval.
        """
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _ENVELOPE}
        for name, value in own.items():
            if self.table_of in ("", name) and isinstance(value, tuple | list) and value and is_dataclass(value[0]):
                return [_row(plain(record), self.table_without) for record in value]
        if self.table_of:
            return []
        return [{name: plain(value) for name, value in own.items() if isinstance(value, str | int | float | None)}]

    def conclusion(self) -> str:
        """The conclusion in one sentence that includes the control; every kind of sinkscope has one."""
        return ""

    def numbers(self) -> list[Number]:
        """The numbers by which two models are compared; a subclass overrides it."""
        return []

    def details(self) -> list[str]:
        """Lines of plain text below the conclusion; a subclass overrides it."""
        return []

    def beside(self) -> tuple[Result, ...]:
        """Further results shown on its page; a subclass overrides it."""
        return ()

    def summary(self) -> str:
        """The conclusion, the model, the details and warnings, as lines of plain text."""
        told, m = self.conclusion(), self.model
        lines = [f"Conclusion: {told}"] if told else [f"{self.kind} on {m.name}"]
        if told and m.n_layers:
            size = f"{m.n_layers} layers, d_model {m.d_model}, d_mlp {m.d_mlp}"
            lines.append(f"The model is {m.name} ({m.family}, {size}).")
        if (unknown := self.settings.get("unknown_tokens") or 0.0) > UNKNOWN:
            lines.append(
                f"Warning: {unknown:.0%} of the reference text is unknown to this tokenizer; supply suitable text with "
                "--text."
            )
        return "\n".join([*lines, *self.details()])

    def shown_rows(self) -> list[dict[str, Any]]:
        """The rows that are printed; if there are many, the first ones."""
        return self.rows()[: self.table_rows]

    def grids(self) -> list[Grid]:
        """The tables that are shown, by default that of `shown_rows`; a subclass with several overrides it."""
        rows = self.shown_rows()
        head, cells = strings(rows, self.percent)
        every, note = self.rows(), ""
        if rows and len(rows) < len(every) and rows[0].keys() == every[0].keys():
            note = f"The table shows {len(rows)} of {len(every)} rows (--csv FILE writes them all)."
        return [Grid(head, cells, note=note, columns=self.columns)] if cells and head else []

    def to_csv(self) -> str:
        """All rows and columns of `to_frame` as CSV."""
        return self.to_frame().to_csv(index=False)

    def to_frame(self) -> pd.DataFrame:
        """`rows` as a pandas data frame."""
        import pandas as pd

        return pd.DataFrame(self.rows())

    def figure(self) -> go.Figure:
        """The result as a plotly figure.

        Raises:
            SinkscopeError: Results of this kind have no figure.
        """
        draw = type(self).drawing
        if isinstance(draw, str):
            module, _, name = draw.partition(":")
            draw = getattr(import_module(module), name)
        if draw is None:
            raise SinkscopeError(f"no figure is drawn of {self.kind!r}: use --json, or --html for its tables")
        return draw(self)

    def text(self, width: int | None = WIDTH) -> str:
        """`summary`, the tables and the meaning of their columns: the output where there is no terminal.

        Args:
            width: Characters per line of the tables. None: every column is shown.
        """
        grids = [grid.fitted(width) for grid in self.grids()]
        return "\n\n".join([self.summary(), *(grid.text(width) for grid in grids), *self.below(grids, width)])

    def table(self) -> Any:
        """The same for a terminal, as a rich renderable."""
        return _OnTerminal(self)

    def below(self, grids: Sequence[Grid], width: int | None) -> list[str]:
        """The meaning of the columns shown, one line each, and the page of the documentation."""
        told = self._glossary(grids)
        size = max(map(len, told), default=0)
        lines = [f"{name.replace('_', ' '):{size}}  {said}" for name, said in told.items()]
        if width:
            lines = [fill(line, width, subsequent_indent=" " * (size + 2)) for line in lines]
        if type(self).__module__.startswith("sinkscope."):
            lines.append(f"More: {self.link()}")
        return ["\n".join(lines)] if lines else []

    def _glossary(self, grids: Sequence[Grid]) -> dict[str, str]:
        return glossary(type(self), [name for grid in grids for name in (*grid.head, *grid.same)], self.glossary)

    @classmethod
    def link(cls) -> str:
        """The page of the documentation about results of this kind."""
        return f"docs/{cls.page or f'measure/{cls.kind}'}.md"

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return self.to_html()

    def inset(self) -> str:
        """HTML between the summary and the tables, fully escaped; a subclass overrides it."""
        return ""

    def to_html(self) -> str:
        """`summary` and the tables with every column as an HTML fragment, fully escaped; notebooks show this."""
        first, *details = map(html.escape, self.summary().split("\n"))
        grids = self.grids()
        told = self._glossary(grids).items()
        terms = "".join(f"<dt>{html.escape(n.replace('_', ' '))}</dt><dd>{html.escape(s)}</dd>" for n, s in told)
        meaning = f"<details><summary>What the columns mean</summary><dl>{terms}</dl></details>" if terms else ""
        said = "\n".join([f"<p><b>{first}</b></p>", *(f"<p>{line}</p>" for line in details)])
        return f'<div class="sinkscope">{said}{self.inset()}{"".join(grid.html() for grid in grids)}{meaning}</div>'


@dataclass(frozen=True)
class _OnTerminal:
    """A result as rich draws it, with the columns that the terminal has room for."""

    result: Result

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from rich.text import Text

        width = options.max_width
        grids = [grid.fitted(width - 4, between=3) for grid in self.result.grids()]  # rules take four characters
        yield Text(visible(self.result.summary()))
        for grid in grids:
            if grid.title:
                yield Text("")
            yield grid
        yield from (Text(visible(line)) for line in self.result.below(grids, width))


def _row(record: dict[str, Any], without: Sequence[str]) -> dict[str, Any]:
    """A record without some fields, and with three columns for each rate."""
    row: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict) and value.keys() == {"share", "low", "high"}:
            row |= {name: value["share"], f"{name}_low": value["low"], f"{name}_high": value["high"]}
        elif name not in without:
            row[name] = value
    return row


def known_kinds() -> tuple[str, ...]:
    """Kinds that `Result.load` can read: those of sinkscope, then those defined elsewhere and imported so far."""
    return tuple(dict.fromkeys((*_kind_modules(), *_KINDS)))


def _kind_modules() -> dict[str, str]:
    """Each kind of result that sinkscope has, with the module that defines it; the package itself knows them."""
    return import_module("sinkscope.app.commands").kind_modules()


def read_json(path: str | os.PathLike[str]) -> Any:
    """The content of a JSON file.

    Raises:
        SinkscopeError: The file cannot be read, or is not JSON.
    """
    name = os.path.basename(os.fspath(path)) or os.fspath(path)
    try:
        text = Path(path).read_bytes().decode()
    except OSError as error:
        raise SinkscopeError(f"cannot read {name}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise SinkscopeError(f"{name} is not a JSON file: expected what --json or .save() wrote") from None
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:
        raise SinkscopeError(f"{name} is not a JSON file ({error}): expected what --json or .save() wrote") from None
