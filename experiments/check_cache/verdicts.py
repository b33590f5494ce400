"""All checks on one cache, for caches here and in the environment of kvpress."""

from __future__ import annotations

import time
from typing import Any

from sinkscope.conformance.checks import CHECKS
from sinkscope.conformance.kit import TOLERANCE, Kit


def row_of(name: str, factory: Any, tolerance: float = TOLERANCE) -> dict[str, Any]:
    """The verdicts of all checks on a cache."""
    started = time.process_time()
    kit = Kit(factory, tolerance)
    checks: list[dict[str, Any]] = []
    for check, one in CHECKS.items():
        found = kit.checked(one)
        checks.append({"check": check, "verdict": found.verdict, "seen": found.seen})
    return {"cache": name, "checks": checks, "seconds": round(time.process_time() - started, 1)}
