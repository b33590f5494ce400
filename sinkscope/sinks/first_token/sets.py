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
from typing import Literal, TypeVar

import numpy as np
import torch
from einops import reduce
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
    NOT_READ,
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
    RATE_EPS,
    CausalSet,
    LaterSink,
    Member,
    Neuron,
    RepetitionSpike,
    Sites,
)
from sinkscope.sinks.tokens import TokenRows

SETS_OF_ONE_SIZE = 128  # largest number of sets of one size that are all tried
CANDIDATES = 8  # default number of candidates of the sink layer
MORE_CANDIDATES = 64  # candidates of the sink layer if the first few do not suffice
BACKUP_ROUNDS = 4  # rounds of searching for backups before the search ends
BACKUP_CANDIDATES = 4  # candidates of each layer that brings the spike back
LATER_TOKENS = 3  # tokens behind the first position whose spikes are examined
POSITION_TOKENS = 3  # different tokens that stand out at a position that is a sink whatever stands there
SPIKE_TEXTS = 16  # most different first tokens whose spike is compared
ATTENTION_TEXTS = 4  # texts in which attention is compared
AS_BEFORE = 1.25  # largest norm without the neurons that amplify a spike, over the norm before them
PART = 0.9  # of what a set takes away, that a part of it takes to stand for the set

Candidate = TypeVar("Candidate")


@dataclass(frozen=True)
class Removal:
    """What removing one set of components does: whether the effect is gone, and the share of it that is lost."""

    gone: bool
    drop: float


def smallest_set(
    candidates: Sequence[Candidate], remove: Callable[[list[tuple[Candidate, ...]]], list[Removal]]
) -> tuple[Candidate, ...] | None:
    """Search for the smallest set of candidates whose removal ends an effect; None if no set that was tried does.

    Sets are tried in order of their size while there are at most 128 of a size. Otherwise growing prefixes of the
    candidates are tried, and unneeded members are left out of the first that ends the effect. Up to 128 sets are asked
    about at once, because each question is a walk through the model.

    Args:
        candidates: Components that may be removed, the most promising first.
        remove: Removes each of several sets and says what that does.
    """
    together: list[list[tuple[Candidate, ...]]] = []  # the sets of some sizes
    for size in range(1, len(candidates) + 1):
        if comb(len(candidates), size) > SETS_OF_ONE_SIZE:
            return _most_effective_of(together, remove) or _smallest_prefix(candidates, remove)
        sets = list(combinations(candidates, size))
        if sum(map(len, together)) + len(sets) > SETS_OF_ONE_SIZE:
            best = _most_effective_of(together, remove)
            if best is not None:
                return best
            together = []
        together.append(sets)
    return _most_effective_of(together, remove)


def _smallest_prefix(
    candidates: Sequence[Candidate], remove: Callable[[list[tuple[Candidate, ...]]], list[Removal]]
) -> tuple[Candidate, ...] | None:
    prefixes = [tuple(candidates[:size]) for size in range(2, len(candidates) + 1)]
    ending = [prefix for prefix, removal in zip(prefixes, remove(prefixes), strict=True) if removal.gone]
    if not ending:
        return None
    return without_unneeded(ending[0], remove, least=1)


def without_unneeded(
    members: tuple[Candidate, ...], remove: Callable[[list[tuple[Candidate, ...]]], list[Removal]], least: int = 0
) -> tuple[Candidate, ...]:
    """Leave out members of a set, one after another, while the removal of the others ends the effect."""
    while len(members) > least:
        fewer = _most_effective_of([[members[:i] + members[i + 1 :] for i in range(len(members))]], remove)
        if fewer is None:
            break
        members = fewer
    return members


def _most_effective_of(
    by_size: list[list[tuple[Candidate, ...]]], remove: Callable[[list[tuple[Candidate, ...]]], list[Removal]]
) -> tuple[Candidate, ...] | None:
    """Of the sets of the first size of which one ends the effect, the set that takes most of it; None if none does."""
    if not by_size:
        return None
    removals = iter(remove([members for sets in by_size for members in sets]))
    for sets in by_size:
        best = None
        best_drop = -float("inf")
        for members, removal in zip(sets, removals, strict=False):
            if removal.gone and removal.drop > best_drop:
                best = members
                best_drop = removal.drop
        if best is not None:
            return best
    return None


def random_sites(target: Target, sites: Sites, excluded: Sites, generator: torch.Generator) -> Sites:
    """As many other neurons of the same layers (and experts), none of `excluded` while there are enough others."""
    drawn: list[tuple[int, ...]] = []
    for site in sites:
        neighbours = [(*site[:-1], neuron) for neuron in range(target.width(site[0], *site[1:-1]))]
        barred = {*excluded, *sites, *drawn}
        others = [other for other in neighbours if other not in barred]
        if not others:
            others = [other for other in neighbours if other not in sites]
        drawn.append(others[int(torch.randint(len(others), (1,), generator=generator))])
    return tuple(drawn)


@dataclass(frozen=True)
class CausalSets:
    """The sets that were found, and the candidates with those that the search added."""

    sets: tuple[CausalSet, ...] = ()
    neurons: tuple[Neuron, ...] = ()

    @property
    def minimal(self) -> CausalSet | None:
        """The smallest set that removes the spike."""
        if self.sets and self.sets[0].kind == "minimal":
            return self.sets[0]
        return None

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
        texts: Texts that end with the token.
        rows: For each text of the context, its place in `texts`.
        longer: Texts that go on behind it, where attention to the token is compared.
        layer: The layer that makes the spike.
        last: The last layer after which the norm stands out.
        heads: The (layer, head) pairs behind `layer` that attend to the token.
        before: The token's norm before the neurons amplify it, if it stands out already; else 0.
        entering: What entered each layer when `texts` were read.
        entering_longer: The same of the longer texts.
        asked: The norms `[text layer]` with each set silenced that was asked about before.
    """

    context: SinkContext
    texts: TokenRows
    rows: Int[Tensor, " context_text"]
    longer: Int[Tensor, "other longer"]
    layer: int
    last: int
    heads: Sequence[tuple[int, int]]
    before: float = 0.0
    entering: Entering = NOT_READ
    entering_longer: Entering = NOT_READ
    asked: dict[Sites, Tensor] = field(default_factory=dict)

    @property
    def at(self) -> int:
        """Position of the token."""
        return self.texts.shape[1] - 1

    def norm_trial(self, sets: Sequence[Sites]) -> Trial:
        """Silences each set that was not asked about before; the spike is read."""
        return Trial(
            self.texts,
            [Edit(zero=sites) for sites in dict.fromkeys(sets) if sites not in self.asked],
            at=self.at,
            upto=self.last,
            without=self.context.scan.shared_dims,
            entering=self.entering,
        )

    def attention_trial(self, sets: Sequence[Sites], texts: int) -> Trial:
        """Silences each set; the attention to the token is read, in some of the longer texts."""
        layers = [layer for layer, _ in self.heads]
        return Trial(
            self.longer[:texts],
            [Edit(zero=sites) for sites in sets],
            at=self.at,
            upto=max(layers),
            attention=True,
            behind=min(layers),
            entering=self.entering_longer.part(slice(texts), self.longer.shape[1]),
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

    def attention_lost(self, edited: Effects) -> Float[np.ndarray, " text"]:
        """Share of the attention to the token that the heads lose, in each of the longer texts."""
        layer, head = torch.tensor(self.heads).T
        left = edited.attention[0][:, layer, head] / edited.intact_attention[:, layer, head]
        return reduce(1 - left, "text pair -> text", "mean").numpy()

    def grown(self, chosen: Sites, others: Sites) -> Sites:
        """The set and those of the other candidates that attention needs as well."""

        def remove(sets: list[Sites]) -> list[Removal]:
            (edited,) = side_by_side(self.context.target, [self.attention_trial([chosen + some for some in sets], 1)])
            return [Removal(lost >= NEEDED, lost) for lost in heads_lost(edited.attention_drops(self.heads))]

        return chosen + without_unneeded(others, remove)

    def partial(self, chosen: Sites, candidates: Sites) -> CausalSet | None:
        """The part of a set that takes most of what the set takes, though not the spike; compared with random sets."""
        alone = self.drops([(site,) for site in chosen], self.layer)
        order = sorted(range(len(chosen)), key=lambda place: -alone[place])
        parts = [tuple(chosen[place] for place in order[:size]) for size in range(1, len(chosen) + 1)]
        drops = self.drops(parts, self.layer)
        chosen = next(part for part, drop in zip(parts, drops, strict=True) if drop >= PART * max(drops))
        return self._compared(chosen, candidates, (), "partial")

    def minimal(self, chosen: Sites, candidates: Sites, backups: Sites = ()) -> CausalSet | None:
        """A set that removes the spike, with those of the candidates that attention needs as well."""
        others = tuple(site for site in candidates if site not in chosen)
        return self._compared(chosen, candidates + backups, others, "minimal")

    def _compared(
        self, chosen: Sites, excluded: Sites, others: Sites, kind: Literal["minimal", "partial"]
    ) -> CausalSet | None:
        """A set with its effects and controls; None if a random set has as large an effect.

        Args:
            chosen: The set.
            excluded: Neurons that are not drawn.
            others: Candidates that join the set if attention needs them as well.
            kind: The kind of the set.
        """
        target, generator = self.context.target, self.context.generator
        controls = [random_sites(target, chosen, excluded, generator) for _ in range(CONTROL_DRAWS)]
        trials = [self.norm_trial([(), chosen, *controls])]
        if self.heads:
            trials.append(self.attention_trial([chosen, *controls, chosen + others], 1))
            trials.append(self.attention_trial([chosen], len(self.longer)))
        read = self.answer(*trials)
        at_sink_layer = self.drops([chosen, *controls], self.layer)
        at_last_layer = self.drops([chosen, *controls], self.last)
        control = max(*at_sink_layer[1:], *at_last_layer[1:])
        drop_attention = None
        margin_attention = None
        lost = None
        if self.heads:
            drops = read[1].attention_drops(self.heads)
            lost, *_, lost_with_others = heads_lost(drops)
            if lost < NEEDED <= lost_with_others:
                return self._compared(self.grown(chosen, others), excluded, (), kind)
            control = max(control, *drops[1 : 1 + CONTROL_DRAWS].mean(1).tolist())
            in_texts = self.attention_lost(read[2])
            drop_attention = float(in_texts.mean())
            margin_attention = margin_of(in_texts)
        if min(at_sink_layer[0], at_last_layer[0]) <= control:
            return None
        members = tuple(Member.of(site) for site in chosen)
        return CausalSet(
            members,
            at_sink_layer[0],
            at_last_layer[0],
            drop_attention,
            lost,
            control,
            kind,
            margin_norm=margin_of(self.lost([chosen])[0, self.rows, self.layer].numpy()),
            margin_attention=margin_attention,
        )

    def backup(self, backups: Sites, minimal: CausalSet) -> CausalSet:
        """The part of the minimal set that writes a spike only when the rest is silenced."""
        every = minimal.edit_sites
        rest = tuple(site for site in every if site not in backups)
        without_rest, without_all = self.remove([rest, every])
        drops = (1 - without_all / without_rest).mean(0).tolist()
        members = tuple(Member.of(site) for site in backups)
        return CausalSet(members, drops[self.layer], drops[self.last], None, None, minimal.control, "backup")

    def returning(self, silent: Sites) -> list[Neuron]:
        """Neurons of later layers that make a spike while these neurons are silent."""
        neurons: list[Neuron] = []
        with Ablate(sites=silent).on(self.context.target):
            scan = scan_layers(self.context.target, self.context.ids, whole=True, upto=self.last)
            without = replace(self.context, entering=scan.entering)
            for stage in scan.stages:
                if stage > self.layer:
                    neurons += stage_neurons(without, stage, BACKUP_CANDIDATES)
        return [neuron for neuron in neurons if neuron.site not in silent]


def causal_sets(context: SinkContext, neurons: Sequence[Neuron], heads: Sequence[tuple[int, int]] = ()) -> CausalSets:
    """Search for the smallest set of neurons that makes the first token's spike, and for backups that take over.

    If the spike returns in a later layer while a set is silent, the neurons that bring it back join the candidates.

    Args:
        context: The model and its spike.
        neurons: Candidates of all stages.
        heads: The (layer, head) pairs that attend to the first token.
    """
    layer = context.layer
    ids = context.ids
    firsts, rows = ids[:, 0].unique(return_inverse=True)
    spiking = [int((rows == first).nonzero()[0]) for first in range(min(len(firsts), SPIKE_TEXTS))]
    search = _SpikeSearch(
        context,
        texts=ids[spiking, :1],
        rows=rows[rows < SPIKE_TEXTS],
        longer=ids[:ATTENTION_TEXTS, :ATTENTION_LENGTH],
        layer=layer,
        last=max(layer, context.scan.spike_layers[-1]),
        heads=[(behind, head) for behind, head in heads if behind > layer],
        before=context.scan.norm_before,
        entering=context.entering.part(spiking, 1),
        entering_longer=context.entering.part(slice(ATTENTION_TEXTS), ATTENTION_LENGTH),
    )
    candidates = list(neurons)
    here, minimal, sites, backups = None, None, (), ()
    for more in (False, True):  # than the first candidates of the sink layer
        if more:
            candidates += stage_neurons(context, layer, MORE_CANDIDATES)
        sites = tuple(dict.fromkeys(neuron.site for neuron in candidates if neuron.layer <= search.last))
        minimal = search.smallest(sites, layer, search.last)
        here = minimal or search.smallest(sites, layer)
        if here is not None:
            break
    for _ in range(BACKUP_ROUNDS):  # neurons that bring the spike back while `here` is silent
        if here is None or minimal is not None:
            break
        returning = search.returning(here + backups)
        if not returning:
            break
        candidates += returning
        backups += tuple(neuron.site for neuron in returning)
        minimal = search.smallest(here + backups, layer, search.last)
    if here is not None and minimal is not None:
        backups = tuple(site for site in minimal if site not in here)
    sets: list[CausalSet] = []
    if minimal is None:
        best = search.partial(here or sites, sites + backups)
    else:
        best = search.minimal(minimal, sites, backups)
    if best is not None:
        sets.append(best)
        if best.kind == "minimal" and backups:
            sets.append(search.backup(backups, best))
    known = {neuron.site for neuron in neurons}
    in_sets = {site for causal_set in sets for site in causal_set.edit_sites}
    added = {neuron.site: neuron for neuron in candidates if neuron.site in in_sets - known}
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
    neurons: tuple[Neuron, ...]
    controls: Sites
    absence: SpikeAbsence | None

    @property
    def sites(self) -> Sites:
        """The neurons in the form that interventions take."""
        return tuple(neuron.site for neuron in self.neurons)


def sink_neurons(setup: Setup) -> SinkNeurons:
    """The neurons that make the first token's spike; they are searched once for a setup."""
    key = (sink_neurons, setup.seed, len(setup.ids))
    if key not in setup.memory:
        setup.memory[key] = _search_sink_neurons(SinkContext.read(setup))
    return setup.memory[key]


def _search_sink_neurons(context: SinkContext) -> SinkNeurons:
    if context.sink_layer is None:
        return SinkNeurons(None, (), (), SpikeAbsence.of(context))
    received = attention_received(context.target, context.ids, RATE_EPS, layers=len(context.scan.layers))
    verified = verify_neurons(context, CANDIDATES)
    neurons = causal_sets(context, verified.neurons, received.heads).members or verified.causal
    sites = tuple(neuron.site for neuron in neurons)
    controls = random_sites(context.target, sites, sites, context.generator)
    return SinkNeurons(context.sink_layer, neurons, controls, None)


def later_sinks(context: SinkContext) -> tuple[LaterSink, ...]:
    """Positions behind the first, and tokens, whose norm stands out most often, and what makes the spike of each.

    A position counts whatever stands there if several tokens stand out at it; elsewhere tokens are counted.
    """
    scan = context.scan
    ids = context.ids
    stands_out = torch.zeros_like(ids, dtype=torch.bool)
    for norms, typical in zip(scan.norms, scan.typical_norm, strict=True):
        usual = norms[:, 1:].quantile(0.75).clamp(min=typical)
        stands_out |= norms > SPIKE_RATIO * usual
    stands_out[:, 0] = False
    sinks: list[LaterSink] = []
    for at in range(1, ids.shape[1]):
        tokens = ids[stands_out[:, at], at].unique()
        if len(tokens) >= POSITION_TOKENS and float(stands_out[:, at].float().mean()) > NEEDED:
            sinks.append(_later_sink(context, "", int(stands_out[:, at].nonzero()[0]), at))
            stands_out[:, at] = False
    for token, _ in Counter(ids[stands_out].tolist()).most_common(LATER_TOKENS):
        places = (stands_out & (ids == token)).nonzero().tolist()
        row, at = min(places, key=lambda place: place[1])
        sinks.append(_later_sink(context, context.target.tokenizer.decode([token]), row, at))
    return tuple(sinks[:LATER_TOKENS])


def _later_sink(context: SinkContext, token: str, row: int, at: int) -> LaterSink:
    """A spike, and the smallest set that makes it."""
    scan = context.scan
    norms = torch.stack(scan.norms)[:, row, at].double()
    ratio = float((norms / torch.tensor(scan.typical_norm).double().clamp(min=SMALLEST_NORM)).max())
    made = set_at_position(context, scan, context.ids[row : row + 1], row, at)
    if made is None or made.set.kind != "minimal":
        return LaterSink(token, at, ratio, None)
    return LaterSink(token, at, ratio, made.set)


@dataclass(frozen=True)
class SetAtPosition:
    """The neurons that make the spike of a position, as a set and one by one."""

    set: CausalSet
    neurons: tuple[Neuron, ...]


def set_at_position(
    context: SinkContext, scan: LayerScan, ids: Int[Tensor, "1 pos"], row: int, at: int
) -> SetAtPosition | None:
    """The smallest set that makes the spike of a position of one text; None if no MLP makes it.

    Args:
        context: The model and its typical text.
        scan: The layers, as a batch of texts with this one shows them.
        ids: The text.
        row: Its row in the scan.
        at: The position.
    """
    typical = context.scan
    layer = None
    last = 0
    most_written = 0.0
    for number, reading in enumerate(scan.layers):
        written = float(reading.mlp_norms[row, at])
        if written > STAGE_OUTLIER * typical.layers[number].mlp_typical and written > most_written:
            layer = number
            most_written = written
        if float(scan.norms[number][row, at]) > SPIKE_RATIO * typical.typical_norm[number]:
            last = number
    if layer is None:
        return None
    longer = scan.entering.part(slice(row, row + 1), ids.shape[1])
    heads = attending_heads(context.target, ids[0], at, range(layer + 1, len(scan.layers)), RATE_EPS, longer)
    until = replace(context, ids=ids[:, : at + 1], entering=longer.part(slice(None), at + 1))
    search = _SpikeSearch(
        until,
        until.ids,
        rows=torch.zeros(1, dtype=torch.long),
        longer=ids,
        layer=layer,
        last=max(layer, last),
        heads=heads,
        entering=until.entering,
        entering_longer=longer,
    )
    neurons = stage_neurons(until, layer, CANDIDATES, at=at, typical=context)
    sites = tuple(neuron.site for neuron in neurons)
    chosen = search.smallest(sites, layer, search.last)
    if chosen is None:
        made = search.partial(sites, sites)
    else:
        made = search.minimal(chosen, sites)
    if made is None:
        return None
    return SetAtPosition(made, tuple(neuron for neuron in neurons if neuron.site in made.edit_sites))


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
    silent = Edit(zero=minimal.edit_sites)
    token = target.tokenizer.decode([int(ids[0, -1])])
    if reached:
        made_in = max(context.layer, *(member.layer for member in minimal.sites))
        entering = repeated.entering[reached[0]].part(slice(None), last + 1)
        edited = effects(target, ids, [silent], at=last, upto=made_in, entering=entering)
        drop = float(edited.drops(made_in))
        if drop >= NEEDED:
            return RepetitionSpike(token, last, drop, None, ())
    # Perhaps the repeated token's norm stands out behind the sink layer.
    scan = scan_layers(target, ids, whole=True, upto=context.scan.spike_layers[-1])
    heights = torch.stack([scan.norms[layer][:, -1] / scan.norms[layer][:, 0] for layer in context.scan.spike_layers])
    row = int(heights.max(0).values.argmax())
    if not reached and float(heights.max()) < NEEDED:
        return None
    token = target.tokenizer.decode([int(ids[row, -1])])
    layer = context.scan.spike_layers[int(heights[:, row].argmax())]
    entering = scan.entering.part(slice(row, row + 1), last + 1)
    drop = float(effects(target, ids[row : row + 1], [silent], at=last, upto=layer, entering=entering).drops(layer))
    made = None
    if drop < NEEDED:
        made = set_at_position(context, scan, ids[row : row + 1], row, last)
    if made is None or made.set.kind != "minimal":
        return RepetitionSpike(token, last, drop, None, ())
    return RepetitionSpike(token, last, drop, made.set, made.neurons)
