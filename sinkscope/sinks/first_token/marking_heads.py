"""Which attention heads mark the first token (Yona et al. 2025, section 4.3).

Heads at the first token are replaced by their mean output at later positions. The first token sees nothing but itself,
so each pass consists of single tokens and each of its rows can replace different heads: all heads of all layers for
many first tokens take only a few batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.errors import UnsupportedError
from sinkscope.files.console import Progress, silent
from sinkscope.files.notation import head_names, neuron_names
from sinkscope.files.tables import percent
from sinkscope.measure import Positive, Result, Setup, measurement
from sinkscope.models.target import Target, on_input
from sinkscope.sinks.first_token.layer_view import columns, flat_number, view_layer
from sinkscope.sinks.first_token.result import CONTROL_DRAWS, Neuron
from sinkscope.sinks.first_token.sets import causal_neurons
from sinkscope.sinks.tokens import first_tokens
from sinkscope.trace.attention import attention_rows, queries_and_keys
from sinkscope.trace.run import trace

_HELD = 1 << 26  # largest number of values of one sink-layer activation in memory


@dataclass(frozen=True)
class Replacement:
    """A model whose heads' outputs can be replaced by their means over later positions of typical text.

    Attributes:
        target: The model.
        sink_layer: Layer of the sink neurons. Heads in this layer and below can be replaced.
        means: Mean `hook_z` of every head of layers 0 to the sink layer.
        flat: The sink neurons, numbered as in a `LayerView`. If there are none, the whole MLP stands for them.
        cols: What each of them writes when its `hook_post` is 1.
        batch_size: Rows per pass. None: as many as a bounded memory allows.
        progress: Called with the number of rows done.
    """

    target: Target
    sink_layer: int
    means: Float[Tensor, "layer head d_head"]
    flat: Int[Tensor, " neuron"]
    cols: Float[Tensor, "neuron d_model"]
    batch_size: int | None = None
    progress: Progress = silent

    @classmethod
    def of(
        cls,
        target: Target,
        sink_layer: int,
        neurons: Sequence[Neuron],
        ids: Int[Tensor, "row pos"],
        batch_size: int | None = None,
        progress: Progress = silent,
    ) -> Replacement:
        """Built with means over the later positions of `ids`; position 0 holds the first token."""
        sites = [f"blocks.{i}.attn.hook_z" for i in range(sink_layer + 1)]
        got = trace(target, ids, sites, lambda z: z[:, 1:].float().mean(1))
        here = [n for n in neurons if n.layer == sink_layer]
        flat = torch.tensor([flat_number(target, n.layer, n.expert, n.neuron) for n in here], dtype=torch.long)
        with target.loaded(sink_layer):
            cols = columns(target, sink_layer, flat).cpu() if here else torch.zeros(0, target.d_model)
        means = torch.stack([got[site].mean(0) for site in sites])
        return cls(target, sink_layer, means, flat, cols, batch_size, progress)

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and heads that can be replaced."""
        return self.means.shape[0], self.means.shape[1]

    def at(self, layer: int, chosen: Bool[Tensor, "*n head"]) -> Bool[Tensor, "*n layer head"]:
        """Edits that replace heads of one layer."""
        out = torch.zeros(*chosen.shape[:-1], *self.shape, dtype=torch.bool)
        out[..., layer, :] = chosen
        return out

    def written(
        self,
        ids: Int[Tensor, "row pos"],
        replaced: Bool[Tensor, "row layer head"],
        later: bool = False,
    ) -> Float[Tensor, "row seen d_model"]:
        """What the sink neurons write together when heads are replaced.

        Args:
            ids: The sequences.
            replaced: For each row, the heads that give their mean instead of their output.
            later: Replace and read at all positions except the first, instead of at the first only.
        """
        target, found = self.target, []
        experts = max(1, target.n_experts(self.sink_layer))
        fitting = _HELD // (target.d_mlp * experts) if self.batch_size is None else self.batch_size
        step = max(1, fitting // ids.shape[1])
        where = torch.zeros(ids.shape[1], dtype=torch.bool)
        where[1:] = later
        where[:1] = not later
        for start in range(0, len(ids), step):
            rows, edits = ids[start : start + step], replaced[start : start + step]
            with target.hooks(*replacing(target, self.means, edits, where)):
                view = view_layer(target, self.sink_layer, rows, where.expand(len(rows), -1))
            flat = self.flat.to(view.post.device)
            out = view.post[:, flat].cpu() @ self.cols if len(flat) else view.mlp.cpu()
            found.append(out.unflatten(0, (len(rows), -1)))
            self.progress("heads", min(start + step, len(ids)), len(ids))
        return torch.cat(found)


def replacing(
    target: Target,
    means: Float[Tensor, "layer head d_head"],
    edits: Bool[Tensor, "row layer head"],
    where: Bool[Tensor, " pos"],
) -> list[tuple[Any, str, Any]]:
    """Hooks that replace the heads of `edits` by their means at the positions of `where`, for a pass of these rows.

    Every measurement that removes heads uses these hooks, so that removal means the same everywhere.
    """

    def hook(layer: int) -> Any:
        def replace(z: Tensor) -> Tensor:
            heads = z.reshape(len(edits), len(where), means.shape[1], -1)
            chosen = edits[:, layer, None, :, None] & where[None, :, None, None]
            return torch.where(chosen.to(z.device), means[layer].to(z.device, z.dtype), heads).reshape(z.shape)

        return on_input(replace)

    used = edits.any(2).any(0).nonzero().flatten().tolist()
    return [(target.sub(i, target.adapter.o), "pre", hook(i)) for i in used]


@dataclass(frozen=True)
class Geometry:
    """Queries and keys of the heads of a layer at later positions of typical text; NaN if there is no such pair.

    Attributes:
        own: Cosine of query and key at the same position; rotary does not change it.
        same: Cosine of a query and an earlier key of the same token, before and after rotary.
        other: Cosine of a query and an earlier key of another token, before and after rotary.
        attention: Attention of a position to itself, relative to uniform attention; 1 means no preference.
    """

    own: Float[Tensor, "head token"]
    same: tuple[Float[Tensor, " head"], Float[Tensor, " head"]]
    other: tuple[Float[Tensor, " head"], Float[Tensor, " head"]]
    attention: Float[Tensor, "head token"]


@torch.no_grad()
def geometry(
    target: Target, ids: Int[Tensor, "row pos"], layers: list[int]
) -> tuple[dict[int, Geometry], Int[Tensor, " token"]]:
    """The geometry of each layer, and the tokens (later positions of `ids`, row by row) behind `own` and `attention`.

    Cosines are NaN if queries and keys are not available (see `queries_and_keys`).
    """
    later = ids[:, 1:]
    below = torch.ones(later.shape[1], later.shape[1], dtype=torch.bool).tril(-1)
    equal = (later[:, :, None] == later[:, None, :]) & below
    unequal = (later[:, :, None] != later[:, None, :]) & below
    cosines: dict[tuple[int, bool], tuple[Tensor, Tensor, Tensor]] = {}

    def see(layer: int, rotated: bool, query: Tensor, key: Tensor) -> None:
        unit_q = torch.nn.functional.normalize(query[:, :, 1:].float(), dim=-1)
        unit_k = torch.nn.functional.normalize(key[:, :, 1:].float(), dim=-1)
        unit_k = unit_k.repeat_interleave(query.shape[1] // key.shape[1], 1)
        cos = (unit_q @ unit_k.transpose(-1, -2)).transpose(0, 1).cpu()  # head row query key
        own = cos.diagonal(dim1=-2, dim2=-1).flatten(1)
        cosines[layer, rotated] = (own, cos[:, equal].mean(1), cos[:, unequal].mean(1))

    selfs: dict[int, list[Tensor]] = {i: [] for i in layers}

    def look(layer: int, first: int, probs: Tensor) -> None:
        places = torch.arange(probs.shape[2], device=probs.device)
        own = probs[:, :, places, first + places] * (first + 1 + places)
        selfs[layer].append(own.cpu())

    try:
        with queries_and_keys(target, see, layers):
            target.forward(ids, upto=max(layers))
    except UnsupportedError:
        nothing = torch.full((target.n_heads,), torch.nan)
        missing = (nothing[:, None].expand(-1, later.numel()), nothing, nothing)
        cosines = {(i, rotated): missing for i in layers for rotated in (False, True)}
    with attention_rows(target, look, layers=layers):
        target.forward(ids, upto=max(layers))
    found = {}
    for i in layers:
        (own, same, other), (_, same_after, other_after) = cosines[i, False], cosines[i, True]
        ratio = torch.cat(selfs[i], 2)[:, :, 1:].transpose(0, 1).flatten(1)
        found[i] = Geometry(own, (same, same_after), (other, other_after), ratio)
    return found, later.flatten()


HALF = 0.5  # share of the sink neurons' activation from which the sink counts as present


@dataclass(frozen=True)
class Head:
    """A head of the first layers. Drops are shares of the sink neurons' activation at a first token.

    Attributes:
        layer: Layer of the head.
        head: Query head.
        serves: Number of first tokens whose smallest sufficient set of heads contains this head.
        drop: Share of the activation lost when this head's output is replaced by its mean over later positions,
            averaged over the first tokens.
        largest_drop: The drop at the first token where it is largest.
        bos_drop: The drop at BOS. None without BOS.
        alone: Share of the activation kept when all other heads of the layer are replaced, largest over first tokens.
            None outside the marking layer.
        control: Change when the replacement is made at later positions instead (95 % quantile over them). None outside
            the marking layer.
        self_attention: Attention of later positions to themselves, relative to uniform attention.
        served_self_attention: The same at tokens that it serves. None if the text contains none.
        self_cosine: Cosine of query and key at the same position (rotary does not change it).
        served_self_cosine: The same cosine at tokens that it serves.
        same_cosine: Cosine of a query and an earlier key of the same token, before rotary.
        same_cosine_rotary: The same cosine after rotary.
        other_cosine: Cosine of a query and an earlier key of another token, before rotary.
        other_cosine_rotary: The same cosine after rotary.
    """

    layer: int
    head: int
    serves: int
    drop: float
    largest_drop: float
    bos_drop: float | None
    alone: float | None
    control: float | None
    self_attention: float | None
    served_self_attention: float | None
    self_cosine: float | None
    served_self_cosine: float | None
    same_cosine: float | None
    same_cosine_rotary: float | None
    other_cosine: float | None
    other_cosine_rotary: float | None


@dataclass(frozen=True)
class First:
    """A token that was put first, and the heads that mark it.

    Attributes:
        token: The token as text.
        id: Token id.
        activation: Activation of the sink neurons, relative to that at the first token of typical text.
        fires: Whether that activation is at least half.
        layer_drop: Share lost with all heads of the marking layer replaced. None if the token does not fire or no layer
            marks.
        heads: The smallest set of heads of that layer that keeps half of the activation when all others are replaced.
            Empty where `layer_drop` is None.
        kept: Share of the activation that these heads keep.
        set_drop: Share lost when only these heads are replaced.
        control_drop: Largest loss when the same number of other heads is replaced, over 20 draws. None if there are too
            few.
        drops: Share lost with each head of the marking layer replaced.
    """

    token: str
    id: int
    activation: float
    fires: bool
    layer_drop: float | None = None
    heads: tuple[int, ...] = ()
    kept: float | None = None
    set_drop: float | None = None
    control_drop: float | None = None
    drops: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MarkingHeads(Result):
    """Which heads mark the first token.

    Attributes:
        sink_layer: Layer of the marked neurons. None if the model has no sink; all other fields are then empty.
        neurons: The sink neurons whose activation is measured; in a mixture, (expert, neuron). If empty, no single
            neuron is causal and the whole MLP of the sink layer stands for them.
        answer: "single head": for most first tokens one head suffices; "several heads": it takes more than one;
            "several layers": the heads of no single layer make the mark, but those of several layers together do; "no
            head": heads do not make the mark; "no token fires": none of the tokens makes a sink when it stands first;
            "no sink".
        marking_layer: The layer whose heads make the mark. None if there is none.
        layer_drops: Share lost with all heads of a layer replaced, for each layer up to the sink layer (median over
            first tokens).
        all_drop: Share lost with all heads of all these layers replaced.
        single_share: Among the first tokens that fire, the share for which one head suffices.
        heads: All heads of layers 0 to the sink layer, marking heads first.
        first_tokens: All tokens that were put first.
    """

    kind: ClassVar[str] = "heads"
    percent: ClassVar[tuple[str, ...]] = ("drop", "largest_drop", "bos_drop", "alone", "control")
    table_of: ClassVar[str] = "heads"
    table_rows: ClassVar[int] = 16
    columns: ClassVar[tuple[str, ...]] = ("head", "serves", "drop", "bos_drop", "alone", "control", "self_attention")

    sink_layer: int | None
    neurons: tuple[tuple[int, ...], ...]
    answer: str
    marking_layer: int | None = None
    layer_drops: tuple[float, ...] = ()
    all_drop: float | None = None
    single_share: float | None = None
    heads: tuple[Head, ...] = ()
    first_tokens: tuple[First, ...] = ()

    def conclusion(self) -> str:
        """Which heads mark the first token, and what other heads lose."""
        if self.sink_layer is None:
            return "The model has no attention sink, so no head marks the first token for one."
        said = {
            "several layers": "No layer's heads mark the first token alone; those of several layers together do.",
            "no head": "No head marks the first token: attention does not make the mark.",
            "no token fires": "None of the tokens given makes a sink when it stands first; give other tokens.",
        }
        if self.marking_layer is None:
            return said[self.answer]
        names = head_names([h for h in self.heads if h.serves])
        fire = [f for f in self.first_tokens if f.fires]
        lost = [f.set_drop for f in fire if f.set_drop is not None]
        chance = [f.control_drop for f in fire if f.control_drop is not None]
        beside = ""
        if lost and chance:
            beside = (
                f": replacing them takes away {percent(median_high(lost))} of the mark, and replacing as many other "
                f"heads takes away at most {percent(median_high(chance))} (median over tokens, "
                f"largest of {CONTROL_DRAWS} draws)"
            )
        return f"The heads {names} mark the first token{beside}."

    def details(self) -> list[str]:
        """The neurons, the layers, and how many heads a token needs."""
        if self.sink_layer is None:
            return []
        fire = [f for f in self.first_tokens if f.fires]
        names = neuron_names([(self.sink_layer, *n) for n in self.neurons])
        lines = [
            f"The mark is read at the sink neurons {names}."
            if names
            else f"No single neuron is causal, so the mark is read at the whole MLP of layer {self.sink_layer}.",
            f"{len(fire)} of {len(self.first_tokens)} tokens make the sink fire when they stand first.",
        ]
        if self.layer_drops:
            drops = ", ".join(f"layer {i} {percent(d)}" for i, d in enumerate(self.layer_drops))
            lines.append(
                f"Replacing all heads of a layer takes away this share of the mark: {drops}; all layers together "
                f"{percent(self.all_drop)}."
            )
        if self.marking_layer is not None and self.answer == "single head":
            lines.append(f"A single head suffices for {percent(self.single_share)} of the first tokens.")
        elif self.marking_layer is not None:
            usual = median_high([len(f.heads) for f in fire if f.heads] or [0])
            lines.append(f"No single head suffices for most first tokens; the median token needs {usual}.")
        return lines


@measurement(
    group="Sinks",
    figure="sinkscope.figures.first_token:draw_heads",
    command="heads",
    quick={"count": 2},
    scan={
        "order": 20,
        "seconds": [0.4, 0.5],
        "numbers": {
            "mark lost without the marking heads": [
                "first_tokens.*.set_drop",
                "first_tokens.*.control_drop",
                "first_tokens.*.control_drop",
            ]
        },
        "facts": {"marking layer": "marking_layer"},
    },
)
def marking_heads(
    setup: Setup,
    *,
    tokens: Sequence[str] | None = None,
    count: Positive = 32,
    batch_size: Positive | None = None,
) -> MarkingHeads:
    """Find the attention heads that mark the first token, by the effect of replacing their output on the sink neurons.

    A head's output at the first position (`hook_z`, before the output projection) is replaced by its mean over later
    positions of typical text. Different tokens may be marked by different heads, so many tokens are put first, each
    alone and without BOS, in addition to BOS itself. If the model has no sink, `sink_layer` is None (Yona et al. 2025,
    section 4.3).

    Args:
        tokens: Words to put first, one token each. By default `count` tokens of the text, drawn by the seed.
        count: Number of tokens of the text to put first.
        batch_size: Rows per pass. By default as many as a bounded memory allows.

    Example:
        sinkscope heads --model llama-2-7b --count 8
    """
    words = first_tokens(setup.target, setup.ids, count, setup.seed, tokens)
    layer, neurons = causal_neurons(setup)
    if layer is None:
        return MarkingHeads(sink_layer=None, neurons=(), answer="no sink")
    own = tuple(n.site[1:] for n in neurons if n.layer == layer)
    bench = Replacement.of(setup.target, layer, neurons, setup.ids, batch_size, setup.progress)
    return MarkingHeads(sink_layer=layer, neurons=own, **_measure(setup, bench, words))


def _measure(setup: Setup, bench: Replacement, words: list[int]) -> dict[str, Any]:
    """Everything of the result that is measured behind the sink neurons."""
    (layers, heads), bos = bench.shape, setup.bos
    firsts = torch.tensor(words if bos is None else [bos, *(w for w in words if w != bos)])
    usual, intact = (
        bench.written(t[:, None], torch.zeros(len(t), layers, heads, dtype=torch.bool))[:, 0]
        for t in (setup.ids[:, 0], firsts)
    )
    activation = intact @ torch.nn.functional.normalize(usual.mean(0), dim=0) / usual.norm(dim=-1).median()
    fires = activation >= HALF
    marks = _Marks(bench, firsts[fires], intact[fires])

    everything = torch.ones(1, layers, heads, dtype=torch.bool)
    whole = torch.eye(layers, dtype=torch.bool)[:, :, None].expand(-1, -1, heads)
    each = torch.eye(layers * heads, dtype=torch.bool).view(-1, layers, heads)
    lost = 1 - marks.kept(torch.cat([everything, whole, each]))
    layer_drop, drops = lost[:, 1 : 1 + layers], lost[:, 1 + layers :].unflatten(1, (layers, heads))
    all_drop = float(lost[:, 0].median()) if len(lost) else None
    medians = layer_drop.median(0).values.tolist() if len(lost) else []
    marking = max(range(layers), key=medians.__getitem__) if medians and max(medians) >= HALF else None
    sets: list[dict[str, Any]] = []
    carried: dict[str, Tensor] = {}
    if marking is not None:
        alone = marks.kept(bench.at(marking, ~torch.eye(heads, dtype=torch.bool)))
        sets = marks.sets(marking, drops[:, marking] + alone, setup.seed)
        for i, one in enumerate(sets):
            one |= {"layer_drop": float(layer_drop[i, marking]), "drops": tuple(drops[i, marking].tolist())}
        carried = {"alone": alone.amax(0), "control": _later(setup, bench, marking, usual.mean(0))}
    rows = iter(sets)
    listed = tuple(
        First(setup.tokenizer.decode([t]), t, a, f, **(next(rows, {}) if f else {}))
        for t, a, f in zip(firsts.tolist(), activation.tolist(), fires.tolist(), strict=True)
    )
    single = sum(len(s["heads"]) == 1 for s in sets) / len(sets) if sets else None
    bos_drops = drops[0] if bos is not None and bool(fires[0]) else None
    found = _heads(setup, drops, bos_drops, marking, carried, [f for f in listed if f.heads])
    return {
        "answer": _answer(single, all_drop),
        "marking_layer": marking,
        "layer_drops": tuple(medians),
        "all_drop": all_drop,
        "single_share": single,
        "heads": found,
        "first_tokens": listed,
    }


@dataclass(frozen=True)
class _Marks:
    """First tokens at which the sink neurons fire, and what these write there together."""

    bench: Replacement
    tokens: Int[Tensor, " token"]
    base: Float[Tensor, "token d_model"]

    def kept(self, edits: Bool[Tensor, "*token edit layer head"]) -> Float[Tensor, "token edit"]:
        """Activation of the sink neurons over the intact one, for every first token and every edit."""
        edits = edits.expand(len(self.tokens), *edits.shape[-3:])
        count = edits.shape[1]
        if not edits.numel():
            return torch.zeros(len(self.tokens), count)
        out = self.bench.written(self.tokens.repeat_interleave(count)[:, None], edits.flatten(0, 1))[:, 0]
        along = (out.unflatten(0, (-1, count)) * self.base[:, None]).sum(-1)
        return along / self.base.square().sum(-1, keepdim=True)

    def sets(self, layer: int, score: Float[Tensor, "token head"], seed: int) -> list[dict[str, Any]]:
        """For each first token, the smallest set of its best heads that keeps half, against as many other heads."""
        heads = score.shape[1]
        rank = score.argsort(1, descending=True).argsort(1)  # rank of each head; 0 is the best
        sizes = torch.arange(1, heads + 1)
        kept = self.kept(self.bench.at(layer, rank[:, None] >= sizes[None, :, None]))
        enough = kept >= HALF
        enough[:, -1] = True  # nothing is replaced there
        size = (enough.int().argmax(1) + 1).tolist()
        generator = torch.Generator().manual_seed(seed)
        edits = torch.zeros(len(score), CONTROL_DRAWS + 1, heads, dtype=torch.bool)
        for i, n in enumerate(size):
            edits[i, 0] = rank[i] < n
            others = (rank[i] >= n).nonzero().flatten()
            for at in range(1, CONTROL_DRAWS + 1):
                edits[i, at, others[torch.randperm(len(others), generator=generator)[:n]]] = True
        lost = 1 - self.kept(self.bench.at(layer, edits))
        return [
            {
                "heads": tuple(sorted((rank[i] < n).nonzero().flatten().tolist())),
                "kept": float(kept[i, n - 1]),
                "set_drop": float(lost[i, 0]),
                "control_drop": float(lost[i, 1:].max()) if heads - n >= n else None,
            }
            for i, n in enumerate(size)
        ]


def _later(setup: Setup, bench: Replacement, layer: int, way: Float[Tensor, " d_model"]) -> Float[Tensor, " head"]:
    """Change along the sink neurons' direction where the same is done at later positions, over its size."""
    heads = bench.shape[1]
    chosen = torch.cat([torch.zeros(1, heads, dtype=torch.bool), torch.eye(heads, dtype=torch.bool)])
    out = bench.written(setup.ids[:1].expand(heads + 1, -1), bench.at(layer, chosen), later=True)
    along = out @ way / way.square().sum()
    return (along[1:] - along[:1]).abs().quantile(0.95, dim=1)


def _heads(
    setup: Setup,
    drops: Float[Tensor, "token layer head"],
    bos_drops: Tensor | None,
    marking: int | None,
    carried: dict[str, Tensor],
    served: list[First],
) -> tuple[Head, ...]:
    shapes, text = geometry(setup.target, setup.ids, list(range(drops.shape[1])))
    found: list[Head] = []
    for layer in range(drops.shape[1] if len(drops) else 0):
        for head in range(drops.shape[2]):
            here = layer == marking
            own = [first.id for first in served if here and head in first.heads]
            found.append(
                Head(
                    layer,
                    head,
                    len(own),
                    float(drops[:, layer, head].mean()),
                    float(drops[:, layer, head].max()),
                    None if bos_drops is None else float(bos_drops[layer, head]),
                    **{name: float(carried[name][head]) if here else None for name in ("alone", "control")},
                    **_shape(shapes[layer], head, torch.isin(text, torch.tensor(own, dtype=torch.long))),
                )
            )
    return tuple(sorted(found, key=lambda h: (-h.serves, -h.drop)))


def _answer(single: float | None, all_drop: float | None) -> str:
    if all_drop is None:
        return "no token fires"
    if single is None:
        return "several layers" if all_drop >= HALF else "no head"
    return "single head" if single >= HALF else "several heads"


def _shape(g: Geometry, head: int, own: Bool[Tensor, " token"]) -> dict[str, float | None]:
    return {
        "self_attention": _number(g.attention[head].mean()),
        "served_self_attention": _number(g.attention[head][own].mean()),
        "self_cosine": _number(g.own[head].mean()),
        "served_self_cosine": _number(g.own[head][own].mean()),
        "same_cosine": _number(g.same[0][head]),
        "same_cosine_rotary": _number(g.same[1][head]),
        "other_cosine": _number(g.other[0][head]),
        "other_cosine_rotary": _number(g.other[1][head]),
    }


def _number(value: Tensor) -> float | None:
    return None if math.isnan(float(value)) else float(value)
