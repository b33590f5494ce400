"""Sets of neurons: the smallest whose removal ends the spike, in all later layers and in attention, and its backups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import comb

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.interventions import Ablate
from sinkscope.measure import Setup
from sinkscope.models.target import Target
from sinkscope.sinks.first_token.effects import Edit, attending, effects
from sinkscope.sinks.first_token.found import (
    DRAWS,
    LOST,
    RATE_EPS,
    CausalSet,
    LaterSink,
    Member,
    Neuron,
    Sites,
)
from sinkscope.sinks.first_token.neurons import prove, stage_neurons
from sinkscope.sinks.first_token.walk import LEAST, SINK_RATIO, STAGE_OUTLIER, Walk, walk

ROUNDS = 4  # rounds of searching for backups before the search ends
TOP = 8  # default number of candidates
WIDE = 64  # candidates of the sink layer tried together if the first few do not suffice
LATER = 3  # tokens behind the first position whose spikes are examined
_TRIED = 128  # largest number of sets of one size to try
_TOKENS = 32  # length of the text in which attention is compared


@dataclass(frozen=True)
class Found:
    """The result of the search: the sets, the candidates with those that it added, and what it did not try."""

    sets: tuple[CausalSet, ...] = ()
    neurons: tuple[Neuron, ...] = ()
    not_tried: tuple[str, ...] = ()

    @property
    def minimal(self) -> CausalSet | None:
        """The smallest set that removes the spike."""
        return next((s for s in self.sets if s.kind == "minimal"), None)

    @property
    def members(self) -> tuple[Neuron, ...]:
        """The neurons of the minimal set; empty if no set removes the spike."""
        sites = () if self.minimal is None else self.minimal.numbers
        return tuple(n for n in self.neurons if n.site in sites)


@dataclass
class _Search:
    """The search for the smallest set of neurons that makes the spike of the last token of `texts`.

    Attributes:
        target: The model.
        texts: The texts, which end with this token.
        text: Texts that go on behind it, where attention to the token is compared.
        seen: The walk that found the spike.
        layer: The layer that makes the spike.
        last: The last layer after which the norm stands out.
        heads: The (layer, head) pairs behind `layer` that attend to the token.
        generator: Draws the random sets.
        not_tried: What the search left out.
        intact: Norm of the token after each layer, median over texts; from the first pass on.
    """

    target: Target
    texts: Int[Tensor, "row pos"]
    text: Int[Tensor, "other longer"]
    seen: Walk
    layer: int
    last: int
    heads: Sequence[tuple[int, int]]
    generator: torch.Generator
    not_tried: list[str] = field(default_factory=list)
    intact: Tensor = field(default_factory=lambda: torch.empty(0))

    def __post_init__(self) -> None:
        self.heads = [(layer, head) for layer, head in self.heads if layer > self.layer]

    @property
    def at(self) -> int:
        """Position of the token."""
        return self.texts.shape[1] - 1

    def norms(self, sets: Sequence[Sites]) -> Float[Tensor, "set layer"]:
        """Median over texts, for each set."""
        edits = [Edit(zero=s) for s in sets]
        seen = effects(self.target, self.texts, edits, at=self.at, upto=self.last, without=self.seen.shared)
        self.intact = seen.intact_norms.quantile(0.5, dim=0)
        return seen.norms.quantile(0.5, dim=1) if sets else seen.norms[:, 0]

    def drops(self, norms: Float[Tensor, "set layer"], layer: int) -> list[float]:
        """Share of the intact norm that is gone at a layer."""
        return (1 - norms[:, layer] / self.intact[layer]).tolist()

    def gone(self, norms: Float[Tensor, "set layer"], *layers: int) -> list[bool]:
        """Whether the norm stands out no more at these layers, and most of what stood out is gone."""
        at = torch.tensor(layers)
        usual = torch.tensor(self.seen.usual)[at]
        low = norms[:, at] <= SINK_RATIO * usual
        most = self.intact[at] - norms[:, at] >= LOST * (self.intact[at] - usual)
        return (low & most).all(1).tolist()

    def smallest(self, sites: Sites, *layers: int) -> Sites | None:
        """The smallest of the sets tried that takes the spike away at these layers; None if none does."""
        for size in range(1, len(sites) + 1):
            if comb(len(sites), size) > _TRIED:
                self.not_tried.append(
                    f"of {len(sites)} candidates, only some of the sets with {size} neurons or more were tried"
                )
                break
            if found := self._best(list(combinations(sites, size)), *layers):
                return found
        else:
            return None
        prefixes = [sites[:k] for k in range(2, len(sites) + 1)]
        gone = self.gone(self.norms(prefixes), *layers)
        chosen = next((some for some, good in zip(prefixes, gone, strict=True) if good), None)
        while chosen is not None and len(chosen) > 1:  # drop the least needed neuron while the spike stays gone
            fewer = self._best([tuple(s for s in chosen if s != out) for out in chosen], *layers)
            if fewer is None:
                break
            chosen = fewer
        return chosen

    def _best(self, sets: list[Sites], *layers: int) -> Sites | None:
        """Of the sets that take the spike away, the one that takes most; None if none does."""
        norms = self.norms(sets)
        drops = self.drops(norms, layers[-1])
        good = [i for i, gone in enumerate(self.gone(norms, *layers)) if gone]
        return sets[max(good, key=lambda i: drops[i])] if good else None

    def with_backups(self, ids: Int[Tensor, "row pos"], here: Sites) -> tuple[Sites | None, Sites, list[Neuron]]:
        """The smallest set with the neurons that bring the spike back when `here` is silent; these; and all tried."""
        backups, added = Sites(), list[Neuron]()
        for _ in range(ROUNDS):
            silent = (*here, *backups)
            with Ablate(sites=silent).on(self.target):
                again = walk(self.target, ids, whole=True, upto=self.last)
                stages = [i for i in again.stages if i > self.layer]
                brought = [n for i in stages for n in stage_neurons(self.target, ids, i, 4, self.generator)]
            brought = [n for n in brought if n.site not in silent]
            added += brought
            sites = tuple(n.site for n in brought)
            if chosen := self.smallest((*silent, *sites), self.layer, self.last) if sites else None:
                return chosen, tuple(s for s in chosen if s not in here), added
            if not sites:
                break
            backups = (*backups, *sites)
        self.not_tried.append(f"neurons that bring the spike back were searched in {ROUNDS} rounds")
        return None, backups, added

    def lost(self, sets: Sequence[Sites]) -> tuple[list[float], list[float]]:
        """Per set, the share of heads that lose half of their attention, and the mean drop; empty without heads."""
        if not self.heads:
            return [], []
        edits = [Edit(zero=s) for s in sets]
        seen = effects(self.target, self.text, edits, at=self.at, upto=max(self.heads)[0], attention=True)
        return seen.lost(self.heads)

    def grown(self, chosen: Sites, sites: Sites) -> Sites:
        """The set and those of the other candidates that attention needs as well."""
        extra = [s for s in sites if s not in chosen]
        while extra:
            fewer = [[s for s in extra if s != out] for out in extra]
            shares = self.lost([(*chosen, *some) for some in fewer])[0]
            if max(shares) < LOST:
                break
            extra = fewer[shares.index(max(shares))]
        return (*chosen, *extra)

    def random(self, sites: Sites, taken: Sites) -> list[Sites]:
        """Random sets of as many other neurons of the same layers (and experts)."""
        return [_random(self.target, sites, {*taken, *sites}, self.generator) for _ in range(DRAWS)]

    def measured(self, chosen: Sites | None, best: Sites, sites: Sites, backups: Sites = ()) -> tuple[CausalSet, ...]:
        """The sets with their effects and controls; the minimal one grows where attention asks for more neurons."""
        kind = "partial" if chosen is None else "minimal"
        chosen = best if chosen is None else chosen
        draws = self.random(chosen, (*sites, *backups))
        heads, drops = self.lost([chosen, *draws, (*chosen, *(s for s in sites if s not in chosen))])
        if heads and kind == "minimal" and heads[0] < LOST <= heads[-1]:
            chosen = self.grown(chosen, sites)
            draws = self.random(chosen, (*sites, *backups))
            heads, drops = self.lost([chosen, *draws])
        norms = self.norms([chosen, *draws])
        at_sink, at_last = self.drops(norms, self.layer), self.drops(norms, self.last)
        first = CausalSet(
            tuple(map(Member.of, chosen)),
            at_sink[0],
            at_last[0],
            drops[0] if drops else None,
            heads[0] if heads else None,
            max(*at_sink[1:], *at_last[1:], *drops[1 : DRAWS + 1]),
            kind,
        )
        if not first.verified:
            return ()
        if kind == "partial" or not backups:
            return (first,)
        without = self.norms([tuple(s for s in chosen if s not in backups)])[0]
        drop = [float(1 - norms[0, i] / without[i]) for i in (self.layer, self.last)]
        return first, CausalSet(tuple(map(Member.of, backups)), drop[0], drop[1], None, None, first.control, "backup")


def _random(target: Target, sites: Sites, taken: set[tuple[int, ...]], generator: torch.Generator) -> Sites:
    """As many other neurons of the same layers (and experts)."""
    drawn: list[tuple[int, ...]] = []
    for site in sites:
        width = target.width(site[0], *site[1:-1])
        others = [(*site[:-1], n) for n in range(width) if (*site[:-1], n) not in {*taken, *drawn}]
        others = others or [(*site[:-1], n) for n in range(width) if (*site[:-1], n) not in sites]
        drawn.append(others[int(torch.randint(len(others), (1,), generator=generator))])
    return tuple(drawn)


def causal_sets(
    target: Target,
    ids: Int[Tensor, "row pos"],
    seen: Walk,
    neurons: Sequence[Neuron],
    heads: Sequence[tuple[int, int]],
    generator: torch.Generator,
) -> Found:
    """Search for the smallest set of neurons that makes the spike, and for backups that take over.

    The candidates are silenced one at a time, all together, and in every combination while these are few; otherwise one
    at a time is left out. If the spike returns in a later layer while a set is silent, the neurons that bring it back
    join the candidates.

    Args:
        target: The model.
        ids: Typical text; position 0 holds the first token.
        seen: The walk that found the stages.
        neurons: Candidates of all stages.
        heads: The (layer, head) pairs that attend to the first token.
        generator: Draws the random sets.
    """
    layer = seen.sink_layer
    if layer is None:
        return Found()
    firsts = ids[:, 0].unique()[:4, None]
    search = _Search(target, firsts, ids[:1, :_TOKENS], seen, layer, max(layer, seen.standing[-1]), heads, generator)
    sites: Sites = tuple(n.site for n in neurons if n.layer <= search.last)
    added: list[Neuron] = []
    chosen, backups = search.smallest(sites, layer, search.last), Sites()
    here = chosen or search.smallest(sites, layer)
    if here is None:  # try more neurons of the sink layer than the first candidates
        added += stage_neurons(target, ids, layer, WIDE, generator)
        sites = tuple(dict.fromkeys([*sites, *(n.site for n in added)]))
        here = search.smallest(sites, layer)
        chosen = None if here is None else search.smallest(sites, layer, search.last)
        added = [n for n in added if here is not None and n.site in (*here, *(chosen or ()))]
    if here is not None and chosen is None:
        chosen, backups, brought = search.with_backups(ids, here)
        added += brought
    sets = search.measured(chosen, here or sites, sites, backups)
    kept = {s for one in sets for s in one.numbers} - {n.site for n in neurons}
    return Found(sets, (*neurons, *(n for n in added if n.site in kept)), tuple(search.not_tried))


def causal_neurons(made: Setup) -> tuple[int | None, tuple[Neuron, ...]]:
    """The sink layer and its causal neurons; (None, ()) if no MLP of the model makes a spike.

    If no neuron is causal by itself because others stand in for it, the neurons of the smallest set are returned.
    """
    asked = ("causal neurons", made.seed, len(made.ids))
    if asked not in made.memory:
        target, ids, generator = made.target, made.ids, torch.Generator().manual_seed(made.seed)
        seen = walk(target, ids, whole=target.resident)
        layer, neurons = seen.sink_layer, tuple[Neuron, ...]()
        if layer is not None:
            proof = prove(target, ids, layer, TOP, generator)
            neurons = proof.causal or causal_sets(target, ids, seen, proof.neurons, [], generator).members
        made.memory[asked] = layer, neurons
    return made.memory[asked]


def later_sinks(
    target: Target, ids: Int[Tensor, "row pos"], seen: Walk, generator: torch.Generator
) -> tuple[LaterSink, ...]:
    """Tokens behind the first position whose norm stands out most often, and what makes each of them."""
    levels = list(zip(seen.norms, seen.usual, strict=True))
    high = torch.stack(
        [
            norms > SINK_RATIO * torch.maximum(norms[:, 1:].quantile(0.75), torch.tensor(usual))
            for norms, usual in levels
        ]
    ).any(0)
    high[:, 0] = False
    found = list[LaterSink]()
    for token, _ in Counter(ids[high].tolist()).most_common(LATER):
        row, at = max((high & (ids == token)).nonzero().tolist(), key=lambda place: -place[1])
        ratio = max(float(norms[row, at]) / max(usual, LEAST) for norms, usual in levels)
        made = _later_set(target, ids[row : row + 1], at, seen, row, generator)
        found.append(LaterSink(target.tokenizer.decode([token]), at, ratio, made))
    return tuple(found)


def _later_set(
    target: Target, ids: Int[Tensor, "1 pos"], at: int, seen: Walk, row: int, generator: torch.Generator
) -> CausalSet | None:
    """The smallest set that makes the spike of a later position of one text; None if no MLP makes it."""
    writes = torch.stack([norms[row, at] for norms in seen.mlp_norms])
    outlying = writes > STAGE_OUTLIER * torch.tensor(seen.mlp_typical)
    if not bool(outlying.any()):
        return None
    layer = int(torch.where(outlying, writes, 0).argmax())
    high = [i for i, norms in enumerate(seen.norms) if norms[row, at] > SINK_RATIO * seen.usual[i]]
    upto, heads = ids[:, : at + 1], attending(target, ids[0], at, len(seen.first), RATE_EPS)
    search = _Search(target, upto, ids, seen, layer, max([layer, *high]), heads, generator)
    sites = tuple(n.site for n in stage_neurons(target, upto, layer, TOP, generator, at=at))
    sets = search.measured(search.smallest(sites, layer, search.last), sites[:1], sites)
    return sets[0] if sets else None
