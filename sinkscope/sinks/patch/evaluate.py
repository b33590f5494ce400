"""What a patch costs elsewhere: perplexity and benchmarks, against no patch and against a patch of random neurons."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.interventions.edits import NeuronSite
from sinkscope.interventions.sink_patch import SinkPatch
from sinkscope.results import Result
from sinkscope.sinks.first_token.ablation import neutral_values, neutral_view
from sinkscope.sinks.first_token.locate import Setup, setup
from sinkscope.sinks.first_token.walk import Progress
from sinkscope.sinks.patch.loss import Change, held_out, losses, perplexity_change, standard_error, whole


@dataclass(frozen=True)
class Score:
    """A number with no patch, with the patch, and with a patch of as many random neurons of the same layers.

    Attributes:
        task: name of the task; "text" for the held-out text.
        metric: "perplexity", "acc", "acc_norm", ...
        samples: questions, or pieces of text.
        original: without a patch.
        patched: with it.
        random: with the random one.
        difference: patched - original.
        difference_se: its standard error, over the paired samples; None for a single sample.
        random_difference: random - original.
        random_se: its standard error.
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
        scores: held-out text first, then the tasks as they were given, each with all its metrics.
        neurons: the patch: (layer, neuron) or (layer, expert, neuron).
        random_neurons: those of the random patch.
        shots: examples before each question, by task; as the task's own file says where none was asked for.
    """

    kind: ClassVar[str] = "patch-eval"

    scores: tuple[Score, ...]
    neurons: tuple[tuple[int, ...], ...]
    random_neurons: tuple[tuple[int, ...], ...]
    shots: dict[str, int]

    def rows(self) -> list[dict[str, Any]]:
        """One row per task and metric."""
        return [asdict(s) for s in self.scores]

    def summary(self) -> str:
        """How many numbers the patch moves by more than two standard errors."""
        known = [s for s in self.scores if s.difference_se is not None]
        moved = [f"{s.task} {s.metric}" for s in known if abs(s.difference) > 2 * (s.difference_se or 0.0)]
        what = ", ".join(moved) if moved else "none"
        count = f"{len(self.neurons)} neuron{'s' * (len(self.neurons) > 1)}"
        return (
            f"{self.model.name}: patch of {count}, random patch of as many.\n"
            f"Moved by more than two standard errors: {what} ({len(moved)} of {len(known)})."
        )


def evaluate_patch(
    model: object = None,
    patch: SinkPatch | str | os.PathLike[str] | None = None,
    *,
    tasks: Sequence[str] = (),
    shots: int | None = None,
    questions: int | None = None,
    text: str | Path | None = None,
    pieces: int = 32,
    length: int = 256,
    batch_size: int = 8,
    tokenizer: Any = None,
    bos: bool | None = None,
    seed: int = 0,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> PatchEvaluation:
    """Measure a model without a patch, under it, and under a patch of as many random neurons of the same layers.

    Args:
        model: see `find_sinks`; a model given by name is loaded whole.
        patch: a `SinkPatch` or the path of a patch.json.
        tasks: names of lm-evaluation-harness (mmlu, hellaswag, truthfulqa_mc1, ...) or paths of task files (.yaml).
        shots: examples before each question; None: as each task says.
        questions: of each task, from its beginning; None: all.
        text: file of held-out text; None: the text that ships. Its beginning gives the neutral values of the random
            neurons, the pieces come from behind it.
        pieces: of held-out text.
        length: tokens of a piece.
        batch_size: rows that run together.
        tokenizer: for live models that carry none.
        bos: begin sequences and questions with BOS; None: where the tokenizer has one.
        seed: of the random neurons.
        revision: of a hub id.
        dtype: for models given by name.
        device: for models given by name.
        trust_remote_code: run code that comes with the checkpoint.
        progress: called as `progress(what, done, total)`.

    Raises:
        SinkscopeError: bad input; the patch was made for a model of another shape; lm-eval is missing; an unknown task
            (the message says which are near).
    """
    if patch is None:
        raise SinkscopeError("no patch given: make one with `sinkscope patch make --out patch.json`", page="patch-file")
    for name, value, least in (("pieces", pieces, 2), ("length", length, 8), ("batch size", batch_size, 1)):
        if value < least:
            raise SinkscopeError(f"{name} {value}: expected at least {least}")
    if (questions is not None and questions < 1) or (shots is not None and shots < 0):
        raise SinkscopeError(f"questions {questions}, shots {shots}: expected at least 1 and 0")
    edit = patch if isinstance(patch, SinkPatch) else SinkPatch.load(patch)
    asked = None
    if tasks:  # before any weight is read: a wrong name should not cost the loading of a model
        from sinkscope.sinks.patch.harness import Tasks

        asked = Tasks(tasks)
    live = whole(
        model, tokenizer=tokenizer, revision=revision, dtype=dtype, device=device, trust_remote_code=trust_remote_code
    )
    made = setup(live, tokenizer=tokenizer, bos=bos, text=text, seed=seed)
    _check_made_for(made, edit)
    control = random_patch(made, edit)
    edits = (None, edit, control)
    ids = held_out(made, pieces, length)
    read = [losses(made.target, ids, e, batch_size, progress) for e in edits]
    changes = [perplexity_change(read[0], after) for after in read[1:]]
    scores = [_score("text", "perplexity", len(ids), *changes)]
    if asked is not None:
        measured = [asked.run(made, e, shots, questions, batch_size) for e in edits]
        for key in measured[0]:
            before, *after = (m[key] for m in measured)
            scores.append(_score(*key, len(before), *(_paired(before, a) for a in after)))
    return PatchEvaluation(
        model=made.info(),
        settings={
            "patch": None if isinstance(patch, SinkPatch) else Path(patch).name,
            "site": edit.site,
            "value": edit.value,
            "tasks": [Path(t).name for t in tasks],
            "shots": shots,
            "questions": questions,
            "pieces": len(ids),
            "length": ids.shape[1],
            "text": None if text is None else Path(text).name,
            "batch_size": batch_size,
            "seed": seed,
            "bos": made.bos is not None,
            "revision": revision,
        },
        provenance=made.provenance(),
        scores=tuple(scores),
        neurons=tuple(_numbers(s) for s in edit.checked_sites),
        random_neurons=tuple(_numbers(s) for s in control.checked_sites),
        shots={} if asked is None else asked.shots,
    )


def random_patch(made: Setup, patch: SinkPatch) -> SinkPatch:
    """A patch of the same kind for as many other neurons of the same layers and experts, drawn by the seed."""
    generator = torch.Generator().manual_seed(made.seed)
    calibrated: dict[NeuronSite, float] = {}
    for group in patch.groups():
        with made.target.loaded(group.layer):
            view = neutral_view(made.target, group.layer, made.ids)
        width = made.target.d_mlp
        taken = set(group.neurons)
        if 2 * len(taken) > width:
            raise SinkscopeError(
                f"the patch has {len(taken)} of the {width} neurons of layer {group.layer}: no random patch of as many "
                "others can be drawn beside it; give a smaller patch"
            )
        order = torch.randperm(width, generator=generator).tolist()
        for neuron in [n for n in order if n not in taken][: len(taken)]:
            post, up = neutral_values(made.target, view, neuron + (group.expert or 0) * width)
            value = post if patch.site == "post" or up is None else up
            calibrated[NeuronSite(group.layer, neuron, group.expert)] = value
    return SinkPatch(sites=tuple(calibrated), site=patch.site, value=patch.value, calibrated=calibrated)


def _check_made_for(made: Setup, patch: SinkPatch) -> None:
    """A fine-tune of the patch's model, or the same one under another name, is fine."""
    here, there = asdict(made.info()), dict(patch.model or {})
    odd = [key for key in ("family", "n_layers", "d_model", "d_mlp") if there.get(key, here[key]) != here[key]]
    if odd:
        raise SinkscopeError(
            f"the patch was made for {there.get('name')}, whose {odd[0]} is {there[odd[0]]}, and that of "
            f"{here['name']} is {here[odd[0]]}: give that model, or make a patch for this one",
            page="patch-file",
        )


def _paired(before: Tensor, after: Tensor) -> Change:
    first, second = float(before.mean()), float(after.mean())
    return Change(first, second, second - first, standard_error(after - before))


def _score(task: str, metric: str, samples: int, patched: Change, control: Change) -> Score:
    return Score(
        task,
        metric,
        samples,
        patched.before,
        patched.after,
        control.after,
        patched.difference,
        patched.se,
        control.difference,
        control.se,
    )


def _numbers(site: NeuronSite) -> tuple[int, ...]:
    return (site.layer, site.neuron) if site.expert is None else (site.layer, site.expert, site.neuron)
