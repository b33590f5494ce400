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
    patch: Any = None,
    policy: Any = None,
    guard: Any = False,
    interventions: Any = None,
) -> Intervention | None:
    """Join the interventions of a measurement: a patch, other interventions, a cache policy and a guard, in this order.

    Args:
        patch: The patch.json to run under; from Python also a `SinkPatch`.
        policy: Which entries the KV cache keeps, such as streaming:512, snapkv:0.25:window=64 or
            package.module:Class:512; from Python also a policy.
        guard: Break repetition loops with LoopGuard; from Python also a `LoopGuard`, or "paper" (as published).
        interventions: Any other intervention, several joined by |, or a list of these.

    Raises:
        SinkscopeError: The patch cannot be read, the policy does not exist, there are two guards, or something is no
            intervention.
    """
    if guard is True:
        guard = "loopguard"
    elif guard == "paper":
        guard = "loopguard:paper"
    policy, guard = _named(policy), _named(guard or None)
    if guard is not None and isinstance(policy, type(guard)):
        raise SinkscopeError("the policy is a guard, too, and two would cut the same rows: give one of them")
    parts = [
        SinkPatch.load(patch) if isinstance(patch, str | os.PathLike) else patch,
        *(interventions if isinstance(interventions, list | tuple) else [interventions]),
        policy,
        guard,
    ]
    edits = [part for part in parts if part is not None]
    for part in edits:
        if not isinstance(part, Intervention):
            raise SinkscopeError(
                f"{type(part).__name__} is no intervention: give a policy, a patch or a guard, or several of "
                "them joined by |"
            )
    return functools.reduce(or_, edits) if edits else None


def _named(policy: Any) -> Any:
    """Return the policy of a name, and anything else as it is."""
    if not isinstance(policy, str):
        return policy
    from sinkscope.kv.registry import policy_named  # most measurements run without the cache of this package

    return policy_named(policy)
