"""A model at one place of each of some texts: norms layer by layer, and the layers whose MLPs build a spike there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
STAGE_OUTLIER = 5.0  # ... and its MLP writes this many times its median on typical text, either in total or along the
# spike (an early stage can be small compared with everything that an MLP writes, but not along that direction)
AGAINST = 0.5  # what an MLP writes points against the spike if the cosine is below minus this
AS_BEFORE = 1.25  # a norm of at most this many times the norm before is as before
STEP_SHARE = 0.05  # a step up or down changes the spike's norm by at least this share of the largest
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
        mlp_norms: Norm of what the MLP adds to the residual stream.
        hidden: Median of the absolute residual stream at some later positions.
        written: What the MLP adds at the place, mean over rows.
        sample: What the MLP adds at some later positions.
        next_input: What enters the next layer; None if it is not kept.
    """

    norms: Float[Tensor, "row pos"]
    other_norms: Float[Tensor, "row pos"]
    massive_dims: list[int]
    residual: Float[Tensor, " d_model"]
    mlp_norms: Float[Tensor, "row pos"]
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
    make up more than half of a typical residual stream and no spike is visible with them included, `norms`,
    `spike_norm` and `typical_norm` leave them out; `whole_norms` never do.

    Attributes:
        target: The model.
        ids: The texts.
        at: The place in each.
        layers: The layers that were read.
        beside: The first token of typical text, which gives the typical norms. None: this is it.
        since: The first layer after which a norm spike counts; what stands out before is another one.
    """

    target: Target
    ids: TokenRows
    at: PerText
    layers: list[LayerReading]
    beside: LayerScan | None = None
    since: int = 0

    @property
    def typical(self) -> LayerScan:
        """Typical text, as far up as this was read."""
        if self.beside is None:
            return self
        return replace(self.beside, layers=self.beside.layers[: len(self.layers)])

    @cached_property
    def whole_norms(self) -> Norms:
        """Norm of every position after each layer."""
        return torch.stack([layer.norms for layer in self.layers])

    @cached_property
    def mlp_norms(self) -> Norms:
        """Norm of what each layer's MLP adds to the residual stream."""
        return torch.stack([layer.mlp_norms for layer in self.layers])

    @cached_property
    def shared_dims(self) -> list[int]:
        """Dimensions massive on all tokens, in their order; none if a spike is visible with them included."""
        if self.beside is not None:
            return self.beside.shared_dims
        if bool(stands_out(self.middle(self.whole_norms), typical_quantiles(self.whole_norms)[1]).any()):
            return []
        massive = []
        for layer in self.layers:
            massive += layer.massive_dims
        return list(dict.fromkeys(massive))

    @cached_property
    def norms(self) -> Norms:
        """Norm of every position after each layer, without shared dimensions."""
        if self.shared_dims:
            return torch.stack([layer.other_norms for layer in self.layers])
        return self.whole_norms

    def at_place(self, norms: Norms) -> Float[Tensor, "layer row"]:
        """Norms at the place of each row."""
        return norms[:, torch.arange(norms.shape[1]), self.at]

    def middle(self, norms: Norms) -> Float[Tensor, " layer"]:
        """Norm at the place, median over rows."""
        return self.at_place(norms).median(1).values

    @cached_property
    def spike_norm(self) -> list[float]:
        """Norm of the place after each layer, without shared dimensions; median over rows."""
        return self.middle(self.norms).tolist()

    @cached_property
    def typical_norm(self) -> list[float]:
        """Median norm of later positions after each layer, without shared dimensions."""
        return typical_quantiles(self.typical.norms)[1].tolist()

    @cached_property
    def ratios(self) -> Float[Tensor, " layer"]:
        """The ratio of the place's norm to the typical one after each layer; 0 before the first that counts."""
        spike, typical = torch.tensor([self.spike_norm, self.typical_norm], dtype=torch.double)
        ratios = spike / typical.clamp(min=SMALLEST_NORM)
        ratios[: self.since] = 0
        return ratios

    @cached_property
    def spike_layers(self) -> list[int]:
        """Layers after which the place's norm stands out; empty if there is no norm spike."""
        return stands_out(self.ratios, torch.ones(1)).nonzero().flatten().tolist()

    @property
    def ratios_by_text(self) -> Float[Tensor, " row"]:
        """The ratio of the place's norm to the typical one of each text, after the layer where it is largest."""
        norms = self.norms[self.ratios.argmax()]
        return self.at_place(norms[None])[0] / norms[:, 1:].median(1).values.clamp(min=SMALLEST_NORM)

    @cached_property
    def stages(self) -> list[int]:
        """Layers whose MLP builds the place's norm (definition of a stage), in order; may be empty."""
        if not self.spike_layers:
            return []
        largest = max(self.spike_layers, key=lambda layer: self.spike_norm[layer])
        direction = self.directions[largest]
        least = STAGE_SHARE * self.spike_norm[largest]
        along = torch.stack([layer.written for layer in self.layers]) @ direction
        samples = torch.stack([layer.sample for layer in self.typical.layers])
        typically_along = (samples @ direction).abs().median(1).values
        builds = (along >= least) & (along > STAGE_OUTLIER * typically_along)
        # A stage may also be orthogonal to the rest of the spike.
        written = self.middle(self.mlp_norms)
        typically = self.typical.mlp_norms[:, :, 1:].flatten(1).median(1).values
        large = (written >= least) & (written > STAGE_OUTLIER * typically)
        stands = builds | large
        stands[: self.since] = False  # they built another spike
        stages = []
        for layer in stands.nonzero().flatten().tolist():
            if not self._points_against(layer):
                stages.append(layer)
        if stages and stages[0] - 1 in self.spike_layers:
            if max(self.spike_norm[stages[0] :]) <= AS_BEFORE * self.spike_norm[stages[0] - 1]:
                return []  # the norm stood out before, and they add next to nothing
        return stages

    def _points_against(self, layer: int) -> bool:
        """Whether a layer's MLP points against the spike that enters it: it removes this spike, or turns it round."""
        if layer - 1 not in self.spike_layers:
            return False
        before = self.spike_after(layer - 1)
        written = self.layers[layer].written
        return float(written @ before / before.norm()) < -AGAINST * float(written.norm())

    def spike_after(self, layer: int) -> Float[Tensor, " d_model"]:
        """The residual stream of the place without shared dimensions."""
        spike = self.layers[layer].residual.clone()
        spike[self.shared_dims] = 0
        return spike

    def largest_dims(self, layer: int) -> Int[Tensor, " d_model"]:
        """The residual dimensions of the place after a layer, the largest first."""
        return self.spike_after(layer).abs().argsort(descending=True, stable=True)

    @property
    def sink_layer(self) -> int | None:
        """The stage that adds most to the norm."""
        written = self.middle(self.mlp_norms).tolist()
        return max(self.stages, key=lambda stage: written[stage], default=None)

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
    def growth(self) -> Float[Tensor, " layer"]:
        """How much each layer raises the place's norm, relative to its largest; 0 at layers that do not count."""
        norms = torch.tensor(self.spike_norm)
        growth = norms.diff(prepend=norms[:1]) / norms[self.since :].max()
        growth[: self.since] = 0
        return growth

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

    def trial(
        self, edits: Sequence[Parts], length: int | None = None, texts: slice = slice(None), **reading: Any
    ) -> Trial:
        """Edits whose effects are read at the places, in some of the texts up to a length, or to the last place.

        If all texts are the same up to the same place, such as a BOS token, up to there one of them is enough.
        """
        if length is None:
            length = self.up_to_place
            begins = self.ids[:, :length]
            if bool((begins == begins[0]).all() & (self.at == self.at[0]).all()):
                texts = slice(1)
        return Trial(
            self.ids[texts, :length],
            edits,
            at=self.at[texts],
            source=self.at[texts],
            without=self.shared_dims,
            entering=self.entering.part(texts, length),
            **reading,
        )

    @cached_property
    def directions(self) -> Float[Tensor, "layer d_model"]:
        """The direction of the spike after each layer: of the residual stream at the places, mean over texts."""
        spikes = torch.stack([self.spike_after(layer) for layer in range(len(self.layers))])
        return spikes / spikes.norm(dim=1, keepdim=True).clamp(min=1e-9)

    def ordinary(self, layer: int, length: int) -> PerText:
        """The position of the beginning of each text whose norm after a layer is nearest to the typical one.

        The first eighth of this beginning is left out, and so is the place.
        """
        positions = torch.arange(length).expand(len(self.ids), -1)
        barred = (positions < length // 8) | (positions == self.at[:, None])
        return ordinary_position(self.norms[layer][:, :length], barred)

    def elsewhere(self, ids: TokenRows, at: PerText, upto: int | None = None) -> LayerScan:
        """The same model at places of other texts, `at` in each; up to a layer, or as far as this was read."""
        if upto is None:
            upto = len(self.layers) - 1
        scan = scan_layers(self.target, ids, whole=True, upto=upto, at=at)
        return replace(scan, beside=self.beside or self, since=self.since)


def typical_quantiles(norms: Norms) -> Float[Tensor, "quantile layer"]:
    """The 5 % quantile, the median and the 95 % quantile of the norm at later positions."""
    return norms[:, :, 1:].flatten(1).quantile(torch.tensor([0.05, 0.5, 0.95]), 1)


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

    def read(reading: LayerReading) -> None:
        scan.layers.append(reading)
        progress("layers", len(scan.layers), target.n_layers)
        if not whole and replace(scan).is_flat:  # a copy, because the scan keeps what it has worked out
            target.stop()

    with target.hooks(*_Passing(target, ids, scan.at, read).hooks()):
        target.forward(ids, upto=upto)
    return scan


class _Passing:
    """What passes through the layers of a model in a pass, read layer by layer."""

    def __init__(self, target: Target, ids: TokenRows, at: PerText, read: Callable[[LayerReading], None]) -> None:
        self.target = target
        self.read = read
        self.keeps = target.skips_layers and ids.numel() <= KEPT_POSITIONS
        self._rows, self._at = torch.arange(len(ids)), at
        self._written: Tensor | None = None  # by the layer that runs
        self._calls: list[Any] = []

    def hooks(self) -> list[Hook]:
        """The hooks that read."""
        hooks: list[Hook] = []
        for number, layer in enumerate(self.target.layers):
            if self.target.has_neurons(number) and not self.target.adapter.adds:
                hooks.append(keep_call(self.target, number, self._calls))
            elif self.target.has_neurons(number):
                hooks += self.target.on_mlp(number, self._added)
                hooks += self.target.part_hooks(number, "post_mlp_norm", "post", on_hidden(self._added))
            hooks.append((layer, "post", on_output(partial(self._done, number))))
        return hooks

    def _by_row(self, tensor: Tensor) -> Float[Tensor, "row pos d_model"]:
        flat = tensor.detach().flatten(0, -2)  # some architectures run rows and positions together
        return rearrange(flat, "(row pos) d_model -> row pos d_model", row=len(self._rows))

    def _added(self, given: Tensor) -> None:
        self._written = self._by_row(given).float() * self.target.adapter.write_factor

    def _done(self, layer: int, output: Any) -> None:
        resid = self._by_row(first_tensor(output))
        written, self._written = self._written, None
        if self._calls:
            written = self._by_row(self._calls.pop().added(first_tensor(output))).float()
        elif written is None:
            written = torch.zeros_like(resid, dtype=torch.float32)  # it has no MLP
        next_input = None
        if self.keeps and layer + 1 < self.target.n_layers:  # a copy, because some layers add to it in place
            next_input = LayerInput(layer + 1, first_tensor(output).detach().clone(), isinstance(output, tuple))
        norms = norms_of(resid)
        if not bool(norms.isfinite().all()):
            raise SinkscopeError(
                f"layer {layer} of {self.target.name} gives infinite or NaN norms in {self.target.dtype}; "
                "try --dtype float32, and check the checkpoint"
            )
        here = resid[self._rows, self._at].float()
        sample = _sample(resid)
        massive = massive_dims(sample, here)
        reading = LayerReading(
            norms=norms.cpu(),
            other_norms=norm_of(resid, massive).cpu(),
            massive_dims=massive,
            residual=here.mean(0).cpu(),
            mlp_norms=written.norm(dim=-1).cpu(),
            hidden=float(sample.abs().median()),
            written=written[self._rows, self._at].mean(0).cpu(),
            sample=_sample(written).cpu().clone(),
            next_input=next_input,
        )
        self.read(reading)
