"""Results in the layout of kvpress's own evaluation, written and read.

A folder for each set and method, `dataset__data_dir__model__press__compression_ratio`, holds `predictions.csv`,
`metrics.json` and `config.yaml` (github.com/NVIDIA/kvpress, evaluation/evaluate.py). Of a row's answers, kvpress writes
what numpy prints: `['a' 'b']`.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from sinkscope.bench.methods import FULL, compression_ratio, without_budget
from sinkscope.bench.record import BenchRecord, BenchRun, Metrics
from sinkscope.bench.scores import PERCENT, score
from sinkscope.bench.task import task_class
from sinkscope.errors import SinkscopeError
from sinkscope.files.output import read_text, write_atomic
from sinkscope.files.plain import pathless
from sinkscope.files.records import check, read_rows
from sinkscope.measure.rate import mean_known

NO_PRESS = "no_press"
_PREDICTIONS, _METRICS, _CONFIG = "predictions.csv", "metrics.json", "config.yaml"
_ANSWER = re.compile(r"'([^']*)'|\"([^\"]*)\"")
_EXPECTED = "the results of kvpress's evaluation of RULER, or of `sinkscope bench table --kvpress`"


@dataclass(frozen=True)
class _Config:
    """Fields of config.yaml that are read."""

    dataset: str
    data_dir: str | int | None
    model: str
    press_name: str
    compression_ratio: float


def is_kvpress(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds results of kvpress, or is one of its folders."""
    with suppress(OSError):  # who reads it as a run says what is wrong
        return any(Path(folder).rglob(_CONFIG))
    return False


def read_kvpress(folder: str | os.PathLike[str]) -> list[BenchRun]:
    """The runs in a folder of kvpress's results; costs, which kvpress does not write, are unknown.

    Raises:
        SinkscopeError: A file is missing or damaged, or the answers have no score that is known here: those of RULER
            are scored as kvpress does, and a column of scores is taken as it is.
    """
    return [_read(config.parent) for config in sorted(Path(folder).rglob(_CONFIG))]


def _read(folder: Path) -> BenchRun:
    name = pathless(str(folder))
    try:
        config = check(yaml.safe_load(read_text(folder / _CONFIG, f"give {_EXPECTED}")), _Config, name, _EXPECTED)
        rows = pd.read_csv(folder / _PREDICTIONS, dtype=str, keep_default_na=False).to_dict("records")
    except (OSError, ValueError, yaml.YAMLError) as error:
        if isinstance(error, SinkscopeError):
            raise
        raise SinkscopeError(f"{name} cannot be read: {error}; give {_EXPECTED}") from None
    method = FULL
    if config.press_name != NO_PRESS:
        method = f"{config.press_name}:{round(1 - config.compression_ratio, 4)}"
    records: list[BenchRecord] = []
    for number, row in enumerate(rows):
        metrics = _score(name, config.dataset, row)
        metrics |= {"seconds": None, "compression_ratio": config.compression_ratio}
        records.append(
            BenchRecord(
                model=config.model,
                task=config.dataset,
                method=method,
                prompt=str(row.get("prompt", number)),
                turn=0,
                seed=0,
                settings={"set": str(config.data_dir or ""), "part": row.get("task", ""), "temperature": 0.0},
                metrics=metrics,
                tokens=(),
                text=row.get("predicted_answer", ""),
                ended="cap",
            )
        )
    model = {"name": pathless(config.model), "family": "", "n_layers": 0, "d_model": 0, "d_mlp": 0, "fingerprint": ""}
    return BenchRun(records, {"model": model, "device": "", "dtype": "", "attention": "", "kvpress": name})


def _score(name: str, dataset: str, row: dict[str, str]) -> Metrics:
    """The score of a row, by its name: as it is written, or of RULER as kvpress computes it."""
    main = task_class(dataset).main
    written = row.get(main)
    if written is None and dataset == "ruler" and "answer" in row:
        answers = ["".join(match) for match in _ANSWER.findall(row["answer"])]
        metric = "contains" if row.get("task", "").startswith("qa_") else "share"
        return {main: score(metric, row["predicted_answer"], answers)}
    if written == "":
        return {main: None}
    try:
        return {main: float(written or "none")}
    except ValueError:
        raise SinkscopeError(f"{name}: answers of {dataset} have no score in a row: give {_EXPECTED}") from None


def write_kvpress(home: Path, run: BenchRun, folder: str | os.PathLike[str]) -> None:
    """Write a folder for each set and method of a run.

    Args:
        home: Where these folders go.
        run: The run.
        folder: Its folder, which holds the prompts and their answers.

    Raises:
        SinkscopeError: One of the folders is there already, or cannot be written.
    """
    prompts: dict[str, Any] = {}
    for _, prompt in read_rows(Path(folder) / "prompts.jsonl", "the folder of a run"):
        prompts[prompt["id"]] = prompt["turns"]
    grouped: dict[tuple[str, str, str], list[BenchRecord]] = {}
    for record in run:
        grouped.setdefault((record.task, record.settings["set"], record.method), []).append(record)
    model = run.settings["model"]["name"]
    for (task, of_set, method), records in grouped.items():
        main = task_class(task).main
        ratios = [compression_ratio(method, record.metrics.get("prompt_tokens")) for record in records]
        ratio = mean_known(ratios) or 0.0
        press = NO_PRESS if method == FULL else without_budget(method)[0].replace(":", "-")
        config = {"dataset": task, "data_dir": of_set, "model": model, "press_name": press, "compression_ratio": ratio}
        config |= {"fraction": 1.0, "max_new_tokens": run.settings.get("max_new_tokens"), "seed": records[0].seed}
        parts = [task, of_set, model.replace("/", "--"), press, f"{ratio:.2f}"]
        place = home / re.sub(r"[^\w.-]", "-", "__".join(parts))
        if place.exists():
            raise SinkscopeError(f"{place.name} is there already: give another folder to --kvpress")
        rows: list[dict[str, Any]] = []
        for record in records:
            question = prompts[record.prompt][record.turn]
            rows.append(
                {
                    "prompt": record.prompt,
                    "task": record.settings.get("part") or of_set,
                    "question": question["text"],
                    "answer": list(question["answers"]),
                    "predicted_answer": record.text,
                    "compression_ratio": ratio,
                    main: record.metrics.get(main),
                }
            )
        factor = 100 if main in PERCENT else 1
        frame: Any = pd.DataFrame(rows)
        means = frame[main].astype(float).groupby(frame["task"], sort=False).mean().fillna(0.0)
        metrics = {part: {main: factor * value} for part, value in means.items()}
        write_atomic(place / _PREDICTIONS, frame.to_csv(index=False))
        write_atomic(place / _METRICS, json.dumps(metrics, indent=4))
        write_atomic(place / _CONFIG, yaml.safe_dump(config, sort_keys=False))
