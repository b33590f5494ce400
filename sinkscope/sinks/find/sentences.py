"""What `find_sinks` and `circuit` say beside their claims: where spikes and sinks are, and what was left over."""

from __future__ import annotations

from collections.abc import Sequence

from sinkscope.results.claims import without_example
from sinkscope.results.notation import count_of, word_form, word_list
from sinkscope.sinks.find.places import Place
from sinkscope.sinks.find.records import RepeatsNeeded, Sink, Spike

NOTHING = "nothing that was removed takes it away"


def sink_fact(sink: Sink, *, brief: bool = False) -> str:
    """How many heads attend to a place, in which texts, and for how many of them nothing was found that they need."""
    if sink.place is None:
        return (
            f"{sink.readers} of {sink.n_heads} heads give {sink.attention:.0%} of their attention to learned sink "
            "logits, which stand in for a token."
        )
    attend = word_form(sink.readers, "attends", "attend")
    place = without_example(sink.words) if brief else sink.words
    said = f"{sink.readers} of {sink.n_heads} heads {attend} to {place}{when(sink.place)}"
    for group in sink.groups:
        if group.claim is None:
            some = "" if len(sink.groups) == 1 else f"for {len(group.heads)}, "
            said += f"; {some}{NOTHING}" if brief else f"; {some}{NOTHING} ({group.search})"
    return f"{said}."


def when(place: Place) -> str:
    """In which texts heads attend to a first token, if not in all; as part of a sentence."""
    if place.share < 1 and place.is_first:
        return f" in {place.share:.0%} of texts"
    return ""


def spike_fact(spike: Spike) -> str:
    """Where a spike is and how high, beside ordinary positions; and what was searched if nothing makes it."""
    said = (
        f"After {layers_in_words(spike.layers)} the norm at {spike.place.words} is up to {spike.ratio:.0f} times the "
        f"typical one (elsewhere {spike.usual:.1f})"
    )
    return f"{said}." if spike.search is None else f"{said}; {NOTHING} ({spike.search})."


def layers_in_words(runs: Sequence[tuple[int, int]]) -> str:
    """Runs of layers, each given by its first and its last one."""
    return word_list([f"layer {first}" if first == last else f"layers {first} to {last}" for first, last in runs])


def repeats(needed: RepeatsNeeded, place: str) -> list[str]:
    """After how many repetitions tokens reach half of the norm at a place, and how many do."""
    if not needed.tokens:
        return []
    reached = sum(token.by_repetition for token in needed.tokens)
    most, every = count_of(needed.max_repeats, "repetition"), count_of(len(needed.tokens), "token")
    said = f"Up to {most} bring {reached} of {every} to half of the norm at {place} at the sink layer"
    if needed.median is not None:
        said += f" (median: {needed.median:g})"
    return [f"{said}."]
