"""The checks, from simple to complex: a fault of one may let later ones fail, but not earlier ones.

With room for everything a cache changes nothing; with half of the prompt or a third, it loses only what it evicts.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from sinkscope.conformance.flow import Flow, right_logits
from sinkscope.conformance.kit import ROTATED, SEEN, ApartError, Check, FaultError, Kit
from sinkscope.conformance.models import QUESTIONS, WINDOW, kit_model
from sinkscope.conformance.recorder import CacheRecorder, Logits
from sinkscope.conformance.subject import parameters

CHECKS: dict[str, Check] = {}
"""All checks by name, in their order."""
OF_A_BUDGET: dict[str, Check] = {}
"""Those that only use caches which evict."""
LONG_FLOW = Flow(lengths=(600,))
_LONG = 2 * WINDOW + 8
_LARGER = 2.0  # times the budget: what rows and heads that are padded to the longest may take
_LOSS = 0.1  # nats
_BEYOND = 4.0  # times the control


def check(function: Check) -> Check:
    """Register a check; its name says the behaviour."""
    CHECKS[function.__name__] = function
    return function


def check_of_a_budget(function: Check) -> Check:
    """Register a check of what a cache keeps."""
    OF_A_BUDGET[function.__name__] = function
    return check(function)


def _tight(kit: Kit, flow: Flow) -> Flow:
    return kit.evicting(flow, flow.prompt // 3)


@check
def the_cache_knows_its_length(kit: Kit) -> str:
    """`get_seq_length` counts all tokens read, evicted or not: a model that is told no positions asks for it."""
    if not kit.knows_length:
        raise ApartError("a stock cache holds the keys: give position_ids, as generate does")
    known = 0
    for flow, outcome in kit.outcomes(*kit.flows(Flow(steps=1), Flow(steps=2))):
        right = list(range(flow.prompt, flow.prompt + flow.steps + 1))
        if outcome.lengths != right:
            expected = f"lengths of {right} after the prompt and each token"
            raise FaultError(expected, str(outcome.lengths), flow, "outcome.lengths")
        known += len(right)
    return f"right after {known} calls"


@check
def with_room_for_everything_logits_are_those_of_the_plain_model(kit: Kit) -> str:
    """A cache that need not evict changes nothing, in a short text or a long one."""
    return kit.right(Flow(lengths=(6,), steps=2), Flow(), LONG_FLOW, budget=False)


@check_of_a_budget
def positions_are_right_after_eviction_inside_the_text(kit: Kit) -> str:
    """Tokens on both sides of a hole are as far from new ones as they were."""
    flow = _tight(kit, Flow(steps=6))
    outcome = kit.outcome(flow)
    if outcome.rotated_again:
        raise ApartError(ROTATED)
    return f"an error of {kit.close(outcome.logits, right_logits(flow, outcome.sees), flow):.1g}"


@check_of_a_budget
def facts_on_both_sides_of_a_hole_are_recalled(kit: Kit) -> str:
    """The recall model answers from facts that were kept, as it does if a mask hides the others."""
    asked = 0
    for seed in range(len(QUESTIONS)):
        flow = kit.evicting(Flow(model="recall", lengths=(65,), steps=3, seed=seed), 32)
        outcome = kit.outcome(flow)
        answer = flow.tokens()[0][:, flow.prompt + 1 :]
        if not torch.equal(_said(right_logits(flow, outcome.sees)), answer):
            continue  # not enough was kept
        asked += 1
        if not torch.equal(_said(outcome.logits), answer):
            expected = "the answer that stands in what was kept"
            raise FaultError(expected, "another answer", flow, "outcome.logits.argmax(-1)")
    if not asked:
        raise ApartError(f"of {len(QUESTIONS)} facts none was kept")
    return f"{asked} of {len(QUESTIONS)} are kept, all right"


def _said(logits: Logits) -> Tensor:
    """What is answered after the first token of the answer."""
    return logits[:, 1:-1].argmax(-1)


@check_of_a_budget
def the_first_tokens_survive(kit: Kit) -> str:
    """The model loses nothing that the first token alone would give back."""
    loss = 0.0
    flows: list[Flow] = []
    for flow in (
        Flow(steps=6),
        Flow(chunks=(12, 12), steps=6),
        Flow(lengths=(16,), steps=24),
        LONG_FLOW,
    ):
        with suppress(ApartError):
            flows.append(kit.evicting(flow, flow.prompt // 2))
    for flow, outcome in kit.outcomes(*flows):
        own, control = _given_back(flow, outcome, 0), 0.0
        for column in range(3, flow.prompt - 1, flow.prompt // 5):
            control = max(control, _given_back(flow, outcome, column))
        loss = max(loss, own)
        if own > _LOSS and own > _BEYOND * control:
            expected = f"seeing the first token again spares the model less than {_LOSS} nats"
            seen = f"it spares {own:.2g} nats; any of five other tokens at most {max(control, 0):.2g}"
            raise FaultError(expected, seen, flow, "[sees[..., 0] for sees in outcome.sees.values()]")
    return f"{loss:.2g} nats"


def _given_back(flow: Flow, outcome: CacheRecorder, column: int) -> float:
    """The loss in nats that would be spared if all queries after the prompt saw a column."""
    whole = right_logits(flow)
    sees: dict[int, Tensor] = {}
    for layer, seen in outcome.sees.items():
        sees[layer] = seen.clone()
        sees[layer][:, :, flow.prompt :, column] = True
    return _loss(outcome.logits, whole) - _loss(right_logits(flow, sees), whole)


def _loss(logits: Logits, whole: Logits) -> float:
    """KL divergence from the logits of the whole text, in nats, on average over steps."""
    right = whole[:, 1:].log_softmax(-1)
    return float((right.exp() * (right - logits[:, 1:].log_softmax(-1))).sum(-1).mean())


@check_of_a_budget
def the_budget_holds_at_every_step_in_tokens(kit: Kit) -> str:
    """A step reads at most the budget and its own token, on average over layers and kv heads."""
    most = 0.0
    for flow in (Flow(steps=4), Flow(lengths=(48,), steps=6), Flow(turn=6)):
        flow = _tight(kit, flow)
        outcome = kit.outcome(flow)
        assert flow.budget is not None
        for step, column in enumerate(range(flow.prompt, flow.prompt + flow.steps)):
            tokens = float(_tokens(outcome, column).mean())
            allowed = flow.budget + 1 + (step if kit.grows else 0)
            most = max(most, tokens)
            if tokens > allowed:
                expected = f"step {step + 1} reads at most {allowed} tokens"
                raise FaultError(expected, f"it reads {tokens:g} of {column + 1}", flow, SEEN)
    return f"at most {most:g} tokens"


def _tokens(outcome: CacheRecorder, column: int) -> Tensor:
    """Tokens that the query of each row at a column sees, on average over layers and kv heads."""
    return torch.stack([sees[:, :, column].sum(-1).float().mean(1) for sees in outcome.sees.values()]).mean(0)


@check_of_a_budget
def the_budget_holds_at_every_step_in_bytes(kit: Kit) -> str:
    """What is evicted is freed: no view keeps it alive, and nothing else holds it."""
    flow = kit.evicting(Flow(lengths=(96,), steps=4), 16)
    outcome = kit.outcome(flow)
    assert flow.budget is not None
    config = kit_model(flow.model).config
    token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    most = max(outcome.bytes[1:])
    allowed = int(_LARGER * (flow.budget + flow.steps) * token)
    if most > allowed:
        expected = f"at most {allowed} bytes, {_LARGER:g} times those of the budget and the generated tokens"
        seen = f"{most} bytes; everything would be {(flow.prompt + flow.steps) * token}"
        raise FaultError(expected, seen, flow, "outcome.bytes")
    return f"at most {most} bytes"


@check
def windows_hide_what_has_left_them_and_nothing_else(kit: Kit) -> str:
    """A window is crossed inside the prompt, and while tokens are generated."""
    return kit.right(
        Flow(model="windows", lengths=(WINDOW - 2,), steps=6), Flow(model="windows", lengths=(_LONG,), steps=4)
    )


@check
def learned_sink_logits_count(kit: Kit) -> str:
    """The softmax has the learned logit of each head in its sum."""
    return kit.right(Flow(model="sinks", lengths=(8,), steps=2), Flow(model="sinks", lengths=(_LONG,)))


@check
def states_of_a_hybrid_are_kept(kit: Kit) -> str:
    """Layers without attention keep their state beside the keys and values of the others."""
    return kit.right(Flow(model="hybrid"), Flow(model="recurrent"))


@check
def a_prompt_in_chunks_is_the_whole_prompt(kit: Kit) -> str:
    """Chunks may be longer or shorter than a window."""
    return kit.right(
        Flow(chunks=(7, 17)),
        Flow(model="windows", lengths=(_LONG,), chunks=(WINDOW + 4, WINDOW + 4)),
        Flow(model="sinks", lengths=(_LONG,), chunks=(10, 20, 10)),
    )


@check
def a_second_turn_continues_the_first(kit: Kit) -> str:
    """Several tokens that follow generated ones see what was said before."""
    return kit.right(Flow(turn=6, steps=2), Flow(model="windows", lengths=(_LONG,), turn=6))


@check
def after_a_reset_nothing_is_left(kit: Kit) -> str:
    """A cache that was reset is like a new one."""
    return kit.right(Flow(reset=True), Flow(model="windows", lengths=(_LONG,), reset=True))


@check
def rows_of_a_batch_are_what_they_are_alone(kit: Kit) -> str:
    """Each row has the logits that it has alone, and padding changes neither them nor what is kept."""
    flows = (
        Flow(lengths=(24, 24), steps=2),
        Flow(lengths=(24, 24, 24)),
        Flow(lengths=(24, 17), steps=2),
        Flow(lengths=(24, 9)),
    )
    error = kit.right(*flows)
    if not kit.evicts:
        return error
    share = "share" in parameters(kit.factory)
    for flow in flows:
        try:
            flow = kit.evicting(flow, flow.prompt // 2 if share else 8)
        except ApartError:
            continue
        assert flow.budget is not None
        together = kit.outcome(flow)
        for row, length in enumerate(flow.lengths):
            tokens = max(1, flow.budget * length // flow.prompt) if share else flow.budget
            own = kit.outcome(replace(flow, lengths=(length,), seed=row, budget=tokens))
            seen, expected = float(_tokens(together, flow.prompt)[row]), float(_tokens(own, length)[0])
            if seen < expected:
                raise FaultError(f"row {row} sees {expected:g} tokens, as it does alone", f"{seen:g}", flow, SEEN)
            if not share:
                kit.close(
                    together.logits[row : row + 1], own.logits, flow, f"in row {row}, the logits that it has alone"
                )
    return error


@check
def a_cropped_draft_leaves_no_trace(kit: Kit) -> str:
    """Tokens that were read and rejected are gone after `crop(-n)`."""
    return kit.right(Flow(rejected=1), Flow(rejected=3))


@check
def a_cropped_draft_leaves_no_trace_in_states(kit: Kit) -> str:
    """The state of a layer without attention goes back as well, or `crop` refuses: a sum cannot be cut."""
    return kit.right(
        Flow(model="hybrid", rejected=1), Flow(model="recurrent", rejected=1), Flow(model="recurrent", rejected=3)
    )


@check
def half_precision_is_as_exact_as_the_plain_model(kit: Kit) -> str:
    """In bfloat16 and float16, the logits are those of the plain model in this type, but for its rounding."""
    return kit.right(Flow(dtype="bfloat16", lengths=(24, 24)), Flow(dtype="float16", lengths=(24, 24)), budget=False)
