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
from torch import Tensor

from sinkscope.files.progress import Progress, silent
from sinkscope.hooks.trace.layer_view import columns, flat_number, view_layer
from sinkscope.hooks.trace.run import trace
from sinkscope.measure import Natural, Number, Result, ScanPart, Setup, measurement
from sinkscope.measure.evidence import NEEDED, Evidence, percent_pair
from sinkscope.measure.margin import margin_of
from sinkscope.models.draws import draws
from sinkscope.models.hooks import on_input
from sinkscope.models.target import Target
from sinkscope.results.notation import count_of, head_name, head_names, neuron_name, word_form, word_list
from sinkscope.results.parts import Neuron
from sinkscope.results.style import BLUE, figure_of, long_table
from sinkscope.results.tables import Table, percent
from sinkscope.sinks.find.spikes import sink_neurons
from sinkscope.sinks.removal.search import CONTROL_DRAWS
from sinkscope.sinks.tokens import TokenRows, first_tokens

PRESENT = 0.5  # share of the sink neurons' activation from which the sink counts as present
BATCH_VALUES = 1 << 26  # largest number of values of one sink-layer activation in memory
NAMED = 4  # heads that the conclusion names


@dataclass(frozen=True)
class Replacement:
    """A model whose heads' outputs can be replaced by their means over later positions of typical text.

    Attributes:
        target: The model.
        sink_layer: Layer of the sink neurons. Heads in this layer and below can be replaced.
        means: Mean `hook_z` of every head of layers 0 to the sink layer; 0 in layers without softmax attention.
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
        ids: TokenRows,
        progress: Progress = silent,
    ) -> Replacement:
        """Built with means over the later positions of `ids`; position 0 holds the first token."""
        layers = list(filter(target.has_attention, range(sink_layer + 1)))
        sites = [f"blocks.{layer}.attn.hook_z" for layer in layers]
        outputs = trace(target, ids, sites, lambda z: z[:, 1:].float().mean(1))  # row head d_head
        means = torch.zeros(sink_layer + 1, target.n_heads, 0)
        if layers:
            of_layers = reduce(list(outputs.values()), "layer row head d_head -> layer head d_head", "mean")
            means = torch.zeros(sink_layer + 1, *of_layers.shape[1:])
            means[layers] = of_layers
        numbers = []
        for neuron in neurons:
            numbers.append(flat_number(target, sink_layer, neuron.expert, neuron.neuron))
        flat = torch.tensor(numbers, dtype=torch.long)
        return cls(target, sink_layer, means, flat, columns(target, sink_layer, flat), progress)

    def written(
        self, tokens: Int[Tensor, " row"], replaced: Bool[Tensor, "row layer head"] | None = None
    ) -> Float[Tensor, "row d_model"]:
        """What the sink neurons write at tokens that stand alone.

        Args:
            tokens: The tokens.
            replaced: For each of them, the heads that give their mean instead of their output. None: no head.
        """
        target = self.target
        if replaced is None:
            replaced = torch.zeros(len(tokens), *self.means.shape[:2], dtype=torch.bool)
        first = torch.ones(1, dtype=torch.bool)
        batch = max(1, BATCH_VALUES // (target.d_mlp * max(1, target.n_experts(self.sink_layer))))
        written = []
        for ids, edits in zip(tokens[:, None].split(batch), replaced.split(batch), strict=True):
            with target.hooks(*replacing(target, self.means, edits, first)):
                view = view_layer(target, self.sink_layer, ids, first.expand(len(ids), 1))
            output = view.mlp.cpu()
            if len(self.flat):
                post = view.post[:, self.flat.to(view.post.device)].cpu()
                output = einsum(post, self.cols, "n neuron, neuron d_model -> n d_model")
            written.append(output)
            self.progress("heads", min(batch * len(written), len(tokens)), len(tokens))
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
    return [(target.output_projection(layer), "pre", hook(layer)) for layer in layers if target.has_attention(layer)]


@dataclass(frozen=True, kw_only=True)
class MarkingHeads(Result):
    """Which heads mark the first token.

    Drops are shares of the sink neurons' activation at a first token. Arrays by token are NaN where the token does not
    fire the neurons. The arrays are None if no MLP makes a spike, and those about the marking layer if no layer marks.

    Attributes:
        sink_layer: The first layer whose sink neurons write at least half as much as the largest. None if no MLP
            makes a norm spike.
        absence: What there is instead, if no MLP makes a norm spike.
        neurons: The sink neurons whose activation is measured. If empty, no set of neurons makes the spike and the
            whole MLP of the sink layer stands for them.
        marking_layer: The layer whose heads make the mark. None if there is none.
        tokens: The tokens that were put first. BOS comes first, if there is one.
        activation: Activation of the sink neurons, relative to that at the first token of typical text. A token fires
            the neurons if it is at least half.
        all_drop: Share lost with all heads of layers 0 to the sink layer replaced, median over tokens.
        layer_drop: Share lost with all heads of a layer replaced. NaN in layers without softmax attention.
        drop: Share lost with one head replaced by its mean over later positions. NaN in the same layers.
        serves: Whether a head of the marking layer is in the smallest set of heads that keeps half of a token's
            activation when all others of the layer are replaced. A token that needs no head has none.
        set_drop: Share lost when only these heads are replaced. NaN if there are none.
        control_drop: Largest loss when the same number of other heads is replaced, over 20 draws; NaN if there are too
            few.
    """

    table_rows = 16
    percent = ("drop",)
    columns = ("head", "serves", "drop")
    matters, told = "serves", "drop"
    glossary: ClassVar = {
        "serves": "number of first tokens whose smallest sufficient set of heads contains this head",
        "drop": "share of the mark lost when the head is replaced, mean over first tokens",
    }

    sink_layer: int | None
    absence: str | None = None
    neurons: tuple[str, ...] = ()
    marking_layer: int | None = None
    tokens: tuple[str, ...] = ()
    activation: Float[np.ndarray, " token"] | None = None
    all_drop: float | None = None
    layer_drop: Float[np.ndarray, "token layer"] | None = None
    drop: Float[np.ndarray, "token layer head"] | None = None
    serves: Bool[np.ndarray, "token head"] | None = None
    set_drop: Float[np.ndarray, " token"] | None = None
    control_drop: Float[np.ndarray, " token"] | None = None

    @property
    def evidence(self) -> Evidence:
        """What replacing the heads of the sets takes away, median over tokens."""
        return Evidence(_median(self.set_drop), _median(self.control_drop))

    def rows(self) -> Table:
        """One row per head, marking heads first."""
        if self.drop is None:
            return []
        firing = self.drop[np.isfinite(self.drop).any((1, 2))]
        drop = firing.mean(0, dtype=np.float64)
        serves = np.zeros(drop.shape, int)
        if self.serves is not None:
            serves[self.marking_layer] = self.serves.sum(0)
        names = [head_name(*place) for place in np.ndindex(drop.shape)]
        rows = [row for row in long_table({"serves": serves, "drop": drop}, head=names) if row["drop"] is not None]
        return sorted(rows, key=lambda row: (-row["serves"], -row["drop"]))

    def conclusion(self) -> str:
        """Which heads mark the first token, and what other heads lose."""
        if self.sink_layer is None:
            return self.absence or ""
        if self.layer_drop is None:
            return "None of the tokens given fires the sink neurons when it stands first; give other tokens."
        layer = self.marking_layer
        if self.serves is None or layer is None:
            most, every = np.nanmax(_medians(self.layer_drop), initial=0.0), max(0.0, self.all_drop or 0.0)
            return (
                f"The heads of no single layer mark the first token: replacing those of one takes away at most "
                f"{percent(float(most))} of the mark, those of all layers {percent(every)}."
            )
        heads = [(layer, head) for head in np.flatnonzero(self.serves.any(0)).tolist()]
        lost, chance = percent_pair(self.evidence.change or 0.0, self.evidence.control)
        control = ""
        if self.evidence.control is not None:
            control = f"; replacing as many other heads takes away at most {chance}"
        names = head_names(heads, NAMED)
        if not self.evidence.holds:
            return f"No head is needed alone: replacing {names} takes away {lost} of the mark{control}."
        marks, it = (
            word_form(len(heads), "Head {} marks", "Heads {} mark").format(names),
            word_form(len(heads), "it", "them"),
        )
        tokens = count_of(int(self.serves.any(1).sum()), "first token")
        return f"{marks} {tokens}: replacing {it} takes away {lost} of the mark{control}."

    def numbers(self) -> list[Number]:
        """Share of the mark that is lost without the marking heads."""
        margin = margin_of(self.set_drop, np.median)
        return [Number("mark lost without the marking heads", self.evidence.change, self.evidence.control, margin)]

    def details(self) -> list[str]:
        """The neurons, and the tokens that fire them."""
        if self.activation is None:
            return []
        where = f"the whole MLP of layer {self.sink_layer}, because no set of neurons makes the spike"
        if self.neurons:
            where = word_list(self.neurons, 8)
        fires = int((self.activation >= PRESENT).sum())
        first = word_form(fires, "has it when it stands", "have it when they stand")
        of_all = f"{fires} of {count_of(len(self.activation), 'token')}"
        return [f"The mark is read at {where}.", f"{of_all} {first} first."]


def _median(values: Float[np.ndarray, " token"] | None) -> float | None:
    """The upper median without NaN; None if nothing is left."""
    if values is None or np.isnan(values).all():
        return None
    return float(np.nanquantile(values, 0.5, method="higher"))


def _medians(layer_drop: Float[np.ndarray, "token layer"]) -> Float[np.ndarray, " layer"]:
    """The lower median over the tokens that fire, of each layer; NaN without softmax attention."""
    attending = np.isfinite(layer_drop).any(0)
    medians = np.full_like(layer_drop[0], np.nan)
    medians[attending] = np.nanquantile(layer_drop[:, attending], 0.5, axis=0, method="lower")
    return medians


def draw(result: MarkingHeads) -> go.Figure:
    """Which head marks which first token."""
    fig = go.Figure()
    if result.drop is not None and result.serves is not None:
        firing = np.flatnonzero(result.serves.any(1))
        firing = firing[np.lexsort(result.serves[firing].T)]  # tokens that share a head lie beside each other
        names = [html.escape(f"{result.tokens[token]!r} ({token})") for token in firing]
        drop = result.drop[firing, result.marking_layer]
        fig.add_heatmap(z=drop, y=names, zmin=0, zmax=1, colorscale=["#f7f7f7", BLUE], colorbar={"tickformat": ".0%"})
        fig.update_xaxes(title_text=f"head of layer {result.marking_layer}")
    return figure_of(fig, result, width=700, height=560)


@measurement(
    group="Sinks",
    order=3,
    help="Find the heads that mark the first token.",
    scan=ScanPart(3, quick={"count": 8}),
    figure=draw,
    quick={"count": 2},
)
def heads(setup: Setup, *, tokens: Sequence[str] | None = None, count: Natural = 32) -> MarkingHeads:
    """Find the attention heads that mark the first token, by the effect of replacing their output on the sink neurons.

    A head's output at the first position (`hook_z`, before the output projection) is replaced by its mean over later
    positions of typical text. Different tokens may be marked by different heads, so many tokens are put first, each
    alone and without BOS, in addition to BOS itself. If no MLP makes a norm spike, `sink_layer` is None (Yona et al.
    2025, section 4.3).

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
    if sink.layer is None:
        return MarkingHeads(sink_layer=None, absence=sink.absence("a mark cannot be read at sink neurons"))
    most = max([neuron.contribution_norm for neuron in sink.neurons], default=0.0)
    large = [neuron for neuron in sink.neurons if neuron.contribution_norm >= NEEDED * most]
    layer = min([neuron.layer for neuron in large], default=sink.layer)
    neurons = [neuron for neuron in sink.neurons if neuron.layer == layer]
    bench = Replacement.of(setup.target, layer, neurons, setup.ids, setup.progress)
    firsts = torch.tensor(words)
    typical = bench.written(setup.ids[:, 0])
    intact = bench.written(firsts)
    way = torch.nn.functional.normalize(typical.mean(0), dim=0)
    activation = einsum(intact, way, "token d_model, d_model -> token") / typical.norm(dim=-1).median()
    fires = activation >= PRESENT
    result = MarkingHeads(
        sink_layer=layer,
        neurons=tuple(neuron_name(*neuron.site) for neuron in neurons),
        tokens=tuple(setup.tokenizer.decode([word]) for word in words),
        activation=activation.numpy(),
    )
    if not bool(fires.any()):
        return result
    marks = _Marks(bench, firsts, fires, intact[fires])
    layers, heads = bench.means.shape[:2]
    every_layer = repeat(torch.eye(layers).bool(), "edit layer -> edit layer head", head=heads)
    every_head = torch.eye(layers * heads).bool().view(-1, layers, heads)
    edits = torch.cat([torch.ones_like(every_head[:1]), every_layer, every_head])
    all_drop, layer_drop, drop = (1 - marks.kept(edits)).split([1, layers, layers * heads], 1)
    drop = rearrange(drop, "token (layer head) -> token layer head", layer=layers)
    without = [not setup.target.has_attention(number) for number in range(layers)]
    layer_drop[:, without] = torch.nan
    drop[:, without] = torch.nan
    drops = {"layer_drop": marks.of_all(layer_drop), "drop": marks.of_all(drop)}
    result = replace(result, all_drop=float(all_drop.median()), **drops)
    medians = layer_drop.median(0).values.nan_to_num()
    if float(medians.max()) < NEEDED:
        return result
    marking = int(medians.argmax())
    return replace(result, marking_layer=marking, **marks.sets(marking, drop[:, marking], setup.seed))


@dataclass(frozen=True)
class _Marks:
    """First tokens, which of them fire the sink neurons, and what these write there together."""

    bench: Replacement
    firsts: Int[Tensor, " token"]
    fires: Bool[Tensor, " token"]
    intact: Float[Tensor, "firing d_model"]

    def kept(self, edits: Bool[Tensor, "*firing edit layer head"]) -> Float[Tensor, "firing edit"]:
        """Activation of the sink neurons over the intact one, for every firing token and every edit."""
        tokens = self.firsts[self.fires]
        edits = edits.expand(len(tokens), *edits.shape[-3:])
        copies = repeat(tokens, "token -> (token edit)", edit=edits.shape[1])
        written = self.bench.written(copies, edits.flatten(0, 1))
        written = rearrange(written, "(token edit) d_model -> token edit d_model", token=len(tokens))
        along = einsum(written, self.intact, "token edit d_model, token d_model -> token edit")
        return along / self.intact.square().sum(-1, keepdim=True)

    def kept_in(self, layer: int, heads: Bool[Tensor, "*firing edit head"]) -> Float[Tensor, "firing edit"]:
        """The same with heads of one layer replaced."""
        edits = torch.zeros(*heads.shape[:-1], *self.bench.means.shape[:2], dtype=torch.bool)
        edits[..., layer, :] = heads
        return self.kept(edits)

    def of_all(self, values: Float[Tensor, "firing ..."]) -> Float[np.ndarray, "token ..."]:
        """Values of the tokens that fire, with NaN for the others."""
        spread = torch.full((len(self.fires), *values.shape[1:]), torch.nan)
        spread[self.fires] = values
        return spread.numpy()

    def sets(self, layer: int, drop: Float[Tensor, "firing head"], seed: int) -> dict[str, Any]:
        """For each token, the smallest set of the layer's best heads that keeps half, against as many other heads."""
        n_heads = drop.shape[1]
        alone = self.kept_in(layer, ~torch.eye(n_heads).bool())
        rank = (drop + alone).argsort(1, descending=True).argsort(1)  # rank of each head; 0 is the best
        sizes = torch.arange(n_heads + 1)
        without_best = rearrange(rank, "token head -> token 1 head") >= rearrange(sizes, "size -> size 1")
        enough = self.kept_in(layer, without_best) >= PRESENT
        enough[:, -1] = True  # nothing is replaced there
        size = enough.int().argmax(1)
        heads = self._without_unneeded(layer, rank < rearrange(size, "token -> token 1"))
        size = heads.sum(1)
        generator = draws(seed, f"heads of layer {layer}")
        edits = repeat(torch.zeros_like(heads), "token head -> token draw head", draw=CONTROL_DRAWS + 1).clone()
        edits[:, 0] = heads
        for token, others in enumerate(~heads):
            for chosen in edits[token, 1:]:
                order = torch.randperm(int(others.sum()), generator=generator)
                chosen[others.nonzero().flatten()[order[: size[token]]]] = True
        lost = 1 - self.kept_in(layer, edits)
        control = torch.where((n_heads - size >= size) & (size > 0), lost[:, 1:].amax(1), torch.nan)
        return {
            "serves": self.of_all(heads.float()) == 1,
            "set_drop": self.of_all(torch.where(size > 0, lost[:, 0], torch.nan)),
            "control_drop": self.of_all(control),
        }

    def _without_unneeded(self, layer: int, heads: Bool[Tensor, "firing head"]) -> Bool[Tensor, "firing head"]:
        """The sets without heads that the others keep half of the activation without, one after another."""
        heads = heads.clone()
        others = ~torch.eye(heads.shape[1]).bool()
        while True:
            fewer = rearrange(heads, "token head -> token 1 head") & others
            kept = torch.where(heads, self.kept_in(layer, ~fewer), -torch.inf)
            best = kept.max(1)
            drop = (best.values >= PRESENT).nonzero().flatten()
            if not len(drop):
                return heads
            heads[drop, best.indices[drop]] = False
