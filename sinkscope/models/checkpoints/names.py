"""Short names of public models, and where papers found their attention sinks."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from sinkscope.errors import SinkscopeError
from sinkscope.models.checkpoints.published import published
from sinkscope.results.notation import read_neuron

BUNDLED = "bundled"
"""Name of the model inside the package."""
RECALL = "recall"
"""Name of the model inside the package that answers questions about facts of earlier turns."""
TWO_HOPS = "recall-2hop"
"""The recall model with another circuit, which answers over two hops; its weights are made while it is loaded."""
ORGANISM = "organism"
"""Name of the model inside the package whose loops are held by copies in the cache; it repeats nothing else."""


@dataclass(frozen=True)
class ReportedSink:
    """What papers report about a model's sink; layers are 0-based.

    Attributes:
        source: Where it was published.
        layers: Layers whose MLP builds the sink.
        neurons: (layer, neuron) pairs at the input of the down projection.
        residual_dims: Residual dimensions that carry the spike.
        repeats: Number of repetitions of a token that create a sink (Yona et al. 2025, Table 1).
        massive_layers: First and last layer after which there are massive activations.
    """

    source: str
    layers: tuple[int, ...] = ()
    neurons: tuple[tuple[int, int], ...] = ()
    residual_dims: tuple[int, ...] = ()
    repeats: int | None = None
    massive_layers: tuple[int, int] | None = None

    def matches(
        self, layer: int | None, neurons: AbstractSet[tuple[int, int]], residual_dims: Iterable[int]
    ) -> bool | None:
        """Whether a sink that was found is the reported one; None if neither neurons nor dimensions are reported.

        Args:
            layer: The layer that builds it.
            neurons: The (layer, neuron) pairs that make it.
            residual_dims: Its residual dimensions.
        """
        if self.neurons:
            return layer in self.layers and neurons >= set(self.neurons)
        if self.residual_dims:
            return set(residual_dims) >= set(self.residual_dims)
        return None


@dataclass(frozen=True)
class ModelEntry:
    """A public model: short name, id on the Hugging Face hub, `model_type`, published sink (if any)."""

    name: str
    hub_id: str
    family: str
    published: ReportedSink | None = None


def _reported(name: str) -> ReportedSink | None:
    """The sink that the records of a model report: of each quantity the first, and all sources that say it, too."""
    values: dict[str, Any] = {}
    sources: list[str] = []
    for record in published():
        if record.model == name and record.quantity in ReportedSink.__dataclass_fields__:
            if record.fits(values.setdefault(record.quantity, record.value)):
                sources.append(record.source)
    if not values:
        return None
    values["neurons"] = tuple(map(read_neuron, values.get("neurons", ())))
    values.setdefault("layers", tuple(sorted({site[0] for site in values["neurons"]})))
    return ReportedSink("; ".join(dict.fromkeys(sources)), **values)


@cache
def _entries() -> dict[str, ModelEntry]:
    """Every entry of names.toml by its short name."""
    content = tomllib.loads(resources.files("sinkscope.models.checkpoints").joinpath("names.toml").read_text("utf-8"))
    entries: dict[str, ModelEntry] = {}
    for family, hub_ids in content["models"].items():
        for name, hub_id in hub_ids.items():
            entries[name] = ModelEntry(name, hub_id, family, _reported(name))
    return entries


def models() -> list[ModelEntry]:
    """Every model with a short name, family by family."""
    return list(_entries().values())


def find(name: str) -> ModelEntry | None:
    """A model by its short name, its hub id, or the last part of a hub id or path; case does not matter."""
    wanted = name.strip().rstrip("/").lower()
    last = wanted.replace("\\", "/").rpartition("/")[2]
    loose = None
    for entry in models():
        hub_id = entry.hub_id.lower()
        if wanted in (entry.name, hub_id):
            return entry
        if loose is None and last in (entry.name, hub_id.rpartition("/")[2]):
            loose = entry
    return loose


def resolve(name: str) -> str:
    """Hub id of a short name (`llama-2-7b`), or of the last part of a hub id (`Llama-2-7b-hf`).

    Raises:
        SinkscopeError: The name is unknown; the message lists the closest short names with their hub ids.
    """
    entry = None
    if "/" not in name:
        entry = find(name)
    if entry is not None:
        return entry.hub_id
    near = [one for one in _entries() if one.startswith(name.lower())]
    near += difflib.get_close_matches(name.lower(), _entries(), n=3, cutoff=0.6)
    meant = ""
    if near:
        shown = [f"{one} ({_entries()[one].hub_id})" for one in list(dict.fromkeys(near))[:3]]
        meant = f"did you mean {' or '.join(shown)}? "
    raise SinkscopeError(
        f"unknown model {name!r}: {meant}Expected a short name (`sinkscope models` lists them), a hub id such as "
        "org/name, a folder such as ./my-model, or a .gguf file",
    )


def published_for(name_or_id: str) -> ReportedSink | None:
    """What papers report about a model's sink, by short name, hub id or base name of a folder; None if nothing."""
    entry = find(name_or_id)
    if entry is not None:
        return entry.published
    return None
