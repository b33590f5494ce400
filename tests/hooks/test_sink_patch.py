"""SinkPatch: what it sets and counts, and where it comes from; tests/sinks has what it repairs."""

from __future__ import annotations

from dataclasses import replace

import torch
from intervention_kit import logits
from organisms import tiny_model
from plain_hooks import blocks, down, inputs_edited
from refusals import refused
from sample_results import sample_find_sinks, writer
from torch import Tensor
from torch.testing import assert_close

from sinkscope.hooks.edit import SinkPatch
from sinkscope.results.mean import Mean
from sinkscope.results.notation import Neuron
from sinkscope.sinks.spikes.tables import Role


def test_calibrated_values_are_set_behind_the_first_token():
    model, ids = tiny_model("llama")[0], torch.tensor([[1, 5, 6, 7, 8, 9], [1, 20, 21, 22, 23, 24]])

    def put(values: Tensor) -> Tensor:
        values[:, 1:, [11, 3]] = torch.tensor([0.5, -0.25])
        return values

    with inputs_edited(down(blocks(model)[1]), put):
        want = logits(model, ids)
    with SinkPatch(sites=["L1.N11", "L1.N3"], calibrated={"L1.N3": -0.25, "L1.N11": 0.5}).on(model) as run:
        assert_close(logits(model, ids), want)
    assert run.summary() == "SinkPatch patched 20 values."


def test_patch_from_result():
    """All neurons that write a spike of the first token, with their values on ordinary text."""
    found = sample_find_sinks()
    first, elsewhere = found.spikes
    needed = writer(Neuron(2, None, 412), 0.5, 0.5, Role.NEEDED)
    lowers = replace(writer(Neuron(3, 2, 77), 0.5, 0.5, Role.LOWERS), neutral=Mean(0.02))
    raises = writer(Neuron(3, None, 78), 0.5, 0.5, Role.RAISES)
    found = replace(found, spikes=(replace(first, writers=(needed, lowers, raises)), elsewhere))
    patch = SinkPatch.from_result(found)
    assert patch.calibrated == {Neuron(2, None, 412): 0.01, Neuron(3, 2, 77): 0.02}
    assert patch.sites == (*patch.calibrated,) and patch.model["fingerprint"] == found.model.fingerprint
    for spikes in ((), (replace(first, needed=()),), (elsewhere,)):
        with refused(r"nothing to edit \(spikes: .*give the neurons yourself"):
            SinkPatch.from_result(replace(found, spikes=spikes))
