"""A model at one place of each of some texts: norms layer by layer, and the layers whose MLPs build a spike there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.files.progress import Progress, silent
from sinkscope.models.hooks import Hook, first_tensor, on_hidden, on_output
from sinkscope.models.modules.layer_call import keep_call
from sinkscope.models.norms import norm_of, norms_of
from sinkscope.models.target import KEPT_POSITIONS, Entering, LayerInput, Target
from sinkscope.results.parts import Parts
from sinkscope.sinks.find.places import stands_out
from sinkscope.sinks.removal.effects import Trial
from sinkscope.sinks.tokens import Mask, TokenRows

# Medians are used instead of high quantiles: some later positions are sinks, too (delimiters; without BOS the first
# tokens, as long as they belong to one cluster), and must not hide the one that is looked at.
STAGE_SHARE = 0.01  # a stage adds at least this share of the spike's largest norm (definition of a stage)
STAGE_OUTLIER = 5.0  # ... and its MLP writes this many times its median on typical text along the spike
AS_BEFORE = 1.25  # a norm of at most this many times the norm before is as before
SMALLEST_NORM = 1e-9  # lower limit of a typical norm: in a hand-made model it can be 0, and it is a divisor
SAMPLE_POSITIONS = 64  # positions of typical text whose activations are kept
MASSIVE_RATIO = 30.0  # a dimension is massive on all tokens if it is this many times the median dimension


Norms = Float[Tensor, "layer row pos"]
"""Norm of every position after each layer."""
PerText = Int[Tensor, " row"]
"""A position of each text."""


@dataclass(frozen=True)
class LayerReading:
    """What text shows at one layer. Norms are L2; the place is one position of each row, such as the first token's.

    Attributes:
        norms: Norm of the residual stream after the layer.
        other_norms: The same norms without `massive_dims`.
        massive_dims: Residual dimensions that are massive on all tokens alike.
        residual: Residual stream of the place, mean over rows.
        hidden: Median of the absolute residual stream at some later positions.
        written: What the MLP adds at the place, mean over rows.
        sample: What the MLP adds at some later positions.
        next_input: What enters the next layer; None if it is not kept.
    """

    norms: Float[Tensor, "row pos"]
    other_norms: Float[Tensor, "row pos"]
    massive_dims: list[int]
    residual: Float[Tensor, " d_model"]
    hidden: float
    written: Float[Tensor, " d_model"]
    sample: Float[Tensor, "place d_model"]
    next_input: LayerInput | None = None


def ordinary_position(norms: Float[Tensor, "text pos"], barred: Mask) -> Int[Tensor, " text"]:
    """The position of each text that is not barred whose norm is nearest to the typical one of the text."""
    distance = (norms / norms[:, 1:].median(1, keepdim=True).values).log().abs()
    return distance.masked_fill(barred, torch.inf).argmin(1)


@dataclass(frozen=True, eq=False)
class LayerScan:
    """A model at a place of each of some texts, read in one pass over the layers, from the first upward.

    A dimension that is massive on all tokens alike (Owen et al. 2025) hides the spike of one token. If such dimensions
    make up more than half of a typical residual stream and no spike is visible with them included, all norms leave them
    out.

    Attributes:
        target: The model.
        ids: The texts.
        at: The place in each.
        layers: The layers that were read.
        beside: The first token of typical text, which gives the typical norms. None: this is it.
    """

    target: Target
    ids: TokenRows
    at: PerText
    layers: list[LayerReading]
    beside: LayerScan | None = None

    @property
    def typical(self) -> LayerScan:
        """Typical text, which may have been read farther up."""
        return self.beside or self

    @cached_property
    def shared_dims(self) -> list[int]:
        """Dimensions massive on all tokens, in their order; none if a spike is visible with them included."""
        if self.beside is not None:
            return self.beside.shared_dims
        whole = torch.stack([layer.norms for layer in self.layers])
        if bool(stands_out(self.middle(whole), typical_norms(whole)).any()):
            return []
        massive = []
        for layer in self.layers:
            massive += layer.massive_dims
        return list(dict.fromkeys(massive))

    @cached_property
    def norms(self) -> Norms:
        """Norm of every position after each layer."""
        if self.shared_dims:
            return torch.stack([layer.other_norms for layer in self.layers])
        return torch.stack([layer.norms for layer in self.layers])

    def middle(self, norms: Norms) -> Float[Tensor, " layer"]:
        """Norm at the place, median over rows."""
        return norms[:, torch.arange(len(self.at)), self.at].median(1).values

    @cached_property
    def spike_norm(self) -> list[float]:
        """Norm of the place after each layer; median over rows."""
        return self.middle(self.norms).tolist()

    @cached_property
    def typical_norm(self) -> list[float]:
        """Median norm of later positions after each layer."""
        return typical_norms(self.typical.norms[: len(self.layers)]).tolist()

    @cached_property
    def ratios(self) -> Float[Tensor, " layer"]:
        """The ratio of the place's norm to the typical one after each layer."""
        spike, typical = torch.tensor([self.spike_norm, self.typical_norm], dtype=torch.double)
        return spike / typical.clamp(min=SMALLEST_NORM)

    @cached_property
    def spike_layers(self) -> list[int]:
        """Layers after which the place's norm stands out; empty if there is no norm spike."""
        return stands_out(self.ratios, torch.ones(1)).nonzero().flatten().tolist()

    @property
    def peak(self) -> int:
        """The layer after which the norm is largest, of those where it stands out."""
        return max(self.spike_layers, key=lambda layer: self.spike_norm[layer])

    @cached_property
    def along(self) -> Float[Tensor, " layer"]:
        """What each MLP adds at the place along the direction of the spike at its peak."""
        return torch.stack([layer.written for layer in self.layers]) @ self.directions[self.peak]

    @cached_property
    def stages(self) -> list[int]:
        """Layers whose MLP builds the place's norm (definition of a stage), in order; may be empty."""
        if not self.spike_layers:
            return []
        samples = torch.stack([layer.sample for layer in self.typical.layers[: len(self.layers)]])
        typically = (samples @ self.directions[self.peak]).abs().median(1).values
        builds = (self.along >= STAGE_SHARE * self.spike_norm[self.peak]) & (self.along > STAGE_OUTLIER * typically)
        stages = builds.nonzero().flatten().tolist()
        if stages and stages[0] - 1 in self.spike_layers:
            if max(self.spike_norm[stages[0] :]) <= AS_BEFORE * self.spike_norm[stages[0] - 1]:
                return []  # the norm stood out before, and they add next to nothing
        return stages

    def spike_after(self, layer: int) -> Float[Tensor, " d_model"]:
        """The residual stream of the place without shared dimensions."""
        spike = self.layers[layer].residual.clone()
        spike[self.shared_dims] = 0
        return spike

    @cached_property
    def directions(self) -> Float[Tensor, "layer d_model"]:
        """The direction of the spike after each layer: of the residual stream at the places, mean over texts."""
        spikes = torch.stack([self.spike_after(layer) for layer in range(len(self.layers))])
        return spikes / spikes.norm(dim=1, keepdim=True).clamp(min=SMALLEST_NORM)

    @property
    def sink_layer(self) -> int | None:
        """The stage that adds most to the norm."""
        return max(self.stages, key=lambda stage: float(self.along[stage]), default=None)

    @property
    def layer(self) -> int:
        """The sink layer of a model that has one."""
        assert self.sink_layer is not None
        return self.sink_layer

    @cached_property
    def entering(self) -> Entering:
        """What entered each layer but the first; nothing if passes over this model cannot begin at a layer."""
        inputs = [layer.next_input for layer in self.layers if layer.next_input is not None]
        return Entering({one.layer: one for one in inputs})

    @property
    def norm_before(self) -> float:
        """The place's norm before its first stage, if it stands out there already; else 0."""
        if not self.stages or self.stages[0] - 1 not in self.spike_layers:
            return 0.0
        return self.spike_norm[self.stages[0] - 1]

    @property
    def is_flat(self) -> bool:
        """Whether no new stage appeared for a third of the layers (at least three) after one was found."""
        if not self.stages:
            return False
        since = len(self.layers) - 1 - self.stages[-1]
        return since >= max(3, math.ceil(self.target.n_layers / 3))

    # --- the place under edits, and others ---

    @property
    def up_to_place(self) -> int:
        """The number of tokens up to the last of the places."""
        return int(self.at.max()) + 1

    def trial(self, edits: Sequence[Parts], **reading: Any) -> Trial:
        """Edits whose effects are read at the places.

        If all texts are the same up to the same place, such as a BOS token, one of them is enough.
        """
        ids, texts = self.ids[:, : self.up_to_place], slice(None)
        if bool((ids == ids[0]).all() & (self.at == self.at[0]).all()):
            texts = slice(1)
        at, entering = self.at[texts], self.entering.part(texts, self.up_to_place)
        return Trial(ids[texts], edits, at=at, source=at, without=self.shared_dims, entering=entering, **reading)

    def ordinary(self, layer: int, length: int) -> PerText:
        """The position of the beginning of each text whose norm after a layer is nearest to the typical one.

        The first eighth of this beginning is left out, and so is the place.
        """
        positions = torch.arange(length).expand(len(self.ids), -1)
        barred = (positions < length // 8) | (positions == self.at[:, None])
        return ordinary_position(self.norms[layer][:, :length], barred)

    def elsewhere(self, ids: TokenRows, at: PerText) -> LayerScan:
        """The same model at places of other texts, `at` in each, as far as this was read."""
        scan = scan_layers(self.target, ids, whole=True, upto=len(self.layers) - 1, at=at)
        return replace(scan, beside=self.typical)


def typical_norms(norms: Norms) -> Float[Tensor, " layer"]:
    """The median norm at later positions after each layer."""
    return norms[:, :, 1:].flatten(1).quantile(0.5, 1)


def _sample(values: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "place d_model"]:
    """Some later positions."""
    return values[:, 1:].flatten(0, 1)[:SAMPLE_POSITIONS].float()


def massive_dims(sample: Float[Tensor, "place d_model"], place: Float[Tensor, "row d_model"]) -> list[int]:
    """Dimensions massive on all tokens alike, if they make up more than half of a typical residual stream.

    A dimension in which the place itself stands out does not count, because leaving it out would hide a spike.

    Args:
        sample: Residual stream at some later positions.
        place: That of the place of each row.
    """
    size = sample.abs().median(0).values
    massive = (size > MASSIVE_RATIO * size.median()) & ~stands_out(place.abs().median(0).values, size)
    if size[massive].square().sum() > size[~massive].square().sum():
        return massive.nonzero().flatten().tolist()
    return []


@torch.no_grad()
def scan_layers(
    target: Target,
    ids: TokenRows,
    *,
    whole: bool,
    upto: int | None = None,
    progress: Progress = silent,
    at: PerText | int = 0,
) -> LayerScan:
    """Run `ids` upward, layer by layer, and stop once the norm at the place has stayed flat (unless `whole`).

    Args:
        target: The model. Layers of a streamed model are read when they are reached.
        ids: The texts.
        whole: Read every layer.
        upto: The last layer to read. None: no limit.
        progress: Called after each layer.
        at: The place in each row, or in all.

    Raises:
        SinkscopeError: A layer gives infinite or NaN norms.
    """
    scan = LayerScan(target, ids, torch.as_tensor(at).expand(len(ids)), [])
    added: list[Tensor] = []  # by the MLP of the layer that runs, before and after a norm
    calls: list[Any] = []

    def take(given: Tensor) -> None:
        added.append(given.detach().float() * target.adapter.write_factor)

    def done(layer: int, output: Any) -> None:
        written = torch.zeros_like(first_tensor(output))  # it may have no MLP
        if calls:
            written = calls.pop().added(first_tensor(output))
        elif added:
            written = added[-1]
        added.clear()
        scan.layers.append(_reading(scan, layer, output, written))
        progress("layers", len(scan.layers), target.n_layers)
        if not whole and replace(scan).is_flat:  # a copy, because the scan keeps what it has worked out
            target.stop()

    hooks: list[Hook] = []
    for number, layer in enumerate(target.layers):
        if target.has_neurons(number) and not target.adapter.adds:
            hooks.append(keep_call(target, number, calls))
        elif target.has_neurons(number):
            hooks += target.on_mlp(number, take)
            hooks += target.part_hooks(number, "post_mlp_norm", "post", on_hidden(take))
        hooks.append((layer, "post", on_output(partial(done, number))))
    with target.hooks(*hooks):
        target.forward(ids, upto=upto)
    return scan


def _reading(scan: LayerScan, layer: int, output: Any, written: Tensor) -> LayerReading:
    """What the texts of a scan show at a layer, from its output and what its MLP has written."""
    target = scan.target
    resid = _by_row(scan, first_tensor(output))
    written = _by_row(scan, written).float()
    next_input = None
    if target.skips_layers and scan.ids.numel() <= KEPT_POSITIONS and layer + 1 < target.n_layers:
        hidden = first_tensor(output).detach().clone()  # a copy, because some layers add to it in place
        next_input = LayerInput(layer + 1, hidden, isinstance(output, tuple))
    norms = norms_of(resid)
    if not bool(norms.isfinite().all()):
        raise SinkscopeError(
            f"layer {layer} of {target.name} gives infinite or NaN norms in {target.dtype}; "
            "try --dtype float32, and check the checkpoint"
        )
    place = torch.arange(len(resid)), scan.at
    here, sample = resid[place].float(), _sample(resid)
    massive = massive_dims(sample, here)
    return LayerReading(
        norms=norms.cpu(),
        other_norms=norm_of(resid, massive).cpu(),
        massive_dims=massive,
        residual=here.mean(0).cpu(),
        hidden=float(sample.abs().median()),
        written=written[place].mean(0).cpu(),
        sample=_sample(written).cpu().clone(),
        next_input=next_input,
    )


def _by_row(scan: LayerScan, tensor: Tensor) -> Float[Tensor, "row pos d_model"]:
    flat = tensor.detach().flatten(0, -2)  # some architectures run rows and positions together
    return rearrange(flat, "(row pos) d_model -> row pos d_model", row=len(scan.ids))
