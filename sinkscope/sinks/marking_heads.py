"""Which attention heads mark the first token for the neurons of a norm spike (Yona et al. 2025, section 4.3).

Heads are replaced by their mean output at later positions. A first token sees nothing but itself, so it is read alone,
and each row of a pass can replace other heads.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np
import plotly.graph_objects as go
import torch
from einops import einsum, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from sinkscope.hooks.edit.places import heads_place
from sinkscope.hooks.trace.layer_view import columns, flat_number, view_layer
from sinkscope.hooks.trace.run import trace
from sinkscope.measure import Natural, Result, Setup, measurement
from sinkscope.models.draws import draws
from sinkscope.models.hooks import Hook, beside
from sinkscope.results.claims import NEEDED, Claims, Contrast, Outcome, Search
from sinkscope.results.notation import count_of, head_name, word_list
from sinkscope.results.parts import Component, Head, Neuron
from sinkscope.results.style import BLUE, figure_of, long_table
from sinkscope.results.tables import Table
from sinkscope.sinks.chunks import token_texts
from sinkscope.sinks.find.left import INTACT, claim_of
from sinkscope.sinks.find.spikes import sink_spike, without_spike
from sinkscope.sinks.removal.search import CONTROL_DRAWS
from sinkscope.sinks.tokens import sample_tokens, tokens_of_text, vocabulary

PRESENT = 0.5  # share of the sink neurons' activation from which a token has the mark
BATCH_VALUES = 1 << 26  # largest number of values of one sink-layer activation in memory


@dataclass(frozen=True)
class Replacement:
    """A model whose heads' outputs at first tokens can be replaced by their means over later positions of typical text.

    Attributes:
        setup: The model.
        sink_layer: Layer of the sink neurons. Heads in this layer and below can be replaced.
        means: Mean `hook_z` of the heads of each layer up to the sink layer that has softmax attention.
        flat: The sink neurons, numbered as in a `LayerView`.
        cols: What each of them writes when its `hook_post` is 1.
    """

    setup: Setup
    sink_layer: int
    means: Mapping[int, Float[Tensor, "head d_head"]]
    flat: Int[Tensor, " neuron"]
    cols: Float[Tensor, "neuron d_model"]

    @classmethod
    def of(cls, setup: Setup, neurons: Sequence[Neuron]) -> Replacement:
        """Built with means over typical text, for neurons of one layer."""
        target, sink_layer = setup.target, neurons[0].layer
        layers = [layer for layer in target.attending if layer <= sink_layer]
        outputs = trace(target, setup.ids, [f"blocks.{layer}.attn.hook_z" for layer in layers], lambda z: z[:, 1:])
        means = {}
        for layer, output in zip(layers, outputs.values(), strict=True):
            means[layer] = output.float().mean((0, 1))
        numbers = [flat_number(target, sink_layer, neuron.expert, neuron.neuron) for neuron in neurons]
        flat = torch.tensor(numbers)
        return cls(setup, sink_layer, means, flat, columns(target, sink_layer, flat))

    def none_of(self, *edits: int) -> Bool[Tensor, "*edit layer head"]:
        """So many edits that replace no head."""
        return torch.zeros(*edits, self.sink_layer + 1, self.setup.n_heads, dtype=torch.bool)

    def written(
        self, tokens: Int[Tensor, " row"], replaced: Bool[Tensor, "row layer head"] | None = None
    ) -> Float[Tensor, "row d_model"]:
        """What the sink neurons write at tokens that stand alone.

        Args:
            tokens: The tokens.
            replaced: For each of them, the heads that give their mean instead of their output. None: no head.
        """
        target = self.setup.target
        if replaced is None:
            replaced = self.none_of(len(tokens))
        batch = max(1, BATCH_VALUES // (target.d_mlp * max(1, target.n_experts(self.sink_layer))))
        written: list[Tensor] = []
        for rows, edits in zip(tokens[:, None].split(batch), replaced.split(batch), strict=True):
            hooks: list[Hook] = []
            for layer, mean in self.means.items():
                if bool(edits[:, layer].any()):
                    where = repeat(edits[:, layer], "row head -> row 1 (head d_head)", d_head=mean.shape[-1])
                    hooks.append(heads_place(target, layer).rows(where, beside(mean.flatten())))
            with target.hooks(*hooks):
                view = view_layer(target, self.sink_layer, rows, torch.ones_like(rows, dtype=torch.bool))
            post = view.post[:, self.flat.to(view.post.device)].cpu()
            written.append(einsum(post, self.cols, "row neuron, neuron d_model -> row d_model"))
            self.setup.progress("heads", min(batch * len(written), len(tokens)), len(tokens))
        return torch.cat(written)


@dataclass(frozen=True, kw_only=True)
class MarkingHeads(Result):
    """Which heads mark the first token.

    Drops are shares of the sink neurons' activation at a token that stands alone. The arrays are None without neurons
    or tokens, and `serves` if no layer marks.

    Attributes:
        sink_layer: The layer of the neuron that writes most of the spike. None if no neurons are known.
        claims: What is left of the mark without each token's heads or, if no layer marks, without the heads of the
            layer that takes most.
        instead: What there is instead of a finding.
        neurons: The sink neurons whose activation is measured.
        marking_layer: The layer whose heads make the mark. None if there is none.
        tokens: The tokens that have the mark: they fire the neurons at least half as much as the first token of typical
            text. BOS comes first, if there is one.
        silent: The tokens that do not.
        drop: Share lost with one head replaced by its mean over typical positions. NaN in layers without softmax
            attention.
        serves: Whether a head of the marking layer is in the smallest set of heads, with those first that do most, that
            keeps half of a token's activation when all others of the layer are replaced.
    """

    table_rows = 16
    percent = ("drop",)
    columns = ("head", "serves", "drop")
    glossary: ClassVar = {
        "serves": "number of tokens whose smallest sufficient set of heads contains this head",
        "drop": "share of the mark lost when the head is replaced, mean over tokens",
    }

    sink_layer: int | None
    claims: Claims = ()
    instead: str | None = None
    neurons: tuple[Neuron, ...] = ()
    marking_layer: int | None = None
    tokens: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    drop: Float[np.ndarray, "token layer head"] | None = None
    serves: Bool[np.ndarray, "token head"] | None = None

    def rows(self) -> Table:
        """One row per head, marking heads first."""
        if self.drop is None:
            return []
        drop = self.drop.mean(0, dtype=np.float64)
        serves = np.zeros(drop.shape, int)
        if self.serves is not None:
            serves[self.marking_layer] = self.serves.sum(0)
        names = [head_name(*site) for site in np.ndindex(drop.shape)]
        rows = [row for row in long_table({"serves": serves, "drop": drop}, head=names) if row["drop"] is not None]
        return sorted(rows, key=lambda row: (-row["serves"], -row["drop"]))

    def facts(self) -> list[str]:
        """Where the mark is read, and the tokens that have it."""
        if self.sink_layer is None:
            return []
        tried = count_of(len(self.tokens) + len(self.silent), "token")
        marked = f"{len(self.tokens)} of {tried} tried at the first position have the mark."
        return [f"The mark is read at {word_list(self.neurons, 8)}.", marked]


def draw(result: MarkingHeads) -> go.Figure:
    """Which head marks which token."""
    fig = go.Figure()
    if result.drop is not None and result.serves is not None:
        order = np.lexsort(result.serves.T)  # tokens that share a head lie beside each other
        names = [html.escape(f"{result.tokens[token]!r} ({token})") for token in order]
        drop = result.drop[order, result.marking_layer]
        fig.add_heatmap(z=drop, y=names, zmin=0, zmax=1, colorscale=["#f7f7f7", BLUE], colorbar={"tickformat": ".0%"})
        fig.update_xaxes(title_text=f"head of layer {result.marking_layer}")
    return figure_of(fig, result, width=700, height=560)


@measurement(
    group="Sinks",
    help="Find the heads that mark the first token.",
    figure=draw,
)
def heads(setup: Setup, *, tokens: Sequence[str] | None = None, count: Natural = 32) -> MarkingHeads:
    """Find the attention heads that mark the first token, by what the sink neurons do without their output.

    A head's output (`hook_z`, before the output projection) is replaced by its mean over later positions of typical
    text. Different heads may mark different tokens, so many tokens are put first, each alone and without BOS, in
    addition to BOS itself. Without neurons that make a norm spike at the first token, `sink_layer` is None (Yona et al.
    2025, section 4.3).

    Args:
        tokens: Words to put first, one token each. By default `count` tokens of the text, drawn by the seed.
        count: Number of tokens of the text to put first.

    Example:
        sinkscope heads --model llama-2-7b --count 8
    """
    words, made = _first_tokens(setup, tokens, count), sink_spike(setup)
    if made is None:
        return MarkingHeads(sink_layer=None, instead=without_spike(setup, "a mark cannot be read"))
    if not made.neurons or not made.spike.place.is_first:
        instead = (
            "No neurons are known that make a norm spike at the first token, so no mark can be read; see `circuit`."
        )
        return MarkingHeads(sink_layer=None, instead=instead)
    layer = max(made.neurons, key=lambda neuron: neuron.contribution_norm).layer
    neurons = tuple(neuron.address for neuron in made.neurons if neuron.layer == layer)
    bench = Replacement.of(setup, neurons)
    typical, intact = bench.written(setup.ids[:, 0]), bench.written(words)
    way = normalize(typical.mean(0), dim=0)
    fires = einsum(intact, way, "token d_model, d_model -> token") >= PRESENT * typical.norm(dim=-1).median()
    having, silent = (token_texts(setup.target, some.tolist()) for some in (words[fires], words[~fires]))
    found = MarkingHeads(sink_layer=layer, neurons=neurons, tokens=having, silent=silent)
    if not having:
        return replace(found, instead="No token given fires the sink neurons when it stands first; give others.")
    return _Marks(bench, words[fires], intact[fires]).added_to(found)


def _first_tokens(setup: Setup, tokens: Sequence[str] | None, count: int) -> Int[Tensor, " token"]:
    """The tokens that are put first, with BOS before the others if there is one."""
    if tokens:
        words = vocabulary(setup.target, tokens)
    else:
        words = sample_tokens(tokens_of_text(setup), count, setup.seed)
    if setup.bos is not None:
        words = [setup.bos, *(word for word in words if word != setup.bos)]
    return torch.tensor(words)


@dataclass(frozen=True)
class _Marks:
    """Tokens that fire the sink neurons when they stand alone, and what these write there."""

    bench: Replacement
    tokens: Int[Tensor, " token"]
    intact: Float[Tensor, "token d_model"]

    def kept(self, edits: Bool[Tensor, "*token edit layer head"]) -> Float[Tensor, "token edit"]:
        """Activation of the sink neurons over the intact one, for every token and edit; NaN if it has no head.

        Heads of layers without softmax attention are none.
        """
        edits = edits.expand(len(self.tokens), *edits.shape[-3:])
        tokens = self.tokens.repeat_interleave(edits.shape[1])
        written = self.bench.written(tokens, edits.flatten(0, 1)).unflatten(0, edits.shape[:2])
        along = einsum(written, self.intact, "token edit d_model, token d_model -> token edit")
        kept = along / self.intact.square().sum(-1, keepdim=True)
        return kept.masked_fill(~edits[..., list(self.bench.means), :].any((2, 3)), torch.nan)

    def kept_in(self, layer: int, heads: Bool[Tensor, "*token edit head"]) -> Float[Tensor, "token edit"]:
        """The same with heads of one layer replaced."""
        edits = self.bench.none_of(*heads.shape[:-1])
        edits[..., layer, :] = heads
        return self.kept(edits)

    def added_to(self, found: MarkingHeads) -> MarkingHeads:
        """The result with what is lost without each head; and the heads of each token, if those of a layer mark."""
        shape = n_layers, n_heads = self.bench.sink_layer + 1, self.bench.setup.n_heads
        every_layer = torch.eye(n_layers)[..., None].expand(-1, *shape)
        every_head = torch.eye(n_layers * n_heads).unflatten(1, shape)
        kept = self.kept(torch.cat([every_layer, every_head]).bool())
        drop = 1 - kept[:, n_layers:].unflatten(1, shape)
        found = replace(found, drop=drop.numpy())
        left = kept[:, :n_layers].mean(0).nan_to_num(torch.inf)  # without softmax attention
        best = int(left.argmin())
        search = Search("layers", int(left.isfinite().sum()), 1 - float(left[best]), f"layer {best}")
        claim = partial(claim_of, "marks", outcome=Outcome("mark", lost_of="the mark"), place="the first token")
        if float(left[best]) <= 1 - NEEDED:
            heads, without, by_chance = self.sets(best, drop[:, best])
            found = replace(found, marking_layer=best, serves=heads.numpy())
            marking = tuple(Head(best, head) for head in heads.any(0).nonzero().flatten().tolist())
            contrasts = INTACT, Contrast("random", float(by_chance.nanmean()), CONTROL_DRAWS)
            if bool(by_chance.isfinite().any()):  # else there are too few other heads in the layer
                left = without[without.isfinite()]  # some tokens may need no head
                return replace(found, claims=(claim(marking, left=left, contrasts=contrasts, search=search),))
        others = left[left.isfinite() & (torch.arange(n_layers) != best)]
        if not len(others):
            alone = "No two layers before the neurons have heads, so there is nothing to compare the heads of one with."
            return replace(found, instead=alone)
        subject = (Component("attention", best),)
        contrasts = INTACT, Contrast("other", float(others.min()), len(others), "another layer")
        return replace(found, claims=(claim(subject, left=kept[:, best], contrasts=contrasts, search=search),))

    def sets(self, layer: int, drop: Float[Tensor, "token head"]) -> tuple[Bool[Tensor, "token head"], Tensor, Tensor]:
        """The fewest heads of each token that keep half, those with the largest drop and share kept alone first.

        Returns:
            The heads; and for each token what is left without them, and the least without as many others in random
            draws, NaN if there are too few others.
        """
        n_heads = drop.shape[1]
        alone = self.kept_in(layer, ~torch.eye(n_heads).bool())
        rank = (drop + alone).argsort(1, descending=True).argsort(1)
        first = rank[:, None] < torch.arange(n_heads)[:, None]
        enough = self.kept_in(layer, ~first) >= PRESENT
        size = torch.where(enough.any(1), enough.int().argmax(1), n_heads)[:, None]
        heads = rank < size
        generator = draws(self.bench.setup.seed, f"heads of layer {layer}")
        others = torch.rand(len(heads), CONTROL_DRAWS, n_heads, generator=generator).masked_fill(heads[:, None], 1)
        random = others.argsort(-1).argsort(-1) < size[..., None]
        left = self.kept_in(layer, torch.cat([heads[:, None], random], 1)).clamp(min=0)
        by_chance = left[:, 1:].amin(1).masked_fill(n_heads - size[:, 0] < size[:, 0], torch.nan)
        return heads, left[:, 0], by_chance
