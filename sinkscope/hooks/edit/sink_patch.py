"""The patch that keeps repeated tokens from becoming attention sinks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float
from pydantic import BaseModel, Field
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import read_json, write_output
from sinkscope.files.records import Finite, build, checked_value
from sinkscope.hooks.edit.edits import NeuronEdit, Values, result_of, spike_of
from sinkscope.hooks.edit.sites import Where, python_numbers, site_of
from sinkscope.models.checkpoints.checkpoint import check_made_for
from sinkscope.models.target import Target


class _File(BaseModel):
    """Content of patch.json."""

    version: Annotated[Literal[2], Field(alias="schema")]
    kind: Literal["sink-patch"]
    model: dict[str, Any] | None = None
    site: Where
    sites: Annotated[dict[str, Finite | None], Field(min_length=1)]  # calibrated values by the names of neurons


@dataclass(frozen=True, kw_only=True)
class SinkPatch(NeuronEdit):
    """Keep sink neurons from firing at any position after the first (Yona et al. 2025, section 5.3, Listing 1).

    The first real token of each row is never edited, so its sink stays. At every later token, in the prompt and in
    everything generated, the neurons are set to their neutral value. Weights are not changed.

    Args:
        sites: The sink neurons. `layer` and `neurons` are a shorter form for neurons of one layer.
        site: "post" (default) edits the neuron's whole value. "up" edits only the linear factor, as in the paper's
            listing, which does not help if the gate carries the sink.
        calibrated: Neutral value of each site, as `find_sinks` measures it (the median over ordinary text). If it is
            empty, the neutral value is the neuron's own at the row's second real token, bit for bit as in the listing,
            which spreads the sink if that token is one.
        model: The model for which the patch was made; stored in the file.

    Raises:
        SinkscopeError: There are no neurons, a value is not a number, or a needed calibrated value is missing.

    Example:
        >>> patch = SinkPatch(layer=1, neurons=[7890, 10411])
        >>> for site in patch.sites:
        ...     print(site)
        L1.N7890
        L1.N10411
    """

    calibrated: Mapping[Any, float] = field(default_factory=dict, hash=False)
    model: Mapping[str, Any] | None = field(default=None, hash=False)

    KIND = "patched"
    positions = slice(1, None)

    def read_values(self) -> None:
        """Read calibrated values."""
        by_neuron = checked_value(Mapping[Any, Any], self.calibrated, "calibrated")
        calibrated = {site_of(site): python_numbers(value) for site, value in by_neuron.items()}
        self.store(calibrated=checked_value(Mapping[Any, Finite], calibrated, "calibrated"))
        missing = [site for site in self.sites if site not in calibrated]
        if missing and calibrated:
            raise SinkscopeError(
                f"{missing[0]} has no calibrated value: give calibrated={{...}} with one for each site, or make the "
                "patch with SinkPatch.from_result"
            )

    @classmethod
    def from_result(cls, result: Any) -> SinkPatch:
        """Return the patch of all neurons that write the spike of the first token that most heads read.

        Args:
            result: The result of `find_sinks` or `why_sink`, or the path of its file. Of another spike, give `sites`
                and `calibrated` as its `calibrated` has them.

        Raises:
            SinkscopeError: There is no such spike that needs neurons, or `result` is another object.
        """
        result = result_of(result)
        calibrated = spike_of(result).calibrated
        return cls(sites=tuple(calibrated), calibrated=calibrated, model=asdict(result.model))

    def save(self, path: str | PathLike[str]) -> None:
        """Write patch.json atomically. It may replace an earlier patch.

        Raises:
            SinkscopeError: The path cannot be written, or holds another kind of file.
        """
        sites = {str(site): self.calibrated.get(site) for site in self.sites}
        content = {"schema": 2, "kind": "sink-patch", "model": self.model, "site": self.site, "sites": sites}
        write_output(path, json.dumps(content, indent=2) + "\n")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> SinkPatch:
        """Read patch.json.

        Raises:
            SinkscopeError: The file does not exist, is not JSON, not a patch or of another schema, or a field is
                missing or invalid.
        """
        content: Any = read_json(path, "make a patch with `sinkscope patch --out FILE`")
        expected = "a patch that `sinkscope patch` of this version wrote"
        patch = build(_File, content, Path(path).name, expected)
        calibrated = {site: value for site, value in patch.sites.items() if value is not None}
        return cls(sites=list(patch.sites), site=patch.site, calibrated=calibrated, model=patch.model)

    def check(self, target: Target) -> None:
        """Refuse a model that lacks these neurons, or whose shape differs from that of the patched model.

        A fine-tuned version is accepted, but its calibrated values may differ, so a `SinkscopeWarning` says so.

        Raises:
            SinkscopeError: The model has another shape, or no such neuron.
            UnsupportedError: As for every edit of neurons.
        """
        if self.model is not None:
            check_made_for(target, self.model)
        super().check(target)

    def edited(self, values: Values) -> Float[Tensor, "*place neuron"]:
        """Return the neutral value."""
        if not self.calibrated:
            return self._second_value(values)
        numbers = [self.calibrated[site] for site in values.of]
        return torch.tensor(numbers, device=values.old.device, dtype=values.old.dtype)

    def _second_value(self, values: Values) -> Float[Tensor, "batch 1 neuron"]:
        """The value at the second token of each row; NaN before there is one.

        Gradients flow through it within the call; for later calls it is a constant.
        """
        step, key = values.step, (*values.key, "second")
        values.check_read("the neuron's value at the second one", "give calibrated values")
        at = values.index == 1
        # No synchronisation with the device: rows without a hit are chosen by `where`, not by indexing.
        mean_of_step = torch.where(at[..., None], values.old, 0).sum(1)
        second = torch.where(at.any(1, keepdim=True), mean_of_step, step.state.known.get(key, torch.nan))
        step.state.known[key] = second.detach()
        return second[:, None]
