"""The sink over training: `find_sinks` on each checkpoint in turn, of one model or of several folders."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from sinkscope.errors import SinkscopeError
from sinkscope.files.console import silent
from sinkscope.files.notation import neuron_names
from sinkscope.files.options import command
from sinkscope.files.result import ModelInfo, Provenance, provenance
from sinkscope.files.store import Folder, Keyed
from sinkscope.measure import Hidden, Option, Positive, Result
from sinkscope.sinks.first_token.find import find_sinks


@dataclass(frozen=True)
class Checkpoint(Keyed):
    """The result for one checkpoint.

    Attributes:
        name: The revision, or the model if there are several models.
        norm_spike: Whether a position's norm stands out.
        spike: Largest norm of the first token divided by the typical norm of the same layer.
        attention_sink: Whether heads attend to such a position.
        rate: Share of heads whose mean attention to position 0 exceeds 0.3. None if the context is too short for it.
        carried_by: What the heads need. None if no single component.
        sink_layer: The layer whose MLP makes most of the spike. None if no MLP does.
        neurons: The smallest set of neurons found that makes the spike, (layer, neuron) or (layer, expert, neuron).
        set_drop: Share of the first token's norm that is lost when these neurons are zeroed.
        control_drop: The same with as many random neurons, the largest of 20 draws.
        model: The model that was measured. None if the measurement failed.
        failed: The reason why it could not be measured.
    """

    name: str
    norm_spike: bool = False
    spike: float | None = None
    attention_sink: bool = False
    rate: float | None = None
    carried_by: str | None = None
    sink_layer: int | None = None
    neurons: tuple[tuple[int, ...], ...] = ()
    set_drop: float | None = None
    control_drop: float | None = None
    model: ModelInfo | None = None
    failed: str | None = None

    @property
    def shown(self) -> str:
        """The neurons, written as find-sinks and positions name them."""
        return neuron_names(self.neurons)


@dataclass(frozen=True, kw_only=True)
class SinksOverTraining(Result):
    """The result of `find_sinks` for each checkpoint, in the order in which they were given."""

    page: ClassVar[str] = "measure/training"
    kind: ClassVar[str] = "sinks-over-training"
    percent: ClassVar[tuple[str, ...]] = ("rate", "set_drop", "control_drop")
    drawing: ClassVar[Any] = "sinkscope.figures.first_token:draw_training"
    columns: ClassVar[tuple[str, ...]] = (
        "checkpoint",
        "spike",
        "rate",
        "sink_layer",
        "neurons",
        "set_drop",
        "control_drop",
    )

    checkpoints: tuple[Checkpoint, ...]

    @property
    def measured(self) -> tuple[Checkpoint, ...]:
        """The checkpoints that did not fail."""
        return tuple(c for c in self.checkpoints if c.failed is None)

    def rows(self) -> list[dict[str, Any]]:
        """One row per checkpoint."""
        left = ("name", "neurons", "model", "failed")
        return [
            {"checkpoint": c.name}
            | {name: None if c.failed else value for name, value in vars(c).items() if name not in left}
            | {"neurons": c.shown or None, "failed": c.failed is not None or None}
            for c in self.checkpoints
        ]

    def conclusion(self) -> str:
        """How many checkpoints have a norm spike and a sink, from which one on, and how the last one compares."""
        known = self.measured
        spikes, sinks = [c for c in known if c.norm_spike], [c for c in known if c.attention_sink]
        grown = [f"{_size(c)} in {c.name}" for c in dict.fromkeys([known[-1], known[0]])]
        return (
            f"There is a norm spike in {_since(spikes, known)}, and an attention sink in {_since(sinks, known)}: "
            f"{', '.join(grown)}."
        )

    def details(self) -> list[str]:
        """Whether the neurons stay the same, and which checkpoints failed."""
        spiked = [c for c in self.measured if c.sink_layer is not None]
        lines = list[str]()
        if len(spiked) > 1:
            same = [c for c in spiked if c.neurons == spiked[-1].neurons]
            lines.append(
                f"The neurons of {spiked[-1].name} ({spiked[-1].shown or 'none causal'}) are the same in "
                f"{len(same)} of these {len(spiked)} checkpoints."
            )
        return lines + [f"{c.name} could not be measured: {c.failed}." for c in self.checkpoints if c.failed]


def _since(some: list[Checkpoint], known: Sequence[Checkpoint]) -> str:
    """How many have it, and which is the first."""
    many = f"{len(some) or 'none'} of {len(known)} checkpoints"
    if not some:
        return many
    always = "" if len(some) == len(known) - known.index(some[0]) else ", not in all later ones"
    return f"{many} (first in {some[0].name}{always})"


def _size(c: Checkpoint) -> str:
    rate = "" if c.rate is None else f" and sink rate {c.rate:.1%}"
    return f"norm {c.spike:.3g} times the typical one{rate}"


@command(group="Sinks", command="find-sinks", several=True)
def sinks_over_training(
    models: Sequence[str | Path] | None = None,
    revisions: Sequence[str] | None = None,
    *,
    tokens: Sequence[str] | None = None,
    top_k: Positive = 8,
    max_repeats: Positive | None = None,
    resume: Annotated[str | Path | None, Option(metavar="DIR", writes=True)] = None,
    progress: Hidden = None,
    **options: Any,
) -> SinksOverTraining:
    """Find the sink in one checkpoint after another: several revisions of a model, or several models.

    Every layer of each checkpoint is read. If a checkpoint cannot be read, its row in the table gives the reason.

    Args:
        models: A short name, hub id, folder or .gguf file; several make a series. By default the model in the package.
        revisions: Branch, tag or commit on the hub; several make a series.
        tokens: Words to repeat, one token each. By default five words of the text.
        top_k: Number of candidate neurons of the sink layer; each is ablated.
        max_repeats: Largest number of repetitions. By default 1,024, or what the context holds.
        resume: For a series: folder that keeps the result of each checkpoint, so that an interrupted run can continue.
        progress: Called as `progress(what, done, total)`.
        options: As in `find_sinks`: device, dtype, bos, text, seed.

    Raises:
        SinkscopeError: Nothing could be measured, or there are several models and several revisions.

    Example:
        sinkscope find-sinks --model pythia-1.4b --revision step1000 --revision main
    """
    started, found = time.perf_counter(), list[Checkpoint]()
    several = len(set(models or ())) > 1
    own: dict[str, Any] = {"tokens": tokens, "top_k": top_k, "max_repeats": max_repeats, **options}
    settings = {**own, "model": None if several else _label(models)}
    way: Provenance | None = None
    show = progress or silent
    series = _series(list(models or ()), list(revisions or ()))
    with Folder(resume, settings, Checkpoint, option="--resume") as kept:
        for name, model, revision in series:
            show("checkpoints", len(found), len(series))
            if name not in kept.records:
                one, way = _measure(name, model, way, revision=revision, progress=progress, **own)
                if one.failed is None:  # a failed checkpoint is tried again next time
                    kept.append([one])
                found.append(one)
            else:
                found.append(kept.records[name])
        show("checkpoints", len(series), len(series))
    if all(c.failed for c in found):
        raise SinkscopeError(str(found[0].failed))
    info = next(c.model for c in reversed(found) if c.model is not None)
    return SinksOverTraining(
        checkpoints=tuple(found),
        model=replace(info, name=f"{len(found)} models") if several else info,
        settings={**settings, "checkpoints": len(found)},
        provenance=provenance(
            started=started,
            device=way.device if way else "unknown",  # every checkpoint was already measured
            dtype=way.dtype if way else "unknown",
            attention=way.attention if way else "unknown",
            bos=way.bos if way else options.get("bos"),
            seed=options.get("seed", 0),
        ),
    )


def _series(models: list[str | Path], revisions: list[str]) -> list[tuple[str, str | Path | None, str | None]]:
    """Name, model and revision of each checkpoint, without duplicates."""
    models, revisions = list(dict.fromkeys(models)), list(dict.fromkeys(revisions))
    if len(models) > 1 and len(revisions) > 1:
        raise SinkscopeError("several models and several revisions are given: give one model, or at most one revision")
    if len(models) <= 1:
        model = models[0] if models else None
        return [(revision, model, revision) for revision in revisions] or [(_label(models), model, None)]
    paths = [Path(os.fspath(one).rstrip("/")).parts for one in models]
    depth = next(n for n in range(1, 1 + max(map(len, paths))) if len({p[-n:] for p in paths}) == len(set(paths)))
    names = ["/".join(path[-depth:]) for path in paths]
    revision = revisions[0] if revisions else None
    return [(name, model, revision) for name, model in zip(names, models, strict=True)]


def _label(models: Sequence[str | Path] | None) -> str:
    return Path(os.fspath(models[0])).name if models else "bundled"


def _measure(
    name: str, model: str | Path | None, way: Provenance | None, **options: Any
) -> tuple[Checkpoint, Provenance | None]:
    """The result of `find_sinks` for one checkpoint, or why it failed; and the provenance (`way`: as before)."""
    try:
        found = find_sinks(model, all_layers=True, **options)
    except (SinkscopeError, OSError) as error:  # the next checkpoint may be readable
        said = (str(error).splitlines() or [type(error).__name__])[0]
        return Checkpoint(name, failed=said.replace(str(model), name)), way
    spike, sink, minimal = found.norm_spike, found.attention_sink, found.minimal
    ratios = [a / b for a, b in zip(found.first_token_norm, found.typical_norm, strict=True) if a and b]
    one = Checkpoint(
        name,
        norm_spike=spike is not None,
        spike=max(ratios) if spike is None else spike.ratio,
        attention_sink=sink is not None,
        rate=None if found.sink_rate is None else found.sink_rate.value,
        carried_by=None if sink is None else sink.carried_by,
        sink_layer=found.sink_layer,
        neurons=tuple(n.site for n in found.causal) if minimal is None else minimal.numbers,
        set_drop=found.set_drop if minimal is None else minimal.drop_sink_layer,
        control_drop=found.set_control_drop if minimal is None else minimal.control,
        model=found.model,
    )
    return one, found.provenance
