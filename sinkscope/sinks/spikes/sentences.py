"""What `find_sinks` and `circuit` say: fixed sentences that are filled with measured numbers, and no others."""

from __future__ import annotations

from collections.abc import Sequence

from sinkscope.results.notation import count_of, percent, word_list
from sinkscope.results.parts import Head
from sinkscope.sinks.spikes.records import MarkLeft, Needed, NeuronShare, OtherBos, Readers, SpikeResult, part_of
from sinkscope.sinks.thresholds import (
    COUNTS,
    ENOUGH,
    HALF,
    REMAINS,
    REMOVED,
    SAME_COUNT,
    SINK_HEADS,
    SMALLEST,
    STANDS_OUT,
)

READERS = "{heads} of {total} heads give {place} more than 0.3 of their attention{bos}{layers}."
RAISED = "Layer{layers}: {parts} {raise_} the norm at {place} from {before} to {norm}, {ratio}."
STANDS = "Layer{layers}: the norm at {place} is {norm}, {ratio}."
EMBEDDED = "{share} of it comes with the embedding."
DIMS = "The spike lies along {dims}{where}."
WITHOUT = "Without {parts}, {left}. Random {kind} instead: {chance}."
ALONE = "Without {parts}, {left} of the spike remains and {heads} still {attend} there."
BACKUP = "{parts} {write} it only when the others are gone."
AGAINST = "{parts} {write} against it at the same time."
ERASED = "{parts} {take} {it} away again."
MARKS = "{parts} {mark} {place}: without {them}, {left} of the spike remains{others}{heads}."
NO_MARKS = "No component, alone or in pairs, marks {place}: more than three quarters of the spike remain{readers}."
ITSELF = "The embedding has the spike at {place} itself, so nothing marks it{readers}."
READ = "; without {parts}, {heads}"
MARKED = "With {parts} replaced at the place, {left} of the spike remains{heads} (random heads: {chance})."
ELSEWHERE = "{spike} also stands at {place}, where {heads} {attend} to it."
NO_SPIKE = "No norm spike was found: the largest is {ratio} times the typical one, at {token} after layer {layer}."
ATTENDED = "{heads} heads give {place} more than 0.3 of their attention, where no norm stands out."
LEARNED = "{heads} of {total} heads give their learned sink logit, which is no token, more than 0.3 of their attention."

SHOWN = 3  # neurons or components that a sentence names
PLACES = 2  # places that a sentence names


def readers(said: Readers, spikes: tuple[SpikeResult, ...], other: OtherBos | None, n_layers: int) -> str:
    """Return how many heads attend to a place, in which layers, and with the other choice of BOS.

    Heads of a layer read what the layer before has left: those of a spike are one layer later than it, up to the last.
    """
    bos, parts = "", list[str]()
    if other is not None and said.place == "the first token":
        bos = f" ({other.heads} {'with' if other.bos else 'without'} {other.token})"
        if abs(other.heads - said.heads) <= max(SINK_HEADS, SAME_COUNT * said.heads):
            bos = f", with or without {other.token}"
    for spike in sorted(spikes, key=lambda one: one.layers):
        if spike.place.words == said.place and spike.heads:
            last = min(spike.layers[1] + 1, n_layers - 1)
            parts.append(f"{spike.heads} in layers {spike.layers[0] + 1}-{last}")
    layers = f": {word_list(parts)}" if parts else ""
    heads = with_margin(said.heads, said.margin)
    return READERS.format(heads=heads, total=said.total, place=said.place, bos=bos, layers=layers)


def spike_line(spike: SpikeResult, typical_norm: Sequence[float], where: str = "") -> str:
    """Return what raises a spike, what remains without what it needs and without single neurons, and what erases it.

    Args:
        spike: The spike.
        typical_norm: Median norm of later positions after each layer.
        where: What the dimensions are of, in words; it is said once.
    """
    sentences = [raised(spike, typical_norm[spike.peak])]
    embedding = embedded(spike)
    if embedding >= COUNTS:
        sentences.append(EMBEDDED.format(share=f"{embedding:.0%}"))
    against = [one for one in written_in_run(spike) if one[1] <= -COUNTS]
    sentences += with_shares(AGAINST, against, "write")
    if spike.dims:
        dims = f"dimension{'s' if len(spike.dims) > 1 else ''} {word_list(spike.dims)}"
        sentences.append(DIMS.format(dims=dims, where=where))
    if spike.needed is not None:
        sentences += [without(spike, spike.needed), *alone(spike, spike.needed)]
    erasers = [(component(one.part), one.share) for one in spike.erasers[:2]]
    erased = -sum(share for _, share in erasers)
    it = "part of it"
    if erased >= ENOUGH:
        it = "it"
    elif erased >= HALF:
        it = "most of it"
    sentences += with_shares(ERASED, erasers, "take", it=it)
    return " ".join(sentences)


def with_shares(template: str, parts: Sequence[tuple[str, float]], plural: str, **words: str) -> list[str]:
    """Return a sentence about parts that write against a spike, with their shares; none without parts."""
    if not parts:
        return []
    names = [f"{name} ({-share:.0%})" for name, share in parts]
    words[plural] = verb(names, plural)
    return [template.format(parts=capital(word_list(names, SHOWN)), **words)]


def raised(spike: SpikeResult, typical: float) -> str:
    """Return which neurons, or else components, raise the norm at a place, and how far above the typical norm.

    Where that is not far, because some dimensions are large at all positions, these are left out, and it is said.
    """
    parts = [one for one in written_in_run(spike) if one[1] > 0]
    times, beside = spike.norm / max(typical, SMALLEST), ""
    if times < STANDS_OUT:
        times, beside = spike.ratio, " beside what is large at all positions"
    words = {
        "layers": run(*spike.layers),
        "place": spike.place.words,
        "norm": f"{spike.norm:,.0f}",
        "ratio": f"{times:,.{0 if times >= 10 else 1}f} times the typical one{beside}",
    }
    if not parts and embedded(spike) >= HALF:
        return STANDS.format(**words)
    names = [f"{name} ({share:.0%})" for name, share in parts]
    shown = word_list(names, SHOWN) if names else "many parts"
    return RAISED.format(parts=shown, raise_=verb(names, "raise"), before=f"{spike.before:,.0f}", **words)


def embedded(spike: SpikeResult) -> float:
    """Return the share of a spike that comes with the embedding."""
    return sum(one.share for one in spike.writers if one.part == "embedding")


def written_in_run(spike: SpikeResult) -> list[tuple[str, float]]:
    """Return the neurons, or else the components, that write a spike in its layers, with their shares.

    What wrote along its direction before has been erased, or is a part of the norm that it is raised from.
    """
    first = spike.layers[0]
    neurons = [(str(one.address), one.share) for one in named(spike) if one.layer >= first]
    parts = list[tuple[str, float]]()
    for one in spike.writers:
        layer = part_of(one.part).layer
        if abs(one.share) >= COUNTS and layer is not None and layer >= first:
            parts.append((component(one.part), one.share))
    return neurons or parts


def named(spike: SpikeResult) -> list[NeuronShare]:
    """Return the neurons that are named: those that are needed, then others that write a tenth."""
    needed = () if spike.needed is None else spike.needed.neurons
    some = [one for one in spike.neurons if abs(one.share) >= COUNTS or one.address in needed]
    return sorted(some, key=lambda one: (one.address not in needed, -one.share))


def without(spike: SpikeResult, needed: Needed) -> str:
    """Return what remains without the needed set, beside random ones."""
    names, random = [component(part) for part in needed.parts], needed.random
    parts = word_list(names, SHOWN)
    if {name for name, _ in written_in_run(spike)} == set(names):
        parts = {1: "it", 2: "both"}.get(len(names), f"all {len(names)}")
    chance: list[str] = []
    left = f"{share_left(needed.left)} of the spike remains, and no head of its layers attends there"
    if random is not None:
        chance.append(share_left(random.left))
    if needed.heads[0]:
        heads = of_heads(with_margin(needed.heads[1], needed.heads_margin[1]), needed.heads)
        left = f"{share_left(needed.left)} of the spike remains and {heads}"
        if random is not None:
            chance.append(count_of(random.heads, "head"))
    if needed.perplexity is not None:
        left += f". Perplexity is then {with_margin(needed.perplexity, needed.perplexity_margin, 1)} times as high"
        if random is not None and random.perplexity is not None:
            chance.append(f"{random.perplexity:.1f} times")
    kind = "neurons" if needed.neurons else "components"
    return WITHOUT.format(parts=parts, left=left, kind=kind, chance=", ".join(chance) or "not measured")


def alone(spike: SpikeResult, needed: Needed) -> list[str]:
    """What remains without single neurons where no one is needed: either of two is enough, or others only add to it."""
    some, before = [one for one in spike.alone if one.address in needed.neurons], needed.heads[0]
    if len(needed.neurons) == 1:
        some = [one for one in spike.alone if one.address not in needed.neurons and one.share >= COUNTS]
    backups = [str(one) for one in needed.neurons if one in spike.backups]
    said = list[str]()
    if backups:
        said = [BACKUP.format(parts=word_list(backups, SHOWN), write=verb(backups, "write"))]
    if not some or not before or not needed.neurons:
        return said
    left, heads = min(one.left for one in some), min(one.heads for one in some)
    if len(needed.neurons) > 1 and left < REMOVED:  # neurons that write against each other
        return said
    parts, least = f"any one of these {len(some)}", "at least "
    if len(needed.neurons) == 1:
        parts = f"any one of the other {len(some)} writers"
    if len(some) == 1:
        parts, least = str(some[0].address), ""
    words = {"left": f"{least}{share_left(left)}", "heads": count_of(heads, "head")}
    single = ALONE.format(parts=parts, attend=attend(heads), **words)
    if len(some) == len(needed.neurons) == 2 and heads >= REMAINS * before:
        single = f"Either writer is enough for {heads} of the heads."
    return [single, *said]


def elsewhere(original: SpikeResult, others: Sequence[SpikeResult]) -> str:
    """Return the places that have a spike of another place, too, those first to which most heads attend."""
    ordered = sorted(others, key=lambda one: -one.heads)
    subject, said = f"The spike of layer{run(*original.layers)}", list[str]()
    for one in ordered[:PLACES]:
        heads = count_of(one.heads, "head")
        said.append(ELSEWHERE.format(spike=subject, place=one.place.words, heads=heads, attend=attend(one.heads)))
        subject = "It"
    if len(ordered) > PLACES:
        said.append(f"It stands at {count_of(len(ordered) - PLACES, 'further place')}, too.")
    return " ".join(said)


def attend(heads: int) -> str:
    """Return the verb that agrees with a number of heads; "no head" is one of them."""
    return "attend" if heads > 1 else "attends"


def marks(spike: SpikeResult) -> str:
    """Return what marks the place of a spike, and how many heads attend there before and after its removal."""
    place, read = spike.place.words, readers_left(spike.needed)
    if spike.needed is not None and "embedding" in spike.needed.parts:
        return ITSELF.format(place=place, readers=read)
    if not spike.marks:
        return NO_MARKS.format(place=place, readers=read)
    mark = spike.marks[0]
    names = list(map(component, mark.names))
    return MARKS.format(
        parts=capital(word_list(names)),
        mark=verb(names, "mark"),
        place=place,
        them="it" if len(names) == 1 else "both",
        left=share_left(mark.left),
        others="" if mark.others is None else f" (without others: {share_left(mark.others)})",
        heads=mark_heads(mark),
    )


def mark_heads(mark: MarkLeft) -> str:
    """Return how many heads still attend without a mark, as an end of a sentence; empty if none did before."""
    if mark.heads is None or not any(mark.heads):
        return ""
    return f", and {of_heads(str(mark.heads[1]), mark.heads)}"


def share_left(share: float) -> str:
    """Return a share that is left; below zero, where the direction has turned, nothing is."""
    left = percent(share)
    if left.startswith("-"):
        return "none"
    return left


def readers_left(needed: Needed | None) -> str:
    """Return how many heads remain without the needed set, as an end of a sentence; empty if no head attends."""
    if needed is None or not needed.heads[0]:
        return ""
    parts = word_list([component(part) for part in needed.parts])
    if len(needed.parts) > 2:
        parts = f"{len(needed.parts)} {'neurons' if needed.neurons else 'components'}"
    return READ.format(parts=parts, heads=of_heads(str(needed.heads[1]), needed.heads))


def of_heads(left: str, heads: tuple[int, int]) -> str:
    """Return how many heads still attend to a place, in words, of those before; some do so only after a removal."""
    before, after = heads
    if after > before:
        return f"{left} heads attend there (before: {before})"
    return f"{left} of {before} heads still attend there"


def marking_heads(spike: SpikeResult) -> list[str]:
    """Return what remains without the heads that mark the place, as a set, where an attention layer marks it."""
    if len(spike.marks) < 2 or not isinstance(part_of(spike.marks[1].names[0]), Head):
        return []
    mark: MarkLeft = spike.marks[1]
    chance = "too few others"
    if mark.random is not None:
        chance = share_left(mark.random.left)
        if mark.heads is not None and any(mark.heads):
            chance += f", {count_of(mark.random.heads, 'head')}"
    return [
        MARKED.format(
            parts=word_list(mark.names, SHOWN),
            left=share_left(mark.left),
            heads=mark_heads(mark),
            chance=chance,
        )
    ]


# --- words ---


def component(part: str) -> str:
    """Return a part in a sentence, from its name in JSON."""
    kind, _, layer = part.partition(" ")
    if kind == "embedding":
        return "the embedding"
    return f"the {'MLP' if kind == 'mlp' else kind} of layer {layer}" if layer else part


def run(first: int, last: int) -> str:
    """Return the layers of a spike, as an end of "layer"."""
    return f" {first}" if first == last else f"s {span(first, last)}"


def span(first: int, last: int) -> str:
    """Return the numbers of the layers of a spike."""
    return str(first) if first == last else f"{first}-{last}"


def with_margin(value: float, margin: float | None, digits: int = 0) -> str:
    """Return a number from 0 on with its margin over texts, if that shows."""
    text = f"{value:,.{digits}f}"
    if margin is None or margin < 0.5 * 10**-digits:
        return text
    if margin > value:
        return f"{text} (at most {value + margin:,.{digits}f})"
    return f"{text} (± {margin:,.{digits}f})"


def verb(names: list[str], plural: str) -> str:
    """Return a verb that agrees with some names."""
    return f"{plural}s" if len(names) == 1 else plural


def capital(text: str) -> str:
    """Return a text with a capital at its beginning."""
    return text[:1].upper() + text[1:]
