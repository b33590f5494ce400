"""The model that most tests of the cache use."""

from __future__ import annotations

import pytest
from kv_kit import shallow_of


@pytest.fixture
def model():
    """A random Llama of two layers."""
    return shallow_of("llama")
