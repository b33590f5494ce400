"""Which head of the first layer marks which token as first (Yona et al. 2025, section 5.2 and appendix B)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from sinkscope.errors import SinkscopeError
from sinkscope.models.open import fingerprint_of
from sinkscope.models.target import Target
from sinkscope.parallel import check_workers
from sinkscope.results import Result
from sinkscope.sinks.attack.chunks import Columns, Opened, hold_layers, in_chunks
from sinkscope.sinks.attack.single_head import HeadWork, first_direction, later_mean, neuron_at
from sinkscope.sinks.attack.two_tokens import PairNorms, pairs_of
from sinkscope.sinks.attack.vocabulary import draw, shown, vocabulary
from sinkscope.sinks.first_token.ablation import Neuron
from sinkscope.sinks.first_token.locate import Setup, causal_neurons, setup, walk_far_enough
from sinkscope.sinks.first_token.walk import Progress

EXAMPLES = 12  # tokens shown of a cluster
LDA_TOKENS = 512  # tokens alone that the discriminant is fitted on


@dataclass(frozen=True)
class HeadCluster:
    """The tokens that one head of layer 0 serves best; examples are those it fires strongest."""

    head: int
    tokens: int
    examples: tuple[str, ...]


@dataclass(frozen=True)
class LdaSide:
    """Where a linear discriminant (first against later positions) puts a token with one head alone.

    Attributes:
        fired: share of (token, head) that fire the sink neuron and lie on the side of first positions.
        quiet: share of those that do not fire it and lie there all the same.
    """

    fired: float
    quiet: float


@dataclass(frozen=True, kw_only=True)
class TokenClusters(Result):
    """For every token the head of layer 0 that fires the sink neuron by itself. Activations are shares of the sink
    neuron's activation at the first token of natural text.

    Attributes:
        sink_layer: None: the model has no sink.
        neuron: the sink neuron, (layer, neuron) or (layer, expert, neuron); None: no neuron is causal by itself.
        threshold: share from which the neuron fires.
        n_heads: of layer 0.
        ids: the tokens.
        tokens: the same as strings.
        head: the head that serves the token; None where no single head does, or none is needed.
        best: activation with only that head (with the best one, where none serves).
        sufficing: number of heads that suffice by themselves.
        intact: activation when the token stands first and nothing is replaced.
        background: activation with no head intact.
        clusters: tokens per head, largest first.
        unserved: tokens that fire when intact, but by no single head.
        silent: tokens that do not fire when intact.
        without_heads: tokens that fire with no head of layer 0 intact: what marks them is elsewhere.
        lda: agreement with a linear discriminant.
        pairs: agreement with norms of pairs; None without two served tokens.
    """

    kind: ClassVar[str] = "clusters"
    percent: ClassVar[tuple[str, ...]] = ("share",)

    sink_layer: int | None
    neuron: tuple[int, ...] | None
    threshold: float
    n_heads: int
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    head: tuple[int | None, ...]
    best: tuple[float, ...]
    sufficing: tuple[int, ...]
    intact: tuple[float, ...]
    background: tuple[float, ...]
    clusters: tuple[HeadCluster, ...]
    unserved: int
    silent: int
    without_heads: int
    lda: LdaSide | None
    pairs: PairNorms | None

    def rows(self) -> list[dict[str, Any]]:
        """One row per head that serves tokens."""
        every = max(len(self.ids), 1)
        return [
            {"head": c.head, "tokens": c.tokens, "share": c.tokens / every, "examples": " ".join(map(repr, c.examples))}
            for c in self.clusters
        ]

    def tokens_of(self, head: int) -> tuple[int, ...]:
        """Ids of the tokens that a head serves, those it fires strongest first: material for a cluster attack."""
        mine = [(-b, i) for i, h, b in zip(self.ids, self.head, self.best, strict=True) if h == head]
        return tuple(i for _, i in sorted(mine))

    def summary(self) -> str:
        """What was found, in a few lines."""
        if self.sink_layer is None:
            return f"{self.model.name}: no attention sink, so no token is marked as first."
        if self.neuron is None:
            return f"{self.model.name}: no single neuron makes the sink in layer {self.sink_layer}; nothing to fire."
        every, served = len(self.ids), sum(c.tokens for c in self.clusters)
        lines = [
            f"{self.model.name}: {every} tokens, each alone at the first position; sink neuron "
            f"{self.neuron[-1]} of layer {self.sink_layer}, threshold {self.threshold:g} of its usual activation."
        ]
        if self.without_heads > every / 2:
            lines.append(
                f"Not in layer 0: {self.without_heads / every:.1%} of the tokens fire it with every head of layer 0 at "
                "its mean."
            )
        elif not served:
            lines.append("No single head of layer 0 suffices for any token.")
        else:
            several = sum(n > 1 for n in self.sufficing)
            lines.append(
                f"{served} are served by a single head ({len(self.clusters)} of {self.n_heads} heads take part), "
                f"{several} of them by more than one."
            )
        lines.append(
            f"{self.unserved} fire it only by several heads together, {self.without_heads} without any, {self.silent} "
            "do not fire it at all."
        )
        if self.lda is not None and served:
            lines.append(
                f"A linear discriminant puts {self.lda.fired:.1%} of what fires on the side of first positions, and "
                f"{self.lda.quiet:.1%} of what does not."
            )
        if self.pairs is not None:
            p = self.pairs
            rates = ((p.same_head, "one head"), (p.other_head, "two"))
            rate = " and ".join(f"{v:.1%} of pairs of {n}" for v, n in rates if v is not None)
            lines.append(
                f"Two tokens without BOS: the second is a sink in {rate}; clusters of those norms: {p.clusters}, "
                f"adjusted Rand index {p.adjusted_rand:.2f}."
            )
        return "\n".join(lines)


def token_clusters(
    model: object = None,
    *,
    tokenizer: Any = None,
    bos: bool | None = None,
    text: str | Path | None = None,
    tokens: Sequence[str] | None = None,
    threshold: float = 0.5,
    sample: int = 64,
    batch_size: int = 2048,
    texts: int = 4,
    seed: int = 0,
    workers: int = 1,
    resume: str | Path | None = None,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> TokenClusters:
    """For every token: which single head of layer 0 suffices to fire the sink neuron when the token stands first.

    All other heads are held at their mean over later positions of natural text. Two controls go with it: nothing
    replaced, and every head at its mean; where the latter fires, the mark is not made in layer 0.

    Args:
        model: None (the bundled model), short name, hub id, folder, `.gguf` file, or a live model of any kind.
        tokenizer: for live models that carry none.
        bos: begin natural text with BOS; None: where the tokenizer has one. The tokens themselves stand alone.
        text: file of typical text; None: the neutral text that ships.
        tokens: strings, one token each; None: the whole vocabulary.
        threshold: share of the sink neuron's usual activation from which it fires.
        sample: tokens whose pairs are measured; 0: none.
        batch_size: rows per pass; a token takes (heads + 2) of them.
        texts: pieces of 64 tokens of typical text.
        seed: of the sample.
        workers: processes; more than one run over Ray.
        resume: folder for finished chunks; a run that was ended goes on from there with the same table.
        revision: of a hub id.
        dtype: of the weights of a model given by name; None: float32 on a CPU, else bfloat16.
        device: for models given by name; None: the first cuda device if there is one.
        trust_remote_code: run code that comes with the checkpoint.
        progress: called as `progress(what, done, total)`.

    Raises:
        SinkscopeError: bad input; the message is one line and says what to do.
    """
    _check(threshold, sample, batch_size, seed)
    check_workers(workers)
    options: dict[str, Any] = {
        "tokenizer": tokenizer,
        "revision": revision,
        "dtype": dtype,
        "device": device,
        "trust_remote_code": trust_remote_code,
    }
    made, layer, neurons = sink_of(setup(model, bos=bos, text=text, texts=texts, seed=seed, **options))
    return clusters_of(
        made,
        layer,
        neurons,
        Opened(model, made.target, options),
        vocabulary(made.target, tokens),
        threshold,
        sample,
        batch_size,
        workers,
        resume,
        progress,
        {
            "bos": made.bos is not None,
            "text": None if text is None else Path(text).name,
            "texts": len(made.ids),
            "tokens": None if tokens is None else list(tokens),
            "threshold": threshold,
            "sample": sample,
            "batch_size": batch_size,
            "seed": seed,
            "revision": revision,
            "workers": workers,
        },
    )


def sink_of(made: Setup) -> tuple[Setup, int | None, tuple[Neuron, ...]]:
    """Sink layer and causal neurons, and the setup with as many layers open as that takes."""
    layer = walk_far_enough(made, whole=made.target.resident).sink_layer()
    return made, layer, () if layer is None else causal_neurons(made, layer)[1]


def clusters_of(
    made: Setup,
    layer: int | None,
    neurons: tuple[Neuron, ...],
    opened: Opened,
    ids: list[int],
    threshold: float,
    sample: int,
    batch_size: int,
    workers: int,
    resume: str | Path | None,
    progress: Progress | None,
    settings: dict[str, Any],
) -> TokenClusters:
    """`token_clusters` of a model that is open already and whose sink is known."""
    target = made.target
    site = None if not neurons else max(neurons, key=lambda n: n.contribution_norm)
    columns: Columns = {}
    lda = pairs = None
    if layer is not None and site is not None:
        hold_layers(target, layer)
        flat = site.neuron + (site.expert or 0) * target.d_mlp
        reference = float(neuron_at(target, layer, flat, made.ids[:, :1]).median())
        some = draw(vocabulary(target, None), LDA_TOKENS, made.seed)  # the few of --token would make no plane
        work = HeadWork(
            layer, flat, reference, threshold, later_mean(target, made.ids), *first_direction(target, made.ids, some)
        )
        columns = in_chunks(
            opened,
            work,
            ids,
            what="tokens x heads",
            size=max(1, batch_size // (target.n_heads + 2)),
            workers=workers,
            resume=resume,
            settings=table_settings(made) | {"threshold": threshold, "site": site.site},
            progress=progress,
        )
        lda = _lda(columns, len(ids) * target.n_heads)
    counted = _assign(columns, threshold)
    if layer is not None and sample:
        pairs = pairs_of(made, layer, ids, counted["head"], threshold, sample, batch_size)
    names = shown(target, ids) if columns else ()
    return TokenClusters(
        model=made.info(),
        settings=settings,
        provenance=made.provenance(),
        sink_layer=layer,
        neuron=None if site is None else site.site,
        threshold=threshold,
        n_heads=target.n_heads,
        ids=tuple(ids) if columns else (),
        tokens=names,
        head=tuple(counted["head"]),
        best=tuple(columns.get("best", ())),
        sufficing=tuple(columns.get("sufficing", ())),
        intact=tuple(columns.get("intact", ())),
        background=tuple(columns.get("background", ())),
        clusters=_clusters(names, counted["head"], columns.get("best", [])),
        unserved=counted["unserved"],
        silent=counted["silent"],
        without_heads=counted["without_heads"],
        lda=lda,
        pairs=pairs,
    )


def table_settings(made: Setup) -> dict[str, Any]:
    """What of a setup decides a table over the vocabulary: the model, the text, BOS, the seed."""
    return {
        "model": fingerprint_of(made.target),
        "weights": _some_weights(made.target),
        "dtype": str(made.target.dtype),
        "bos": made.bos,
        "seed": made.seed,
        "text": hashlib.sha256(made.text.encode()).hexdigest()[:16],
        "texts": len(made.ids),
    }


@torch.no_grad()
def _some_weights(target: Target) -> str:
    """Digest of a few weights of each layer in memory (of the first, where layers are read from disk).

    It tells apart what has the same fingerprint: models that differ in their weights only.
    """
    parts = [target.embedding(torch.arange(0, int(target.config.vocab_size), 97, device=target.device))]
    for layer in range(target.n_layers if target.resident else 1):
        with target.loaded(layer):
            parts.append(target.w_out(layer, list(range(8)), 0 if target.is_mixture(layer) else None))
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _check(threshold: float, sample: int, batch_size: int, seed: int) -> None:
    if not 0 < threshold <= 1:
        raise SinkscopeError(f"--threshold {threshold}: a share of the usual activation; give more than 0, at most 1")
    if sample < 0:
        raise SinkscopeError(f"--sample {sample} is negative; give 0 (no pairs) or more")
    if batch_size < 1:
        raise SinkscopeError(f"--batch-size {batch_size}: at least one row is needed; give 1 or more")
    if seed < 0:
        raise SinkscopeError(f"--seed {seed} is negative; give 0 or more")


def _assign(columns: Columns, threshold: float) -> dict[str, Any]:
    """The head that serves each token, and how many tokens are served by none, and why."""
    heads: list[int | None] = []
    counts = {"unserved": 0, "silent": 0, "without_heads": 0}
    names = ("head", "sufficing", "intact", "background")
    for head, enough, intact, background in zip(*(columns.get(n, []) for n in names), strict=True):
        served = enough > 0 and background < threshold
        heads.append(head if served else None)
        if background >= threshold:
            counts["without_heads"] += 1
        elif not served:
            counts["unserved" if intact >= threshold else "silent"] += 1
    return {"head": heads, **counts}


def _clusters(names: Sequence[str], heads: list[int | None], best: list[float]) -> tuple[HeadCluster, ...]:
    of: dict[int, list[tuple[float, int]]] = {}
    for i, head in enumerate(heads):
        if head is not None:
            of.setdefault(head, []).append((-best[i], i))
    clusters = [
        HeadCluster(head, len(mine), tuple(names[i] for _, i in sorted(mine)[:EXAMPLES])) for head, mine in of.items()
    ]
    return tuple(sorted(clusters, key=lambda c: (-c.tokens, c.head)))


def _lda(columns: Columns, every: int) -> LdaSide | None:
    fired = sum(columns["sufficing"])
    if not 0 < fired < every:
        return None
    return LdaSide(sum(columns["lda_fired"]) / fired, sum(columns["lda_quiet"]) / (every - fired))
