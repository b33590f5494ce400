"""Methods as they are written, and what they become."""

from __future__ import annotations

import pytest
from refusals import refused

from sinkscope.bench.methods import read_methods


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h20", "method 'h20' is unknown: expected some of adakv, full"),
        ("streaming:sinks=3", "'sinks=3' is no setting, or is given twice: it has"),
        ("full:0.5", "'budget=0.5' is no setting, or is given twice: it has none"),
        ("h2o:0.5:budget=8", "'budget=8' is no setting, or is given twice"),
        ("h2o:0.0", "budget=0.0: expected a number of tokens from 1, or a fraction"),
        ("h2o:recent=many", "recent='many'"),
        ("sinkscope.kv:Nothing", "Nothing"),
        ("", "no method is given: choose from adakv, full"),
    ],
)
def test_what_is_wrong_with_a_method(text, message):
    with refused(words=[message]):
        read_methods([text] if text else [])
