"""Which attention heads mark the place of a norm spike (Yona et al. 2025, section 4.3, for the first token).

Heads at the place are replaced by their mean output at typical positions. A first token sees nothing but itself, so it
is read alone, and each row of a pass can replace other heads.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import plotly.graph_objects as go
import torch
from einops import einsum, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from sinkscope.hooks.edit.places import heads_place
from sinkscope.hooks.trace.layer_view import columns, flat_number, view_layer
from sinkscope.hooks.trace.run import trace
from sinkscope.measure import Natural, Result, Setup, measurement
from sinkscope.measure.margin import margin_of
from sinkscope.models.draws import draws, some_of
from sinkscope.models.hooks import Hook, beside
from sinkscope.results.claims import NEEDED, Claim, Claims, Contrast, Outcome, Search
from sinkscope.results.notation import count_of, head_name, word_list
from sinkscope.results.parts import Component, Head, Neuron, Parts
from sinkscope.results.style import BLUE, figure_of, long_table
from sinkscope.results.tables import Table
from sinkscope.sinks.find.left import INTACT
from sinkscope.sinks.find.places import Place
from sinkscope.sinks.find.records import Candidates
from sinkscope.sinks.find.spikes import MadeSpike, sink_spike, without_spike
from sinkscope.sinks.removal.search import CONTROL_DRAWS
from sinkscope.sinks.tokens import PerToken, TokenRows, sample_tokens, tokens_of_text, vocabulary

PRESENT = 0.5  # share of the sink neurons' activation from which a token has the mark
BATCH_VALUES = 1 << 26  # largest number of values of one sink-layer activation in memory
FIRST = "the first token"


@dataclass(frozen=True)
class Replacement:
    """A model whose heads' outputs can be replaced at a place by their means over other positions of typical text.

    Attributes:
        setup: The model.
        sink_layer: Layer of the sink neurons. Heads in this layer and below can be replaced.
        means: Mean `hook_z` of the heads of each layer up to the sink layer that has softmax attention.
        flat: The sink neurons, numbered as in a `LayerView`. If there are none, the whole MLP stands for them.
        cols: What each of them writes when its `hook_post` is 1.
    """

    setup: Setup
    sink_layer: int
    means: Mapping[int, Float[Tensor, "head d_head"]]
    flat: Int[Tensor, " neuron"]
    cols: Float[Tensor, "neuron d_model"]

    @classmethod
    def of(cls, setup: Setup, sink_layer: int, neurons: Sequence[Neuron], place: Place) -> Replacement:
        """Built with means over typical text without the first position and without the place."""
        target, typical = setup.target, ~place.means(setup.ids)[:, 1:]
        layers = [layer for layer in target.attending if layer <= sink_layer]
        outputs = trace(target, setup.ids, [f"blocks.{layer}.attn.hook_z" for layer in layers], lambda z: z[:, 1:])
        means = {}
        for layer, output in zip(layers, outputs.values(), strict=True):
            means[layer] = output[typical].float().mean(0)
        numbers = [flat_number(target, sink_layer, neuron.expert, neuron.neuron) for neuron in neurons]
        flat = torch.tensor(numbers, dtype=torch.long)
        return cls(setup, sink_layer, means, flat, columns(target, sink_layer, flat))

    def none_of(self, *edits: int) -> Bool[Tensor, "*edit layer head"]:
        """So many edits that replace no head."""
        return torch.zeros(*edits, self.sink_layer + 1, self.setup.n_heads, dtype=torch.bool)

    def written(
        self, ids: TokenRows, at: Int[Tensor, " row"], replaced: Bool[Tensor, "row layer head"] | None = None
    ) -> Float[Tensor, "row d_model"]:
        """What the sink neurons write at a position of each text.

        Args:
            ids: The texts.
            at: The position in each.
            replaced: For each of them, the heads that give their mean there instead of their output. None: no head.
        """
        target = self.setup.target
        if replaced is None:
            replaced = self.none_of(len(ids))
        there = one_hot(at, ids.shape[1]).bool()
        batch = max(1, BATCH_VALUES // (ids.shape[1] * target.d_mlp * max(1, target.n_experts(self.sink_layer))))
        written: list[Tensor] = []
        for rows, edits, where in zip(ids.split(batch), replaced.split(batch), there.split(batch), strict=True):
            hooks: list[Hook] = []
            for layer, mean in self.means.items():
                if bool(edits[:, layer].any()):
                    chosen = repeat(edits[:, layer], "row head -> row 1 (head d_head)", d_head=mean.shape[-1])
                    hooks.append(heads_place(target, layer).rows(chosen & where[..., None], beside(mean.flatten())))
            with target.hooks(*hooks):
                view = view_layer(target, self.sink_layer, rows, where)
            output = view.mlp.cpu()
            if len(self.flat):
                post = view.post[:, self.flat.to(view.post.device)].cpu()
                output = einsum(post, self.cols, "n neuron, neuron d_model -> n d_model")
            written.append(output)
            self.setup.progress("heads", min(batch * len(written), len(ids)), len(ids))
        return torch.cat(written)


@dataclass(frozen=True, kw_only=True)
class MarkingHeads(Result):
    """Which heads mark the place of a spike.

    Drops are shares of the sink neurons' activation at a token. Arrays by token are NaN where the token does not fire
    the neurons. The arrays are None if no MLP makes a spike, and those about the marking layer if no layer marks.

    Attributes:
        sink_layer: The first layer whose sink neurons write at least half as much as the largest. None if no MLP
            makes a norm spike.
        claims: What is left of the mark without each token's heads, and without the heads of one layer.
        instead: What there is instead of a finding.
        place: Where the tokens stand. First tokens stand alone; others stand in texts with a spike.
        neurons: The sink neurons whose activation is measured. If empty, no set of neurons makes the spike and the
            whole MLP of the sink layer stands for them.
        marking_layer: The layer whose heads make the mark. None if there is none.
        tokens: The tokens. BOS comes first, if there is one and they stand first.
        activation: Activation of the sink neurons, relative to that of the spike in typical text. A token has the mark
            if it is at least half.
        all_drop: Share lost with all heads of layers 0 to the sink layer replaced, median over tokens.
        drop: Share lost with one head replaced by its mean over typical positions. NaN in layers without softmax
            attention.
        serves: Whether a head of the marking layer is in the smallest set of heads that keeps half of a token's
            activation when all others of the layer are replaced. A token that needs no head has none.
        set_drop: Share lost when only these heads are replaced. NaN if there are none.
        control_drop: Largest loss when the same number of other heads is replaced, over 20 draws; NaN if there are too
            few.
    """

    percent = ("drop",)
    columns = ("head", "serves", "drop")
    glossary: ClassVar = {
        "serves": "number of tokens whose smallest sufficient set of heads contains this head",
        "drop": "share of the mark lost when the head is replaced, mean over tokens",
    }

    sink_layer: int | None
    claims: Claims = ()
    instead: str | None = None
    place: str = FIRST
    neurons: tuple[Neuron, ...] = ()
    marking_layer: int | None = None
    tokens: tuple[str, ...] = ()
    activation: PerToken | None = None
    all_drop: float | None = None
    drop: Float[np.ndarray, "token layer head"] | None = None
    serves: Bool[np.ndarray, "token head"] | None = None
    set_drop: PerToken | None = None
    control_drop: PerToken | None = None

    def rows(self) -> Table:
        """One row per head, marking heads first."""
        if self.drop is None:
            return []
        firing = self.drop[np.isfinite(self.drop).any((1, 2))]
        drop = firing.mean(0, dtype=np.float64)
        serves = np.zeros(drop.shape, int)
        if self.serves is not None:
            serves[self.marking_layer] = self.serves.sum(0)
        names = [head_name(*site) for site in np.ndindex(drop.shape)]
        rows = [row for row in long_table({"serves": serves, "drop": drop}, head=names) if row["drop"] is not None]
        return sorted(rows, key=lambda row: (-row["serves"], -row["drop"]))

    def facts(self) -> list[str]:
        """Where the mark is read, the tokens that have it, and what all heads do if those of no layer are enough."""
        if self.activation is None:
            return []
        where = f"the whole MLP of layer {self.sink_layer}, because no set of neurons makes the spike"
        if self.neurons:
            where = word_list(self.neurons, 8)
        fires = int((self.activation >= PRESENT).sum())
        lines = [
            f"The mark is read at {where}.",
            f"{fires} of {count_of(len(self.activation), 'token')} tried at {self.place} have the mark.",
        ]
        if self.marking_layer is None and self.all_drop is not None:
            lines.append(f"The heads of all layers together take {max(0.0, self.all_drop):.0%} of the mark.")
        return lines


def draw(result: MarkingHeads) -> go.Figure:
    """Which head marks which token."""
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
    help="Find the heads that mark the first token.",
    figure=draw,
)
def heads(setup: Setup, *, tokens: Sequence[str] | None = None, count: Natural = 32) -> MarkingHeads:
    """Find the attention heads that mark the place of a spike, by the effect of replacing their output on its neurons.

    A head's output at the place (`hook_z`, before the output projection) is replaced by its mean over other positions
    of typical text. Different heads may mark different tokens: if the spike is at the first token, many tokens are put
    first, each alone and without BOS, in addition to BOS itself. A spike elsewhere is read in texts that have it. If no
    MLP makes a norm spike, `sink_layer` is None (Yona et al. 2025, section 4.3).

    Args:
        tokens: Words to put first, one token each, wherever the spike is. By default `count` tokens of the text, drawn
            by the seed.
        count: Number of tokens of the text to put first, and largest number of texts with a spike elsewhere.

    Example:
        sinkscope heads --model llama-2-7b --count 8
    """
    words, made = _first_tokens(setup, tokens, count), sink_spike(setup)
    if made is None:
        return MarkingHeads(sink_layer=None, instead=without_spike(setup, "a mark cannot be read"))
    scan, place = made.scan, made.spike.place
    layer, neurons = _read_at(made)
    bench = Replacement.of(setup, layer, neurons, place)
    spiking = scan.ids[:, : scan.up_to_place]
    typical = bench.written(spiking, scan.at)
    ids, at, words_for = spiking[:count], scan.at[:count], place.words
    if place.is_first or tokens:
        ids, at, words_for = torch.tensor(words)[:, None], torch.zeros(len(words), dtype=torch.long), FIRST
    intact = bench.written(ids, at)
    way = normalize(typical.mean(0), dim=0)
    activation = einsum(intact, way, "token d_model, d_model -> token") / typical.norm(dim=-1).median()
    fires = activation >= PRESENT
    result = MarkingHeads(
        sink_layer=layer,
        place=words_for,
        neurons=tuple(neuron.address for neuron in neurons),
        tokens=tuple(setup.tokenizer.decode([word]) for word in ids[torch.arange(len(ids)), at].tolist()),
        activation=activation.numpy(),
    )
    if not bool(fires.any()):
        silent = "None of the tokens given fires the sink neurons when it stands first; give other tokens."
        return replace(result, instead=silent)
    return replace(result, **_Marks(bench, ids[fires], at[fires], fires, words_for, intact[fires]).found())


def _first_tokens(setup: Setup, tokens: Sequence[str] | None, count: int) -> list[int]:
    """The tokens that are put first, with BOS before the others if there is one."""
    if tokens:
        words = vocabulary(setup.target, tokens)
    else:
        words = sample_tokens(tokens_of_text(setup), count, setup.seed)
    if setup.bos is None:
        return words
    return [setup.bos, *(word for word in words if word != setup.bos)]


def _read_at(made: MadeSpike) -> tuple[int, Candidates]:
    """The first layer with a neuron of the spike that writes at least half as much as the largest, and its neurons."""
    most = max([neuron.contribution_norm for neuron in made.neurons], default=0.0)
    large = [neuron.layer for neuron in made.neurons if neuron.contribution_norm >= NEEDED * most]
    layer = min(large, default=made.scan.layer)
    return layer, tuple(neuron for neuron in made.neurons if neuron.layer == layer)


@dataclass(frozen=True)
class _Marks:
    """Tokens that fire the sink neurons at a place, and what these write there; `fires` marks them among all."""

    bench: Replacement
    ids: TokenRows
    at: Int[Tensor, " firing"]
    fires: Bool[Tensor, " token"]
    place: str
    intact: Float[Tensor, "firing d_model"]

    def kept(self, edits: Bool[Tensor, "*firing edit layer head"]) -> Float[Tensor, "firing edit"]:
        """Activation of the sink neurons over the intact one, for every firing token and edit; NaN if it has no head.

        Heads of layers without softmax attention are none.
        """
        edits = edits.expand(len(self.ids), *edits.shape[-3:])
        rows = torch.arange(len(self.ids)).repeat_interleave(edits.shape[1])
        written = self.bench.written(self.ids[rows], self.at[rows], edits.flatten(0, 1)).unflatten(0, edits.shape[:2])
        along = einsum(written, self.intact, "token edit d_model, token d_model -> token edit")
        kept = along / self.intact.square().sum(-1, keepdim=True)
        return kept.masked_fill(~edits[..., list(self.bench.means), :].any((2, 3)), torch.nan)

    def kept_in(self, layer: int, heads: Bool[Tensor, "*firing edit head"]) -> Float[Tensor, "firing edit"]:
        """The same with heads of one layer replaced."""
        edits = self.bench.none_of(*heads.shape[:-1])
        edits[..., layer, :] = heads
        return self.kept(edits)

    def found(self) -> dict[str, Any]:
        """What is lost without all heads, those of a layer and each; and the heads of each token, if a layer marks."""
        shape = n_layers, n_heads = self.bench.sink_layer + 1, self.bench.setup.n_heads
        every_layer = torch.eye(n_layers)[..., None].expand(-1, *shape)
        every_head = torch.eye(n_layers * n_heads).unflatten(1, shape)
        lost = 1 - self.kept(torch.cat([torch.ones(1, *shape), every_layer, every_head]).bool())
        layer_drop, drop = lost[:, 1 : 1 + n_layers], lost[:, 1 + n_layers :].unflatten(1, shape)
        medians = layer_drop.double().nanquantile(0.5, 0).nan_to_num(-torch.inf)  # without softmax attention
        best = int(medians.argmax())
        search = Search("layers", int(medians.isfinite().sum()), float(medians[best]), f"layer {best}")
        found: dict[str, Any] = {"all_drop": float(lost[:, 0].median()), "drop": self.of_all(drop)}
        claims: list[Claim] = []
        others = medians[medians.isfinite() & (torch.arange(n_layers) != best)]
        if len(others):
            control = Contrast("other", 1 - float(others.max()), len(others), "another layer")
            claims.append(self.claim((Component("attention", best),), layer_drop[:, best], control, search))
        if float(medians[best]) >= NEEDED:
            heads, (set_drop, by_chance) = self.sets(best, drop[:, best], self.bench.setup.seed)
            by_token = {"serves": self.of_all(heads.float()) == 1}
            by_token |= {"set_drop": self.of_all(set_drop), "control_drop": self.of_all(by_chance)}
            found |= {"marking_layer": best, **by_token}
            marking = tuple(Head(best, head) for head in heads.any(0).nonzero().flatten().tolist())
            known = by_chance[by_chance.isfinite()]  # of the others there are too few other heads in the layer
            if marking and len(known):
                control = Contrast("random", 1 - float(known.double().quantile(0.5)), CONTROL_DRAWS)
                claims.insert(0, self.claim(marking, set_drop, control, search))
        alone = "No two layers before the neurons have heads, so there is nothing to compare the heads of one with."
        return {**found, "claims": tuple(claims), "instead": None if claims else alone}

    def claim(self, subject: Parts, drop: Float[Tensor, " firing"], control: Contrast, search: Search) -> Claim:
        """What is left of the mark without some parts, median over tokens."""
        lost = drop[drop.isfinite()].double().numpy()
        return Claim(
            role="marks",
            subject=subject,
            outcome=Outcome("mark", lost_of="the mark"),
            place=self.place,
            value=max(0.0, 1 - float(np.median(lost))),
            contrasts=(INTACT, control),
            draws=len(lost),
            search=search,
            margin=margin_of(lost, np.median),
        )

    def of_all(self, values: Float[Tensor, "firing ..."]) -> Float[np.ndarray, "token ..."]:
        """Values of the tokens that fire, with NaN for the others."""
        spread = torch.full((len(self.fires), *values.shape[1:]), torch.nan)
        spread[self.fires] = values
        return spread.numpy()

    def sets(self, layer: int, drop: Float[Tensor, "firing head"], seed: int) -> tuple[Tensor, Tensor]:
        """For each token, the heads that are left when one after another leaves, the best last, while half stays.

        Returns:
            The heads `[firing head]`; and what is lost without them, and without as many others, `[2 firing]`. NaN:
            there are too few others.
        """
        n_heads = drop.shape[1]
        alone = self.kept_in(layer, ~torch.eye(n_heads).bool())
        heads = torch.ones_like(drop, dtype=torch.bool)
        for head in (drop + alone).argsort(1).T:
            fewer = heads.scatter(1, head[:, None], False)
            enough = self.kept_in(layer, ~fewer[:, None]) >= PRESENT
            heads = torch.where(enough, fewer, heads)
        size = heads.sum(1)
        generator = draws(seed, f"heads of layer {layer}")
        edits = heads[:, None].repeat(1, CONTROL_DRAWS + 1, 1)
        for token, others in enumerate(~heads):
            edits[token, 1:] = False
            for chosen in edits[token, 1:]:
                chosen[some_of(others.nonzero().flatten().tolist(), int(size[token]), generator)] = True
        lost = 1 - self.kept_in(layer, edits)
        control = lost[:, 1:].amax(1).masked_fill(n_heads - size < size, torch.nan)
        return heads, torch.stack([lost[:, 0], control])
