"""`circuit`: all steps of `steps`, as a result."""

from __future__ import annotations

from collections.abc import Sequence

from sinkscope.measure import Natural, Setup, measurement
from sinkscope.sinks.spikes.figure import draw_circuit
from sinkscope.sinks.spikes.find_sinks import fields_of
from sinkscope.sinks.spikes.result import Circuit
from sinkscope.sinks.spikes.steps import sinks_of, with_marks
from sinkscope.sinks.tokens import repetition_limit


@measurement(
    loading="fits",
    figure=draw_circuit,
)
def circuit(setup: Setup, *, tokens: Sequence[str] | None = None, max_repeats: Natural | None = None) -> Circuit:
    """Trace the circuit of each sink from what marks its place to the heads that read it, and to copies of a token.

    The steps are those of `sinkscope.sinks.spikes.steps`. Components and heads are replaced at the place by what they
    write on average at ordinary positions.

    Args:
        tokens: Words to repeat, one token each. By default five words of the text, drawn by the seed.
        max_repeats: Largest number of copies. By default 1,024, or what the context holds.
    """
    limit = repetition_limit(setup.target, max_repeats)
    sinks = with_marks(setup, sinks_of(setup))
    return Circuit(**fields_of(setup, sinks, tokens, limit))
