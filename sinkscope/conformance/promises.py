"""What every cache promises, and the uses that try it.

With room for everything a cache changes nothing; with half of the prompt or a third, it loses only what it evicts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from math import inf

import torch
from torch import Tensor
from transformers import Cache

from sinkscope.conformance.checked import Unit, Worst
from sinkscope.conformance.flow import Flow, Outcome, Stretch, error_of
from sinkscope.conformance.kit import LONG, ApartError, FaultError, Kit, Promise
from sinkscope.conformance.models import QUESTION, QUESTIONS, WINDOW, kit_model
from sinkscope.files.records import share_of
from sinkscope.hooks.edit.base import Intervention

_LARGER = 2.0  # times the budget: what rows and heads that are padded to the longest may take
_LOSS = 0.1  # nats
_BEYOND = 4.0  # times the control
_ORDERS, _OF_POLICIES = 10, 3  # orders of calls of a model, and twice as many of the first
_LONGEST = 130  # tokens of a prompt of these
_LENGTHS = 170
_TURN = "step 2, read 6, step 2"
_RESET = "step 1, reset, read 40, step 3"
_DRAFT = "step 1, read 3, crop 3, step 2"
_SEES = "[sees.sum(-1) for sees in outcome.last.sees.values()]"
_ROWS = (24, 17, 9)
_TEXTS = (
    Flow(),
    Flow(lengths=(7,), acts="read 17, step 3"),
    Flow(acts=_TURN),
    Flow(acts=_RESET),
    Flow(acts=_DRAFT),
    Flow(acts="step 2, read 9, crop 4, read 2, step 2"),
    Flow("windows", (WINDOW - 2,), "step 6"),
    Flow("windows", (20,), f"read 20, {_TURN}"),
    Flow("windows", (40,), _RESET),
    Flow("windows", (40,), _DRAFT),
    Flow("sinks", (10,), "read 20, read 10, step 3"),
    Flow("hybrid", (1,), f"read 2, read 21, {_DRAFT}"),
    Flow("hybrid", acts=_RESET),
    Flow("recurrent"),
    Flow("recurrent", acts=_DRAFT),
)
_BATCHES = (
    Flow(lengths=(24, 24)),
    Flow(lengths=_ROWS),
    Flow(lengths=_ROWS, padding="right"),
    Flow(lengths=(9, 24)),  # padding in the first row as well
    Flow(lengths=_ROWS, acts="step 2, turn 6 3 5, step 2"),
    Flow(lengths=_ROWS, acts="step 2, turn 3 6 5, step 2", padding="right"),
)
_BLOCKS = (
    "turn 2 7",  # not of states, which run over padding
    "step 3, crop 2",  # nor of windows, which need not go back behind a call
    "step 2",
    "read 5",
    "read 3, crop 3",
    "reset, read 17",
    "copy",
    "reorder 1 0",
    "reorder 1 1",
    "select 1 0",
    "repeat 2, step 1, select 1 2",
)
"""Acts that follow each other in any order, in a batch of two."""
FLOWS: dict[str, dict[int, tuple[Flow, ...]]] = {
    "it_raises_no_error_and_leaves_nothing_behind": {
        0: (Flow(), Flow(acts=_TURN), Flow(lengths=(9, 24))),
        2: (Flow(), Flow(acts=_TURN)),
    },
    "with_room_for_everything_it_changes_nothing": {
        0: (
            *_TEXTS,
            Flow(lengths=(LONG,)),
            Flow(lengths=(1,), acts="step 130"),
            Flow(lengths=(24, 24), dtype="bfloat16"),
            Flow(lengths=(24, 24), dtype="float16"),
        )
    },
    "rows_are_what_they_are_alone": {0: _BATCHES, 3: _BATCHES},
    "what_is_kept_stands_at_its_place": {
        2: (*_TEXTS, *(Flow("recall", (QUESTION,), seed=seed) for seed in range(len(QUESTIONS)))),
        3: (
            Flow(acts="step 6"),
            Flow(lengths=(24, 24), acts="step 2, copy, step 4"),
        ),
    },
    "the_budget_holds_in_tokens_and_bytes": {
        3: (Flow(acts="step 4"), Flow(lengths=(48,), acts="step 6"), Flow(acts="step 3, read 6, step 3")),
        6: (Flow(lengths=(96,), acts="step 4"),),
    },
    "the_first_and_the_latest_tokens_survive": {
        3: (Flow(acts="step 8"),),
        2: (Flow(acts="step 8"), Flow(lengths=(12,), acts="read 12, step 6"), Flow(lengths=(16,), acts="step 24")),
    },
}
"""The uses of each promise, by how many times what is kept the prompt has; 0: there is room for everything."""


def _outcomes(kit: Kit, promise: Promise, right: bool = True) -> Iterator[Outcome]:
    """What the uses of a promise give; the logits have to be right, unless something else is asked."""
    flows: list[Flow] = []
    for times, uses in FLOWS[promise.__name__].items():
        flows += [kit.asking(flow, times) for flow in uses if kit.asked_for or not times]
    if not flows:
        raise ApartError("it keeps everything")
    for outcome in kit.outcomes(*flows):
        if right:
            _right(kit, outcome)
        yield outcome


def _right(kit: Kit, outcome: Outcome) -> None:
    """Compare the logits with those of a plain pass, of the same use without copies, or, of keys rotated again, facts.

    Where keys are rotated again no mask says what is right, but which of the facts that were kept is answered.
    """
    flow, text = outcome.flow, outcome.last
    plain = flow.uncopied
    if plain != flow and flow.budget is not None:
        _beside(kit, outcome, plain, "the logits without a copy", slice(None))
    elif not outcome.recorder.rotated_again:
        kit.close(outcome.error(), flow)
    elif flow.model == "recall":
        answer, right, logits = text.ids[:, flow.prompt + 1 :], text.right(text.sees), text.logits
        if torch.equal(right[:, 1:-1].argmax(-1), answer):
            shown = "outcome.last.logits[:, 1:-1].argmax(-1)"
            if not torch.equal(logits[:, 1:-1].argmax(-1), answer):
                raise FaultError("the answer that stands in what was kept", "another answer", flow, shown)
            kit.measured.append(Worst(0.0, kit.tolerance, Unit.LOGITS))


def _beside(kit: Kit, outcome: Outcome, other: Flow, whose: str, rows: slice) -> None:
    """Compare the last logits of rows with those of another flow."""
    expression = f"outcome.last.logits[{rows.start}:{rows.stop}, -1:]"
    shows = f"error_of({expression}, outcome_of({{function}}, {other}).last.logits[:, -1:])"
    error = error_of(outcome.last.logits[rows, -1:], kit.outcome(other).last.logits[:, -1:])
    kit.close(error, outcome.flow, whose, shows)


def _orders(kit: Kit, times: int) -> None:
    """Draw orders of acts that are served."""
    for model, share in (("grouped", 2), ("windows", 1), ("hybrid", 1)):
        served: list[str] = []
        for block in _BLOCKS[bool(times) :] if model == "grouped" else _BLOCKS[2:]:
            with suppress(ApartError):
                _right(kit, kit.outcome(kit.asking(Flow(model, (6, 6), f"{block}, step 2"), times)))
                served.append(block)
        orders = share * (_ORDERS if isinstance(kit.subject, Cache) else _OF_POLICIES)
        for number in range(orders if served else 0):
            draw = random.Random(f"{kit.seed} {model} {number}")
            row = draw.choice((draw.randint(1, _LONGEST), draw.choice((8, 16, 32, 64, 128)) + draw.choice((-1, 0, 1))))
            rows = row, row if times or model != "grouped" else draw.randint(1, row)
            acts = ", ".join([*draw.choices(served, k=draw.randint(2, 6)), "step 2"])
            with suppress(ApartError):
                _right(kit, kit.outcome(kit.asking(Flow(model, rows, acts, seed=number), times)))


def it_raises_no_error_and_leaves_nothing_behind(kit: Kit) -> Worst:
    """Calls raise nothing, the length counts all tokens read, and model and random numbers of torch stay as they were.

    A model that is told no positions asks for the length. NotImplementedError is a refusal, and no error.
    """
    used = Flow()
    for outcome in _outcomes(kit, it_raises_no_error_and_leaves_nothing_behind, right=False):
        used = outcome.flow
        told, true = zip(*outcome.lengths, strict=True)
        if isinstance(kit.subject, Cache | Intervention) and told != true:
            raise FaultError(f"lengths of {list(true)}", str(list(told)), outcome.flow, "outcome.lengths")
    ends: list[Tensor] = []
    for seed in (1, 2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            kit.outcome(used)
            ends.append(torch.get_rng_state())
    if torch.equal(*ends):
        raise FaultError("the caller's random numbers go on", "torch was given a seed: use a generator", used)
    return Worst(0.0, 0.0, Unit.ERRORS)


def with_room_for_everything_it_changes_nothing(kit: Kit) -> None:
    """The logits are those of the plain model: for any length, model, precision and order of calls."""
    for _ in _outcomes(kit, with_room_for_everything_it_changes_nothing):
        pass
    _orders(kit, 0)  # before the lengths: most faults that single uses do not show are found by the first orders
    every = 1 if isinstance(kit.subject, Cache) else 13
    flows = [kit.asking(Flow(lengths=(length,), acts="step 1"), 0) for length in range(1, _LENGTHS, every)]
    for outcome in kit.outcomes(*flows):
        _right(kit, outcome)


def rows_are_what_they_are_alone(kit: Kit) -> None:
    """Each row has the logits, and sees as many tokens, as alone; padding changes neither."""
    for outcome in _outcomes(kit, rows_are_what_they_are_alone):
        flow, text = outcome.flow, outcome.last
        for row in range(len(flow.lengths) if text.sees else 0):
            alone, at = kit.outcome(flow.alone(row)).last, slice(row, row + 1)
            in_batch, right = float(text.read(-1)[row]), float(alone.read(-1)[0])
            if in_batch < right:
                raise FaultError(
                    f"row {row} sees {right:g} tokens at last, as it does alone", f"{in_batch:g}", flow, _SEES
                )
            _beside(kit, outcome, flow.alone(row), f"in row {row}, the logits that it has alone", at)


def what_is_kept_stands_at_its_place(kit: Kit) -> None:
    """The logits are those of a pass in which a mask hides what was evicted; layers that say positions say the true.

    A cache that rotates keys again gives the answers that stand in what was kept. A copy goes on as the original would.
    """
    placed = 0
    for outcome in _outcomes(kit, what_is_kept_stands_at_its_place):
        recorder = outcome.recorder
        if recorder.misplaced:
            raise FaultError(
                "the true position of each token", recorder.misplaced, outcome.flow, "outcome.recorder.misplaced"
            )
        placed += recorder.placed
    if not placed and not kit.measured:
        raise ApartError("keys are rotated again, so no mask says what is right, and no fact was kept")
    _orders(kit, 2)


def the_budget_holds_in_tokens_and_bytes(kit: Kit) -> Worst:
    """A step reads at most the budget and its own token, in any turn, and nothing keeps alive what is evicted."""
    worst = Worst(0.0, inf, Unit.BYTES)
    for outcome in _outcomes(kit, the_budget_holds_in_tokens_and_bytes, right=False):
        flow = outcome.flow
        budget = flow.budget or 0
        if isinstance(budget, float):
            budget = max(1, share_of(budget, flow.prompt))
        later = [kind for kind, numbers in flow.parts() for _ in range(numbers[0])]
        for number, kind in enumerate(later):
            read, allowed = float(outcome.last.read(flow.prompt + number).max()), budget + 1 + number * kit.grows
            if kind == "step" and read > allowed:
                raise FaultError(f"step {number + 1} reads at most {allowed} tokens", f"it reads {read:g}", flow, _SEES)
        config = kit_model(flow.model).config
        token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        allowed, held = int(_LARGER * (budget + len(later)) * token), max(outcome.bytes[1:])
        if held > allowed:
            fault = f"{held} bytes; everything would be {(flow.prompt + len(later)) * token}"
            raise FaultError(
                f"at most {allowed} bytes, {_LARGER:g} times those asked for", fault, flow, "outcome.bytes"
            )
        worst = max(worst, Worst(held, allowed, Unit.BYTES), key=lambda kept: kept.nearness)
    return worst


def the_first_and_the_latest_tokens_survive(kit: Kit) -> Worst:
    """The model loses nothing that the first token alone would give back; most steps see the token before."""
    loss = 0.0
    for outcome in _outcomes(kit, the_first_and_the_latest_tokens_survive, right=False):
        flow, text = outcome.flow, outcome.last
        right = text.right()[:, 1:].log_softmax(-1)
        of_copy = _given_back(right, text, 0)
        loss = max(loss, of_copy)
        if of_copy > _LOSS:
            columns = range(3, flow.prompt - 1, flow.prompt // 5)
            control = max(0.0, *(_given_back(right, text, column) for column in columns))
            if of_copy > _BEYOND * control:
                fault = f"it spares {of_copy:.2g} nats; any of five other tokens at most {control:.2g}"
                raise FaultError(f"seeing the first token again spares less than {_LOSS} nats", fault, flow, _SEES)
        steps = range(flow.prompt + 1, text.ids.shape[1])
        blind = [step for step in steps if not any(sees[:, :, step, step - 1].any() for sees in text.sees.values())]
        if 2 * len(blind) > len(steps):
            fault = f"{len(blind)} of {len(steps)} see no token before them"
            raise FaultError("most steps see the token before them", fault, flow, _SEES)
    return Worst(max(0.0, loss), _LOSS, Unit.NATS)


def _given_back(right: Tensor, text: Stretch, column: int) -> float:
    """The loss in nats that would be spared if all queries after the prompt saw a column."""
    sees = deepcopy(text.sees)
    for positions in sees.values():
        positions[:, :, text.flow.prompt :, column] = True
    losses: list[float] = []
    for logits in (text.logits, text.right(sees)):
        losses.append(float((right.exp() * (right - logits[:, 1:].log_softmax(-1))).sum(-1).mean()))
    return losses[0] - losses[1]


PROMISES: dict[str, Promise] = {
    promise.__name__: promise
    for promise in (
        it_raises_no_error_and_leaves_nothing_behind,
        with_room_for_everything_it_changes_nothing,
        rows_are_what_they_are_alone,
        what_is_kept_stands_at_its_place,
        the_budget_holds_in_tokens_and_bytes,
        the_first_and_the_latest_tokens_survive,
    )
}
"""All promises by name, in their order."""
