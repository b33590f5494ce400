"""Ablate and what every intervention shares: where it acts, what it leaves behind, who it concerns."""

from __future__ import annotations

import gc
import re
import warnings

import numpy as np
import pytest
import torch
from intervention_kit import bridge_of, logits
from organisms import organism, tiny_model
from plain_hooks import inputs_edited, zeroed
from refusals import refused
from torch import Tensor
from torch.testing import assert_close

import sinkscope as ss
from sinkscope.errors import SinkscopeWarning
from sinkscope.hooks import edit
from sinkscope.hooks.edit import Ablate, Knockout

IDS = torch.tensor([[1, 5, 6, 7, 8, 9], [1, 20, 21, 22, 23, 24]])


def test_numbers_of_numpy_and_torch_name_what_is_edited():
    sites = Ablate(sites=[(1, 3), (1, 11)])
    assert (
        Ablate(layer=np.int64(1), neurons=np.array([3, 11])) == Ablate(sites=torch.tensor([[1, 3], [1, 11]])) == sites
    )
    assert Ablate(heads=np.array([[0, 4]]), positions=torch.tensor([0, 2])) == Ablate(heads="L0.H4", positions=[0, 2])


# Of plain models the net draws this (`tests/ways`).
@pytest.mark.parametrize(
    ("model_type", "sites"), [("gpt2", ["L1.N3", "L1.N11", "L2.N0"]), ("mixtral", [f"L1.E{n}.N3" for n in range(4)])]
)
def test_zero_ablation_of_a_bridge_is_what_raw_hooks_do(model_type, sites):
    model, tokenizer = tiny_model(model_type)
    with zeroed(model, [tuple(map(int, re.findall("[0-9]+", site))) for site in sites]):
        want = logits(model, IDS)
    assert (want - logits(model, IDS)).abs().max() > 1e-3
    other = bridge_of(model, tokenizer)
    with (Ablate(sites=sites, value=9.0) | Ablate(sites=sites)).on(other):
        assert_close(logits(other, IDS), want, atol=1e-4, rtol=1e-3)


def test_up_edits_the_linear_factor():
    """Of Phi-3's fused projection, whose first 64 outputs are the gate."""
    model, _ = tiny_model("phi3")

    def edited(_module, _args, output):
        output[:, 2, 64 + 3] = 0.5

    handle = model.model.layers[1].mlp.gate_up_proj.register_forward_hook(edited)
    want = logits(model, IDS)
    handle.remove()
    with Ablate(sites="L1.N3", value=0.5, positions=2, site="up").on(model):
        assert_close(logits(model, IDS), want, atol=1e-5, rtol=1e-4)


def test_a_run_is_entered_once():
    model, _ = tiny_model("llama")
    context = Ablate(sites=["L1.N3"]).on(model)
    with context:
        pass
    with refused("entered before"), context:
        pass


WRONG = {
    "Ablate([])": ["no neuron", "layer=1"],
    "Ablate(neurons=[3])": ["layer=None", "give both"],
    "SinkPatch(layer=-1, neurons=[3])": ["(-1, 3)", "from 0"],
    "mixtral: Ablate([(1, 0, 3)], site='up')": ["experts", 'site="post"'],
    "Ablate([(1, 1)], positions=slice(-3, None))": ["positions=slice(-3, None, None)", "expected"],
    "Ablate([(1, 0, 3)])": ["no experts", "(layer, neuron)"],
    "mixtral: Ablate([(1, 3)])": ["mixture", "(layer, expert, neuron)"],
    "mixtral: Ablate([(1, 4, 3)])": ["expert 4", "0 to 3"],
    "qwen3_moe: Ablate([(1, 0, 32)])": ["neuron 32", "0 to 31"],  # narrower than a dense layer
    "gpt2: Ablate([(1, 0)], site='up')": ["no gate", 'site="post"'],
    "Ablate(heads=['L1.N3'])": ["'L1.N3'", "L5.H3"],
    "Ablate(heads=[(0, 4)])": ["head 4", "0 to 3"],
    "Add([1.0, 2.0], 'blocks.1.hook_resid_post')": ["2 numbers", "has 32"],
    "Add([float('nan')] * 32, 'hook_embed')": ["finite"],
    "Add([1.0] * 32, 'hook_embed', scale=float('inf'))": ["scale", "inf"],
    "Add([1.0] * 32, 'blocks.1.mlp.hook_post')": ["blocks.1.mlp.hook_post", "hook_resid_post"],
    "Knockout(None)": ["keys=None: expected positions"],
    "Knockout('last')": ["keys='last'", '"first", whole numbers from 0'],
    "Knockout('first', layers=[0], heads=['L1.H2'])": ["heads name their layers"],
    "SinkPatch.from_result({})": ["a dict has no spikes"],
    "Ablate('L1.N3', value=torch.ones(1, requires_grad=True)[0])": ["would be taken for a constant: give a plain"],
}


@pytest.mark.parametrize(("call", "words"), WRONG.items())
def test_what_is_no_edit_of_this_model_is_refused(call, words):
    """Of a Llama, where no other model is named."""
    model_type, _, make = call.rpartition(": ")
    with refused(words=words), eval(make, {**vars(edit), "torch": torch}).on(tiny_model(model_type or "llama")[0]):
        pass


def test_a_knockout_in_a_head_by_its_name_or_its_numbers():
    """Of plain models the net draws what is hidden; a query always sees itself."""
    model = tiny_model("llama")[0]
    found = []
    for one in (Knockout("first", heads=[(1, 2)]), Knockout("first", heads="L1.H2"), Knockout([3], queries=[3])):
        with one.on(model) as run:
            found.append(logits(model, IDS))
        later_queries = IDS.shape[0] * (IDS.shape[1] - 1)
        assert run.summary() == f"Knockout hid {'no cell' if one.queries else f'{later_queries} cells'} of attention."
    plain = logits(model, IDS)
    assert torch.equal(found[0], found[1]) and not torch.allclose(found[0], plain, atol=1e-4)
    assert_close(found[2], plain)


def test_the_neurons_of_a_result_are_zeroed_and_the_run_says_so():
    model = ss.load("bundled")
    made = Ablate.from_result(ss.find_sinks(model))
    assert made == Ablate("L1.N338") == Ablate(layer=1, neurons=[338])
    with torch.no_grad(), made.on(model) as run:
        model(torch.tensor([[0, 35, 1956]]))
    assert str(run) == "Ablate on bundled: Ablate ablated 3 values."


def test_mean_ablation():
    """The mean of each row, without its first token."""
    model, _ = tiny_model("llama")

    def averaged(values: Tensor) -> Tensor:
        values[:, :, 3] = values[:, 1:, 3].mean(1, keepdim=True)
        return values

    with inputs_edited(model.model.layers[1].mlp.down_proj, averaged):
        want = logits(model, IDS)
    with Ablate(layer=1, neurons=3, value="mean").on(model):
        assert_close(logits(model, IDS), want)


def test_an_edit_that_is_not_entered_on_a_model_says_so():
    model = tiny_model("llama")[0]
    with refused(words=["Ablate acts on a model: write `with Ablate(...).on(model):`"]), Ablate("L1.N3"):
        pass
    with pytest.warns(SinkscopeWarning, match=r"Ablate \| Knockout.on\(...\) was never entered, so it did nothing"):
        (Ablate("L1.N3") | Knockout("first")).on(model)
        gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Ablate("L1.N3").on(model):
            pass
        with refused("layer 9 is not in"):
            Ablate("L9.N3").on(model).__enter__()
        gc.collect()


def test_an_edit_is_made_of_the_file_of_a_result(tmp_path):
    o = organism()
    found = ss.find_sinks(o.model, tokenizer=o.tokenizer)
    path = found.save(tmp_path / "found.json")
    for make in (ss.Ablate.from_result, ss.SinkPatch.from_result):
        assert make(path) == make(str(path)) == make(found)
    with refused("cannot read other.json: no such file"):
        ss.SinkPatch.from_result(tmp_path / "other.json")
