"""What `find_sinks` and `circuit` say: labels with measured numbers; a field that does not hold is left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sinkscope.results.cards import Card
from sinkscope.results.effect import Effect
from sinkscope.results.notation import count_of, percent, word_form, word_list
from sinkscope.results.parts import Head
from sinkscope.sinks.spikes.records import (
    Alone,
    Attended,
    Chance,
    MarkLeft,
    NeuronShare,
    OtherBos,
    Readers,
    SpikeResult,
    part_of,
)
from sinkscope.sinks.thresholds import COUNTS, STANDS_OUT

READERS = "{heads} of {total} heads give {place} more than 0.3 of their attention{margin}."
LOSE = "{edit} {parts} cuts the attention that {heads} {pay} to {place} by {value} ({control})."
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


def readers(said: Readers) -> str:
    """Return how many heads attend to a place."""
    margin = "" if said.margin is None or said.margin < 0.5 else f" (± {said.margin:,.0f})"
    return READERS.format(heads=f"{said.heads:,}", total=f"{said.total:,}", place=said.place, margin=margin)


def readers_lose(spike: SpikeResult, attention: Effect) -> str:
    """Return how much of their attention to a spike its readers lose without what writes it."""
    edit = "Ablating" if spike.needed is not None and spike.needed.neurons else "Replacing"
    words = {"edit": edit, "parts": writers_of(spike), "place": spike.place.words}
    pay = word_form(spike.heads, "pays", "pay")
    return attention.sentence(LOSE, heads=count_of(spike.heads, "head"), pay=pay, **words)


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
    rows = {
        "norm": _norm(spike),
        "writers": _writers(spike),
        "needed": _needed(spike),
        "without": _without(spike),
        "random": "",
        "alone": GAP.join(_alone(one, spike.heads) for one in _members(spike)[:SHOWN]),
        "marks": _marks(spike.marks),
        "erasers": GAP.join(f"{component(one.part)} {percent(-one.share)}" for one in spike.erasers[:SHOWN]),
        "also at": _elsewhere(others),
    }
    if spike.without_writers is not None and spike.without_writers.random is not None:
        rows["random"] = _random(spike, spike.without_writers.random)
    title = f"Spike at {spike.place.words}, layer{run(*spike.layers)}"
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
        label = f"{'with' if other.bos else 'without'} {other.token}"
        rows.append((label, f"{heads_of(other.heads, other.margin)} at the first token; {_spikes_of(other)}"))
    for one in attended:
        rows.append((one.place.words, f"{heads_of(one.heads, None)}, no spike"))
    if learned:
        rows.append(("learned sink logits", f"{heads_of(learned, None)} of {total:,}"))
    return Card("Elsewhere", tuple(rows)) if rows else None


def _spikes_of(other: OtherBos) -> str:
    if not other.spikes:
        return "no spike"
    first = other.spikes[0]
    more = f" and {len(other.spikes) - 1} more" if len(other.spikes) > 1 else ""
    return f"spike at {first.place.words}, layer{run(*first.layers)}{more}"


# --- rows ---


def _norm(spike: SpikeResult) -> str:
    """The norm before the run and after the peak, and how far it is above the typical one."""
    norm = f"{spike.before:,.0f} -> {spike.norm:,.0f}"
    if spike.ratio >= STANDS_OUT:
        norm += f", {times(spike.ratio)} times the typical one after layer {spike.ratio_layer}"
    else:
        norm += f", {times(spike.ratio_beside)} times the typical one beside what is large at all positions"
    if spike.dims:
        norm += f"; along dimension{'s' if len(spike.dims) > 1 else ''} {word_list(spike.dims)}"
    return norm


def _writers(spike: SpikeResult) -> str:
    """The neurons that write most (equal neurons together), the sum of the others, and the rest of each layer."""
    groups = alike(spike.neurons)
    shown = [one for one in groups if abs(_sum(one)) >= COUNTS][:SHOWN] or groups[:1]
    said = [_group(one) for one in shown]
    rest = [neuron for one in groups if one not in shown for neuron in one]
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
    return sorted(groups, key=lambda one: -_sum(one))


def _sum(neurons: Iterable[NeuronShare]) -> float:
    return sum(one.share for one in neurons)


def _group(neurons: Sequence[NeuronShare]) -> str:
    """Neurons of one share: "L11.N3 40%"; "L11.N3, N7 and N8 20% each"."""
    share = percent(neurons[0].share)
    if len(neurons) == 1:
        return f"{neurons[0].address} {share}"
    return f"{together(neurons)} {share} each"


def together(neurons: Sequence[NeuronShare]) -> str:
    """Return neurons of a layer, naming the layer once."""
    names = [str(one.address) for one in neurons]
    return word_list([names[0], *(name.removeprefix(f"L{neurons[0].layer}.") for name in names[1:])], SHOWN)


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


def _without(spike: SpikeResult) -> str:
    """How much of the spike and how many heads remain without all writers, and how the perplexity rises."""
    without = spike.without_writers
    if without is None:
        return ""
    said = [f"{share_left(without.left, without.left_margin)} of the spike"]
    if any(without.heads):
        (before, after), (margin, margin_after) = without.heads, without.heads_margin
        said.append(f"{with_margin_of(after, margin_after)} of {heads_of(before, margin)}")
    if without.perplexity is not None:
        said.append(f"perplexity x {with_margin(without.perplexity, without.perplexity_margin)}")
    return ", ".join(said)


def _random(spike: SpikeResult, chance: Chance) -> str:
    said = [share_left(chance.left, None)]
    if spike.heads:
        said.append(heads_of(chance.heads, None))
    if chance.perplexity is not None:
        said.append(f"x {number(chance.perplexity)}")
    return f"{', '.join(said)} (the worst of {chance.sets})"


def _members(spike: SpikeResult) -> list[Alone]:
    """The neurons that were removed alone: the needed set first, then the strongest effect first."""
    members = () if spike.needed is None else spike.needed.neurons
    if not members or len(spike.neurons) == 1:  # what is left without all writers says it
        return []
    return sorted(spike.alone, key=lambda one: (one.address not in members, one.left))


def _alone(one: Alone, heads: int) -> str:
    said = f"without {one.address} {share_left(one.left, None)}"
    return f"{said}, {heads_of(one.heads, None)}" if heads else said


def _marks(marks: Sequence[MarkLeft]) -> str:
    said: list[str] = []
    for one in marks[:SHOWN]:
        left = f"without {word_list([component(name) for name in one.names], SHOWN)} {share_left(one.left, one.margin)}"
        if one.heads is not None and any(one.heads):
            left += f", {heads_of(one.heads[1], None)}"
        said.append(left)
    return GAP.join(said)


def _elsewhere(others: Sequence[SpikeResult]) -> str:
    """Other places that have the spike, most attended first."""
    ordered, said = sorted(others, key=lambda one: -one.heads), list[str]()
    for one in ordered[:PLACES]:
        said.append(f"{one.place.words} ({heads_of(one.heads, None)})")
    if len(ordered) > PLACES:
        said.append(count_of(len(ordered) - PLACES, "further place"))
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
    return MARKS.format(
        parts=capital(word_list(parts)),
        mark="mark" if len(parts) > 1 else "marks",
        place=place,
        them="both" if len(parts) > 1 else "it",
        left=share_left(mark.left, None),
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


def has_heads(mark: MarkLeft) -> bool:
    """Return whether a mark is a set of heads."""
    return isinstance(part_of(mark.names[0]), Head)


def run(first: int, last: int) -> str:
    """Return the layers of a spike, as an end of "layer"."""
    return f" {first}" if first == last else f"s {span(first, last)}"


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


def times(ratio: float) -> str:
    """Return a ratio in digits that count."""
    return f"{ratio:,.{0 if ratio >= 10 else 1}f}"


def number(value: float) -> str:
    """Return a positive number in two digits behind the point, or two that count if it is smaller."""
    if 0 < value < 0.01:
        return f"{value:.1e}"
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def with_margin(value: float, margin: float | None) -> str:
    """Return a positive number, with its margin over texts if that shows."""
    if margin is None or number(margin) in ("0.00", "0"):
        return number(value)
    return f"{number(value)} (± {number(margin)})"


def capital(text: str) -> str:
    """Return a text with a capital at its beginning."""
    return text[:1].upper() + text[1:]


def writing(spike: SpikeResult) -> list[NeuronShare]:
    """Return the neurons that are named: needed neurons first, then all that write a tenth."""
    needed = () if spike.needed is None else spike.needed.neurons
    some = [one for one in spike.neurons if abs(one.share) >= COUNTS or one.address in needed]
    return sorted(some, key=lambda one: (one.address not in needed, -one.share))
