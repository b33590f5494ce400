"""The measurement `why_sink`: everything that `find_sinks` measures, what makes the sink, and what it is for."""

from __future__ import annotations

from typing import Literal

from sinkscope.measure import Setup, measurement
from sinkscope.sinks.first_tokens import heads_that_mark
from sinkscope.sinks.spikes.find import ALL_PARTS, fields_of
from sinkscope.sinks.spikes.result import WhySink


@measurement(loading="fits")
def why_sink(setup: Setup, *, only: Literal["conditions", "purpose"] | None = None) -> WhySink:
    """Ask what makes a position the sink, and what it is for; then trace its circuit to the heads that read it.

    An ordinary position gets the place's token, sees only itself, or has its position id; each is taken away at the
    place. The place is hidden from later tokens, or they read another value from it. Then components and heads are
    replaced at the place by what they write on average at ordinary positions, and heads also at many tokens that are
    put first, each alone.

    Args:
        only: Ask one of both questions alone: "conditions" (what makes the place, and why heads read
            it) or "purpose" (what it is for).
    """
    parts = ALL_PARTS if only is None else frozenset({only})
    marking = heads_that_mark(setup) if only is None else ()
    return WhySink(marking=marking, **fields_of(setup, parts))
