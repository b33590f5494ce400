"""Cache policies: what the KV cache keeps, and what attention sees of it."""

from __future__ import annotations

from sinkscope.kv.full import Full
from sinkscope.kv.observe import Observe
from sinkscope.kv.policy import At, Policy
from sinkscope.kv.session import Moment, Rows, Session
from sinkscope.kv.streaming_llm import StreamingLLM
from sinkscope.kv.usage import Usage

POLICIES: dict[str, type[Policy]] = {"full": Full, "streaming": StreamingLLM}
"""By the name that commands use."""

__all__ = ["POLICIES", "At", "Full", "Moment", "Observe", "Policy", "Rows", "Session", "StreamingLLM", "Usage"]
