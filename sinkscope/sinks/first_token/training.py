"""The sink over training: `find_sinks` on one checkpoint after the other, of one model or of several folders."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from sinkscope.errors import SinkscopeError
from sinkscope.measure import Hidden, Option, Positive, Result
from sinkscope.registry import command
from sinkscope.results import ModelInfo, Provenance, provenance
from sinkscope.sinks.first_token.find import find_sinks
from sinkscope.store import Folder, Keyed


@dataclass(frozen=True)
class Checkpoint(Keyed):
    """What was found in one checkpoint.

    Attributes:
        name: the revision, or the model where there are several.
        sink_layer: the layer whose MLP makes the norm spike; None: none does.
        neurons: sites of the causal neurons, (layer, neuron) or (layer, expert, neuron).
        rate: share of heads whose mean attention to position 0 exceeds 0.3; None: the context is too short for it.
        spike: largest norm of the first token over the typical one of the same layer.
        set_drop: share of the first token's norm that goes with the causal neurons.
        control_drop: the same with as many random ones, the largest of 20 draws.
        model: which model it is; None where it failed.
        failed: why it could not be measured.
    """

    name: str
    sink_layer: int | None = None
    neurons: tuple[tuple[int, ...], ...] = ()
    rate: float | None = None
    spike: float | None = None
    set_drop: float | None = None
    control_drop: float | None = None
    model: ModelInfo | None = None
    failed: str | None = None

    @property
    def key(self) -> str:
        """Its name."""
        return self.name

    @property
    def shown(self) -> str:
        """The neurons, as find-sinks and positions name them."""
        return " ".join(".".join(map(str, site)) for site in self.neurons)


@dataclass(frozen=True, kw_only=True)
class SinksOverTraining(Result):
    """What `find_sinks` says of each checkpoint, in the order in which they were given."""

    kind: ClassVar[str] = "sinks-over-training"
    percent: ClassVar[tuple[str, ...]] = ("rate", "set_drop", "control_drop")
    drawing: ClassVar[Any] = "sinkscope.figures.looks:draw_training"

    checkpoints: tuple[Checkpoint, ...]

    @property
    def measured(self) -> tuple[Checkpoint, ...]:
        """Those that did not fail."""
        return tuple(c for c in self.checkpoints if c.failed is None)

    def rows(self) -> list[dict[str, Any]]:
        """One row per checkpoint."""
        return [
            {
                "checkpoint": c.name,
                "sink_layer": c.sink_layer,
                "neurons": c.shown or None,
                "rate": c.rate,
                "spike": c.spike,
                "set_drop": c.set_drop,
                "control_drop": c.control_drop,
                "failed": c.failed is not None or None,
            }
            for c in self.checkpoints
        ]

    def conclusion(self) -> str:
        """In how many checkpoints an MLP makes the spike, since when, and how the last compares with the first."""
        known = self.measured
        spiked = [c for c in known if c.sink_layer is not None]
        first, last = known[0], known[-1]
        grown = f"{_size(last)} in {last.name}, {_size(first)} in {first.name}"
        if not spiked:
            return f"In none of {len(known)} checkpoints does an MLP raise the first token's norm: {grown}."
        since = next(i for i, c in enumerate(known) if c is spiked[0])
        always = "" if len(spiked) == len(known) - since else ", though not in every later one"
        return (
            f"In {len(spiked)} of {len(known)} checkpoints an MLP makes the first token's norm spike, first in "
            f"{spiked[0].name}{always}: {grown}."
        )

    def details(self) -> list[str]:
        """Whether the neurons stay the same, and what failed."""
        spiked = [c for c in self.measured if c.sink_layer is not None]
        lines = []
        if len(spiked) > 1:
            same = [c for c in spiked if c.neurons == spiked[-1].neurons]
            lines.append(
                f"The neurons of {spiked[-1].name} ({spiked[-1].shown or 'none causal'}) are the same in "
                f"{len(same)} of these {len(spiked)} checkpoints."
            )
        return lines + [f"{c.name} could not be measured: {c.failed}." for c in self.checkpoints if c.failed]


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
    resume: Annotated[str | Path | None, Option(metavar="DIR")] = None,
    progress: Hidden = None,
    **options: Any,
) -> SinksOverTraining:
    """Find the sink in one checkpoint after the other: several revisions of a model, or several models.

    Every layer of each is read. A checkpoint that cannot be read is a line of the table with the reason.

    Args:
        models: A short name, hub id, folder or .gguf file; several make a series. By default the model in the package.
        revisions: Branch, tag or commit on the hub; several make a series.
        tokens: Words to repeat, one token each. By default five words of the text.
        top_k: Candidate neurons of the sink layer, each of which is ablated.
        max_repeats: Largest number of repetitions. By default 1,024, or what the context holds.
        resume: Keep what is found of each checkpoint in this folder, and go on from there; for a series.
        progress: Called as `progress(what, done, total)`.
        options: As in `find_sinks`: device, dtype, bos, text, seed.

    Raises:
        SinkscopeError: Nothing could be measured, or there are several models and several revisions.
    """
    started = time.perf_counter()
    series = _series(list(models or ()), list(revisions or ()))
    own = {"tokens": tokens, "top_k": top_k, "max_repeats": max_repeats}
    found: list[Checkpoint] = []
    first: SinkscopeError | None = None
    way: Provenance | None = None
    settings = {**own, **options, "model": None if len(models or ()) > 1 else _label(models)}
    with Folder(resume, settings, Checkpoint, option="--resume") as kept:
        for done, (name, model, revision) in enumerate(series):
            if progress is not None:
                progress("checkpoints", done, len(series))
            if name not in kept.records:
                try:
                    one, way = _measure(name, model, revision=revision, progress=progress, **own, **options)
                except (SinkscopeError, OSError) as error:  # the next one may be whole
                    said = (str(error).splitlines() or [type(error).__name__])[0]
                    found.append(Checkpoint(name, failed=said.replace(str(model), name)))
                    first = first or SinkscopeError(said)
                    continue
                kept.append([one])
            found.append(kept.records[name])
        if progress is not None:
            progress("checkpoints", len(series), len(series))
    if first is not None and all(c.failed for c in found):
        raise first
    info = next(c.model for c in reversed(found) if c.model is not None)
    return SinksOverTraining(
        checkpoints=tuple(found),
        model=info if len(set(models or ())) < 2 else replace(info, name=f"{len(found)} models"),
        settings={**settings, "checkpoints": len(found)},
        provenance=provenance(
            started=started,
            device=way.device if way else "unknown",  # everything was there already
            dtype=way.dtype if way else "unknown",
            attention=way.attention if way else "unknown",
            bos=way.bos if way else options.get("bos"),
            seed=options.get("seed", 0),
        ),
    )


def _series(models: list[str | Path], revisions: list[str]) -> list[tuple[str, str | Path | None, str | None]]:
    """Name, model and revision of each checkpoint, none twice."""
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


def _measure(name: str, model: str | Path | None, **options: Any) -> tuple[Checkpoint, Provenance]:
    """What `find_sinks` says of one checkpoint, and how it came to it."""
    found = find_sinks(model, all_layers=True, **options)
    ratios = [a / b for a, b in zip(found.first_token_norm, found.typical_norm, strict=True) if a and b]
    one = Checkpoint(
        name,
        found.sink_layer,
        tuple(neuron.site for neuron in found.causal),
        None if found.sink_rate is None else found.sink_rate.value,
        max(ratios),
        found.set_drop,
        found.set_control_drop,
        found.model,
    )
    return one, found.provenance
