"""Checks of how a cache is used: with room for everything, and again with half of the prompt."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import Cache

from sinkscope.conformance.flow import Flow, Logits, Outcome, right_logits
from sinkscope.conformance.kit import SEEN, ApartError, FaultError, Kit, check
from sinkscope.conformance.models import WINDOW
from sinkscope.conformance.subject import parameters

LONG = Flow(lengths=(600,))
_LONG = 2 * WINDOW + 8
_ROUGHER = 1.5  # times the rounding of the stock model


@check
def the_cache_knows_its_length(kit: Kit) -> str:
    """`get_seq_length` counts all tokens read, evicted or not: a model that is told no positions asks for it."""
    if not kit.knows_length:
        raise ApartError("a stock cache holds the keys: give position_ids, as generate does")
    flows = [Flow(steps=2)]
    if isinstance(kit.subject(), Cache):  # a policy acts on generated tokens
        flows.insert(0, Flow(steps=0))
    known = 0
    for flow in kit.flows(*flows):
        try:
            lengths = kit.outcome(flow).lengths
        except (ApartError, FaultError):  # what raises is no question of lengths
            continue
        right = list(range(flow.prompt, flow.prompt + flow.steps + 1))
        if lengths != right:
            expected = f"lengths of {right} after the prompt and each token"
            raise FaultError(expected, str(lengths), flow, "outcome.lengths")
        known += len(right)
    if not known:
        raise ApartError("it raises an error whenever it is read")
    return f"right after {known} calls"


@check
def with_room_for_everything_logits_are_the_plain_models(kit: Kit) -> str:
    """A cache that need not evict changes nothing."""
    return kit.right(Flow(lengths=(6,), steps=2), Flow(), Flow(model="bundled", lengths=(48,)), budget=False)


@check
def a_text_of_hundreds_of_tokens_is_kept(kit: Kit) -> str:
    """What a cache does to a short text it does to a long one."""
    return kit.right(LONG, budget=False)


@check
def a_prompt_in_chunks_is_the_whole_prompt(kit: Kit) -> str:
    """Chunks may be longer or shorter than a window."""
    return kit.right(
        Flow(chunks=(7, 17)),
        Flow(model="windows", lengths=(_LONG,), chunks=(WINDOW + 4, WINDOW + 4)),
        Flow(model="sinks", lengths=(_LONG,), chunks=(10, 20, 10)),
    )


@check
def padded_rows_are_what_they_are_alone(kit: Kit) -> str:
    """Padding changes neither logits nor what is kept."""
    return alone(kit, Flow(lengths=(24, 17), steps=2), Flow(lengths=(24, 9)))


@check
def rows_of_a_batch_do_not_mix(kit: Kit) -> str:
    """Each row has the logits that it has alone."""
    return alone(kit, Flow(lengths=(24, 24), steps=2), Flow(lengths=(24, 24, 24)))


def alone(kit: Kit, *flows: Flow) -> str:
    """Whether rows give the right logits, and those that each has alone under the same budget; no check of its own."""
    error = kit.right(*flows)
    if not kit.evicts:
        return error
    share = "share" in parameters(kit.factory)
    for flow in flows:
        flow = replace(flow, budget=flow.prompt // 2 if share else 8)
        together = kit.outcome(flow)
        for row, length in enumerate(flow.lengths):
            own = kit.outcome(replace(flow, lengths=(length,), seed=row, budget=length // 2 if share else 8))
            seen, expected = _tokens(together, row, flow.prompt), _tokens(own, 0, length)
            if seen < expected:
                what = f"row {row} sees {expected} tokens of all layers and kv heads, as it does alone"
                raise FaultError(what, f"it sees {seen}", flow, SEEN)
            if not share:
                kit.close(
                    together.logits[row : row + 1], own.logits, flow, f"in row {row}, the logits that it has alone"
                )
    return error


def _tokens(outcome: Outcome, row: int, column: int) -> int:
    """Tokens that the query of a row at a column sees in all layers and kv heads together."""
    return sum(int(sees[row, :, column].sum()) for sees in outcome.sees.values())


@check
def a_second_turn_continues_the_first(kit: Kit) -> str:
    """Several tokens that follow generated ones see what was said before."""
    return kit.right(Flow(turn=6, steps=2), Flow(model="windows", lengths=(_LONG,), turn=6))


@check
def after_a_reset_nothing_is_left(kit: Kit) -> str:
    """A cache that was reset is like a new one."""
    return kit.right(Flow(reset=True), Flow(model="windows", lengths=(_LONG,), reset=True))


@check
def rows_change_places_as_beams_do(kit: Kit) -> str:
    """After `reorder_cache`, a row goes on with the tokens of another, in all layers."""
    return kit.right(Flow(lengths=(24, 24), order=(1, 1)), Flow(lengths=(17, 17, 17), order=(2, 0, 0)))


@check
def a_cropped_draft_leaves_no_trace(kit: Kit) -> str:
    """Tokens that were read and rejected are gone after `crop(-n)`."""
    return kit.right(Flow(rejected=1), Flow(rejected=3))


@check
def learned_sink_logits_count(kit: Kit) -> str:
    """The softmax has the learned logit of each head in its sum."""
    return kit.right(Flow(model="sinks", lengths=(8,), steps=2), Flow(model="sinks", lengths=(_LONG,)))


@check
def windows_hide_what_has_left_them_and_nothing_else(kit: Kit) -> str:
    """A window is crossed inside the prompt, and while tokens are generated."""
    return kit.right(
        Flow(model="windows", lengths=(WINDOW - 2,), steps=6), Flow(model="windows", lengths=(_LONG,), steps=4)
    )


@check
def states_of_a_hybrid_are_kept(kit: Kit) -> str:
    """Layers without attention keep their state beside the keys and values of the others."""
    return kit.right(Flow(model="hybrid"))


@check
def half_precision_is_as_exact_as_the_plain_model(kit: Kit) -> str:
    """The error of bfloat16 and float16 against the same pass in float32 is that of the plain model in this type."""
    ratio = 0.0
    for flow in (
        Flow(dtype="bfloat16", lengths=(24, 24)),
        Flow(dtype="float16", lengths=(24, 24)),
        Flow(dtype="bfloat16", model="bundled", lengths=(48,)),
        Flow(dtype="float16", model="bundled", lengths=(48,)),
    ):
        outcome = kit.outcome(flow)
        exact = right_logits(replace(flow, dtype="float32"))
        stock = _spread(right_logits(flow), exact)
        own = _spread(outcome.logits, exact)
        ratio = max(ratio, own / stock)
        if not own <= _ROUGHER * stock + kit.tolerance * float(exact.std()):
            expected = f"at most {_ROUGHER:g} times the plain model's own error in {flow.dtype}"
            raise FaultError(expected, f"{own / stock:.2g} times", flow)
    return f"{ratio:.2g} times the plain model's own error"


def _spread(rough: Logits, exact: Logits) -> float:
    return float((rough.float() - exact).square().mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny))
