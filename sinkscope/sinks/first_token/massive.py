"""Massive activations, value-state drain and secondary sinks on typical text, with BOS and without."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.models.target import Target, first_tensor
from sinkscope.results import Result
from sinkscope.sinks.first_token.around_sink import spike_dims
from sinkscope.sinks.first_token.locate import PIECE, read_whole, setup
from sinkscope.sinks.first_token.walk import SINK_RATIO, Progress
from sinkscope.text import text_rows
from sinkscope.trace.sites import Site, resolve


@dataclass(frozen=True)
class LayerActivations:
    """The residual stream after a layer; means over texts of what is taken within each text (Sun et al. 2024).

    Attributes:
        layer: which.
        top: the three largest magnitudes.
        median: magnitude.
        dims: residual dimensions with massive activations, largest first: above 100 and 1,000 times the median.
        share: of all positions that have one; near 1 it is a massive dimension and no sink (Owen et al. 2025).
        first_norm: L2 at the first token.
        other_norm: upper quartile over later positions, which high norms are told from.
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
    """Norms of value vectors of a layer, one per kv head (value-state drain, Guo et al. 2024).

    Attributes:
        layer: which.
        sink: mean at the first token.
        others: mean at later tokens.
        ratio: mean over heads of sink / others; far below 1: drained.
    """

    layer: int
    sink: tuple[float, ...]
    others: tuple[float, ...]
    ratio: float


@dataclass(frozen=True)
class SinkToken:
    """A token at positions of high norm.

    Attributes:
        token: its string.
        id: of it.
        high: positions where it has a high norm after some layer.
        seen: positions where it stands.
        first: those of `high` that are first positions.
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
        text: number of the piece of text.
        position: in it.
        token: there.
        created: first layer after which the norm is high.
        lifetime: layers in a row.
        peak: largest norm over them.
        of_first: largest norm over the first token's at the same layer.
        cosine: to the first token's residual stream, where the norm peaks.
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
    """One way to begin the texts. `values` is empty where the architecture shows no value vectors."""

    bos: bool
    layers: tuple[LayerActivations, ...]
    values: tuple[ValueDrain, ...]
    tokens: tuple[SinkToken, ...]
    secondary: tuple[SecondarySink, ...]


@dataclass(frozen=True, kw_only=True)
class MassiveActivations(Result):
    """What `massive_activations` returns: a `Condition` with BOS and one without, or one of them."""

    kind: ClassVar[str] = "massive-activations"
    percent: ClassVar[tuple[str, ...]] = ("share",)

    texts: int
    length: int
    conditions: tuple[Condition, ...]

    def rows(self) -> list[dict[str, Any]]:
        """One row per condition and layer."""
        return [
            {
                "bos": c.bos,
                "layer": layer.layer,
                "top_1": layer.top[0],
                "top_2": layer.top[1],
                "top_3": layer.top[2],
                "median": layer.median,
                "dims": " ".join(map(str, layer.dims)) or None,
                "share": layer.share,
                "value_ratio": c.values[i].ratio if c.values else None,
                "secondary": sum(s.created <= layer.layer < s.created + s.lifetime for s in c.secondary),
            }
            for c in self.conditions
            for i, layer in enumerate(c.layers)
        ]

    def summary(self) -> str:
        """What was found, in a few lines per condition."""
        lines = [f"{self.model.name}: {self.texts} texts of {self.length} tokens."]
        for c in self.conditions:
            peak = max(c.layers, key=lambda one: one.top[0])
            dims = sorted({d for one in c.layers for d in one.dims})
            share = max(one.share for one in c.layers)
            massive = f"massive in dimensions {', '.join(map(str, dims))}, at {share:.1%} of positions"
            massive = massive if dims else "none massive"
            lines.append(
                f"{'With' if c.bos else 'Without'} BOS: largest activation {peak.top[0]:.4g} after layer {peak.layer}, "
                f"median {peak.median:.3g}; {massive}."
            )
            if c.values:
                low = min(c.values, key=lambda v: v.ratio)
                lines.append(
                    f"  Value vectors of the first token: least in layer {low.layer}, {low.ratio:.2g} x others'."
                )
            if c.tokens:
                names = ", ".join(f"{t.token!r} {t.high} of {t.seen}" for t in c.tokens[:6])
                lines.append(f"  High norms at: {names}.")
            lines.append(f"  {_secondary(c)}")
        return "\n".join(lines)


def massive_activations(
    model: object = None,
    *,
    tokenizer: Any = None,
    bos: bool | None = None,
    text: str | Path | None = None,
    texts: int = 4,
    seed: int = 0,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> MassiveActivations:
    """What high norms look like from inside, for all layers, on pieces of 64 tokens of typical text.

    A norm is high above three times the upper quartile of later positions, the bar that `find_sinks` has for a sink.

    Args:
        model: see `find_sinks`.
        tokenizer: for live models that carry none.
        bos: begin texts with BOS; None: with and without, where the tokenizer has one.
        text: file of typical text; None: the neutral text that ships.
        texts: pieces of it.
        seed: goes into the provenance; nothing is drawn.
        revision: of a hub id.
        dtype: of the weights of a model given by name.
        device: for models given by name.
        trust_remote_code: run code that comes with the checkpoint.
        progress: called as `progress(what, done, total)`.

    Raises:
        SinkscopeError: bad input; the message is one line and says what to do.
    """
    if texts < 1:
        raise SinkscopeError(f"texts {texts}: at least one piece of text is needed; give 1 or more")
    made = read_whole(
        setup(
            model,
            tokenizer=tokenizer,
            bos=bos,
            text=text,
            texts=texts,
            seed=seed,
            revision=revision,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
        )
    )
    target = made.target
    length = min(PIECE, target.max_positions or PIECE)
    starts = [made.bos] if made.bos is None or bos is not None else [made.bos, None]
    found: list[Condition] = []
    for start in starts:
        ids = text_rows(target.tokenizer, made.text, texts, length, start)
        found.append(_condition(target, ids, start is not None, progress))
    return MassiveActivations(
        model=made.info(),
        settings={
            "bos": bos,
            "text": None if text is None else Path(text).name,
            "texts": texts,
            "seed": seed,
            "revision": revision,
        },
        provenance=made.provenance(),
        texts=len(made.ids),
        length=length,
        conditions=tuple(found),
    )


@torch.no_grad()
def _condition(target: Target, ids: Int[Tensor, "row pos"], bos: bool, progress: Progress | None) -> Condition:
    """One pass; of each layer a few numbers are kept, and per position norm and direction against the first."""
    layers: list[LayerActivations] = []
    norms: list[Tensor] = []
    cosines: list[Tensor] = []
    values: dict[int, ValueDrain] = {}

    def layer_done(_m: object, _a: object, _k: object, out: Any) -> None:
        resid = first_tensor(out).detach().float()
        norm, flat = resid.norm(dim=-1), resid.abs().flatten(1)
        top, mid = flat.topk(3).values.mean(0).tolist(), flat.median(1).values.mean().item()
        dims = spike_dims(resid.abs().amax(1).median(0).values, resid.flatten(0, 1))  # at whichever position
        share = 0.0 if not dims else float((resid[..., dims].abs() > max(100.0, 1000 * mid)).any(-1).float().mean())
        upper = norm[:, 1:].flatten().quantile(0.75).item()
        first = norm[:, 0].median().item()
        layers.append(LayerActivations(len(layers), (top[0], top[1], top[2]), mid, tuple(dims), share, first, upper))
        norms.append(norm.cpu())
        cosines.append(torch.cosine_similarity(resid, resid[:, :1], dim=-1).cpu())
        if progress is not None:
            progress("with BOS" if bos else "without BOS", len(layers), target.n_layers)

    def take(site: Site, layer: int) -> Any:
        def value(_m: object, _a: object, _k: object, out: Any) -> None:
            size = site.cut(out).detach().float().norm(dim=-1)  # row pos kv_head
            sink, others = size[:, 0].mean(0), size[:, 1:].flatten(0, 1).mean(0)
            ratio = (sink / others).mean().item()
            values[layer] = ValueDrain(layer, tuple(sink.tolist()), tuple(others.tolist()), ratio)

        return value

    pairs = [(layer, "post", layer_done) for layer in target.layers]
    pairs += [
        (s.module, "post", take(s, s.layer)) for s in _values(target) if s.module is not None and s.layer is not None
    ]
    with target.hooks(*pairs):
        target.forward(ids)
    stack = torch.stack(norms)  # layer row pos
    high = stack > SINK_RATIO * torch.tensor([one.other_norm for one in layers])[:, None, None]
    return Condition(
        bos=bos,
        layers=tuple(layers),
        values=tuple(values[i] for i in sorted(values)),
        tokens=_tokens(target, ids, high.any(0)),
        secondary=tuple(_secondary_sinks(target, ids, stack, high, torch.stack(cosines))),
    )


def _values(target: Target) -> list[Site]:
    try:
        return resolve(target, ["blocks.*.attn.hook_v"])
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
        on = [*high[:, row, pos].tolist(), False]
        start = None
        for layer, now in enumerate(on):
            if now and start is None:
                start = layer
            elif not now and start is not None:
                run = norms[start:layer, row, pos]
                at = start + int(run.argmax())
                of_first = float((run / norms[start:layer, row, 0]).max())
                found.append(
                    SecondarySink(
                        row,
                        pos,
                        target.tokenizer.decode([int(ids[row, pos])]),
                        start,
                        layer - start,
                        float(run.max()),
                        of_first,
                        float(cosines[at, row, pos]),
                    )
                )
                start = None
    return found


def _secondary(c: Condition) -> str:
    if not c.secondary:
        return "No secondary sinks: no later position has a high norm."
    longest = max(c.secondary, key=lambda s: s.lifetime)
    low, high = min(s.created for s in c.secondary), max(s.created for s in c.secondary)
    where = f"layer {low}" if low == high else f"layers {low} to {high}"
    many = f"{len(c.secondary)} secondary sink{'s' * (len(c.secondary) > 1)}"
    return f"{many}, created after {where}; the longest lasts {longest.lifetime} layers ({longest.token!r})."
