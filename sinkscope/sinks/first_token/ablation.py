"""Finds the neurons that make the sink: the effect of zeroing each, and the smallest set whose removal ends it.

The down projection is linear, so the effect of an ablation *at the same layer* needs no second forward pass: the
neurons' columns are subtracted from the MLP's output before any norm that stands between it and the residual stream.
The tests compare this with real ablated passes. Effects in later layers and on attention are measured in real passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.interventions import Ablate
from sinkscope.measure import Setup
from sinkscope.models.target import Target, norm_of
from sinkscope.notation import neuron_name
from sinkscope.sinks.first_token.anatomy import LOST, losses
from sinkscope.sinks.first_token.effects import Edit, effects
from sinkscope.sinks.first_token.walk import (
    SINK_RATIO,
    STAGE_OUTLIER,
    LayerView,
    Walk,
    columns,
    contribution_norms,
    neutral_values,
    neutral_view,
    norm_without,
    reach,
    spike_dims,
    split,
    view_layer,
    walk,
)

DRAWS = 20  # random control sets of the same size for every ablation
CAUSAL = 0.1  # zeroing a causal neuron removes at least this share of the norm
Sites = tuple[tuple[int, ...], ...]
ROUNDS = 4  # rounds of searching for backups before the search ends
TOP = 8  # default number of candidates
WIDE = 64  # candidates of the sink layer tried together if the first few do not suffice
_TRIED = 128  # largest number of sets of one size to try
_TOKENS = 32  # length of the text in which attention is compared


@dataclass(frozen=True)
class Member:
    """A neuron. `expert` is None if the layer is not a mixture, and for a neuron of a shared expert."""

    layer: int
    expert: int | None
    neuron: int

    @classmethod
    def of(cls, site: Sequence[int]) -> Member:
        """The neuron that interventions take as (layer, neuron) or (layer, expert, neuron)."""
        return cls(site[0], site[1] if len(site) == 3 else None, site[-1])

    @property
    def site(self) -> tuple[int, ...]:
        """(layer, neuron) or (layer, expert, neuron), as interventions take it."""
        return (self.layer, self.neuron) if self.expert is None else (self.layer, self.expert, self.neuron)

    def __str__(self) -> str:
        return neuron_name(self.layer, self.expert, self.neuron)


@dataclass(frozen=True)
class Neuron(Member):
    """A candidate neuron. Drops are the share of the norm at the sink layer that is lost when the neuron is zeroed.

    Attributes:
        contribution_norm: Norm of what the neuron writes at the first token, `hook_post[j] * W_out[j]`.
        share: Contribution norm divided by the norm of the MLP's output at the first token.
        ablation_drop: Share of the first token's norm that is lost when the neuron is zeroed.
        repeat_drop: Share of the norm lost at the last of the repeated tokens; None if no token became a sink.
        control_drop: Largest loss when a random neuron of the layer is zeroed instead, over 20 draws.
        causal: Whether the ablation drop exceeds the control drop and is at least 0.1.
        neutral_post: Median `hook_post` on typical text, the value that SinkPatch writes instead.
        neutral_up: Median output of the up projection on typical text; None if the MLP has no such factor.
    """

    contribution_norm: float
    share: float
    ablation_drop: float
    repeat_drop: float | None
    control_drop: float
    causal: bool
    neutral_post: float
    neutral_up: float | None


@dataclass(frozen=True)
class Proof:
    """The candidates, and the effect at the sink layer of zeroing all causal ones together.

    Attributes:
        neurons: Neurons of the sink layer, largest contribution first, followed by those of other stages.
        set_drop: Share of the norm that is lost when all causal neurons are zeroed. None if the sink layer has none.
        set_control_drop: Largest drop among random sets of the same number of neurons of the sink layer.
        controls: Sites of one of these random sets.
        dims: Massive activations of the first token at the sink layer, largest first.
    """

    neurons: tuple[Neuron, ...]
    set_drop: float | None
    set_control_drop: float | None
    controls: tuple[tuple[int, ...], ...]
    dims: tuple[int, ...] = ()

    @property
    def causal(self) -> tuple[Neuron, ...]:
        """The neurons that ablation has verified as causes of the sink."""
        return tuple(n for n in self.neurons if n.causal)


@dataclass(frozen=True)
class _Candidates:
    """The neurons of a layer that write most at the first token."""

    target: Target
    first: LayerView
    text: LayerView
    contribution: Float[Tensor, " neuron"]
    top: Int[Tensor, " k"]

    @classmethod
    def of(cls, target: Target, ids: Int[Tensor, "row pos"], layer: int, top_k: int, at: int = 0) -> _Candidates:
        where = torch.zeros(len(ids), at + 1, dtype=torch.bool)
        where[:, at] = True
        first = view_layer(target, layer, ids[:, : at + 1], where)
        contribution = contribution_norms(target, first).median(0).values
        top = reach(target, first).topk(min(top_k, int((contribution > 0).sum().clamp(min=1)))).indices
        return cls(target, first, neutral_view(target, layer, ids), contribution, top)

    def proven(self, drops: list[float], repeats: list[float] | None, chance: float) -> tuple[Neuron, ...]:
        written = self.first.mlp.norm(dim=-1).median()
        rows = zip(self.top.tolist(), drops, repeats or [None] * len(drops), strict=True)
        return tuple(
            Neuron(
                self.text.layer,
                *split(self.target, self.text.layer, n),
                float(self.contribution[n]),
                float(self.contribution[n] / written),
                drop,
                repeat,
                chance,
                drop > chance and drop >= CAUSAL,
                *neutral_values(self.target, self.text, n),
            )
            for n, drop, repeat in rows
        )


@torch.no_grad()
def stage_neurons(
    target: Target,
    ids: Int[Tensor, "row pos"],
    stage: int,
    top_k: int,
    generator: torch.Generator,
    *,
    at: int = 0,
    upto: int = 0,
) -> tuple[Neuron, ...]:
    """The neurons of a layer that write most at a position, and the effect of zeroing each.

    If an ablation is active, these are the neurons that write most under it.

    Args:
        target: The model.
        ids: Typical text.
        stage: The layer.
        top_k: How many neurons to return.
        generator: Draws the 20 random control neurons.
        at: The position.
        upto: The layer after which the norm is read, if it is later than `stage`.
    """
    with target.loaded(stage):
        found = _Candidates.of(target, ids, stage, min(top_k, target.d_mlp // 2), at)
    top = found.top.tolist()
    pool = torch.tensor([n for n in found.contribution.nonzero().flatten().tolist() if n not in top])
    others = pool[torch.randperm(len(pool), generator=generator)[:DRAWS]].tolist()
    edits = [Edit(zero=(Member(stage, *split(target, stage, n)).site,)) for n in (*top, *others)]
    layer = max(stage, upto)
    seen = effects(target, ids[:1, : at + 1], edits, at=at, upto=layer)
    drops = (1 - seen.norms[..., layer] / seen.intact_norms[..., layer]).median(1).values.tolist()
    return found.proven(drops[: len(top)], None, max(drops[len(top) :], default=0.0))


@torch.no_grad()
def prove(
    target: Target,
    ids: Int[Tensor, "row pos"],
    layer: int,
    top_k: int,
    generator: torch.Generator,
    repeated: LayerView | None = None,
    stages: Sequence[int] = (),
    without: Sequence[int] = (),
) -> Proof:
    """Candidate neurons of the sink layer and of other stages, and the effect of zeroing them at the sink layer.

    Args:
        target: The model.
        ids: Typical text; position 0 holds the first token.
        layer: The sink layer.
        top_k: Number of candidates in the sink layer.
        generator: Source of the random draws.
        repeated: The layer's view at the last repetition of each token that reached half of the first token's norm.
        stages: Layers that build the spike; the sink layer may be among them.
        without: Residual dimensions that norms leave out because they are massive on all tokens.
    """
    proof = _prove_at(target, ids, layer, top_k, generator, repeated, without)
    others = [n for s in stages if s != layer for n in stage_neurons(target, ids, s, 2, generator, upto=layer)]
    whole = replace(proof, neurons=(*proof.neurons, *others))
    if not any(n.causal and n.layer < layer for n in others):
        return whole
    seen = effects(target, ids[:, :1], [Edit(zero=tuple(n.site for n in whole.causal))], upto=layer, without=without)
    drop = float((1 - seen.norms[0, :, layer] / seen.intact_norms[:, layer]).median())
    return replace(whole, set_drop=drop)


def _prove_at(
    target: Target,
    ids: Int[Tensor, "row pos"],
    layer: int,
    top_k: int,
    generator: torch.Generator,
    repeated: LayerView | None,
    without: Sequence[int],
) -> Proof:
    """Candidates of the sink layer, without further forward passes."""
    with target.loaded(layer):
        found = _Candidates.of(target, ids, layer, top_k)
        first, top = found.first, found.top
        massive = spike_dims(first.resid.median(0).values, torch.cat([first.resid, found.text.resid]))
        dims = tuple(d for d in massive if d not in without)
        spare = torch.ones_like(found.contribution, dtype=torch.bool)
        spare[top] = False
        if first.routing is not None:  # a neuron of an expert that was not chosen is not a valid control
            spare &= found.contribution > 0
        pool = spare.nonzero().flatten().cpu()

        def draw(size: int) -> Tensor:
            picks = [torch.randperm(len(pool), generator=generator)[:size] for _ in range(DRAWS)]
            return pool[torch.stack(picks)].to(top.device)

        def drops(sets: Tensor, view: LayerView) -> Tensor:
            cols = columns(target, layer, sets.flatten()).unflatten(0, tuple(sets.shape))
            return (1 - norm_without(target, view, sets, cols, without) / norm_of(view.resid, without)).median(1).values

        singles, control = top[:, None], draw(1)
        places = [first] if repeated is None else [first, repeated]
        lost = [drops(singles, place).tolist() for place in places]
        chance = max(float(drops(control, place).max()) for place in places)
        neurons = found.proven(lost[0], lost[1] if repeated is not None else None, chance)
        chosen = torch.tensor([int(n) for i, n in enumerate(top) if neurons[i].causal], device=top.device)
        if not len(chosen):
            return Proof(neurons, None, None, (), dims)
        sets = draw(len(chosen))
        sites = tuple(Member(layer, *split(target, layer, int(n))).site for n in sets[0])
        return Proof(neurons, float(drops(chosen[None], first)), float(drops(sets, first).max()), sites, dims)


@dataclass(frozen=True)
class CausalSet:
    """Neurons that together make the spike, and the effect of zeroing all of them.

    Attributes:
        sites: The neurons of the set.
        drop_sink_layer: Share of the first token's norm at the sink layer that is lost when the set is zeroed.
        drop_last_layer: The same share at the last layer after which the norm stands out.
        drop_attention: Share of the attention to the first token that is lost, over the heads of the sink behind the
            sink layer. None if there are no such heads among the layers read.
        heads_lost: Share of these heads that lose at least half of that attention.
        control: The largest of these drops among 20 random sets of the same number of neurons from the same layers.
        kind: "minimal": the smallest set found that removes the spike; "partial": the best set found, which does not
            remove it; "backup": neurons of the minimal set that write a spike only when the other neurons of the set
            are silent. The drops of a backup are relative to the state with the others silent.
    """

    sites: tuple[Member, ...]
    drop_sink_layer: float
    drop_last_layer: float
    drop_attention: float | None
    heads_lost: float | None
    control: float
    kind: Literal["minimal", "partial", "backup"]

    @property
    def verified(self) -> bool:
        """Whether the set's effect on the norm is larger than that of every random set."""
        return min(self.drop_sink_layer, self.drop_last_layer) > self.control

    @property
    def numbers(self) -> Sites:
        """The sites in the form that interventions take."""
        return tuple(member.site for member in self.sites)


@dataclass(frozen=True)
class Found:
    """The result of the search: the sets, the neurons it added to the candidates, and what it did not try."""

    sets: tuple[CausalSet, ...]
    added: tuple[Neuron, ...]
    not_tried: tuple[str, ...]

    @property
    def minimal(self) -> CausalSet | None:
        """The smallest set that removes the spike."""
        return next((s for s in self.sets if s.kind == "minimal"), None)

    def members(self, candidates: Sequence[Neuron]) -> tuple[Neuron, ...]:
        """The neurons of the minimal set; empty if no set removes the spike."""
        sites = () if self.minimal is None else self.minimal.numbers
        return tuple(n for n in (*candidates, *self.added) if n.site in sites)


class _Search:
    """Norms of the last token of `texts` under sets of silent neurons, and whether the spike is gone.

    The spike is made in `layer`, and the norm stands out up to layer `last`.
    """

    def __init__(self, target: Target, texts: Tensor, seen: Walk, layer: int, last: int) -> None:
        self.target, self.texts, self.seen, self.layer, self.last = target, texts, seen, layer, max(layer, last)
        self.not_tried: list[str] = []
        self.intact: Tensor = torch.empty(0)  # from the first pass on

    def norms(self, sets: Sequence[Sites]) -> Float[Tensor, "set layer"]:
        """Median over texts, for each set."""
        edits = [Edit(zero=tuple(s)) for s in sets]
        at = self.texts.shape[1] - 1
        seen = effects(self.target, self.texts, edits, at=at, upto=self.last, without=self.seen.shared)
        norms = seen.norms.quantile(0.5, dim=1) if sets else seen.norms[:, 0]
        self.intact = seen.intact_norms.quantile(0.5, dim=0)
        return norms

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
    layer = seen.sink_layer()
    if layer is None:
        return Found((), (), ())
    search = _Search(target, ids[:, 0].unique()[:4, None], seen, layer, seen.standing()[-1])
    sites: Sites = tuple(n.site for n in neurons if n.layer <= search.last)
    added: list[Neuron] = []
    chosen, backups = search.smallest(sites, layer, search.last), Sites()
    here = chosen or search.smallest(sites, layer)
    if here is None:  # try more neurons of the sink layer than the first candidates
        wide = stage_neurons(target, ids, layer, WIDE, generator)
        sites = tuple(dict.fromkeys([*sites, *(n.site for n in wide)]))
        here = search.smallest(sites, layer)
        chosen = None if here is None else search.smallest(sites, layer, search.last)
        added += [n for n in wide if here is not None and n.site in (*here, *(chosen or ()))]
    if here is not None and chosen is None:
        chosen, backups, brought = _with_backups(search, ids, here, generator)
        added += brought
    read = _Read(target, ids[:1, :_TOKENS], 0, [(i, head) for i, head in heads if i > layer])
    sets = _measured(search, chosen, here or sites, sites, backups, read, generator)
    kept = {s for one in sets for s in one.numbers} | {n.site for n in neurons}
    return Found(sets, tuple(n for n in added if n.site in kept), tuple(search.not_tried))


def _with_backups(
    search: _Search, ids: Tensor, here: Sites, generator: torch.Generator
) -> tuple[Sites | None, Sites, list[Neuron]]:
    """The smallest set with the neurons that bring the spike back when `here` is silent; these; and all that did."""
    backups, added = Sites(), list[Neuron]()
    for _ in range(ROUNDS):
        silent = (*here, *backups)
        with Ablate(sites=silent).on(search.target):
            again = walk(search.target, ids, whole=True, upto=search.last)
            stages = [i for i in again.stages() if i > search.layer]
            brought = [n for i in stages for n in stage_neurons(search.target, ids, i, 4, generator)]
        brought = [n for n in brought if n.site not in silent]
        added += brought
        sites = tuple(n.site for n in brought)
        if chosen := search.smallest((*silent, *sites), search.layer, search.last) if sites else None:
            return chosen, tuple(s for s in chosen if s not in here), added
        if not sites:
            break
        backups = (*backups, *sites)
    search.not_tried.append(f"neurons that bring the spike back were searched in {ROUNDS} rounds")
    return None, backups, added


def causal_neurons(made: Setup) -> tuple[int | None, tuple[Neuron, ...]]:
    """The sink layer and its causal neurons; (None, ()) if no MLP of the model makes a spike.

    If no neuron is causal by itself because others stand in for it, the neurons of the smallest set are returned.
    """
    asked = ("causal neurons", made.seed, len(made.ids))
    if asked not in made.memory:
        seen = walk(made.target, made.ids, whole=made.target.resident)
        made.memory[asked] = seen.sink_layer(), _causal_neurons(made, seen)
    return made.memory[asked]


def _causal_neurons(made: Setup, seen: Walk) -> tuple[Neuron, ...]:
    target, ids, generator = made.target, made.ids, torch.Generator().manual_seed(made.seed)
    if (layer := seen.sink_layer()) is None:
        return ()
    proof = prove(target, ids, layer, TOP, generator)
    return proof.causal or causal_sets(target, ids, seen, proof.neurons, [], generator).members(proof.neurons)


def later_set(
    target: Target,
    ids: Int[Tensor, "row pos"],
    place: tuple[int, int],
    seen: Walk,
    heads: Sequence[tuple[int, int]],
    generator: torch.Generator,
) -> CausalSet | None:
    """The smallest set that makes the spike of a later position `(row, position)`; None if no MLP makes it."""
    row, at = place
    writes = torch.stack([norms[row, at] for norms in seen.mlp_norms])
    outlying = writes > STAGE_OUTLIER * torch.tensor(seen.mlp_typical)
    if not bool(outlying.any()):
        return None
    layer = int(torch.where(outlying, writes, 0).argmax())
    high = [i for i, norms in enumerate(seen.norms) if norms[row, at] > SINK_RATIO * seen.usual[i]]
    search = _Search(target, ids[row : row + 1, : at + 1], seen, layer, max(high, default=layer))
    found = stage_neurons(target, ids[row : row + 1, : at + 1], layer, TOP, generator, at=at)
    sites = tuple(n.site for n in found)
    chosen = search.smallest(sites, layer, search.last)
    read = _Read(target, ids[row : row + 1], at, [(i, head) for i, head in heads if i > layer])
    sets = _measured(search, chosen, sites[:1], sites, (), read, generator)
    return sets[0] if sets else None


class _Read(NamedTuple):
    """Where attention is compared: a text, the position in it, and the heads that attend to it."""

    target: Target
    text: Tensor
    at: int
    heads: list[tuple[int, int]]

    def lost(self, sets: Sequence[Sites]) -> tuple[list[float], list[float]]:
        """Per set, the share of heads that lose half of their attention, and the mean drop; empty without heads."""
        if not self.heads:
            return [], []
        edits = [Edit(zero=s) for s in sets]
        seen = effects(self.target, self.text, edits, at=self.at, upto=max(self.heads)[0], attention=True)
        assert seen.attention is not None and seen.intact_attention is not None
        return losses(seen.attention, seen.intact_attention, self.heads)

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


def _measured(
    search: _Search,
    chosen: Sites | None,
    best: Sites,
    sites: Sites,
    backups: Sites,
    read: _Read,
    generator: torch.Generator,
) -> tuple[CausalSet, ...]:
    """The sets with their effects and controls; the minimal one grows where attention asks for more neurons."""
    kind = "partial" if chosen is None else "minimal"
    chosen = best if chosen is None else chosen
    draws = [_random(search.target, chosen, {*sites, *backups, *chosen}, generator) for _ in range(DRAWS)]
    heads, drops = read.lost([chosen, *draws, (*chosen, *(s for s in sites if s not in chosen))])
    if heads and kind == "minimal" and heads[0] < LOST <= heads[-1]:
        chosen = read.grown(chosen, sites)
        draws = [_random(search.target, chosen, {*sites, *backups}, generator) for _ in range(DRAWS)]
        heads, drops = read.lost([chosen, *draws])
    norms = search.norms([chosen, *draws])
    at_sink, at_last = search.drops(norms, search.layer), search.drops(norms, search.last)
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
    without = search.norms([tuple(s for s in chosen if s not in backups)])[0]
    drop = [float(1 - norms[0, i] / without[i]) for i in (search.layer, search.last)]
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
