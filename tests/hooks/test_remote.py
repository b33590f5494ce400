"""Edits and sites that are sent to a server of nnsight, in its own simulation, which hides this package."""

from __future__ import annotations

import nnsight
import pytest
import torch
from organisms import organism
from refusals import refused
from torch.testing import assert_close

import sinkscope as ss

IDS = torch.arange(5, 25)[None].repeat(2, 1)
RIGHT = torch.ones_like(IDS).index_put((torch.tensor(1), torch.arange(16, 20)), torch.tensor(0))
LEFT = RIGHT.flip(1)
VECTOR = torch.linspace(-1, 1, 96)
EDITS = {
    "neurons": ss.Ablate(neurons=["L1.N3", "L2.N28", "L2.N179"]),
    "mean, heads": ss.Ablate(neurons="L1.N3", value="mean")
    | ss.Ablate(heads=["L1.H0", "L0.H1"], value=0.5, positions=[2, 3]),
    "second": ss.SinkPatch(layer=1, neurons=range(40)),
    "calibrated": ss.SinkPatch(sites=[(2, 28), (2, 5)], calibrated={(2, 28): 0.1, (2, 5): -0.2}, value="calibrated"),
    "number": ss.SinkPatch(neurons="L1.N3", value=2.0),
    "vector": ss.Add(VECTOR, "blocks.*.hook_resid_p*", positions=slice(2, 9)),
}


def nameless(family: str, tmp_path) -> tuple[object, object]:
    """A planted model, and the same for nnsight, without weights as one made by name is."""
    planted = organism(family, 3)
    planted.save(tmp_path)
    return planted.model, nnsight.TransformersModel(str(tmp_path), task="text-generation", tokenizer=planted.tokenizer)


def check(family: str, tmp_path, mask, edits) -> None:
    plain, made = nameless(family, tmp_path)
    sent = ss.remote(made, "local")
    sites = ["hook_embed", "blocks.[12].hook_resid_p*", "blocks.[12].*_out", "blocks.[12].*.hook_[qkvz]", "ln_final"]
    sites += ["blocks.[12].mlp.hook_pre", "blocks.[12].mlp.hook_post", "logits"]
    names = list(ss.trace(plain, IDS, sites))
    assert len(names) > 20 and next(made._module.parameters()).is_meta
    unedited = ss.trace(plain, IDS, names, attention_mask=mask)
    for edit in edits:
        got = sent.trace(IDS, names, edit, attention_mask=mask)
        with edit.on(plain):
            wanted = ss.trace(plain, IDS, names, attention_mask=mask)
        assert list(got) == names
        for name in names:
            assert_close(got[name], wanted[name], atol=1e-4, rtol=1e-4)
        changed = [name for name in names if not torch.allclose(unedited[name], wanted[name], atol=5e-3)]
        assert changed, edit


@pytest.mark.parametrize("mask", [RIGHT, LEFT])
def test_what_is_sent_gives_what_the_plain_model_gives(tmp_path, mask):
    check("llama", tmp_path, mask, EDITS.values())


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "neox"])
def test_other_models_give_it_too(tmp_path, family):
    check(family, tmp_path, RIGHT, [EDITS["mean, heads"], EDITS["second"]])


def test_what_cannot_be_sent_is_refused_by_name(tmp_path):
    _, made = nameless("llama", tmp_path)
    sent = ss.remote(made)
    patch = ss.SinkPatch(sites=[(2, 28)], calibrated={(2, 28): 0.1})
    for edit, words in (
        (ss.Quantize(kv=4), "Quantize.* decides by what it measures"),
        (ss.kv.StreamingLLM(12), "StreamingLLM acts on the cache"),
        (EDITS["neurons"] | ss.LoopGuard(), "LoopGuard acts on the cache"),
        (patch, "SinkPatch.* decides by what it measures"),
    ):
        with refused(f"this cannot be sent to a server: {words}"):
            sent.trace(IDS, "logits", edit)
    with refused("Linear, where a site or an edit is, does not run"):
        sent._order({(torch.nn.Linear(1, 1), "pre")})
    with refused("no module returns the rows of 'blocks.1.attn.hook_pattern'"):
        sent.trace(IDS, "blocks.1.attn.hook_pattern")
    with refused("neuron 999999 is not in"):
        sent.trace(IDS, "logits", ss.Ablate(neurons="L1.N999999"))
    assert next(made._module.parameters()).is_meta
    with refused("LlamaForCausalLM is no model of nnsight"):
        ss.remote(organism("llama", 3).model)


def test_neurons_of_experts_stay_here(tmp_path):
    _, made = nameless("mixtral", tmp_path)
    with refused("Ablate computes more than new values"):
        ss.remote(made).trace(IDS, "logits", ss.Ablate(sites=[(1, 2, 0)]))
