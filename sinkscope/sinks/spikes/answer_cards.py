"""The answers of `why_sink`: what makes a position the place, why heads read it, and what attention to it is for."""

from __future__ import annotations

from collections.abc import Sequence

from sinkscope.results.cards import Card
from sinkscope.results.notation import percent, word_list
from sinkscope.sinks.spikes.answer_records import Cause, Cell, ConstantName, Taken
from sinkscope.sinks.spikes.cards import head_count, nats, percent_left, run
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


def cause_sentence(spike: SpikeResult) -> str | None:
    """Return what makes a position such a place; None if it was not asked."""
    conditions = spike.conditions
    if conditions is None:
        return None
    if not conditions.sufficient:
        most = max(cell.share for cell in conditions.cells if cell.token + cell.alone + cell.start < 3)
        return MAKES_NOTHING.format(share=percent(most))
    words = [CAUSES[cause].format(token=repr(spike.place.token)) for cause in conditions.sufficient]
    alone = [cell for cell in conditions.cells if cell.token + cell.alone + cell.start == 1]
    several = [cell for cell in alone if cell.share - (cell.margin or 0.0) >= HALF]
    strongest = (
        max(several, key=lambda cell: cell.share) if several else max(conditions.cells, key=lambda cell: cell.share)
    )
    control = f"an ordinary position: {percent(conditions.cells[0].share)}"
    if "sight" in conditions.sufficient:
        other = "" if conditions.one_other_margin is None else f" ± {percent(conditions.one_other_margin)}"
        control = f"with one other token visible: {percent(conditions.one_other)}{other}"
    margin = "" if strongest.margin is None else f" (± {percent(strongest.margin)})"
    joined = " or ".join(words) if several else word_list(words)
    return MAKES.format(causes=joined, share=percent(strongest.share), margin=margin, control=control)


def purpose_sentence(spike: SpikeResult) -> str | None:
    """Return what hiding a place costs; None if it was not asked."""
    purpose = spike.purpose
    if purpose is None:
        return None
    hidden = purpose.change("hidden")
    control = max(change.loss for change in purpose.changes if "key" in change.name)
    margin = "" if hidden.margin is None else f" (± {hidden.margin:.2f})"
    where = f"after layer {purpose.layers[0] - 1}"
    return COSTS.format(
        place=spike.place.words, where=where, loss=nats(hidden.loss), margin=margin, control=nats(control)
    )


def conditions_card(spike: SpikeResult) -> Card | None:
    """Return what an ordinary position is like under each combination, and the place with each cause taken away."""
    conditions = spike.conditions
    if conditions is None:
        return None
    rows: list[tuple[str, str]] = []
    for cell in conditions.cells:
        words = [SHORT[cause] for cause in cell.causes]
        rows.append((", ".join(words) or "as it is", _cell(cell)))
    for taken in conditions.taken:
        rows.append((f"place, {TAKEN[taken.cause]}", _cell(taken)))
    rows.append(("random token, alone", percent(conditions.random_token)))
    rows.append(("sees 1 other, drawn", percent_left(conditions.one_other, conditions.one_other_margin)))
    rows.append(("sees nearest", ", ".join(f"{count}: {percent(share)}" for count, share in conditions.borne)))
    if conditions.held:
        rows.append(("place sees more", ", ".join(f"{count}: {percent(share)}" for count, share, _ in conditions.held)))
    if conditions.layers is not None:
        rows.append(("alone suffices in", run(0, conditions.layers)))
    rows.append(("sufficient", _causes(conditions.sufficient, spike)))
    rows.append(("necessary", _causes(conditions.necessary, spike)))
    return Card(
        f"What makes a position the sink, spike of {run(*spike.layers)} ({conditions.texts} texts)", tuple(rows)
    )


def _cell(cell: Cell | Taken) -> str:
    return f"{percent_left(cell.share, cell.margin)} of the spike, {head_count(cell.heads, None)}"


def _causes(causes: Sequence[Cause], spike: SpikeResult) -> str:
    return "; ".join(CAUSES[cause].format(token=repr(spike.place.token)) for cause in causes) or "none of these"


def purpose_card(spike: SpikeResult) -> Card | None:
    """Return what later tokens lose in each way of reading the place, who takes over, and how far a change spreads."""
    purpose = spike.purpose
    if purpose is None:
        return None
    spread = percent_left(purpose.spread, purpose.spread_margin)
    rows = [("intact", f"{head_count(purpose.heads, None)} at the place; a changed token spreads {spread}")]
    for change in purpose.changes:
        text = f"{nats(change.loss)} nats"
        if change.interval is not None:
            text += f" ({nats(change.interval[0])} to {nats(change.interval[1])})"
        text += f", {head_count(change.heads, None)} at the place"
        if change.taker_heads:
            text += f", {change.taker_heads:,} at position {change.taker}"
        if change.spread is not None:
            text += f"; spreads {percent_left(change.spread, change.spread_margin)}"
        rows.append((change.name, text))
    layers = f"{run(*purpose.layers)}, {purpose.texts} texts, {purpose.tokens:,} tokens"
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
    constancy = spike.constancy
    if constancy is None:
        return None
    rows: list[tuple[str, str]] = []
    for constant in constancy.numbers:
        numbers = {
            "before": constant.before,
            "after": constant.after,
            "ordinary_before": constant.ordinary_before,
            "ordinary_after": constant.ordinary_after,
        }
        shown = {"state": "{:.3f}", "value": "{:.2f}", "score": "{:.0%}"}[constant.name]
        formatted = {name: shown.format(number) for name, number in numbers.items()}
        if constant.name == "score":
            formatted["after"] = percent_left(constant.after, constant.margin)
        rows.append((constant.name, NUMBERS[constant.name].format(**formatted)))
    where = f"{head_count(constancy.heads, None)} from layer {constancy.after} on, beside layer {constancy.before}"
    return Card(f"Why heads read {spike.place.words}, spike of {run(*spike.layers)} ({where})", tuple(rows))
