"""The view of a real model: its neurons have the numbers of plain hooks, and its page is small."""

from __future__ import annotations

import plain_spikes as plain
import pytest

from sinkscope.app.view.explorer import Explorer
from sinkscope.app.view.page import view_page
from sinkscope.sinks.spikes.records import neuron_of

LARGEST_PAGE = 2_800_000  # characters


@pytest.mark.slow
def test_the_neurons_of_smollm2_have_the_numbers_of_plain_hooks(smollm2):
    explorer = Explorer.open(smollm2.model, tokenizer=smollm2.tokenizer)
    ids, view = explorer.sinks.survey.ids, explorer.view()
    assert len(view_page(view, "smollm2")) <= LARGEST_PAGE
    assert {page.name for page in view.neuron_pages} == {"L11.N1229", "L11.N1487", "L2.N90", "L2.N430", "L1.N83"}
    seen = plain.run(smollm2.model, ids)
    expected = {(one.first, one.last): one for one in plain.spikes(seen)}
    compared = 0
    for page in view.neuron_pages:
        for one in view.circuit:
            spike = one.found
            alone = spike.table("alone").get(page.name)
            if spike.place.words != "the first token" or alone is None:
                continue
            (random,) = [row for row in one.random if neuron_of(row.name).layer == neuron_of(alone.name).layer]
            assert random.get("left") == pytest.approx(1, abs=0.01)
            for row in (alone, random):
                left = plain.without(smollm2.model, ids, expected[spike.layers], [neuron_of(row.name).site])
                assert (row.get("left"), row.get("heads")) == (pytest.approx(left.left, abs=1e-3), left.heads)
                compared += 1
    assert compared == 10
