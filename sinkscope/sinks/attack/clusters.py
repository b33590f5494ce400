"""Which head of the first layer marks each token as first (Yona et al. 2025, section 5.2 and appendix B)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.measure import Setup
from sinkscope.models.checks import attending_layers
from sinkscope.results.claims import Claims, Contrast, Outcome, Search
from sinkscope.results.notation import count_of, word_form
from sinkscope.results.parts import Head
from sinkscope.results.tables import Table
from sinkscope.sinks.chunks import Columns, Resume, hold_layers, in_chunks, token_texts
from sinkscope.sinks.find.left import claim_of
from sinkscope.sinks.find.spikes import MadeSpike
from sinkscope.sinks.marking_heads import Replacement
from sinkscope.sinks.tokens import PerToken, TokenRows

FIRES = 0.5  # share of the sink neuron's usual activation from which it counts as firing
ROWS = 2048  # rows per pass; a token takes one more row than there are heads


@torch.no_grad()
def head_activations(model: Replacement, tokens: list[int]) -> Float[Tensor, "token way"]:
    """How strongly the neuron fires at tokens that stand alone, in 1 + head ways: with no head, and each head alone.

    Args:
        model: The model, whose heads of layer 0 are replaced, and one neuron.
        tokens: The tokens.
    """
    heads = model.setup.n_heads
    lost = model.none_of(1 + heads)
    lost[:, 0] = torch.arange(heads) != torch.arange(-1, heads)[:, None]
    ids = repeat(torch.tensor(tokens), "token -> (token way) 1", way=len(lost))
    rows = repeat(lost, "way layer head -> (token way) layer head", token=len(tokens))
    return rearrange(activations(model, ids, rows), "(token way) -> token way", way=len(lost))


def activations(model: Replacement, ids: TokenRows, lost: Bool[Tensor, "row layer head"] | None = None) -> Tensor:
    """The neuron's activation at the first token of each row."""
    (column,) = model.cols
    return model.written(ids, torch.zeros(len(ids), dtype=torch.long), lost) @ column / column.square().sum()


@dataclass(frozen=True)
class TokenClusters:
    """For every token the head of layer 0 that by itself fires the sink neuron when the token stands first.

    The other heads of layer 0 are held at their mean over later positions of natural text.

    Attributes:
        tokens: The tokens.
        ids: Their ids.
        head: The head that serves the token. NaN if no single head does, or if none is needed.
        best: Activation with the best head alone, as a share of that at the first token of natural text.
        claims: At how many tokens one head alone fires the neuron, beside no head and another one; none if no head
            does.
    """

    tokens: tuple[str, ...]
    ids: tuple[int, ...]
    head: PerToken
    best: PerToken
    claims: Claims = ()

    def rows(self) -> Table:
        """A row for each head that serves tokens, largest cluster first, with the median activation there."""
        rows: Table = []
        for head in np.unique(self.head[np.isfinite(self.head)]):
            mine = self.best[self.head == head]
            rows.append({"head": str(Head(0, int(head))), "tokens": len(mine), "alone": float(np.median(mine))})
        return sorted(rows, key=lambda row: -row["tokens"])

    @property
    def pools(self) -> dict[int, list[int]]:
        """The ids of the tokens that each head serves."""
        pools: dict[int, list[int]] = {}
        for token, head in zip(self.ids, self.head, strict=True):
            if np.isfinite(head):
                pools.setdefault(int(head), []).append(token)
        return pools


def find_clusters(setup: Setup, made: MadeSpike, ids: list[int], resume: Resume) -> TokenClusters | None:
    """The head that serves each token, seen at the sink neuron that writes most. None if there is no neuron.

    Args:
        setup: The model and its text.
        made: The spike at the first token, and the neurons that make it.
        ids: The tokens, which stand alone, thus first.
        resume: Folder that keeps finished chunks.
    """
    if not made.neurons:
        return None
    target = setup.target
    attending_layers(target, [0])  # a layer without attention has no heads, which an error says
    largest = max(made.neurons, key=lambda neuron: neuron.contribution_norm)
    hold_layers(target, largest.layer)
    model = Replacement.of(setup, largest.layer, [largest], made.spike.place)
    reference = float(activations(model, setup.ids[:, :1]).median())

    def work(tokens: list[int]) -> Columns:
        shares = head_activations(model, tokens) / reference
        best, head = shares[:, 1:].max(1)
        columns: Columns = {"head": head.tolist()}
        for name, values in (("best", best), ("other", shares[:, 1:].median(1).values), ("background", shares[:, 0])):
            columns[name] = [round(value, 4) for value in values.tolist()]  # what threads may change is beyond this
        return columns

    size = max(1, ROWS // (target.n_heads + 1))
    columns = in_chunks(setup, work, ids, resume, what="clusters", size=size, site=largest.site)
    best, other, background = (np.array(columns[name]) for name in ("best", "other", "background"))
    served = (best >= FIRES) & (background < FIRES)
    head = np.where(served, np.array(columns["head"], dtype=float), np.nan)
    claims: Claims = ()
    heads = tuple(Head(0, int(each)) for each in np.unique(head[served]))
    if heads:
        gives = f"{word_form(len(heads), 'marks', 'mark')} {{}} of {count_of(len(ids), 'token')}, one head each"
        contrasts = [
            Contrast("other", float((background >= FIRES).mean()), 1, "no head"),
            Contrast("random", float((other >= FIRES).mean()), 1, "another head"),
        ]
        outcome, search = Outcome("mark by one head", gives=gives), Search("tokens", len(ids))
        fires = torch.from_numpy(served).double()
        claims = (claim_of("marks", heads, outcome, "tokens that stand first", fires, contrasts, search),)
    return TokenClusters(token_texts(target, ids), tuple(ids), head, best, claims)
