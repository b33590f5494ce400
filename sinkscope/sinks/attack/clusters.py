"""Which head of the first layer marks each token as first (Yona et al. 2025, section 5.2 and appendix B)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from einops import rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.measure import Setup
from sinkscope.models.checks import attending_layers
from sinkscope.results.claims import Claims, Outcome
from sinkscope.results.notation import count_of, word_form
from sinkscope.results.parts import Head, Neuron
from sinkscope.results.tables import Table
from sinkscope.sinks.chunks import Columns, Resume, hold_layers, in_chunks, token_texts
from sinkscope.sinks.find.spikes import MadeSpike
from sinkscope.sinks.marking_heads import Replacement
from sinkscope.sinks.repetition.sweep import claim_of_cases
from sinkscope.sinks.tokens import PerToken

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
    ids = repeat(torch.tensor(tokens), "token -> (token way)", way=len(lost))
    rows = repeat(lost, "way layer head -> (token way) layer head", token=len(tokens))
    return rearrange(model.post(ids, rows), "(token way) 1 -> token way", way=len(lost))


@dataclass(frozen=True)
class TokenClusters:
    """For every token the head of layer 0 that by itself fires the sink neuron when the token stands first.

    Activations are shares of the sink neuron's activation at the first token of natural text. The other heads of
    layer 0 are held at their mean over later positions of natural text.

    Attributes:
        neuron: The sink neuron.
        tokens: The tokens.
        ids: Their ids.
        head: The head that serves the token. NaN if no single head does, or if none is needed.
        best: Activation with the best head alone.
        other: Median activation with another head alone.
        background: Activation with every head at its mean.
    """

    neuron: Neuron
    tokens: tuple[str, ...]
    ids: Int[np.ndarray, " token"]
    head: PerToken
    best: PerToken
    background: PerToken
    other: PerToken

    @property
    def heads(self) -> list[int]:
        """Heads that serve tokens, largest cluster first."""
        served = np.sort(self.head[np.isfinite(self.head)]).astype(int)
        return [head for head, _ in Counter(served.tolist()).most_common()]

    @property
    def claims(self) -> Claims:
        """At how many tokens one head alone fires the neuron, beside no head and another one; none if no head does."""
        if not self.heads:
            return ()
        mark = word_form(len(self.heads), "marks", "mark")
        gives = f"{mark} {{}} of {count_of(len(self.ids), 'token')}, one head each"
        fires = torch.from_numpy(np.stack([np.isfinite(self.head), self.background >= FIRES, self.other >= FIRES]))
        heads, outcome = tuple(Head(0, head) for head in self.heads), Outcome("mark by one head", gives=gives)
        return (claim_of_cases(heads, "tokens that stand first", outcome, fires.double()),)

    def rows(self) -> Table:
        """A row for each head that serves tokens, with their number, and the median activation there in each way."""
        rows: Table = []
        for head in self.heads:
            row: dict[str, Any] = {"head": str(Head(0, head)), "tokens": int((self.head == head).sum())}
            for name, values in (("alone", self.best), ("no head", self.background), ("another", self.other)):
                row[name] = float(np.median(values[self.head == head]))
            rows.append(row)
        return rows

    def tokens_of(self, head: int) -> tuple[int, ...]:
        """Ids of the tokens that a head serves, those that fire the neuron most strongly first."""
        mine = np.flatnonzero(self.head == head)
        order = np.lexsort((self.ids[mine], -self.best[mine]))
        return tuple(self.ids[mine[order]].tolist())


def find_clusters(setup: Setup, made: MadeSpike | None, ids: list[int], resume: Resume) -> TokenClusters | None:
    """The head that serves each token, seen at the sink neuron that writes most.

    None if there is no neuron, or if the spike is not at the first token: the tokens stand alone, thus first.

    Args:
        setup: The model and its text.
        made: The spike, and the neurons that make it.
        ids: The tokens.
        resume: Folder that keeps finished chunks.
    """
    if made is None or not made.neurons or not made.spike.place.is_first:
        return None
    target = setup.target
    attending_layers(target, [0])  # a layer without attention has no heads, which an error says
    largest = max(made.neurons, key=lambda neuron: neuron.contribution_norm)
    hold_layers(target, largest.layer)
    model = Replacement(setup, [largest.address])
    reference = float(model.post(setup.ids[:, 0]).median())

    def work(tokens: list[int]) -> Columns:
        shares = head_activations(model, tokens) / reference
        best, head = shares[:, 1:].max(1)
        columns: Columns = {"head": head.tolist()}
        for name, values in (("best", best), ("other", shares[:, 1:].median(1).values), ("background", shares[:, 0])):
            columns[name] = [round(value, 4) for value in values.tolist()]  # what threads may change is beyond this
        return columns

    size = max(1, ROWS // (target.n_heads + 1))
    columns = in_chunks(setup, work, ids, resume, what="clusters", size=size, site=largest.site)
    best = np.array(columns["best"])
    background = np.array(columns["background"])
    served = (best >= FIRES) & (background < FIRES)
    return TokenClusters(
        neuron=largest.address,
        tokens=token_texts(target, ids),
        ids=np.array(ids),
        head=np.where(served, np.array(columns["head"], dtype=float), np.nan),
        best=best,
        background=background,
        other=np.array(columns["other"]),
    )
