"""What `find_sinks` and `why_sink` say: labels with measured numbers; a field that does not hold is left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sinkscope.results.cards import Card
from sinkscope.results.notation import count_of, percent, word_form, word_list
from sinkscope.sinks.spikes.records import (
    Attended,
    Candidate,
    MarkLeft,
    OtherBos,
    Outcome,
    Readers,
    SpikeResult,
)
from sinkscope.sinks.thresholds import COUNTS, STANDS_OUT

READERS = "{heads} of {total} heads give {place} more than 0.3 of their attention{margin}."
SUFFICE = (
    "{parts} {suffice} for the spike at {place}: zeroed there, {they} {cost} {loss} nats a token{margin}, {control}."
)
LEAVE = "{parts} {suffice} for the spike at {place}: zeroed there, {they} {leave} {left} of it, {control}."
REPLACED = "Replacing {parts} at {place} {costs} {loss} nats a token{margin} and leaves {left} of its spike, {control}."
MARKS = "{parts} {mark} {place}: without {them}, {left} of the spike remains{others}{heads}."
NO_MARKS = "No component, alone or in pairs, marks {place}: more than three quarters of the spike remain."
ITSELF = "The embedding has the spike at {place} itself, so nothing marks it."
NO_SPIKE = "No norm spike was found: the largest is {ratio} times the typical one, at {token} after layer {layer}."
LEARNED = "{heads} of {total} heads give their learned sink logit, which is no token, more than 0.3 of their attention."
NO_LOSS = "The loss is not measured of a model that is read layer by layer; find_sinks(ss.load(NAME)) has it."
LEGEND = (
    "±: half of the 95% interval over texts, which did not choose the neurons. needed: the fewest that leave less than "
    "a quarter of the spike. at place: they are zeroed at the place alone. hidden: later tokens do not see "
    "the place. busiest, random: other neurons of the same layers that write as much, zeroed everywhere."
)
"""What explains the labels, below the last card."""

SHOWN = 3  # neurons or components that a row names
ALIKE = 0.01  # neurons of a layer whose shares differ by less than this share are named together
PLACES = 2  # places that a row names
GAP = "   "  # between the items of a row


def readers_sentence(readers: Readers) -> str:
    """Return how many heads attend to a place."""
    margin = "" if readers.margin is None or readers.margin < 0.5 else f" (± {readers.margin:,.0f})"
    return READERS.format(heads=f"{readers.heads:,}", total=f"{readers.total:,}", place=readers.place, margin=margin)


def needed_sentence(spike: SpikeResult) -> str | None:
    """Return what the needed set of a spike costs at the place, beside the strongest control; None: not read."""
    if spike.needed is None or spike.effect is None or spike.controls is None:
        return None
    outcome, single = spike.effect.at_place, len(spike.needed.parts) == 1
    names = word_list([with_article(part) for part in spike.needed.parts], 2 if len(spike.needed.parts) == 2 else 1)
    words = {
        "parts": names[:1].upper() + names[1:] if spike.needed.neurons else names,
        "suffice": "suffices" if single else "suffice",
        "they": "it" if single else "they",
        "cost": "costs" if single else "cost",
        "leave": "leaves" if single else "leave",
        "costs": "costs",
        "place": spike.place.words,
        "loss": nats(outcome.loss),
        "margin": "" if outcome.margin is None else f" (± {outcome.margin:.2f})",
        "left": percent_left(outcome.left, outcome.left_margin),
        "control": strongest_control(spike, outcome),
    }
    if not spike.needed.neurons:
        return (REPLACED if outcome.loss is not None else LEAVE).format(**words)
    return (SUFFICE if outcome.loss is not None else LEAVE).format(**words)


def strongest_control(spike: SpikeResult, outcome: Outcome) -> str:
    """Return what the strongest control does; the words say so if it does as much as the needed set."""
    strongest = None if spike.controls is None else spike.controls.strongest
    if strongest is None:
        return "without a control"
    name, control = strongest
    what = {"busiest": "the busiest others", "random": "random others"}[name]
    if spike.needed is not None and not spike.needed.neurons:
        what = "other components"
    if outcome.loss is not None and control.loss is not None:
        if control.loss >= outcome.loss - (outcome.margin or 0.0):
            return f"no more than {what} ({nats(control.loss)})"
        return f"{what} {nats(control.loss)}"
    if control.left <= outcome.left + (outcome.left_margin or 0.0):
        return f"no less than {what} ({percent(control.left)})"
    return f"{what} {percent(control.left)}"


def spike_card(spike: SpikeResult, others: Sequence[SpikeResult] = ()) -> Card:
    """Return the card of a spike.

    Args:
        spike: The spike.
        others: The same spike at other places.
    """
    ordered = sorted(others, key=lambda other: -other.heads)
    elsewhere = [f"{other.place.words} ({head_count(other.heads, None)})" for other in ordered[:PLACES]]
    if len(ordered) > PLACES:
        elsewhere.append(count_of(len(ordered) - PLACES, "further place"))
    rows = {
        "norm": _norm(spike),
        "needed": _needed(spike),
        "writers": _writers(spike),
        "not writers": _apart(spike),
        **_effects(spike),
        "alone": _alone(spike),
        "marks": _marks(spike.marks),
        "erasers": GAP.join(f"{component(eraser.part)} {percent(-eraser.share)}" for eraser in spike.erasers[:SHOWN]),
        "also at": GAP.join(elsewhere),
        "texts": "" if spike.held_out else "the half that chose: the other half does not have this place",
    }
    title = f"Spike at {spike.place.words}, {run(*spike.layers)}"
    return Card(title, tuple((label, text) for label, text in rows.items() if text))


def attention_card(
    readers: Readers, attended: Iterable[Attended], learned: int, other: OtherBos | None, total: int
) -> Card | None:
    """Return how many heads attend to the place of the first spike, by kind of text, and what else heads attend to.

    Args:
        readers: Heads that attend to that place.
        attended: Places without a spike.
        learned: Heads that attend to their learned sink logit.
        other: The other choice of BOS.
        total: Number of heads.
    """
    rows: list[tuple[str, str]] = []
    if readers.heads:
        kinds = [f"{of_kind.kind} {with_margin_of(of_kind.heads, of_kind.margin)}" for of_kind in readers.kinds]
        by_kind = f"; {', '.join(kinds)}" if kinds else ""
        rows.append((readers.place, f"{head_count(readers.heads, readers.margin)} of {total:,}{by_kind}"))
    if other is not None:
        spikes = "no spike"
        for spike in other.spikes[:1]:
            more = f" and {len(other.spikes) - 1} more" if len(other.spikes) > 1 else ""
            spikes = f"spike at {spike.place.words}, {run(*spike.layers)}{more}"
        label = f"{'with' if other.bos else 'without'} {other.token}"
        rows.append((label, f"{head_count(other.heads, other.margin)} at the first token; {spikes}"))
    for sink in attended:
        rows.append((sink.place.words, f"{head_count(sink.heads, None)}, no spike"))
    if learned:
        rows.append(("learned sink logits", f"{head_count(learned, None)} of {total:,}"))
    return Card("Attention", tuple(rows)) if rows else None


# --- rows ---


def _norm(spike: SpikeResult) -> str:
    """The norm before the run and after the peak, and how far it is above the typical one."""
    ratio, where = spike.ratio, f"after layer {spike.ratio_layer}"
    if ratio < STANDS_OUT:
        ratio, where = spike.ratio_beside, "beside what is large at all positions"
    digits = 0 if ratio >= 10 else 1
    norm = f"{spike.before:,.0f} -> {spike.norm:,.0f}, {ratio:,.{digits}f} times the typical one {where}"
    if spike.dims:
        norm += f"; along {word_form(len(spike.dims), 'dimension', 'dimensions')} {word_list(spike.dims)}"
    return norm


def _writers(spike: SpikeResult) -> str:
    """The neurons whose removal lowers the spike, the needed set first; then what the rest of each component writes."""
    items, left = list[str](), spike.has_role("lowers", "backup")
    for group in alike(spike.has_role("needed"))[:SHOWN]:
        items.append(f"{_names(group)} {percent(group[0].share)}{' each' if len(group) > 1 else ''}")
    if left:
        items.append(
            f"{count_of(len(left), 'other')} that {word_form(len(left), 'lowers', 'lower')} it {percent(_sum(left))}"
        )
    of_layer: dict[str, float] = {}
    for neuron in spike.neurons:
        name = f"mlp {neuron.layer}"
        of_layer[name] = of_layer.get(name, 0.0) + neuron.share
    for writer in spike.writers:
        many = writer.share - of_layer.get(writer.part, 0.0)
        if abs(many) >= COUNTS:
            some = f"many of {component(writer.part)}" if writer.part.startswith("mlp") else component(writer.part)
            items.append(f"{some} {percent(many)}")
    return GAP.join(items)


APART = {"raises": "raises it", "another spike": "lowers another spike more", "nothing": "changes nothing"}


def _apart(spike: SpikeResult) -> str:
    """Neurons that write along the direction, and whose removal does not lower the spike."""
    items: list[str] = []
    for role, words in APART.items():
        for group in alike(neuron for neuron in spike.neurons if neuron.role == role)[:SHOWN]:
            items.append(f"{_names(group)} {percent(_sum(group))}, {words} ({percent(group[0].left)} left)")
    return GAP.join(items[:SHOWN])


def _names(group: Sequence[Candidate]) -> str:
    names = [str(neuron.address) for neuron in group]
    names[1:] = [name.removeprefix(f"L{group[0].layer}.") for name in names[1:]]
    return word_list(names, SHOWN)


def alike(neurons: Iterable[Candidate]) -> list[list[Candidate]]:
    """Group neurons of one layer whose shares are equal within a hundredth; those that write most come first."""
    groups: list[list[Candidate]] = []
    for neuron in sorted(neurons, key=lambda neuron: (neuron.layer, -neuron.share)):
        last = groups[-1][-1] if groups else None
        if last is None or last.layer != neuron.layer or abs(last.share - neuron.share) > ALIKE * abs(neuron.share):
            groups.append([])
        groups[-1].append(neuron)
    return sorted(groups, key=lambda group: -_sum(group))


def _sum(neurons: Iterable[Candidate]) -> float:
    return sum(neuron.share for neuron in neurons)


def _needed(spike: SpikeResult) -> str:
    """The smallest set found, with what is left without it at the place."""
    needed = spike.needed
    if needed is None:
        return "no neurons or pair of components that was tried"
    names = word_list([component(part) for part in needed.parts], SHOWN)
    return f"{names}; {percent_left(needed.left, needed.left_margin)} left without {_them(needed.parts)} at the place"


def _them(parts: Sequence[str]) -> str:
    return {1: "it", 2: "both"}.get(len(parts), f"these {len(parts)}")


def _effects(spike: SpikeResult) -> dict[str, str]:
    """What the needed set does at the place and elsewhere, what hiding the place does, and what the controls do."""
    effect, controls, rows = spike.effect, spike.controls, dict[str, str]()
    if effect is None or controls is None:
        return rows
    rows["at place"] = _outcome(effect.at_place)
    gone = [other for other in effect.at_place.others if abs(1 - other.left) >= COUNTS]
    if gone:
        rows["with it"] = GAP.join(f"spike {other.spike + 1}: {percent(other.left)} left" for other in gone[:SHOWN])
    if effect.everywhere is not None and effect.everywhere.loss is not None and effect.at_place.loss is not None:
        rows["everywhere"] = _outcome(effect.everywhere)
        if effect.elsewhere is not None:
            rows["everywhere"] += f"; {percent(effect.elsewhere)} of the loss is elsewhere"
    if effect.hidden is not None and effect.both is not None and effect.hidden.loss is not None:
        rows["hidden"] = (
            f"{nats(effect.hidden.loss)} nats{_margin(effect.hidden)}; zeroed as well {nats(effect.both.loss)}"
        )
    for name, control in (("busiest", controls.busiest), ("random", controls.random)):
        if control is not None:
            what = f"{control.count:,.0f} {word_form(round(control.count), 'neuron', 'neurons')}"
            if control.norm is not None:
                what += f", {percent(control.norm)} of the written norm"
            else:
                what = "one component"
            reached = f"; {control.reached} of {control.sets} sets reach the effect" if control.sets > 1 else ""
            rows[name] = f"{_outcome(control)} ({what}{reached})"
    return rows


def _outcome(outcome: Outcome) -> str:
    """What is left of the spike and of the heads, and how the loss rises."""
    parts = [f"{percent_left(outcome.left, outcome.left_margin)} of the spike"]
    if any(outcome.heads):
        (before, after), (margin, margin_after) = outcome.heads, outcome.heads_margin
        parts.append(f"{with_margin_of(after, margin_after)} of {head_count(before, margin)}")
    if outcome.loss is not None:
        parts.append(f"{nats(outcome.loss)} nats{_margin(outcome)} over {outcome.tokens:,} tokens")
    return ", ".join(parts)


def _margin(outcome: Outcome) -> str:
    return "" if outcome.interval is None else f" ({nats(outcome.interval[0])} to {nats(outcome.interval[1])})"


def nats(loss: float | None) -> str:
    """Return a rise of the loss; what rounds to zero has no sign."""
    return f"{loss or 0.0:.2f}".replace("-0.00", "0.00")


def _alone(spike: SpikeResult) -> str:
    """What single needed neurons do: the strongest effect first."""
    if spike.needed is None or len(spike.needed.neurons) < 2:  # what is left without the set says it
        return ""
    items: list[str] = []
    for neuron in spike.alone[:SHOWN]:
        heads = f", {head_count(neuron.heads, None)}" if spike.heads else ""
        loss = "" if neuron.loss is None else f", {nats(neuron.loss)} nats"
        items.append(f"without {neuron.address} {percent_left(neuron.left, None)}{heads}{loss}")
    return GAP.join(items)


def _marks(marks: Sequence[MarkLeft]) -> str:
    items: list[str] = []
    for mark in marks[:SHOWN]:
        names = word_list([component(name) for name in mark.names], SHOWN)
        left = f"without {names} {percent_left(mark.left, mark.margin)}"
        if any(mark.heads):
            left += f", {head_count(mark.heads[1], None)}"
        items.append(left)
    return GAP.join(items)


# --- the conclusion of a circuit ---


def marks_sentence(spike: SpikeResult) -> str:
    """Return what marks the place of a spike, and how many heads attend there before and after its removal."""
    place = spike.place.words
    if spike.needed is not None and "embedding" in spike.needed.parts:
        return ITSELF.format(place=place)
    if not spike.marks:
        return NO_MARKS.format(place=place)
    mark, heads = spike.marks[0], ""
    if any(mark.heads):
        heads = f", and {mark.heads[1]:,} of {mark.heads[0]:,} heads attend there"
    parts = [with_article(name) for name in mark.names]
    names = word_list(parts)
    return MARKS.format(
        parts=names[:1].upper() + names[1:],
        mark="mark" if len(parts) > 1 else "marks",
        place=place,
        them="both" if len(parts) > 1 else "it",
        left=percent_left(mark.left, mark.margin),
        others="" if mark.others is None else f" (without others: {percent_left(mark.others, None)})",
        heads=heads,
    )


# --- words and numbers ---


def component(part: str) -> str:
    """Return a part on a card, from its name in JSON: "MLP 11", "attention 3", "embedding", "L0.H4"."""
    return part.replace("mlp", "MLP")


def with_article(part: str) -> str:
    """Return a part in a sentence, from its name in JSON."""
    kind, _, layer = part.partition(" ")
    if kind == "embedding":
        return "the embedding"
    return f"the {component(kind)} of layer {layer}" if layer else part


def run(first: int, last: int) -> str:
    """Return the layers of a spike: "layer 3", "layers 3-5"."""
    return f"{word_form(last - first + 1, 'layer', 'layers')} {span(first, last)}"


def span(first: int, last: int) -> str:
    """Return the numbers of the layers of a spike."""
    return str(first) if first == last else f"{first}-{last}"


def percent_left(share: float, margin: float | None) -> str:
    """Return a share that is left, in per cent; below zero the direction has turned."""
    left = percent(share)
    return left if margin is None or margin < 0.005 else f"{left} (± {percent(margin)})"


def head_count(heads: int, margin: float | None) -> str:
    """Return a number of heads with its margin over texts, if that shows."""
    return f"{with_margin_of(heads, margin)} head{'' if heads == 1 else 's'}"


def with_margin_of(heads: int, margin: float | None) -> str:
    """Return a count with its margin over texts, if that shows."""
    return f"{heads:,}" if margin is None or margin < 0.5 else f"{heads:,} (± {margin:,.0f})"


def writing(spike: SpikeResult) -> list[Candidate]:
    """Return the neurons that are named: needed neurons first, then all that write a tenth."""
    some = [neuron for neuron in spike.neurons if abs(neuron.share) >= COUNTS or neuron.role == "needed"]
    return sorted(some, key=lambda neuron: (neuron.role != "needed", -neuron.share))
