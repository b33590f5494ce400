"""The answers of `circuit`: what makes a position the place, why heads read it, and what attention to it is for."""

from __future__ import annotations

from collections.abc import Sequence

from sinkscope.results.cards import Card
from sinkscope.results.notation import percent, word_list
from sinkscope.sinks.spikes.answer_records import Cause, Cell, ConstantName, Taken
from sinkscope.sinks.spikes.cards import heads_of, nats, run, share_left
from sinkscope.sinks.spikes.records import SpikeResult
from sinkscope.sinks.thresholds import HALF

CAUSES = {"token": "carries {token}", "sight": "sees only itself", "position": "has position id 0"}
SHORT = {"token": "its token", "sight": "alone", "position": "id 0"}
TAKEN = {"token": "another token", "sight": "sees 4 more", "position": "32 later"}
MAKES = "A position that {causes} becomes the sink: {share} of the spike{margin} ({control})."
MAKES_NOTHING = (
    "Neither its token, nor seeing only itself, nor position id 0 makes a position the sink: at most {share}."
)
COSTS = "Hiding {place} from later tokens {where} costs {loss} nats a token{margin} (another token: {control})."


def makes(spike: SpikeResult) -> str | None:
    """Return what makes a position such a place; None if it was not asked."""
    found = spike.conditions
    if found is None:
        return None
    if not found.sufficient:
        most = max(one.share for one in found.cells if one.token + one.alone + one.start < 3)
        return MAKES_NOTHING.format(share=percent(most))
    words = [CAUSES[cause].format(token=repr(spike.place.token)) for cause in found.sufficient]
    alone = [one for one in found.cells if one.token + one.alone + one.start == 1]
    several = [one for one in alone if one.share - (one.margin or 0.0) >= HALF]
    cell = max(several, key=lambda one: one.share) if several else max(found.cells, key=lambda one: one.share)
    control = f"an ordinary position: {percent(found.cells[0].share)}"
    if "sight" in found.sufficient:
        other = "" if found.one_other_margin is None else f" ± {percent(found.one_other_margin)}"
        control = f"with one other token visible: {percent(found.one_other)}{other}"
    margin = "" if cell.margin is None else f" (± {percent(cell.margin)})"
    joined = " or ".join(words) if several else word_list(words)
    return MAKES.format(causes=joined, share=percent(cell.share), margin=margin, control=control)


def costs(spike: SpikeResult) -> str | None:
    """Return what hiding a place costs; None if it was not asked."""
    found = spike.purpose
    if found is None:
        return None
    hidden = found.change("hidden")
    control = max(one.loss for one in found.changes if "key" in one.name)
    margin = "" if hidden.margin is None else f" (± {hidden.margin:.2f})"
    where = f"after layer {found.layers[0] - 1}"
    return COSTS.format(
        place=spike.place.words, where=where, loss=nats(hidden.loss), margin=margin, control=nats(control)
    )


def conditions_card(spike: SpikeResult) -> Card | None:
    """Return what an ordinary position is like under each combination, and the place with each cause taken away."""
    found = spike.conditions
    if found is None:
        return None
    rows: list[tuple[str, str]] = []
    for cell in found.cells:
        words = [SHORT[cause] for cause in cell.causes]
        rows.append((", ".join(words) or "as it is", _cell(cell)))
    for taken in found.taken:
        rows.append((f"place, {TAKEN[taken.cause]}", _cell(taken)))
    rows.append(("random token, alone", percent(found.random_token)))
    rows.append(("sees 1 other, drawn", share_left(found.one_other, found.one_other_margin)))
    rows.append(("sees nearest", ", ".join(f"{count}: {percent(share)}" for count, share in found.borne)))
    if found.held:
        rows.append(("place sees more", ", ".join(f"{count}: {percent(share)}" for count, share, _ in found.held)))
    if found.layers is not None:
        rows.append(("alone suffices in", run(0, found.layers)))
    rows.append(("sufficient", _causes(found.sufficient, spike)))
    rows.append(("necessary", _causes(found.necessary, spike)))
    return Card(f"What makes a position the sink, spike of {run(*spike.layers)} ({found.texts} texts)", tuple(rows))


def _cell(cell: Cell | Taken) -> str:
    return f"{share_left(cell.share, cell.margin)} of the spike, {heads_of(cell.heads, None)}"


def _causes(causes: Sequence[Cause], spike: SpikeResult) -> str:
    return "; ".join(CAUSES[cause].format(token=repr(spike.place.token)) for cause in causes) or "none of these"


def purpose_card(spike: SpikeResult) -> Card | None:
    """Return what later tokens lose in each way of reading the place, who takes over, and how far a change spreads."""
    found = spike.purpose
    if found is None:
        return None
    spread = share_left(found.spread, found.spread_margin)
    rows = [("intact", f"{heads_of(found.heads, None)} at the place; a changed token spreads {spread}")]
    for one in found.changes:
        said = f"{nats(one.loss)} nats"
        if one.interval is not None:
            said += f" ({nats(one.interval[0])} to {nats(one.interval[1])})"
        said += f", {heads_of(one.heads, None)} at the place"
        if one.taker_heads:
            said += f", {one.taker_heads:,} at position {one.taker}"
        if one.spread is not None:
            said += f"; spreads {share_left(one.spread, one.spread_margin)}"
        rows.append((one.name, said))
    layers = f"{run(*found.layers)}, {found.texts} texts, {found.tokens:,} tokens"
    return Card(f"What attention to {spike.place.words} is for ({layers})", tuple(rows))


NUMBERS: dict[ConstantName, str] = {
    "state": "cosine between texts {before} -> {after}; an ordinary position {ordinary_before} -> {ordinary_after}",
    "value": "norm over the typical one {before} -> {after}; an ordinary one {ordinary_before} -> {ordinary_after}",
    "score": "{before} -> {after} of its lead over other keys is there for every query; an ordinary key "
    "{ordinary_before} -> {ordinary_after}",
}
"""What a card says of each number."""


def constancy_card(spike: SpikeResult) -> Card | None:
    """Return why heads read a place: how constant its state, its value and its score become."""
    found = spike.constancy
    if found is None:
        return None
    rows: list[tuple[str, str]] = []
    for one in found.numbers:
        numbers = {
            "before": one.before,
            "after": one.after,
            "ordinary_before": one.ordinary_before,
            "ordinary_after": one.ordinary_after,
        }
        shown = {"state": "{:.3f}", "value": "{:.2f}", "score": "{:.0%}"}[one.name]
        said = {name: shown.format(number) for name, number in numbers.items()}
        if one.name == "score":
            said["after"] = share_left(one.after, one.margin)
        rows.append((one.name, NUMBERS[one.name].format(**said)))
    where = f"{heads_of(found.heads, None)} from layer {found.after} on, beside layer {found.before}"
    return Card(f"Why heads read {spike.place.words}, spike of {run(*spike.layers)} ({where})", tuple(rows))
