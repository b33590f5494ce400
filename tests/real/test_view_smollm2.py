"""The view of a real model: it names the neurons, and its page is small."""

from __future__ import annotations

import pytest

from sinkscope.app.view.explorer import Explorer
from sinkscope.app.view.page import view_page

LARGEST_PAGE = 2_800_000  # characters


@pytest.mark.slow
def test_the_page_of_smollm2_is_small_and_names_its_neurons(smollm2):
    view = Explorer.showing(None, smollm2.model, tokenizer=smollm2.tokenizer).view()
    assert view.neurons == ("L11.N1229", "L11.N1487") and len(view_page(view, "smollm2")) <= LARGEST_PAGE
