"""Cache policies: what the KV cache keeps, and what attention sees of it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from sinkscope.errors import SinkscopeError
from sinkscope.kv.adakv import AdaKV
from sinkscope.kv.full import Full
from sinkscope.kv.h2o import H2O
from sinkscope.kv.loopserve.decode import Progressive
from sinkscope.kv.observe import Observe
from sinkscope.kv.policy import At, Policy
from sinkscope.kv.session import Moment, Rows, Session
from sinkscope.kv.shapes import AShape, MInference, TriShape
from sinkscope.kv.snapkv import SnapKV
from sinkscope.kv.streaming_llm import StreamingLLM
from sinkscope.kv.tova import TOVA
from sinkscope.kv.usage import Usage

POLICIES: dict[str, type[Policy]] = {
    "full": Full,
    "streaming": StreamingLLM,
    "h2o": H2O,
    "snapkv": SnapKV,
    "tova": TOVA,
    "adakv": AdaKV,
    "progressive": Progressive,
}
"""By the name that commands use."""

__all__ = [
    "H2O",
    "POLICIES",
    "TOVA",
    "AShape",
    "AdaKV",
    "At",
    "Full",
    "MInference",
    "Moment",
    "Observe",
    "Policy",
    "Progressive",
    "Rows",
    "Session",
    "SnapKV",
    "StreamingLLM",
    "TriShape",
    "Usage",
    "make_policy",
]


def make_policy(name: str, **options: Any) -> Policy:
    """The policy that commands call `name`, with its fields as options.

    Raises:
        SinkscopeError: no such policy, no such field, or a value that makes no sense.

    Example:
        >>> make_policy("streaming", budget=512)
        StreamingLLM(budget=512, first=4, last=0, every=1, mode='evict', positions='original', reduce='mean')
    """
    if name not in POLICIES:
        raise SinkscopeError(f"policy {name!r}: expected one of {', '.join(POLICIES)}")
    known = [field.name for field in fields(POLICIES[name])]
    odd = [option for option in options if option not in known]
    if odd:
        raise SinkscopeError(f"policy {name!r} has no {odd[0]!r}; it has: {', '.join(known)}")
    return POLICIES[name](**options)
