"""Benchmarks with and without a patch, run by EleutherAI's lm-evaluation-harness (`pip install -e ".[eval]"`).

Two runs of one model answer most questions alike, so differences are compared question by question.
"""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from experiments.record import Row
from sinkscope.errors import SinkscopeError
from sinkscope.hooks.edit import Intervention, SinkPatch
from sinkscope.measure import Setup
from sinkscope.sinks.patch.evaluate import errors_of, random_patch, under

SHOTS_SEED = 1234  # seed of the examples before a question; the harness's default


def evaluate_tasks(
    setup: Setup,
    patch: SinkPatch,
    names: Sequence[str],
    *,
    shots: int | None = None,
    questions: int | None = None,
    batch_size: int = 8,
) -> list[Row]:
    """A row for each task and metric: without a patch, with it, and with a patch of as many random neurons.

    Args:
        setup: The whole model.
        patch: The patch.
        names: Names of tasks (mmlu, hellaswag, truthfulqa_mc1, ...) or paths of task files (.yaml).
        shots: Examples before each question. None: as each task says.
        questions: Number of questions of each task, from its beginning. None: all.
        batch_size: Questions per pass.
    """
    harness = Tasks(names)
    edits = (None, patch, random_patch(setup, patch))
    answers = []
    for edit in edits:
        answers.append(harness.run(setup, edit, shots, questions, batch_size))
    rows: list[Row] = []
    for task, metric in answers[0]:
        samples = torch.stack([one[task, metric] for one in answers])
        original, patched, random = samples.mean(1).tolist()
        error, random_error = errors_of(samples).tolist()
        rows.append(
            {
                "task": task,
                "metric": metric,
                "samples": samples.shape[1],
                "original": original,
                "patched": patched,
                "random": random,
                "difference": patched - original,
                "difference_se": error,
                "random_difference": random - original,
                "random_se": random_error,
            }
        )
    return rows


class Tasks:
    """Tasks of the harness by name or file.

    Raises:
        SinkscopeError: lm-eval is not installed, a task is unknown (the message names the nearest), or a file is
            missing.
    """

    def __init__(self, names: Sequence[str]) -> None:
        files = {}
        for each in names:
            files[each] = _is_file(each)
        self._manager = _index(_harness("lm_eval.tasks").TaskManager, not all(files.values()))
        for name, is_file in files.items():
            if not is_file and name not in self._manager.all_tasks:
                near = get_close_matches(name, self._manager.all_tasks, 3, 0.5)
                raise SinkscopeError(
                    f"task {name!r} is unknown to lm-evaluation-harness"
                    + (f"; the nearest are {', '.join(near)}" if near else "; `lm-eval ls tasks` lists them")
                )
        self._names = list(dict.fromkeys(names))

    def run(
        self, made: Setup, edit: Intervention | None, shots: int | None, questions: int | None, batch_size: int
    ) -> dict[tuple[str, str], Float[Tensor, " sample"]]:
        """The value of every question by (task, metric). A group of tasks has all questions of its parts.

        Args:
            made: The model. Questions begin with BOS if its sequences do.
            edit: The edit, entered around the questions.
            shots: Examples before each question. None: as the task says.
            questions: Number of questions of each task. None: all.
            batch_size: Questions per pass.

        Raises:
            SinkscopeError: The data of a task are not available.
        """
        evaluate = _harness("lm_eval.evaluator").evaluate
        model = _harness("lm_eval.models.huggingface").HFLM
        out: dict[tuple[str, str], Tensor] = {}
        target = made.target
        with _quiet(), under(edit, target):
            lm = model(  # the harness changes the tokenizer it is given
                pretrained=target.hf,
                tokenizer=copy.deepcopy(target.tokenizer),
                batch_size=batch_size,
                add_bos_token=made.bos is not None,
                max_length=target.max_positions,
            )
            for name in self._names:
                try:
                    loaded = self._manager.load([name])
                    _set_shots(loaded["tasks"].values(), shots)
                    found = evaluate(lm, loaded, limit=questions, log_samples=True, bootstrap_iters=0)
                except OSError as error:  # the data set is missing: no network, or no such file
                    raise SinkscopeError(
                        f"the data of task {name!r} cannot be had ({str(error).splitlines()[0][:200]}): connect to the "
                        "hub once, or give a task file whose data is here"
                    ) from error
                label = name
                if _is_file(name):
                    label = Path(name).stem
                for (metric, _), values in sorted(_by_metric(found["samples"]).items()):
                    out[label, metric] = torch.tensor(values, dtype=torch.float64)
        return out


@cache
def _index(manager_class: Any, everything: bool) -> Any:
    """The index of all tasks. Reading it takes seconds, so it is read once, and not for files alone."""
    with _quiet():
        return manager_class(include_defaults=everything)


def _set_shots(tasks: Any, shots: int | None) -> None:
    """Set the shots as the harness's own command does: a task that specifies zero shots keeps them."""
    for task in tasks:
        own = task.get_config("num_fewshot")
        if own is None or (shots is not None and own != 0):
            task.set_config(key="num_fewshot", value=shots or 0)
        task.set_fewshot_seed(seed=SHOTS_SEED)


def _by_metric(samples: dict[str, list[Row]]) -> dict[tuple[str, str], list[float]]:
    """Values of all questions by (metric, filter), in a fixed order, so that runs can be paired."""
    values: dict[tuple[str, str], list[float]] = {}
    for _, entries in sorted(samples.items()):
        for entry in sorted(entries, key=lambda e: e["doc_id"]):
            for metric in entry["metrics"]:
                if isinstance(entry[metric], bool | int | float):
                    values.setdefault((metric, entry["filter"]), []).append(float(entry[metric]))
    return values


def _is_file(name: str) -> bool:
    if Path(name).suffix not in (".yaml", ".yml"):
        return False
    if not Path(name).is_file():
        raise SinkscopeError(f"task file {name!r} is not there: give the path of a .yaml file, or the name of a task")
    return True


def _harness(module: str) -> Any:
    try:
        with _quiet():
            return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "lm_eval":
            raise
        raise SinkscopeError(
            "tasks are run by lm-eval, which is not installed: pip install -e '.[eval]' in the clone, or leave out "
            "--tasks"
        ) from None


def _quiet() -> Any:
    """Silence the progress bars and notes that the harness writes on standard error if that is not a terminal."""
    if sys.stderr.isatty():
        return nullcontext()
    return redirect_stderr(io.StringIO())
