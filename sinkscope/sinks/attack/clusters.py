"""Which head of the first layer marks each token as first (Yona et al. 2025, section 5.2 and appendix B)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange, reduce, repeat
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.measure import Setup
from sinkscope.models.target import Target
from sinkscope.sinks.chunks import ChunkRun, ChunkWork, Columns, hold_layers, in_chunks, token_texts
from sinkscope.sinks.first_token.layer_scan import norms_after
from sinkscope.sinks.first_token.layer_view import flat_number, view_layer
from sinkscope.sinks.first_token.marking_heads import replacing
from sinkscope.sinks.first_token.result import Neuron
from sinkscope.sinks.tokens import sample_tokens
from sinkscope.trace.run import trace

FIRES = 0.5  # share of the sink neuron's usual activation from which it counts as firing
ROWS = 2048  # rows per pass; a token takes two more rows than there are heads
PAIRED_TOKENS = 64  # tokens whose pairs are measured
EXAMPLES = 12  # tokens of a cluster that are shown


@dataclass(frozen=True)
class HeadWork(ChunkWork):
    """For each token, how strongly single heads fire the sink neuron.

    Attributes:
        layer: Layer of the sink neuron; no deeper layer is run.
        neuron: Its number; in a mixture `expert * d_mlp + neuron`.
        reference: Its activation at the first token of natural text. Activations are given as shares of it.
        mean: Mean `hook_z` of each head at later positions of natural text, heads side by side.
    """

    neuron: int
    reference: float
    mean: Float[Tensor, " d_heads"]

    @torch.no_grad()
    def __call__(self, target: Target, items: list[int]) -> Columns:
        """Columns head, best, sufficing, intact, background, with one entry per token."""
        shares = self.shares(target, items)
        alone = shares[:, 2:]
        best, head = alone.max(1)
        return {
            "head": head.tolist(),
            "best": four_decimals(best),
            "sufficing": (alone >= FIRES).sum(1).tolist(),
            "intact": four_decimals(shares[:, 0]),
            "background": four_decimals(shares[:, 1]),
        }

    @torch.no_grad()
    def shares(self, target: Target, items: list[int]) -> Float[Tensor, "token way"]:
        """Activations over the reference, in 2 + head ways: intact, no head, each head alone."""
        heads = target.n_heads
        lost = torch.cat([torch.zeros(1, heads), torch.ones(1, heads), 1 - torch.eye(heads)]).bool()
        ids = repeat(torch.tensor(items), "token -> (token way) 1", way=len(lost))
        rows = repeat(lost, "way head -> (token way) 1 head", token=len(items))
        mean = rearrange(self.mean, "(head d_head) -> 1 head d_head", head=heads)
        with target.hooks(*replacing(target, mean, rows, torch.ones(1).bool())):
            post = neuron_at(target, self.layer, self.neuron, ids)
        return rearrange(post / self.reference, "(token way) -> token way", way=len(lost)).cpu()


@dataclass(frozen=True)
class TokenClusters:
    """For every token the head of layer 0 that by itself fires the sink neuron when the token stands first.

    Activations are shares of the sink neuron's activation at the first token of natural text. The other heads of
    layer 0 are held at their mean over later positions of natural text.

    Attributes:
        neuron: The sink neuron, (layer, neuron) or (layer, expert, neuron).
        tokens: The tokens.
        ids: Their ids.
        head: The head that serves the token. NaN if no single head does, or if none is needed.
        best: Activation with the best head alone.
        sufficing: Number of heads that suffice alone.
        intact: Activation when nothing is replaced.
        background: Activation with every head at its mean.
        pair_ids: Some served tokens, sorted by head.
        pairs: Norm at the second of two of them, without BOS, over that of the first token of natural text.
    """

    neuron: tuple[int, ...]
    tokens: tuple[str, ...]
    ids: Int[np.ndarray, " token"]
    head: Float[np.ndarray, " token"]
    best: Float[np.ndarray, " token"]
    sufficing: Int[np.ndarray, " token"]
    intact: Float[np.ndarray, " token"]
    background: Float[np.ndarray, " token"]
    pair_ids: Int[np.ndarray, " pair"]
    pairs: Float[np.ndarray, "pair pair"]

    @property
    def heads(self) -> list[int]:
        """Heads that serve tokens, largest cluster first."""
        served, sizes = np.unique(self.head[np.isfinite(self.head)].astype(int), return_counts=True)
        return [int(served[place]) for place in np.lexsort((served, -sizes))]

    @property
    def unserved(self) -> int:
        """Tokens that fire the neuron, but only through several heads together."""
        return int(((self.sufficing == 0) & (self.background < FIRES) & (self.intact >= FIRES)).sum())

    @property
    def silent(self) -> int:
        """Tokens that do not fire the neuron."""
        return int(((self.sufficing == 0) & (self.background < FIRES) & (self.intact < FIRES)).sum())

    @property
    def without_heads(self) -> int:
        """Tokens that fire the neuron with no head of layer 0 intact; something else marks them."""
        return int((self.background >= FIRES).sum())

    def tokens_of(self, head: int) -> tuple[int, ...]:
        """Ids of the tokens that a head serves, those that fire the neuron most strongly first."""
        mine = np.flatnonzero(self.head == head)
        order = np.lexsort((self.ids[mine], -self.best[mine]))
        return tuple(self.ids[mine[order]].tolist())

    def examples(self, head: int) -> str:
        """The first tokens of a cluster, for readers."""
        texts = dict(zip(self.ids.tolist(), self.tokens, strict=True))
        return " ".join(repr(texts[token]) for token in self.tokens_of(head)[:EXAMPLES])

    def pair_shares(self) -> tuple[float, float]:
        """Share of pairs whose second token becomes a sink: both of one head, and of two heads; NaN without pairs."""
        heads = dict(zip(self.ids.tolist(), self.head.tolist(), strict=True))
        head = np.array([heads[token] for token in self.pair_ids.tolist()])
        same = head[:, None] == head
        itself = np.eye(len(head), dtype=bool)
        sinks = self.pairs >= FIRES
        return share_of(sinks[same & ~itself]), share_of(sinks[~same])

    def sentence(self) -> str:
        """How many tokens a single head serves, and how many fire without any head."""
        served = int(np.isfinite(self.head).sum())
        control = f"with every head at its mean {self.without_heads / len(self.ids):.1%} fire it"
        if self.without_heads > len(self.ids) / 2:
            return f"The mark is not made by the heads of layer 0: {control}."
        if not served:
            return f"No single head of layer 0 fires the sink neuron for any token; {control}."
        return (
            f"One of {len(self.heads)} heads of layer 0 fires the sink neuron alone for {served} of {len(self.ids)} "
            f"tokens; {control}."
        )


def share_of(hits: np.ndarray) -> float:
    """Share of true entries; NaN of none."""
    return float(hits.mean()) if hits.size else float("nan")


def find_clusters(
    setup: Setup,
    layer: int,
    neurons: Sequence[Neuron],
    ids: list[int],
    *,
    run: ChunkRun,
    paired: int = 0,
) -> TokenClusters | None:
    """The head that serves each token; None if no neuron is causal.

    Args:
        setup: The model and its text.
        layer: The sink layer.
        neurons: Its causal neurons.
        ids: The tokens.
        run: Where the work runs, and what it keeps.
        paired: Number of served tokens whose pairs are measured.
    """
    if not neurons:
        return None
    target = hold_layers(setup.target, layer)
    largest = max(neurons, key=lambda neuron: neuron.contribution_norm)
    flat = flat_number(target, layer, largest.expert, largest.neuron)
    reference = float(neuron_at(target, layer, flat, setup.ids[:, :1]).median())
    work = HeadWork(layer, flat, reference, later_mean(target, setup.ids))
    size = max(1, ROWS // (target.n_heads + 2))
    columns = in_chunks(setup, work, ids, run, what="tokens x heads", size=size, site=largest.site)
    best, background = np.array(columns["best"]), np.array(columns["background"])
    served = (best >= FIRES) & (background < FIRES)
    head = np.where(served, np.array(columns["head"], dtype=float), np.nan)
    picked = paired_tokens(setup, ids, head, paired)
    pairs = np.zeros((0, 0))
    if picked:
        pairs = np.round(pair_norms(target, layer, picked, setup.ids[:, :1]).numpy().astype(float), 4)
    return TokenClusters(
        neuron=largest.site,
        tokens=token_texts(target, ids),
        ids=np.array(ids),
        head=head,
        best=best,
        sufficing=np.array(columns["sufficing"]),
        intact=np.array(columns["intact"]),
        background=background,
        pair_ids=np.array(picked, dtype=int),
        pairs=pairs,
    )


def paired_tokens(setup: Setup, ids: list[int], head: np.ndarray, count: int) -> list[int]:
    """Some served tokens, drawn with the seed and sorted by head."""
    served: dict[int, float] = {}
    for token, own in zip(ids, head.tolist(), strict=True):
        if own == own:  # not NaN
            served[token] = own
    drawn = sample_tokens(list(served), count, setup.seed)
    return sorted(drawn, key=lambda token: (served[token], token))


def neuron_at(target: Target, layer: int, neuron: int, ids: Int[Tensor, "row pos"]) -> Float[Tensor, " row_pos"]:
    """`hook_post` of one neuron at every position, from a pass that ends there."""
    if target.is_mixture(layer):
        return view_layer(target, layer, ids, torch.ones_like(ids, dtype=torch.bool)).post[:, neuron]
    site = f"blocks.{layer}.mlp.hook_post"
    post = trace(target, ids, [site], lambda post: post[..., neuron].float())[site]
    return rearrange(post, "row pos -> (row pos)")


def later_mean(target: Target, ids: Int[Tensor, "row pos"]) -> Float[Tensor, " d_heads"]:
    """Mean of layer 0's `hook_z` over the later positions of a text, heads side by side."""
    site = "blocks.0.attn.hook_z"

    def mean(z: Float[Tensor, "row pos head d_head"]) -> Tensor:
        return reduce(z[:, 1:].float(), "row pos head d_head -> (head d_head)", "mean")

    return trace(target, ids, [site], mean)[site]


def pair_norms(
    target: Target, layer: int, tokens: list[int], first: Int[Tensor, "row 1"]
) -> Float[Tensor, "token token"]:
    """Norm at the second of two tokens after `layer`, over the norm of the first tokens of natural text.

    Args:
        target: The model.
        layer: The sink layer.
        tokens: Every ordered pair of these is a sequence, without BOS.
        first: First tokens of natural text, `[row 1]`.
    """
    ids = torch.tensor(tokens)
    norms = norms_after(target, layer, torch.cartesian_prod(ids, ids), ROWS)[:, -1]
    return rearrange(norms, "(one two) -> one two", one=len(ids)) / norms_after(target, layer, first).median()


def four_decimals(values: Tensor) -> list[float]:
    """What another number of threads may change is beyond four decimals."""
    return [round(value, 4) for value in values.tolist()]
