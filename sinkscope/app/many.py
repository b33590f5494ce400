"""`scan_many` scans several models, each into a folder of its own, on any executor."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from sinkscope.app.card import SinkCard, read_card
from sinkscope.app.processes import Processes
from sinkscope.app.scan import scan
from sinkscope.app.scan_table import ScanTable, join_cards
from sinkscope.errors import SinkscopeError, is_full_disk
from sinkscope.files.output import PathName, check_writable, path_of
from sinkscope.files.plain import pathless, visible
from sinkscope.files.progress import Progress, silent
from sinkscope.files.records import Natural, Wording
from sinkscope.files.shard import shard_of
from sinkscope.files.store import SETTINGS
from sinkscope.measure import Hidden, Option
from sinkscope.models.text import typical_text
from sinkscope.results.options import checks_arguments, command, parameters_of

OWN = ("model", "out", "tokenizer", "progress", "written")
"""What `scan_many` gives to each scan itself, or cannot give to another process."""
_TURN = threading.Lock()
"""Scans change what belongs to a whole process, such as its random numbers: threads of one process take turns."""


@dataclass(frozen=True)
class Outcome:
    """What became of one model.

    Attributes:
        problem: Why it has no card; empty if it has one.
        disk_is_full: Whether the reason is that there was no room for the card.
    """

    problem: str = ""
    disk_is_full: bool = False


def scan_one(model: str, folder: str, settings: Mapping[str, Any]) -> Outcome:
    """Scan a model, in a worker; what goes wrong with it is part of the answer.

    Args:
        model: Name, folder or file, perhaps with "@" and a revision.
        folder: Where the scan goes.
        settings: As for `scan`.
    """
    options = dict(settings)
    name, revision = _name_and_revision(model)
    if revision:
        options["revision"] = revision
    try:
        with _TURN:
            scan(name, out=folder, **options)
    except Exception as error:
        problem = str(error)
        if not isinstance(error, SinkscopeError):
            problem = f"{type(error).__name__}: {pathless(problem)}".partition("\n")[0]
        return Outcome(visible(problem), is_full_disk(error))
    return Outcome()


@checks_arguments
def scan_many(
    models: Annotated[Sequence[PathName], Wording("names, folders or files; scan takes others")],
    out: PathName,
    executor: Any = None,
    *,
    workers: Natural | None = None,
    shard: str | None = None,
    progress: Hidden = None,
    **settings: Any,
) -> ScanTable:
    """Scan several models, each into a folder of its own below `out`, and join their cards into one table.

    A model that fails is a line of the table, and the others are scanned. Called again, it resumes: finished parts are
    not run again, and models that failed are tried once more.

    Args:
        models: Short names, hub ids, folders or .gguf files; "NAME@REVISION" names a revision on the hub. Folders are
            named after them.
        out: Folder for the folders of the scans.
        executor: Any object with `submit(function, *arguments)` whose results have `result()`; its workers need this
            package and the same files. By default, processes of this machine, a new one for each model, each with one
            thread of torch; if one is killed, it is started once more.
        workers: How many of these processes run at a time. By default one per core, and one on a GPU.
        shard: "I/N": scan only the I-th of N shares of the models.
        progress: Called as `progress(what, done, total)`.
        settings: As for `scan`.

    Returns:
        The table of these models; those that failed have a problem.

    Raises:
        SinkscopeError: A setting or name is wrong, the disk is full, or the workers do not have this package.
    """
    _check_settings(settings)
    folders = _folders_of(models)
    chosen = {name: folders[name] for name in shard_of(list(folders), shard)}
    if (path_of(out) / SETTINGS).exists():
        raise SinkscopeError(f"{pathless(os.fspath(out))} is the folder of another run: give a folder for folders")
    pool = nullcontext(executor)
    if executor is None:
        pool = Processes(_workers(workers, settings))
    with pool as running:
        problems = _scan_each(chosen, Path(out), running, settings, progress or silent)
    return join_cards(out, problems)


def _scan_each(
    models: Mapping[str, str], out: Path, executor: Any, settings: Mapping[str, Any], progress: Progress
) -> dict[str, str]:
    """Scan the models, and say of each folder why it has no card if it has none."""
    jobs: dict[str, Any] = {}
    for name, model in models.items():
        folder = check_writable(out / name, folder=True)
        folder.mkdir(parents=True, exist_ok=True)  # the table then shows also a model that cannot be opened
        jobs[name] = executor.submit(scan_one, model, str(out / name), settings)
    problems: dict[str, str] = {}
    for number, (name, job) in enumerate(jobs.items()):
        progress("models", number, len(jobs))
        outcome = _outcome_of(job)
        problems[name] = outcome.problem
        if outcome.disk_is_full:
            raise SinkscopeError(f"{outcome.problem}; finished parts are kept: make room and run the same again")
    return problems


def _outcome_of(job: Any) -> Outcome:
    """What a job answers; a worker that cannot answer has failed with its model alone.

    Raises:
        SinkscopeError: The workers do not have this package.
    """
    try:
        return job.result()
    except Exception as error:
        said = visible(pathless(str(error).strip().rpartition("\n")[2]))
        if "No module named 'sinkscope" in str(error):
            raise SinkscopeError(
                f"a worker cannot import this package ({said:.200}): install sinkscope where the executor works"
            ) from None
        return Outcome(f"its worker failed ({type(error).__name__}: {said:.300})")


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse, before any work, what every scan would refuse."""
    known = {one.name: one for one in parameters_of(scan) if one.name not in OWN}
    for name, value in settings.items():
        if name not in known:
            raise SinkscopeError(f"scan_many has no setting {name}: it takes {', '.join(known)}")
        known[name].check(value, in_python=True)
    typical_text(settings.get("text"))
    if settings.get("against") is not None:
        read_card(settings["against"])


def _name_and_revision(model: str) -> tuple[str, str]:
    """The name of a model and its revision; a file or folder may have an @ in its name."""
    name, at, revision = model.partition("@")
    if not at or os.path.exists(model):
        return model, ""
    return name, revision


def _folders_of(models: Sequence[PathName]) -> dict[str, str]:
    """The models by the names of their folders, which are the last parts of theirs.

    Raises:
        SinkscopeError: There is no model, or two have one name.
    """
    folders: dict[str, str] = {}
    for model in models:
        name, revision = _name_and_revision(os.fspath(model))
        folder = os.path.basename(os.path.abspath(name))
        if revision:
            folder += "@" + revision.replace("/", "-")
        if folder in folders:
            raise SinkscopeError(f"two models go to the folder {folder}: scan them into two folders, or rename one")
        folders[folder] = os.fspath(model)
    if not folders:
        raise SinkscopeError("there is no model to scan: give at least one")
    return folders


def _workers(number: int | None, settings: Mapping[str, Any]) -> int:
    """How many models are scanned at a time: by default one per core, and one where models run on a GPU."""
    import torch

    on_cpu = not torch.cuda.is_available()
    if settings.get("device") is not None:
        on_cpu = str(settings["device"]) == "cpu"
    if on_cpu:
        number = number or os.cpu_count()
    return number or 1


@command(
    words="scan",
    group="Look",
    help="Run all measurements on a model and write its sink card.",
    options_of=scan,
)
def scan_models(
    model: Annotated[Sequence[str], Option(argument=True, metavar="MODEL...")] = (),
    *,
    workers: Natural | None = None,
    shard: str | None = None,
    progress: Hidden = None,
    written: Hidden = None,
    **settings: Any,
) -> SinkCard | ScanTable:
    """Run all measurements on a model and write its sink card: one page and a JSON file.

    The model is opened once. A model whose weights do not fit is read layer by layer; parts that need it whole are then
    left out, and the card says so. Every part is saved as it finishes, and the same command resumes after the last one.

    Several models are scanned side by side, each into a folder of its own below --out; a model that fails is a line of
    the table, and the status is then 1.

    Args:
        model: Short names, hub ids, folders or .gguf files; of several, NAME@REVISION. By default the bundled model.
        workers: Of several models, how many are scanned at a time. By default one per core, and one on a GPU.
        shard: I/N: scan only the I-th of N shares of the models.
        progress: Called as `progress(what, done, total)`.
        written: Called as `written("Card", path)` when the page is there.

    Example:
        sinkscope scan llama-2-7b --out llama
        sinkscope scan ./fine-tuned --against llama/card.json
        sinkscope scan gpt2 pythia-160m opt-125m --quick --out small

    Raises:
        SinkscopeError: As for `scan` and `scan_many`.
    """
    if len(model) <= 1 and workers is None and shard is None:
        return scan(next(iter(model), None), progress=progress, written=written, **settings)
    out = settings.pop("out", None)
    if out is None:
        raise SinkscopeError("several models need a folder for their folders: give --out DIR")
    table = scan_many(model, out, workers=workers, shard=shard, progress=progress, **settings)
    if written is not None:
        written("Cards", out)
    return table
