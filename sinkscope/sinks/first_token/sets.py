"""Sets of components: the smallest whose removal ends an effect, and the neurons that make a spike, with backups.

`smallest_set` is the search itself and knows nothing of neurons. `causal_sets` uses it for the first token's spike, and
`later_sinks` for spikes of later tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import comb
from typing import Any

import torch
from einops import rearrange, reduce
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.interventions import Ablate
from sinkscope.measure import Setup
from sinkscope.measure.evidence import NEEDED
from sinkscope.measure.margin import margin_of
from sinkscope.models.target import Target
from sinkscope.sinks.first_token.absence import SpikeAbsence
from sinkscope.sinks.first_token.attention_received import ALL_TEXTS, attention_received
from sinkscope.sinks.first_token.context import SinkContext
from sinkscope.sinks.first_token.effects import Edit, Effects, Trial, attending_heads, effects, heads_lost, side_by_side
from sinkscope.sinks.first_token.layer_scan import (
    SMALLEST_NORM,
    SPIKE_RATIO,
    STAGE_OUTLIER,
    Entering,
    LayerScan,
    scan_layers,
)
from sinkscope.sinks.first_token.neurons import RepeatedSinks, stage_neurons, verify_neurons
from sinkscope.sinks.first_token.result import (
    ATTENTION_LENGTH,
    CONTROL_DRAWS,
    CausalSet,
    Heads,
    LaterSink,
    Neuron,
    RepetitionSpike,
    Sites,
    members_of,
    sites_of,
)
from sinkscope.sinks.tokens import TokenRows

SETS_AT_ONCE = 128  # largest number of sets of one size that are all tried, and that are asked about together
CANDIDATES = 8  # default number of candidates of the sink layer
MORE_CANDIDATES = 64  # candidates of the sink layer if the first few do not suffice
BACKUP_ROUNDS = 4  # rounds of searching for backups before the search ends
BACKUP_CANDIDATES = 4  # candidates of each layer that brings the spike back
LATER_TOKENS = 3  # tokens behind the first position whose spikes are examined
POSITION_TOKENS = 3  # different tokens that stand out at a position that is a sink whatever stands there
SPIKE_TEXTS = 16  # most different first tokens whose spike is compared
ATTENTION_TEXTS = 4  # texts in which attention is compared
AS_BEFORE = 1.25  # largest norm without the neurons that amplify a spike, over the norm before them


@dataclass(frozen=True)
class Removal:
    """What removing one set of components does: whether the effect is gone, and the share of it that is lost."""

    gone: bool
    drop: float


Members = tuple[Any, ...]
"""A set of components, neurons or parts of a model."""
Remove = Callable[[list[Members]], list[Removal]]
"""Removes each of several sets and says what that does."""


def smallest_set(candidates: Sequence[Any], remove: Remove) -> Members | None:
    """Search for the smallest set of candidates whose removal ends an effect; None if no set that was tried does.

    Sets are tried in order of their size while there are at most 128 of a size. Otherwise growing prefixes of the
    candidates are tried, and unneeded members are left out of the first that ends the effect. Up to 128 sets are asked
    about at once, because each question is a walk through the model.

    Args:
        candidates: Components that may be removed, the most promising first.
        remove: Removes sets.
    """
    together = []
    for size in range(1, len(candidates) + 1):
        if comb(len(candidates), size) > SETS_AT_ONCE:
            break
        sets = list(combinations(candidates, size))
        if len(together) + len(sets) > SETS_AT_ONCE:
            best = _most_effective(together, remove)
            if best is not None:
                return best
            together = []
        together += sets
    else:
        return _most_effective(together, remove)
    best = _most_effective(together, remove)
    if best is not None:
        return best
    prefix = _most_effective([tuple(candidates[:size]) for size in range(2, len(candidates) + 1)], remove)
    if prefix is None:
        return None
    return without_unneeded(prefix, remove, least=1)


def without_unneeded(members: Members, remove: Remove, least: int = 0) -> Members:
    """Leave out members of a set, one after another, while the removal of the others ends the effect."""
    while len(members) > least:
        fewer = _most_effective([members[:i] + members[i + 1 :] for i in range(len(members))], remove)
        if fewer is None:
            break
        members = fewer
    return members


def _most_effective(sets: list[Members], remove: Remove) -> Members | None:
    """Of the smallest sets that end the effect, the one that takes most of it; None if none does."""
    if not sets:
        return None
    best = None
    best_rank = (0, 0.0)
    for members, removal in zip(sets, remove(sets), strict=True):
        rank = (-len(members), removal.drop)
        if removal.gone and (best is None or rank > best_rank):
            best = members
            best_rank = rank
    return best


def random_sites(target: Target, sites: Sites, excluded: Sites, generator: torch.Generator) -> Sites:
    """As many other neurons of the same layers (and experts), none of `excluded` while there are enough others."""
    drawn = ()
    for site in sites:
        neighbours = [(*site[:-1], neuron) for neuron in range(target.width(site[0], *site[1:-1]))]
        barred = {*excluded, *sites, *drawn}
        others = [other for other in neighbours if other not in barred]
        if not others:
            others = [other for other in neighbours if other not in sites]
        drawn += (others[int(torch.randint(len(others), (1,), generator=generator))],)
    return drawn


def random_sets(target: Target, sites: Sites, excluded: Sites, generator: torch.Generator) -> list[Sites]:
    """The random sets that a set is compared with."""
    return [random_sites(target, sites, excluded, generator) for _ in range(CONTROL_DRAWS)]


@dataclass(frozen=True)
class CausalSets:
    """The sets that were found, and the candidates with those that the search added."""

    sets: tuple[CausalSet, ...] = ()
    neurons: tuple[Neuron, ...] = ()

    @property
    def minimal(self) -> CausalSet | None:
        """The smallest set that removes the spike."""
        return next(iter(self.sets), None)

    @property
    def members(self) -> tuple[Neuron, ...]:
        """The neurons of the minimal set; empty if no set removes the spike."""
        if self.minimal is None:
            return ()
        return tuple(n for n in self.neurons if n.site in self.minimal.edit_sites)


@dataclass(frozen=True)
class _SpikeSearch:
    """The search for the neurons that make the spike of one token.

    Attributes:
        context: The model and its layer scan.
        ids: Texts with the token, in the first of which attention to it is compared.
        at: Its position.
        picked: The texts in which its norm is read.
        rows: For each text of the context, its place in `picked`.
        layer: The layer that makes the spike.
        last: The last layer after which the norm stands out.
        heads: The heads behind `layer` that attend to the token.
        entering: What entered each layer when the texts were read.
        before: The token's norm before the neurons amplify it, if it stands out already; else 0.
        asked: The norms `[text layer]` with each set silenced that was asked about before.
    """

    context: SinkContext
    ids: TokenRows
    at: int
    picked: list[int]
    rows: Int[Tensor, " context_text"]
    layer: int
    last: int
    heads: Heads
    entering: Entering
    before: float = 0.0
    asked: dict[Sites, Tensor] = field(default_factory=dict)

    @classmethod
    def of_first_token(cls, context: SinkContext, heads: Heads) -> _SpikeSearch:
        """The search for the first token of typical text; a text for each different first token."""
        ids = context.ids
        firsts, rows = ids[:, 0].unique(return_inverse=True)
        spiking = [int((rows == first).nonzero()[0]) for first in range(min(len(firsts), SPIKE_TEXTS))]
        return cls(
            context,
            ids[:, :ATTENTION_LENGTH],
            0,
            spiking,
            rows[rows < SPIKE_TEXTS],
            context.layer,
            max(context.layer, context.scan.spike_layers[-1]),
            [place for place in heads if place[0] > context.layer],
            context.entering.part(slice(None), ATTENTION_LENGTH),
            before=context.scan.norm_before,
        )

    def norm_trial(self, sets: Sequence[Sites]) -> Trial:
        """Silences each set that was not asked about before; the spike is read."""
        return Trial(
            self.ids[self.picked, : self.at + 1],
            [Edit(zero=sites) for sites in dict.fromkeys(sets) if sites not in self.asked],
            at=self.at,
            upto=self.last,
            without=self.context.scan.shared_dims,
            entering=self.entering.part(self.picked, self.at + 1),
        )

    def attention_trial(self, sets: Sequence[Sites], texts: int) -> Trial:
        """Silences each set; the attention to the token is read, in the first texts."""
        return Trial(
            self.ids[:texts],
            [Edit(zero=sites) for sites in sets],
            at=self.at,
            upto=max(self.heads)[0],
            attention=True,
            behind=min(self.heads)[0],
            entering=self.entering.part(slice(texts), self.ids.shape[1]),
        )

    def answer(self, *trials: Trial) -> list[Effects]:
        """Run trials in one walk, and remember the norms of the first."""
        answers = side_by_side(self.context.target, trials)
        self.asked[()] = answers[0].intact_norms
        for edit, norms in zip(trials[0].edits, answers[0].norms, strict=True):
            self.asked[edit.zero] = norms
        return answers

    def remove(self, sets: Sequence[Sites]) -> Float[Tensor, "set text layer"]:
        """The norms with each set silenced."""
        trial = self.norm_trial([(), *sets])
        if trial.edits:
            self.answer(trial)
        return torch.stack([self.asked[sites] for sites in sets])

    def lost(self, sets: Sequence[Sites]) -> Float[Tensor, "set text layer"]:
        """Share of the intact norm that each set takes away."""
        return 1 - self.remove(sets) / self.asked[()]

    def drops(self, sets: Sequence[Sites], layer: int) -> list[float]:
        """This share at a layer, mean over texts."""
        return self.lost(sets)[..., layer].mean(1).tolist()

    def smallest(self, sites: Sites, *layers: int) -> Sites | None:
        """The smallest set that takes the spike away at these layers; None if no set that was tried does."""
        index = torch.tensor(layers)
        typical = torch.tensor(self.context.scan.typical_norm)[index]
        most_left = (SPIKE_RATIO * typical).clamp(min=AS_BEFORE * self.before)
        rest = typical.clamp(min=self.before)

        def remove(sets: list[Sites]) -> list[Removal]:
            """The spike is gone if, in nearly all texts that have it, the norm is as before it or stands out no more,
            and most of the rise is gone.
            """
            norms = self.remove(sets)[..., index]
            intact = self.asked[()][:, index]
            low = norms <= most_left
            most = intact - norms >= NEEDED * (intact - rest)
            gone = (low & (most | (intact <= most_left))).all(2)
            of_most = (gone.float().mean(1) >= ALL_TEXTS).tolist()
            return list(map(Removal, of_most, self.drops(sets, layers[-1])))

        return smallest_set(sites, remove)

    def grown(self, chosen: Sites, others: Sites) -> Sites:
        """The set and those of the other candidates that attention needs as well."""

        def remove(sets: list[Sites]) -> list[Removal]:
            (edited,) = side_by_side(self.context.target, [self.attention_trial([chosen + some for some in sets], 1)])
            return [Removal(lost >= NEEDED, lost) for lost in heads_lost(edited.attention_drops(self.heads))]

        return chosen + without_unneeded(others, remove)

    def compared(self, chosen: Sites, excluded: Sites, others: Sites = ()) -> CausalSet | None:
        """A set with its effects and controls; None if a random set has as large an effect.

        Args:
            chosen: The set.
            excluded: Neurons that are not drawn.
            others: Candidates that join the set if attention needs them as well.
        """
        sets = [chosen, *random_sets(self.context.target, chosen, excluded, self.context.generator)]
        trials = [self.norm_trial([(), *sets])]
        if self.heads:
            trials.append(self.attention_trial([*sets, chosen + others], 1))
            trials.append(self.attention_trial([chosen], ATTENTION_TEXTS))
        read = self.answer(*trials)
        at_sink_layer, *controls = self.drops(sets, self.layer)
        at_last_layer, *later_controls = self.drops(sets, self.last)
        control = max(*controls, *later_controls)
        drop_attention = None
        margin_attention = None
        lost = None
        if self.heads:
            drops = read[1].attention_drops(self.heads)
            lost, *_, lost_with_others = heads_lost(drops)
            if lost < NEEDED <= lost_with_others:
                return self.compared(self.grown(chosen, others), excluded)
            control = max(control, *drops[1:-1].mean(1).tolist())
            layer, head = torch.tensor(self.heads).T
            left = read[2].attention[0][:, layer, head] / read[2].intact_attention[:, layer, head]
            in_texts = reduce(1 - left, "text pair -> text", "mean").numpy()
            drop_attention = float(in_texts.mean())
            margin_attention = margin_of(in_texts)
        if min(at_sink_layer, at_last_layer) <= control:
            return None
        margin = margin_of(self.lost([chosen])[0, self.rows, self.layer].numpy())
        drops_of_set = (at_sink_layer, at_last_layer, drop_attention)
        return CausalSet(members_of(chosen), *drops_of_set, lost, control, "minimal", margin, margin_attention)

    def backup(self, backups: Sites, minimal: CausalSet) -> CausalSet:
        """The part of the minimal set that writes a spike only when the rest is silenced."""
        every = minimal.edit_sites
        rest = tuple(site for site in every if site not in backups)
        without_rest, without_all = self.remove([rest, every])
        drops = (1 - without_all / without_rest).mean(0).tolist()
        members = members_of(backups)
        return CausalSet(members, drops[self.layer], drops[self.last], None, None, minimal.control, "backup")

    def returning(self, silent: Sites) -> list[Neuron]:
        """Neurons of later layers that make a spike while these neurons are silent."""
        neurons = []
        with Ablate(sites=silent).on(self.context.target):
            scan = scan_layers(self.context.target, self.context.ids, whole=True, upto=self.last)
            without = replace(self.context, entering=scan.entering)
            for stage in scan.stages:
                if stage > self.layer:
                    neurons += stage_neurons(without, stage, BACKUP_CANDIDATES)
        return [neuron for neuron in neurons if neuron.site not in silent]

    def with_backups(self, here: Sites) -> tuple[list[Neuron], Sites | None]:
        """Neurons that bring the spike back while a set is silent, and the set of all that remove it, if one does."""
        backups = []
        for _ in range(BACKUP_ROUNDS):
            returning = self.returning(here + sites_of(backups))
            if not returning:
                break
            backups += returning
            whole = self.smallest(here + sites_of(backups), self.layer, self.last)
            if whole is not None:
                return backups, whole
        return backups, None


def causal_sets(context: SinkContext, neurons: Sequence[Neuron], heads: Heads = ()) -> CausalSets:
    """Search for the smallest set of neurons that makes the first token's spike, and for backups that take over.

    If the spike returns in a later layer while a set is silent, the neurons that bring it back join the candidates.

    Args:
        context: The model and its spike.
        neurons: Candidates of all stages.
        heads: The heads that attend to the first token.
    """
    search = _SpikeSearch.of_first_token(context, heads)
    candidates = list(neurons)
    here, minimal, sites = None, None, ()
    for more in (0, MORE_CANDIDATES):  # than the first candidates of the sink layer
        if more:
            candidates += stage_neurons(context, search.layer, more)
        sites = tuple(dict.fromkeys(neuron.site for neuron in candidates if neuron.layer <= search.last))
        minimal = search.smallest(sites, search.layer, search.last)
        here = minimal or search.smallest(sites, search.layer)
        if here is not None:
            break
    if here is not None and minimal is None:
        returning, minimal = search.with_backups(here)
        candidates += returning
    best = None
    backups = ()
    if here is not None and minimal is not None:
        backups = tuple(site for site in minimal if site not in here)
        others = tuple(site for site in sites if site not in minimal)
        best = search.compared(minimal, sites + backups, others)
    if best is None:
        return CausalSets((), tuple(neurons))
    sets = [best]
    if backups:
        sets.append(search.backup(backups, best))
    added = {}
    for neuron in candidates:
        if neuron.site in best.edit_sites and neuron.site not in sites_of(neurons):
            added[neuron.site] = neuron
    return CausalSets(tuple(sets), (*neurons, *added.values()))


@dataclass(frozen=True)
class SinkNeurons:
    """The neurons that every measurement of a setup edits or reads, in the words of `find_sinks`: its smallest set.

    Attributes:
        layer: The sink layer. None if no MLP makes a spike of the first token.
        neurons: The smallest set of neurons that makes the spike, largest contribution first. If no set removes the
            spike, the neurons that are causal alone.
        controls: As many random neurons of the same layers.
        absence: What there is if no MLP makes a spike.
    """

    layer: int | None
    neurons: tuple[Neuron, ...] = ()
    controls: Sites = ()
    absence: SpikeAbsence | None = None

    @classmethod
    def of(cls, context: SinkContext) -> SinkNeurons:
        """Search for them."""
        if context.sink_layer is None:
            return cls(None, absence=SpikeAbsence.of(context))
        received = attention_received(context.target, context.ids, layers=len(context.scan.layers))
        verified = verify_neurons(context, CANDIDATES)
        neurons = causal_sets(context, verified.neurons, received.heads).members or verified.causal
        sites = sites_of(neurons)
        return cls(context.sink_layer, neurons, random_sites(context.target, sites, sites, context.generator))


def sink_neurons(setup: Setup) -> SinkNeurons:
    """The neurons that make the first token's spike; they are searched once for a setup."""
    key = (sink_neurons, setup.seed, len(setup.ids))
    if key not in setup.memory:
        setup.memory[key] = SinkNeurons.of(SinkContext.read(setup))
    return setup.memory[key]


def later_sinks(context: SinkContext) -> tuple[LaterSink, ...]:
    """Positions behind the first, and tokens, whose norm stands out most often, and what makes the spike of each.

    A position counts whatever stands there if several tokens stand out at it; elsewhere tokens are counted.
    """
    scan = context.scan
    ids = context.ids
    usual = scan.norms[:, :, 1:].flatten(1).quantile(0.75, 1).maximum(torch.tensor(scan.typical_norm))
    stands_out = (scan.norms > SPIKE_RATIO * rearrange(usual, "layer -> layer 1 1")).any(0)
    stands_out[:, 0] = False
    sinks = []
    for at in range(1, ids.shape[1]):
        there = stands_out[:, at]
        if len(ids[there, at].unique()) >= POSITION_TOKENS and float(there.float().mean()) > NEEDED:
            sinks.append(_later_sink(context, "", int(there.nonzero()[0]), at))
            stands_out[:, at] = False
    for token, _ in Counter(ids[stands_out].tolist()).most_common(LATER_TOKENS):
        places = (stands_out & (ids == token)).nonzero().tolist()
        row, at = min(places, key=lambda place: place[1])
        sinks.append(_later_sink(context, context.target.tokenizer.decode([token]), row, at))
    return tuple(sinks[:LATER_TOKENS])


def _later_sink(context: SinkContext, token: str, row: int, at: int) -> LaterSink:
    """A spike, and the smallest set that makes it."""
    scan = context.scan
    norms = scan.norms[:, row, at].double()
    ratio = float((norms / torch.tensor(scan.typical_norm).double().clamp(min=SMALLEST_NORM)).max())
    return LaterSink(token, at, ratio, set_at_position(context, scan, context.ids, row, at).minimal)


def set_at_position(context: SinkContext, scan: LayerScan, ids: TokenRows, row: int, at: int) -> CausalSets:
    """The smallest set that makes the spike of a position of one text, and its neurons; empty if no MLP makes it.

    Args:
        context: The model and its typical text.
        scan: The layers, as these texts show them.
        ids: The texts.
        row: The text.
        at: The position.
    """
    typical = context.scan
    depth = len(scan.layers)
    written = scan.mlp_norms[:, row, at]
    written = written * (written > STAGE_OUTLIER * typical.mlp_typical[:depth])
    if not bool(written.any()):
        return CausalSets()
    layer = int(written.argmax())
    spikes = scan.norms[:, row, at] > SPIKE_RATIO * torch.tensor(typical.typical_norm[:depth])
    last = max(layer, *spikes.nonzero().flatten().tolist(), 0)
    text = ids[row : row + 1]
    longer = scan.entering.part(slice(row, row + 1), text.shape[1])
    heads = attending_heads(context.target, text, at, range(layer + 1, depth), longer)
    until = replace(context, ids=text[:, : at + 1], entering=longer.part(slice(None), at + 1))
    first_row = torch.zeros(1, dtype=torch.long)
    search = _SpikeSearch(until, text, at, [0], first_row, layer, last, heads, longer)
    neurons = stage_neurons(until, layer, CANDIDATES, at=at, typical=context)
    sites = sites_of(neurons)
    chosen = search.smallest(sites, layer, last)
    if chosen is None:
        return CausalSets()
    best = search.compared(chosen, sites, tuple(site for site in sites if site not in chosen))
    if best is None:
        return CausalSets()
    return CausalSets((best,), tuple(neuron for neuron in neurons if neuron.site in best.edit_sites))


@torch.no_grad()
def repetition_spike(
    context: SinkContext,
    words: list[int],
    firsts: list[int],
    repeated: RepeatedSinks,
    minimal: CausalSet,
    limit: int,
) -> RepetitionSpike | None:
    """Whether the neurons that make the first token's spike make that of a repeated token, too, or which others do.

    Args:
        context: The model and its spike.
        words: The repeated tokens.
        firsts: The token before each.
        repeated: When the norm of each reaches half of the first token's at the sink layer.
        minimal: The neurons that make the first token's spike.
        limit: Repetitions of a token that never gets there.

    Returns:
        None if no repeated token's norm stands out.
    """
    target = context.target
    repeats = repeated.repeats
    places = [place for place, count in enumerate(repeats) if count != 1]  # others need no repetition
    reached = [place for place in places if repeats[place] is not None][:1]
    rows = [[firsts[place], *[words[place]] * (repeats[place] or limit)] for place in reached or places]
    if not rows:
        return None
    ids = torch.tensor(rows)
    last = ids.shape[1] - 1

    def without_the_neurons(row: int, layer: int, entering: Entering) -> float:
        """Share of the norm of the last repetition that is lost without them."""
        silent = [Edit(zero=minimal.edit_sites)]
        edited = effects(target, ids[row : row + 1], silent, at=last, upto=layer, entering=entering)
        return float(edited.drops(layer))

    if reached:
        made_in = max(context.layer, *(member.layer for member in minimal.sites))
        drop = without_the_neurons(0, made_in, repeated.entering[reached[0]].part(slice(None), last + 1))
        if drop >= NEEDED:
            return RepetitionSpike(target.tokenizer.decode([words[reached[0]]]), last, drop, None, ())
    # Perhaps the repeated token's norm stands out behind the sink layer.
    spike_layers = context.scan.spike_layers
    scan = scan_layers(target, ids, whole=True, upto=spike_layers[-1])
    heights = (scan.norms[:, :, -1] / scan.norms[:, :, 0])[spike_layers]
    if not reached and float(heights.max()) < NEEDED:
        return None
    row = int(heights.max(0).values.argmax())
    layer = spike_layers[int(heights[:, row].argmax())]
    drop = without_the_neurons(row, layer, scan.entering.part(slice(row, row + 1), last + 1))
    token = target.tokenizer.decode([int(ids[row, -1])])
    own = CausalSets()
    if drop < NEEDED:
        own = set_at_position(context, scan, ids, row, last)
    return RepetitionSpike(token, last, drop, own.minimal, own.members)
