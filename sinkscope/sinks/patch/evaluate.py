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

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from sinkscope.errors import SinkscopeError
from sinkscope.files.console import Progress, silent
from sinkscope.interventions.base import Intervention
from sinkscope.interventions.edits import NeuronSite
from sinkscope.interventions.sink_patch import SinkPatch
from sinkscope.measure import PIECE, Count, Option, Positive, Result, Setup, measurement
from sinkscope.models.target import Target
from sinkscope.models.text import text_rows
from sinkscope.sinks.first_token.layer_view import flat_number, neutral_post, neutral_up, neutral_view

CHARACTERS = 8  # largest number of characters per token, as in `text_rows`


@dataclass(frozen=True)
class Change:
    """A quantity with and without an edit, over paired samples.

    Attributes:
        before: Value without the edit.
        after: Value with the edit.
        difference: `after - before`.
        se: Standard error of the difference, from the differences of the samples. None for a single sample.
    """

    before: float
    after: float
    difference: float
    se: float | None

    @classmethod
    def of(cls, before: float, after: float, samples: Float[Tensor, " n"], scale: float = 1.0) -> Change:
        """Computed with the standard error of the mean of the samples' differences, times `scale`."""
        many = len(samples) > 1
        return cls(
            before, after, after - before, float(samples.std()) / math.sqrt(len(samples)) * scale if many else None
        )


def under(edit: Intervention | None, target: Target) -> AbstractContextManager[Any]:
    """A `with` block in which the edit acts; without an edit, nothing does."""
    return nullcontext() if edit is None else edit.on(target)


def held_out(made: Setup, pieces: int, length: int, texts: int = 4) -> Int[Tensor, "row pos"]:
    """Pieces of the typical text after the part that neutral values are taken from.

    Raises:
        SinkscopeError: The text is too short for two pieces of 8 tokens.
    """
    tokenizer = made.target.tokenizer
    rest = made.text[CHARACTERS * texts * PIECE :]
    bos = made.bos
    length = min(length, made.target.max_positions or length)
    # A short text gives short pieces rather than none.
    count = len(tokenizer(rest[: CHARACTERS * pieces * length], add_special_tokens=False, verbose=False)["input_ids"])
    length = min(length, count // 2 + (bos is not None))
    if length < 8:
        raise SinkscopeError(
            f"the text has {len(made.text)} characters, and the first {CHARACTERS * texts * PIECE} of them are used to "
            "measure neutral values: give a longer --text, so that something is held out"
        )
    return text_rows(tokenizer, rest, pieces, length, bos)


@torch.no_grad()
def losses(
    target: Target,
    ids: Int[Tensor, "row pos"],
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
        each = functional.cross_entropy(
            logits[:, 1:-1].float().transpose(1, 2), rows[:, 2:].to(logits.device), reduction="none"
        )
        out.append(each.mean(1).cpu())
        progress("perplexity", min(start + batch_size, len(ids)), len(ids))
    return torch.cat(out)


def perplexity_change(before: Float[Tensor, " row"], after: Float[Tensor, " row"]) -> Change:
    """Perplexities of paired pieces. The standard error is that of the mean loss difference, times the perplexity."""
    first, second = float(before.double().mean().exp()), float(after.double().mean().exp())
    return Change.of(first, second, after.double() - before.double(), second)


_SEED = 1234  # seed of the examples before a question; the harness's default


@dataclass(frozen=True)
class Score:
    """A number without a patch, with the patch, and with a patch of as many random neurons of the same layers.

    Attributes:
        task: Name of the task; "text" for the held-out text.
        metric: "perplexity", "acc", "acc_norm", ...
        samples: Number of questions, or of pieces of text.
        original: Value without a patch.
        patched: Value with the patch.
        random: Value with a patch of as many random neurons.
        difference: Patched minus original.
        difference_se: Standard error of the difference, over the paired samples. None for a single sample.
        random_difference: Random minus original.
        random_se: Standard error of the random difference.
    """

    task: str
    metric: str
    samples: int
    original: float
    patched: float
    random: float
    difference: float
    difference_se: float | None
    random_difference: float
    random_se: float | None


@dataclass(frozen=True, kw_only=True)
class PatchEvaluation(Result):
    """Benchmarks and perplexity with and without a patch (Yona et al. 2025, Table 2).

    Attributes:
        scores: Held-out text first, then the tasks in the order given, each with all its metrics.
        neurons: Neurons of the patch: (layer, neuron) or (layer, expert, neuron).
        random_neurons: Neurons of the random patch.
        shots: Examples before each question, by task. If none were requested, the number from the task's own file.
    """

    page: ClassVar[str] = "measure/patch"
    kind: ClassVar[str] = "patch-eval"
    columns: ClassVar[tuple[str, ...]] = (
        "task",
        "metric",
        "original",
        "patched",
        "random",
        "difference",
        "difference_se",
    )

    scores: tuple[Score, ...]
    neurons: tuple[tuple[int, ...], ...]
    random_neurons: tuple[tuple[int, ...], ...]
    shots: dict[str, int]

    def conclusion(self) -> str:
        """Which numbers the patch changes, and how many a random patch changes."""
        known = [s for s in self.scores if s.difference_se is not None and s.random_se is not None]
        moved = [f"{s.task} {s.metric}" for s in known if abs(s.difference) > 2 * (s.difference_se or 0.0)]
        chance = sum(abs(s.random_difference) > 2 * (s.random_se or 0.0) for s in known)
        return (
            f"The patch of {len(self.neurons)} neuron{'s' * (len(self.neurons) > 1)} moves {len(moved)} of "
            f"{len(known)} numbers by more than two standard errors{': ' * bool(moved)}{', '.join(moved)}; a patch of "
            f"as many random neurons moves {chance}."
        )

    def details(self) -> list[str]:
        """A warning if the patch was made for another model."""
        made_for = self.settings.get("made_for")
        if made_for in (None, self.model.name):
            return []
        return [f"Warning: the patch was made for {made_for}, not for {self.model.name}."]


def _read(patch: SinkPatch | str | os.PathLike[str] | None) -> SinkPatch:
    if patch is None:
        raise SinkscopeError("no patch given: make one with `sinkscope patch make --out patch.json`", page="patch-file")
    return patch if isinstance(patch, SinkPatch) else SinkPatch.load(patch)


def _check(patch: SinkPatch | str | os.PathLike[str] | None, tasks: Sequence[str], **_: object) -> None:
    """Refuse a wrong file or name before a model is loaded."""
    _read(patch)
    if tasks:
        Tasks(tasks)


@measurement(
    group="Sinks",
    figure="sinkscope.figures.patch:draw_eval",
    command="patch eval",
    loading="whole",
    check=_check,
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
    edit = _read(patch)
    edit.check_made_for(setup.target)
    control = random_patch(setup, edit)
    edits = (None, edit, control)
    ids = held_out(setup, pieces, length)
    setup.record(
        patch=None if isinstance(patch, SinkPatch) else Path(patch).name,
        site=edit.site,
        value=edit.value,
        made_for=(edit.model or {}).get("name"),
        tasks=[Path(t).name for t in tasks],
        pieces=len(ids),
        length=ids.shape[1],
    )
    read = [losses(setup.target, ids, e, batch_size, setup.progress) for e in edits]
    scores = [_score("text", "perplexity", len(ids), *(perplexity_change(read[0], after) for after in read[1:]))]
    asked = Tasks(tasks) if tasks else None
    if asked is not None:
        measured = [asked.run(setup, e, shots, questions, batch_size) for e in edits]
        for key, before in measured[0].items():
            changes = (Change.of(float(before.mean()), float(m[key].mean()), m[key] - before) for m in measured[1:])
            scores.append(_score(*key, len(before), *changes))
    return PatchEvaluation(
        scores=tuple(scores),
        neurons=tuple(site.numbers for site in edit.checked_sites),
        random_neurons=tuple(site.numbers for site in control.checked_sites),
        shots={} if asked is None else asked.shots,
    )


def random_patch(made: Setup, patch: SinkPatch) -> SinkPatch:
    """A patch of the same kind for as many other neurons of the same layers and experts, drawn with the seed."""
    generator = torch.Generator().manual_seed(made.seed)
    calibrated: dict[NeuronSite, float] = {}
    for group in patch.groups():
        with made.target.loaded(group.layer):
            view = neutral_view(made.target, group.layer, made.ids)
        width = made.target.width(group.layer, group.expert)
        taken = set(group.neurons)
        if 2 * len(taken) > width:
            raise SinkscopeError(
                f"the patch has {len(taken)} of the {width} neurons of layer {group.layer}: no random patch of as many "
                "others can be drawn beside it; give a smaller patch"
            )
        order = torch.randperm(width, generator=generator).tolist()
        for neuron in [n for n in order if n not in taken][: len(taken)]:
            number = flat_number(made.target, *group[:2], neuron)
            post, up = neutral_post(made.target, view, number), neutral_up(view, number)
            value = post if patch.site == "post" or up is None else up
            calibrated[NeuronSite(group.layer, neuron, group.expert)] = value
    return SinkPatch(sites=tuple(calibrated), site=patch.site, value=patch.value, calibrated=calibrated)


def _score(task: str, metric: str, samples: int, patched: Change, control: Change) -> Score:
    numbers = patched.before, patched.after, control.after
    return Score(task, metric, samples, *numbers, patched.difference, patched.se, control.difference, control.se)


class Tasks:
    """Tasks of the harness by name or file.

    Attributes:
        shots: Examples before each question, by task, as it was run.

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
        self.shots: dict[str, int] = {}

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
                self.shots[label] = max(found.get("n-shot", {}).values(), default=0)
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
    """Silence the progress bars and notes that the harness writes on standard error if that is not a terminal."""
    return nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())
