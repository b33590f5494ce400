"""Cache policies: what the KV cache keeps, and what attention sees of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from sinkscope.engine.attention import AttentionRows
from sinkscope.errors import no_such_name
from sinkscope.kv.keeper import CacheKeeper
from sinkscope.kv.policy import KeptPerRow, LayerMoment, Policy
from sinkscope.kv.published import H2O, TOVA, AdaKV, Full, Pyramid, SnapKV, StreamingLLM
from sinkscope.kv.registry import policies, policy_named, register_policy
from sinkscope.kv.usage import Usage
from sinkscope.kv.watch import Observe, keep_queries

__all__ = [
    "H2O",
    "TOVA",
    "AdaKV",
    "AttentionRows",
    "CacheKeeper",
    "Full",
    "KeptPerRow",
    "LayerMoment",
    "Observe",
    "Policy",
    "Pyramid",
    "SnapKV",
    "StreamingLLM",
    "Usage",
    "keep_queries",
    "policies",
    "policy_named",
    "register_policy",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        """Refuse a name that is not here, with the nearest one."""
        raise no_such_name(__name__, name, __all__)
