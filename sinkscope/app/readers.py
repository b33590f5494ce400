"""What happened to the heads that attend to the sink, between two cards, in words."""

from __future__ import annotations

from collections.abc import Mapping
from math import hypot

from sinkscope.results.notation import word_list
from sinkscope.results.result import Number
from sinkscope.sinks.find.result import READERS_ATTENTION, SHARE_OF_HEADS, SINK_PLACE

MOST_LAYERS = 6  # layers that a sentence names
Numbers = Mapping[str, Number]
"""The numbers of `find_sinks` on a card, by their labels."""


def moved(before: Number, after: Number, least: float = 0.0) -> bool | None:
    """Whether a number moved by more than both margins together; None if one of them has no margin.

    Args:
        before: The number on the other card.
        after: The number on this card.
        least: The least change, relative to the number before.
    """
    if before.margin is None or after.margin is None:
        return None
    one, other = float(before.value or 0.0), float(after.value or 0.0)
    return abs(other - one) > max(hypot(before.margin, after.margin), least * abs(one))


def readers_in_words(before: Numbers, after: Numbers) -> list[str]:
    """Whether the sink is gone, new or elsewhere, and whether fewer heads attend to it, or attend to it less.

    Nothing is said of what did not change by more than its margin.

    Args:
        before: The numbers of the other card.
        after: The numbers of this card.
    """
    if SINK_PLACE not in before or SINK_PLACE not in after:  # not measured, or by an earlier version
        return []
    was, now = before[SINK_PLACE].value, after[SINK_PLACE].value
    sentences: list[str] = []
    if was != now:
        sentences.append(f"Heads attended to {was} before, and they attend to {now} now.")
    for label in (SHARE_OF_HEADS, READERS_ATTENTION):
        if label in before and label in after and moved(before[label], after[label]):
            was, now = float(before[label].value or 0.0), float(after[label].value or 0.0)
            sentences.append(f"{_finding(label, was, now)}{_layers(before, after, label)}.")
    return sentences


def _finding(label: str, was: float, now: float) -> str:
    """How a number of the heads that attend to the sink changed."""
    if label == SHARE_OF_HEADS and now > was:
        return f"More heads attend to the sink: {was:.0%} before, {now:.0%} now"
    if label == SHARE_OF_HEADS:
        lost = 1 - now / was
        return f"{lost:.0%} of the heads that attended to the sink lost it: {was:.0%} before, {now:.0%} now"
    grew = "weaker" if now < was else "stronger"
    return f"The heads that attend to the sink got {grew}: {was:.2f} of their attention before, {now:.2f} now"


def _layers(before: Numbers, after: Numbers, label: str) -> str:
    """The layers in which a number changed, as the end of a sentence; empty if there is none."""
    layers: list[str] = []
    for name, number in before.items():
        if name.endswith(f": {label}") and (name not in after or moved(number, after[name])):
            layers.append(name.removesuffix(f": {label}").removeprefix("layer "))
    if not layers:
        return ""
    return f" (layers {word_list(layers, MOST_LAYERS)})"
