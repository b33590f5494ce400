"""SinkPatch: repairs planted sinks, changes nothing else, and gives the same numbers however the model is called."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from intervention_kit import loud_model
from sample_results import sample_find_sinks, with_rows
from torch import Tensor
from torch.testing import assert_close

from sinkscope.errors import SinkscopeError
from sinkscope.hooks.edit import Ablate, SinkPatch
from sinkscope.results.parts import Neuron
from sinkscope.results.row import row_of

# --- it repairs, and only that -------------------------------------------------------------------------------------


# --- which neutral value -------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_prompt_read_before_the_run():
    model, _, sites = loud_model()
    ids = torch.tensor([[1, 20, 21, 22, 20, 21]])
    cache = model(ids[:, :4], use_cache=True).past_key_values

    def rest() -> Tensor:
        return model(ids[:, 4:], past_key_values=copy.deepcopy(cache)).logits

    with pytest.raises(SinkscopeError, match="4 tokens were read before this run"), SinkPatch(sites=sites).on(model):
        rest()
    with SinkPatch(sites=sites, calibrated=dict.fromkeys(sites, 0.25)).on(model):
        got = rest()
    with Ablate(sites=sites, value=0.25).on(model):
        assert_close(got, rest())


# --- made from a result, and files ---------------------------------------------------------------------------------


def test_patch_from_result(tmp_path):
    """All neurons that write a spike of the first token, with their values on ordinary text."""
    found = sample_find_sinks()
    first, elsewhere = found.spikes
    neurons = [
        row_of("writers", name, role, share=share, left=0.5, neutral=neutral)
        for name, role, share, neutral in (
            ("L2.N412", "needed", 0.9, 0.01),
            ("L3.E2.N77", "lowers", 0.1, 0.02),
            ("L3.E2.N78", "raises", 0.1, 0.02),
        )
    ]
    first = with_rows(first, *neurons, without=("writers",))
    found = replace(found, spikes=(first, elsewhere))
    patch = SinkPatch.from_result(found)
    assert patch.sites == (Neuron(2, None, 412), Neuron(3, 2, 77))
    assert patch.calibrated == {Neuron(2, None, 412): 0.01, Neuron(3, 2, 77): 0.02}
    patch.save(tmp_path / "patch.json")
    assert SinkPatch.load(tmp_path / "patch.json") == patch and patch.model["fingerprint"] == "abc"
    assert SinkPatch.from_result(found, spike=0) == patch
    for spikes in ((), (replace(first, needed=()),), (replace(first, needed=("mlp 2",)),)):
        with pytest.raises(SinkscopeError, match="nothing to edit"):
            SinkPatch.from_result(replace(found, spikes=spikes))
    with pytest.raises(SinkscopeError, match="not at the first token"):
        SinkPatch.from_result(replace(found, spikes=(elsewhere,)))
    with pytest.raises(SinkscopeError, match="this result has 2 spikes, numbered from 0"):
        SinkPatch.from_result(found, spike=2)
