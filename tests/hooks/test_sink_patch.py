"""SinkPatch: repairs planted sinks, changes nothing else, and gives the same numbers however the model is called."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from intervention_kit import logits
from organisms import Organism, organism, tiny_model
from raw_kit import blocks, down, inputs_edited, norms
from refusals import refused
from sample_results import sample_find_sinks, with_rows
from torch import Tensor
from torch.testing import assert_close

from sinkscope.hooks.edit import SinkPatch
from sinkscope.results.notation import Neuron
from sinkscope.results.row import row_of


def differing(o: Organism, ids: Tensor) -> int:
    """How many values of its sink neurons, outside experts, differ from theirs at the second token; by plain hooks."""
    counts = []
    for layer, neuron in o.truth.neurons:

        def count(x: Tensor, neuron: int = neuron) -> Tensor:
            counts.append(int((x[:, 1:, neuron] != x[:, 1:2, neuron]).sum()))
            return x

        with inputs_edited(down(blocks(o.model)[layer]), count):
            logits(o.model, ids)
    return sum(counts)


@pytest.mark.parametrize(("family", "seed"), [("llama", 0), ("mixtral", 1)])
def test_repairs_repetition_and_nothing_else(family, seed):
    o = organism(family, seed)
    layer, repeats = o.truth.sink_layer, 2 * o.truth.repeats_expected
    ids, text = o.repeated(repeats), o.natural(2, 24)
    before, typical = norms(o.model, ids)[layer, 0], norms(o.model, text)[layer, :, 1:]
    assert before[-1] > 0.5 * before[0] > 3 * typical.median()  # the attack works
    want = logits(o.model, text)
    is_dense = family != "mixtral"
    expected = differing(o, ids) if is_dense else repeats / 2
    with SinkPatch(sites=o.truth.neurons).on(o.model) as run:
        after = norms(o.model, ids)[layer, 0]
        assert after[1:].max() < 1.2 * typical.max()
        assert_close(after[0], before[0])  # the first token's sink stays
        patched = run.counts["patched"]
        # The neuron's small variation in ordinary text is lost: at most 0.2 % of the logits' own spread.
        assert (logits(o.model, text) - want).abs().max() < 2e-3 * want.std()
    assert run.summary() == f"SinkPatch patched {run.counts['patched']:,} values."
    assert patched == expected if is_dense else patched > expected  # copies of which a neuron had another value
    assert run.counts["patched"] > patched  # those of ordinary text, too


def test_calibrated_values_are_set_behind_the_first_token():
    model, ids = tiny_model("llama")[0], torch.tensor([[1, 5, 6, 7, 8, 9], [1, 20, 21, 22, 23, 24]])

    def put(values: Tensor) -> Tensor:
        values[:, 1:, [11, 3]] = torch.tensor([0.5, -0.25])
        return values

    with inputs_edited(down(blocks(model)[1]), put):
        want = logits(model, ids)
    with SinkPatch(sites=["L1.N11", "L1.N3"], calibrated={"L1.N3": -0.25, "L1.N11": 0.5}).on(model):
        assert_close(logits(model, ids), want)


def test_patch_from_result(tmp_path):
    """All neurons that write a spike of the first token, with their values on ordinary text."""
    found = sample_find_sinks()
    first, elsewhere = found.spikes
    neurons = [
        row_of("writers", name, role, share=0.5, left=0.5, neutral=neutral)
        for name, role, neutral in (("L2.N412", "needed", 0.01), ("L3.E2.N77", "lowers", 0.02), ("L3.N78", "raises", 3))
    ]
    found = replace(found, spikes=(with_rows(first, *neurons, without=("writers",)), elsewhere))
    patch = SinkPatch.from_result(found)
    assert patch.calibrated == {Neuron(2, None, 412): 0.01, Neuron(3, 2, 77): 0.02}
    patch.save(tmp_path / "patch.json")
    assert SinkPatch.load(tmp_path / "patch.json") == patch
    assert patch.sites == (*patch.calibrated,) and patch.model["fingerprint"] == "abc"
    for spikes in ((), (replace(first, needed=()),), (elsewhere,)):
        with refused(r"nothing to edit \(spikes: .*give the neurons yourself"):
            SinkPatch.from_result(replace(found, spikes=spikes))
