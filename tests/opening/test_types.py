"""Decoder types of transformers, small and random: planted neuron, attention, cache, sites, live and from a folder."""

from __future__ import annotations

import json

import pytest
import transformers
from covering import slow
from organisms.examine import examine

from experiments.model_types import COVERING, DATA, PAGE, TYPES_PAGE, sentences, types, types_page

EXAMINED = {*COVERING[::9], "bloom", "granite", "minicpm3", "bamba", "moshi", "olmoe", "gpt_neox"}
RECORDED = json.loads(DATA.read_text())["result"]


@pytest.mark.few_texts
@pytest.mark.parametrize("model_type", [name if name in EXAMINED else slow(name) for name in types()])
def test_a_type_is_served_as_it_is_recorded(model_type):
    """Nothing is wrong, and what is served stays served, by the version of transformers of the record."""
    if model_type not in RECORDED["types"]:
        pytest.skip("it cannot be built small")
    report, recorded = examine(model_type), RECORDED["types"][model_type]
    assert not report.wrong
    if RECORDED["transformers"] == transformers.__version__ and recorded["status"] != "refused":
        assert (report.status, report.sites) == (recorded["status"], recorded["sites"]), report.parts


def test_the_pages_say_what_was_found():
    assert types_page(RECORDED) == TYPES_PAGE.read_text()
    said = " ".join(PAGE.read_text().split())
    assert all(sentence in said for sentence in sentences(RECORDED["types"]))
    assert not any(found["wrong"] for found in RECORDED["types"].values())
