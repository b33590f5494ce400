"""The folder of a run: its settings, its prompts, and a line for each finished prompt."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from sinkscope._plain import pathless
from sinkscope.errors import SinkscopeError
from sinkscope.results import ModelInfo, provenance
from sinkscope.store import RECORDS, SETTINGS, Folder, Keyed, lines, read_json, read_lines

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
    folder: str | os.PathLike[str], settings: Mapping[str, Any], prompts: Iterable[Any], kind: type[R]
) -> Folder[R]:
    """A run's folder, to be written; use it in a `with`.

    Args:
        folder: new, empty, or of an earlier run with the same settings.
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
                prompt = json.loads(line)
                prompts[prompt["id"]] = prompt
            except (ValueError, KeyError, TypeError):
                raise SinkscopeError(f"{name}/{PROMPTS} line {number} is damaged: run into another folder") from None
    records = read_lines(path / RECORDS, name, kind)[0] if (path / RECORDS).is_file() else []
    order = {key: i for i, key in enumerate(prompts)}
    records.sort(key=lambda r: (r.model, r.method, order.get(r.prompt, len(order)), r.prompt))
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
