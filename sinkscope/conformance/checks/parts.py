"""Models with windows, learned sink logits and states."""

from __future__ import annotations

from sinkscope.conformance.checks.lengths import all_or
from sinkscope.conformance.checks.registry import check
from sinkscope.conformance.flow import Flow
from sinkscope.conformance.kit import Kit
from sinkscope.conformance.models import WINDOW

_NEAR = (WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 1)
LONGER = 2 * WINDOW + 8


@check
def windows_hide_what_has_left_them_and_nothing_else(kit: Kit) -> str:
    """A window is crossed inside the prompt, and while tokens are generated."""
    flows = [Flow(model="windows", lengths=(WINDOW - 2,), acts=(("step", 6),))]
    flows.append(Flow(model="windows", lengths=(LONGER,), acts=(("step", 4),)))
    seen = kit.right(*flows)
    several = [Flow(model="windows", lengths=(length,), acts=(("step", 2),)) for length in all_or(kit, _NEAR)]
    kit.right(*several, budget=False)
    return seen


@check
def learned_sink_logits_count(kit: Kit) -> str:
    """The softmax has the learned logit of each head in its sum."""
    return kit.right(Flow(model="sinks", lengths=(8,), acts=(("step", 2),)), Flow(model="sinks", lengths=(LONGER,)))


@check
def states_of_a_hybrid_are_kept(kit: Kit) -> str:
    """Layers without attention keep their state beside the keys and values of the others."""
    flows: list[Flow] = []
    for model in ("hybrid", "recurrent"):
        flows.append(Flow(model=model))
        for length in (1, 3, 65):
            flows.append(Flow(model=model, lengths=(length,), acts=(("step", 2),)))
    return kit.right(*flows)
