"""Other data types than float32."""

from __future__ import annotations

from sinkscope.conformance.checks.registry import check
from sinkscope.conformance.flow import Flow
from sinkscope.conformance.kit import Kit


@check
def half_precision_is_as_exact_as_the_plain_model(kit: Kit) -> str:
    """In bfloat16 and float16, the logits are those of the plain model in this type, but for its rounding."""
    flows = [Flow(dtype=dtype, lengths=(24, 24)) for dtype in ("bfloat16", "float16")]
    return kit.right(*flows, budget=False)
