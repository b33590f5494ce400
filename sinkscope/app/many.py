"""`scan_many` scans several models, each in a process of its own and into a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

from sinkscope.app.card import SinkCard
from sinkscope.app.scan import scan
from sinkscope.app.scan_table import ScanTable, join_cards
from sinkscope.errors import SinkscopeError
from sinkscope.files.output import PathName, check_writable, path_of
from sinkscope.files.plain import pathless
from sinkscope.files.progress import silent
from sinkscope.files.records import Natural, Wording
from sinkscope.files.shard import shard_of
from sinkscope.files.store import SETTINGS
from sinkscope.measure import Hidden, Option
from sinkscope.results.options import checks_arguments, command, parameters_of

OWN = ("model", "out", "tokenizer", "progress", "written")
"""What `scan_many` gives to each scan itself, or cannot give to another process."""


@checks_arguments
def scan_many(
    models: Annotated[Sequence[PathName], Wording("names, folders or files; scan takes others")],
    out: PathName,
    *,
    workers: Natural = 1,
    shard: str | None = None,
    progress: Hidden = None,
    **settings: Any,
) -> ScanTable:
    """Scan several models, each into a folder of its own below `out`, and join their cards into one table.

    Each is scanned by `sinkscope scan` in a process of its own. A model that fails is a line of the table, and the
    others are scanned. Called again, it resumes: finished parts are not run again, and models that failed are tried
    once more.

    Args:
        models: Short names, hub ids, folders or .gguf files; "NAME@REVISION" names a revision on the hub. Folders are
            named after them.
        out: Folder for the folders of the scans.
        workers: How many of these processes run at a time; they share the cores.
        shard: "I/N": scan only the I-th of N shares of the models.
        progress: Called as `progress(what, done, total)`.
        settings: As for `scan`.

    Returns:
        The table of these models; those that failed have a problem.

    Raises:
        SinkscopeError: A setting or name is wrong.
    """
    options = _options(settings)
    folders = _folders_of(models)
    if (path_of(out) / SETTINGS).exists():
        raise SinkscopeError(f"{pathless(os.fspath(out))} is the folder of another run: give a folder for folders")
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // workers)), **os.environ}
    jobs: dict[str, Future[str]] = {}
    problems: dict[str, str] = {}
    names = shard_of(list(folders), shard)
    for name in names:
        folder = check_writable(Path(out) / name, folder=True)
        folder.mkdir(parents=True, exist_ok=True)  # the table then shows also a model that cannot be opened
    with ThreadPoolExecutor(workers) as pool:  # each thread waits for one process at a time
        for name in names:
            words = ["--out", str(Path(out) / name), *options, *folders[name]]
            jobs[name] = pool.submit(_problem_of, words, environment)
        try:
            for name, job in jobs.items():
                (progress or silent)("models", len(problems), len(jobs))
                problems[name] = job.result()
        finally:
            pool.shutdown(cancel_futures=True)  # after Ctrl-C no other is begun
    return join_cards(out, problems)


def _problem_of(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """Scan a model in a process of its own, and say why it has no card; "" if it has one."""
    command = [sys.executable, "-m", "sinkscope", "scan", *words]
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    said = done.stderr.strip().rpartition("\n")[2].removeprefix("error: ")
    if done.returncode < 0 or not said:
        return f"its process ended with status {done.returncode}: it was killed, perhaps for its memory"
    return said


def _options(settings: Mapping[str, Any]) -> list[str]:
    """Settings as options of the command."""
    known = {one.name: one for one in parameters_of(scan) if one.name not in OWN}
    words: list[str] = []
    for name, value in settings.items():
        if name not in known:
            raise SinkscopeError(f"scan_many has no setting {name}: it takes {', '.join(known)}")
        known[name].check(value, in_python=True)
        flag = known[name].flag
        if value is True:
            words.append(flag)
        elif value is False and known[name].default is None:
            words.append(f"--no-{flag[2:]}")
        elif value not in (None, False):
            words += [flag, str(value)]
    return words


def _folders_of(models: Sequence[PathName]) -> dict[str, list[str]]:
    """The words that name each model for the command, by the name of its folder, the last part of the model's.

    Raises:
        SinkscopeError: There is no model, or two have one name.
    """
    folders: dict[str, list[str]] = {}
    for path in models:
        model = os.fspath(path)
        name, revision = model, ""
        if not os.path.exists(model):  # a file or folder may have an @ in its name
            name, _, revision = model.partition("@")
        folder, words = os.path.basename(os.path.abspath(name)), ["--", name]
        if revision:
            folder, words = f"{folder}@{revision.replace('/', '-')}", ["--revision", revision, *words]
        if folder in folders:
            raise SinkscopeError(f"two models go to the folder {folder}: scan them into two folders, or rename one")
        folders[folder] = words
    if not folders:
        raise SinkscopeError("there is no model to scan: give at least one")
    return folders


@command(
    words="scan",
    group="Look",
    help="Run all measurements on a model and write its sink card.",
    options_of=scan,
)
def scan_models(
    model: Annotated[Sequence[str], Option(argument=True, metavar="MODEL...")] = (),
    *,
    workers: Natural = 1,
    shard: str | None = None,
    progress: Hidden = None,
    written: Hidden = None,
    **settings: Any,
) -> SinkCard | ScanTable:
    """Run all measurements on a model and write its sink card: one page and a JSON file.

    The model is opened once. A model whose weights do not fit is read layer by layer; parts that need it whole are then
    left out, and the card says so. Every part is saved as it finishes, and the same command resumes after the last one.

    Several models are scanned each in a process of its own and into a folder of its own below --out; a model that fails
    is a line of the table, and the status is then 1.

    Args:
        model: Short names, hub ids, folders or .gguf files; of several, NAME@REVISION. By default the bundled model.
        workers: Of several models, how many are scanned at a time.
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
    if len(model) <= 1 and shard is None:
        return scan(next(iter(model), None), progress=progress, written=written, **settings)
    out = settings.pop("out", None)
    if out is None:
        raise SinkscopeError("several models need a folder for their folders: give --out DIR")
    table = scan_many(model, out, workers=workers, shard=shard, progress=progress, **settings)
    if written is not None:
        written("Cards", out)
    return table
