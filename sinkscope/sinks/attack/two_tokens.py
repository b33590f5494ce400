"""Sequences of two tokens: which make a sink of the second, and how that agrees with the heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.models.target import Target, first_tensor
from sinkscope.sinks.attack.vocabulary import draw, shown
from sinkscope.sinks.first_token.locate import Setup


@dataclass(frozen=True)
class PairNorms:
    """Sequences of two tokens without BOS: does the second one become a sink, as in "Sch Com"?

    Attributes:
        ids: the tokens, by head.
        tokens: the same as strings.
        heads: the head that serves each.
        norm: norm at the second position over that of the first token, `[first second]`.
        same_head: share of pairs of one head whose second token reaches the threshold.
        other_head: share of pairs of two heads.
        clusters: how many an agglomerative clustering of the norms finds.
        adjusted_rand: its agreement with the heads: 1 the same clusters, 0 as by chance.
    """

    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    heads: tuple[int, ...]
    norm: tuple[tuple[float, ...], ...]
    same_head: float | None
    other_head: float | None
    clusters: int
    adjusted_rand: float


def pairs_of(
    made: Setup, layer: int, ids: list[int], heads: list[int | None], threshold: float, sample: int, batch_size: int
) -> PairNorms | None:
    """Norms of two-token sequences of a sample of served tokens, and their clustering."""
    from sklearn.cluster import AgglomerativeClustering
    from sklearn.metrics import adjusted_rand_score

    served = {token: head for token, head in zip(ids, heads, strict=False) if head is not None}
    picked = sorted(draw(list(served), sample, made.seed), key=lambda token: (served[token], token))
    if len(picked) < 2:
        return None
    norm = pair_norms(made.target, layer, picked, made.ids[:, :1], batch_size)
    head = torch.tensor([served[token] for token in picked])
    same = head[:, None] == head
    same_pairs = same & ~torch.eye(len(head), dtype=torch.bool)
    near = torch.minimum(norm, norm.T).clamp(0, 1)
    # No number of clusters is given: they grow while their tokens make sinks of each other, on average.
    how: dict[str, Any] = {"n_clusters": None, "metric": "precomputed", "linkage": "average"}
    found: Any = AgglomerativeClustering(**how, distance_threshold=1 - threshold)
    labels = found.fit_predict((1 - near).fill_diagonal_(0).double().numpy())
    return PairNorms(
        ids=tuple(picked),
        tokens=shown(made.target, picked),
        heads=tuple(head.tolist()),
        norm=tuple(tuple(round(v, 4) for v in row) for row in norm.tolist()),
        same_head=_share(norm[same_pairs] >= threshold),
        other_head=_share(norm[~same] >= threshold),
        clusters=int(labels.max()) + 1,
        adjusted_rand=float(adjusted_rand_score(head.numpy(), labels)),
    )


@torch.no_grad()
def pair_norms(
    target: Target, layer: int, tokens: list[int], first: Tensor, batch_size: int
) -> Float[Tensor, "token token"]:
    """Norm at the second of two tokens after `layer`, over the norm of the first tokens of natural text.

    Args:
        target: the model.
        layer: the sink layer.
        tokens: every ordered pair of them is a sequence, without BOS.
        first: first tokens of natural text, `[row 1]`.
        batch_size: rows per pass.
    """
    kept: list[Tensor] = []

    def keep(_m: object, _a: object, _k: object, out: Any) -> None:
        kept.append(torch.linalg.vector_norm(first_tensor(out)[:, -1], dim=-1, dtype=torch.float32).cpu())
        target.stop()

    ids = torch.tensor(tokens)
    with target.hooks((target.layers[layer], "post", keep)):
        for part in torch.cartesian_prod(ids, ids).split(batch_size):
            target.forward(part)
        pairs = torch.cat(kept).view(len(ids), len(ids))
        target.forward(first)
    return pairs / kept[-1].median()


def _share(hits: Tensor) -> float | None:
    return float(hits.float().mean()) if len(hits) else None
