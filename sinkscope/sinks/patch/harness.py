"""Benchmarks through EleutherAI's lm-evaluation-harness, with the model inside whatever context is entered."""

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

from sinkscope.errors import SinkscopeError
from sinkscope.interventions.base import Intervention
from sinkscope.measure import Setup
from sinkscope.sinks.patch.loss import under

_SEED = 1234  # of the examples before a question; the harness's own


class Tasks:
    """Tasks of the harness by name or file.

    Attributes:
        shots: examples before each question, by task, as it was run.

    Raises:
        SinkscopeError: lm-eval is not installed; a task is unknown (with the nearest names) or no such file.
    """

    def __init__(self, names: Sequence[str]) -> None:
        files = {name: _is_file(name) for name in names}
        self._manager = _index(_harness("lm_eval.tasks").TaskManager, not all(files.values()))
        for name, is_file in files.items():
            if not is_file and name not in self._manager.all_tasks:
                near = get_close_matches(name, self._manager.all_tasks, 3, 0.5)
                raise SinkscopeError(
                    f"task {name!r} is unknown to lm-evaluation-harness"
                    + (f"; the nearest are {', '.join(near)}" if near else "; `lm-eval ls tasks` lists them")
                )
        self._names = list(dict.fromkeys(names))
        self.shots: dict[str, int] = {}

    def run(
        self, made: Setup, edit: Intervention | None, shots: int | None, questions: int | None, batch_size: int
    ) -> dict[tuple[str, str], Float[Tensor, " sample"]]:
        """The value of every question by (task, metric); a group of tasks has all questions of its parts.

        Args:
            made: the model; questions begin with BOS where its sequences do.
            edit: entered around the questions.
            shots: examples before each; None: as the task says.
            questions: of each task; None: all.
            batch_size: questions that run together.

        Raises:
            SinkscopeError: the data of a task cannot be had.
        """
        evaluate = _harness("lm_eval.evaluator").evaluate
        model = _harness("lm_eval.models.huggingface").HFLM
        out: dict[tuple[str, str], Tensor] = {}
        target = made.target
        with _quiet(), under(edit, target):
            lm = model(  # it changes the tokenizer it is given
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
                except OSError as error:  # the data set: no network, no such file
                    raise SinkscopeError(
                        f"the data of task {name!r} cannot be had ({str(error).splitlines()[0][:200]}): connect to the "
                        "hub once, or give a task file whose data is here"
                    ) from error
                label = Path(name).stem if _is_file(name) else name
                for (metric, _), values in sorted(_by_metric(found["samples"]).items()):
                    out[label, metric] = torch.tensor(values, dtype=torch.float64)
                self.shots[label] = max(found.get("n-shot", {}).values(), default=0)
        return out


@cache
def _index(manager_class: Any, everything: bool) -> Any:
    """Reading the index of all tasks takes seconds: once, and not for files alone."""
    with _quiet():
        return manager_class(include_defaults=everything)


def _set_shots(tasks: Any, shots: int | None) -> None:
    """As the harness's own command does: a task that says zero shots keeps them."""
    for task in tasks:
        own = task.get_config("num_fewshot")
        if own is None or (shots is not None and own != 0):
            task.set_config(key="num_fewshot", value=shots or 0)
        task.set_fewshot_seed(seed=_SEED)


def _by_metric(samples: dict[str, list[dict[str, Any]]]) -> dict[tuple[str, str], list[float]]:
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
            "tasks are run by lm-eval, which is not installed: pip install 'sinkscope[eval]', or leave out --tasks"
        ) from None


def _quiet() -> Any:
    """The harness draws bars and writes notes on standard error; where that is no terminal, nothing is said."""
    return nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())
