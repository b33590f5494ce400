"""What is asked of a place: tables of cases, each read by the one reader (`read`) and told in a `Row`.

- Effects: the needed set removed at the place, and everywhere; the place hidden; and controls, which write as much.
- Alone: the units of the needed set, one by one.
- Conditions: an ordinary position gets the place's token, sees only itself, has its position id, each alone and
  together; each is taken away at the place (Barbero et al. 2025, Sun et al. 2024, and later papers each claim one).
- Purpose: what later tokens lose without the place, or with another value there.

Everything is read in texts that did not choose what is removed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
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
from sinkscope.results.notation import Neuron
from sinkscope.results.row import Mean, Row, row_of
from sinkscope.sinks.spikes.edited import (
    Batch,
    batch_of,
    intact_losses,
    read,
    share_left,
    takes_positions,
)
from sinkscope.sinks.spikes.needs import Needs, equal_sets, other_components
from sinkscope.sinks.spikes.result import AS_IT_IS, CAUSES, NO_EQUAL, ONE_OTHER, PURPOSE_CONTROLS, TAKEN, WRITES
from sinkscope.sinks.spikes.spike import Parts, Spike, at_position
from sinkscope.sinks.spikes.survey import Survey
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
    def hidden(self) -> Row | None:
        """What it does to hide the place from later tokens in the layers after the first that writes its spike.

        None: no head reads the place, or no key can be hidden in the model, which a warning says.
        """
        later = self.later
        if not self.reported.is_read or not later:
            return None
        how: dict[str, Any] = {"hide": "place", "layers": later, "note": f"from layer {later.start} on"}
        try:
            return measure("effects", "hidden", self.reported, self.reported.reading_layers, **how)
        except UnsupportedError as error:
            warn(f"what it does to hide a place is not measured: {error}")
            return None

    @property
    def later(self) -> range:
        """The layers after the first that writes its spike."""
        return range(self.first_writer + 1, self.spike.survey.target.n_layers)


def measure(
    table: str,
    name: str,
    spike: Spike,
    heads: Sequence[int],
    sets: Sequence[Parts] = ((),),
    *,
    count: int | None = None,
    hide: int | Literal["place"] | None = None,
    since: int = 0,
    like: Row | None = None,
    norm: float | None = None,
    note: str = "",
    **how: Any,
) -> Row:
    """Measure a case: a row of numbers by text.

    Args:
        table: The table in which it stands.
        name: What is done.
        spike: The spike, in the texts that are read.
        heads: Layers whose attention is read. Empty: neither heads nor loss is read.
        sets: Parts that are removed; several sets are read in turn, each in texts of its own.
        count: Number of texts. None: all.
        hide: The position that later tokens do not see; "place" is that of the spike.
        since: The first position that is read.
        like: What the needed set does, which the sets may do as well: those that do are counted.
        norm: Mean norm of what the sets write, over that of the needed set. None: they are no neurons.
        note: What else there is to say.
        how: What else is done, as `Batch` has it: `everywhere`, `value`, `layers`.
    """
    chosen = spike.texts[:count]
    many = torch.arange(max(len(chosen), len(sets)))
    text_of = many % len(chosen)
    edit_of = many % len(sets)
    rows = chosen[text_of]
    batch = replace(batch_of(spike, sets, rows, edit_of), **how)
    if hide is not None:
        hidden = batch.places[:, 0] if hide == "place" else at_position(batch.ids, hide)
        batch = replace(batch, unseen=hidden[:, None].expand(-1, hidden.shape[1], -1))
    seen = read(batch, heads, loss=bool(heads), since=since)
    left = share_left(seen.along[:, 0], seen.intact[:, 0])
    rise = torch.full_like(left, torch.nan)
    numbers: dict[str, Mean | float | None] = {"left": mean_of(left, "share")}
    if heads:
        numbers["heads"] = count_above(seen.attention[:, [*heads]].permute(1, 2, 0), READS)
        if not since:
            numbers["intact"] = count_above(spike.attention[..., text_of], READS)
    if bool(seen.loss.isfinite().any()):
        place = batch.places[:, 0].int()
        counted = (place.cumsum(1) > place)[:, :-1]  # queries after the first position of the place
        change = (seen.loss - intact_losses(spike)[rows]).masked_fill(~counted, torch.nan)
        rise = change.nanmean(1)
        numbers |= {"loss": mean_of(rise), "tokens": int(change.isfinite().sum())}
    if like is not None:  # sets that raise the loss as much in the same texts, or leave as little of the spike
        what, sign, own = ("loss", 1, rise) if "loss" in like.numbers else ("left", -1, left)
        known = torch.tensor(like.numbers[what].by_text)[text_of]
        if len(sets) > 1:
            reached = 0
            for number in range(len(sets)):
                here = edit_of == number
                reached += bool(sign * own[here].mean() >= sign * known[here].mean())
            numbers |= {"sets": len(sets), "reached": reached}
        numbers["size"] = Mean(sum(map(len, sets)) / len(sets), kind="count")
        numbers["norm"] = None if norm is None else Mean(norm, kind="share")
    return row_of(table, name, note, **numbers)


# --- effects ---


@torch.no_grad()
def effects_of(circuit: SpikeCircuit, chosen: Survey, seed: int) -> list[Row]:
    """Measure what the needed set of a spike does, beside what others do that write as much, and each unit of it.

    Args:
        circuit: The spike, with what it needs.
        chosen: The survey that found it, which tells what neurons write.
        seed: Seed of random sets.

    Returns:
        Rows of the tables "effects", "controls" and "alone"; none if nothing is needed.
    """
    spike = circuit.reported
    needs = circuit.needs
    if not needs.needed:
        return []
    reading = spike.reading_layers
    layers = reading if spike.is_read else ()
    at_place = measure("effects", "at place", spike, layers, [needs.needed])
    if not needs.units:
        others = other_components(needs.order, needs.needed)
        note = "another component replaced"
        if not others:
            return [at_place, row_of("controls", "random", "there are no other components")]
        return [at_place, measure("controls", "random", spike, layers, others, like=at_place, note=note)]
    few: dict[str, Any] = {"everywhere": True, "count": FEW}
    rows = [at_place, measure("effects", "everywhere", spike, reading, [needs.needed], **few)]
    rows += [] if circuit.hidden is None else [circuit.hidden]
    equal, enough = equal_sets(chosen, needs.units, [*needs.neutral], seed)
    if not equal:
        rows.append(row_of("controls", "busiest", "no other neuron of these layers writes anything"))
    for name, own in {"busiest": slice(1), "random": slice(1, None)}.items():
        sets = dict([*equal.items()][own])
        if sets:
            few |= {"like": at_place, "norm": float(np.mean([*sets.values()])), "note": "" if enough else NO_EQUAL}
            rows.append(measure("controls", name, spike, layers, [*sets], **few))
    units = sorted(needs.units, key=[*needs.alone].index)[:UNITS]  # the strongest effect first
    for unit in units:
        row = at_place
        if len(needs.units) > 1:
            row = measure("alone", "", spike, layers, [unit], count=ALONE)
        for neuron in unit:
            rows.append(replace(row, table="alone", name=str(neuron)))
    return rows


# --- purpose ---


@torch.no_grad()
def purpose_of(circuits: Sequence[SpikeCircuit]) -> list[list[Row]]:
    """Ask what the attention to the first token is for, of each of its spikes.

    Args:
        circuits: The spikes, each with what it needs; layers after its first writer are changed.

    Returns:
        Rows of each; none of short texts, and of a model that is streamed.
    """
    spike = circuits[0].reported
    by_spike = list[list[Row]]()
    anywhere = list[Row]()
    survey = spike.survey
    target = spike.survey.target
    if survey.ids.shape[1] <= 2 * BEGIN or not target.resident:
        return [[] for _ in circuits]
    key = KEYS.start + int(survey.attention[target.attending].mean((0, 1, 2))[KEYS].argmax())
    second = replace(spike, place=replace(spike.place, mask=at_position(survey.ids, 1)))

    def asked(spike: Spike, name: str, table: str = "purpose", **how: Any) -> Row:
        row = measure(table, name, spike, target.attending, count=TEXTS, since=BEGIN, **how)
        return replace(row, numbers={name: row.numbers[name] for name in ("heads", "loss", "tokens")})

    for circuit in circuits:
        if not anywhere:  # the same for all spikes of the place
            intact = asked(spike, "intact")
            hidden = asked(spike, "hidden in all layers", hide="place")
            taker = asked(second, "", hide=0).numbers["heads"]  # the next position may take over
            intact = replace(intact, numbers={"heads": intact.numbers["heads"]})
            anywhere = [intact, replace(hidden, numbers=hidden.numbers | {"taker_heads": taker})]
        note = f"from layer {circuit.later.start} on"
        later = partial(asked, circuit.reported, layers=circuit.later)
        hidden = later("hidden", hide="place", note=note)
        if circuit.hidden is not None:  # one number: over all texts that report
            hidden = replace(
                hidden, numbers=hidden.numbers | {name: circuit.hidden.numbers[name] for name in ("loss", "tokens")}
            )
        values = [later("value zero", value="zero", note=note), later("mean value", value="mean", note=note)]
        control = later("most attended key hidden", PURPOSE_CONTROLS, hide=key, note=f"position {key}, {note}")
        by_spike.append([*anywhere, hidden, *values, control])
    return by_spike


# --- conditions ---


def rows_at(
    spikes: Sequence[Spike],
    ids: TokenRows,
    at: Int[Tensor, " row"],
    causes: Collection[str] = (),
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
    if "its token" in causes:
        token = ids[:, 0]
    if "alone" in causes:
        sees = torch.zeros_like(place)
    if token is not None:
        ids = torch.where(place, token[:, None], ids)
    if sees is not None:
        unseen = place[..., None] & ~sees[:, None]
    if "id 0" in causes:
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
def conditions_of(spikes: Sequence[Spike], seed: int) -> list[list[Row]]:
    """Ask what makes a position the place of spikes of the first token, of each; empty if the texts are too short.

    Args:
        spikes: The spikes, in texts that did not find them.
        seed: Seed of the ordinary positions, tokens and others.
    """
    survey = spikes[0].survey
    by_spike = [list[Row]() for _ in spikes]
    if survey.ids.shape[1] <= LAST:
        return by_spike
    target = survey.target
    ids = survey.ids[:TEXTS]
    generator = draws(seed, "other tokens of conditions")
    at = torch.randint(FIRST, ids.shape[1], (len(ids),), generator=generator)
    token = ids.roll(1, 0)[torch.arange(len(ids)), at]
    first = torch.zeros(len(ids), dtype=torch.long)
    takes = takes_positions(target)
    cases: dict[str, Batch] = {}
    for has in product((False, True), repeat=3):
        causes = [cause for cause, there in zip(CAUSES, has, strict=True) if there]
        if takes or not has[2]:
            cases[", ".join(causes) or AS_IT_IS] = rows_at(spikes, ids, ordinary_positions(ids, seed), causes)
    cases[TAKEN["its token"]] = rows_at(spikes, ids, first, token=token)
    cases[TAKEN["alone"]] = place_sees(spikes, ids, BEFORE)
    if takes and ids.shape[1] + SHIFT <= (target.max_positions or inf):
        later = torch.arange(ids.shape[1]).expand_as(ids) + SHIFT
        cases[TAKEN["id 0"]] = replace(rows_at(spikes, ids, first), positions=later)
    cases[ONE_OTHER] = one_other_drawn(spikes, survey.ids, seed)
    for name, batch in cases.items():
        layers = target.attending
        texts = len(ids)
        if name == ONE_OTHER:
            layers = []
            texts = len(survey.ids)
            batch = batch.until_place()
        seen = read(batch, layers)
        for number, (spike, rows) in enumerate(zip(spikes, by_spike, strict=True)):
            left = mean_of(seen.along[:, number].reshape(-1, texts).mean(0), "share")
            received = seen.attention[:, [*spike.reading_layers]].permute(1, 2, 0)
            rows.append(row_of("conditions", name, left=left, heads=count_above(received, READS) if layers else None))
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
