"""What is asked of a place: tables of cases, each read by the one reader (`read`) and told in a row.

- Effects: the needed set removed at the place, and everywhere; its units one by one; the place hidden; and controls,
  which write as much.
- Conditions: an ordinary position gets the place's token, sees only itself, has its position id, each alone and
  together; each is taken away at the place (Barbero et al. 2025, Sun et al. 2024, and later papers each claim one).
- Purpose: what later tokens lose without the place, or with another value there.

Everything is read in texts that did not choose what is removed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress, product
from math import inf
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import one_hot

from sinkscope.errors import UnsupportedError, warn
from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.measure.margin import count_above, mean_of
from sinkscope.models.draws import draws
from sinkscope.results.mean import Mean
from sinkscope.results.notation import Neuron
from sinkscope.results.table import whole
from sinkscope.sinks.spikes.edited import (
    Batch,
    batch_of,
    intact_losses,
    read,
    share_left,
    takes_positions,
)
from sinkscope.sinks.spikes.needs import Needs, equal_sets, other_components
from sinkscope.sinks.spikes.spike import Parts, Spike, at_position
from sinkscope.sinks.spikes.survey import Survey
from sinkscope.sinks.spikes.tables import (
    WRITES,
    Done,
    Edit,
    Effect,
)
from sinkscope.sinks.spikes.why_tables import (
    ONE_OTHER,
    Cause,
    Condition,
    Conditioned,
    Purpose,
    PurposeKey,
)
from sinkscope.sinks.thresholds import READS
from sinkscope.sinks.tokens import TokenRows

FEW = 8
ALONE = 4  # texts of controls and of removals everywhere; texts of units that are removed alone
UNITS = 8  # units that are removed alone
TEXTS = 8  # texts of conditions and purpose, two of each kind
FIRST = 16
LAST = 40  # ordinary positions are drawn from these on, up to here
SHIFT = 32  # by which the start is shifted
BEFORE = 4  # tokens that the place sees before itself
DRAWS = 4  # positions of each text that see one other token: it matters much which both are
BEGIN = 16  # tokens from here on are read for the purpose: all come after the key that is hidden
KEYS = slice(4, 12)  # ordinary keys; the one with the most attention is hidden


@dataclass(frozen=True, eq=False)
class SpikeCircuit:
    """A spike with what writes it and what it needs.

    Attributes:
        spike: The spike, in the texts that found it.
        reported: The same spike in the other texts; in the same texts, if those do not have its place.
        needs: What it needs.
        like: An earlier spike that it repeats at another place. None: it repeats none.
    """

    spike: Spike
    reported: Spike
    needs: Needs
    like: SpikeCircuit | None = None

    @property
    def patch(self) -> SinkPatch:
        """The patch of all its writers, by what their removal does; it holds the median of each on ordinary text."""
        calibrated = dict[Neuron, float]()
        for unit in self.needs.shares:
            if self.needs.role(unit) in WRITES:
                for neuron in unit:
                    calibrated[neuron] = self.needs.neutral[neuron]
        return SinkPatch(sites=tuple(calibrated), calibrated=calibrated)

    @property
    def first_writer(self) -> int:
        """The layer of the first neuron or component that it needs; if it needs none, the first layer of its run."""
        layers = list[int]()
        for part in self.needs.needed:
            layers.append(part.layer or 0)
        return min(layers, default=self.spike.layers[0])

    @property
    def heads(self) -> int:
        """Heads that attend to the place in the layers that read it, by their mean over texts."""
        return int((self.reported.attention.double().mean(-1) > READS).sum())

    @cached_property
    def hidden(self) -> Effect | None:
        """What it does to hide the place from later tokens in the layers after the first that writes its spike.

        None: no head reads the place, or no key can be hidden in the model, which a warning says.
        """
        if not self.reported.is_read or self.since >= self.spike.survey.target.n_layers:
            return None
        try:
            spike = self.reported
            return measure(Edit(Done.HIDDEN), spike, spike.reading_layers, hide="place", since=self.since)
        except UnsupportedError as error:
            warn(f"what it does to hide a place is not measured: {error}")
            return None

    @property
    def since(self) -> int:
        """The layer after the first that writes its spike."""
        return self.first_writer + 1


def measure(
    key: Edit,
    spike: Spike,
    heads: Sequence[int],
    sets: Sequence[Parts] = ((),),
    *,
    count: int | None = None,
    hide: int | Literal["place"] | None = None,
    after: int = 0,
    like: Effect | None = None,
    norm: float | None = None,
    since: int | None = None,
    parts: Parts = (),
    **how: Any,
) -> Effect:
    """Measure a case: a row of numbers by text.

    Args:
        key: What is done.
        spike: The spike, in the texts that are read.
        heads: Layers whose attention is read. Empty: neither heads nor loss is read.
        sets: Parts that are removed; several sets are read in turn, each in texts of its own.
        count: Number of texts. None: all.
        hide: The position that later tokens do not see; "place" is that of the spike.
        after: The first position that is read.
        like: What the needed set does, which the sets may do as well: those that do are counted.
        norm: Mean norm of what the sets write, over that of the needed set. None: they are no neurons.
        since: The first layer that is changed. None: all are.
        parts: The parts that the row names.
        how: What else is done, as `Batch` has it: `everywhere`, `value`.
    """
    chosen = spike.texts[:count]
    many = torch.arange(max(len(chosen), len(sets)))
    text_of = many % len(chosen)
    edit_of = many % len(sets)
    rows = chosen[text_of]
    batch = replace(batch_of(spike, sets, rows, edit_of), **how)
    if since is not None:
        batch = replace(batch, layers=range(since, spike.survey.target.n_layers))
    if hide is not None:
        hidden = batch.places[:, 0] if hide == "place" else at_position(batch.ids, hide)
        batch = replace(batch, unseen=hidden[:, None].expand(-1, hidden.shape[1], -1))
    seen = read(batch, heads, loss=bool(heads), since=after)
    left = share_left(seen.along[:, 0], seen.intact[:, 0])
    effect = Effect(key=key, parts=parts, since=since, left=mean_of(left, "share"))
    if heads:
        effect = replace(effect, heads=count_above(seen.attention[:, [*heads]].permute(1, 2, 0), READS))
    if heads and not after:
        effect = replace(effect, intact=count_above(spike.attention[..., text_of], READS))
    rise = torch.full_like(left, torch.nan)
    if bool(seen.loss.isfinite().any()):
        place = batch.places[:, 0].int()
        counted = (place.cumsum(1) > place)[:, :-1]  # queries after the first position of the place
        change = (seen.loss - intact_losses(spike)[rows]).masked_fill(~counted, torch.nan)
        rise = change.nanmean(1)
        effect = replace(effect, loss=mean_of(rise), tokens=whole(int(change.isfinite().sum())))
    if like is None:
        return effect
    if len(sets) > 1:  # sets that raise the loss as much in the same texts, or leave as little of the spike
        number, sign, own = ("left", -1, left) if like.loss is None else ("loss", 1, rise)
        known = torch.tensor(like[number].by_text)[text_of]
        reached = 0
        for member in range(len(sets)):
            here = edit_of == member
            reached += bool(sign * own[here].mean() >= sign * known[here].mean())
        effect = replace(effect, sets=whole(len(sets)), reached=whole(reached))
    size = Mean(sum(map(len, sets)) / len(sets), kind="count")
    return replace(effect, size=size, norm=None if norm is None else Mean(norm, kind="share"))


# --- effects ---


@torch.no_grad()
def effects_of(circuit: SpikeCircuit, chosen: Survey, seed: int) -> list[Effect]:
    """Measure what the needed set of a spike does, beside what others do that write as much, and each unit of it.

    Args:
        circuit: The spike, with what it needs.
        chosen: The survey that found it, which tells what neurons write.
        seed: Seed of random sets.

    Returns:
        The intact spike, the needed parts removed, each alone, the place hidden, and the controls; none if nothing is
        needed.
    """
    spike = circuit.reported
    needs = circuit.needs
    if not needs.needed:
        return []
    reading = spike.reading_layers
    layers = reading if spike.is_read else ()
    at_place = measure(Edit(Done.NEEDED), spike, layers, [needs.needed], parts=needs.needed)
    rows = [Effect(key=Edit(Done.INTACT), left=Mean(1.0, kind="share"), heads=at_place.intact), at_place]
    if not needs.units:
        key = Edit(Done.RANDOM)
        others = other_components(needs.order, needs.needed)
        return [*rows, measure(key, spike, layers, others, like=at_place) if others else Effect(key=key)]
    few: dict[str, Any] = {"everywhere": True, "count": FEW}
    key = Edit(Done.NEEDED, everywhere=True)
    rows.append(measure(key, spike, reading, [needs.needed], parts=needs.needed, **few))
    if len(needs.units) > 1:
        for unit in sorted(needs.units, key=[*needs.alone].index)[:UNITS]:  # the strongest effect first
            alone = measure(Edit(Done.PART), spike, layers, [unit], count=ALONE)
            rows += [replace(alone, key=Edit(Done.PART, part=neuron)) for neuron in unit]
    if circuit.hidden is not None:
        rows.append(circuit.hidden)
    for done, sets in equal_sets(chosen, needs.units, [*needs.neutral], seed).items():
        norm = float(np.mean([*sets.values()]))
        rows.append(measure(Edit(done, everywhere=True), spike, layers, [*sets], like=at_place, norm=norm, **few))
    if not rows[-1].is_control:  # no other neuron of these layers writes anything
        rows.append(Effect(key=Edit(Done.BUSIEST, everywhere=True)))
    return rows


# --- purpose ---


@torch.no_grad()
def purpose_of(circuits: Sequence[SpikeCircuit]) -> list[list[Purpose]]:
    """Ask what the attention to the first token is for, of each of its spikes.

    Args:
        circuits: The spikes, each with what it needs; layers after its first writer are changed.

    Returns:
        Rows of each; none of short texts, and of a model that is streamed.
    """
    spike = circuits[0].reported
    by_spike = list[list[Purpose]]()
    survey = spike.survey
    target = spike.survey.target
    if survey.ids.shape[1] <= 2 * BEGIN or not target.resident:
        return [[] for _ in circuits]
    key = KEYS.start + int(survey.attention[target.attending].mean((0, 1, 2))[KEYS].argmax())
    second = replace(spike, place=replace(spike.place, mask=at_position(survey.ids, 1)))

    def asked(key: PurposeKey, spike: Spike, other: int | None = None, **how: Any) -> Purpose:
        read = measure(Edit(Done.HIDDEN), spike, target.attending, count=TEXTS, after=BEGIN, **how)
        return Purpose(key=key, since=read.since, other=other, heads=read.heads, loss=read.loss, tokens=read.tokens)

    # the same for all spikes of the place
    intact = Purpose(key=PurposeKey.INTACT, heads=asked(PurposeKey.INTACT, spike).heads)
    taker = asked(PurposeKey.INTACT, second, hide=0).heads  # the next position may take over
    everywhere = replace(asked(PurposeKey.HIDDEN_EVERYWHERE, spike, hide="place"), taker_heads=taker)
    for circuit in circuits:
        own = circuit.reported
        since = circuit.since
        hidden = asked(PurposeKey.HIDDEN, own, hide="place", since=since)
        if circuit.hidden is not None:  # one number: over all texts that report
            hidden = replace(hidden, loss=circuit.hidden.loss, tokens=circuit.hidden.tokens)
        zero = asked(PurposeKey.VALUE_ZERO, own, value="zero", since=since)
        mean = asked(PurposeKey.VALUE_MEAN, own, value="mean", since=since)
        control = asked(PurposeKey.OTHER_HIDDEN, own, key, hide=key, since=since)
        by_spike.append([intact, everywhere, hidden, zero, mean, control])
    return by_spike


# --- conditions ---


def rows_at(
    spikes: Sequence[Spike],
    ids: TokenRows,
    at: Int[Tensor, " row"],
    causes: Collection[Cause] = (),
    *,
    token: Int[Tensor, " row"] | None = None,
    sees: Bool[Tensor, "row key"] | None = None,
) -> Batch:
    """Return rows that are read at one position each.

    Args:
        spikes: The spikes.
        ids: The tokens.
        at: The positions.
        causes: What each position gets of what is special about the first token.
        token: Another token that stands there. None: its own.
        sees: What it sees beside itself. None: all before it.
    """
    place = torch.arange(ids.shape[1]) == at[:, None]
    unseen = None
    positions = None
    if Cause.TOKEN in causes:
        token = ids[:, 0]
    if Cause.ALONE in causes:
        sees = torch.zeros_like(place)
    if token is not None:
        ids = torch.where(place, token[:, None], ids)
    if sees is not None:
        unseen = place[..., None] & ~sees[:, None]
    if Cause.ID in causes:
        positions = torch.where(place, 0, torch.arange(ids.shape[1]))
    places = place[:, None].expand(-1, len(spikes), -1)
    return Batch(tuple(spikes), ids, places, unseen=unseen, positions=positions)


def place_sees(spikes: Sequence[Spike], ids: TokenRows, more: int) -> Batch:
    """Put so many tokens before the first position, which it alone sees."""
    ids = torch.cat([ids[:, ids.shape[1] - more :], ids], 1)
    at = torch.arange(ids.shape[1])
    unseen = ((at[:, None] > more) & (at < more)).expand(len(ids), -1, -1)
    places = at_position(ids, more)[:, None].expand(-1, len(spikes), -1)
    positions = (at - more).clamp(min=0).expand_as(ids)
    return Batch(tuple(spikes), ids, places, unseen=unseen, positions=positions)


def ordinary_positions(ids: TokenRows, seed: int) -> Int[Tensor, " text"]:
    """Draw an ordinary position in each text."""
    return torch.randint(FIRST, LAST, (len(ids),), generator=draws(seed, "ordinary positions of conditions"))


@torch.no_grad()
def conditions_of(spikes: Sequence[Spike], seed: int) -> list[list[Conditioned]]:
    """Ask what makes a position the place of spikes of the first token, of each; empty if the texts are too short.

    Args:
        spikes: The spikes, in texts that did not find them.
        seed: Seed of the ordinary positions, tokens and others.
    """
    survey = spikes[0].survey
    by_spike = [list[Conditioned]() for _ in spikes]
    if survey.ids.shape[1] <= LAST:
        return by_spike
    target = survey.target
    ids = survey.ids[:TEXTS]
    generator = draws(seed, "other tokens of conditions")
    at = torch.randint(FIRST, ids.shape[1], (len(ids),), generator=generator)
    token = ids.roll(1, 0)[torch.arange(len(ids)), at]
    first = torch.zeros(len(ids), dtype=torch.long)
    takes = takes_positions(target)
    cases: dict[Condition, Batch] = {}
    for has in product((False, True), repeat=len(Cause)):
        causes = tuple(compress(Cause, has))
        if takes or Cause.ID not in causes:
            cases[Condition(causes)] = rows_at(spikes, ids, ordinary_positions(ids, seed), causes)
    cases[Condition((Cause.TOKEN,), at_place=True)] = rows_at(spikes, ids, first, token=token)
    cases[Condition((Cause.ALONE,), at_place=True)] = place_sees(spikes, ids, BEFORE)
    if takes and ids.shape[1] + SHIFT <= (target.max_positions or inf):
        later = torch.arange(ids.shape[1]).expand_as(ids) + SHIFT
        cases[Condition((Cause.ID,), at_place=True)] = replace(rows_at(spikes, ids, first), positions=later)
    cases[ONE_OTHER] = one_other_drawn(spikes, survey.ids, seed)
    for condition, batch in cases.items():
        layers = target.attending
        texts = len(ids)
        if condition == ONE_OTHER:
            layers = []
            texts = len(survey.ids)
            batch = batch.until_place()
        seen = read(batch, layers)
        for number, (spike, rows) in enumerate(zip(spikes, by_spike, strict=True)):
            left = mean_of(seen.along[:, number].reshape(-1, texts).mean(0), "share")
            received = seen.attention[:, [*spike.reading_layers]].permute(1, 2, 0)
            assert left is not None
            heads = count_above(received, READS) if layers else None
            rows.append(Conditioned(key=condition, left=left, heads=heads))
    return by_spike


def one_other_drawn(spikes: Sequence[Spike], ids: TokenRows, seed: int) -> Batch:
    """Return positions that see themselves and one other token, which is not the first: several draws in each text."""
    generator = draws(seed, "one other token of conditions")
    at = list[Tensor]()
    others = list[int]()
    for _ in range(DRAWS):
        at.append(torch.randint(FIRST, LAST, (len(ids),), generator=generator))
        for position in at[-1].tolist():
            others.append(int(torch.randint(1, position, (1,), generator=generator)))
    sees = one_hot(torch.tensor(others), ids.shape[1]).bool()
    return rows_at(spikes, ids.repeat(DRAWS, 1), torch.cat(at), sees=sees)
