"""Massive activations, value-state drain and secondary sinks on typical text, with BOS and without."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.errors import UnsupportedError
from sinkscope.measure import Progress, Result, Setup, measurement
from sinkscope.models.target import Target, first_tensor, on_output
from sinkscope.models.text import text_rows
from sinkscope.sinks.first_token.neurons import spike_dims
from sinkscope.sinks.first_token.layer_scan import SPIKE_RATIO
from sinkscope.trace.run import Site, resolve


@dataclass(frozen=True)
class LayerActivations:
    """The residual stream after a layer; values are computed per text and averaged over texts (Sun et al. 2024).

    Attributes:
        layer: Layer number.
        top: The three largest magnitudes.
        median: Median magnitude.
        dims: Residual dimensions with massive activations, largest first: above 100 and 1,000 times the median.
        share: Share of positions with a massive activation. Near 1 it is a massive dimension, not a sink (Owen et al.
            2025).
        first_norm: L2 norm at the first token.
        other_norm: Upper quartile of the norms at later positions, the baseline for high norms.
    """

    layer: int
    top: tuple[float, float, float]
    median: float
    dims: tuple[int, ...]
    share: float
    first_norm: float
    other_norm: float


@dataclass(frozen=True)
class ValueDrain:
    """Norms of the value vectors of a layer, one per kv head (value-state drain, Guo et al. 2024).

    Attributes:
        layer: Layer number.
        sink: Mean norm at the first token.
        others: Mean norm at later tokens.
        ratio: Mean over heads of sink / others; far below 1 means drained. Heads whose values are zero are left out.
            None if all heads are.
    """

    layer: int
    sink: tuple[float, ...]
    others: tuple[float, ...]
    ratio: float | None


@dataclass(frozen=True)
class SinkToken:
    """A token that occurs at positions of high norm.

    Attributes:
        token: The token as text.
        id: Token id.
        high: Number of positions where it has a high norm after some layer.
        seen: Number of positions where it occurs.
        first: Number of these high positions that are first positions.
    """

    token: str
    id: int
    high: int
    seen: int
    first: int


@dataclass(frozen=True)
class SecondarySink:
    """A position other than the first with a high norm (Wong et al. 2025): where it begins and how long it lasts.

    Attributes:
        text: Index of the piece of text.
        position: Position in the piece.
        token: The token there.
        created: First layer after which the norm is high.
        lifetime: Number of consecutive layers with a high norm.
        peak: Largest norm over these layers.
        of_first: Largest ratio to the first token's norm at the same layer.
        cosine: Cosine with the first token's residual stream at the layer where the norm peaks.
    """

    text: int
    position: int
    token: str
    created: int
    lifetime: int
    peak: float
    of_first: float
    cosine: float


@dataclass(frozen=True)
class Condition:
    """One way to begin the texts. `values` is empty if the architecture does not expose value vectors."""

    bos: bool
    layers: tuple[LayerActivations, ...]
    values: tuple[ValueDrain, ...]
    tokens: tuple[SinkToken, ...]
    secondary: tuple[SecondarySink, ...]


@dataclass(frozen=True, kw_only=True)
class MassiveActivations(Result):
    """The result of `massive_activations`: a `Condition` with BOS, one without, or both."""

    page: ClassVar[str] = "measure/massive"
    percent: ClassVar[tuple[str, ...]] = ("share",)
    columns: ClassVar[tuple[str, ...]] = (
        "begins",
        "layer",
        "top_1",
        "median",
        "dims",
        "share",
        "value_ratio",
        "secondary",
    )
    glossary: ClassVar[dict[str, str]] = {
        "begins": "how the texts begin",
        "top_1": "largest magnitude in the residual stream after the layer",
        "top_2": "second largest magnitude",
        "top_3": "third largest magnitude",
        "value_ratio": "norm of the first token's value vectors over that of later ones",
        "secondary": "positions other than the first whose norm is high there",
    }

    texts: int
    length: int
    conditions: tuple[Condition, ...]

    def rows(self) -> list[dict[str, Any]]:
        """One row per condition and layer."""
        return [
            {
                "begins": "BOS" if c.bos else "no BOS",
                "layer": layer.layer,
                **{f"top_{place}": size for place, size in enumerate(layer.top, 1)},
                "median": layer.median,
                "dims": " ".join(map(str, layer.dims)) or None,
                "share": layer.share,
                "value_ratio": c.values[i].ratio if c.values else None,
                "secondary": sum(s.created <= layer.layer < s.created + s.lifetime for s in c.secondary),
            }
            for c in self.conditions
            for i, layer in enumerate(c.layers)
        ]

    def conclusion(self) -> str:
        """The largest activation, beside the median, and whether any is massive; of the first condition."""
        return _massive(self.conditions[0])

    def details(self) -> list[str]:
        """The other condition, and value vectors, tokens and secondary sinks of each."""
        lines = [f"The measurement read {self.texts} texts of {self.length} tokens."]
        for c in self.conditions:
            lines += [_massive(c)] if c is not self.conditions[0] else []
            start = "With BOS" if c.bos else "Without BOS"
            if drained := [(v.ratio, v.layer) for v in c.values if v.ratio is not None]:
                ratio, layer = min(drained)
                lines.append(
                    f"{start}, the first token's value vectors are smallest in layer {layer}: their norm is "
                    f"{ratio:.2g} times that of later ones."
                )
            if c.tokens:
                names = ", ".join(f"{t.token!r} {t.high} of {t.seen}" for t in c.tokens[:6])
                lines.append(f"{start}, these tokens have a high norm: {names}.")
            lines.append(f"{start}, {_secondary(c)}")
        return lines


@measurement(
    group="Sinks",
    figure="sinkscope.figures.first_token:draw_massive_activations",
    command="find-sinks",
    flag="all",
    adds="massive",
    sets={"all_layers": True},
)
def massive_activations(setup: Setup, *, bos: bool | None = None) -> MassiveActivations:
    """Measure massive activations, drained value vectors and secondary sinks in every layer.

    A norm is high if it exceeds three times the upper quartile of later positions, the threshold that `find_sinks` uses
    for a sink.

    Args:
        bos: Whether texts begin with BOS. By default both are measured, where the tokenizer has a BOS token.

    Example:
        sinkscope find-sinks --all --model llama-2-7b
    """
    rows, length = setup.ids.shape
    conditions = [_condition(setup.target, setup.ids, setup.bos is not None, setup.progress)]
    if setup.bos is not None and bos is None:
        ids = text_rows(setup.tokenizer, setup.text, rows, length, None)
        conditions.append(_condition(setup.target, ids, False, setup.progress))
    return MassiveActivations(texts=rows, length=length, conditions=tuple(conditions))


@torch.no_grad()
def _condition(target: Target, ids: Int[Tensor, "row pos"], bos: bool, progress: Progress) -> Condition:
    """One pass; of each layer a few numbers are kept, and per position norm and direction against the first."""
    layers: list[LayerActivations] = []
    norms: list[Tensor] = []
    cosines: list[Tensor] = []
    values: dict[int, ValueDrain] = {}

    def layer_done(out: Any) -> None:
        resid = first_tensor(out).detach().float()
        norm, flat = resid.norm(dim=-1), resid.abs().flatten(1)
        top, mid = flat.topk(3).values.mean(0).tolist(), flat.median(1).values.mean().item()
        dims = spike_dims(resid.abs().amax(1).median(0).values, resid.flatten(0, 1))  # at any position
        share = 0.0 if not dims else float((resid[..., dims].abs() > max(100.0, 1000 * mid)).any(-1).float().mean())
        upper = norm[:, 1:].flatten().quantile(0.75).item()
        first = norm[:, 0].median().item()
        layers.append(LayerActivations(len(layers), (top[0], top[1], top[2]), mid, tuple(dims), share, first, upper))
        norms.append(norm.cpu())
        cosines.append(torch.cosine_similarity(resid, resid[:, :1], dim=-1).cpu())
        progress("with BOS" if bos else "without BOS", len(layers), target.n_layers)

    def value(out: Any, site: Site, layer: int) -> None:
        size = site.cut(out).detach().float().norm(dim=-1)  # row pos kv_head
        sink, others = size[:, 0].mean(0), size[:, 1:].flatten(0, 1).mean(0)
        ratio = (sink / others)[others > 0].mean().item() if bool((others > 0).any()) else None
        values[layer] = ValueDrain(layer, tuple(sink.tolist()), tuple(others.tolist()), ratio)

    pairs: list[tuple[Any, str, Any]] = [(layer, "post", on_output(layer_done)) for layer in target.layers]
    for site, layer in _values(target):
        pairs.append((site.module, "post", on_output(partial(value, site=site, layer=layer))))
    with target.hooks(*pairs):
        target.forward(ids)
    stack = torch.stack(norms)  # layer row pos
    high = stack > SPIKE_RATIO * torch.tensor([one.other_norm for one in layers])[:, None, None]
    return Condition(
        bos=bos,
        layers=tuple(layers),
        values=tuple(values[i] for i in sorted(values)),
        tokens=_tokens(target, ids, high.any(0)),
        secondary=tuple(_secondary_sinks(target, ids, stack, high, torch.stack(cosines))),
    )


def _values(target: Target) -> list[tuple[Site, int]]:
    try:
        return [(s, s.layer) for s in resolve(target, ["blocks.*.attn.hook_v"]) if s.layer is not None]
    except UnsupportedError:
        return []


def _tokens(target: Target, ids: Tensor, high: Tensor) -> tuple[SinkToken, ...]:
    """Strings at positions whose norm is high after some layer, those most often first."""
    seen, count, first = Counter(ids.flatten().tolist()), Counter(ids[high].tolist()), ids[high[:, 0], 0].tolist()
    return tuple(SinkToken(target.tokenizer.decode([i]), i, n, seen[i], first.count(i)) for i, n in count.most_common())


def _secondary_sinks(target: Target, ids: Tensor, norms: Tensor, high: Tensor, cosines: Tensor) -> list[SecondarySink]:
    """Each run of layers with a high norm at a position other than the first."""
    found: list[SecondarySink] = []
    for row, pos in high[:, :, 1:].any(0).nonzero().tolist():
        pos += 1
        for on, run in groupby(range(len(high)), key=lambda layer, at=(row, pos): bool(high[layer, *at])):
            if not on:
                continue
            layers = list(run)
            sizes = norms[layers, row, pos]
            found.append(
                SecondarySink(
                    row,
                    pos,
                    target.tokenizer.decode([int(ids[row, pos])]),
                    layers[0],
                    len(layers),
                    float(sizes.max()),
                    float((sizes / norms[layers, row, 0]).max()),
                    float(cosines[layers[int(sizes.argmax())], row, pos]),
                )
            )
    return found


def _massive(c: Condition) -> str:
    peak = max(c.layers, key=lambda one: one.top[0])
    dims = sorted({d for one in c.layers for d in one.dims})
    share = max(one.share for one in c.layers)
    massive = f"dimensions {', '.join(map(str, dims))} are massive, at {share:.1%} of positions"
    return (
        f"{'With' if c.bos else 'Without'} BOS, the largest activation is {peak.top[0]:.4g} after layer {peak.layer}, "
        f"where the median is {peak.median:.3g}; {massive if dims else 'none is massive'}."
    )


def _secondary(c: Condition) -> str:
    if not c.secondary:
        return "no later position has a high norm, so there are no secondary sinks."
    longest = max(c.secondary, key=lambda s: s.lifetime)
    low, high = min(s.created for s in c.secondary), max(s.created for s in c.secondary)
    where = f"layer {low}" if low == high else f"layers {low} to {high}"
    many = f"{len(c.secondary)} secondary sink{'s' * (len(c.secondary) > 1)}"
    return (
        f"{many} begin{'s' * (len(c.secondary) == 1)} after {where}; the longest lasts {longest.lifetime} layers "
        f"({longest.token!r})."
    )
