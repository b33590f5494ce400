"""Cache policies: what the KV cache keeps, and what attention sees of it."""

from __future__ import annotations

from sinkscope.kv.adakv import AdaKV
from sinkscope.kv.attention_rows import AttentionRows, RowWatcher, watch
from sinkscope.kv.full import Full
from sinkscope.kv.h2o import H2O
from sinkscope.kv.keeper import CacheKeeper
from sinkscope.kv.observe import Observe
from sinkscope.kv.per_layer import PerLayer
from sinkscope.kv.policy import KeptPerRow, LayerMoment, Policy
from sinkscope.kv.pyramid import Pyramid
from sinkscope.kv.registry import make_policy, policies, policy_named, register_policy
from sinkscope.kv.snapkv import SnapKV
from sinkscope.kv.streaming_llm import StreamingLLM
from sinkscope.kv.tova import TOVA
from sinkscope.kv.usage import Usage

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
    "PerLayer",
    "Policy",
    "Pyramid",
    "RowWatcher",
    "SnapKV",
    "StreamingLLM",
    "Usage",
    "make_policy",
    "policies",
    "policy_named",
    "register_policy",
    "watch",
]
