"""What `find_sinks` and `circuit` say: labels with measured numbers; a field that does not hold is left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sinkscope.results.cards import Card
from sinkscope.results.effect import Effect
from sinkscope.results.notation import count_of, percent, word_form, word_list
from sinkscope.sinks.spikes.records import (
    Attended,
    MarkLeft,
    NeuronShare,
    OtherBos,
    Readers,
    SpikeResult,
)
from sinkscope.sinks.thresholds import COUNTS, STANDS_OUT

READERS = "{heads} of {total} heads give {place} more than 0.3 of their attention{margin}{lost}."
LOST = "; ablating {parts} cuts {what} by {value} ({control})"
LOSE = "Replacing {parts} cuts the attention that {heads} {pay} to {place} by {value} ({control})."
MARKS = "{parts} {mark} {place}: without {them}, {left} of the spike remains{others}{heads}."
NO_MARKS = "No component, alone or in pairs, marks {place}: more than three quarters of the spike remain."
ITSELF = "The embedding has the spike at {place} itself, so nothing marks it."
NO_SPIKE = "No norm spike was found: the largest is {ratio} times the typical one, at {token} after layer {layer}."
LEARNED = "{heads} of {total} heads give their learned sink logit, which is no token, more than 0.3 of their attention."
NO_PERPLEXITY = (
    "perplexity is empty: it is not measured of a model that is read layer by layer; find_sinks(ss.load(NAME)) has it."
)
LEGEND = (
    "±: two standard errors over texts. writers: every neuron that writes 2% or more of the spike, or against it. "
    "needed: the fewest that leave less than a quarter. without: all writers zeroed. random: the worst of as many sets "
    "of as many other neurons."
)
"""What explains the labels, below the last card."""

SHOWN = 3  # neurons or components that a row names
ALIKE = 0.01  # neurons of a layer whose shares differ by less than this share are named together
PLACES = 2  # places that a row names
GAP = "   "  # between the items of a row


def readers(said: Readers, spike: SpikeResult | None = None, attention: Effect | None = None) -> str:
    """Return how many heads attend to a place, and how much of that is lost without the neurons that write its spike.

    Args:
        said: The heads of all layers.
        spike: The spike at the place, which needs neurons.
        attention: What its readers lose without those that write it.
    """
    margin, lost = "", ""
    if said.margin is not None and said.margin >= 0.5:
        margin = f" (± {said.margin:,.0f})"
    if spike is not None and attention is not None and spike.without_writers is not None:
        neurons = spike.without_writers.parts
        what = "it" if spike.heads == said.heads else f"that of {spike.heads:,}"
        lost = attention.sentence(LOST, parts=word_list(neurons, 2 if len(neurons) == 2 else 1), what=what)
    heads, total = f"{said.heads:,}", f"{said.total:,}"
    return READERS.format(heads=heads, total=total, place=said.place, margin=margin, lost=lost)


def readers_lose(spike: SpikeResult, attention: Effect) -> str:
    """Return how much of their attention to a spike its readers lose without the components that it needs."""
    heads, pay = count_of(spike.heads, "head"), word_form(spike.heads, "pays", "pay")
    return attention.sentence(LOSE, parts=writers_of(spike), heads=heads, pay=pay, place=spike.place.words)


def writers_of(spike: SpikeResult) -> str:
    """Return the names of what was removed, two at most."""
    parts = () if spike.without_writers is None else spike.without_writers.parts
    return word_list([with_article(part) for part in parts], 2)


def spike_card(spike: SpikeResult, others: Sequence[SpikeResult] = ()) -> Card:
    """Return the card of a spike.

    Args:
        spike: The spike.
        others: The same spike at other places.
    """
    ordered = sorted(others, key=lambda one: -one.heads)
    elsewhere = [f"{one.place.words} ({heads_of(one.heads, None)})" for one in ordered[:PLACES]]
    if len(ordered) > PLACES:
        elsewhere.append(count_of(len(ordered) - PLACES, "further place"))
    rows = {
        "norm": _norm(spike),
        "writers": _writers(spike),
        "needed": _needed(spike),
        **_without(spike),
        "alone": _alone(spike),
        "marks": _marks(spike.marks),
        "erasers": GAP.join(f"{component(one.part)} {percent(-one.share)}" for one in spike.erasers[:SHOWN]),
        "also at": GAP.join(elsewhere),
    }
    title = f"Spike at {spike.place.words}, {run(*spike.layers)}"
    return Card(title, tuple((label, said) for label, said in rows.items() if said))


def elsewhere_card(attended: Iterable[Attended], learned: int, other: OtherBos | None, total: int) -> Card | None:
    """Return what else heads attend to, and how many attend to the first token with the other choice of BOS.

    Args:
        attended: Places without a spike.
        learned: Heads that attend to their learned sink logit.
        other: The other choice of BOS.
        total: Number of heads.
    """
    rows: list[tuple[str, str]] = []
    if other is not None:
        spikes = "no spike"
        for one in other.spikes[:1]:
            more = f" and {len(other.spikes) - 1} more" if len(other.spikes) > 1 else ""
            spikes = f"spike at {one.place.words}, {run(*one.layers)}{more}"
        label = f"{'with' if other.bos else 'without'} {other.token}"
        rows.append((label, f"{heads_of(other.heads, other.margin)} at the first token; {spikes}"))
    for one in attended:
        rows.append((one.place.words, f"{heads_of(one.heads, None)}, no spike"))
    if learned:
        rows.append(("learned sink logits", f"{heads_of(learned, None)} of {total:,}"))
    return Card("Elsewhere", tuple(rows)) if rows else None


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
    """The neurons that write most (equal neurons together), the sum of the others, and the rest of each layer."""
    groups, said = alike(spike.neurons), list[str]()
    shown = [group for group in groups if abs(_sum(group)) >= COUNTS][:SHOWN] or groups[:1]
    for group in shown:
        names = [str(one.address) for one in group]
        names[1:] = [name.removeprefix(f"L{group[0].layer}.") for name in names[1:]]
        said.append(f"{word_list(names, SHOWN)} {percent(group[0].share)}{' each' if len(group) > 1 else ''}")
    rest = [neuron for group in groups if group not in shown for neuron in group]
    for sign, words in ((1, "write"), (-1, "against it")):
        some = [one for one in rest if one.share * sign > 0]
        if some:
            said.append(f"{count_of(len(some), 'other')} {percent(abs(_sum(some)))} {words}".removesuffix(" write"))
    of_layer: dict[str, float] = {}
    for neuron in spike.neurons:
        name = f"mlp {neuron.layer}"
        of_layer[name] = of_layer.get(name, 0.0) + neuron.share
    for one in spike.writers:
        many = one.share - of_layer.get(one.part, 0.0)
        if abs(many) >= COUNTS:
            some = f"many of {component(one.part)}" if one.part.startswith("mlp") else component(one.part)
            said.append(f"{some} {percent(many)}")
    return GAP.join(said)


def alike(neurons: Iterable[NeuronShare]) -> list[list[NeuronShare]]:
    """Group neurons of one layer whose shares are equal within a hundredth; those that write most come first."""
    groups: list[list[NeuronShare]] = []
    for one in sorted(neurons, key=lambda one: (one.layer, -one.share)):
        last = groups[-1][-1] if groups else None
        if last is None or last.layer != one.layer or abs(last.share - one.share) > ALIKE * abs(one.share):
            groups.append([])
        groups[-1].append(one)
    return sorted(groups, key=lambda group: -_sum(group))


def _sum(neurons: Iterable[NeuronShare]) -> float:
    return sum(one.share for one in neurons)


def _needed(spike: SpikeResult) -> str:
    """The smallest set found, with what is left without it."""
    needed = spike.needed
    if needed is None:
        return "no neurons or pair of components that was tried"
    names = word_list([component(part) for part in needed.parts], SHOWN)
    every = {str(one.address) for one in spike.neurons if one.share > 0}
    if needed.neurons and every == set(needed.parts):
        names = {1: names, 2: "both"}.get(len(every), f"all {len(every)}")
    elif needed.neurons:
        names = f"{names} ({len(needed.neurons)} of {len(spike.neurons)} writers)"
    return f"{names}; {share_left(needed.left, needed.left_margin)} left without"


def _without(spike: SpikeResult) -> dict[str, str]:
    """How much of the spike and how many heads remain without all writers, and how the perplexity rises."""
    without = spike.without_writers
    if without is None:
        return {}
    said = [f"{share_left(without.left, without.left_margin)} of the spike"]
    if any(without.heads):
        (before, after), (margin, margin_after) = without.heads, without.heads_margin
        said.append(f"{with_margin_of(after, margin_after)} of {heads_of(before, margin)}")
    if without.perplexity is not None:
        rise, margin = number(without.perplexity), number(without.perplexity_margin or 0.0)
        said.append(f"perplexity x {rise}" if margin in ("0.00", "0") else f"perplexity x {rise} (± {margin})")
    rows, chance = {"without": ", ".join(said)}, without.random
    if chance is not None:
        beside = [share_left(chance.left, None)]
        if spike.heads:
            beside.append(heads_of(chance.heads, None))
        if chance.perplexity is not None:
            beside.append(f"x {number(chance.perplexity)}")
        rows["random"] = f"{', '.join(beside)} (the worst of {chance.sets})"
    return rows


def _alone(spike: SpikeResult) -> str:
    """What is left without single neurons: the needed set first, then the strongest effect first."""
    members, said = () if spike.needed is None else spike.needed.neurons, list[str]()
    if not members or len(spike.neurons) == 1:  # what is left without all writers says it
        return ""
    for one in sorted(spike.alone, key=lambda one: (one.address not in members, one.left))[:SHOWN]:
        heads = f", {heads_of(one.heads, None)}" if spike.heads else ""
        said.append(f"without {one.address} {share_left(one.left, None)}{heads}")
    return GAP.join(said)


def _marks(marks: Sequence[MarkLeft]) -> str:
    said: list[str] = []
    for one in marks[:SHOWN]:
        left = f"without {word_list([component(name) for name in one.names], SHOWN)} {share_left(one.left, one.margin)}"
        if one.heads is not None and any(one.heads):
            left += f", {heads_of(one.heads[1], None)}"
        said.append(left)
    return GAP.join(said)


# --- the conclusion of a circuit ---


def marks(spike: SpikeResult) -> str:
    """Return what marks the place of a spike, and how many heads attend there before and after its removal."""
    place = spike.place.words
    if spike.needed is not None and "embedding" in spike.needed.parts:
        return ITSELF.format(place=place)
    if not spike.marks:
        return NO_MARKS.format(place=place)
    mark, heads = spike.marks[0], ""
    if mark.heads is not None and any(mark.heads):
        heads = f", and {mark.heads[1]:,} of {mark.heads[0]:,} heads attend there"
    parts = [with_article(name) for name in mark.names]
    names = word_list(parts)
    return MARKS.format(
        parts=names[:1].upper() + names[1:],
        mark="mark" if len(parts) > 1 else "marks",
        place=place,
        them="both" if len(parts) > 1 else "it",
        left=share_left(mark.left, mark.margin),
        others="" if mark.others is None else f" (without others: {share_left(mark.others, None)})",
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


def share_left(share: float, margin: float | None) -> str:
    """Return a share that is left, in per cent; below zero the direction has turned."""
    left = percent(share)
    return left if margin is None or margin < 0.005 else f"{left} (± {percent(margin)})"


def heads_of(heads: int, margin: float | None) -> str:
    """Return a number of heads with its margin over texts, if that shows."""
    return f"{with_margin_of(heads, margin)} head{'' if heads == 1 else 's'}"


def with_margin_of(heads: int, margin: float | None) -> str:
    """Return a count with its margin over texts, if that shows."""
    return f"{heads:,}" if margin is None or margin < 0.5 else f"{heads:,} (± {margin:,.0f})"


def number(value: float) -> str:
    """Return a positive number in two digits behind the point, or two that count if it is smaller."""
    if 0 < value < 0.01:
        return f"{value:.1e}"
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def writing(spike: SpikeResult) -> list[NeuronShare]:
    """Return the neurons that are named: needed neurons first, then all that write a tenth."""
    needed = () if spike.needed is None else spike.needed.neurons
    some = [one for one in spike.neurons if abs(one.share) >= COUNTS or one.address in needed]
    return sorted(some, key=lambda one: (one.address not in needed, -one.share))
