"""Which head of the first layer marks each token as first (Yona et al. 2025, section 5.2 and appendix B)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.files.notation import neuron_name
from sinkscope.measure import Count, Option, Positive, Result, Setup, measurement
from sinkscope.models.target import Target, first_tensor, on_input, on_output
from sinkscope.sinks.attack.vocabulary import Columns, Work, hold_layers, in_chunks, refuse_workers, shown
from sinkscope.sinks.first_token.layer_scan import norms_after
from sinkscope.sinks.first_token.layer_view import flat_number, view_layer
from sinkscope.sinks.first_token.marking_heads import replacing
from sinkscope.sinks.first_token.result import Neuron
from sinkscope.sinks.first_token.sets import causal_neurons
from sinkscope.sinks.tokens import sample_tokens, vocabulary
from sinkscope.trace.run import trace

_BEFORE = 16  # tokens of text that precede a token at a later position


@dataclass(frozen=True)
class HeadWork(Work):
    """For each token, how strongly single heads fire the sink neuron (Yona et al. 2025, section 5.2, appendix B).

    Attributes:
        layer: Layer of the sink neuron; no deeper layer is run.
        neuron: Its number; in a mixture `expert * d_mlp + neuron`.
        reference: Its activation at the first token of natural text. Activations are given as shares of it.
        threshold: Share from which the neuron counts as firing.
        mean: Mean `hook_z` of each head at later positions of natural text, heads side by side.
        direction: Direction of a linear discriminant of the residual stream after attention 0, first against later
            positions.
        offset: Offset of the discriminant, which says "first" where `x @ direction + offset > 0`.
    """

    neuron: int
    reference: float
    threshold: float
    mean: Float[Tensor, " d_heads"]
    direction: Float[Tensor, " d_model"]
    offset: float

    @torch.no_grad()
    def __call__(self, target: Target, items: list[int]) -> Columns:
        """Columns head, best, sufficing, intact, background, lda_fired, lda_quiet, with one entry per token."""
        share, first = self.shares(target, items)
        alone = share[:, 2:]
        fires = alone >= self.threshold
        best, head = alone.max(1)
        return {
            "head": head.tolist(),
            "best": _rounded(best),
            "sufficing": fires.sum(1).tolist(),
            "intact": _rounded(share[:, 0]),
            "background": _rounded(share[:, 1]),
            "lda_fired": (first & fires).sum(1).tolist(),
            "lda_quiet": (first & ~fires).sum(1).tolist(),
        }

    @torch.no_grad()
    def shares(self, target: Target, items: list[int]) -> tuple[Tensor, Tensor]:
        """Activations divided by the reference, and the side of the discriminant.

        Returns:
            `[token 2+head]`: intact, no head, each head alone; and `[token head]`, True for "first", each head alone.
        """
        heads, ways = target.n_heads, target.n_heads + 2
        ids = torch.tensor(items).repeat_interleave(ways)[:, None]
        lost = torch.cat([torch.zeros(1, heads), torch.ones(1, heads), 1 - torch.eye(heads)]).bool()
        edits = replacing(
            target, self.mean.view(1, heads, -1), lost.repeat(len(items), 1)[:, None], torch.ones(1).bool()
        )
        after: list[Tensor] = []
        with target.hooks(*edits, *after_attention(target, after)):
            post = neuron_at(target, self.layer, self.neuron, ids)
        side = after[0][:, 0].float() @ self.direction.to(target.device) + self.offset > 0
        return (post / self.reference).view(len(items), ways).cpu(), side.view(len(items), ways)[:, 2:].cpu()


def after_attention(target: Target, kept: list[Tensor]) -> list[tuple[Any, str, Any]]:
    """Hooks that append the stream after the attention of layer 0 to `kept` (also where the MLP runs in parallel)."""
    before: list[Tensor] = []

    def keep_after(out: Any) -> None:
        stream = before.pop()
        kept.append(stream + first_tensor(out).detach().view_as(stream))

    added = target.sub(0, target.adapter.post_attn_norm or target.adapter.attn)
    keep_before = on_input(lambda stream: before.append(stream.detach().clone()))
    return [(target.layers[0], "pre", keep_before), (added, "post", on_output(keep_after))]


def neuron_at(target: Target, layer: int, neuron: int, ids: Int[Tensor, "row pos"]) -> Float[Tensor, " row_pos"]:
    """`hook_post` of one neuron at every position, from a pass that ends there."""
    if target.is_mixture(layer):
        return view_layer(target, layer, ids, torch.ones_like(ids, dtype=torch.bool)).post[:, neuron]
    site = f"blocks.{layer}.mlp.hook_post"
    return trace(target, ids, [site], lambda post: post[..., neuron].float())[site].flatten()


def later_mean(target: Target, ids: Int[Tensor, "row pos"]) -> Float[Tensor, " d_heads"]:
    """Mean of layer 0's `hook_z` over the later positions of a text, heads side by side."""
    site = "blocks.0.attn.hook_z"
    return trace(target, ids, [site], lambda z: z[:, 1:].flatten(2).float().mean((0, 1)))[site]


@torch.no_grad()
def first_direction(
    target: Target, ids: Int[Tensor, "row pos"], tokens: list[int], batch: int = 64
) -> tuple[Float[Tensor, " d_model"], float]:
    """A linear discriminant (Fisher's, shrunk) of the residual stream after attention 0 (Yona et al. 2025, figure 4).

    Each token stands once alone and once after natural text, so the token itself cannot separate the two classes.

    Args:
        target: The model.
        ids: Natural text; its beginnings are the text before a token.
        tokens: Tokens that are put in both places.
        batch: Rows per pass.
    """
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    every = torch.tensor(tokens)[:, None]
    before = ids[torch.arange(len(every)) % len(ids), :_BEFORE]
    parts: list[Tensor] = []
    for rows in (*every.split(batch), *torch.cat([before, every], 1).split(batch)):
        after: list[Tensor] = []
        with target.hooks(*after_attention(target, after)):
            target.forward(rows, upto=0)
        parts.append(after[0][:, -1].float().cpu())
    labels = torch.arange(2).repeat_interleave(len(every))
    fitted: Any = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto")
    fitted.fit(torch.cat(parts).numpy(), 1 - labels.numpy())
    return torch.tensor(fitted.coef_[0], dtype=torch.float32), float(fitted.intercept_[0])


def _rounded(values: Tensor) -> list[float]:
    """Four decimals: what another number of threads may change is beyond them."""
    return [round(v, 4) for v in values.tolist()]


EXAMPLES = 12  # tokens of a cluster that are shown
LDA_TOKENS = 512  # number of single tokens that the discriminant is fitted on


@dataclass(frozen=True)
class HeadCluster:
    """The tokens that one head of layer 0 serves best. Examples are those for which it fires the neuron most."""

    head: int
    tokens: int
    examples: tuple[str, ...]


@dataclass(frozen=True)
class LdaSide:
    """The side on which a linear discriminant (first against later positions) puts a token with one head alone.

    Attributes:
        fired: Share of (token, head) pairs that fire the sink neuron and lie on the side of first positions.
        quiet: Share of the pairs that do not fire it and still lie on that side.
    """

    fired: float
    quiet: float


@dataclass(frozen=True)
class PairNorms:
    """Two-token sequences without BOS: does the second token become a sink, as in "Sch Com"?

    Attributes:
        ids: The tokens, ordered by head.
        tokens: The same tokens as strings.
        heads: The head that serves each token.
        norm: Norm at the second position divided by that of the first token, `[first second]`.
        same_head: Share of pairs from one head whose second token reaches the threshold.
        other_head: The same share for pairs from two heads.
        clusters: Number of clusters that an agglomerative clustering of the norms finds.
        adjusted_rand: Agreement of these clusters with the heads: 1 identical, 0 chance level.
    """

    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    heads: tuple[int, ...]
    norm: tuple[tuple[float, ...], ...]
    same_head: float | None
    other_head: float | None
    clusters: int
    adjusted_rand: float


@dataclass(frozen=True, kw_only=True)
class TokenClusters(Result):
    """For every token the head of layer 0 that fires the sink neuron by itself. Activations are shares of the sink
    neuron's activation at the first token of natural text.

    Attributes:
        sink_layer: Sink layer. None if the model has no sink.
        neuron: The sink neuron, (layer, neuron) or (layer, expert, neuron). None if no neuron is causal by itself.
        threshold: Share of the activation from which the neuron counts as firing.
        n_heads: Number of heads in layer 0.
        ids: Ids of the tokens.
        tokens: The same tokens as strings.
        head: The head that serves the token. None if no single head does, or none is needed.
        best: Activation with only that head intact (with the best head, if none serves the token).
        sufficing: Number of heads that suffice alone.
        intact: Activation when the token stands first and nothing is replaced.
        background: Activation with no head intact.
        clusters: Tokens of each head, largest cluster first.
        unserved: Tokens that fire when intact, but with no single head alone.
        silent: Tokens that do not fire when intact.
        without_heads: Tokens that fire with no head of layer 0 intact; something else marks them.
        lda: Agreement with a linear discriminant.
        pairs: Agreement with the norms of pairs. None if fewer than two tokens are served.
    """

    kind: ClassVar[str] = "clusters"
    percent: ClassVar[tuple[str, ...]] = ("share",)
    glossary: ClassVar[dict[str, str]] = {
        "share": "share of all tokens that this head serves",
        "examples": "tokens for which the head fires the sink neuron most strongly",
    }

    sink_layer: int | None
    neuron: tuple[int, ...] | None
    threshold: float
    n_heads: int
    ids: tuple[int, ...] = ()
    tokens: tuple[str, ...] = ()
    head: tuple[int | None, ...] = ()
    best: tuple[float, ...] = ()
    sufficing: tuple[int, ...] = ()
    intact: tuple[float, ...] = ()
    background: tuple[float, ...] = ()
    clusters: tuple[HeadCluster, ...] = ()
    unserved: int = 0
    silent: int = 0
    without_heads: int = 0
    lda: LdaSide | None = None
    pairs: PairNorms | None = None

    def rows(self) -> list[dict[str, Any]]:
        """One row per head that serves tokens."""
        every = max(len(self.ids), 1)
        return [
            {**vars(c), "layer": 0, "share": c.tokens / every, "examples": " ".join(map(repr, c.examples))}
            for c in self.clusters
        ]

    def tokens_of(self, head: int) -> tuple[int, ...]:
        """Ids of the tokens that a head serves, those that fire most strongly first: input for a cluster attack."""
        mine = [(-b, i) for i, h, b in zip(self.ids, self.head, self.best, strict=True) if h == head]
        return tuple(i for _, i in sorted(mine))

    def conclusion(self) -> str:
        """How many tokens a single head serves, and how many fire without any head."""
        if self.sink_layer is None:
            return "The model has no attention sink, so no token is marked as first."
        if self.neuron is None:
            return f"No single neuron makes the sink in layer {self.sink_layer}, so there is nothing to fire."
        every, served = max(len(self.ids), 1), sum(c.tokens for c in self.clusters)
        control = f"with every head of layer 0 at its mean, {self.without_heads / every:.1%} fire it all the same"
        if self.without_heads > every / 2:
            return f"The mark is not made in layer 0: {control}."
        if not served:
            return f"No single head of layer 0 suffices to fire the sink neuron for any token; {control}."
        return (
            f"A single head of layer 0 suffices for {served} of {every} tokens ({len(self.clusters)} of {self.n_heads} "
            f"heads take part); {control}."
        )

    def details(self) -> list[str]:
        """The neuron, the remaining tokens, and the agreement with two other methods."""
        if self.neuron is None:
            return []
        several = sum(n > 1 for n in self.sufficing)
        lines = [
            f"Each token stands alone at the first position; the sink neuron {neuron_name(*self.neuron)} fires from "
            f"{self.threshold:g} of its usual activation on.",
            f"{several} tokens are served by more than one head. {self.unserved} fire the neuron only through several "
            f"heads together, {self.without_heads} without any head, and {self.silent} do not fire it at all.",
        ]
        if self.lda is not None and self.clusters:
            lines.append(
                f"A linear discriminant puts {self.lda.fired:.1%} of the cases that fire on the side of first "
                f"positions, and {self.lda.quiet:.1%} of those that do not."
            )
        if self.pairs is not None:
            p = self.pairs
            rates = ((p.same_head, "one head"), (p.other_head, "two"))
            rate = " and ".join(f"{v:.1%} of pairs of {n}" for v, n in rates if v is not None)
            lines.append(
                f"When two tokens stand without BOS, the second is a sink in {rate}. Those norms form {p.clusters} "
                f"clusters, with adjusted Rand index {p.adjusted_rand:.2f} against the heads."
            )
        return lines


@measurement(
    group="Repetition",
    figure="sinkscope.figures.vocabulary:clusters",
    command="clusters",
    quick={"tokens": ["the", "of", "and"]},
    check=refuse_workers,
)
def token_clusters(
    setup: Setup,
    *,
    tokens: Sequence[str] | None = None,
    threshold: Annotated[float, Option(min=0.001, max=1)] = 0.5,
    sample: Count = 64,
    batch_size: Positive = 2048,
    workers: Positive = 1,
    resume: Annotated[str | Path | None, Option(metavar="DIR", writes=True)] = None,
) -> TokenClusters:
    """Find, for every token, the single head of layer 0 that suffices to fire the sink neuron when the token is first.

    All other heads are held at their mean over later positions of natural text. There are two controls: nothing
    replaced, and every head at its mean. If the second control fires, the mark is not made by the heads of layer 0. The
    tokens stand alone, without BOS (Yona et al. 2025, section 5.2 and appendix B).

    Args:
        tokens: Token to measure. By default the whole vocabulary.
        threshold: Share of the sink neuron's usual activation from which it counts as firing.
        sample: Number of tokens whose pairs are measured; 0 measures none.
        batch_size: Rows per pass; a token takes two more rows than there are heads.
        workers: Number of processes; more than one run over Ray.
        resume: Folder that keeps finished parts, so that an interrupted run can continue.

    Example:
        sinkscope clusters --model llama-2-7b --resume clusters
    """
    ids = vocabulary(setup.target, tokens)
    layer, neurons = causal_neurons(setup)
    return clusters_of(setup, layer, neurons, ids, threshold, sample, batch_size, workers, resume)


def clusters_of(
    setup: Setup,
    layer: int | None,
    neurons: tuple[Neuron, ...],
    ids: list[int],
    threshold: float = 0.5,
    sample: int = 0,
    batch_size: int = 2048,
    workers: int = 1,
    resume: str | Path | None = None,
) -> TokenClusters:
    """`token_clusters` for a model whose sink is known."""
    target = setup.target
    empty: dict[str, Any] = {"sink_layer": layer, "threshold": threshold, "n_heads": target.n_heads}
    if layer is None or not neurons:
        return TokenClusters(neuron=None, **empty)
    site = max(neurons, key=lambda n: n.contribution_norm)
    flat = flat_number(target, layer, site.expert, site.neuron)
    hold_layers(target, layer)
    reference = float(neuron_at(target, layer, flat, setup.ids[:, :1]).median())
    some = sample_tokens(vocabulary(target, None), LDA_TOKENS, setup.seed)  # those of --token are too few for a plane
    direction = first_direction(target, setup.ids, some)
    columns = in_chunks(
        setup,
        HeadWork(layer, flat, reference, threshold, later_mean(target, setup.ids), *direction),
        ids,
        what="tokens x heads",
        size=max(1, batch_size // (target.n_heads + 2)),
        workers=workers,
        resume=resume,
        settings={"threshold": threshold, "site": site.site},
    )
    counted, names = _assign(columns, threshold), shown(target, ids)
    fired, every = sum(columns["sufficing"]), len(ids) * target.n_heads
    sides = sum(columns["lda_fired"]) / max(fired, 1), sum(columns["lda_quiet"]) / max(every - fired, 1)
    return TokenClusters(
        neuron=site.site,
        ids=tuple(ids),
        tokens=names,
        **{name: tuple(columns[name]) for name in ("best", "sufficing", "intact", "background")},
        clusters=_clusters(names, counted["head"], columns["best"]),
        **counted,
        lda=LdaSide(*sides) if 0 < fired < every else None,
        pairs=pairs_of(setup, layer, ids, counted["head"], threshold, sample, batch_size) if sample else None,
        **empty,
    )


def _assign(columns: Columns, threshold: float) -> dict[str, Any]:
    """The head that serves each token, and how many tokens are served by none, and why."""
    heads: list[int | None] = []
    counts = {"unserved": 0, "silent": 0, "without_heads": 0}
    names = ("head", "sufficing", "intact", "background")
    for head, enough, intact, background in zip(*(columns[n] for n in names), strict=True):
        served = enough > 0 and background < threshold
        heads.append(head if served else None)
        if background >= threshold:
            counts["without_heads"] += 1
        elif not served:
            counts["unserved" if intact >= threshold else "silent"] += 1
    return {"head": tuple(heads), **counts}


def _clusters(names: Sequence[str], heads: Sequence[int | None], best: list[float]) -> tuple[HeadCluster, ...]:
    of: dict[int, list[tuple[float, int]]] = {}
    for i, head in enumerate(heads):
        if head is not None:
            of.setdefault(head, []).append((-best[i], i))
    clusters = [
        HeadCluster(head, len(mine), tuple(names[i] for _, i in sorted(mine)[:EXAMPLES])) for head, mine in of.items()
    ]
    return tuple(sorted(clusters, key=lambda c: (-c.tokens, c.head)))


def pairs_of(
    setup: Setup,
    layer: int,
    ids: list[int],
    heads: Sequence[int | None],
    threshold: float,
    sample: int,
    batch_size: int,
) -> PairNorms | None:
    """Norms of two-token sequences for a sample of served tokens, and their clustering."""
    from sklearn.cluster import AgglomerativeClustering
    from sklearn.metrics import adjusted_rand_score

    served = {token: head for token, head in zip(ids, heads, strict=False) if head is not None}
    picked = sorted(sample_tokens(list(served), sample, setup.seed), key=lambda token: (served[token], token))
    if len(picked) < 2:
        return None
    norm = pair_norms(setup.target, layer, picked, setup.ids[:, :1], batch_size)
    head = torch.tensor([served[token] for token in picked])
    same = head[:, None] == head
    same_pairs = same & ~torch.eye(len(head), dtype=torch.bool)
    near = torch.minimum(norm, norm.T).clamp(0, 1)
    # The number of clusters is not fixed: they grow while their tokens, on average, make sinks of each other.
    how: dict[str, Any] = {"n_clusters": None, "metric": "precomputed", "linkage": "average"}
    found: Any = AgglomerativeClustering(**how, distance_threshold=1 - threshold)
    labels = found.fit_predict((1 - near).fill_diagonal_(0).double().numpy())
    return PairNorms(
        ids=tuple(picked),
        tokens=shown(setup.target, picked),
        heads=tuple(head.tolist()),
        norm=tuple(tuple(round(v, 4) for v in row) for row in norm.tolist()),
        same_head=_share(norm[same_pairs] >= threshold),
        other_head=_share(norm[~same] >= threshold),
        clusters=int(labels.max()) + 1,
        adjusted_rand=float(adjusted_rand_score(head.numpy(), labels)),
    )


def pair_norms(
    target: Target, layer: int, tokens: list[int], first: Int[Tensor, "row 1"], batch_size: int
) -> Float[Tensor, "token token"]:
    """Norm at the second of two tokens after `layer`, divided by the norm of the first tokens of natural text.

    Args:
        target: The model.
        layer: The sink layer.
        tokens: Every ordered pair of these is a sequence, without BOS.
        first: First tokens of natural text, `[row 1]`.
        batch_size: Rows per pass.
    """
    ids = torch.tensor(tokens)
    pairs = norms_after(target, layer, torch.cartesian_prod(ids, ids), batch_size)[:, -1]
    return pairs.view(len(ids), len(ids)) / norms_after(target, layer, first).median()


def _share(hits: Tensor) -> float | None:
    return float(hits.float().mean()) if len(hits) else None
