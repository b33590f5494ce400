"""Cache policies: what the KV cache keeps, and what attention sees of it."""

from __future__ import annotations

from sinkscope.kv.h2o import H2O
from sinkscope.kv.loopserve.progressive import Progressive
from sinkscope.kv.policy import At, Full, Policy, make_policy, policies, policy_named, register_policy
from sinkscope.kv.session import AttentionRows, Moment, Observe, Session
from sinkscope.kv.shapes import AShape, MInference, TriShape
from sinkscope.kv.snapkv import AdaKV, SnapKV
from sinkscope.kv.streaming_llm import StreamingLLM
from sinkscope.kv.tova import TOVA
from sinkscope.kv.usage import Usage

__all__ = [
    "H2O",
    "TOVA",
    "AShape",
    "AdaKV",
    "At",
    "AttentionRows",
    "Full",
    "MInference",
    "Moment",
    "Observe",
    "Policy",
    "Progressive",
    "Session",
    "SnapKV",
    "StreamingLLM",
    "TriShape",
    "Usage",
    "make_policy",
    "policies",
    "policy_named",
    "register_policy",
]
