"""What became of the spikes of a model in another one, such as its fine-tune: kept, weaker, moved or gone.

1. A spike is the same if it stands at the same place and shares layers.
2. What its needed neurons do is compared of one set: that of the first model, which is removed in the other one, too.
3. It is kept if at least half as many heads attend to its place, and hiding the place costs at least half as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from sinkscope.measure import Setup
from sinkscope.results.mean import Mean
from sinkscope.results.table import Row, column, detail, optional, whole
from sinkscope.sinks.spikes.cases import case_of, effect_of
from sinkscope.sinks.spikes.find import sinks_of
from sinkscope.sinks.spikes.record import SpikeResult
from sinkscope.sinks.spikes.result import FindSinks
from sinkscope.sinks.spikes.spike import Parts
from sinkscope.sinks.spikes.tables import Attended, AttendedKind, Done, Edit, Effect, SpikeKey, parts_names
from sinkscope.sinks.thresholds import HALF


class Fate(StrEnum):
    """What became of a spike."""

    KEPT = "kept"
    WEAKER = "weaker"
    MOVED = "moved"
    GONE = "gone"


@dataclass(frozen=True, kw_only=True)
class Kept(
    Row,
    table="kept",
    title="norm spike",
    note="Kept: at least half as many heads attend to its place, and hiding the place from later tokens costs at least "
    "half as much; else weaker. Moved: a spike along the same dimensions is elsewhere, or in other layers. "
    "Norm: times the median of later tokens.",
):
    """A spike of the first model, and what became of it.

    Attributes:
        now: The spike that it is in the other model. None: it is gone.
        needed: Its needed parts in the first model, and in the other one.
    """

    key: SpikeKey
    now: SpikeKey | None = None
    needed: tuple[str, str] = ("", "")

    fate: Fate = column("verdict", "word", "What became of it: kept, weaker, moved or gone.")
    heads_before: Mean = column("heads\nbefore", "count", "Heads in its layers that attend to the place.")
    heads_after: Mean = column("heads\nafter", "count", "The same in the other model.")
    ratio_before: Mean = column("norm,\nbefore", "times", "L2 norm over the median of later tokens.")
    ratio_after: Mean | None = optional("norm,\nafter", "times", "The same in the other model.")
    hidden_before: Mean | None = detail("hiding it\nadds, before", "rise", "Loss added by hiding the place.")
    hidden_after: Mean | None = detail("hiding it\nadds, after", "rise", "The same in the other model.")

    @property
    def label(self) -> str:
        """What it is called."""
        return str(self.key)

    @property
    def sentence(self) -> str:
        """What became of it, with its heads, its norm, and what hiding it costs."""
        begin = f"the norm spike at {self.key} is {self.fate}"
        if self.now is not None and self.fate is Fate.MOVED:
            begin += f" to {self.now}"
        words = [
            f"{self.text('heads_before')} heads attend to it in the first and {self.text('heads_after')} in the other"
        ]
        if self.ratio_after is not None:
            ratios = f"{self.text('ratio_before')} and {self.text('ratio_after')} times that of other tokens"
            words.append(f"its norm is {ratios}")
        if self.hidden_before is not None and self.hidden_after is not None:
            costs = [self.text(name).removeprefix("+") for name in ("hidden_before", "hidden_after")]
            words.append(f"hiding it from later tokens adds {costs[0]} and {costs[1]} nats a token")
        return f"{begin}: {', '.join(words)}"


def fates_of(before: FindSinks, after: FindSinks) -> list[Kept]:
    """Return what became of each spike of the first model; those that repeat others at another place are left out."""
    rows: list[Kept] = []
    for spike in before.spikes:
        if spike.like is None:
            rows.append(fate_of(spike, after))
    return rows


def fate_of(spike: SpikeResult, after: FindSinks) -> Kept:
    """Return what became of a spike in another model."""
    row = Kept(
        key=spike.key,
        fate=Fate.GONE,
        heads_before=spike.size.heads,
        heads_after=heads_at(spike, after),
        ratio_before=spike.size.ratio,
        hidden_before=hidden_loss(spike),
    )
    partner = partner_of(spike, after.spikes)
    fate = Fate.MOVED
    if partner is not None:
        fate = Fate.KEPT
        if falls_to_half(spike.size.heads, partner.size.heads):
            fate = Fate.WEAKER
        if falls_to_half(hidden_loss(spike), hidden_loss(partner)):
            fate = Fate.WEAKER
    else:
        partner = elsewhere(spike, after.spikes)
    if partner is None:
        return row
    return replace(
        row,
        fate=fate,
        now=partner.key,
        needed=(parts_names(spike.needed), parts_names(partner.needed)),
        heads_after=partner.size.heads,
        ratio_after=partner.size.ratio,
        hidden_after=hidden_loss(partner),
    )


def partner_of(spike: SpikeResult, others: Sequence[SpikeResult]) -> SpikeResult | None:
    """Return the spike at the same place that shares most layers; None: no other shares any."""
    best = max(others, key=lambda other: spike.key.shared(other.key), default=None)
    return best if best is not None and spike.key.shared(best.key) else None


def elsewhere(spike: SpikeResult, others: Sequence[SpikeResult]) -> SpikeResult | None:
    """Return a spike along the same dimensions at another place or in other layers; None: there is none."""
    return next((other for other in others if {*spike.dims} & {*other.dims}), None)


def heads_at(spike: SpikeResult, after: FindSinks) -> Mean:
    """Return the heads that attend to the place of a spike where there is no spike; none if nothing was read there."""
    for kind in (AttendedKind.PLACE, AttendedKind.PLACE_WITHOUT_SPIKE):
        for row in after.attention:
            if row.key == Attended(kind, spike.place.key) and row.heads is not None:
                return row.heads
    return whole(0)


def hidden_loss(spike: SpikeResult) -> Mean | None:
    """Return what hiding the place costs; None: it was not measured."""
    return next((row.loss for row in spike.effects if row.key.done is Done.HIDDEN), None)


def falls_to_half(before: Mean | None, after: Mean | None) -> bool:
    """Return whether a number falls to less than half, and by more than both margins."""
    if before is None or after is None:
        return False
    margin = max(before.margin or 0.0, after.margin or 0.0)
    return after.value < HALF * before.value and before.value - after.value > margin


# --- one set in both models ---


def with_one_set(before: FindSinks, after: FindSinks, setup: Setup | None) -> tuple[FindSinks, FindSinks]:
    """Return two results whose effects are those of one set, where they were measured with two.

    Args:
        before: The first model's result.
        after: The other one's.
        setup: The other model, if it is open: what the first model's set does is then measured in it. None: effects of
            the needed parts are left out.
    """
    first_spikes = list(before.spikes)
    spikes: list[SpikeResult] = []
    for spike in after.spikes:
        first = partner_of(spike, before.spikes)
        if first is None or first.needed == spike.needed or not (first.effects and spike.effects):
            spikes.append(spike)
            continue
        parts = None
        if setup is not None and first.effect is not None:
            parts = first.needed
            spike = replace(spike, effects=(*spike.effects, effect_of_set(setup, spike, first)))
        first_spikes[before.spikes.index(first)] = without_sets(first, parts)
        spikes.append(without_sets(spike, parts))
    return replace(before, spikes=tuple(first_spikes)), replace(after, spikes=tuple(spikes))


def without_sets(spike: SpikeResult, parts: Parts | None) -> SpikeResult:
    """Return a spike with the effects of one set alone, beside what is done to no set; its controls have no numbers.

    Args:
        spike: The spike.
        parts: The set. None: no set.
    """
    kept: list[Effect] = []
    for row in spike.effects:
        if row.is_control:
            kept.append(Effect(key=row.key))
        elif row.key.done in (Done.INTACT, Done.HIDDEN):
            kept.append(row)
        elif row.key == Edit(Done.NEEDED) and parts is not None and row.parts == parts:
            kept.append(row)
    return replace(spike, effects=tuple(kept))


def effect_of_set(setup: Setup, spike: SpikeResult, first: SpikeResult) -> Effect:
    """Measure what removing the first model's needed parts at the place does in an open model."""
    circuit = next(
        circuit
        for circuit in sinks_of(setup).spikes
        if (circuit.reported.place.label.key, circuit.reported.layers) == (spike.place.key, spike.layers)
    )
    found = circuit.reported
    layers = found.reading_layers if found.is_read else ()
    reading = case_of(found, [first.needed]).read(layers)
    return effect_of(Edit(Done.NEEDED), reading, parts=first.needed)
