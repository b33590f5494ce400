"""The neurons that together make a spike, with backups that take over.

`causal_sets` finds the smallest set whose removal ends the spike of one kind of place, on texts that have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from einops import reduce
from jaxtyping import Float
from torch import Tensor

from sinkscope.hooks.edit import Ablate
from sinkscope.measure.margin import margin_of
from sinkscope.results.claims import NEEDED, Claim, Contrast, Outcome, Search
from sinkscope.results.parts import neurons_of
from sinkscope.sinks.find.layer_scan import AS_BEFORE, Rise, scan_layers
from sinkscope.sinks.find.neurons import stage_neurons, verify_neurons
from sinkscope.sinks.find.places import stands_out
from sinkscope.sinks.find.readers import ranked_heads
from sinkscope.sinks.find.records import Candidate, CausalSet, Readers
from sinkscope.sinks.find.survey import SinkContext
from sinkscope.sinks.removal.components import Heads, Sites, silencing
from sinkscope.sinks.removal.effects import Effects, heads_lost, side_by_side
from sinkscope.sinks.removal.rows import Trial
from sinkscope.sinks.removal.search import CONTROL_DRAWS, Removal, random_sets, smallest_set, without_unneeded

CANDIDATES = 8  # default number of candidates of the sink layer
MORE_CANDIDATES = 64  # candidates of the sink layer if the first few do not suffice
BACKUP_ROUNDS = 4  # rounds of searching for backups before the search ends
BACKUP_CANDIDATES = 4  # candidates of each layer that brings the spike back
FIRST_TEXT, OTHER_TEXTS = slice(1), slice(1, 4)  # texts in which attention is compared; random sets in the first
ATTENTION_LENGTH = 48  # least length of the texts in which attention with and without neurons is compared
NEARLY_ALL = 0.9  # share of the texts in which the spike has to be gone
Site = tuple[int, ...]


@dataclass(frozen=True)
class CausalSets:
    """The sets that were found, the candidates with those that the search added, and how many neurons were tried."""

    sets: tuple[CausalSet, ...] = ()
    neurons: tuple[Candidate, ...] = ()
    tried: int = 0

    @property
    def minimal(self) -> CausalSet | None:
        """The smallest set that removes the spike or, if it has several parts, the largest part."""
        return next(iter(self.sets), None)

    @property
    def sites(self) -> Sites:
        """The neurons of all sets in the form that interventions take."""
        return tuple(dict.fromkeys(site for each in self.sets for site in each.edit_sites))

    @property
    def members(self) -> tuple[Candidate, ...]:
        """The neurons of all sets."""
        return tuple(n for n in self.neurons if n.site in self.sites)


@dataclass(frozen=True)
class _SpikeSearch:
    """The search for the neurons that make a spike, or one part of a spike that falls and rises again.

    Attributes:
        context: The model, texts with the place, and their layer scan.
        rise: The part of the spike.
        heads: The heads after its layer that attend to the place.
        place: The words for the places.
        asked: Norms and projections `[what text layer]` with each set silenced that was asked about before.
    """

    context: SinkContext
    rise: Rise
    heads: Heads
    place: str
    asked: dict[Sites, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, context: SinkContext, rise: Rise, heads: Heads, place: str) -> _SpikeSearch:
        """The search at the places of a context."""
        return cls(context, rise, [head for head in heads if rise.layer < head[0] <= rise.readable], place)

    def norm_trial(self, sets: Sequence[Sites]) -> Trial:
        """Silences each set that was not asked about before; the spike is read."""
        new = [sites for sites in dict.fromkeys(sets) if sites not in self.asked]
        return self.context.trial(silencing(new), upto=self.rise.last, directions=self.context.directions)

    def attention_trial(self, sets: Sequence[Sites], texts: slice = FIRST_TEXT) -> Trial:
        """Silences each set; the attention to the place is read, in some texts."""
        length = max(ATTENTION_LENGTH, self.context.up_to_place + ATTENTION_LENGTH // 2)
        layers = [layer for layer, _ in self.heads]
        reading = {"upto": max(layers), "attention": True, "behind": min(layers)}
        return self.context.trial(silencing(sets), length, texts, **reading)

    def answer(self, *trials: Trial) -> list[Effects]:
        """Run trials in one walk, and remember the norms of the first in all texts."""
        answers = side_by_side(self.context.target, trials)
        texts = len(self.context.ids)
        first = answers[0]
        self.asked[()] = torch.stack([first.intact_norms, first.intact_along]).expand(-1, texts, -1)
        for number, edit in enumerate(trials[0].edits):
            read = torch.stack([first.norms[number], first.along[number]])
            self.asked[edit.zero] = read.expand(-1, texts, -1)
        return answers

    def read(self, sets: Sequence[Sites]) -> Float[Tensor, "what set text layer"]:
        """The norms and the projections with each set silenced."""
        trial = self.norm_trial(sets)
        if trial.edits:
            self.answer(trial)
        return torch.stack([self.asked[sites] for sites in sets], 1)

    def removals(self, sets: Sequence[Sites], *layers: int) -> list[Removal]:
        """Whether each set takes the spike away at these layers.

        The spike is gone if, in nearly all texts that have it, the norm is as before it or stands out no more, and most
        of the rise is gone.
        """
        before = self.context.scan.norm_before if self.rise.is_first else 0.0
        typical = torch.tensor(self.context.scan.typical_norm)[list(layers)]
        norms = self.read(sets)[0][..., layers]
        intact = self.asked[()][0][:, layers]

        def is_low(norm: Tensor) -> Tensor:
            return ~stands_out(norm, typical) | (norm <= AS_BEFORE * before)

        stood_out = ~is_low(intact)  # where it did not, nothing can be taken away
        most_is_gone = intact - norms >= NEEDED * (intact - typical.clamp(min=before))
        gone = (is_low(norms) & (most_is_gone | ~stood_out)).all(2) & stood_out.any(1)
        gone = gone.float().mean(1) / stood_out.any(1).float().mean().clamp(min=1e-9)
        drops = (1 - norms / intact)[..., -1].mean(1)
        return list(map(Removal, (gone >= NEARLY_ALL).tolist(), drops.tolist()))

    def smallest(self, sites: Sites, *layers: int) -> Sites | None:
        """The smallest set that takes the spike away at these layers; None if no set that was tried does."""
        return smallest_set(sites, lambda sets: self.removals(sets, *layers))

    def equals(self, chosen: Sites, sites: Sites) -> Sites:
        """Single neurons that take the spike away as the chosen one does."""
        others = tuple(site for site in sites if site not in chosen)
        if len(chosen) != 1 or not others:
            return ()
        removals = self.removals([(site,) for site in others], self.rise.layer, self.rise.last)
        return tuple(site for site, removal in zip(others, removals, strict=True) if removal.gone)

    def grown(self, chosen: Sites, others: Sites) -> Sites:
        """The set and those of the other candidates that attention needs as well."""

        def remove(sets: list[Sites]) -> list[Removal]:
            (edited,) = side_by_side(self.context.target, [self.attention_trial([chosen + some for some in sets])])
            return [Removal(lost >= NEEDED, lost) for lost in heads_lost(edited.attention_drops(self.heads))]

        return chosen + without_unneeded(others, remove)

    def compared(self, chosen: Sites, excluded: Sites, others: Sites = ()) -> CausalSet | None:
        """A set with its effects and controls; None if a random set has as large an effect.

        Args:
            chosen: The set.
            excluded: Neurons that are not drawn.
            others: Candidates that join the set if attention needs them as well.
        """
        sets = [chosen, *random_sets(self.context.target, chosen, excluded, self.context.seed)]
        trials = [self.norm_trial(sets)]
        if self.heads:
            alone = [(site,) for site in chosen] if len(chosen) > 1 else []
            trials.append(self.attention_trial([*sets, *alone, chosen + others]))
            if len(self.context.ids) > 1:
                trials.append(self.attention_trial([chosen], OTHER_TEXTS))
        read = self.answer(*trials)
        norms, along = self.read(sets)
        intact_norms, intact_along = self.asked[()]
        lost = 1 - norms / intact_norms
        drops = lost.mean(1)[:, [self.rise.layer, self.rise.last]]
        control = float(drops[1:].max())
        here, last = drops[0].tolist()
        layer = self.built_by(chosen)
        left = (along / intact_along)[..., layer].clamp(min=0)
        found = CausalSet(neurons_of(chosen), here, last, None, None, control)
        claims = [self.claim(chosen, layer, left)]
        if self.heads:
            attention = read[1].attention_drops(self.heads)
            of_heads = heads_lost(attention)
            if of_heads[0] < NEEDED <= of_heads[-1]:
                return self.compared(self.grown(chosen, others), excluded)
            layer, head = torch.tensor(self.heads).T
            kept = [each.attention[0][:, layer, head] / each.intact_attention[:, layer, head] for each in read[1:]]
            in_texts = reduce(torch.cat(kept), "text pair -> text", "mean")
            found = replace(
                found,
                drop_attention=1 - float(in_texts.mean()),
                heads_lost=of_heads[0],
                control=max(control, float(attention[1 : len(sets)].mean(1).max())),
                margin_attention=margin_of(in_texts.numpy()),
                readers=self.readers(chosen, read[1], float(in_texts.mean()), margin_of(in_texts.numpy())),
            )
        if min(here, last) <= found.control:
            return None
        return replace(found, margin_norm=margin_of(lost[0, :, self.rise.layer].numpy()), claims=tuple(claims))

    def readers(self, chosen: Sites, read: Effects, value: float, margin: float | None) -> Readers | None:
        """The heads, if each loses half of its attention without a set, and no two lose it without different members.

        Args:
            chosen: The set.
            read: What edits leave: of the set, of random ones, of each member if there are several, and one more.
            value: What the set leaves of the attention, mean over texts.
            margin: Two standard errors of that.
        """
        drops = read.attention_drops(self.heads)
        random = drops[1 : 1 + CONTROL_DRAWS]
        needed = drops[1 + CONTROL_DRAWS : -1] >= NEEDED
        if float(drops[0].min()) < NEEDED or bool((needed != needed[:, :1]).any()):
            return None
        layer, head = torch.tensor(self.heads).T
        intact, left = (each[:, layer, head].mean(0) for each in (read.intact_attention, read.attention[0]))
        names, before, after = ranked_heads(self.heads, intact, left)
        search = Search("sets of neurons", len(self.asked))
        by_chance = Contrast("random", 1 - float(random.mean(1).max()), len(random))
        claim = Claim(
            role="carries",
            subject=neurons_of(chosen),
            outcome=Outcome("attention", heads=names),
            place=self.place,
            value=max(0.0, value),
            contrasts=(Contrast("intact", 1.0), by_chance),
            draws=len(self.context.ids),
            search=search,
            margin=margin,
        )
        return Readers(names, before, after, neurons_of(chosen), True, claim, search)

    def built_by(self, sites: Sites) -> int:
        """The layer after which the spike is read that neurons make: before the last of them, it says nothing of it."""
        return max(self.rise.layer, *(site[0] for site in sites))

    def claim(self, sites: Sites, layer: int, left: Float[Tensor, "set text"], role: str = "makes") -> Claim:
        """What is left of the spike after a layer without neurons, in the first row, beside random ones."""
        values = left.mean(1)
        return Claim(
            role=role,
            subject=neurons_of(sites),
            outcome=Outcome("spike", layers=(layer,)),
            place=self.place,
            value=float(values[0]),
            contrasts=(Contrast("intact", 1.0), Contrast("random", float(values[1:].min()), len(values) - 1)),
            draws=left.shape[1],
            search=Search("sets of neurons", len(self.asked)),
            margin=margin_of(left[0].numpy()),
        )

    def alone(self, chosen: Sites, role: str) -> tuple[Claim, ...]:
        """What is left without each of some neurons alone, beside random ones, all asked about in one walk."""
        sets: list[list[Sites]] = []
        for site in chosen:
            sets.append([(site,), *random_sets(self.context.target, (site,), chosen, self.context.seed)])
        if not sets:
            return ()
        along, layer = self.read([each for beside in sets for each in beside])[1], self.built_by(chosen)
        left = (along / self.asked[()][1])[..., layer].clamp(min=0).split(len(sets[0]))
        return tuple(self.claim((site,), layer, of_site, role) for site, of_site in zip(chosen, left, strict=True))

    def with_backups(self, here: Sites) -> tuple[dict[Site, Candidate], Sites | None]:
        """Neurons that bring the spike back while a set is silent, and the set of all that remove it, if one does."""
        context = self.context
        backups: dict[Site, Candidate] = {}
        for _ in range(BACKUP_ROUNDS):
            silent = (*here, *backups)
            known = len(backups)
            with Ablate(sites=silent).on(context.target):
                scan = scan_layers(context.target, context.ids, whole=True, upto=self.rise.last, at=context.at)
                without = replace(context, entering=scan.entering)
                for stage in scan.stages:
                    if stage > self.rise.layer:
                        returning = stage_neurons(without, stage, BACKUP_CANDIDATES)
                        backups |= {neuron.site: neuron for neuron in returning if neuron.site not in silent}
            if len(backups) == known:
                break
            whole = self.smallest((*here, *backups), self.rise.layer, self.rise.last)
            if whole is not None:
                return backups, whole
        return backups, None

    def sets(self, neurons: Sequence[Candidate]) -> CausalSets:
        """The smallest set of these neurons and, if necessary, of further ones."""
        layer, last = self.rise.layer, self.rise.last
        known = {neuron.site: neuron for neuron in neurons}
        candidates = dict(known)
        here, minimal, sites = None, None, ()
        for more in (0, MORE_CANDIDATES):  # than the first candidates of the sink layer
            if more:
                further = stage_neurons(self.context, layer, min(more, self.context.target.d_mlp // 2))
                candidates |= {neuron.site: neuron for neuron in further}
            sites = tuple(site for site in candidates if site[0] <= last)
            minimal = self.smallest(sites, layer, last)
            here = minimal or self.smallest(sites, layer)
            if here is not None:
                break
        if here is not None and minimal is None:
            backups, minimal = self.with_backups(here)
            candidates |= backups
        best = None
        if minimal is not None:
            others = tuple(site for site in sites if site not in minimal)
            best = self.compared(minimal, tuple(candidates), others)
        if best is None:
            return CausalSets((), tuple(neurons), len(sites))
        equals = neurons_of(self.equals(best.edit_sites, sites))
        claims = [*best.claims]
        if len(best.edit_sites) > 1:
            claims += self.alone(best.edit_sites, "makes alone")
        adding = tuple(
            n.site for n in neurons if n.causal and n.site not in best.edit_sites and n.address not in equals
        )
        best = replace(best, equals=equals, claims=(*claims, *self.alone(adding, "adds")))
        added = [candidates[site] for site in candidates if site in best.edit_sites and site not in known]
        return CausalSets((best,), (*neurons, *added), len(sites))


def causal_sets(context: SinkContext, place: str, heads: Heads = (), top_k: int = CANDIDATES) -> CausalSets:
    """Search for the smallest set of neurons that makes a spike, and for backups that take over.

    If the spike returns in a later layer while a set is silent, the neurons that bring it back join the candidates. If
    it falls and rises again, each part is searched on its own, the one with the sink layer first.

    Args:
        context: The model at the places of the spike.
        place: The words for these places.
        heads: The heads that attend to them.
        top_k: Number of candidates of the sink layer, and of the layer that builds most of any other part.

    Returns:
        Nothing if no MLP makes the spike.
    """
    sets: list[CausalSet] = []
    members: dict[Site, Candidate] = {}
    tried = 0
    rises = context.scan.rises
    for rise in rises:
        neurons = verify_neurons(context, rise.layer, top_k)
        found = _SpikeSearch.of(context, rise, heads, place).sets(neurons)
        tried += found.tried
        for each in found.sets:
            sets.append(replace(each, layers=(rise.first, rise.last)) if len(rises) > 1 else each)
        for neuron in found.members if members else found.neurons:
            members.setdefault(neuron.site, neuron)
    return CausalSets(tuple(sets), tuple(members.values()), tried)
