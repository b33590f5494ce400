"""Knockouts, each beside the keys that it hides by plain means: one row each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sinkscope as ss
from sinkscope import kv

from .edits import BIG, EVICTS, LAYER, NEURONS, Draw, Edit, has_experts
from .families import FAMILIES, HEADS, INSIDE
from .hiding import FIRST, Knocked, Streamed, at

WAYS = ("none", "steps", "chunks", "second turn", "generate", "gradients", "copied", "copied from", "cropped")


def _dispatches(draw: Draw) -> bool:
    """Whether scores can be edited, in a way whose rows stay where they are."""
    family = FAMILIES[draw["family"]]
    scores = family.dispatches and draw["family"] not in INSIDE and not family.shares_keys
    columns = family.window is None or draw["cache"] in ("none", "gradients")
    rounds = draw["dtype"] != "float32" or draw["mode"] == "autocast"
    exact = family.experts is None or not rounds  # rounding chooses other experts
    if draw["options"] == "second text":  # whose places are not those of the columns by which `hide` hides
        return False
    return scores and columns and exact and draw["cache"] in WAYS and draw["attention"] in ("sdpa", "eager", "own")


def _last_columns(draw: Draw) -> bool:
    """Whether the queries of a call are the last columns of its mask, as `hide` takes them."""
    return _dispatches(draw) and draw["options"] != "static"


def _streams(draw: Draw) -> bool:
    """Whether scores can be edited, and tokens after the prompt come one by one."""
    family = FAMILIES[draw["family"]]
    scores = family.dispatches and draw["family"] not in INSIDE and not family.shares_keys
    exact = draw["dtype"] == "float32" and draw["mode"] != "autocast" and draw["mask"] == "usual"
    return scores and exact and draw["cache"] == "evicted" and draw["padding"] != "right"


def _zeroes(draw: Draw) -> bool:
    return _dispatches(draw) and not has_experts(draw)


def _row(make: Callable[[], Any], knocked: Knocked, fits: Callable[[Draw], bool] = _dispatches) -> Edit:
    return Edit(lambda: [make()], knocked=knocked, fits=fits)


def knockouts() -> dict[str, Edit]:
    """All rows."""
    knock = ss.Knockout
    zero = ss.Ablate(layer=LAYER, neurons=NEURONS)
    of_layer = [(LAYER, head) for head in range(HEADS)]
    return {
        "knock first": _row(lambda: knock("first"), FIRST),
        "knock at": _row(lambda: knock([3, 5]), Knocked(at(3, 5))),
        "knock at a query": _row(lambda: knock([0, 2], queries=[9, 11]), Knocked(at(0, 2), at(9, 11)), _last_columns),
        "knock in a layer": _row(lambda: knock("first", layers=[LAYER]), FIRST.only(*of_layer), _last_columns),
        "knock in heads": _row(
            lambda: knock("first", heads=[(0, 1), (2, 3)]), FIRST.only((0, 1), (2, 3)), _last_columns
        ),
        "knock first|guard": _row(lambda: knock("first") | ss.LoopGuard(budget=BIG), FIRST),
        "knock first|streaming 12": Edit(
            lambda: [knock("first") | kv.StreamingLLM(budget=12)], **EVICTS, fits=_dispatches
        ),
        "knock first|h2o 12": Edit(lambda: [knock("first") | kv.H2O(budget=12)], **EVICTS, fits=_dispatches),
        "streams": Edit(lambda: [kv.StreamingLLM(budget=12)], knocked=Streamed(12), fits=_streams),
        "knock first;zero": Edit(lambda: [knock("first"), zero], alone=True, fits=_zeroes),
    }
