"""Files of benchmarks: what sets are made from, sets with their manifests, and the folders of runs.

The folder of a run holds its settings, its prompts, and a line for each finished prompt.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from sinkscope._plain import parse_json, pathless
from sinkscope.errors import SinkscopeError
from sinkscope.output import check_writable, write_atomic
from sinkscope.results import ModelInfo, provenance
from sinkscope.store import RECORDS, SETTINGS, Folder, Keyed, lines, read_json, read_lines

T = TypeVar("T")
HUB = "hub"


class FoundFile(NamedTuple):
    """A benchmark's file.

    Attributes:
        path: where it lies.
        name: base name, or `repo/file`.
        commit: the hub's, None for a local file.
    """

    path: Path
    name: str
    commit: str | None = None


@dataclass(frozen=True)
class BuiltSet(Generic[T]):
    """A set of prompts or dialogues, and how it came about.

    Attributes:
        made: the prompts or dialogues, in order.
        manifest: settings, source with its sha256, numbers reached and the paper's; knows no paths.
        rows: the same for the reader: name and value.
    """

    made: tuple[T, ...]
    manifest: dict[str, Any]
    rows: tuple[tuple[str, str], ...]

    def text(self) -> str:
        """A few lines for the reader."""
        return "\n".join(f"{name:<16} {value}" for name, value in self.rows)


def find_file(
    source: str | os.PathLike[str], names: Sequence[str], expected: str, *, repo: str, file: str, revision: str | None
) -> FoundFile:
    """The file of a benchmark.

    Args:
        source: the file, a folder that holds it (or its folder `data`), or "hub".
        names: what the file may be called in a folder; the first that is there is taken.
        expected: what to give, for errors.
        repo: dataset on the hub.
        file: its file there.
        revision: branch, tag or commit of the dataset.

    Raises:
        SinkscopeError: there is no such file.
    """
    if os.fspath(source) == HUB:
        from sinkscope.models.checkpoint import hub_file

        try:
            local = hub_file(repo, file, revision, kind="dataset")
        except FileNotFoundError:
            raise SinkscopeError(f"the dataset {repo} has no {file}: give --source with a local copy") from None
        # The cache names a snapshot after its commit.
        return FoundFile(local, f"{repo}/{file}", local.parents[len(Path(file).parts) - 1].name)
    path = Path(source).expanduser()
    if path.is_dir():
        places = [path / below / name for name in names for below in ("", "data")]
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            raise SinkscopeError(f"the folder {path.resolve().name} has no {' or '.join(names)}: give {expected}")
        path = found
    if not path.is_file():
        raise SinkscopeError(f"there is no file or folder {os.fspath(source)!r}: give {expected}")
    return FoundFile(path, path.name)


def manifest_path(made: str | os.PathLike[str]) -> Path:
    """Where the manifest of a set lies: dc.jsonl has dc.manifest.json."""
    path = Path(made)
    return path.with_name(f"{path.stem if path.suffix == '.jsonl' else path.name}.manifest.json")


def check_out(out: str | os.PathLike[str], *, force: bool = False) -> None:
    """Refuse before the work what `write_set` would refuse after it.

    Raises:
        SinkscopeError: as `write_set`.
    """
    if os.fspath(out) == "-":
        raise SinkscopeError("--out -: give the set a file of its own, such as set.jsonl")
    check_writable(out)
    for path in (Path(out), manifest_path(out)):
        check_writable(path)
        if path.is_file() and not force:
            raise SinkscopeError(f"{path.name} is there already: give another --out, or --force to replace it")
    if Path(out).is_file() and not manifest_path(out).is_file():
        raise SinkscopeError(f"{Path(out).name} has no manifest, so it is no set of sinkscope: give another --out")


def write_set(
    lines: Sequence[str], manifest: dict[str, Any], out: str | os.PathLike[str], *, force: bool = False
) -> tuple[Path, Path]:
    """Write a set as JSON lines and its manifest beside it, each whole or not at all.

    Returns:
        Paths of the set and of the manifest.

    Raises:
        SinkscopeError: one of them is there already and `force` is not given, or cannot be written.
    """
    check_out(out, force=force)
    content = "".join(line + "\n" for line in lines).encode()
    manifest = {**manifest, "prompts_sha256": hashlib.sha256(content).hexdigest()}
    path = write_atomic(out, content)
    return path, write_atomic(manifest_path(out), json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")


PROMPTS = "prompts.jsonl"


@dataclass(frozen=True)
class Finished(Keyed):
    """What every line of a run says first.

    Attributes:
        model: fingerprint of the model.
        method: its name.
        prompt: id of the prompt.
    """

    model: str
    method: str
    prompt: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Model, method and prompt: a folder holds each once."""
        return self.model, self.method, self.prompt


R = TypeVar("R", bound=Finished)


@dataclass(frozen=True)
class Contents(Generic[R]):
    """What a folder holds: settings, prompts by id, and records in the order of methods and prompts."""

    name: str
    settings: dict[str, Any]
    prompts: dict[str, dict[str, Any]]
    records: tuple[R, ...]


def open_folder(
    folder: str | os.PathLike[str] | None, settings: Mapping[str, Any], prompts: Iterable[Any], kind: type[R]
) -> Folder[R]:
    """A run's folder, to be written; use it in a `with`.

    Args:
        folder: new, empty, or of an earlier run with the same settings; None: records are kept in memory alone.
        settings: everything that decides the records.
        prompts: all of them, as dataclasses or dicts with an "id".
        kind: class of the records.
    """
    stored = lines(prompts)
    digest = hashlib.sha256(stored.encode()).hexdigest()[:16]
    return Folder(folder, {**settings, "prompts": digest}, kind, also={PROMPTS: stored})


def read_folder(folder: str | os.PathLike[str], kind: type[R], command: str) -> Contents[R]:
    """What a folder holds so far, also while it is being written.

    Args:
        folder: what was given to --out.
        kind: class of its records.
        command: whose `run` wrote it, or, in two words, which; others than loopbench's say so in the setting "command".

    Raises:
        SinkscopeError: another command's folder, or none, or a file in it is damaged (with the line).
    """
    path, name = Path(folder), str(folder)
    settings = read_json(path / SETTINGS, name) if (path / SETTINGS).is_file() else None
    if settings is None or (isinstance(settings, dict) and settings.get("command", "loopbench") != command):
        raise SinkscopeError(f"{name} is no folder of `sinkscope {written_by(command)}`: give what its --out was given")
    model = settings.get("model") if isinstance(settings, dict) else None
    if not isinstance(model, dict) or set(model) != {field.name for field in fields(ModelInfo)}:
        raise SinkscopeError(f"{name}/{SETTINGS} is damaged: it names no model; run into another folder")
    prompts: dict[str, dict[str, Any]] = {}
    if (path / PROMPTS).is_file():
        for number, line in enumerate((path / PROMPTS).read_bytes().splitlines(), 1):
            try:
                prompt = parse_json(line)
                prompts[prompt["id"]] = prompt
            except (ValueError, KeyError, TypeError):
                raise SinkscopeError(f"{name}/{PROMPTS} line {number} is damaged: run into another folder") from None
    records = read_lines(path / RECORDS, name, kind)[0] if (path / RECORDS).is_file() else []
    order = {key: i for i, key in enumerate(prompts)}
    records.sort(key=lambda r: (r.model, r.method, order.get(r.prompt, len(order)), r.key))
    return Contents(pathless(name), settings, prompts, tuple(records))


def written_by(command: str) -> str:
    """The command that writes such folders."""
    return command if " " in command else f"{command} run"


def envelope(runs: Sequence[Contents[Any]], started: float, prompts: str) -> dict[str, Any]:
    """Model, settings and provenance of a table over some runs.

    Args:
        runs: what was read.
        started: `time.perf_counter()` when the work began.
        prompts: what the prompts are called.
    """
    settings = [run.settings for run in runs]
    models = {each["model"]["fingerprint"]: each["model"] for each in settings}
    if len(models) == 1:
        model = ModelInfo(**settings[0]["model"])
    else:
        names = ", ".join(dict.fromkeys(str(each["name"]) for each in models.values()))
        model = ModelInfo(names or "no model", "several", 0, 0, 0, " ".join(models))
    device, dtype, attention = (
        ", ".join(dict.fromkeys(str(each.get(key)) for each in settings)) or "none"
        for key in ("device", "dtype", "attention")
    )
    seed = int(settings[0].get("seed", 0)) if settings else 0
    return {
        "model": model,
        "settings": {"runs": [{"folder": run.name, **run.settings, prompts: len(run.prompts)} for run in runs]},
        "provenance": provenance(started=started, device=device, dtype=dtype, attention=attention, bos=None, seed=seed),
    }
