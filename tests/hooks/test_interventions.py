"""Ablate and what every intervention shares: where it acts, what it leaves behind, who it concerns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from covering import every_nth
from hypothesis import given
from hypothesis import strategies as st
from intervention_kit import bridge_of, count_hooks, logits
from organisms import MODEL_TYPES, tiny_model
from raw_kit import inputs_edited, zeroed
from refusals import refused
from torch import Tensor
from torch.testing import assert_close

import sinkscope as ss
from sinkscope.engine.calls import begin_step
from sinkscope.engine.rows import put_rows
from sinkscope.errors import SinkscopeError
from sinkscope.hooks.edit import Ablate, SinkPatch

IDS = torch.tensor([[1, 5, 6, 7, 8, 9], [1, 20, 21, 22, 23, 24]])
PADDED = torch.tensor([[3, 3, 1, 5, 6, 7], [1, 8, 9, 10, 11, 12]])
MASK = (PADDED != 3).long()
SHARED = ("qwen2_moe", "glm4_moe")
EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss", *SHARED)


def sites_for(model_type: str) -> list[tuple[int, ...]]:
    if model_type in EXPERTS:
        routed = [(1, expert, neuron) for expert in range(4) for neuron in (3, 11)]
        return routed + ([(1, 3), (2, 40)] if model_type in SHARED else [])  # 40: more than a routed expert has
    return [(1, 3), (1, 11), (2, 0)]


def test_numbers_of_numpy_and_torch_name_what_is_edited():
    sites = Ablate(sites=[(1, 3), (1, 11)])
    assert Ablate(layer=np.int64(1), neurons=np.array([3, 11])) == sites
    assert Ablate(layer=1, neurons=torch.tensor([3, 11])) == Ablate(sites=torch.tensor([[1, 3], [1, 11]])) == sites
    assert Ablate(heads=np.array([[0, 4]]), positions=torch.tensor([0, 2])) == Ablate(heads="L0.H4", positions=[0, 2])
    assert Ablate(layer=1, neurons=3, value=torch.tensor(0.5)) == Ablate(layer=1, neurons=3, value=0.5)
    with pytest.raises(SinkscopeError, match=r"positions slice\(-3, None, None\): expected"):
        Ablate(layer=1, neurons=3, positions=slice(-3, None))
    with pytest.raises(SinkscopeError, match="a dict has no spikes"):
        SinkPatch.from_result({})


# --- the mechanism, against edited weights -------------------------------------------------------------------------


# Of plain models the net draws this (`tests/ways`); TransformerLens cannot take apart Falcon's fused attention.
@pytest.mark.parametrize("model_type", every_nth(sorted({*MODEL_TYPES, *SHARED} - {"falcon"}), 4))
def test_zero_ablation_of_a_bridge_is_what_raw_hooks_do(model_type):
    model, tokenizer = tiny_model(model_type)
    sites = sites_for(model_type)
    with zeroed(model, sites):
        want = logits(model, IDS)
    assert (want - logits(model, IDS)).abs().max() > 1e-3
    edit, other = Ablate(sites=sites), bridge_of(model, tokenizer)
    with edit.on(other):
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
    with Ablate(sites="L1.N3", value=0.5, positions=2).on(model):
        assert (logits(model, IDS) - want).abs().max() > 1e-4


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


# --- a written value: is the neuron sufficient? ----------------------------------------------------------------


# --- positions: every way of calling, against counting by hand -----------------------------------------------------


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 4), max_size=4),
    left=st.booleans(),
)
def test_true_positions_of_padded_chunks(lengths, cuts, left):
    width = max(lengths)
    real = torch.zeros(len(lengths), width, dtype=torch.bool)
    want = torch.full((len(lengths), width), -1)
    for row, n in enumerate(lengths):
        part = slice(width - n, width) if left else slice(0, n)
        real[row, part] = True
        want[row, part] = torch.arange(n)
    held = FakeCache()
    got, start = [], 0
    for size in [*cuts, width]:
        stop = min(width, start + size)
        if stop == start:
            break
        tokens = torch.full((len(lengths), stop - start), 7)
        told = {"input_ids": tokens, "attention_mask": real[:, :stop].long()}
        call = begin_step(0, 0, told, held, told)
        put_rows(held, 0, call.state)
        got.append(call.index)
        held.seen = start = stop
    assert torch.equal(torch.cat(got, 1), want)
    # A token without mask comes after all real ones.
    told = {"input_ids": torch.full((len(lengths), 1), 7)}
    assert begin_step(0, 1, told, held, told).index.flatten().tolist() == lengths


class FakeCache:
    seen = 0

    def get_seq_length(self) -> int:
        return self.seen


# --- leaves no trace -----------------------------------------------------------------------------------------------


# --- threads -------------------------------------------------------------------------------------------------------


def test_a_run_is_entered_once():
    model, _ = tiny_model("llama")
    context = Ablate(sites=["L1.N3"]).on(model)
    with context:
        pass
    with refused("entered before"), context:
        pass
    assert count_hooks(model) == 0


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "settings", "words"),
    [
        ("llama", {}, ["no neuron", "layer=1"]),
        ("llama", {"neurons": [3]}, ["layer=None", "give both"]),
        ("mixtral", {"sites": [(1, 0, 3)], "site": "up"}, ["experts", 'site="post"']),
        ("llama", {"sites": [(1,)]}, ["(1,)", "(layer, neuron)"]),
        ("llama", {"sites": [(1, -2)]}, ["-2", "from 0"]),
        ("llama", {"sites": [(1, 1)], "positions": [3, -1]}, ["-1", "whole numbers"]),
        ("llama", {"sites": [(3, 0)]}, ["layer 3", "0 to 2"]),
        ("llama", {"sites": [(1, 0, 3)]}, ["without experts", "(layer, neuron)"]),
        ("mixtral", {"sites": [(1, 3)]}, ["mixture", "(layer, expert, neuron)"]),
        ("mixtral", {"sites": [(1, 4, 3)]}, ["expert 4", "0 to 3"]),
        ("qwen3_moe", {"sites": [(1, 0, 32)]}, ["neuron 32", "0 to 31"]),  # narrower than a dense layer
        ("gpt2", {"sites": [(1, 0)], "site": "up"}, ["no gate", 'site="post"']),
        ("llama", {"heads": ["L1.N3"]}, ["'L1.N3'", "L5.H3"]),
        ("llama", {"heads": [(0, 4)]}, ["head 4", "0 to 3"]),
    ],
)
def test_wrong_ablations_are_refused(model_type, settings, words):
    model, _ = tiny_model(model_type)
    with refused(words=words), Ablate(**settings).on(model):
        pass


def test_the_neurons_of_a_result_are_zeroed_and_the_run_says_so():
    model = ss.load("bundled")
    made = Ablate.from_result(ss.find_sinks(model))
    assert made == Ablate("L1.N338") == Ablate(layer=1, neurons=[338])
    with torch.no_grad(), made.on(model) as run:
        model(torch.tensor([[0, 35, 1956]]))
    assert str(run) == "Ablate on bundled: Ablate ablated 3 values."
