"""Check files for repetition: each answer gets a verdict, and the table lists those that loop first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from sinkscope.app.loops.common import Variant, monitor_of, name_of, open_bytes
from sinkscope.errors import SinkscopeError
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.output import paths_below
from sinkscope.files.plain import in_one_line
from sinkscope.files.tables import suffix_of
from sinkscope.loops import LoopCheck, Watch
from sinkscope.loops.text.check import FailOn, check_of
from sinkscope.loops.text.copies import Cut
from sinkscope.loops.text.pieces import StreamForm
from sinkscope.results.console import note
from sinkscope.results.notation import count_of

ENDINGS = (".txt", ".md", ".log", ".json", ".jsonl", ".ndjson", ".sse", ".csv", ".tsv", ".parquet", ".pq")
"""Names of the files of a folder that are read."""
MOST_NAMED = 12
"""Files of a folder that were not read, and have a line each."""


@checks_arguments
def check_files(
    files: Sequence[str] = (),
    *,
    field: str | None = None,
    by: str | None = None,
    fail_on: FailOn = "loops",
    form: StreamForm = "auto",
    settings: str | None = None,
    variant: Variant = "repeats",
    cut: Cut = "auto",
    prompt: str = "",
) -> LoopCheck:
    """Check whether the answers in files repeat themselves, and since when.

    Args:
        files: Texts, tables (CSV, parquet), or JSON with the answers of a server, a log, a chat or a data set; also
            folders of these, and .gz. - is standard input.
        field: Where the answers of a line of JSON are, or the column of a table, such as response.choices or turns.1.
            By default under one of the names of servers, logs and data sets.
        by: Count loops by prompt, or by the value of any field, such as model or request.temperature.
        fail_on: From which verdict on the exit status is 3; "suspicious" counts repetitions that may be honest as well.
        form: What the input is. By default .json, .jsonl and .ndjson are JSON, .csv, .tsv and .parquet are tables, what
            a server streamed is read as such, also behind its headers and keep-alive lines, and any other file is one
            text.
        settings: Settings of the monitor, a JSON object such as {"window": 128}.
        variant: Which monitor decides. "repeats" finds exact repetitions of anything, "full" is the paper's.
        cut: Which repetitions are loops, and end an answer under --proxy; the others are only reported. "auto": equal
            copies, and in prose also copies whose numbers change. "exact": equal copies. "all": also those of code,
            markup and logs whose numbers change. "none": no repetition.
        prompt: What was asked; copies that it asks for, such as "ten lines", are no loop. By default what the record
            of an answer says; the proxy reads requests.

    Raises:
        SinkscopeError: Nothing can be read.
    """
    watch = Watch(monitor_of(settings, variant, cut), prompt)
    if not files:
        raise SinkscopeError("give the file to check, or - for standard input")
    started, every, missing = time.perf_counter(), files_by_name(files), list[str]()
    for name, file in every.items():
        label, skipped = f"{name} " if len(every) > 1 else "", watch.skipped
        try:
            with closing(open_bytes(file)) as source:
                for _ in watch.read(source, form=form, name=name, field=field, label=label, by=by):
                    pass
        except SinkscopeError as error:
            if len(every) == 1:
                raise
            if not (file == "-" or Path(file).is_file()):
                missing.append(file)
                note(f"error: {error}")
            if watch.skipped == skipped:  # else its lines are counted
                watch.skip(str(error))
    if not watch.checked:
        raise SinkscopeError(f"nothing could be read: {watch.problems[0]}")
    name = next(iter(every)) if len(every) == 1 else count_of(len(every), "file")
    return replace(check_of(watch, name, started, fail_on), missing=tuple(missing), by=by or "")


def files_by_name(files: Sequence[str]) -> dict[str, str]:
    """Return the files by their names, with those in folders whose endings are known; a note names each other file.

    Raises:
        SinkscopeError: A folder holds none.
    """
    inputs: dict[str, str] = {}
    for file in files:
        folder, count = Path(file), len(inputs)
        if not file or not folder.is_dir():
            name = name_of(file)
            inputs[file if name in inputs else name] = file
            continue
        others: list[str] = []
        for path in paths_below(folder):
            if not path.is_file():
                continue
            name = in_one_line(str(path.relative_to(folder)))
            if suffix_of(path.name) in ENDINGS:
                inputs[str(path) if name in inputs else name] = str(path)
            else:
                others.append(name)
        if len(inputs) == count:
            raise SinkscopeError(f"{file} holds no file that ends in {', '.join(ENDINGS)}, also .gz: name the files")
        for name in others[:MOST_NAMED]:
            note(f"note: {name} was not read: its name does not end as texts, logs and tables do; give it by name")
        if len(others) > MOST_NAMED:
            note(f"note: {len(others) - MOST_NAMED} more files were not read")
    return inputs
