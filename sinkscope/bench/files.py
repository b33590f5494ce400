"""Files of benchmarks: source files, prompt sets with their manifests, and the folders of runs.

The folder of a run holds its settings, its prompts, and one line for each finished prompt.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, TypeVar

from pydantic import Field

from sinkscope.errors import SinkscopeError
from sinkscope.files.console import note
from sinkscope.files.output import check_writable, write_atomic
from sinkscope.files.plain import parse_json, pathless
from sinkscope.files.records import check, json_line, refuse_twins
from sinkscope.files.result import ModelInfo, provenance
from sinkscope.files.store import RECORDS, SETTINGS, Folder, Keyed, lines, read_json, read_lines

T = TypeVar("T")
HUB = "hub"


class FoundFile(NamedTuple):
    """A benchmark's file.

    Attributes:
        path: Path of the file.
        name: Base name, or `repo/file`.
        commit: Commit on the hub; None for a local file.
    """

    path: Path
    name: str
    commit: str | None = None


@dataclass(frozen=True)
class BuiltSet(Generic[T]):
    """A set of prompts or dialogues, and how it was built.

    Attributes:
        made: The prompts or dialogues, in order.
        manifest: Settings, source with its sha256, and the resulting numbers with the paper's; contains no paths.
        rows: The same information for display: name and value.
    """

    made: tuple[T, ...]
    manifest: dict[str, Any]
    rows: tuple[tuple[str, str], ...]

    def text(self) -> str:
        """A summary in a few lines."""
        return "\n".join(f"{name:<16} {value}" for name, value in self.rows)

    def deliver(self, line: Callable[[T], str], out: str, *, force: bool) -> None:
        """Write the set and its manifest, and print a summary; `line` produces one line of the file.

        Raises:
            SinkscopeError: As for `write_set`.
        """
        written = write_set([line(one) for one in self.made], self.manifest, out, force=force)
        print(self.text())
        note("wrote " + " and ".join(path.name for path in written))


def find_file(
    source: str | os.PathLike[str], names: Sequence[str], expected: str, *, repo: str, file: str, revision: str | None
) -> FoundFile:
    """Find the file of a benchmark.

    Args:
        source: The file, a folder that contains it (or has it in its subfolder `data`), or "hub".
        names: Possible names of the file in a folder; the first one that exists is used.
        expected: What to provide, for error messages.
        repo: Dataset on the hub.
        file: File in that dataset.
        revision: Branch, tag or commit of the dataset.

    Raises:
        SinkscopeError: There is no such file.
    """
    if os.fspath(source) == HUB:
        from sinkscope.models.hub import hub_file

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
    """Path of a set's manifest: dc.jsonl has dc.manifest.json."""
    path = Path(made)
    return path.with_name(f"{path.stem if path.suffix == '.jsonl' else path.name}.manifest.json")


def check_out(out: str | os.PathLike[str], *, force: bool = False) -> None:
    """Raise before the work begins whatever `write_set` would raise at the end.

    Raises:
        SinkscopeError: As for `write_set`.
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
    """Write a set as JSON lines with its manifest next to it. Each file is written completely or not at all.

    Returns:
        Paths of the set and of the manifest.

    Raises:
        SinkscopeError: One of the files exists and `force` is not given, or a file cannot be written.
    """
    check_out(out, force=force)
    content = "".join(line + "\n" for line in lines).encode()
    manifest = {**manifest, "prompts_sha256": hashlib.sha256(content).hexdigest()}
    path = write_atomic(out, content)
    return path, write_atomic(manifest_path(out), json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")


PROMPTS = "prompts.jsonl"


@dataclass(frozen=True)
class Finished(Keyed):
    """The fields at the beginning of every line of a run.

    Attributes:
        model: Fingerprint of the model.
        method: Name of the method.
        prompt: Id of the prompt.
    """

    identity: ClassVar[tuple[str, ...]] = ("model", "method", "prompt")

    model: str
    method: str
    prompt: str


R = TypeVar("R", bound=Finished)


@dataclass(frozen=True)
class Contents(Generic[R]):
    """Contents of a folder: settings, prompts by id, and records in the order of methods and prompts."""

    name: str
    settings: dict[str, Any]
    prompts: dict[str, dict[str, Any]]
    records: tuple[R, ...]


def open_folder(
    folder: str | os.PathLike[str] | None, settings: Mapping[str, Any], prompts: Iterable[Any], kind: type[R]
) -> Folder[R]:
    """Open the folder of a run for writing; use it in a `with`.

    Args:
        folder: A new or empty folder, or one of an earlier run with the same settings. None keeps records in memory
            only.
        settings: Everything that determines the records.
        prompts: All prompts, as dataclasses or dicts with an "id".
        kind: Class of the records.
    """
    stored = lines(prompts)
    digest = hashlib.sha256(stored.encode()).hexdigest()[:16]
    return Folder(folder, {**settings, "prompts": digest}, kind, also={PROMPTS: stored})


def read_folder(folder: str | os.PathLike[str], kind: type[R], command: str) -> Contents[R]:
    """Read the current contents of a folder, even while it is being written.

    Args:
        folder: The folder that was given to --out.
        kind: Class of its records.
        command: Command whose `run` wrote it, or its two-word name; all but loopbench store it in the setting
            "command".

    Raises:
        SinkscopeError: The folder is missing or belongs to another command, or a file in it is damaged (names the
            line).
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
    """The command that writes this kind of folder."""
    return command if " " in command else f"{command} run"


def envelope(runs: Sequence[Contents[Any]], started: float, prompts: str) -> dict[str, Any]:
    """Model, settings and provenance of a table over several runs.

    Args:
        runs: The runs that were read.
        started: Value of `time.perf_counter()` when the work began.
        prompts: Name for the prompts.
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


LONGBENCH, ARCHIVE = "zai-org/LongBench", "data.zip"


@dataclass(frozen=True)
class LongBenchRecord:
    """A LongBench record under our own field names.

    Attributes:
        id: `_id`.
        context: The text.
        question: `input`; empty if the task needs none.
        answers: The correct answers.
        dataset: The task.
        length: Length in words, by LongBench's count.
        classes: `all_classes`, for classification.
    """

    id: Annotated[str, Field(validation_alias="_id")]
    context: str
    question: Annotated[str, Field(validation_alias="input")]
    answers: tuple[str, ...]
    dataset: str
    length: float
    classes: Annotated[tuple[str, ...] | None, Field(validation_alias="all_classes")]


@dataclass(frozen=True)
class LongBenchSource:
    """The records of one task, and their source.

    Attributes:
        name: Base name of the file, or `repo/file`.
        records: The records in the order of the file.
        sha256: Hash of the JSON lines themselves, independent of how they were packed.
        commit: Commit on the hub; None for a local file.
    """

    name: str
    records: tuple[LongBenchRecord, ...]
    sha256: str
    commit: str | None = None


def read_longbench(
    task: str,
    source: str | os.PathLike[str],
    *,
    repo: str = LONGBENCH,
    file: str = ARCHIVE,
    revision: str | None = None,
) -> LongBenchSource:
    """Read the records of one task.

    Args:
        task: "multi_news", "narrativeqa" or "2wikimqa". The same task of LongBench-E ("multi_news_e") is also accepted.
        source: A `.jsonl` file, a folder that contains one, LongBench's `data.zip`, or "hub".
        repo: Dataset on the hub, for "hub".
        file: Archive or `.jsonl` file in the dataset, for "hub".
        revision: Branch, tag or commit of the dataset, for "hub".

    Raises:
        SinkscopeError: No file was found, or the file is of another kind or damaged (names the line).
    """
    own = f"{task}.jsonl"
    place = f"LongBench's {own} or {ARCHIVE}, the folder of either, or {HUB}"
    found = find_file(source, (own, ARCHIVE), place, repo=repo, file=file, revision=revision)
    expected = f"LongBench's {own}, or download it again"
    try:
        content, shown = _content(found.path, own)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
        reason = (getattr(error, "strerror", None) or str(error) or "it ends too early").lower()
        raise SinkscopeError(f"{found.name} cannot be read ({reason}): download it again") from None
    lines = [(f"{shown} line {i}", line) for i, line in enumerate(content.split(b"\n"), 1) if line.strip()]
    records = [(where, _record(task, line, where, expected)) for where, line in lines]
    if not records:
        raise SinkscopeError(f"{found.name} has no records of {task} in it: download it again")
    refuse_twins([(where, record.id) for where, record in records], "_id", expected)
    digest = hashlib.sha256(content).hexdigest()
    return LongBenchSource(found.name, tuple(record for _, record in records), digest, found.commit)


def _content(path: Path, own: str) -> tuple[bytes, str]:
    """The JSON lines, and what to call them in a message."""
    if path.suffix == ".parquet":
        raise SinkscopeError(
            f"{path.name} is a parquet file: give LongBench's {ARCHIVE} or {own}, or convert it with "
            f"pandas.read_parquet(...).to_json('{own}', orient='records', lines=True)"
        )
    if path.suffix != ".zip" and not zipfile.is_zipfile(path):
        return path.read_bytes(), path.name
    with zipfile.ZipFile(path) as archive:
        member = next((name for name in archive.namelist() if name.rpartition("/")[2] == own), None)
        if member is None:
            raise SinkscopeError(f"{path.name} has no {own} in it: give LongBench's {ARCHIVE}")
        return archive.read(member), f"{member} in {path.name}"


def _record(task: str, line: bytes, where: str, expected: str) -> LongBenchRecord:
    found = check(json_line(line, f"{where} is not JSON", expected), LongBenchRecord, where, expected)
    if found.dataset.removesuffix("_e") != task:
        raise SinkscopeError(f"{where} is of {found.dataset!r}, expected {task}: give {expected}")
    if not found.context.strip():
        raise SinkscopeError(f"{where}: the context is empty: give {expected}")
    if task == "2wikimqa" and not (found.answers and found.question.strip()):
        raise SinkscopeError(f"{where} has no question or no answer: give {expected}")
    return found
