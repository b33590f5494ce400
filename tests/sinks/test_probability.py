"""`repeat --quantity probability` on a model that repeats until its sink sets in, and its numbers found another way."""

from __future__ import annotations

import pytest
import torch

from sinkscope.sinks.repeat import stopped_after

pytestmark = pytest.mark.few_texts


@pytest.mark.parametrize(
    ("likely", "expected"),
    [
        ([False, True, False, True, True], None),  # it comes back, so it has not stopped
        ([True, False, True, False, False], 4),
        ([False, False], None),
    ],
)
def test_repetition_has_stopped_only_where_it_never_comes_back(likely, expected):
    assert stopped_after(torch.where(torch.tensor(likely), 0.6, 0.4)) == expected
