"""The circuit of a sink, step by step, and the measurements `find_sinks` and `circuit`.

1. Survey: one pass over typical text reads norms and attention.
2. Spikes: places, directions and runs of layers in which the residual stream stands out.
3. Writers: what each component and neuron adds along a spike's direction, and which of them the spike needs.
4. Marks and readers: what makes the writers fire at the place, and which heads attend to it.

`find_sinks` leaves the marks out. Both also follow copies of a token along each spike of the first token, and survey
the text once more with the other choice of BOS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from sinkscope.measure import Natural, Setup, measurement
from sinkscope.measure.margin import margin_of
from sinkscope.models.text import beginning, resolve_bos
from sinkscope.sinks.spikes.copies import copies_of
from sinkscope.sinks.spikes.marks import marks_of
from sinkscope.sinks.spikes.needs import same_needs, with_needs
from sinkscope.sinks.spikes.places import at_position, split_by_label
from sinkscope.sinks.spikes.records import Attended, Largest, OtherBos, OtherSpike, Readers, SinkRate
from sinkscope.sinks.spikes.removal import count_readers
from sinkscope.sinks.spikes.result import Circuit, FindSinks
from sinkscope.sinks.spikes.spike import Spike, attended, find_spikes
from sinkscope.sinks.spikes.survey import Survey, survey_of
from sinkscope.sinks.spikes.writers import with_writers
from sinkscope.sinks.thresholds import READS, SINK_HEADS
from sinkscope.sinks.tokens import Mask, pick_tokens, prefix_of, repetition_limit

FEW_COPIES = 64  # copies that `find_sinks` tries
NO_FIRST_SPIKE = "No neurons are known that a norm spike at the first token needs"


@measurement(loading="fits")
def find_sinks(setup: Setup, *, tokens: Sequence[str] | None = None, max_repeats: Natural | None = None) -> FindSinks:
    """Find the norm spikes of a model, what writes them, what they need, and the heads that attend to their places.

    A spike is a place, a direction in the residual stream and a run of layers. Typical text is read once; what each
    component and neuron adds along the direction are shares of the spike. Then its writers are removed, one by one and
    together, beside random neurons of the same layers (Sun et al. 2024; Yona et al. 2025, section 4).

    Args:
        tokens: Words to repeat, one token each. By default five words of the text.
        max_repeats: Number of copies of each. By default 64, or what the
            context holds.
    """
    limit = repetition_limit(setup.target, max_repeats)
    if max_repeats is None:
        limit = min(FEW_COPIES, limit)
    return FindSinks(**fields_of(setup, sinks_of(setup), tokens, limit))


@measurement(loading="fits")
def circuit(setup: Setup, *, tokens: Sequence[str] | None = None, max_repeats: Natural | None = None) -> Circuit:
    """Trace the circuit of each sink from what marks its place to the heads that read it, and to copies of a token.

    The steps are those of `sinkscope.sinks.spikes.find`. Components and heads are replaced at the place by what they
    write on average at ordinary positions.

    Args:
        tokens: Words to repeat, one token each. By default five words of the text, drawn by the seed.
        max_repeats: Largest number of copies. By default 1,024, or what the context holds.
    """
    limit, sinks = repetition_limit(setup.target, max_repeats), sinks_of(setup)
    # Step 4: marks
    marked = tuple(spike.adding(marks=marks_of(spike, setup.seed)) for spike in sinks.spikes)
    return Circuit(**fields_of(setup, replace(sinks, spikes=marked), tokens, limit))


@dataclass(frozen=True, eq=False)
class Sinks:
    """The spikes of a model.

    Attributes:
        survey: The survey.
        spikes: The spikes, each with what was measured of it; most read first.
    """

    survey: Survey
    spikes: tuple[Spike, ...]

    @property
    def at_first(self) -> tuple[Spike, ...]:
        """The spikes of the first token."""
        return tuple(spike for spike in self.spikes if spike.place.is_first)


def sinks_of(setup: Setup) -> Sinks:
    """Take steps 1 to 3, once for each setup."""
    return setup.once((sinks_of, setup.seed), partial(_sinks_of, setup))


def _sinks_of(setup: Setup) -> Sinks:
    # Step 1: survey
    survey = survey_of(setup, setup.bos)
    # Step 2: spikes
    found = find_spikes(survey, setup.tokenizer)
    # Step 3: writers and what is needed of them; a spike with the writers of an earlier spike is like it
    spikes: list[Spike] = []
    for spike in map(with_writers, found):
        same = None
        for number, other in enumerate(spikes):
            same = same or same_needs(spike, other, number, setup.seed)
        spikes.append(same or with_needs(spike, setup.seed))
        setup.progress("spikes", len(spikes), len(found))
    ordered = sorted(spikes, key=lambda spike: (spike.result.like is not None, -spike.result.heads))  # duplicates last
    for number, spike in enumerate(ordered):
        if spike.result.like is not None:
            ordered[number] = spike.adding(like=ordered.index(spikes[spike.result.like]))
    return Sinks(survey, tuple(ordered))


def fields_of(setup: Setup, sinks: Sinks, tokens: Sequence[str] | None, limit: int) -> dict[str, Any]:
    """Read copies of some tokens, and who attends where, and return the fields of a result.

    Args:
        setup: The model and its text.
        sinks: The spikes.
        tokens: Words to repeat. None: words of the text.
        limit: Largest number of copies.
    """
    target, survey, spikes = setup.target, sinks.survey, list(sinks.spikes)
    words, at_first = pick_tokens(setup, tokens), sinks.at_first
    copies = copies_of(target, at_first, words, prefix_of(setup, words), limit, setup.progress)
    for spike, own in zip(at_first, copies, strict=True):
        spikes[sinks.spikes.index(spike)] = spike.adding(copies=own)
    setup.record(texts=len(survey.ids), max_repeats=limit)
    # Step 4: readers
    first = at_position(survey.ids, 0)
    heads: list[tuple[float | None, ...]] = []
    for layer, given in enumerate(survey.received(first).mean(-1)):
        heads.append(tuple(given.tolist()) if layer in target.attending else (None,) * target.n_heads)
    readers = readers_of(survey, "the first token", first)
    if spikes and spikes[0].result.heads:
        readers = readers_of(survey, spikes[0].result.place.words, spikes[0].place.mask)
    rate = survey.sink_rate
    return {
        "spikes": tuple(spike.result for spike in spikes),
        "readers": readers,
        "attended": attended_places(survey, spikes, setup.tokenizer),
        "learned_heads": int((survey.learned.mean(-1) > READS).sum()),
        "largest": largest_norm(survey, setup.tokenizer),
        "heads": tuple(heads),
        "bos": other_bos(setup),
        "sink_rate": SinkRate(READS, survey.ids.shape[1], len(rate), float(rate.mean()), margin_of(rate.numpy())),
        "typical_norm": tuple(survey.typical_norm),
        "first_token_norm": tuple(survey.first_norm),
        "layers_read": target.n_layers,
        "first_ids": tuple(beginning(setup.tokenizer, setup.bos)),
    }


def readers_of(survey: Survey, place: str, mask: Mask) -> Readers:
    """Return heads that attend to a place, in the texts that have it."""
    received = survey.received(mask)[survey.target.attending][:, :, mask.any(1)]
    heads, margin = count_readers(received)
    by_text = (received > READS).flatten(0, 1).sum(0).tolist()
    return Readers(place, heads, received[..., 0].numel(), margin, received.shape[2], tuple(by_text))


def attended_places(survey: Survey, spikes: Sequence[Spike], tokenizer: Any) -> tuple[Attended, ...]:
    """Return places that heads attend to and at which there is no spike."""
    there, layers = attended(survey), survey.target.attending
    for spike in spikes:
        there &= ~spike.place.mask
    found: list[Attended] = []
    for place in split_by_label(survey.ids, there, tokenizer.decode):
        heads = int((survey.received(place.mask).nanmean(-1)[layers] > READS).sum())
        if heads >= SINK_HEADS:
            found.append(Attended(place.label, heads))
    return tuple(sorted(found, key=lambda one: -one.heads))


def largest_norm(survey: Survey, tokenizer: Any) -> Largest:
    """Return the largest norm over the typical one that was seen anywhere."""
    ratios = survey.ratios
    layer, text, position = map(int, torch.unravel_index(ratios.argmax(), ratios.shape))
    token = tokenizer.decode([int(survey.ids[text, position])])
    return Largest(float(ratios.max()), token, position, layer)


def other_bos(setup: Setup) -> OtherBos | None:
    """Survey the text with the other choice of BOS; None if there is no BOS token."""
    bos = resolve_bos(setup.tokenizer, setup.target.config, None) if setup.bos is None else None
    if setup.bos is None and bos is None:
        return None
    survey, spikes = survey_of(setup, bos), list[OtherSpike]()
    for spike in find_spikes(survey, setup.tokenizer):
        spikes.append(OtherSpike(spike.place.label, spike.result.layers, spike.result.ratio))
    token = setup.tokenizer.decode([bos if bos is not None else setup.bos])
    received = readers_of(survey, "the first token", at_position(survey.ids, 0))
    return OtherBos(bos is not None, token, received.heads, received.margin, tuple(spikes))
