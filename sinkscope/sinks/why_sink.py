"""The measurement `why_sink`: everything that `find_sinks` measures, what makes the sink, and what it is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from sinkscope.measure import Natural, Setup, measurement
from sinkscope.sinks.marking_heads import heads_that_mark
from sinkscope.sinks.spikes.find import ALL_PARTS, fields_of
from sinkscope.sinks.spikes.result import WhySink
from sinkscope.sinks.tokens import repetition_limit


@measurement(loading="fits")
def why_sink(
    setup: Setup,
    *,
    tokens: Sequence[str] | None = None,
    max_repeats: Natural | None = None,
    only: Literal["conditions", "purpose"] | None = None,
) -> WhySink:
    """Ask what makes a position the sink, and what it is for; then trace its circuit to the heads that read it.

    An ordinary position gets the place's token, sees only itself, or has its position id; each is taken away at the
    place. The place is hidden from later tokens, or they read another value from it. Then components and heads are
    replaced at the place by what they write on average at ordinary positions, and heads also at many tokens that are
    put first, each alone.

    Args:
        tokens: Words to repeat, one token each. By default five words of the text, drawn by the seed.
        max_repeats: Largest number of copies. By default 1,024, or what the context holds.
        only: Ask one of both questions alone: "conditions" (what makes the place, and why heads read
            it) or "purpose" (what it is for).
    """
    parts = ALL_PARTS if only is None else frozenset({only})
    fields = fields_of(setup, tokens, repetition_limit(setup.target, max_repeats), parts)
    marking = heads_that_mark(setup) if only is None else None
    return WhySink(marking=marking, **fields)
