"""Rows of a batch: padded, alone, and moved."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import DynamicCache

from sinkscope.conformance.checks.registry import check
from sinkscope.conformance.flow import ROW_ACTS, STEPS, Act, Flow, Outcome, Stretch, error_of
from sinkscope.conformance.kit import SEEN, TOLERANCE, FaultError, Kit, beside
from sinkscope.conformance.models import kit_model, kit_tokens
from sinkscope.conformance.subject import entered, made

_MOVES: tuple[tuple[Act, ...], ...] = (
    (("step", 2), ("reorder", 1, 2, 0), ("step", 4)),
    (("step", 2), ("reorder", 2, 2, 0), ("step", 1), ("reorder", 1, 0, 0), ("step", 3)),
    (("step", 2), ("select", 2, 0), ("step", 4)),
    (("step", 2), ("repeat", 2), ("step", 4)),
)
_BEAMS = 3


@check
def rows_of_a_batch_are_what_they_are_alone(kit: Kit) -> str:
    """Each row has the logits that it has alone, and padding changes neither them nor what is kept."""
    flows = [Flow(lengths=(24, 24), acts=(("step", 2),)), Flow(lengths=(24, 24, 24)), *_padded(STEPS, STEPS)]
    return _right_and_alone(kit, flows)


@check
def a_padded_turn_continues_each_row(kit: Kit) -> str:
    """Rows whose later turns have different lengths go on as they do alone."""
    left: tuple[Act, ...] = (("step", 2), ("turn", 6, 3, 5), ("step", 2))
    right: tuple[Act, ...] = (("step", 2), ("turn", 3, 6, 5), ("step", 2))
    return _right_and_alone(kit, _padded(left, right))


def _padded(left: tuple[Act, ...], right: tuple[Act, ...]) -> list[Flow]:
    """Rows of three lengths, padded on the left and on the right."""
    lengths = (24, 17, 9)
    return [Flow(lengths=lengths, acts=left), Flow(lengths=lengths, acts=right, padding="right")]


def _right_and_alone(kit: Kit, flows: list[Flow]) -> str:
    error = kit.right(*flows)
    return f"{error}; alone, {_alone(kit, flows)}" if kit.evicts else error


def _alone(kit: Kit, flows: list[Flow]) -> str:
    """Compare what is kept of each row with what is kept of it alone."""
    worst = 0.0
    for _, outcome in kit.outcomes(*(kit.evicting(flow, 3) for flow in flows)):
        for row in range(len(outcome.last.ids)):
            worst = max(worst, _as_alone(kit, outcome, row))
    return f"an error of {worst:.1g}"


def _as_alone(kit: Kit, outcome: Outcome, row: int) -> float:
    """Compare the last logits of a row, and how many tokens they come from, with those of the row alone."""
    flow, text = outcome.flow, outcome.last
    alone = _of_one_row(flow, text, row)
    own = kit.outcome(alone).last
    seen, expected = _read_at_last(text, row), _read_at_last(own, 0)
    if seen < expected:
        raise FaultError(f"row {row} sees {expected:g} tokens at last, as it does alone", f"{seen:g}", flow, SEEN)
    error = error_of(text.logits[row : row + 1, -1:], own.logits[:, -1:])
    return kit.close(error, flow, f"in row {row}, the logits that it has alone", beside(alone, row))


def _read_at_last(text: Stretch, row: int) -> float:
    """Tokens that the last query of a row sees, on average over layers and kv heads."""
    seen = [sees[row, :, -1].sum(-1).float().mean() for sees in text.sees.values()]
    return float(torch.stack(seen).mean())


def _of_one_row(flow: Flow, text: Stretch, row: int) -> Flow:
    """The flow of a row alone: its own tokens, read in the same calls, without what moves rows."""
    acts: list[Act] = []
    source, sources = row, list[int]()
    for act in reversed(flow.acts):  # where the row of the last text was before
        sources.append(source)
        if act[0] in ("reorder", "select"):
            source = act[1 + source]
        elif act[0] == "repeat":
            source //= act[1]
    for act, at in zip(flow.acts, reversed(sources), strict=True):
        if act[0] == "turn":
            acts.append(("read", act[1 + at]))
        elif act[0] not in ROW_ACTS:
            acts.append(act)
    ids = tuple(text.ids[row][text.mask[row].bool()].tolist())
    return replace(flow, lengths=(flow.lengths[source],), acts=tuple(acts), text=ids)


@check
def rows_that_move_take_all_with_them(kit: Kit) -> str:
    """Keys, values and states move as beam search and others reorder, select and repeat rows."""
    flows = [Flow(lengths=(24, 17, 9), acts=acts) for acts in _MOVES]
    for model in ("windows", "hybrid", "recurrent"):
        for acts in _MOVES:
            flows.append(Flow(model=model, lengths=(24, 24, 24), acts=acts))
    seen = kit.right(*flows)
    if kit.evicts:
        seen += f"; alone, {_alone(kit, flows[: len(_MOVES)])}"
    if kit.own_budget is None and kit.tolerance <= TOLERANCE:  # else other tokens may be right
        seen += f"; {_compare_beams(kit)}"
    return seen


def _compare_beams(kit: Kit) -> str:
    """Compare what `generate` writes with several beams with what it writes with a stock cache, with room for all."""
    flow = Flow(lengths=(24,))
    model = kit_model(flow.model)
    for seed in range(3):
        ids = torch.tensor([kit_tokens(flow.model, (), flow.prompt, seed, 0)])
        settings = {"max_new_tokens": 12, "num_beams": _BEAMS, "do_sample": False, "pad_token_id": 0}
        right = model.generate(ids, past_key_values=DynamicCache(config=model.config), **settings)
        with kit.in_use(flow), entered(made(kit.factory, model, flow.prompt, None), model) as cache:
            written = model.generate(ids, past_key_values=cache, **settings)
        if not torch.equal(written, right):
            expected = f"{_BEAMS} beams write the same tokens as with a DynamicCache"
            raise FaultError(expected, "they write others", replace(flow, seed=seed))
    return f"{_BEAMS} beams write the same"
