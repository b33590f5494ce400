"""Decoder types of transformers, small and random: planted neuron, attention, cache, live and from a folder."""

from __future__ import annotations

import json

import pytest
import transformers
from covering import every_nth
from organisms.examine import examine

from experiments.model_types import COVERING, DATA, PAGE, page, types

RECORDED = json.loads(DATA.read_text())["result"]


def examined(model_type: str, quick: bool):
    """Nothing is wrong, and what is served stays served, by the version of transformers of the record."""
    if model_type not in RECORDED["types"]:
        pytest.skip("it cannot be built small")
    report = examine(model_type, quick=quick)
    assert not report.wrong
    if RECORDED["transformers"] == transformers.__version__ and RECORDED["types"][model_type]["status"] == "in full":
        assert report.status == "in full", report.parts


@pytest.mark.parametrize("model_type", every_nth(COVERING, 4))
def test_a_covering_set_of_types(model_type):
    examined(model_type, quick=True)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", types())
def test_every_type(model_type):
    examined(model_type, quick=False)


def test_the_page_shows_what_was_found():
    assert page(RECORDED) == PAGE.read_text()
    assert not any(found["wrong"] for found in RECORDED["types"].values())
