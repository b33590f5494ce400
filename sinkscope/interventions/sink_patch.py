"""The patch that keeps repeated tokens from becoming attention sinks."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import BaseModel, Field
from torch import Tensor

from sinkscope.errors import SinkscopeError, SinkscopeWarning
from sinkscope.files.output import read_json, write_output
from sinkscope.files.records import Number, Whole, check, conform
from sinkscope.interventions.base import Run, is_edited
from sinkscope.interventions.edits import NeuronEdit, NeuronGroup, NeuronSite, Where, log_values, site_of
from sinkscope.interventions.positions import Call, Memory
from sinkscope.models.open import is_checkpoint
from sinkscope.models.target import Target
from sinkscope.models.text import resolve_bos, text_rows, typical_text

# Why the calibrated value is used instead of the second token's; the names are in `edits._REASONS`.
_NO_BOS, _ONE_TOKEN, _SINK_LIKE, _PARTIAL = 1, 2, 3, 4
SCHEMA, KIND = 1, "sink-patch"
_PAGE = "patch-file"
Value = Literal["second", "listing", "calibrated"] | Number


class _FileSite(BaseModel):
    layer: Whole
    neuron: Whole
    expert: Whole | None = None
    calibrated: Number | None = None


class _File(BaseModel):
    """Content of patch.json."""

    model: dict[str, Any] | None = None
    site: Where
    value: Value
    sites: Annotated[list[_FileSite], Field(min_length=1)]


@dataclass(frozen=True, kw_only=True)
class SinkPatch(NeuronEdit):
    """Keep sink neurons from firing at any position after the first (Yona et al. 2025, section 5.3, Listing 1).

    The first real token of each row is never edited, so its sink stays. At every later token, in the prompt and in
    everything generated, the neurons are set to their neutral value. Weights are not changed.

    Args:
        sites: The sink neurons. `layer` and `neurons` are a shorter form for neurons of one layer.
        site: "post" (default) edits the neuron's whole value. "up" edits only the linear factor, as in the paper's
            listing, which does not help if the gate carries the sink.
        value: The neutral value. "second", as in the listing, is the neuron's value at the row's second real token,
            taken from the call that reads it and kept for all later chunks, turns and generated tokens. "listing" is
            the same without any calibrated value, which reproduces the listing bit for bit. "calibrated" is the number
            in `calibrated`. A number is used directly.
        calibrated: Neutral value of each site, as `find_sinks` measures it (the median over ordinary text).
        model: The model for which the patch was made; stored in the file.

    With value="second", `calibrated` is used instead (and an event of kind "fallback" gives the reason) if the second
    value is not informative: the row does not begin with BOS; the second token came alone in its call, that is, it
    was generated after a one-token prompt (a prompt read in chunks of one token looks the same); the second
    value is at least half as far from the calibrated one as the first token's is; or the prompt was read before
    the run was entered. A patch without calibrated values measures them when it is entered, on 4 times 64 tokens of
    neutral text, if the model carries a tokenizer that knows this text and nothing else edits the model. Without
    calibrated values, the second value is used anyway, as in the listing. This spreads the sink if the second token
    belongs to the first one's cluster, so a warning is given once, and an event of kind "sink-like" wherever the value
    is at least half the first token's. Rows given as embeddings count as beginning with BOS.
    In beam search after a one-token prompt without calibrated values, beams that change places keep the second value
    of the row, not of the beam.

    Raises:
        SinkscopeError: There are no neurons, a value is not a number, or a needed calibrated value is missing.

    Example:
        >>> patch = SinkPatch(layer=1, neurons=[7890, 10411])
        >>> for site in patch.sites:
        ...     print(site)
        layer 1, neuron 7890
        layer 1, neuron 10411
    """

    value: Literal["second", "listing", "calibrated"] | float = "second"
    calibrated: Mapping[Any, float] = field(default_factory=dict, hash=False)
    model: Mapping[str, Any] | None = field(default=None, hash=False)

    KIND: ClassVar[str] = "patched"

    def __post_init__(self, layer: int | None, neurons: int | Sequence[int]) -> None:
        if layer is not None and layer < 0:
            raise SinkscopeError(
                f"layer={layer}: a patch is also a file for other programs, so it counts layers from 0",
                page=_PAGE,
            )
        super().__post_init__(layer, neurons)
        conform(Value, self.value, "value", page=_PAGE)
        calibrated = {site_of(s): v for s, v in self.calibrated.items()}
        for s, v in calibrated.items():
            conform(Number, v, f"calibrated value of {s}", page=_PAGE)
        object.__setattr__(self, "calibrated", calibrated)
        if self.value == "calibrated" and (missing := [s for s in self.checked_sites if s not in calibrated]):
            raise SinkscopeError(
                f'value="calibrated" but {missing[0]} has no calibrated value: give calibrated={{...}} or make the '
                "patch with SinkPatch.from_result",
                page=_PAGE,
            )

    @classmethod
    def from_result(
        cls, found: Any, *, site: Where = "post", value: Literal["second", "listing", "calibrated"] | float = "second"
    ) -> SinkPatch:
        """The patch for the smallest causal set of a `find_sinks` result, with calibrated values.

        Raises:
            SinkscopeError: The model has no sink, or no neuron was causal.
        """
        sets = [s for s in getattr(found, "causal_sets", ()) if _get(s, "kind") == "minimal"]
        members = [tuple(_get(m, f) for f in ("layer", "expert", "neuron")) for s in sets for m in _get(s, "sites")]
        known = {tuple(_get(row, f) for f in ("layer", "expert", "neuron")): row for row in found.neurons}
        rows = [known[m] for m in members] or [row for row in found.neurons if _get(row, "causal")]
        if found.sink_layer is None or not rows:
            raise SinkscopeError(
                "no sink neuron was found in this model, so there is nothing to patch: find_sinks gave "
                f"sink_layer={found.sink_layer} and no causal neuron",
                page="no-sink",
            )
        sites = [NeuronSite(int(_get(r, "layer")), int(_get(r, "neuron")), _get(r, "expert")) for r in rows]
        neutral = [_get(row, f"neutral_{site}") for row in rows]
        calibrated = {s: float(v) for s, v in zip(sites, neutral, strict=True) if v is not None}
        model: Any = _get(found, "model")
        info: Any = asdict(model) if is_dataclass(model) and not isinstance(model, type) else model
        return cls(sites=tuple(sites), site=site, value=value, calibrated=calibrated, model=info)

    def save(self, path: str | PathLike[str]) -> None:
        """Write patch.json atomically. It may replace an earlier patch or result, but no other file.

        Raises:
            SinkscopeError: The path cannot be written, or holds another kind of file.
        """
        sites = [{**s._asdict(), "calibrated": self.calibrated.get(s)} for s in self.checked_sites]
        content = {"model": self.model, "site": self.site, "value": self.value, "sites": sites}
        write_output(path, json.dumps({"schema": SCHEMA, "kind": KIND, **content}, indent=2) + "\n")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> SinkPatch:
        """Read patch.json.

        Raises:
            SinkscopeError: The file does not exist, is not JSON, not a patch or of another schema, or a field is
                missing or invalid.
        """
        content = read_patch(path)
        values = {NeuronSite(s["layer"], s["neuron"], s["expert"]): s["calibrated"] for s in content.pop("sites")}
        calibrated = {site: value for site, value in values.items() if value is not None}
        return cls(sites=tuple(values), calibrated=calibrated, **content)

    def prepared(self, target: Target) -> SinkPatch:
        """The patch with a calibrated value for each site, if these can be measured."""
        self.check_made_for(target)
        missing = [site for site in self.checked_sites if site not in self.calibrated]
        if self.value != "second" or not missing or is_edited(target):
            return self
        self._check(target)
        measured = neutral_values(target, missing, self.site)
        return replace(self, calibrated={**measured, **self.calibrated})

    def check_made_for(self, target: Target) -> None:
        """Compare the model with the one for which the patch was made, as far as the patch describes it.

        A fine-tuned version is accepted, but its calibrated values may differ, so a `SinkscopeWarning` says so.

        Raises:
            SinkscopeError: The model has another shape.
        """
        there, t = self.model or {}, target
        here = {"family": t.config.model_type, "n_layers": t.n_layers, "d_model": t.d_model, "d_mlp": t.d_mlp}
        if odd := [key for key, value in here.items() if there.get(key, value) != value]:
            raise SinkscopeError(
                f"the patch was made for {there.get('name')}, whose {odd[0]} is {there[odd[0]]}, and that of {t.name} "
                f"is {here[odd[0]]}: give that model, or make a patch for this one",
                page=_PAGE,
            )
        if there.get("fingerprint") and not is_checkpoint(t, there["fingerprint"]):
            warnings.warn(
                f"the patch was made for {there.get('name')} (fingerprint {there['fingerprint']}), and {t.name} has "
                "the same shape and other weights, so its sink may have other neurons: make a patch for this model",
                SinkscopeWarning,
                stacklevel=3,
            )

    def new_values(
        self, old: Float[Tensor, "batch pos neuron"], call: Call, memory: Memory, group: NeuronGroup, run: Run
    ) -> Float[Tensor, "batch pos neuron"]:
        """The neutral value at every real position after the first."""
        if isinstance(self.value, str):
            known = {} if self.value == "listing" else self.calibrated
            kept = [known.get(site, torch.nan) for site in group.sites]
        else:
            kept = [self.value] * len(group.neurons)
        neutral = torch.tensor(kept, device=old.device, dtype=old.dtype)
        if self.value in ("second", "listing"):
            neutral = self._second(old, call, memory, group, run, neutral)[:, None]
        return torch.where((call.on(old.device) > 0)[..., None], neutral, old)

    def _second(
        self,
        old: Float[Tensor, "batch pos neuron"],
        call: Call,
        memory: Memory,
        group: NeuronGroup,
        run: Run,
        calibrated: Float[Tensor, " neuron"],
    ) -> Float[Tensor, "batch neuron"]:
        if call.sequence.settled and "value" in memory:  # nothing left to decide
            return memory["value"]
        index = call.on(old.device)
        late = call.sequence.partial and call.past > 1
        if late and (self.value == "listing" or not self.calibrated.keys() >= set(group.sites)):
            raise SinkscopeError(
                f"the first {call.past} tokens were read before this run was entered (or the cache was copied), so the "
                "neuron's value at the second one is not known: enter the run first, or give a number as value or "
                "calibrated values",
                page="second-value-unknown",
            )
        at_second = index == 1
        second = memory.keep("second", old, at_second)
        several = ((index >= 0).sum(1) > 1).to(old.dtype)
        several = memory.keep("several", several[:, None, None].expand(*index.shape, 1), at_second)
        first, has = memory["first"], ~calibrated.isnan()
        # Comparisons with NaN (no calibrated value, first token not seen) are False.
        center = calibrated.nan_to_num(0)
        sink_like = (second - center).abs() >= 0.5 * (first - center).abs()
        reason = torch.where(sink_like, _SINK_LIKE, 0)
        reason = torch.where(several == 0, _ONE_TOKEN, reason)
        reason = torch.where(call.sequence.bos.to(old.device)[:, None], reason, _NO_BOS)
        if late:
            reason = torch.full_like(reason, _PARTIAL)
        instead = (reason > 0) & has
        value = torch.where(instead, calibrated, second)
        # Said once per row: when its second token comes, or at the first call where that was before the run.
        when = (index >= 0).cumsum(1).eq(1) & (index >= 0) if late and "value" not in memory else at_second
        memory["value"] = value
        data = {"reason": reason[:, None], "value": value[:, None]}
        log_values(run, call, group, "fallback", when[..., None] & instead[:, None], data)
        warn = sink_like & ~has
        values = {"first": first[:, None], "second": second[:, None]}
        log_values(run, call, group, "sink-like", when[..., None] & warn[:, None], values)
        if not run.warned and not bool(has.all()) and bool((when[..., None] & warn[:, None]).any()):
            run.warned = True
            warnings.warn(
                "the second token's value is itself like a sink's, and this SinkPatch has no calibrated value to write "
                "instead, so it makes sinks of all later tokens: make the patch with SinkPatch.from_result, or give "
                "calibrated={...}, or load the model with its tokenizer",
                SinkscopeWarning,
                stacklevel=2,
            )
        return value


@dataclass(frozen=True, kw_only=True)
class _Seen(NeuronEdit):
    """Records the neurons' values at positions after the first; it changes nothing."""

    EDITS: ClassVar[bool] = False

    values: dict[NeuronSite, Tensor] = field(default_factory=dict, hash=False)

    def new_values(
        self, old: Float[Tensor, "batch pos neuron"], call: Call, memory: Memory, group: NeuronGroup, run: Run
    ) -> None:
        """Nothing changes."""
        later = old.detach()[:, 1:].flatten(0, 1).float()
        self.values.update(zip(group.sites, later.unbind(1), strict=True))


@torch.no_grad()
def neutral_values(target: Target, sites: Sequence[NeuronSite], where: Where) -> dict[NeuronSite, float]:
    """Median value of each neuron over neutral text without first tokens, as measured by `find_sinks`.

    Args:
        target: The model, without any edits.
        sites: The neurons.
        where: "post" or "up".

    Returns:
        The medians; empty if the model carries no tokenizer, or one that does not know the text.
    """
    if target.tokenizer is None:
        return {}
    try:
        bos = resolve_bos(target.tokenizer, target.config, None)
        ids = text_rows(target.tokenizer, typical_text(), 4, min(64, target.max_positions or 64), bos)
    except SinkscopeError:
        return {}
    seen = _Seen(sites=sites, site=where)
    with seen.on(target.model):
        target.forward(ids, upto=max(site.layer for site in sites))
    return {site: float(values.median()) for site, values in seen.values.items()}


def _get(row: Any, name: str) -> Any:
    """A field of a result row, whether it is a dictionary or an object; None if it has none."""
    return row.get(name) if isinstance(row, Mapping) else getattr(row, name, None)


def read_patch(path: str | PathLike[str]) -> dict[str, Any]:
    """The checked content of a patch file: model, site, value, sites.

    Raises:
        SinkscopeError: The file does not exist, is not JSON, or has an invalid field.
    """
    content = read_json(path, "make a patch with `sinkscope patch make`", page=_PAGE, kind=KIND, schema=SCHEMA)
    expected = "a patch that `sinkscope patch make` of this version wrote"
    return check(content, _File, Path(path).name, expected, page=_PAGE).model_dump()
