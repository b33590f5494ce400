"""The circuit of a sink, step by step:

1. Survey: one pass over typical text.
2. Spikes: places, directions and runs of layers in which the residual stream stands out.
3. Writers: what each component and neuron adds along a spike's direction.
4. Needs: the smallest set that the spike needs; what is left of it, of the heads that attend to it, and of the loss
   without all its writers.
5. Marks: what makes the writers fire at the place.
6. Copies: how far copies of a token go along each spike's direction.
7. BOS: the survey once more with the other choice.

`find_sinks` takes all but the marks, and few copies; `circuit` takes all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sinkscope.measure import Setup
from sinkscope.sinks.spikes.copies import copies_of
from sinkscope.sinks.spikes.find import find_spikes
from sinkscope.sinks.spikes.marks import marks_of
from sinkscope.sinks.spikes.needs import needs_of, same_needs
from sinkscope.sinks.spikes.records import SpikeResult, words_of
from sinkscope.sinks.spikes.spike import Measured, Spike
from sinkscope.sinks.spikes.survey import Survey, survey_of
from sinkscope.sinks.spikes.writers import neurons_of, writers_of
from sinkscope.sinks.tokens import pick_tokens, prefix_of

NO_FIRST_SPIKE = "No neurons are known that a norm spike at the first token needs"


@dataclass(frozen=True, eq=False)
class Sinks:
    """What the steps measured.

    Attributes:
        survey: The survey.
        spikes: The spikes, each with what was measured of it; those that most heads read come first.
    """

    survey: Survey
    spikes: tuple[Measured, ...]

    @property
    def at_first(self) -> tuple[Measured, ...]:
        """The spikes of the first token."""
        return tuple(one for one in self.spikes if one.spike.place.is_first)


def sinks_of(setup: Setup) -> Sinks:
    """Steps 1 to 4; they are taken once for a setup, whatever asks for them."""
    return setup.once((sinks_of, setup.seed), lambda: _steps(setup))


def _steps(setup: Setup) -> Sinks:
    survey = survey_of(setup, setup.bos)
    spikes = find_spikes(survey, setup.tokenizer)
    measured: list[Measured] = []
    for spike in spikes:
        one = with_writers(survey, spike)
        same = (same_needs(one, other, number, setup.seed) for number, other in enumerate(measured))
        measured.append(next(filter(None, same), None) or needs_of(one, setup.seed))
        setup.progress("spikes", len(measured), len(spikes))
    order = sorted(
        range(len(measured)),  # those that are others again come last
        key=lambda number: (measured[number].result.like is not None, -measured[number].result.heads),
    )
    ordered: list[Measured] = []
    for number in order:
        one, like = measured[number], measured[number].result.like
        ordered.append(one if like is None else one.adding(like=order.index(like)))
    return Sinks(survey, tuple(ordered))


def with_writers(survey: Survey, spike: Spike) -> Measured:
    """Step 3: a spike, with what writes and erases it."""
    writers, erasers = writers_of(survey, spike)
    neurons, written = neurons_of(survey, spike, writers)
    result = SpikeResult(
        place=words_of(spike.place),
        layers=(spike.first, spike.last),
        peak=spike.peak,
        norm=spike.norm,
        before=spike.before,
        ratio=spike.ratio,
        ratio_layer=spike.ratio_layer,
        ratio_margin=spike.ratio_margin,
        ratio_beside=spike.ratio_beside,
        dims=spike.dims,
        writers=writers,
        neurons=neurons,
        erasers=erasers,
    )
    return Measured(spike, survey, result, written)


def with_marks(setup: Setup, sinks: Sinks) -> Sinks:
    """Step 5."""
    return replace(sinks, spikes=tuple(one.adding(marks=marks_of(one, setup.seed)) for one in sinks.spikes))


def with_copies(setup: Setup, sinks: Sinks, tokens: Sequence[str] | None, limit: int) -> Sinks:
    """Step 6, for the spikes of the first token."""
    words = pick_tokens(setup, tokens)
    firsts = [one.spike for one in sinks.at_first]
    each = iter(copies_of(setup.target, firsts, words, prefix_of(setup, words), limit, setup.progress))
    spikes = [one.adding(copies=next(each)) if one.spike.place.is_first else one for one in sinks.spikes]
    return replace(sinks, spikes=tuple(spikes))
