"""Check that hooks can count on where the prompt ended: that they find the cache in a call."""

from __future__ import annotations

import inspect

from sinkscope.errors import UnsupportedError
from sinkscope.models.call_cache import CACHE_NAMES, cache_parameter
from sinkscope.models.target import Target


def check_positions(target: Target) -> None:
    """Refuse a model that takes its cache by an unknown name: in every call, positions would be counted from 0.

    Raises:
        UnsupportedError: It does.
    """
    forward = target.base.forward
    if "use_cache" in inspect.signature(forward).parameters and cache_parameter(forward) is None:
        raise UnsupportedError(
            f"positions cannot be counted in {target.name} while it generates, because its cache does not come as "
            f"{' or '.join(CACHE_NAMES)}; rename that argument, or install the versions in constraints.txt"
        )
