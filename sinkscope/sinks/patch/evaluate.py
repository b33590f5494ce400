"""What a patch costs elsewhere: perplexity and benchmarks, compared with no patch and with a random-neuron patch.

Perplexity is computed from the next-token loss of ordinary text, piece by piece, with the standard error of the
difference.
"""

from __future__ import annotations

import copy
import io
import math
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import plotly.express as px
import plotly.graph_objects as go
import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from sinkscope.errors import SinkscopeError
from sinkscope.files.console import Progress, silent
from sinkscope.files.notation import counted, neuron_names
from sinkscope.interventions import NeuronSite
from sinkscope.interventions.base import Intervention
from sinkscope.interventions.sink_patch import SinkPatch
from sinkscope.measure import PIECE, Count, Option, Positive, Result, Setup, measurement
from sinkscope.measure.style import finished, unfolded
from sinkscope.models.target import Target
from sinkscope.models.text import text_rows
from sinkscope.sinks.first_token.layer_view import flat_number, neutral_post, neutral_up, neutral_view
from sinkscope.sinks.tokens import TokenRows

CHARACTERS = 8  # largest number of characters per token, as in `text_rows`
NEUTRAL_CHARACTERS = CHARACTERS * 4 * PIECE  # of the text that neutral values are taken from


def under(edit: Intervention | None, target: Target) -> AbstractContextManager[Any]:
    """A `with` block in which the edit acts; without an edit, nothing does."""
    return nullcontext() if edit is None else edit.on(target)


def held_out(setup: Setup, pieces: int, length: int) -> TokenRows:
    """Pieces of the typical text after the part that neutral values are taken from.

    Raises:
        SinkscopeError: The text is too short for two pieces of 8 tokens.
    """
    rest = setup.text[NEUTRAL_CHARACTERS:]
    length = min(length, setup.target.max_positions or length)
    # A short text gives short pieces rather than none.
    beginning = rest[: CHARACTERS * pieces * length]
    count = len(setup.tokenizer(beginning, add_special_tokens=False, verbose=False)["input_ids"])
    length = min(length, count // 2 + (setup.bos is not None))
    if length < 8:
        raise SinkscopeError(
            f"the text has {len(setup.text)} characters, and the first {NEUTRAL_CHARACTERS} of them are used to "
            "measure neutral values: give a longer --text, so that something is held out"
        )
    return text_rows(setup.tokenizer, rest, pieces, length, setup.bos)


@torch.no_grad()
def losses(
    target: Target,
    ids: TokenRows,
    edit: Intervention | None = None,
    batch_size: int = 8,
    progress: Progress = silent,
) -> Float[Tensor, " row"]:
    """Mean next-token loss of each piece in nats, without the first token's prediction, which no patch changes.

    Args:
        target: The whole model.
        ids: Pieces of text.
        edit: The edit to act under.
        batch_size: Pieces per pass.
        progress: Called after every batch.
    """
    out: list[Tensor] = []
    for start in range(0, len(ids), batch_size):
        rows = ids[start : start + batch_size].to(target.device)
        with under(edit, target):
            logits = target.hf(input_ids=rows, use_cache=False).logits
        predictions = rearrange(logits[:, 1:-1].float(), "row pos vocab -> row vocab pos")
        each = functional.cross_entropy(predictions, rows[:, 2:].to(logits.device), reduction="none")
        out.append(each.mean(1).cpu())
        progress("perplexity", min(start + batch_size, len(ids)), len(ids))
    return torch.cat(out)


def errors_of(samples: Float[Tensor, "condition sample"]) -> Float[Tensor, " edit"]:
    """Standard error of the mean difference to the first condition, over paired samples; NaN for a single sample."""
    if samples.shape[1] < 2:
        return torch.full((len(samples) - 1,), torch.nan)
    return (samples[1:] - samples[0]).std(1) / math.sqrt(samples.shape[1])


SHOTS_SEED = 1234  # seed of the examples before a question; the harness's default


@dataclass(frozen=True, kw_only=True)
class PatchEvaluation(Result):
    """Benchmarks and perplexity with and without a patch (Yona et al. 2025, Table 2).

    Conditions: "patch", and "random": a patch of as many random neurons of the same layers.

    Attributes:
        tasks: Task of each score; "text" is held-out text, and stands first.
        metrics: Metric of each score: "perplexity", "acc", "acc_norm", ...
        samples: Number of questions, or of pieces of text.
        original: Value without a patch.
        changed: Value under each patch.
        errors: Standard error of the difference to the original, over the paired samples. NaN for a single sample.
        neurons: Neurons of the patch: (layer, neuron) or (layer, expert, neuron).
    """

    page: ClassVar[str] = "measure/patch"
    kind: ClassVar[str] = "patch-eval"
    glossary: ClassVar[dict[str, str]] = {
        "metric": "what the task is scored by",
        "patched": "value under the patch",
        "random": "value under a random patch",
        "difference": "patched minus original",
        "difference_se": "its standard error",
        "random_difference": "random minus original",
        "random_se": "its standard error",
    }

    tasks: tuple[str, ...]
    metrics: tuple[str, ...]
    samples: Int[np.ndarray, " score"]
    original: Float[np.ndarray, " score"]
    changed: Float[np.ndarray, "condition score"]
    errors: Float[np.ndarray, "condition score"]
    neurons: tuple[tuple[int, ...], ...]

    @property
    def differences(self) -> Float[np.ndarray, "condition score"]:
        """Value under each patch minus the original."""
        return self.changed - self.original

    def conclusion(self) -> str:
        """How many numbers the patch changes, beside a random patch."""
        known = np.isfinite(self.errors).all(0)
        patch, random = ((np.abs(self.differences) > 2 * self.errors) & known).sum(1).tolist()
        return (
            f"The patch of {neuron_names(self.neurons, 3)} changes {counted(patch, 'score')} by more than two standard "
            f"errors, a patch of as many random neurons {counted(random, 'score')} ({known.sum()} measured)."
        )

    def details(self) -> list[str]:
        """A warning if the patch was made for another model."""
        made_for = self.settings.get("made_for")
        if made_for in (None, self.model.name):
            return []
        return [f"Warning: the patch was made for {made_for}, not for {self.model.name}."]

    def rows(self) -> list[dict[str, Any]]:
        """One row per score."""
        columns = {
            "metric": np.array(self.metrics),
            "samples": self.samples,
            "original": self.original,
            "patched": self.changed[0],
            "random": self.changed[1],
            "difference": self.differences[0],
            "difference_se": self.errors[0],
            "random_difference": self.differences[1],
            "random_se": self.errors[1],
        }
        return unfolded(columns, task=self.tasks)


def draw(result: PatchEvaluation) -> go.Figure:
    """Draw the change by the patch and by a random patch in per cent, with two standard errors."""
    changes = {
        "change": 100 * result.differences / result.original,
        "error": 200 * result.errors / result.original,
    }
    scores = [f"{task} {metric}" for task, metric in zip(result.tasks, result.metrics, strict=True)]
    rows = unfolded(changes, patch=("patch", "random patch"), score=scores)
    labels = {"change": "change in per cent of the original"}
    fig = px.scatter(rows, x="score", y="change", error_y="error", color="patch", labels=labels)
    return finished(fig, result, width=900, height=480)


def read_patch_argument(patch: SinkPatch | str | os.PathLike[str] | None) -> SinkPatch:
    """The patch itself, or the one in the file.

    Raises:
        SinkscopeError: There is none, or the file is not a patch.
    """
    if patch is None:
        raise SinkscopeError("no patch given: make one with `sinkscope patch make --out patch.json`", page="patch-file")
    if isinstance(patch, SinkPatch):
        return patch
    return SinkPatch.load(patch)


def refuse_unknown(patch: SinkPatch | str | os.PathLike[str] | None, tasks: Sequence[str], **_: object) -> None:
    """Refuse a wrong file or name before a model is loaded."""
    read_patch_argument(patch)
    if tasks:
        Tasks(tasks)


@measurement(
    group="Sinks",
    figure=draw,
    command="patch eval",
    loading="whole",
    check=refuse_unknown,
    quick={"patch": SinkPatch(layer=1, neurons=[3]), "pieces": 2, "length": 16},
)
def evaluate_patch(
    setup: Setup,
    patch: Annotated[Any, Option(metavar="FILE", required=True)] = None,
    *,
    tasks: Annotated[Sequence[str], Option("--tasks", metavar="A,B,...", reads="commas")] = (),
    shots: Count | None = None,
    questions: Positive | None = None,
    pieces: Annotated[int, Option(min=2)] = 32,
    length: Annotated[int, Option(min=8)] = 256,
    batch_size: Positive = 8,
) -> PatchEvaluation:
    """Measure a model without a patch, with it, and with a patch of as many random neurons of the same layers.

    The beginning of the typical text provides the neutral values of the random neurons; perplexity is measured on
    pieces that come after it. Tasks are those of EleutherAI's lm-evaluation-harness.

    Args:
        patch: The patch.json to evaluate; from Python also a `SinkPatch`.
        tasks: Names of tasks (mmlu, hellaswag, truthfulqa_mc1, ...) or paths of task files (.yaml).
        shots: Examples before each question. By default as each task says.
        questions: Number of questions of each task, from its beginning. By default all.
        pieces: Number of pieces of held-out text.
        length: Tokens per piece.
        batch_size: Rows per pass.

    Example:
        sinkscope patch eval --model llama-2-7b --patch patch.json
    """
    edit = read_patch_argument(patch)
    edit.check_made_for(setup.target)
    edits = (None, edit, random_patch(setup, edit))
    ids = held_out(setup, pieces, length)
    setup.record(
        patch=None if isinstance(patch, SinkPatch) else Path(patch).name,
        site=edit.site,
        value=edit.value,
        made_for=(edit.model or {}).get("name"),
        tasks=[Path(task).name for task in tasks],
        pieces=len(ids),
        length=ids.shape[1],
    )
    names = [("text", "perplexity")]
    samples = [torch.stack([losses(setup.target, ids, each, batch_size, setup.progress) for each in edits]).double()]
    perplexity = samples[0].mean(1).exp()
    values = [perplexity]
    errors = [errors_of(samples[0]) * perplexity[1:]]
    if tasks:
        harness = Tasks(tasks)
        answers = [harness.run(setup, each, shots, questions, batch_size) for each in edits]
        for name in answers[0]:
            names.append(name)
            samples.append(torch.stack([one[name] for one in answers]))
            values.append(samples[-1].mean(1))
            errors.append(errors_of(samples[-1]))
    original, *changed = torch.stack(values, 1).numpy()
    return PatchEvaluation(
        tasks=tuple(task for task, _ in names),
        metrics=tuple(metric for _, metric in names),
        samples=np.array([one.shape[1] for one in samples]),
        original=original,
        changed=np.array(changed),
        errors=torch.stack(errors, 1).numpy(),
        neurons=tuple(site.numbers for site in edit.checked_sites),
    )


def random_patch(setup: Setup, patch: SinkPatch) -> SinkPatch:
    """A patch of the same kind for as many other neurons of the same layers and experts, drawn with the seed.

    Raises:
        SinkscopeError: The patch has more than half of the neurons of a layer.
    """
    generator = torch.Generator().manual_seed(setup.seed)
    calibrated: dict[NeuronSite, float] = {}
    for group in patch.groups():
        with setup.target.loaded(group.layer):
            view = neutral_view(setup.target, group.layer, setup.ids)
        width = setup.target.width(group.layer, group.expert)
        taken = set(group.neurons)
        if 2 * len(taken) > width:
            raise SinkscopeError(
                f"the patch has {len(taken)} of the {width} neurons of layer {group.layer}: no random patch of as many "
                "others can be drawn beside it; give a smaller patch"
            )
        order = torch.randperm(width, generator=generator).tolist()
        others = [neuron for neuron in order if neuron not in taken]
        for neuron in others[: len(taken)]:
            flat = flat_number(setup.target, group.layer, group.expert, neuron)
            value = neutral_up(view, flat)
            if patch.site == "post" or value is None:
                value = neutral_post(setup.target, view, flat)
            calibrated[NeuronSite(group.layer, neuron, group.expert)] = value
    return SinkPatch(sites=tuple(calibrated), site=patch.site, value=patch.value, calibrated=calibrated)


class Tasks:
    """Tasks of the harness by name or file.

    Raises:
        SinkscopeError: lm-eval is not installed, a task is unknown (the message names the nearest), or a file is
            missing.
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
                label = Path(name).stem if _is_file(name) else name
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
    """Silence the progress bars and notes that the harness writes on standard error if that is not a terminal."""
    return nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())
