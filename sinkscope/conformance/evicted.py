"""Checks of what a cache loses when it keeps only a part."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sinkscope.conformance.flow import Flow, Logits, Outcome, right_logits
from sinkscope.conformance.kit import ROTATED, SEEN, ApartError, FaultError, Kit, check
from sinkscope.conformance.models import QUESTIONS, kit_model
from sinkscope.conformance.whole import LONG

_LARGER = 2.0  # times the budget: what rows and heads that are padded to the longest may take
_LOSS = 0.1  # nats
_BEYOND = 4.0  # times the control


def _tight(flow: Flow) -> Flow:
    return replace(flow, budget=flow.prompt // 3)


@check
def the_budget_holds_at_every_step_in_tokens(kit: Kit) -> str:
    """A step reads at most the budget and its own token, on average over layers and kv heads."""
    most = 0.0
    for flow in (_tight(Flow(steps=4)), _tight(Flow(lengths=(48,), steps=6)), _tight(Flow(turn=6))):
        outcome = kit.outcome(flow)
        assert flow.budget is not None
        for step, column in enumerate(range(flow.prompt, flow.prompt + flow.steps)):
            tokens = _tokens(outcome, column)
            allowed = flow.budget + 1 + (step if kit.grows else 0)
            most = max(most, tokens)
            if tokens > allowed:
                expected = f"step {step + 1} reads at most {allowed} tokens"
                raise FaultError(expected, f"it reads {tokens:g} of {column + 1}", flow, SEEN)
    return f"at most {most:g} tokens"


def _tokens(outcome: Outcome, column: int) -> float:
    """Tokens that the query at a column sees, on average over layers, kv heads and rows."""
    counts = [sees[:, :, column].sum(-1).float().mean() for sees in outcome.sees.values()]
    return float(torch.stack(counts).mean())


@check
def the_budget_holds_at_every_step_in_bytes(kit: Kit) -> str:
    """What is evicted is freed: no view keeps it alive, and nothing else holds it."""
    flow = replace(Flow(lengths=(96,), steps=4), budget=16)
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
def the_first_tokens_survive(kit: Kit) -> str:
    """The model loses nothing that the first token alone would give back."""
    loss: float | None = None
    refusal = ApartError()
    for flow in (
        Flow(steps=6),
        Flow(chunks=(12, 12), steps=6),
        Flow(lengths=(16,), steps=24),
        Flow(model="bundled", lengths=(48,), steps=8),
        LONG,
    ):
        flow = replace(flow, budget=flow.prompt // 2)
        try:
            outcome = kit.outcome(flow)
        except ApartError as error:
            refusal = error
            continue
        own, control = _given_back(flow, outcome, 0), 0.0
        for column in range(3, flow.prompt - 1, flow.prompt // 5):
            control = max(control, _given_back(flow, outcome, column))
        loss = max(loss or 0.0, own)
        if own > _LOSS and own > _BEYOND * control:
            expected = f"seeing the first token again spares the model less than {_LOSS} nats"
            seen = f"it spares {own:.2g} nats; any of five other tokens at most {max(control, 0):.2g}"
            raise FaultError(expected, seen, flow, "[sees[..., 0] for sees in outcome.sees.values()]")
    if loss is None:
        raise refusal
    return f"{loss:.2g} nats"


def _given_back(flow: Flow, outcome: Outcome, column: int) -> float:
    """The loss in nats that would be spared if all queries after the prompt saw a column."""
    whole = right_logits(flow)
    sees: dict[int, Tensor] = {}
    for layer, seen in outcome.sees.items():
        sees[layer] = seen.clone()
        sees[layer][:, :, flow.prompt :, column] = True
    more = right_logits(flow, replace(outcome, sees=sees))
    return _loss(outcome.logits, whole) - _loss(more, whole)


def _loss(logits: Logits, whole: Logits) -> float:
    """KL divergence from the logits of the whole text, in nats, on average over steps."""
    right = whole[:, 1:].log_softmax(-1)
    return float((right.exp() * (right - logits[:, 1:].log_softmax(-1))).sum(-1).mean())


@check
def positions_are_right_after_eviction_inside_the_text(kit: Kit) -> str:
    """Tokens on both sides of a hole are as far from new ones as they were."""
    worst = 0.0
    for flow in (_tight(Flow(steps=6)), _tight(Flow(model="bundled", lengths=(48,), steps=6))):
        outcome = kit.outcome(flow)
        if outcome.rotated_again:
            raise ApartError(ROTATED)
        worst = max(worst, kit.close(outcome.logits, right_logits(flow, outcome), flow))
    return f"an error of {worst:.1g}"


@check
def facts_on_both_sides_of_a_hole_are_recalled(kit: Kit) -> str:
    """The recall model answers from facts that were kept, as it does if a mask hides the others."""
    asked = 0
    for seed in range(QUESTIONS):
        flow = Flow(model="recall", lengths=(65,), steps=3, budget=32, seed=seed)
        outcome = kit.outcome(flow)
        answer = flow.tokens()[0][:, flow.prompt + 1 :]
        if not torch.equal(_said(right_logits(flow, outcome)), answer):
            continue  # not enough was kept
        asked += 1
        if not torch.equal(_said(outcome.logits), answer):
            expected = "the answer that stands in what was kept"
            raise FaultError(expected, "another answer", flow, "outcome.logits.argmax(-1)")
    if not asked:
        raise ApartError(f"of {QUESTIONS} facts none was kept")
    return f"{asked} of {QUESTIONS} are kept, all right"


def _said(logits: Logits) -> Tensor:
    """What is answered after the first token of the answer."""
    return logits[:, 1:-1].argmax(-1)


@check
def each_kv_head_reads_its_own_choice(kit: Kit) -> str:
    """Keys and values of a slot belong to one token, and each kv head has its own."""
    flow = _tight(Flow())
    outcome = kit.outcome(flow)
    heads = kit_model(flow.model).config.num_key_value_heads
    differ = 0 < len(outcome.mixed) < heads
    for sees in outcome.sees.values():
        differ = differ or not torch.equal(sees[:, 0, flow.prompt :], sees[:, 1, flow.prompt :])
    if not differ:
        raise ApartError("all kv heads keep the same tokens")
    if outcome.mixed:
        expected = "each key beside the values of its own token"
        raise FaultError(expected, "keys of other tokens", flow, "outcome.mixed")
    if outcome.rotated_again:
        raise ApartError(ROTATED)
    return kit.right(replace(flow, lengths=(24, 24)), budget=False)
