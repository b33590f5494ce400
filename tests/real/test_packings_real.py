"""Packings of two real models: what is said of a spike is the same, but for the names of what a packing renames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from packings import (
    Names,
    Packing,
    cancelling,
    packed,
    permuted_heads,
    permuted_neurons,
    scaled_neurons,
    split,
    split_noisily,
    turned_values,
)

from sinkscope.measure import Setup
from sinkscope.sinks.spikes.find import find_sinks
from sinkscope.sinks.spikes.records import SpikeResult

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
TEXTS = 4
TEXT = "The quick brown fox jumps over the lazy dog. In 1921, the city council of Vienna decided to"
CLOSE = {"rel": 1e-2, "abs": 3e-3}
MEASURED: dict[str, list[SpikeResult]] = {}
LATE = ((2, 430), (11, 1229))
CASES: dict[str, tuple[str, Sequence[Packing]]] = {
    "split_unequal": ("smollm2", (split(11, 1229, (0.7, 0.25, 0.05)), split(11, 1487, (0.99, 0.01)))),
    "split_of_a_random_vector": ("smollm2", (split_noisily(11, 1229),)),
    "split_against_itself": ("smollm2", (split(11, 1229, (3.0, -2.0)),)),
    "cancelling_in_two_layers": (
        "smollm2",
        (cancelling(4, LATE[0], (1.0, 2.0, -3.0), LATE[1]), cancelling(9, LATE[0], (0.4, -0.4), LATE[1])),
    ),
    "split_in_forty": ("smollm2", (split(11, 1229, (1 / 40,) * 40),)),
    "gemma_gauges": ("gemma3", (permuted_neurons, scaled_neurons, permuted_heads, turned_values)),
    "gemma_split_relay": ("gemma3", (split(3, 1414, (0.5, 0.3, 0.2)), split(4, 84, (0.5, 0.5)))),
    "gemma_cancelling": (
        "gemma3",
        (cancelling(2, (3, 1414), (2.0, -2.0)), cancelling(4, (4, 84), (0.5, -0.5, 1.0, -1.0))),
    ),
    "gemma_split_of_a_random_vector": ("gemma3", (split_noisily(5, 584, 0.5),)),
}
"""A model and its packings, written down before any of them was measured."""


def measured(model: Any, tokenizer: Any) -> list[SpikeResult]:
    """The spikes of the first token in a few texts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sinkscope.sinks.spikes.survey.SURVEYED", TEXTS)
        found = find_sinks.on(Setup.open(model, tokenizer=tokenizer))
    return list(found.first_spikes)


@pytest.mark.parametrize("name", CASES)
def test_a_packing_changes_nothing_but_names(name, request):
    name_of_model, packings = CASES[name]
    real = request.getfixturevalue(name_of_model)
    new, names = packed(real.model, packings, seed=3)
    ids = torch.tensor([[real.tokenizer.bos_token_id, *real.tokenizer(TEXT, add_special_tokens=False).input_ids]])
    with torch.no_grad():
        logs = [model(ids).logits.log_softmax(-1) for model in (real.model, new)]
    torch.testing.assert_close(*logs, atol=2e-3, rtol=0)
    if name_of_model not in MEASURED:
        MEASURED[name_of_model] = measured(real.model, real.tokenizer)
    for intact, one in zip(MEASURED[name_of_model], measured(new, real.tokenizer), strict=True):
        compare(intact, one, names, splits="split" in name)


def compare(intact: SpikeResult, new: SpikeResult, names: Names, *, splits: bool) -> None:
    assert (intact.layers[0], intact.peak) == (new.layers[0], new.peak) and new.layers[1] >= intact.layers[1]
    before, after = (spike.named("spike", "norm").get("norm_after") for spike in (intact, new))
    assert [intact.ratio, before] == pytest.approx([new.ratio, after], **CLOSE)
    if not splits:
        needed = {names.neuron(one.layer, one.neuron) for one in intact.needed_neurons}
        assert needed == {(one.layer, one.neuron) for one in new.needed_neurons}
    shares = [sum(row.get("share") for row in spike.table("writers").values()) for spike in (intact, new)]
    assert shares[0] == pytest.approx(shares[1], **CLOSE)
    assert set(intact.table("effects")) == set(new.table("effects"))
    for name in ("at place", "hidden"):
        one, other = intact.named("effects", name), new.named("effects", name)
        assert one.get("left") == pytest.approx(other.get("left"), **CLOSE)
        assert one.get("loss") == pytest.approx(other.get("loss"), abs=2e-2)
        for heads in ("intact", "heads"):
            assert one.get(heads) == pytest.approx(other.get(heads), abs=1)
