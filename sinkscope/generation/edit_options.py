"""The interventions of a measurement or a generation, from what the caller named: a patch, a policy, a guard."""

from __future__ import annotations

import functools
import os
from operator import or_
from typing import Any

from sinkscope.errors import SinkscopeError
from sinkscope.hooks.edit.base import Intervention
from sinkscope.hooks.edit.sink_patch import SinkPatch


def edit_from_options(
    *,
    patch: SinkPatch | str | os.PathLike[str] | None = None,
    policy: Any = None,
    guard: Any = False,
    interventions: Any = None,
) -> Intervention | None:
    """Join the interventions of a measurement: a patch, other interventions, a cache policy and a guard, in this order.

    Args:
        patch: The patch.json to run under; from Python also a `SinkPatch`.
        policy: Which entries the KV cache keeps, such as streaming:512, snapkv:0.25:window=64 or
            package.module:Class:512; from Python also a policy.
        guard: Break repetition loops with LoopGuard; from Python also a `LoopGuard`.
        interventions: Any other intervention, or several joined by |.

    Raises:
        SinkscopeError: The patch cannot be read, the policy does not exist, or something is no intervention.
    """
    if isinstance(patch, str | os.PathLike):
        patch = SinkPatch.load(patch)
    guard = "loopguard" if guard is True else guard or None
    edits: list[Any] = [part for part in (patch, interventions, policy, guard) if part is not None]
    for number, part in enumerate(edits):
        if isinstance(part, str):
            from sinkscope.kv.registry import policy_named  # most measurements run without the cache of this package

            edits[number] = policy_named(part)
        elif not isinstance(part, Intervention):
            raise SinkscopeError(
                f"{type(part).__name__} is no intervention: give a policy, a patch or a guard, or several of "
                "them joined by |"
            )
    if guard is not None and any(isinstance(other, type(edits[-1])) for other in edits[:-1]):
        raise SinkscopeError("the policy is a guard, too, and two would cut the same rows: give one of them")
    return functools.reduce(or_, edits) if edits else None
