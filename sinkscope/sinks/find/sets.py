"""The neurons that together make a spike, with backups that take over.

`causal_set` finds the smallest set whose removal ends the spike of one kind of place, on texts that have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.hooks.edit import Ablate
from sinkscope.results.claims import NEEDED, Claim, Claims, Contrast, Outcome, Search
from sinkscope.results.notation import word_list
from sinkscope.results.parts import Neuron
from sinkscope.sinks.find.layer_scan import AS_BEFORE, LayerScan
from sinkscope.sinks.find.left import INTACT, by_chance, claim_of
from sinkscope.sinks.find.neurons import stage_neurons, verify_neurons
from sinkscope.sinks.find.places import COMMON, SPIKE_RATIO, by_count
from sinkscope.sinks.find.records import Candidate, Candidates
from sinkscope.sinks.removal.components import Heads, Neurons
from sinkscope.sinks.removal.effects import Effects, Trial, heads_lost, side_by_side
from sinkscope.sinks.removal.search import random_sets, smallest_set, without_unneeded

CANDIDATES = 8  # candidates of the sink layer
MORE_CANDIDATES = 64  # candidates of the sink layer if the first few do not suffice
BACKUP_ROUNDS = 4  # rounds of searching for backups before the search ends
BACKUP_CANDIDATES = 4  # candidates of each layer that brings the spike back
ATTENTION_LENGTH = 48  # least length of the texts in which attention with and without neurons is compared
NEARLY_ALL = 0.9  # share of the texts in which the spike has to be gone, or which need one neuron alone
LEAST_SERVED = 2  # texts that need a neuron alone, from which on it serves their tokens


@dataclass(frozen=True)
class FoundSet:
    """What the search for the neurons of a spike found; no set if none that was tried removes the spike.

    Attributes:
        set: The smallest set that removes the spike.
        heads_lost: Share of the heads in later layers that lose at least half of their attention to the place when the
            set is zeroed. None if no such heads were read.
        claims: What is left of the spike along its direction: without the set, and without each of it.
        neurons: The candidates, with those that the search added.
        tried: How many there were.
        served: For each neuron of the set, the tokens at which the spike needs it alone. Empty unless nearly every
            text needs one neuron alone, and not all the same.
    """

    set: Neurons = ()
    heads_lost: float | None = None
    claims: Claims = ()
    neurons: Candidates = ()
    tried: int = 0
    served: tuple[frozenset[int], ...] = ()

    @property
    def members(self) -> Candidates:
        """The candidates of the set."""
        return tuple(neuron for neuron in self.neurons if neuron.address in self.set)

    @property
    def adding(self) -> Candidates:
        """Candidates that are causal alone and not in the set."""
        return tuple(neuron for neuron in self.neurons if neuron.causal and neuron.address not in self.set)


@dataclass(frozen=True)
class _SpikeSearch:
    """The search for the neurons that make a spike.

    Attributes:
        scan: The model at the places of the spike.
        heads: The heads after the sink layer that attend to the place.
        place: The words for the places.
        seed: Seed of the random neurons.
        asked: Norms and projections `[what text layer]` with each set silenced that was asked about before.
    """

    scan: LayerScan
    heads: Heads
    place: str
    seed: int
    asked: dict[Neurons, Tensor] = field(default_factory=dict)

    @property
    def ends(self) -> tuple[int, int]:
        """The sink layer, and the last layer after which the norm stands out."""
        return self.scan.layer, max(self.scan.spike_layers[-1], self.scan.stages[-1])

    @property
    def search_so_far(self) -> Search:
        """How many sets were tried."""
        return Search("sets of neurons", len(self.asked))

    def attention_trial(self, *sets: Neurons) -> Trial:
        """Silences each set; the attention to the place is read, in the first text."""
        length = max(ATTENTION_LENGTH, self.scan.up_to_place + ATTENTION_LENGTH // 2)
        layers = [layer for layer, _ in self.heads]
        reading = {"upto": max(layers), "attention": True, "behind": min(layers)}
        return self.scan.trial(sets, length, slice(1), **reading)

    def ask(self, sets: Sequence[Neurons], *others: Trial) -> list[Effects]:
        """Silence each set that was not asked about before, and run other trials in the same walk."""
        scan = self.scan
        new = [neurons for neurons in dict.fromkeys(sets) if neurons not in self.asked]
        if not new and not others:
            return []
        trial = scan.trial(new, upto=self.ends[1], directions=scan.directions)
        first, *read = side_by_side(scan.target, [trial, *others])
        for neurons, norms, along in zip([(), *new], first.norms, first.along, strict=True):
            self.asked[neurons] = torch.stack([norms, along]).expand(-1, len(scan.ids), -1)
        return read

    def read(self, sets: Sequence[Neurons]) -> Float[Tensor, "what set text layer"]:
        """The norms and the projections with each set silenced."""
        self.ask(sets)
        return torch.stack([self.asked[neurons] for neurons in sets], 1)

    def removals(self, sets: Sequence[Neurons], *layers: int) -> list[float | None]:
        """The share of the norm that each set takes at the last of these layers; None: the spike is not gone.

        The spike is gone if, in nearly all texts that have it, the norm is as before it or stands out no more, and most
        of the rise is gone.
        """
        before = self.scan.norm_before
        typical = torch.tensor(self.scan.typical_norm)[list(layers)]
        norms = self.read(sets)[0][..., layers]
        intact = self.asked[()][0][:, layers]
        lowest = torch.maximum(SPIKE_RATIO * typical, torch.tensor(AS_BEFORE * before))
        stood_out = intact > lowest  # where it did not, nothing can be taken away
        most_is_gone = intact - norms >= NEEDED * (intact - typical.clamp(min=before))
        gone = ((norms <= lowest) & (most_is_gone | ~stood_out)).all(2) & stood_out.any(1)
        share = gone.float().mean(1) / stood_out.any(1).float().mean().clamp(min=1e-9)
        drops = (1 - norms / intact)[..., -1].mean(1)
        return [drop if enough else None for drop, enough in zip(drops.tolist(), share >= NEARLY_ALL, strict=True)]

    def smallest(self, neurons: Neurons, *layers: int) -> Neurons | None:
        """The smallest set that takes the spike away at these layers; None if no set that was tried does."""
        return smallest_set(neurons, lambda sets: self.removals(sets, *layers))

    def grown(self, chosen: Neurons, others: Neurons) -> Neurons:
        """The set and those of the other candidates that attention needs as well."""

        def remove(sets: list[Neurons]) -> list[float | None]:
            (edited,) = side_by_side(self.scan.target, [self.attention_trial(*[chosen + some for some in sets])])
            return [lost if lost >= NEEDED else None for lost in heads_lost(edited.attention_drops(self.heads))]

        return chosen + without_unneeded(others, remove)

    def compared(self, chosen: Neurons, excluded: Neurons, others: Neurons = ()) -> FoundSet | None:
        """A set with its effects and controls; None if a random set has as large an effect.

        Args:
            chosen: The set.
            excluded: Neurons that are not drawn.
            others: Candidates that join the set if attention needs them as well.
        """
        lost = None
        if self.heads:
            sets = [chosen, *random_sets(self.scan.target, chosen, excluded, self.seed)]
            (read,) = self.ask(sets, self.attention_trial(chosen, chosen + others))
            lost, most = heads_lost(read.attention_drops(self.heads))
            if lost < NEEDED <= most:
                return self.compared(self.grown(chosen, others), excluded)
        claims = self.claims([chosen], excluded, "makes")
        if claims[0].value >= claims[0].control.value:
            return None
        return FoundSet(chosen, lost, claims)

    def served(self, chosen: Neurons) -> Bool[Tensor, "neuron text"] | None:
        """The texts that need each of several neurons alone; None unless nearly all need one, and not all the same."""
        lost = self.left([(one,) for one in chosen], self.last_layer(chosen)) <= 1 - NEEDED
        needing = lost & (lost.sum(0) == 1)
        if float(needing.any(0).float().mean()) < NEARLY_ALL or int(needing.sum(1).min()) < LEAST_SERVED:
            return None
        return needing

    def tokens(self, texts: Bool[Tensor, " text"]) -> list[int]:
        """The tokens at the places of some texts, the most common first."""
        return [token for token, _ in by_count(self.scan.ids[texts, self.scan.at[texts]])]

    def last_layer(self, neurons: Iterable[Neuron]) -> int:
        """The layer after which a spike is read without neurons: before the last of them, it says nothing about it."""
        return max(self.scan.layer, *(neuron.layer for neuron in neurons))

    def left(self, sets: Sequence[Neurons], layer: int) -> Float[Tensor, "set text"]:
        """What is left of the spike after a layer without each of some sets."""
        along = self.read(sets)[1] / self.asked[()][1]
        return along[..., layer].clamp(min=0)

    def claims(
        self,
        sets: Sequence[Neurons],
        excluded: Neurons,
        role: str,
        served: Bool[Tensor, "set text"] | None = None,
    ) -> Claims:
        """What is left of the spike without each of some sets, beside random ones; all are asked about in one walk.

        Args:
            sets: The sets.
            excluded: Neurons that are not drawn.
            role: What the sets do.
            served: The texts that each claim is about; the others are a contrast. None: all.
        """
        if not sets:
            return ()
        beside: list[list[Neurons]] = []
        for neurons in sets:
            beside.append([neurons, *random_sets(self.scan.target, neurons, excluded, self.seed)])
        layer = self.last_layer(chain(*sets))
        lefts = self.left(list(chain(*beside)), layer).split(len(beside[0]))
        outcome = Outcome("spike", layers=(layer,))
        claims: list[Claim] = []
        for number, (neurons, left) in enumerate(zip(sets, lefts, strict=True)):
            place, contrasts = self.place, [INTACT]
            if served is not None:
                here, others = served[number], left[0, ~served[number]]
                names = [repr(self.scan.target.tokenizer.decode([token])) for token in self.tokens(here)]
                place = f"{place} (where that is {word_list(names, COMMON)})"
                contrasts.append(Contrast("other", float(others.mean()), len(others), "other tokens"))
                left = left[:, here]
            contrasts.append(by_chance(neurons, left[1:].mean(1)))
            claims.append(claim_of(role, neurons, outcome, place, left[0], contrasts, self.search_so_far))
        return tuple(claims)

    def with_backups(self, candidates: dict[Neuron, Candidate]) -> Neurons | None:
        """The set with neurons that bring the spike back while others are silent; these join the candidates."""
        scan, known = self.scan, {*candidates}
        here = self.smallest(tuple(candidates), scan.layer)
        for _ in range(BACKUP_ROUNDS if here else 0):
            silent = (*(here or ()), *(neuron for neuron in candidates if neuron not in known))
            with Ablate(sites=silent).on(scan.target):
                without = scan.elsewhere(scan.ids, scan.at, self.ends[1])
                returning: list[Candidate] = []
                for stage in without.stages:
                    if stage > scan.layer:
                        returning += stage_neurons(without, stage, BACKUP_CANDIDATES, self.seed)
            backups = {neuron.address: neuron for neuron in returning if neuron.address not in silent}
            if not backups:
                break
            candidates |= backups
            whole = self.smallest((*silent, *backups), *self.ends)
            if whole is not None:
                return whole
        return None


def causal_set(scan: LayerScan, place: str, seed: int, heads: Heads = ()) -> FoundSet:
    """Search for the smallest set of neurons that makes a spike, and for backups that take over.

    If the spike returns in a later layer while a set is silent, the neurons that bring it back join the candidates.

    Args:
        scan: The model at the places of the spike.
        place: The words for these places.
        seed: Seed of the random neurons.
        heads: The heads that attend to them.

    Returns:
        Nothing if no MLP makes the spike.
    """
    if not scan.stages:
        return FoundSet()
    later = [head for head in heads if head[0] > scan.layer]
    return _searched(_SpikeSearch(scan, later, place, seed), verify_neurons(scan, CANDIDATES, seed))


def _searched(search: _SpikeSearch, neurons: Candidates) -> FoundSet:
    """The smallest set of these neurons and, if necessary, of further ones."""
    candidates = {neuron.address: neuron for neuron in neurons}
    minimal = search.smallest(tuple(candidates), *search.ends)
    if minimal is None:
        most = min(MORE_CANDIDATES, search.scan.target.d_mlp // 2)
        for neuron in stage_neurons(search.scan, search.scan.layer, most, search.seed):
            candidates.setdefault(neuron.address, neuron)
        minimal = search.smallest(tuple(candidates), *search.ends)
    tried = len(candidates)
    if minimal is None:
        minimal = search.with_backups(candidates)
    best = None
    if minimal is not None:
        others = tuple(neuron for neuron in candidates if neuron not in minimal)
        best = search.compared(minimal, tuple(candidates), others)
    if best is None:
        return FoundSet(neurons=neurons, tried=tried)
    added = tuple(candidates[one] for one in best.set if candidates[one] not in neurons)
    claims, tokens = best.claims, ()
    if len(best.set) > 1:
        alone, served = [(one,) for one in best.set], search.served(best.set)
        role = "makes alone"
        if served is not None:
            role, tokens = "serves", tuple(frozenset(search.tokens(texts)) for texts in served)
        claims += search.claims(alone, best.set, role, served)
    found = replace(best, neurons=(*neurons, *added), tried=tried, served=tokens)
    adding = tuple(neuron.address for neuron in found.adding)
    claims += search.claims([(neuron,) for neuron in adding], adding, "adds")
    return replace(found, claims=claims)


def dependence(scan: LayerScan, place: str, seed: int, others: Sequence[Neurons]) -> Claims:
    """What is left of a spike without neurons that make spikes elsewhere, for those without which most of it is gone.

    Args:
        scan: The model at the places of the spike.
        place: The words for these places.
        seed: Seed of the random neurons.
        others: The neurons of each other spike.
    """
    search = _SpikeSearch(scan, (), place, seed)
    near = [neurons for neurons in others if search.last_layer(neurons) <= search.ends[1]]
    search.ask(near)  # in one walk
    needed: list[Neurons] = []
    for neurons in near:
        if float(search.left([neurons], search.last_layer(neurons)).mean()) <= 1 - NEEDED:
            needed.append(neurons)
    claims = search.claims(needed, tuple(chain(*others)), "depends")
    return tuple(claim for claim in claims if claim.verdict == "needed")
