"""Benchmarks with and without a patch, run by EleutherAI's lm-evaluation-harness (`pip install -e ".[eval]"`).

Two runs of one model answer most questions alike, so differences are compared question by question.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from experiments.record import Row
from sinkscope.errors import SinkscopeError
from sinkscope.hooks.edit import Intervention, SinkPatch
from sinkscope.hooks.edit.base import under
from sinkscope.measure import Setup
from sinkscope.measure.margin import margin_of
from sinkscope.sinks.patch.patches import random_patch

SHOTS_SEED = 1234  # seed of the examples before a question; the harness's default
BATCH = 8  # questions per pass


def evaluate_tasks(setup: Setup, patch: SinkPatch, names: Sequence[str], questions: int | None = None) -> list[Row]:
    """A row for each task and metric: without a patch, with it, and with a patch of as many random neurons.

    Args:
        setup: The whole model.
        patch: The patch.
        names: Names of tasks (mmlu, hellaswag, truthfulqa_mc1, ...).
        questions: Number of questions of each task, from its beginning. None: all.

    Raises:
        SinkscopeError: lm-eval is not installed, or the data of a task are not available.
    """
    manager = _harness("lm_eval.tasks").TaskManager()
    answers = []
    for edit in (None, patch, random_patch(setup, patch)):
        answers.append(_answered(setup, edit, manager, names, questions))
    rows: list[Row] = []
    for task, metric in answers[0]:
        samples = torch.stack([one[task, metric] for one in answers])
        original, patched, random = samples.mean(1).tolist()
        margin, random_margin = (margin_of((one - samples[0]).numpy()) for one in samples[1:])
        rows.append(
            {
                "task": task,
                "metric": metric,
                "samples": samples.shape[1],
                "original": original,
                "patched": patched,
                "random": random,
                "difference": patched - original,
                "difference_margin": margin,
                "random_difference": random - original,
                "random_margin": random_margin,
            }
        )
    return rows


def _answered(
    setup: Setup, edit: Intervention | None, manager: Any, names: Sequence[str], questions: int | None
) -> dict[tuple[str, str], Float[Tensor, " sample"]]:
    """The value of every question by (task, metric) under an edit. A group of tasks has all questions of its parts.

    Questions begin with BOS if the model's sequences do.
    """
    evaluate = _harness("lm_eval.evaluator").evaluate
    model = _harness("lm_eval.models.huggingface").HFLM
    out: dict[tuple[str, str], Tensor] = {}
    target = setup.target
    with under(edit, target):
        lm = model(  # the harness changes the tokenizer it is given
            pretrained=target.hf,
            tokenizer=copy.deepcopy(target.tokenizer),
            batch_size=BATCH,
            add_bos_token=setup.bos is not None,
            max_length=target.max_positions,
        )
        for name in names:
            try:
                loaded = manager.load([name])
                for task in loaded["tasks"].values():
                    task.set_config(key="num_fewshot", value=task.get_config("num_fewshot") or 0)
                    task.set_fewshot_seed(seed=SHOTS_SEED)
                found = evaluate(lm, loaded, limit=questions, log_samples=True, bootstrap_iters=0)
            except OSError as error:  # the data set is missing: no network
                raise SinkscopeError(
                    f"the data of task {name!r} cannot be had ({str(error).splitlines()[0][:200]}): connect to the hub "
                    "once"
                ) from error
            for (metric, _), values in sorted(_by_metric(found["samples"]).items()):
                out[name, metric] = torch.tensor(values, dtype=torch.float64)
    return out


def _by_metric(samples: dict[str, list[Row]]) -> dict[tuple[str, str], list[float]]:
    """Values of all questions by (metric, filter), in a fixed order, so that runs can be paired."""
    values: dict[tuple[str, str], list[float]] = {}
    for _, entries in sorted(samples.items()):
        for entry in sorted(entries, key=lambda e: e["doc_id"]):
            for metric in entry["metrics"]:
                if isinstance(entry[metric], bool | int | float):
                    values.setdefault((metric, entry["filter"]), []).append(float(entry[metric]))
    return values


def _harness(module: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "lm_eval":
            raise
        raise SinkscopeError(
            "tasks are run by lm-eval, which is not installed: pip install -e '.[eval]' in the clone"
        ) from None
