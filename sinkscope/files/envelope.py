"""How results are stored: an envelope of JSON around the fields of a frozen dataclass, checked when it is read.

It says which model was measured, and how, when and on which device.
Every result has a kind. A measurement is named once: its command, its kind of result, its part of a scan and its name
in Python follow from its place.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass, field, fields
from functools import cache, partial
from importlib import metadata
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from sinkscope import __version__
from sinkscope.errors import SinkscopeError
from sinkscope.files.output import PathName, read_json, write_output
from sinkscope.files.plain import named_file, pathless, plain
from sinkscope.files.schema6 import upgraded

CHECKOUT = Path(__file__).parents[2]
CODE = ("sinkscope", "experiments")
"""The folders of a checkout whose code makes results."""
LIBRARIES = ("torch", "transformers", "transformer_lens", "nnsight")


@dataclass(frozen=True)
class ModelInfo:
    """The model that was measured. The fingerprint is computed from the configuration and all weights."""

    name: str
    family: str
    n_layers: int
    d_model: int
    d_mlp: int
    fingerprint: str


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
        commit: Commit of the git checkout that holds this code, with a "+" if the code was changed since. None where
            there is no checkout, as for an installed package.
        first_ids: The first token ids that were read. Empty if there were no texts.
        bos_added: Whether BOS stands first although the tokenizer puts none before a text.
    """

    argv: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    device: str = "unknown"
    dtype: str = "unknown"
    attention: str = "unknown"
    bos: bool | None = None
    seed: int = 0
    seconds: float = 0.0
    commit: str | None = None
    first_ids: tuple[int, ...] = ()
    bos_added: bool | None = None


UNKNOWN_MODEL = ModelInfo("unknown", "unknown", 0, 0, 0, "")


def provenance(started: float, **about: Any) -> Provenance:
    """Collect the provenance at the end of a measurement.

    Args:
        started: `time.perf_counter()` at the beginning of the measurement.
        about: Other fields. By default no model was used.
    """
    no_model: dict[str, Any] = {"device": "cpu", "dtype": "float32", "attention": "none"}
    versions = {"python": platform.python_version(), "sinkscope": __version__}
    for name in LIBRARIES:
        if name in sys.modules:
            versions[name] = metadata.version(name)
    return Provenance(
        tuple(map(pathless, sys.argv)),
        versions,
        seconds=round(time.perf_counter() - started, 3),
        commit=commit_of(CHECKOUT),
        **no_model | about,
    )


@cache
def commit_of(checkout: Path) -> str | None:
    """Return the commit of a git checkout, with a "+" if its code differs from it.

    Args:
        checkout: Folder with the packages `sinkscope` and `experiments`.

    Returns:
        None where the folder is no checkout, or where git cannot tell.
    """
    if not (checkout / ".git").exists():
        return None
    git = partial(subprocess.run, cwd=checkout, capture_output=True, text=True, check=False)
    try:
        head = git(["git", "rev-parse", "HEAD"])
        changed = git(["git", "diff", "--quiet", "HEAD", "--", *CODE])
    except OSError:  # git is not installed
        return None
    if head.returncode:
        return None
    return head.stdout.strip() + "+" * bool(changed.returncode)


def documented_at(page: str) -> str:
    """Return the file in which something is documented: of the checkout, or below the environment of Python.

    Args:
        page: File below docs/, with or without the heading on it as links spell it.
    """
    folder = "docs"
    if not (CHECKOUT / folder).is_dir():  # a wheel has the pages inside the package
        folder = os.path.relpath(CHECKOUT / "sinkscope/docs", sys.prefix)
    return f"{folder}/{page}"


# --- the envelope ---

SCHEMA = 7
ENVELOPE_FIELDS = ("model", "settings", "provenance")

E = TypeVar("E", bound="Envelope")  # the shape checks of the tests refuse typing.Self


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """A result as it is stored. A subclass is a frozen dataclass; its own fields are the result.

    Attributes:
        model: The model that was measured.
        settings: The arguments that produced the result; of a path, its last part.
        provenance: How, when and on which device it was made.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"arbitrary_types_allowed": True}  # arrays
    kind: ClassVar[str] = "result"  # of a class that states none

    model: ModelInfo = UNKNOWN_MODEL
    settings: dict[str, Any] = field(default_factory=dict)
    provenance: Provenance = field(default_factory=Provenance)

    def __post_init__(self) -> None:
        settings: dict[str, Any] = {}
        for name, value in self.settings.items():
            settings[name] = named_file(value) if isinstance(value, os.PathLike) else value
        object.__setattr__(self, "settings", plain(settings))

    def own_fields(self) -> dict[str, Any]:
        """Return the fields of the subclass and their values."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ENVELOPE_FIELDS}

    def to_dict(self) -> dict[str, Any]:
        """Return the envelope: schema, kind, model, result, settings, provenance.

        It is plain JSON, in which NaN and infinity are None.
        """
        head = {"schema": SCHEMA, "kind": self.kind, "model": self.model, "result": self.own_fields()}
        return plain(head | {"settings": self.settings, "provenance": self.provenance})

    def to_json(self) -> str:
        """Return `to_dict` as one indented JSON object with a final newline."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"

    def save(self, path: PathName) -> Path:
        """Write `to_json` to `path`, completely or not at all. It may replace an earlier result of its kind.

        Raises:
            SinkscopeError: The file cannot be written, or holds something else; it is then unchanged.
        """
        return write_output(path, self.to_json())

    @classmethod
    def load(cls: type[E], path: PathName) -> E:
        """Read a file written by `save` or `--json`; the result has the class of its kind.

        Raises:
            SinkscopeError: The file cannot be read, is not such a file, or holds another kind than this class.
        """
        return cls.from_dict(read_json(path), Path(path).name)

    @classmethod
    def from_dict(cls: type[E], data: Any, name: str = "data") -> E:
        """Return the result whose `to_dict` is `data`. Error messages refer to it as `name`.

        Raises:
            SinkscopeError: `data` is not such an envelope.
        """
        from sinkscope.files.records import build  # loads pydantic, for which no help need wait

        if not isinstance(data, dict) or type(data.get("result")) is not dict:
            raise SinkscopeError(
                f"{name} is not a result of sinkscope: expected an object with schema, kind and result"
            )
        schema = data.get("schema")
        kind = str(data.get("kind"))
        result = data["result"]
        if schema == SCHEMA - 1:
            result = upgraded(kind, result)
        elif schema != SCHEMA:
            raise SinkscopeError(
                f"{name} has schema {schema!r}, and this version reads {SCHEMA - 1} and {SCHEMA}: run the command "
                "again, or read it by the version that wrote it"
            )
        kind_class = cls if kind == cls.kind else result_class(kind, name)
        if not issubclass(kind_class, cls):
            raise SinkscopeError(f"{name} holds {kind!r}, expected {cls.kind!r}: use Result.load for any kind")
        return build(kind_class, result | {key: data.get(key) for key in ENVELOPE_FIELDS}, name)


# --- kinds ---

MEASUREMENTS = "sinkscope.measurements"
"""Group of entry points by which other packages add measurements."""
OWN = {
    "attack": "sinks.attack:attack",
    "barcode": "loops.barcode:barcode",
    "find-sinks": "sinks.spikes.find:find_sinks",
    "lines": "sparse.lines:lines",
    "patch": "sinks.patch:patch",
    "repeat": "sinks.repeat:repeat",
    "why-loop": "loops.why:why_loop",
    "why-sink": "sinks.spikes.find:why_sink",
}
"""Sinkscope's own measurements, by the word of the command, which is their kind: the function, within sinkscope."""
KINDS = {
    "bench": "bench.table:BenchTable",
    "check-cache": "conformance.check_cache:CacheCheck",
    "compare": "app.compare:Comparison",
    "loops": "loops.text.check:LoopCheck",
    "sink-card": "app.card:SinkCard",
    "view": "app.view.result:ModelView",
}
"""Kinds of results that no measurement gives, with their classes."""


@cache
def other_measurements() -> dict[str, EntryPoint]:
    """Return the measurements of other packages, by the names of their functions."""
    return {point.attr: point for point in sorted(entry_points(group=MEASUREMENTS))}


@cache
def measurements() -> dict[str, EntryPoint]:
    """Return all measurements, by the words of their commands."""
    of_packages = {name.replace("_", "-"): point for name, point in other_measurements().items()}
    return of_packages | _within_sinkscope(OWN)


@cache
def kinds() -> dict[str, EntryPoint]:
    """Return what gives results of each kind: a measurement, or their class."""
    return measurements() | _within_sinkscope(KINDS)


def _within_sinkscope(places: dict[str, str]) -> dict[str, EntryPoint]:
    return {words: EntryPoint(words, f"sinkscope.{place}", MEASUREMENTS) for words, place in places.items()}


def result_class(kind: str, name: str = "data") -> type[Envelope]:
    """Return the class of a kind of result; its module is imported if it was not yet.

    Args:
        kind: The kind, as JSON states it.
        name: Name of the file, for the error.

    Raises:
        SinkscopeError: There is no such kind.
    """
    if kind not in kinds():
        raise SinkscopeError(f"{name} holds the unknown kind {kind!r}: this version knows {', '.join(kinds())}")
    giver = kinds()[kind].load()
    return getattr(giver, "result", giver)
