"""What `find_sinks` and `circuit` say of spikes and sinks; each function words the records that it is given."""

from __future__ import annotations

from collections.abc import Sequence

from sinkscope.results.claims import Claim, Search, percent_pair
from sinkscope.results.notation import count_of, short_sentence, word_form, word_list
from sinkscope.results.parts import Neuron, in_words, removed
from sinkscope.sinks.find.places import LeftOver
from sinkscope.sinks.find.readers import POSITION
from sinkscope.sinks.find.records import (
    SHORT,
    CausalSet,
    Readers,
    RepeatsNeeded,
    RepetitionSpike,
    Sink,
    SinkRate,
    Spike,
)
from sinkscope.sinks.tokens import left_out_line

NAMED = (4, 2, 1)  # neurons that a conclusion names; in shorter versions fewer
GROUPS = 3  # groups of heads that a sentence tells apart


def conclusion(spikes: Sequence[Spike], sinks: Sequence[Sink], most: Search) -> str:
    """Who attends where and what they need; without a sink, where norms stand out and what makes that."""
    if sinks:
        versions = [f"{statement(sinks[0], named, brief=True)}." for named in NAMED]
        return short_sentence([*versions, f"{statement(sinks[0], 1, groups=1)}."])
    if spikes:
        return short_sentence(f"No attention sink ({most}); {spike_clause(spikes[0], named)}." for named in NAMED)
    return f"Neither an attention sink nor a norm spike was found ({most})."


def statement(sink: Sink, named: int = NAMED[0], *, brief: bool = False, groups: int = GROUPS) -> str:
    """How many heads attend to a place and, of so many groups of them, what each needs."""
    if sink.place is None:
        readers = sum(layer.readers for layer in sink.layers)
        least, most = sink.between
        return (
            f"{readers} of {sink.n_heads} heads give {least:.0%} to {most:.0%} of their attention to learned sink "
            "logits, which stand in for a token"
        )
    count = sum(len(group.heads) for group in sink.groups)
    who = f"{count} of {sink.n_heads} heads {word_form(count, 'attends', 'attend')} to {sink.words}{_when(sink)}"
    known = [group for group in sink.groups if group.claim is not None]
    if not known:
        return f"{who}; nothing that was removed takes it away ({sink.groups[0].search if sink.groups else 'untried'})"
    if len(sink.groups) == 1:
        return f"{who}; {need(known[0], named)}"
    parts = [f"for {len(known[0].heads)}, {need(known[0], named)}"]
    for group in sink.groups:
        if group is not known[0] and len(parts) < groups:
            parts.append(f"for {len(group.heads)}, {need(group, named, brief=brief)}")
    return f"{who}: {'; '.join(parts)}"


def _when(sink: Sink) -> str:
    """In which texts and windows heads attend, if not in all; as part of a sentence."""
    words = ""
    if sink.before is not None:
        words = f" (and to {sink.before.words} until they see one)"
    if sink.place is not None and sink.place.share < 1 and sink.place.is_first:
        words += f" in {sink.place.share:.0%} of texts"
    if sink.length > SHORT:
        words = f"{words or ' in texts'} of {sink.length} tokens"
    if sink.window is not None:
        words += f" (window {sink.window})"
    return words


def need(group: Readers, named: int = NAMED[0], *, brief: bool = False) -> str:
    """What a group of heads needs, with the number and its control unless it is brief."""
    claim = group.claim
    if claim is None:
        return "nothing that was removed takes it away"
    names = in_words(claim.subject, named)
    if POSITION in claim.subject and claim.verdict != "sufficient":
        return "nothing that was removed takes it away"
    if POSITION in claim.subject:
        left, chance = percent_pair(claim.value, claim.control.value)
        if brief:
            return "the position is enough"
        return f"the position is enough: {left} stays with all replaced that is written there (elsewhere {chance})"
    what, is_needed = names, word_form(len(claim.subject), "is needed", "are needed")
    if group.by_spike:
        is_needed = "is needed"
        what = f"its spike ({names})"
    if claim.verdict == "undecided":
        what = f"{what} in part"
    elif claim.verdict != "needed":
        return f"{names} shows no effect"
    if brief:
        return f"{what} {is_needed}"
    left, chance = percent_pair(claim.value, claim.control.value)
    return (
        f"{what} {is_needed}: {removed(claim.subject)} {left} stays ({claim.control.in_words(claim.subject)}: {chance})"
    )


def spike_clause(spike: Spike, named: int = NAMED[0]) -> str:
    """What makes a spike, with what is left without it and the control."""
    where = spike.place.words
    claim = next(iter(spike.claims), None)
    if claim is None:
        return f"a norm {spike.ratio:.0f} times the typical one at {where}, and nothing tried removes it"
    names = in_words(claim.subject, named)
    left, chance = percent_pair(claim.value, claim.control.value)
    if claim.verdict != "needed":
        return f"of the spike at {where}, {left} stays with {names} removed ({_control(claim)}: {chance})"
    makes = word_form(len(claim.subject), "makes", "make together")
    if spike.begun_by and len(spike.layers) == 1 and isinstance(claim.subject[0], Neuron):
        makes = word_form(len(claim.subject), "amplifies", "amplify")
    return f"{names} {makes} the spike at {where}: {removed(claim.subject)} {left} stays ({_control(claim)}: {chance})"


def _control(claim: Claim) -> str:
    return claim.control.in_words(claim.subject)


def layers_read(read: int, n_layers: int, dims: Sequence[int]) -> str:
    """How many layers were read, and which residual dimensions are left out."""
    others = ", and every sentence is about these" if read < n_layers else ""
    sentence = f"{read} of {n_layers} layers were read{others}."
    if dims:
        sentence += f" Residual dimensions that are massive on all tokens are left out ({word_list(dims)})."
    return sentence


def spike_sentences(spike: Spike) -> str:
    """Where a spike is, how high, and what makes it, alone and together."""
    runs = [f"layer {first}" if first == last else f"layers {first} to {last}" for first, last in spike.layers]
    size = f"about {spike.ratio:.0f} times the typical norm at its largest (elsewhere {spike.usual:.1f})"
    where = f"The norm at {spike.place.words} is a spike after {word_list(runs)}"
    sentences = [f"{where}: {size}.", f"{_capital(spike_clause(spike))}."]
    if spike.begun_by:
        sentences.append(f"{_capital(in_words(spike.begun_by))} begins the spike.")
    alone = [f"{in_words(claim.subject)} {claim.value:.0%}" for claim in spike.claims if claim.role == "makes alone"]
    if alone:
        sentences.append(f"Without one of them alone, this stays along its direction: {', '.join(alone[:GROUPS])}.")
    if not spike.claims:
        sentences = [sentences[0], f"Nothing that was tried removes it ({spike.search})."]
    for found in spike.sets:
        sentences += _set_sentences(found, spike)
    return " ".join(sentences)


def _set_sentences(found: CausalSet, spike: Spike) -> list[str]:
    """What zeroing a set, or each of its neurons, takes away."""
    sentences: list[str] = []
    for claim in found.claims:
        if claim.role == "adds":
            left, chance = percent_pair(claim.value, claim.control.value)
            names = in_words(claim.subject)
            sentences.append(f"{names} adds to it: without it {left} stays ({_control(claim)}: {chance}).")
    if found.equals:
        words = word_form(len(found.equals), "alone removes", "alone each remove")
        sentences.append(f"Zeroing {word_list(found.equals)} {words} the spike as well.")
    if found.layers is not None and len(spike.sets) > 1:
        first, last = found.layers
        names = in_words(found.neurons)
        sentences.append(
            f"{names} {word_form(len(found.neurons), 'makes', 'make')} its part after layers {first} to {last}."
        )
    return sentences


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def left_over(left: LeftOver, what: str) -> list[str]:
    """Places that belong to no piece, with their share and most common tokens."""
    if not left.count:
        return []
    common = [f"{each.token!r} ({each.share:.0%})" for each in left.tokens]
    return [
        f"Left over: {count_of(left.count, 'more position')} {what} ({left.share:.0%} of all such), most often "
        f"{word_list(common)}."
    ]


def sink_rate(rate: SinkRate | None) -> list[str]:
    """The sink rate as it is defined in the literature."""
    if rate is None:
        return []
    return [
        f"The sink rate is {rate.value:.1%}: this share of all heads gives position 0 more than {rate.eps} of "
        f"its attention ({rate.samples} texts of {rate.length} tokens)."
    ]


def repeats(needed: RepeatsNeeded, spike: Spike | None, found: RepetitionSpike | None) -> list[str]:
    """After how many repetitions a token becomes a sink, what one copy does there, and what makes its spike."""
    norm = "half of the first token's norm"
    if spike is not None and not spike.place.is_first:
        norm = "half of the spike's norm"
    repeated = len(needed.tokens) - len(needed.at_once)
    sentences = []
    if repeated and needed.median is None:
        within = count_of(needed.max_repeats, "repetition")
        sentences.append(f"None of {count_of(repeated, 'token')} reaches {norm} at the sink layer within {within}.")
    elif repeated:
        never = ""
        if needed.unreached:
            do = word_form(needed.unreached, "does", "do")
            never = f"; {needed.unreached} of {repeated} never {do} within {needed.max_repeats}"
        over = f"median over {count_of(repeated - needed.unreached, 'token')}{never}"
        sentences.append(f"A repeated token reaches {norm} after {needed.median:g} repetitions ({over}).")
    sentences += left_out_line([token.token for token in needed.at_once], norm)
    if found is not None:
        sentences += _repetition(found)
    return sentences


def _repetition(found: RepetitionSpike) -> list[str]:
    """Whether copies do it, and whether the same neurons make the spike then."""
    copies = found.by_copies
    single, others = (contrast.value for contrast in copies.contrasts)
    beside = f"one copy there {single:.0%}, other tokens there {others:.0%}"
    if copies.verdict != "sufficient":
        return [
            f"Repetition is not shown to make a spike: {found.repeats} copies of {found.token!r} reach "
            f"{copies.value:.0%} of its norm, {beside}."
        ]
    sentences = [f"{found.repeats} copies of {found.token!r} reach {copies.value:.0%} of the spike's norm ({beside})."]
    if found.same is not None and found.same.verdict == "needed":
        names = in_words(found.same.subject)
        sentences.append(f"{names} {word_form(len(found.same.subject), 'is', 'are')} needed for it, too.")
    elif found.set is not None:
        claim = found.set.claims[0]
        left, chance = percent_pair(claim.value, claim.control.value)
        names = in_words(claim.subject)
        sentences.append(f"Other neurons make it: without {names} {left} stays ({_control(claim)}: {chance}).")
    elif found.same is not None:
        left = f"{found.same.value:.0%} of that norm stays without {in_words(found.same.subject)}"
        sentences.append(f"It goes another way: {left} ({_control(found.same)}: {found.same.control.value:.0%}).")
    return sentences
