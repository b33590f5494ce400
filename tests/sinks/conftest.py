"""What several tests of sinks read: it is measured once."""

from __future__ import annotations

import pytest

import sinkscope as ss
from sinkscope.measure import Setup


@pytest.fixture(scope="session")
def bundled() -> Setup:
    """What measurements of the model in the package work on."""
    return Setup.open(ss.load("bundled"))
