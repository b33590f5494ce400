"""What is kept, at which positions, and how much of it."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.conformance.checks.basics import LONG_FLOW
from sinkscope.conformance.checks.registry import check_of_a_budget
from sinkscope.conformance.flow import Flow, Outcome, Stretch, right_logits
from sinkscope.conformance.kit import ROTATED, SEEN, ApartError, FaultError, Kit
from sinkscope.conformance.models import QUESTION, QUESTIONS, kit_model

_LARGER = 2.0  # times the budget: what rows and heads that are padded to the longest may take
_LOSS = 0.1  # nats
_BEYOND = 4.0  # times the control
_STEPS = Flow(acts=(("step", 6),))
_TURN = Flow(acts=(("step", 3), ("read", 6), ("step", 3)))


@check_of_a_budget
def every_slot_has_the_position_of_its_token(kit: Kit) -> str:
    """Where layers have `pos`, as those of sinkscope, it is the position at which the token of a slot was read."""
    told = 0
    for times in (3, 2):
        flow = kit.evicting(_STEPS, times)
        try:
            outcome = kit.outcome(flow)
        except FaultError as error:
            if error.misplaced:
                error.expected, error.error = "as many positions as slots", ""
            raise
        if outcome.misplaced:
            raise FaultError("the position at which its token was read", outcome.misplaced, flow, "outcome.misplaced")
        told += outcome.placed
    if not told:
        raise ApartError("its layers do not say positions")
    return f"right after {told} calls of a layer"


@check_of_a_budget
def what_is_kept_is_not_changed(kit: Kit) -> str:
    """Keys and values that stay are those that were written, but for a rotation of the keys."""
    most = 0.0
    for flow, outcome in kit.outcomes(kit.evicting(_STEPS, 3), kit.evicting(_STEPS)):
        most = max(most, outcome.changed)
        if outcome.changed > kit.tolerance:
            expected = f"keys and values as they were written, to {kit.tolerance:g} of their spread"
            seen = f"they changed by up to {outcome.changed:.2g}"
            raise FaultError(expected, seen, flow, "outcome.changed")
    return f"changed by at most {most:.1g}"


@check_of_a_budget
def positions_are_right_after_eviction_inside_the_text(kit: Kit) -> str:
    """Tokens on both sides of a hole are as far from new ones as they were; key and value are of one token."""
    flow = kit.evicting(_STEPS, 3)
    outcome = kit.outcome(flow)
    if outcome.apart:
        raise FaultError("key and value of a slot are of one token", outcome.apart, flow, "outcome.apart")
    if outcome.rotated_again:
        raise ApartError(ROTATED)
    return f"an error of {kit.close(outcome.error(), flow):.1g}"


@check_of_a_budget
def facts_on_both_sides_of_a_hole_are_recalled(kit: Kit) -> str:
    """The recall model answers from facts that were kept, as it does if a mask hides the others."""
    asked = 0
    for seed in range(len(QUESTIONS)):
        flow = kit.evicting(Flow(model="recall", lengths=(QUESTION,), seed=seed))
        outcome = kit.outcome(flow)
        answer = outcome.last.ids[:, flow.prompt + 1 :]
        if not torch.equal(_said(outcome.last.right()), answer):
            continue  # not enough was kept
        asked += 1
        if not torch.equal(_said(outcome.last.logits), answer):
            expected = "the answer that stands in what was kept"
            raise FaultError(expected, "another answer", flow, "outcome.last.logits.argmax(-1)")
    if not asked:
        raise ApartError(f"of {len(QUESTIONS)} facts none was kept")
    return f"{asked} of {len(QUESTIONS)} are kept, all right"


def _said(logits: Float[Tensor, "row step vocab"]) -> Tensor:
    """What is answered after the first token of the answer."""
    return logits[:, 1:-1].argmax(-1)


@check_of_a_budget
def the_first_tokens_survive(kit: Kit) -> str:
    """The model loses nothing that the first token alone would give back."""
    loss = 0.0
    flows: list[Flow] = []
    for flow in (_STEPS, Flow(chunks=(12, 12), acts=_STEPS.acts), Flow(lengths=(16,), acts=(("step", 24),)), LONG_FLOW):
        flows.append(kit.evicting(flow))
    for flow, outcome in kit.outcomes(*flows):
        text = outcome.last
        own, control = _given_back(flow, text, 0), 0.0
        for column in range(3, flow.prompt - 1, flow.prompt // 5):
            control = max(control, _given_back(flow, text, column))
        loss = max(loss, own)
        if own > _LOSS and own > _BEYOND * control:
            expected = f"seeing the first token again spares the model less than {_LOSS} nats"
            seen = f"it spares {own:.2g} nats; any of five other tokens at most {max(control, 0):.2g}"
            raise FaultError(expected, seen, flow, "[sees[..., 0] for sees in outcome.last.sees.values()]")
    return f"{loss:.2g} nats"


def _given_back(flow: Flow, text: Stretch, column: int) -> float:
    """The loss in nats that would be spared if all queries after the prompt saw a column."""
    whole = right_logits(flow, text.ids, text.mask)[:, text.first :]
    sees: dict[int, Tensor] = {}
    for layer, seen in text.sees.items():
        sees[layer] = seen.clone()
        sees[layer][:, :, flow.prompt :, column] = True
    back = right_logits(flow, text.ids, text.mask, sees)[:, text.first :]
    return _loss(text.logits, whole) - _loss(back, whole)


def _loss(logits: Float[Tensor, "row step vocab"], whole: Float[Tensor, "row step vocab"]) -> float:
    """KL divergence from the logits of the whole text, in nats, on average over steps."""
    right = whole[:, 1:].log_softmax(-1)
    return float((right.exp() * (right - logits[:, 1:].log_softmax(-1))).sum(-1).mean())


@check_of_a_budget
def the_model_sees_what_it_wrote(kit: Kit) -> str:
    """A step sees the token before it in some layer and kv head, however little is kept."""
    seen = 0
    for times in (3, 2):
        flow = kit.evicting(Flow(acts=(("step", 8),)), times)
        for column, sees in _of_steps(kit.outcome(flow).last, flow.prompt + 1):
            if not bool(torch.stack([layer[:, :, column - 1] for layer in sees]).any()):
                expected = "the token before is seen"
                raise FaultError(expected, f"step {column - flow.prompt + 1} sees no token before it", flow, SEEN)
            seen += 1
    return f"at all of {seen} steps"


def _of_steps(text: Stretch, first: int) -> list[tuple[int, list[Tensor]]]:
    """What each layer's queries of a column saw, from a column on."""
    return [(column, [sees[:, :, column] for sees in text.sees.values()]) for column in range(first, text.ids.shape[1])]


@check_of_a_budget
def the_same_text_is_kept_in_the_same_way(kit: Kit) -> str:
    """A text that is read twice is cut twice in the same way."""
    flow = kit.evicting(_STEPS)
    first, second = kit.outcome(flow).last.sees, kit.outcome(flow).last.sees
    for layer, sees in first.items():
        if not torch.equal(sees, second[layer]):
            expected, seen = (
                "the same tokens as before",
                f"layer {layer} keeps others: draw from a generator with a seed",
            )
            raise FaultError(expected, seen, flow, SEEN)
    return "twice the same"


@check_of_a_budget
def the_budget_holds_at_every_step_in_tokens(kit: Kit) -> str:
    """A step reads at most the budget and its own token, on average over layers and kv heads, also in a second turn."""
    most = 0.0
    for flow in (Flow(acts=(("step", 4),)), Flow(lengths=(48,), acts=(("step", 6),))):
        most = max(most, _most_read(kit, kit.evicting(flow, 3)))
    return f"at most {most:g} tokens"


def _most_read(kit: Kit, flow: Flow) -> float:
    """The most tokens that a single-token call reads, which have to be within the budget."""
    tokens_asked = kit.budget_in_tokens(flow)
    outcome, most, step = kit.outcome(flow), 0.0, 0
    column = flow.prompt
    for act in flow.acts:
        if act[0] == "read":
            column += act[1]
            continue
        for _ in range(act[1]):
            read = float(tokens_seen(outcome, column).max())
            allowed = tokens_asked + 1 + (step if kit.grows else 0)
            most = max(most, read)
            if read > allowed:
                expected = f"the call of token {column + 1} reads at most {allowed} tokens"
                raise FaultError(expected, f"it reads {read:g} of {column + 1}", flow, SEEN)
            column, step = column + 1, step + 1
    return most


def tokens_seen(outcome: Outcome, column: int) -> Tensor:
    """Return the tokens that the query of each row at a column sees, on average over layers and kv heads."""
    seen = [sees[:, :, column].sum(-1).float().mean(1) for sees in outcome.last.sees.values()]
    return torch.stack(seen).mean(0)


@check_of_a_budget
def the_budget_holds_at_every_step_in_bytes(kit: Kit) -> str:
    """What is evicted is freed: no view keeps it alive, and nothing else holds it."""
    flow = kit.evicting(Flow(lengths=(96,), acts=(("step", 4),)), 6)
    budget = kit.budget_in_tokens(flow)
    outcome = kit.outcome(flow)
    config = kit_model(flow.model).config
    token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    most = max(outcome.bytes[1:])
    allowed = int(_LARGER * (budget + 4) * token)
    if most > allowed:
        expected = f"at most {allowed} bytes, {_LARGER:g} times those of the budget and the generated tokens"
        seen = f"{most} bytes; everything would be {(flow.prompt + 4) * token}"
        raise FaultError(expected, seen, flow, "outcome.bytes")
    return f"at most {most} bytes"


@check_of_a_budget
def a_second_turn_is_cut_to_the_budget_again(kit: Kit) -> str:
    """After a second turn, which is read whole, a step reads the budget and its own token."""
    if kit.of_shares or kit.grows:
        raise ApartError("it chooses at the end of a prompt alone")
    return f"at most {_most_read(kit, kit.evicting(_TURN, 3)):g} tokens"
