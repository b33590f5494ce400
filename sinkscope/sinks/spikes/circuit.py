"""`circuit`: all steps of `steps`, as a result."""

from __future__ import annotations

from sinkscope.measure import Natural, Setup
from sinkscope.sinks.spikes.find_sinks import fields_of
from sinkscope.sinks.spikes.result import Circuit
from sinkscope.sinks.spikes.steps import sinks_of, with_copies, with_marks
from sinkscope.sinks.tokens import repetition_limit


def circuit(setup: Setup, *, token: str | None = None, max_repeats: Natural | None = None) -> Circuit:
    """Trace the circuit of each sink from what marks its place to the heads that read it."""
    limit = repetition_limit(setup.target, max_repeats)
    sinks = with_copies(setup, with_marks(sinks_of(setup)), None if token is None else [token], limit)
    return Circuit(**fields_of(setup, sinks))
