"""Prompts in chunks, later turns, and what goes back."""

from __future__ import annotations

from sinkscope.conformance.checks.parts import LONGER
from sinkscope.conformance.checks.registry import check
from sinkscope.conformance.flow import Act, Flow
from sinkscope.conformance.kit import Kit
from sinkscope.conformance.models import WINDOW

_TURN: tuple[Act, ...] = (("step", 2), ("read", 6), ("step", 2))
_RESET: tuple[Act, ...] = (("step", 1), ("reset",), ("read", 24), ("step", 3))


def _draft(tokens: int) -> tuple[Act, ...]:
    """A draft that is read after the first step, and rejected."""
    return ("step", 1), ("read", tokens), ("crop", tokens), ("step", 2)


@check
def a_prompt_in_chunks_is_the_whole_prompt(kit: Kit) -> str:
    """Chunks may be longer or shorter than a window."""
    return kit.right(
        Flow(chunks=(7, 17)),
        Flow(model="windows", lengths=(LONGER,), chunks=(WINDOW + 4, WINDOW + 4)),
        Flow(model="sinks", lengths=(LONGER,), chunks=(10, 20, 10)),
        Flow(model="hybrid", chunks=(1, 2, 21)),
    )


@check
def a_second_turn_continues_the_first(kit: Kit) -> str:
    """Several tokens that follow generated ones see what was said before."""
    return kit.right(Flow(acts=_TURN), Flow(model="windows", lengths=(LONGER,), acts=_TURN))


@check
def after_a_reset_nothing_is_left(kit: Kit) -> str:
    """A cache that was reset is like a new one."""
    windows = Flow(model="windows", lengths=(LONGER,), acts=(("step", 1), ("reset",), ("read", LONGER), ("step", 3)))
    return kit.right(Flow(acts=_RESET), windows, Flow(model="hybrid", acts=_RESET))


@check
def a_cropped_draft_leaves_no_trace(kit: Kit) -> str:
    """Tokens that were read and rejected are gone after `crop(-n)`, also when several go back behind a later turn."""
    later: tuple[Act, ...] = (("step", 2), ("read", 9), ("crop", 4), ("read", 2), ("step", 2))
    return kit.right(Flow(acts=_draft(1)), Flow(acts=_draft(3)), Flow(acts=later))


@check
def a_cropped_draft_leaves_no_trace_in_states(kit: Kit) -> str:
    """The state of a layer without attention goes back as well, or `crop` refuses: a sum cannot be cut."""
    return kit.right(
        Flow(model="hybrid", acts=_draft(1)),
        Flow(model="recurrent", acts=_draft(1)),
        Flow(model="recurrent", acts=_draft(3)),
        Flow(model="windows", lengths=(WINDOW - 6,), acts=_draft(3)),
        Flow(model="windows", lengths=(LONGER,), acts=_draft(3)),
    )
