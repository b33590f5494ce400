"""The view of a real model: its neurons have the numbers of plain hooks, and its page is small."""

from __future__ import annotations

import plain_spikes as plain
import pytest
import torch
from raw_kit import blocks, down, inputs_edited

from sinkscope.app.view.explorer import Explorer
from sinkscope.app.view.page import view_page
from sinkscope.app.view.texts import STORY, ids_of

LARGEST_PAGE = 2_800_000  # characters


def fired(model, ids, site):
    """The activation of a neuron, by a plain hook."""
    seen = []
    with inputs_edited(down(blocks(model)[site[0]]), lambda x: seen.append(x) or x), torch.no_grad():
        model(ids)
    return seen[0][..., site[1]]


def site_of(name: str) -> tuple[int, int]:
    layer, neuron = name.removeprefix("L").split(".N")
    return int(layer), int(neuron)


@pytest.mark.slow
def test_the_neurons_of_smollm2_have_the_numbers_of_plain_hooks(smollm2):
    explorer = Explorer.open(smollm2.model, tokenizer=smollm2.tokenizer)
    setup, ids = explorer.setup, explorer.sinks.survey.ids
    view = explorer.view()
    assert len(view_page(view, "smollm2")) <= LARGEST_PAGE
    assert {page.name for page in view.neuron_pages} == {"L11.N1229", "L11.N1487", "L2.N90", "L2.N430", "L1.N83"}
    seen = plain.run(smollm2.model, ids)
    expected = {(one.first, one.last): one for one in plain.spikes(seen)}
    compared = 0
    for page, on_text in zip(view.neuron_pages, view.texts[0].variants[0].activations, strict=True):
        site = site_of(page.name)
        story = fired(smollm2.model, torch.tensor([ids_of(setup, STORY)]), site)[0]
        assert on_text == pytest.approx(story.tolist(), rel=1e-3, abs=1e-4)
        typical = fired(smollm2.model, ids, site)
        assert abs(page.largest[0].value) == pytest.approx(float(typical.abs().max()), rel=1e-3)
        assert page.median == pytest.approx(float(typical.median()), rel=1e-2, abs=1e-4)
        for one in view.circuit:
            spike = one.found
            alone = [left for left in spike.alone if str(left.address) == page.name]
            if spike.place.words != "the first token" or not alone:
                continue
            (random,) = [other for other in one.random if other.layer == site[0]]
            assert random.left == pytest.approx(1, abs=0.01)
            for outcome in (*alone, random):
                left = plain.without(smollm2.model, ids, expected[spike.layers], [outcome.site])
                assert (outcome.left, outcome.heads) == (pytest.approx(left.left, abs=1e-3), left.heads)
                assert outcome.perplexity == pytest.approx(left.perplexity, rel=1e-3)
                compared += 1
    assert compared == 10
