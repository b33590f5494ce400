"""Copies of a cache, and calls in any order.

1. Each kind of act is tried alone: what the cache refuses is not drawn.
2. Orders of acts are drawn and compared with a plain pass over the text that the cache then stands for.
3. Of an order that fails, acts are left out and numbers made smaller as long as it still fails.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from transformers import Cache

from sinkscope.conformance.checks.registry import check
from sinkscope.conformance.flow import ROW_ACTS, Act, Flow
from sinkscope.conformance.kit import ApartError, FaultError, Kit

_FEW, _MANY = 20, 500
_OF_CACHES = 80  # of a cache that no policy cuts, which is quicker
_TRIES = 80  # at most, to make a failing order smaller
_MODELS = ("grouped", "grouped", "grouped", "windows", "hybrid")
_ALONE: dict[str, tuple[Act, ...]] = {
    "crop": (("crop", 1),),
    "draft": (("read", 1), ("crop", 1)),
    "reset": (("reset",),),
    "copy": (("copy",),),
    "pickle": (("pickle",),),
    "reorder": (("reorder", 1, 0),),
    "select": (("select", 1),),
    "repeat": (("repeat", 2),),
}
_MOST_ROWS = 4
COPIES = ("copy", "pickle")
"""Acts after which another object goes on."""


@check
def a_copy_is_the_same_and_stands_alone(kit: Kit) -> str:
    """A deep copy, and a cache that was pickled, go on as the original would, which may go on by itself."""
    flows: list[Flow] = []
    for kind in COPIES:
        for model in ("grouped", "windows", "hybrid"):
            flows.append(Flow(model=model, lengths=(24, 24), acts=(("step", 2), (kind,), ("step", 4))))
    seen = kit.right(*flows, budget=False)
    if kit.evicts:
        seen += f"; where it evicts, {_as_without_copies(kit, flows):.1g} beside one that was not copied"
    return seen


def _as_without_copies(kit: Kit, flows: list[Flow]) -> float:
    """The largest error of what a copy goes on with, beside the original: what is kept is the same."""
    worst = 0.0
    for flow in flows:
        with suppress(ApartError):  # what is refused is noted
            worst = max(worst, kit.as_without(kit.evicting(flow, 3), *COPIES))
    return worst


@check
def any_order_of_calls_gives_what_one_pass_gives(kit: Kit) -> str:
    """Prompts, steps, several tokens, drafts, resets, copies and moved rows follow each other in drawn orders."""
    kinds = {model: _served(kit, model) for model in sorted(set(_MODELS))}
    worst, tried = 0.0, 0
    few = _OF_CACHES if isinstance(kit.subject(), Cache) else _FEW
    for number in range(_MANY if kit.thorough else few):
        draw = random.Random(1000 * kit.seed + number)
        flow = kit.readable(_drawn(draw, kinds, number))
        if kit.own_budget is not None or (kit.evicts and number % 3 == 2):
            flow = kit.evicting(flow)
        try:
            worst = max(worst, _error(kit, flow))
            tried += 1
        except ApartError:
            continue
        except FaultError as error:
            raise _smallest(kit, flow, error) from None
    if not tried:
        raise ApartError("it refuses all orders")
    return f"an error of {worst:.1g} in {tried} orders"


def _error(kit: Kit, flow: Flow) -> float:
    if flow.is_watched and any(act[0] in COPIES for act in flow.acts):
        return kit.as_without(flow, *COPIES)
    outcome = kit.outcome(flow)
    return 0.0 if outcome.rotated_again else kit.close(outcome.error(), flow)


def _served(kit: Kit, model: str) -> list[str]:
    """Acts that the cache does not refuse."""
    kinds = ["step", "read", "turn"]
    try:
        kit.outcome(Flow(model=model, lengths=(6, 6), acts=(("step", 1),)))
    except (ApartError, FaultError):
        return []
    for kind, acts in _ALONE.items():
        if kind == "crop" and model != "grouped":
            continue  # what goes back after a draft need not go back twice: windows and states keep no more
        if kind == "reset" and kit.of_shares:
            continue  # a share of a short text may be less than it can keep
        try:
            kit.outcome(Flow(model=model, lengths=(6, 6), acts=(("step", 1), *acts)))
        except ApartError:
            continue
        except FaultError:
            pass  # an order with it says why
        kinds.append(kind)
    return kinds


def _drawn(draw: random.Random, kinds: dict[str, list[str]], number: int) -> Flow:
    """An order of acts after a prompt."""
    model = draw.choice([model for model in _MODELS if kinds[model]] or ["grouped"])
    rows = 1 if number % 2 else draw.randint(1, 3)
    lengths = tuple(_length(draw) for _ in range(rows))
    if model != "grouped":  # states run over padding
        lengths = (lengths[0],) * rows
    acts: list[Act] = []
    spare = min(lengths)  # tokens of the shortest row that may go
    for _ in range(draw.randint(3, 8)):
        kind = draw.choice(kinds[model] or ["step"])
        for act in _act(draw, kind, rows, spare, model):
            acts.append(act)
            rows, spare = _after(act, rows, spare)
    acts.append(("step", draw.randint(1, 2)))
    return Flow(model=model, lengths=lengths, acts=tuple(acts), seed=number)


def _length(draw: random.Random) -> int:
    """A length: short, or around a power of two, or any."""
    near = draw.choice((2, 4, 8, 16, 32, 64, 128)) + draw.choice((-1, 0, 1))
    return draw.choice((draw.randint(1, 12), near, draw.randint(1, 130)))


def _act(draw: random.Random, kind: str, rows: int, spare: int, model: str) -> Iterator[Act]:
    """One act, or the two of a draft, for so many rows; nothing where it cannot be done."""
    if kind == "step":
        yield kind, draw.randint(1, 3)
    elif kind == "read":
        yield kind, draw.randint(2, 20)
    elif kind == "turn":
        yield (kind, *(draw.randint(1, 9) for _ in range(rows))) if model == "grouped" else ("read", 4)
    elif kind == "draft":
        tokens = draw.randint(1, 6)
        yield "read", tokens
        yield "crop", tokens
    elif kind == "crop" and spare > 1:
        yield kind, draw.randint(1, min(6, spare - 1))
    elif kind == "reset":
        yield (kind,)
        yield "read", _length(draw)
    elif kind == "reorder":
        yield (kind, *(draw.randrange(rows) for _ in range(rows)))
    elif kind == "select":
        yield (kind, *draw.sample(range(rows), draw.randint(1, rows)))
    elif kind == "repeat" and 2 * rows <= _MOST_ROWS:
        yield kind, 2
    elif kind in ("copy", "pickle"):
        yield (kind,)


def _after(act: Act, rows: int, spare: int) -> tuple[int, int]:
    """Rows, and tokens of the shortest one that may go, after an act."""
    kind, *numbers = act
    if kind in ("reorder", "select"):
        rows = len(numbers)
    elif kind == "repeat":
        rows *= numbers[0]
    elif kind in ("step", "read"):
        spare += numbers[0]
    elif kind == "turn":
        spare += min(numbers) - max(numbers)  # padding goes first
    elif kind == "crop":
        spare -= numbers[0]
    elif kind == "reset":
        spare = 0
    return rows, max(spare, 0)


def _smallest(kit: Kit, flow: Flow, error: FaultError) -> FaultError:
    """The error of the smallest order that was found to fail, from one that does."""
    tries, smaller = 0, True
    while smaller and tries < _TRIES:
        smaller = False
        for candidate in _simpler(error.flow):
            tries += 1
            try:
                _error(kit, candidate)
            except FaultError as failed:
                if failed.error == error.error:
                    error, smaller = failed, True
                    break
            except (ApartError, IndexError):
                continue
            if tries >= _TRIES:
                break
    return error


def _simpler(flow: Flow) -> Iterator[Flow]:
    """Flows with an act less, a row less or a smaller number."""
    for number in range(len(flow.acts)):
        yield replace(flow, acts=flow.acts[:number] + flow.acts[number + 1 :])
    if len(flow.lengths) > 1 and not any(act[0] in (*ROW_ACTS, "turn") for act in flow.acts):
        yield replace(flow, lengths=flow.lengths[:1])
    if len(set(flow.lengths)) > 1:
        yield replace(flow, lengths=(max(flow.lengths),) * len(flow.lengths))
    if max(flow.lengths) > 1:
        for shorter in (4, flow.prompt // 2, flow.prompt - 1):
            if 0 < shorter < flow.prompt:
                yield replace(flow, lengths=(shorter,) * len(flow.lengths))
    for number, act in enumerate(flow.acts):
        if act[0] in ("step", "read") and act[1] > 1:
            for fewer in (1, act[1] // 2, act[1] - 1):
                yield replace(flow, acts=(*flow.acts[:number], (act[0], fewer), *flow.acts[number + 1 :]))
