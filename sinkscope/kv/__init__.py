"""Cache policies: what the KV cache keeps, and what attention sees of it."""

from __future__ import annotations

from sinkscope.engine.attention import AttentionRows
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
