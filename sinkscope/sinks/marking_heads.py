"""Which attention heads mark the first token for the neurons of a norm spike (Yona et al. 2025, section 4.3).

Heads are replaced by their mean output at later positions. A first token sees nothing but itself, so it is read alone,
and each row of a pass can replace other heads.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import ClassVar

import numpy as np
import plotly.express as px
import plotly.graph_objects as go
import torch
from einops import repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from sinkscope.hooks.edit.places import heads_place
from sinkscope.hooks.trace.layer_view import columns, flat_number, view_layer
from sinkscope.hooks.trace.run import trace
from sinkscope.measure import Natural, Result, Setup, measurement
from sinkscope.models.draws import draws
from sinkscope.models.hooks import Hook, beside
from sinkscope.results.claims import Claims, Contrast, Outcome, Search
from sinkscope.results.notation import count_of, word_list
from sinkscope.results.parts import Head, Neuron
from sinkscope.results.style import BLUE, figure_of, long_table
from sinkscope.results.tables import Table
from sinkscope.sinks.chunks import token_texts
from sinkscope.sinks.spikes.controls import INTACT, claim_of
from sinkscope.sinks.spikes.steps import NO_FIRST_SPIKE, first_spike
from sinkscope.sinks.tokens import sample_tokens, tokens_of_text, vocabulary

PRESENT = 0.5  # share of the sink neurons' activation from which a token has the mark
CONTROL_DRAWS = 20  # random sets of as many heads
NO_HEAD = "No head marks the first token"
BATCH_VALUES = 1 << 26  # largest number of values of one sink-layer activation in memory


class Replacement:
    """A model whose heads' outputs at first tokens can be replaced by their means over later positions of typical text.

    Attributes:
        setup: The model.
        sink_layer: Layer of the sink neurons. Heads in this layer and below can be replaced.
        flat: The sink neurons, numbered as in a `LayerView`.
        means: Mean `hook_z` of the heads of each layer up to the sink layer that has softmax attention.
    """

    def __init__(self, setup: Setup, neurons: Sequence[Neuron]) -> None:
        target, self.sink_layer = setup.target, neurons[0].layer
        self.setup = setup
        numbers = [flat_number(target, self.sink_layer, neuron.expert, neuron.neuron) for neuron in neurons]
        self.flat = torch.tensor(numbers)
        layers = [layer for layer in target.attending if layer <= self.sink_layer]
        outputs = trace(target, setup.ids, [f"blocks.{layer}.attn.hook_z" for layer in layers], lambda z: z[:, 1:])
        self.means: dict[int, Float[Tensor, "head d_head"]] = {}
        for layer, output in zip(layers, outputs.values(), strict=True):
            self.means[layer] = output.float().mean((0, 1))

    def none_of(self, *edits: int) -> Bool[Tensor, "*edit layer head"]:
        """So many edits that replace no head."""
        return torch.zeros(*edits, self.sink_layer + 1, self.setup.n_heads, dtype=torch.bool)

    def post(
        self, tokens: Int[Tensor, " row"], replaced: Bool[Tensor, "row layer head"] | None = None
    ) -> Float[Tensor, "row neuron"]:
        """The values (`hook_post`) of the sink neurons at tokens that stand alone.

        Args:
            tokens: The tokens.
            replaced: For each of them, the heads that give their mean instead of their output. None: no head.
        """
        target = self.setup.target
        if replaced is None:
            replaced = self.none_of(len(tokens))
        batch = max(1, BATCH_VALUES // (target.d_mlp * max(1, target.n_experts(self.sink_layer))))
        read: list[Tensor] = []
        for rows, edits in zip(tokens[:, None].split(batch), replaced.split(batch), strict=True):
            hooks: list[Hook] = []
            for layer, mean in self.means.items():
                where = repeat(edits[:, layer], "row head -> row 1 (head d_head)", d_head=mean.shape[-1])
                hooks.append(heads_place(target, layer).rows(where, beside(mean.flatten())))
            with target.hooks(*hooks):
                view = view_layer(target, self.sink_layer, rows, torch.ones_like(rows, dtype=torch.bool))
            read.append(view.post[:, self.flat.to(view.post.device)].cpu())
            self.setup.progress("heads", min(batch * len(read), len(tokens)), len(tokens))
        return torch.cat(read)


@dataclass(frozen=True, kw_only=True)
class MarkingHeads(Result):
    """Which heads mark the first token.

    Drops are shares of the sink neurons' activation at a token that stands alone. The arrays are None without neurons
    or tokens.

    Attributes:
        sink_layer: The layer of the neuron that writes most of the spike. None if no neurons are known.
        claims: What is left of the mark without each token's heads.
        instead: What there is instead of a finding.
        neurons: The sink neurons whose activation is measured.
        tokens: The tokens that have the mark: they fire the neurons at least half as much as the first token of typical
            text. BOS comes first, if there is one.
        silent: The tokens that do not.
        heads: The heads of all layers up to the sink layer that have softmax attention.
        drop: Share lost with one head replaced by its mean over typical positions.
        serves: Whether a head is in the smallest set of heads, with those first that do most, that keeps half of a
            token's activation when all others are replaced.
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
    neurons: tuple[Neuron, ...] = ()
    tokens: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    heads: tuple[Head, ...] = ()
    drop: Float[np.ndarray, "token head"] | None = None
    serves: Bool[np.ndarray, "token head"] | None = None

    def rows(self) -> Table:
        """One row per head, marking heads first."""
        if self.drop is None or self.serves is None:
            return []
        columns = {"serves": self.serves.sum(0), "drop": self.drop.mean(0, dtype=np.float64)}
        rows = long_table(columns, head=[str(head) for head in self.heads])
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
        heads = [str(head) for head in result.heads]
        fig = px.imshow(result.drop[order], x=heads, y=names, zmin=0, zmax=1, aspect="auto", origin="lower")
        fig.update_coloraxes(colorscale=["#f7f7f7", BLUE], colorbar_tickformat=".0%")
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
    words, made = _first_tokens(setup, tokens, count), first_spike(setup)
    if made is None:
        return MarkingHeads(sink_layer=None, instead=f"{NO_FIRST_SPIKE}, so no mark can be read; see `circuit`.")
    layer = made.largest.layer
    neurons = tuple(neuron for neuron in made.needed_neurons if neuron.layer == layer)
    bench = Replacement(setup, neurons)
    cols, typical = columns(setup.target, layer, bench.flat), bench.post(setup.ids[:, 0])
    weights = cols @ normalize((typical @ cols).mean(0), dim=0)  # what a neuron's value adds along the typical spike
    fires = bench.post(words) @ weights >= PRESENT * (typical @ weights).median()
    having, silent = (token_texts(setup.target, some.tolist()) for some in (words[fires], words[~fires]))
    found = MarkingHeads(sink_layer=layer, neurons=neurons, tokens=having, silent=silent)
    if not having:
        return replace(found, instead="No token given fires the sink neurons when it stands first; give others.")
    return with_heads(found, bench, words[fires], weights)


def _first_tokens(setup: Setup, tokens: Sequence[str] | None, count: int) -> Int[Tensor, " token"]:
    """The tokens that are put first, with BOS before the others if there is one."""
    if tokens:
        words = vocabulary(setup.target, tokens)
    else:
        words = sample_tokens(tokens_of_text(setup), count, setup.seed)
    if setup.bos is not None:
        words = [setup.bos, *(word for word in words if word != setup.bos)]
    return torch.tensor(words)


def with_heads(
    found: MarkingHeads, bench: Replacement, tokens: Int[Tensor, " token"], weights: Float[Tensor, " neuron"]
) -> MarkingHeads:
    """The result with what is lost without each head, and the heads of each token.

    Of each token, the fewest heads that keep half are named, those with the largest drop and share kept alone first.
    All of these together are one set, which is replaced at every token and compared with as many others in random
    draws.

    Args:
        found: The result without them.
        bench: The model.
        tokens: The tokens that have the mark.
        weights: What counts of the value of each neuron.
    """
    n_heads, intact = bench.setup.n_heads, bench.post(tokens) @ weights
    heads = tuple(Head(layer, head) for layer in bench.means for head in range(n_heads))

    def kept(replaced: Bool[Tensor, "*token edit head"]) -> Float[Tensor, "token edit"]:
        """The mark over the intact one, for every token, with some heads replaced."""
        replaced = replaced.expand(len(tokens), *replaced.shape[-2:])
        edits = bench.none_of(*replaced.shape[:2])
        edits[:, :, list(bench.means)] = replaced.unflatten(-1, (-1, n_heads))
        post = bench.post(tokens.repeat_interleave(edits.shape[1]), edits.flatten(0, 1))
        return (post @ weights).unflatten(0, edits.shape[:2]) / intact[:, None]

    every = torch.eye(len(heads)).bool()
    drop = 1 - kept(every)
    rank = (drop + kept(~every)).argsort(1, descending=True).argsort(1)
    without = kept(rank[:, None] >= torch.arange(len(heads) + 1)[:, None])
    size = (without >= PRESENT).int().argmax(1)[:, None]
    serves = rank < size
    found = replace(found, heads=heads, drop=drop.numpy(), serves=serves.numpy())
    marking = serves.any(0)
    number = int(marking.sum())
    stays = f"{float(without[:, 0].mean()):.0%} of the mark stays"
    if not number:
        return replace(found, instead=f"{NO_HEAD}: without all, {stays}.")
    if 2 * number > len(heads):
        several = f"{number} of {len(heads)} heads mark the first token, each token by its own"
        return replace(found, instead=f"{several}, so not as many others are left to compare: without all, {stays}.")
    generator = draws(bench.setup.seed, "heads beside those that mark")
    others = torch.rand(CONTROL_DRAWS, len(heads), generator=generator).masked_fill(marking, 1)
    random = others.argsort(-1).argsort(-1) < number
    left = kept(torch.cat([marking[None], random])[None]).clamp(min=0)
    control = Contrast("random", float(left[:, 1:].mean(0).min()), CONTROL_DRAWS)
    outcome, search = Outcome("mark", lost_of="the mark"), Search("heads", len(heads))
    members = tuple(compress(heads, marking.tolist()))
    claim = claim_of("marks", members, outcome, "the first token", left[:, 0], (INTACT, control), search)
    return replace(found, claims=(claim,))
