"""Whether a cache can be used at all, leaves nothing behind, and changes nothing where it has room."""

from __future__ import annotations

from sinkscope.conformance.checks.registry import check
from sinkscope.conformance.flow import BrokenUseError, Flow, outcome_of
from sinkscope.conformance.kit import LONG, ApartError, FaultError, Kit
from sinkscope.conformance.models import forget_models, kit_model
from sinkscope.conformance.traces import ModelState, seeds_random_numbers

LONG_FLOW = Flow(lengths=(LONG,))


@check
def no_call_raises_an_error(kit: Kit) -> str:
    """A prompt and tokens after it are read. NotImplementedError is a refusal, and no error."""
    calls = 0
    for flow in kit.flows(Flow(), Flow(lengths=(40,), acts=(("step", 6),))):
        try:
            calls += len(kit.outcome(flow).lengths)
        except FaultError as error:
            if not error.misplaced:  # else another check says so
                raise
    if not calls:
        raise ApartError("the check of positions says why it cannot be used")
    return f"none in {calls} calls"


@check
def nothing_is_left_on_the_model(kit: Kit) -> str:
    """Hooks, attributes, weights and the attention are as they were, and torch's random numbers are the caller's."""
    flow = kit.flows(Flow())[-1]
    kit.outcome(flow)  # what is refused or raises is said
    model = kit_model(flow.model)
    before = ModelState.of(model)

    def use() -> None:
        try:
            outcome_of(kit.factory, flow)
        except BrokenUseError:
            return

    seeded = seeds_random_numbers(use)
    left = ModelState.of(model).left(before)
    forget_models()
    if left:
        raise FaultError("the model is as it was", f"{left} changed and stayed so", flow)
    if seeded:
        raise FaultError("the caller's random numbers go on", "torch was given a seed: use a generator", flow)
    return "the model is as it was"


@check
def the_cache_knows_its_length(kit: Kit) -> str:
    """`get_seq_length` counts all tokens read, evicted or not: a model that is told no positions asks for it."""
    if not kit.knows_length:
        raise ApartError("a stock cache holds the keys: give position_ids, as generate does")
    known = 0
    flows = kit.flows(Flow(acts=(("step", 1),)), Flow(acts=(("step", 2), ("read", 5), ("step", 1))))
    for flow, outcome in kit.outcomes(*flows):
        told, right = zip(*outcome.lengths, strict=True)
        if told != right:
            expected = f"lengths of {list(right)} after each call"
            raise FaultError(expected, str(list(told)), flow, "outcome.lengths")
        known += len(right)
    return f"right after {known} calls"


@check
def with_room_for_everything_logits_are_those_of_the_plain_model(kit: Kit) -> str:
    """A cache that need not evict changes nothing, in a short text or a long one."""
    flows = Flow(lengths=(6,), acts=(("step", 2),)), Flow(), LONG_FLOW
    if kit.own_budget is not None:
        flows = tuple(flow for flow in flows if flow.prompt + 3 < kit.own_budget)
        if not flows:
            raise ApartError(f"it keeps {kit.own_budget} tokens by itself, and all texts are longer")
    return kit.right(*flows, budget=False)
