"""What `find_sinks` says: each function makes sentences of the records that it is given, and of nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sinkscope.results.notation import count_of, short_sentence, word_form, word_list
from sinkscope.sinks.find.members import ATTENTION_LENGTH, CausalSet
from sinkscope.sinks.find.places import Scattered
from sinkscope.sinks.find.records import (
    SHORT,
    AttentionSink,
    NormSpike,
    PlacedSpike,
    RepeatsNeeded,
    RepetitionSpike,
    SinkRate,
)
from sinkscope.sinks.tokens import left_out_line

MOST_HEADS = 0.9  # of the attending heads lose half of their attention without a spike that "the heads" attend to
NAMED = (5, 3, 1)  # neurons that a conclusion names; in shorter versions fewer
LEAST_SHARE = 0.1  # of the heads read something that is worth a word
FIRST = "the first token"


# --- the conclusion --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What a conclusion is made of.

    Attributes:
        spike: The norm spike.
        sink: The attention sink.
        minimal: The neurons that make the spike.
        layer: The layer whose MLP builds most of it.
        lengths: Lengths of the texts that were read.
        stray_norms: Positions whose norm stands out and that no words describe.
        scattered: Positions that receive as much attention as a sink and that no words describe.
    """

    spike: NormSpike | None
    sink: AttentionSink | None
    minimal: CausalSet | None
    layer: int | None
    lengths: tuple[int, ...]
    stray_norms: int = 0
    scattered: int = 0

    @property
    def together(self) -> bool:
        """Whether heads attend to the first kind of place that has the spike."""
        if self.spike is None or self.sink is None or self.sink.place is None:
            return False
        if self.spike.place.is_first and self.sink.place.is_first:
            return True
        return self.spike.place.rules[0].words == self.sink.place.rules[0].words


def conclusion(found: Found) -> str:
    """Whether there is a norm spike and an attention sink, where, and what makes and carries them."""
    return short_sentence(_version(found, shorter) for shorter in range(len(NAMED)))


def _version(found: Found, shorter: int) -> str:
    """The conclusion; the shorter, the fewer names and conditions it has."""
    spike, sink = found.spike, found.sink
    if sink is None and spike is None:
        nothing = nothing_found(found.lengths, found.stray_norms, found.scattered)
        return f"Neither a norm spike nor an attention sink: {nothing}."
    if sink is None:
        return f"Norm spike without an attention sink: {_makers(found, shorter)}."
    where = conditions(sink, shorter)
    read = what_is_read(sink)
    if spike is None:
        return f"Attention sink without a norm spike: {who(sink, shorter)}{where}; {read}."
    if sink.place is not None and not found.together:
        place = spike.place if shorter == 0 else spike.place.rules[0].words
        return f"Norm spike at {place}, attention sink elsewhere: {who(sink, shorter)}{where}; {read}."
    if sink.carried_by != "spike":
        return f"Norm spike and attention sink{where}, but most heads do not need the spike: {read}."
    return f"Norm spike and attention sink{where}: {_makers(found, shorter)}."


def nothing_found(lengths: Sequence[int], stray_norms: int, scattered: int) -> str:
    """That no words describe where norms stand out or where heads attend, as part of a sentence.

    Args:
        lengths: Lengths of the texts.
        stray_norms: Number of scattered positions whose norm stands out.
        scattered: Number of scattered positions that receive as much attention as a sink.
    """
    norms = "no norm stands out"
    if stray_norms:
        norms = "norms stand out at scattered positions"
    return f"{norms}, and {no_sink(lengths, scattered)}"


def _makers(found: Found, shorter: int) -> str:
    """What makes the spike, as the middle of a sentence."""
    spike, minimal = found.spike, found.minimal
    assert spike is not None
    if minimal is not None and minimal.makes_the_spike:
        count = len(minimal.sites)
        makes = f"{word_form(count, 'makes', 'make')} {_spike(found)}"
        if spike.begun_by is not None:
            makes = f"{word_form(count, 'amplifies', 'amplify')} the spike that the {spike.begun_by} begins"
        return (
            f"{word_list(minimal.sites, NAMED[shorter])} {makes}; zeroing {word_form(count, 'it', 'them')} removes "
            f"{minimal.drop_sink_layer:.1%}{' of its norm' if shorter == 0 else ''}, random neurons at most "
            f"{minimal.control:.1%}"
        )
    place = spike.place.rules[0].words
    size = f"{spike.ratio:.0f} times the typical one"
    if found.layer is not None:
        at = "" if place == FIRST else f" at {place}"
        return f"layer {found.layer} builds a norm {size}{at}, which no set of neurons tried removes"
    if spike.made_by is None:
        return f"no single component makes the norm of {place}, {size}"
    return f"the {spike.made_by} makes the norm of {place}, {size}"


def _spike(found: Found) -> str:
    """The spike in a sentence about its neurons."""
    spike, sink, minimal = found.spike, found.sink, found.minimal
    assert spike is not None and minimal is not None
    place = spike.place.rules[0].words
    if minimal.layers is not None:
        return f"the spike after {_layers(*minimal.layers)}"
    several = [each.place for each in (spike, sink) if each is not None and each.place and len(each.place.rules) > 1]
    if several or place != FIRST:  # heads may attend elsewhere, too
        return f"the spike of {place}"
    if sink is None or conditions(sink):
        return "the spike"
    if minimal.heads_lost is not None and minimal.heads_lost < MOST_HEADS:
        return "the spike that at least half of the heads need"
    return "the spike that the heads attend to"


# --- attention -------------------------------------------------------------------------------------------------------


def no_sink(lengths: Sequence[int], scattered: int) -> str:
    """That no words describe a sink in texts of which lengths, with so many scattered positions, in a sentence."""
    if scattered:
        return f"only scattered positions receive a sink's attention in texts of {word_list(lengths)} tokens"
    return f"too few heads attend to any one position in texts of {word_list(lengths)} tokens"


def who(sink: AttentionSink, shorter: int = 0) -> str:
    """Which share of the heads attends where, as part of a sentence."""
    place = "their learned sink logits"
    if sink.place is not None:
        place = sink.place.words if shorter == 0 else sink.place.rules[0].words
    return f"{sink.rate:.0%} of heads attend to {place}"


def in_texts(sink: AttentionSink) -> str:
    """In which texts heads attend, as part of a sentence; empty if they do in all short ones."""
    words = ""
    if sink.share < 1 and sink.place is not None and sink.place.is_first:
        words = f" in {sink.share:.0%} of texts"
    if sink.length > SHORT:
        words = f"{words or ' in texts'} of {sink.length} tokens"
    return words


def conditions(sink: AttentionSink, shorter: int = 0) -> str:
    """What a sentence says of texts and windows, if there is room."""
    if shorter == len(NAMED) - 1:
        return ""
    if sink.window is None or shorter > 0:
        return in_texts(sink)
    return f" (window {sink.window}){in_texts(sink)}"


def what_is_read(sink: AttentionSink) -> str:
    """What the heads read, as part of a sentence, with the shares of the heads if they read different things."""
    words = {
        "mark": f"a mark by the {sink.mark}",
        "position": "the position alone, through the rotary embedding",
        "key bias": "the bias of their keys",
    }
    if sink.mark is None:
        words["mark"] = "marks by several components"
    shared = [(what, share) for what, share in sink.reads if share >= LEAST_SHARE]
    if len(shared) > 1:
        return "they read " + word_list([f"{words.get(what, f'the {what}')} ({share:.0%})" for what, share in shared])
    if sink.carried_by == "spike":
        return "they read its own spike"
    if sink.carried_by is None:
        return "no single component carries it"
    if sink.carried_by == "learned logits":
        return "these stand in for a token"
    return f"they read {words.get(sink.carried_by, f'the {sink.carried_by}')}"


def scattered(places: Scattered) -> list[str]:
    """Places that receive as much attention as a sink and that no words describe."""
    if not places.count:
        return []
    receive = word_form(places.count, "position receives", "positions receive")
    common = [f"{each.token!r} ({each.share:.0%})" for each in places.tokens]
    return [f"{places.count:,} scattered {receive} as much attention, most often of {word_list(common)}."]


def attention(sink: AttentionSink | None, lengths: Sequence[int], scattered: int) -> list[str]:
    """Who attends to the sink, and what they need; or that there is none, with so many scattered positions."""
    if sink is None:
        return [f"{no_sink(lengths, scattered).capitalize()}."]
    if sink.place is None:
        return []
    sentences = []
    if sink.learned_rate:
        sentences.append(f"{sink.learned_rate:.1%} of the heads attend to their learned sink logits.")
    if sink.place.words != FIRST or in_texts(sink):
        each = [f"{place.words} ({place.rate:.1%})" for place in sink.positions]
        sentences.append(f"Heads attend to {word_list(each)}{in_texts(sink)}.")
    return sentences


def sink_rate(rate: SinkRate | None) -> list[str]:
    """The sink rate as it is defined in the literature."""
    if rate is None:
        return []
    return [
        f"The sink rate is {rate.value:.1%}: this share of all heads gives position 0 more than {rate.eps} of "
        f"its attention ({rate.samples} texts of {rate.length} tokens)."
    ]


# --- the spike -------------------------------------------------------------------------------------------------------


def layers_read(read: int, n_layers: int) -> str:
    """How many layers were read; of others nothing is said."""
    others = ", and every sentence is about these" if read < n_layers else ""
    return f"{read} of {n_layers} layers were read{others}."


def shared_dimensions(dims: Sequence[int]) -> list[str]:
    """Which residual dimensions are left out."""
    if not dims:
        return []
    return [f"The verdicts leave out residual dimensions that are massive on all tokens ({word_list(dims)})."]


def _layers(first: int, last: int) -> str:
    """Layers in a row, in words."""
    return f"layer {first}" if first == last else f"layers {first} to {last}"


def where_the_spike_is(spike: NormSpike | None) -> list[str]:
    """The places whose norm stands out, and after which layers it does."""
    if spike is None:
        return []
    runs = [_layers(begin, end) for begin, end in spike.runs]
    sentence = f"The norm stands out at {spike.place}"
    if runs and len(spike.place.rules) > 1:
        sentence += f"; at {spike.place.rules[0].words}"
    if runs:
        sentence += f" after {word_list(runs)}"
    return [f"{sentence}."]


def sink_layer(
    layer: int | None, spike_norm: Sequence[float | None], typical_norm: Sequence[float | None]
) -> list[str]:
    """The layer that builds most of the spike, and the norms after it."""
    if layer is None:
        return []
    return [
        f"The sink layer is layer {layer}: after it the norm of the spike is {spike_norm[layer]:.4g}, and the typical "
        f"one is {typical_norm[layer]:.4g}."
    ]


def causal_set(each: CausalSet, spike: NormSpike | None) -> list[str]:
    """What zeroing a set of neurons takes away."""
    count = len(each.sites)
    sentences = []
    if each.layers is not None:
        makes = word_form(count, "makes", "make")
        sentences.append(
            f"{each.names} {makes} the part of the spike after {_layers(*each.layers)}: zeroing "
            f"{word_form(count, 'it', 'them')} removes {each.drop_sink_layer:.1%} of it (random neurons at most "
            f"{each.control:.1%})."
        )
    if each.equals:
        alone = word_form(len(each.equals), "alone removes", "alone each remove")
        sentences.append(f"Zeroing {word_list(each.equals)} {alone} the spike as well.")
    if each.drop_attention is not None and each.heads_lost is not None and spike is not None:
        place = spike.place.rules[0].words
        texts = f"texts of {'' if spike.place.is_first else 'at least '}{ATTENTION_LENGTH} tokens"
        sentences.append(
            f"Without {each.names}, the heads of later layers that attend to {place} lose {each.drop_attention:.1%} of "
            f"that attention ({texts}); {each.heads_lost:.0%} of these heads lose at least half."
        )
    return sentences


def further_spike(each: PlacedSpike) -> str:
    """The spike of a further kind of place, and what makes it."""
    maker = "no set of neurons that was tried removes it"
    if each.set is not None:
        maker = f"zeroing {each.set.names} removes {each.set.drop_last_layer:.1%}"
    elif each.made_by is not None and each.made_by != "MLP":
        maker = f"the {each.made_by} makes it"
    return f"The norm of {each.words} reaches {each.ratio:.0f} times the typical one; {maker}."


# --- repetition ------------------------------------------------------------------------------------------------------


def repeats(needed: RepeatsNeeded, spike: NormSpike | None) -> list[str]:
    """After how many repetitions a token becomes a sink."""
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
    return sentences + left_out_line([token.token for token in needed.at_once], norm)


def repetition(each: RepetitionSpike, names: str) -> str:
    """Which other neurons repetition goes through.

    Args:
        each: The spike of a repeated token.
        names: The neurons that make the model's spike.
    """
    share = f"{each.drop:.1%}".replace("-0.0%", "0.0%")
    lost = f"without {names}, {share} of the norm of the repeated token {each.token!r} is lost"
    if each.set is None:
        return f"Repetition goes another way: {lost}."
    return (
        f"Repetition trips other neurons: {lost}, and without {each.set.names}, {each.set.drop_sink_layer:.1%} "
        f"(random neurons at most {each.set.control:.1%})."
    )
