"""Mixtures with a shared expert: its neurons are named without an expert's number, and are treated as all others."""

from __future__ import annotations

import pytest
import torch
from organisms import tiny_model
from raw_kit import zeroed
from torch.testing import assert_close

from sinkscope.errors import SinkscopeError
from sinkscope.interventions import Ablate
from sinkscope.models.target import Target
from sinkscope.opening.live import target_of
from sinkscope.sinks.first_token.effects import Edit, effects
from sinkscope.trace.layer_view import (
    columns,
    contribution_norms,
    view_layer,
)

IDS = torch.tensor([[1, 5, 6, 7, 8, 9], [1, 20, 21, 22, 23, 24]])
FAMILIES = {"qwen2_moe": ("mlp.shared_expert", 32, 48), "glm4_moe": ("mlp.shared_experts", 24, 48)}
LAYER = 1


def _inside(target: Target, family: str) -> tuple[torch.Tensor, torch.Tensor]:
    """By plain hooks: what enters the shared down projection, and the weight of the shared expert, per token."""
    layer, seen = target.layers[LAYER], {}
    down = layer.get_submodule(f"{FAMILIES[family][0]}.down_proj")
    handles = [down.register_forward_pre_hook(lambda _m, args: seen.update(post=args[0].flatten(0, -2)))]
    if family == "qwen2_moe":
        gate = layer.get_submodule("mlp.shared_expert_gate")
        handles.append(gate.register_forward_hook(lambda _m, _a, out: seen.update(weight=torch.sigmoid(out))))
    with torch.no_grad():
        target.hf(IDS)
    for handle in handles:
        handle.remove()
    return seen["post"], seen.get("weight", torch.ones(IDS.numel(), 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_all_neurons_write_is_what_the_mlp_gives(family):
    """Routed ones first, `expert * d_mlp + neuron`, shared ones behind them; each weight as the model applies it."""
    target, (_, width, shared) = target_of(tiny_model(family)[0]), FAMILIES[family]
    view = view_layer(target, LAYER, IDS, torch.ones_like(IDS, dtype=torch.bool))
    assert view.post.shape[1] == 4 * width + shared and view.routing is not None
    cols = columns(target, LAYER, torch.arange(view.post.shape[1]))
    assert_close(view.post @ cols, view.mlp, atol=2e-6, rtol=1e-4)
    assert_close(contribution_norms(target, view), view.post.abs() * cols.norm(dim=-1))
    post, weight = _inside(target, family)
    assert_close(view.post[:, 4 * width :], post * weight)
    assert_close(view.routing[:, -1:], weight)
    if family == "qwen2_moe":
        assert float(weight.max() - weight.min()) > 0.1, "the test needs a gate that differs between tokens"


@pytest.mark.parametrize("family", FAMILIES)
def test_zeroed_in_rows_is_zeroed_alone(family):
    """Many edits in one pass, of routed and shared neurons, give the norms of real passes with raw hooks."""
    model, _ = tiny_model(family)
    sets = [((LAYER, 40),), ((LAYER, 2, 3),), ((LAYER, 40), (LAYER, 2, 3), (LAYER, 0))]
    seen = effects(target_of(model), IDS, [Edit(zero=sites) for sites in sets], at=3)
    intact = seen.intact_norms[:, LAYER:]
    for sites, found in zip(sets, seen.norms, strict=True):
        with zeroed(model, sites), torch.no_grad():
            states = model(IDS, output_hidden_states=True).hidden_states[LAYER + 1]
        assert_close(found[:, LAYER], states[:, 3].norm(dim=-1), rtol=1e-4, atol=1e-4)
        assert (found[:, LAYER:] - intact).abs().max() > 1e-3 or sites == ((LAYER, 2, 3),)  # may not be asked there


def test_a_neuron_that_the_shared_expert_lacks_is_refused():
    model, _ = tiny_model("qwen2_moe")
    for site, wanted in (((1, 48), "0 to 47"), ((1, 0, 40), "0 to 31"), ((1, 4, 0), "0 to 3")):
        with pytest.raises(SinkscopeError, match=wanted), Ablate(sites=[site]).on(model):
            pass
    with (
        pytest.raises(SinkscopeError, match="one MLP without experts"),
        Ablate(sites=[(0, 1, 3)]).on(tiny_model("glm4_moe")[0]),
    ):
        pass  # its first layer is dense
