"""Which head of the first layer marks each token as first (Yona et al. 2025, section 5.2 and appendix B)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.measure import Setup
from sinkscope.results.claims import Claims, Contrast, Outcome, Search
from sinkscope.results.parts import Head
from sinkscope.sinks.chunks import Columns, Resume, hold_layers, in_chunks, token_texts
from sinkscope.sinks.find.left import claim_of
from sinkscope.sinks.find.spikes import MadeSpike
from sinkscope.sinks.marking_heads import Replacement
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

    The other heads of layer 0 are held at their mean over later positions of natural text.

    Attributes:
        tokens: The tokens.
        ids: Their ids.
        head: The head that serves the token. NaN if no single head does, or if none is needed.
    """

    tokens: tuple[str, ...]
    ids: Int[np.ndarray, " token"]
    head: PerToken

    @property
    def heads(self) -> list[int]:
        """The heads that serve tokens."""
        return np.unique(self.head[np.isfinite(self.head)]).astype(int).tolist()

    @property
    def pools(self) -> list[list[int]]:
        """The ids of all tokens, then of those that each head serves."""
        return [self.ids.tolist(), *(self.ids[self.head == head].tolist() for head in self.heads)]


def find_clusters(setup: Setup, made: MadeSpike, ids: list[int], resume: Resume) -> tuple[TokenClusters, Claims]:
    """The head that serves each token, seen at the sink neuron that writes most.

    The claim is of how many tokens one head alone marks, beside no head and another one; there is none if no head does.

    Args:
        setup: The model and its text.
        made: The spike at the first token, and the neurons that make it.
        ids: The tokens, which stand alone, thus first.
        resume: Folder that keeps finished chunks.
    """
    target = setup.target
    largest = max(made.neurons, key=lambda neuron: neuron.contribution_norm)
    hold_layers(target, largest.layer)
    model = Replacement(setup, [largest.address])
    reference = float(model.post(setup.ids[:, 0]).median())

    def work(tokens: list[int]) -> Columns:  # what threads may change is beyond four digits
        return {"shares": (head_activations(model, tokens) / reference).cpu().double().round(decimals=4).tolist()}

    size = max(1, ROWS // (target.n_heads + 1))
    columns = in_chunks(setup, work, ids, resume, what="clusters", size=size, site=largest.site)
    background, alone = np.split(np.array(columns["shares"]), [1], 1)
    needed = background[:, 0] < FIRES
    served = (alone.max(1) >= FIRES) & needed
    head = np.where(served, alone.argmax(1), np.nan)
    heads = tuple(Head(0, int(each)) for each in np.unique(head[served]))
    claims: Claims = ()
    if heads:
        gives = f"marked {{}} of {len(ids):,} tokens, one head each"
        other = float((np.median(alone, 1) >= FIRES).mean())
        contrasts = [
            Contrast("other", 1 - float(needed.mean()), 1, "no head"),
            Contrast("random", other, 1, "another head"),
        ]
        outcome, search = Outcome("mark by one head", gives=gives), Search("tokens", len(ids))
        fires = torch.from_numpy(served).double()
        claims = (claim_of("marks", heads, outcome, "tokens that stand first", fires, contrasts, search),)
    return TokenClusters(token_texts(target, ids), np.array(ids), head), claims
