"""Packings of two real models: what is said of a spike is the same, but for the names of what a packing renames."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drawn_packings import CASES
from packings import Names, packed

from sinkscope.measure import Setup
from sinkscope.sinks.spikes.find import find_sinks
from sinkscope.sinks.spikes.records import SpikeResult

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
TEXTS = 4
TEXT = "The quick brown fox jumps over the lazy dog. In 1921, the city council of Vienna decided to"
CLOSE = {"rel": 1e-2, "abs": 3e-3}
MEASURED: dict[str, list[SpikeResult]] = {}


def measured(model: Any, tokenizer: Any) -> list[SpikeResult]:
    """The spikes of the first token in a few texts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sinkscope.sinks.spikes.survey.SURVEYED", TEXTS)
        found = find_sinks.on(Setup.open(model, tokenizer=tokenizer))
    return list(found.first_spikes)


@pytest.mark.parametrize("name", CASES)
def test_a_packing_changes_nothing_but_names(name, request):
    case = CASES[name]
    real = request.getfixturevalue(case.model)
    new, names = packed(real.model, case.packings, seed=3)
    ids = torch.tensor([[real.tokenizer.bos_token_id, *real.tokenizer(TEXT, add_special_tokens=False).input_ids]])
    with torch.no_grad():
        logs = [model(ids).logits.log_softmax(-1) for model in (real.model, new)]
    torch.testing.assert_close(*logs, atol=2e-3, rtol=0)
    if case.model not in MEASURED:
        MEASURED[case.model] = measured(real.model, real.tokenizer)
    for intact, one in zip(MEASURED[case.model], measured(new, real.tokenizer), strict=True):
        compare(intact, one, names, case.renamed)


def compare(intact: SpikeResult, new: SpikeResult, names: Names, renamed: frozenset[str]) -> None:
    def moved(layer: int) -> int:
        return names.layers.get(layer, layer)

    last = moved(intact.layers[1])
    assert (moved(intact.layers[0]), moved(intact.peak)) == (new.layers[0], new.peak) and new.layers[1] >= last
    before, after = (spike.named("spike", "norm").get("norm_after") for spike in (intact, new))
    factor = after / before if "norms" in renamed else 1.0
    assert [intact.ratio, factor * before] == pytest.approx([new.ratio, after], **CLOSE)
    if not renamed & {"needed", "experts"}:
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
