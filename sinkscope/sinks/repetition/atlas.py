"""For every token of the vocabulary: after how many repetitions it becomes a sink (Yona et al. 2025, Fig. 6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.express as px
from jaxtyping import Int

from sinkscope.measure import Setup
from sinkscope.models.draws import seed_of
from sinkscope.results.claims import Claims
from sinkscope.results.notation import head_name
from sinkscope.results.style import long_table
from sinkscope.results.tables import Table
from sinkscope.sinks.attack.clusters import find_clusters
from sinkscope.sinks.chunks import Columns, Resume, hold_layers, in_chunks, token_texts
from sinkscope.sinks.find.repetitions import repeat_until_half
from sinkscope.sinks.find.spikes import MadeSpike
from sinkscope.sinks.repetition.norm import norms_of_copies
from sinkscope.sinks.repetition.sweep import Reading
from sinkscope.sinks.tokens import PerToken, prefixes, repeated, sample_tokens, vocabulary

TOKENS = 64  # tokens in one chunk
COMPARED = 16  # tokens whose copies are compared with one copy and with other tokens


@dataclass(frozen=True, kw_only=True)
class AtlasReading(Reading):
    """Repetition of every token of the vocabulary. NaN stands for never, and for no head.

    The claim is of 16 of the tokens that repetition brings to half of the spike's norm or, if there are none, of all.

    Attributes:
        tokens: The tokens.
        ids: Their ids.
        repeats: First number of repetitions whose norm at the sink layer reaches half of the spike's.
        head: Head of layer 0 that serves the token, as in `attack`; none if the spike is not at the first token.
        max_repeats: Largest number of repetitions tried.
        place: Where the spike is.
    """

    tokens: tuple[str, ...]
    ids: Int[np.ndarray, " token"]
    repeats: PerToken
    head: PerToken
    max_repeats: int
    place: str = "the first token"

    @property
    def resists(self) -> np.ndarray:
        """Which tokens never become a sink, `[token]`."""
        return np.isnan(self.repeats)

    def conclusion(self) -> str:
        """How many tokens get the norm of a spike with copies only, and how many have it at once."""
        repeated, at_once = int((self.repeats > 1).sum()), int((self.repeats == 1).sum())
        return (
            f"Of {len(self.ids)} tokens, {repeated} reach half of the norm at {self.place} within {self.max_repeats} "
            f"copies, and {at_once} with one copy."
        )

    def details(self) -> list[str]:
        """After how many repetitions, beside what, and whether the resisting tokens are those that no head serves."""
        resists, served = self.resists, np.isfinite(self.head)
        lines = super().details()
        if (self.repeats > 1).any():
            lines.append(f"In the median, a token needs {np.median(self.repeats[self.repeats > 1]):.0f} copies.")
        if resists.any() and not resists.all() and served.any():
            lines.append(
                f"A single head of layer 0 is enough to mark {served[resists].mean():.1%} of the {resists.sum()} "
                f"tokens that never reach it, and {served[~resists].mean():.1%} of the others."
            )
        return lines

    def rows(self) -> Table:
        """One row per token, those first that never become a sink."""
        rows = long_table({"id": self.ids, "repeats": self.repeats, "head": self.head}, token=self.tokens)
        return sorted(rows, key=lambda row: row["repeats"] is not None)

    def draw(self) -> Any:
        """Number of tokens by the repetitions they need, coloured by the head that serves them."""
        names = []
        for head in self.head:
            names.append("no single head" if np.isnan(head) else head_name(0, int(head)))
        never = np.where(self.resists, 2.0 * self.max_repeats, self.repeats)
        words = f"log2 of the repetitions until a sink (last bar: never within {self.max_repeats})"
        fig = px.histogram(x=np.log2(never), color=names, nbins=48, labels={"color": "head", "x": words})
        return fig.update_yaxes(title_text="tokens")


def read_vocabulary(setup: Setup, made: MadeSpike, limit: int, sample: int | None, resume: Resume) -> AtlasReading:
    """The repetitions that every token needs at the layer of a spike."""
    target, scan, place = setup.target, made.scan, made.spike.place
    ids = vocabulary(target, None)
    if sample is not None:
        ids = sorted(sample_tokens(ids, sample, setup.seed))
    clusters = find_clusters(setup, made, ids, resume)
    hold_layers(target, scan.layer)

    def work(tokens: list[int]) -> Columns:
        needed = repeat_until_half(scan, tokens, prefixes(setup, tokens), limit)
        return {"repeats": [token.repeats for token in needed.tokens]}

    settings = {"layer": scan.layer, "max_repeats": limit, "place": place.words}
    columns = in_chunks(setup, work, ids, resume, what="vocabulary", size=TOKENS, **settings)
    repeats = np.array(columns["repeats"], dtype=float)
    tried = np.flatnonzero(repeats != 1).tolist()
    some = np.flatnonzero(repeats > 1).tolist() or tried
    compared = sample_tokens([ids[row] for row in some], COMPARED, seed_of(setup.seed, "tokens to compare"))
    claims: Claims = ()
    if compared:
        rows = repeated(prefixes(setup, compared), compared, limit)
        claims = (norms_of_copies(setup, scan, rows, 1, len(tried)),)
    return AtlasReading(
        tokens=token_texts(target, ids),
        ids=np.array(ids),
        repeats=repeats,
        head=np.full(len(ids), np.nan) if clusters is None else clusters.head,
        max_repeats=limit,
        place=place.words,
        claims=claims,
    )
