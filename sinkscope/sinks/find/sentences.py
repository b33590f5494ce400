"""What `find_sinks` and `circuit` say of spikes and sinks: where they are; claims word themselves."""

from __future__ import annotations

from collections.abc import Sequence

from sinkscope.results.claims import Claim, Search
from sinkscope.results.notation import count_of, short_sentence, word_form, word_list
from sinkscope.results.parts import POSITION, in_words, kind_of, removed
from sinkscope.sinks.find.places import LeftOver
from sinkscope.sinks.find.records import SHORT, Readers, RepeatsNeeded, RepetitionSpike, Sink, SinkRate, Spike

NAMED = (4, 2, 1)  # neurons that a conclusion names; in shorter versions fewer
GROUPS = 3  # groups of heads that a sentence tells apart
SAID = 3  # claims about a spike that a sentence has
NOTHING = "nothing that was removed takes it away"


def conclusion(spikes: Sequence[Spike], sinks: Sequence[Sink], most: Search) -> str:
    """Who attends where and what they need; without a sink, where norms stand out and what makes that."""
    if sinks:
        makers = [maker_sentence(sinks, named) for named in NAMED]
        if makers[0]:
            return short_sentence(makers)
        versions = [f"{statement(sinks[0], named, brief=True)}." for named in NAMED]
        return short_sentence([*versions, f"{statement(sinks[0], 1, groups=1)}."])
    if spikes:
        versions = [f"No attention sink ({most}); {spike_clause(spikes[0], named)}." for named in NAMED]
        if most.most:
            shorter = f"at most {most.best}: {most.most:.0%}"
            versions.append(f"No attention sink ({shorter}); {spike_clause(spikes[0], 1)}.")
        return short_sentence(versions)
    return f"Neither an attention sink nor a norm spike was found ({most})."


def maker_sentence(sinks: Sequence[Sink], named: int) -> str:
    """That neurons make the first sink, if all its heads need the spike that they make; else nothing."""
    sink = sinks[0]
    claim = _spike_needed(sink)
    if claim is None or kind_of(claim.subject) != "neurons" or _when(sink):
        return ""
    count = len(claim.subject)
    who = word_form(count, "One neuron", f"{count} neurons")
    what = "this model's attention sink"
    if len(sinks) > 1:
        needed = list(filter(None, map(_spike_needed, sinks)))
        made = sum(claim.subject == other.subject for other in needed)
        what = f"{'one' if made == 1 else made} of this model's {len(sinks)} attention sinks"
    lost, control = claim.beside_control(lost=True)
    make = word_form(count, "makes", "make")
    return (
        f"{who}, {in_words(claim.subject, named)}, {make} {what}: {removed(claim.subject)} {sink.readers} of "
        f"{sink.n_heads} heads lose {lost} of their attention to {sink.words} ({control})."
    )


def _spike_needed(sink: Sink) -> Claim | None:
    """The claim that all heads of a sink need its spike; None if that is not shown."""
    if len(sink.groups) != 1 or not sink.groups[0].by_spike:
        return None
    claim = sink.groups[0].claim
    return claim if claim is not None and claim.verdict == "needed" else None


def statement(sink: Sink, named: int = NAMED[0], *, brief: bool = False, groups: int = GROUPS) -> str:
    """How many heads attend to a place and, of so many groups of them, what each needs."""
    if sink.place is None:
        return (
            f"{sink.readers} of {sink.n_heads} heads give {sink.attention:.0%} of their attention to learned sink "
            "logits, which stand in for a token"
        )
    attend = word_form(sink.readers, "attends", "attend")
    who = f"{sink.readers} of {sink.n_heads} heads {attend} to {sink.words}{_when(sink)}"
    if len(sink.groups) == 1:
        return f"{who}; {need(sink.groups[0], named)}"
    known = sorted(sink.groups, key=lambda group: group.claim is None)
    parts: list[str] = []
    for group in known[:groups]:
        parts.append(f"for {len(group.heads)}, {need(group, named, brief=brief and group is not known[0])}")
    return f"{who}: {'; '.join(parts)}"


def statements(sinks: Sequence[Sink]) -> list[str]:
    """A statement on each sink, and whether its heads attend to one before it as well."""
    said: list[str] = []
    for number, sink in enumerate(sinks):
        said.append(f"{statement(sink)}.")
        for other in sinks[:number]:
            both = sink.heads & other.heads
            if both:
                which = "The same" if both == sink.heads == other.heads else str(len(both))
                said[-1] += f" {which} {word_form(len(both), 'head attends', 'heads attend')} to {other.words}."
                break
    return said


def _when(sink: Sink) -> str:
    """In which texts and windows heads attend, if not in all; as part of a sentence."""
    words = ""
    if sink.place is not None and sink.place.share < 1 and sink.place.is_first:
        words = f" in {sink.place.share:.0%} of texts"
    if sink.length > SHORT:
        words = f"{words or ' in texts'} of {sink.length} tokens"
    if sink.window is not None:
        words += f" (window {sink.window})"
    return words


def need(group: Readers, named: int = NAMED[0], *, brief: bool = False) -> str:
    """What a group of heads needs, with the number and its control unless it is brief."""
    claim = group.claim
    if claim is None or (claim.subject == (POSITION,) and claim.verdict != "sufficient"):
        return f"{NOTHING} ({group.search})"
    called = "its spike" if group.by_spike else ""
    if brief:
        return claim.said(named, called)
    return claim.phrase(named, called)


def spike_clause(spike: Spike, named: int = NAMED[0]) -> str:
    """What makes a spike, with what is left without it and the control."""
    if not spike.made_by:
        return f"the norm at {spike.place.words} is {spike.ratio:.0f} times the typical one; {NOTHING} ({spike.search})"
    return f"the spike at {spike.place.words}: {spike.made_by[0].phrase(named)}"


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
    where = f"The norm at {spike.place.words} is a spike after {word_list(runs)}"
    said = f"{where}: about {spike.ratio:.0f} times the typical norm at its largest (elsewhere {spike.usual:.1f})."
    parts: list[str] = []
    for number, claim in enumerate(spike.made_by):
        if claim.role == "serves":
            parts.append(f"at {claim.place}, {claim.phrase()}")
        elif number < SAID:
            parts.append(claim.phrase())
    said += f" For it, {'; '.join(parts)}." if parts else f" Of it, {NOTHING} ({spike.search})."
    for claim in spike.claims:
        if claim.role == "depends":
            said += f" It depends on another spike: of what makes that, {claim.phrase()}."
    return said


def left_over(left: LeftOver, what: str) -> list[str]:
    """Places that belong to no piece, with their share and most common tokens."""
    if not left.count:
        return []
    common = [f"{each.token!r} ({each.share:.0%})" for each in left.tokens]
    return [
        f"Left over: {count_of(left.count, 'more position')} {what} ({left.share:.0%} of all such), most often "
        f"{word_list(common)}."
    ]


def sink_rate(rate: SinkRate) -> str:
    """The sink rate as it is defined in the literature."""
    return (
        f"The sink rate is {rate.value:.1%}: this share of all heads gives position 0 more than {rate.eps} of "
        f"its attention ({rate.samples} texts of {rate.length} tokens)."
    )


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
    if needed.at_once:
        names = word_list([repr(token.token) for token in needed.at_once])
        do = word_form(len(needed.at_once), "reaches", "reach")
        sentences.append(f"{names} {do} {norm} without repetition, and the median leaves this out.")
    if found is not None:
        sentences.append(f"Of the spike's norm at {found.token!r}, {found.by_copies.phrase()}.")
        if found.set is not None:
            sentences.append(f"Other neurons make it: {found.set.claims[0].phrase()}.")
        elif found.same is not None and found.by_copies.verdict == "sufficient":
            sentences.append(f"For that, {found.same.phrase()}.")
    return sentences
