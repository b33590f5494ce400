"""Which attention heads mark the first token (Yona et al. 2025, section 4.3).

Heads at the first token are replaced by their mean output at later positions. The first token sees nothing but itself,
so each pass consists of single tokens and each of its rows can replace different heads: all heads of all layers for
many first tokens take only a few batches.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import plotly.graph_objects as go
import torch
from einops import einsum, rearrange, reduce, repeat
from jaxtyping import Bool, Float, Int
from plotly.subplots import make_subplots
from torch import Tensor

from sinkscope.files.console import Progress, silent
from sinkscope.files.notation import head_name, head_names, neuron_names
from sinkscope.files.tables import percent
from sinkscope.measure import Number, Positive, Result, Setup, measurement
from sinkscope.measure.evidence import Evidence
from sinkscope.measure.margin import margin_of
from sinkscope.measure.style import BLUE, GREY, ORANGE, finished
from sinkscope.models.target import Target, on_input
from sinkscope.sinks.first_token.absence import SpikeAbsence
from sinkscope.sinks.first_token.layer_view import columns, flat_number, view_layer
from sinkscope.sinks.first_token.result import CONTROL_DRAWS, Neuron
from sinkscope.sinks.first_token.sets import sink_neurons
from sinkscope.sinks.tokens import first_tokens
from sinkscope.trace.attention import attention_rows
from sinkscope.trace.run import trace

PRESENT = 0.5  # share of the sink neurons' activation from which the sink counts as present
BATCH_VALUES = 1 << 26  # largest number of values of one sink-layer activation in memory
TABLE_HEADS = 16


@dataclass(frozen=True)
class Replacement:
    """A model whose heads' outputs can be replaced by their means over later positions of typical text.

    Attributes:
        target: The model.
        sink_layer: Layer of the sink neurons. Heads in this layer and below can be replaced.
        means: Mean `hook_z` of every head of layers 0 to the sink layer.
        flat: The sink neurons, numbered as in a `LayerView`. If there are none, the whole MLP stands for them.
        cols: What each of them writes when its `hook_post` is 1.
        progress: Called with the number of rows done.
    """

    target: Target
    sink_layer: int
    means: Float[Tensor, "layer head d_head"]
    flat: Int[Tensor, " neuron"]
    cols: Float[Tensor, "neuron d_model"]
    progress: Progress = silent

    @classmethod
    def of(
        cls,
        target: Target,
        sink_layer: int,
        neurons: Sequence[Neuron],
        ids: Int[Tensor, "row pos"],
        progress: Progress = silent,
    ) -> Replacement:
        """Built with means over the later positions of `ids`; position 0 holds the first token."""
        sites = [f"blocks.{layer}.attn.hook_z" for layer in range(sink_layer + 1)]
        outputs = trace(target, ids, sites, lambda z: z[:, 1:].float().mean(1))  # row head d_head
        means = reduce(list(outputs.values()), "layer row head d_head -> layer head d_head", "mean")
        here = [neuron for neuron in neurons if neuron.layer == sink_layer]
        flat = torch.tensor([flat_number(target, n.layer, n.expert, n.neuron) for n in here], dtype=torch.long)
        cols = torch.zeros(0, target.d_model)
        if here:
            with target.loaded(sink_layer):
                cols = columns(target, sink_layer, flat).cpu()
        return cls(target, sink_layer, means, flat, cols, progress)

    @property
    def layers(self) -> int:
        """Number of layers whose heads can be replaced."""
        return self.means.shape[0]

    @property
    def heads(self) -> int:
        """Number of heads in a layer."""
        return self.means.shape[1]

    def in_layer(self, layer: int, heads: Bool[Tensor, "*n head"]) -> Bool[Tensor, "*n layer head"]:
        """Edits that replace heads of one layer."""
        edits = torch.zeros(*heads.shape[:-1], self.layers, self.heads, dtype=torch.bool)
        edits[..., layer, :] = heads
        return edits

    def written(
        self, ids: Int[Tensor, "row pos"], replaced: Bool[Tensor, "row layer head"]
    ) -> Float[Tensor, "row d_model"]:
        """What the sink neurons write at the first position when heads are replaced there.

        Args:
            ids: The sequences.
            replaced: For each row, the heads that give their mean instead of their output.
        """
        target, length = self.target, ids.shape[1]
        where = torch.arange(length) == 0
        width = target.d_mlp * max(1, target.n_experts(self.sink_layer))
        batch = max(1, BATCH_VALUES // width // length)
        written: list[Tensor] = []
        for start in range(0, len(ids), batch):
            rows, edits = ids[start : start + batch], replaced[start : start + batch]
            with target.hooks(*replacing(target, self.means, edits, where)):
                view = view_layer(target, self.sink_layer, rows, where.expand(len(rows), -1))
            output = view.mlp.cpu()
            if len(self.flat):
                post = view.post[:, self.flat.to(view.post.device)].cpu()
                output = einsum(post, self.cols, "n neuron, neuron d_model -> n d_model")
            written.append(output)
            self.progress("heads", start + len(rows), len(ids))
        return torch.cat(written)


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
        chosen = rearrange(edits[:, layer], "row head -> row 1 head 1") & rearrange(where, "pos -> pos 1 1")

        def replace(z: Tensor) -> Tensor:
            flat = z.flatten(0, -2)
            heads = rearrange(flat, "(row pos) (head d) -> row pos head d", row=len(edits), head=means.shape[1])
            return torch.where(chosen.to(z.device), means[layer].to(z.device, z.dtype), heads).reshape(z.shape)

        return on_input(replace)

    layers = reduce(edits, "row layer head -> layer", torch.any).nonzero().flatten().tolist()
    return [(target.sub(layer, target.adapter.o), "pre", hook(layer)) for layer in layers]


@torch.no_grad()
def attention_to_itself(
    target: Target, ids: Int[Tensor, "row pos"], n_layers: int
) -> Float[Tensor, "layer head row later"]:
    """Attention of later positions to themselves, relative to uniform attention; 1 means no preference."""
    chunks: dict[int, list[Tensor]] = {layer: [] for layer in range(n_layers)}

    def see(layer: int, first_query: int, probs: Float[Tensor, "row head query key"]) -> None:
        queries = torch.arange(probs.shape[2], device=probs.device)
        keys = first_query + queries
        own = probs[:, :, queries, keys] * (keys + 1)
        chunks[layer].append(own.cpu())

    with attention_rows(target, see, layers=list(chunks)):
        target.forward(ids, upto=n_layers - 1)
    layers = [torch.cat(own, 2)[:, :, 1:] for own in chunks.values()]
    return rearrange(layers, "layer row head later -> layer head row later")


@dataclass(frozen=True, kw_only=True)
class MarkingHeads(Result):
    """Which heads mark the first token.

    Drops are shares of the sink neurons' activation at a first token. Arrays by token are NaN where the token does not
    fire the neurons. The arrays are None if there is no sink, and those about the marking layer if no layer marks.

    Attributes:
        sink_layer: Layer of the marked neurons. None if no MLP makes a norm spike.
        neurons: The sink neurons whose activation is measured. If empty, no single neuron is causal and the whole MLP
            of the sink layer stands for them.
        answer: "single head": for most first tokens one head suffices; "several heads": it takes more than one;
            "several layers": the heads of no single layer make the mark, but those of several layers together do; "no
            head": heads do not make the mark; "no token fires": none of the tokens makes a sink when it stands first;
            "no sink".
        marking_layer: The layer whose heads make the mark. None if there is none.
        tokens: The tokens that were put first. BOS comes first, if there is one.
        absence: What there is instead, if no MLP makes a norm spike.
        activation: Activation of the sink neurons, relative to that at the first token of typical text. A token fires
            the neurons if it is at least half.
        all_drop: Share lost with all heads of layers 0 to the sink layer replaced, median over tokens.
        layer_drop: Share lost with all heads of a layer replaced.
        drop: Share lost with one head replaced by its mean over later positions.
        serves: Whether a head of the marking layer is in the smallest set of heads that keeps half of a token's
            activation when all others of the layer are replaced.
        set_drop: Share lost when only these heads are replaced.
        control_drop: Largest loss when the same number of other heads is replaced, over 20 draws; NaN if there are too
            few.
        alone: Share kept when all other heads of the marking layer are replaced, largest over first tokens.
        self_attention: Attention of later positions to themselves, relative to uniform attention.
        served_self_attention: The same at tokens that a head of the marking layer serves. NaN if the text has none.
    """

    kind: ClassVar[str] = "heads"
    percent: ClassVar[tuple[str, ...]] = ("drop", "bos_drop", "alone")
    columns: ClassVar[tuple[str, ...]] = ("head", "serves", "drop", "bos_drop", "alone", "self_attention")
    glossary: ClassVar[dict[str, str]] = {
        "serves": "number of first tokens whose smallest sufficient set of heads contains this head",
        "drop": "share of the mark lost when the head is replaced, mean over first tokens",
        "bos_drop": "the same at BOS",
    }

    sink_layer: int | None
    neurons: tuple[str, ...] = ()
    absence: SpikeAbsence | None = None
    answer: str
    marking_layer: int | None = None
    tokens: tuple[str, ...] = ()
    activation: Float[np.ndarray, " token"] | None = None
    all_drop: float | None = None
    layer_drop: Float[np.ndarray, "token layer"] | None = None
    drop: Float[np.ndarray, "token layer head"] | None = None
    serves: Bool[np.ndarray, "token head"] | None = None
    set_drop: Float[np.ndarray, " token"] | None = None
    control_drop: Float[np.ndarray, " token"] | None = None
    alone: Float[np.ndarray, " head"] | None = None
    self_attention: Float[np.ndarray, "layer head"] | None = None
    served_self_attention: Float[np.ndarray, " head"] | None = None

    def rows(self) -> list[dict[str, Any]]:
        """One row per head, marking heads first."""
        if self.drop is None or self.self_attention is None:
            return []
        rows: list[dict[str, Any]] = []
        mean_drop = np.asarray(np.nanmean(self.drop, 0, dtype=np.float64))
        for layer, head in np.ndindex(mean_drop.shape):
            row: dict[str, Any] = {"head": head_name(layer, head), "serves": 0, "drop": float(mean_drop[layer, head])}
            row["bos_drop"] = _entry(self.drop[0, layer], head) if self.settings.get("bos") else None
            row["alone"] = None
            row["self_attention"] = float(self.self_attention[layer, head])
            if layer == self.marking_layer and self.serves is not None:
                row["serves"] = int(self.serves[:, head].sum())
                row["alone"] = _entry(self.alone, head)
                row["served_self_attention"] = _entry(self.served_self_attention, head)
            rows.append(row)
        return sorted(rows, key=lambda row: (-row["serves"], -row["drop"]))

    def shown_rows(self) -> list[dict[str, Any]]:
        """The first rows."""
        return self.rows()[:TABLE_HEADS]

    def conclusion(self) -> str:
        """Which heads mark the first token, and what other heads lose."""
        if self.serves is None:
            return {
                "no sink": self._no_spike(),
                "several layers": "No layer's heads mark the first token alone; those of several layers together do.",
                "no head": "No head marks the first token: attention does not make the mark.",
                "no token fires": "None of the tokens given makes a sink when it stands first; give other tokens.",
            }[self.answer]
        heads = [(self.marking_layer, head) for head in np.flatnonzero(self.serves.any(0)).tolist()]
        lost, chance = _median(self.set_drop), _median(self.control_drop)
        control = ""
        if chance is not None:
            control = f", and replacing as many other heads takes away at most {percent(chance)} (median over tokens)"
        if not Evidence(lost, chance).holds:
            return (
                f"No head of layer {self.marking_layer} is needed alone: replacing {head_names(heads)} takes away "
                f"{percent(lost)} of the mark{control}."
            )
        return (
            f"Heads {head_names(heads)} mark the first token: replacing them takes away {percent(lost)} of it{control}."
        )

    def _no_spike(self) -> str:
        consequence = "the mark cannot be read at sink neurons"
        if self.absence is None:  # written by an earlier version
            return f"No MLP makes a norm spike, so {consequence}."
        return self.absence.sentence(consequence)

    def numbers(self) -> list[Number]:
        """Share of the mark that is lost without the marking heads."""
        chance = _median(self.control_drop)
        return [
            Number(
                "mark lost without the marking heads",
                _median(self.set_drop),
                chance,
                margin_of(self.set_drop, np.median),
            )
        ]

    def details(self) -> list[str]:
        """The neurons, the tokens that fire, the layers, and how many heads a token needs."""
        if self.activation is None:
            return []
        where = (
            ", ".join(self.neurons) or f"the whole MLP of layer {self.sink_layer}, because no neuron is causal alone"
        )
        fires = self.activation >= PRESENT
        lines = [f"The mark is read at {where}."]
        lines.append(f"{fires.sum()} of {len(fires)} tokens make the sink fire when they stand first.")
        if self.layer_drop is not None:
            medians = np.nanquantile(self.layer_drop, 0.5, axis=0, method="lower")
            drops = ", ".join(f"layer {layer} {percent(drop)}" for layer, drop in enumerate(medians.tolist()))
            lines.append(
                f"Share lost with all heads of a layer replaced: {drops}; of all layers, {percent(self.all_drop)}."
            )
        if self.serves is not None:
            single = (self.serves[fires].sum(1) == 1).mean()
            lines.append(f"A single head suffices for {percent(float(single))} of the first tokens.")
        return lines


def _median(values: Float[np.ndarray, " token"] | None) -> float | None:
    """The upper median without NaN; None if nothing is left."""
    if values is None or np.isnan(values).all():
        return None
    return float(np.nanquantile(values, 0.5, method="higher"))


def _entry(values: Float[np.ndarray, " head"] | None, head: int) -> float | None:
    if values is None or np.isnan(values[head]):
        return None
    return float(values[head])


def draw(result: MarkingHeads) -> go.Figure:
    """What each layer's heads carry, which head marks which first token, and how the heads look at themselves."""
    titles = ["All heads of a layer replaced", "One head replaced, by first token", "Attention to itself over uniform"]
    fig = make_subplots(cols=3, subplot_titles=titles, column_widths=[0.2, 0.4, 0.4])
    if result.layer_drop is not None:
        fig.add_bar(y=np.nanmedian(result.layer_drop, 0), marker_color=ORANGE, showlegend=False, row=1, col=1)
        fig.update_xaxes(title_text="layer", dtick=1, row=1, col=1)
        fig.update_yaxes(title_text="share of the activation lost", tickformat=".0%", row=1, col=1)
    if result.drop is not None and result.serves is not None and result.self_attention is not None:
        firing = np.flatnonzero(result.serves.any(1))
        firing = firing[np.lexsort(result.serves[firing].T)]  # tokens that share a head lie beside each other
        names = [html.escape(f"{result.tokens[token]!r} ({token})") for token in firing]
        drop, scale = result.drop[firing, result.marking_layer], ["#f7f7f7", BLUE]
        fig.add_heatmap(z=drop, y=names, zmin=0, zmax=1, colorscale=scale, colorbar_x=0.58, row=1, col=2)
        layer = f"head of layer {result.marking_layer}"
        fig.update_xaxes(title_text=layer, row=1, col=2)
        for values, name, color in (
            (result.self_attention[result.marking_layer], "all later tokens", GREY),
            (result.served_self_attention, "tokens that the head serves", ORANGE),
        ):
            fig.add_scatter(y=values, mode="markers", name=name, marker={"color": color, "size": 11}, row=1, col=3)
        fig.update_xaxes(title_text=layer, row=1, col=3)
    return finished(fig, result, width=1400, height=560)


@measurement(group="Sinks", figure=draw, command="heads", quick={"count": 2})
def marking_heads(setup: Setup, *, tokens: Sequence[str] | None = None, count: Positive = 32) -> MarkingHeads:
    """Find the attention heads that mark the first token, by the effect of replacing their output on the sink neurons.

    A head's output at the first position (`hook_z`, before the output projection) is replaced by its mean over later
    positions of typical text. Different tokens may be marked by different heads, so many tokens are put first, each
    alone and without BOS, in addition to BOS itself. If no MLP makes a spike, `sink_layer` is None (Yona et al. 2025,
    section 4.3).

    Args:
        tokens: Words to put first, one token each. By default `count` tokens of the text, drawn by the seed.
        count: Number of tokens of the text to put first.

    Example:
        sinkscope heads --model llama-2-7b --count 8
    """
    words = first_tokens(setup.target, setup.ids, count, setup.seed, tokens)
    if setup.bos is not None:
        words = [setup.bos, *(word for word in words if word != setup.bos)]
    sink = sink_neurons(setup)
    sink_layer, neurons = sink.layer, sink.neurons
    if sink_layer is None:
        return MarkingHeads(sink_layer=None, answer="no sink", absence=sink.absence)
    bench = Replacement.of(setup.target, sink_layer, neurons, setup.ids, setup.progress)
    nothing = torch.zeros(1, bench.layers, bench.heads, dtype=torch.bool)
    firsts = torch.tensor(words)
    typical = bench.written(setup.ids[:, :1], nothing.expand(len(setup.ids), -1, -1))
    intact = bench.written(rearrange(firsts, "token -> token 1"), nothing.expand(len(firsts), -1, -1))
    way = torch.nn.functional.normalize(typical.mean(0), dim=0)
    activation = einsum(intact, way, "token d_model, d_model -> token") / typical.norm(dim=-1).median()
    fires = activation >= PRESENT
    result = MarkingHeads(
        sink_layer=sink_layer,
        neurons=tuple(neuron_names([neuron.site]) for neuron in neurons if neuron.layer == sink_layer),
        answer="no token fires",
        tokens=tuple(setup.tokenizer.decode([word]) for word in words),
        activation=activation.numpy(),
    )
    if not bool(fires.any()):
        return result
    marks = _Marks(bench, firsts[fires], intact[fires])
    every_head = torch.eye(bench.layers * bench.heads, dtype=torch.bool)
    every_head = rearrange(every_head, "edit (layer head) -> edit layer head", layer=bench.layers)
    every_layer = repeat(torch.eye(bench.layers, dtype=torch.bool), "edit layer -> edit layer head", head=bench.heads)
    lost = 1 - marks.kept(torch.cat([~nothing, every_layer, every_head]))
    layer_drop = lost[:, 1 : 1 + bench.layers]
    drop = rearrange(lost[:, 1 + bench.layers :], "token (layer head) -> token layer head", layer=bench.layers)
    result = replace(
        result,
        answer="no head",
        all_drop=float(lost[:, 0].median()),
        layer_drop=_of_all(layer_drop, fires),
        drop=_of_all(drop, fires),
    )
    to_itself = attention_to_itself(setup.target, setup.ids, bench.layers)
    result = replace(result, self_attention=reduce(to_itself, "layer head row later -> layer head", "mean").numpy())
    medians = layer_drop.median(0).values
    if float(medians.max()) < PRESENT:
        several = float(lost[:, 0].median()) >= PRESENT
        return replace(result, answer="several layers" if several else "no head")
    layer = int(medians.argmax())
    alone = marks.kept(bench.in_layer(layer, ~torch.eye(bench.heads, dtype=torch.bool)))
    smallest = marks.smallest_sets(layer, drop[:, layer] + alone, setup.seed)
    single_share = float((smallest.heads.sum(1) == 1).float().mean())
    served = torch.full((bench.heads,), torch.nan)
    for head in range(bench.heads):
        own = torch.isin(setup.ids[:, 1:], firsts[fires][smallest.heads[:, head]])
        served[head] = to_itself[layer, head, own].mean()
    return replace(
        result,
        answer="single head" if single_share >= 0.5 else "several heads",
        marking_layer=layer,
        serves=_of_all(smallest.heads.float(), fires) == 1,
        set_drop=_of_all(smallest.drop, fires),
        control_drop=_of_all(smallest.control_drop, fires),
        alone=alone.amax(0).numpy(),
        served_self_attention=served.numpy(),
    )


def _of_all(values: Float[Tensor, "firing ..."], fires: Bool[Tensor, " token"]) -> Float[np.ndarray, "token ..."]:
    """Values of the tokens that fire, with NaN for the others."""
    spread = torch.full((len(fires), *values.shape[1:]), torch.nan)
    spread[fires] = values
    return spread.numpy()


@dataclass(frozen=True)
class SmallestHeadSets:
    """For each first token, the smallest set of its best heads that keeps half of the activation.

    Attributes:
        heads: The heads of the set.
        drop: Share of the activation that is lost without them.
        control_drop: Largest loss without the same number of other heads, over 20 draws; NaN if there are too few.
    """

    heads: Bool[Tensor, "token head"]
    drop: Float[Tensor, " token"]
    control_drop: Float[Tensor, " token"]


@dataclass(frozen=True)
class _Marks:
    """First tokens at which the sink neurons fire, and what these write there together."""

    bench: Replacement
    tokens: Int[Tensor, " token"]
    intact: Float[Tensor, "token d_model"]

    def kept(self, edits: Bool[Tensor, "*token edit layer head"]) -> Float[Tensor, "token edit"]:
        """Activation of the sink neurons over the intact one, for every first token and every edit."""
        edits = edits.expand(len(self.tokens), *edits.shape[-3:])
        ids = repeat(self.tokens, "token -> (token edit) 1", edit=edits.shape[1])
        written = self.bench.written(ids, rearrange(edits, "token edit layer head -> (token edit) layer head"))
        written = rearrange(written, "(token edit) d_model -> token edit d_model", token=len(self.tokens))
        along = einsum(written, self.intact, "token edit d_model, token d_model -> token edit")
        return along / self.intact.square().sum(-1, keepdim=True)

    def smallest_sets(self, layer: int, score: Float[Tensor, "token head"], seed: int) -> SmallestHeadSets:
        """Restore heads of a layer in the order of `score` until half is back, and compare with as many other heads."""
        count = self.bench.heads
        rank = score.argsort(1, descending=True).argsort(1)  # rank of each head; 0 is the best
        sizes = torch.arange(1, count + 1)
        without_best = rearrange(rank, "token head -> token 1 head") >= rearrange(sizes, "size -> size 1")
        enough = self.kept(self.bench.in_layer(layer, without_best)) >= PRESENT
        enough[:, -1] = True  # nothing is replaced there
        size = enough.int().argmax(1) + 1
        heads = rank < rearrange(size, "token -> token 1")
        generator = torch.Generator().manual_seed(seed)
        edits = torch.zeros(len(score), CONTROL_DRAWS + 1, count, dtype=torch.bool)
        edits[:, 0] = heads
        for token, n in enumerate(size.tolist()):
            others = (~heads[token]).nonzero().flatten()
            for draw_number in range(1, CONTROL_DRAWS + 1):
                chosen = others[torch.randperm(len(others), generator=generator)[:n]]
                edits[token, draw_number, chosen] = True
        lost = 1 - self.kept(self.bench.in_layer(layer, edits))
        control = torch.where(count - size >= size, lost[:, 1:].amax(1), torch.nan)
        return SmallestHeadSets(heads, lost[:, 0], control)
