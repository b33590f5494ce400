"""A proof holds for the object that was proved: what somebody replaced in a model is served as it is, or refused."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from organisms.tiny import tiny_model
from refusals import refused
from torch import nn
from torch.nn.functional import linear
from torch.nn.utils.parametrize import register_parametrization

import sinkscope as ss
from sinkscope import kv
from sinkscope.models.neurons import columns, view_layer
from sinkscope.opening.load import target_of

IDS = torch.tensor([[1, 10, 11, 12, 13]])
LAYER, SOME = 1, torch.tensor([3, 5])
CHANGE = torch.randn(32, 2, generator=torch.Generator().manual_seed(0)) @ torch.randn(2, 64)
"""What is added to the weight of a down projection."""


def changed(change=lambda model: None, family="llama"):
    """A model of a class that was proved before, after a change."""
    target_of(tiny_model(family)[0])
    model = copy.deepcopy(tiny_model(family)[0])
    change(model)
    return model


def mlp_of(model):
    return model.model.layers[LAYER].mlp


def columns_of(model, layer=LAYER):
    return columns(target_of(model), layer, SOME)


# -- what is served as it is -------------------------------------------------------------------------------------------


class Plus(nn.Module):
    def forward(self, weight):
        return weight + CHANGE


def merged(model):
    mlp_of(model).down_proj.weight.data += CHANGE


def by_forward(model):
    own = mlp_of(model).down_proj.forward
    mlp_of(model).down_proj.forward = lambda hidden: own(hidden) + hidden @ CHANGE.T


def by_hook(model):
    mlp_of(model).down_proj.register_forward_hook(lambda _module, args, output: output + args[0] @ CHANGE.T)


def by_subclass(model):
    register_parametrization(mlp_of(model).down_proj, "weight", Plus())


@pytest.mark.parametrize("change", [by_forward, by_hook, by_subclass])
def test_columns_are_those_with_which_the_model_computes(change):
    models = changed(change), changed(merged)
    assert torch.allclose(*[model(IDS).logits for model in models], atol=1e-4)
    for layer in (0, LAYER):
        assert torch.allclose(*[columns_of(model, layer) for model in models], atol=1e-4)


def test_what_hooks_do_with_values_of_neurons_or_add_as_a_bias_is_not_in_their_columns():
    model = changed()
    before = columns_of(model)
    mlp_of(model).down_proj.register_forward_pre_hook(lambda _module, args: (0.5 * args[0],))
    mlp_of(model).down_proj.register_forward_hook(lambda _module, _args, output: output + 1)
    assert torch.allclose(columns_of(model), before)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "part", "site"), [("llama", "mlp", "N3"), ("mixtral", "mlp.experts", "E1.N3")])
def test_a_hook_on_the_mlp_is_refused_where_neurons_are_read_or_edited(family, part, site):
    """It may change what the MLP gives, which is then not what its neurons write."""
    model = changed(family=family)
    model.model.layers[LAYER].get_submodule(part).register_forward_hook(lambda _module, _args, output: output)
    with refused("a hook of yours is on its MLP"):
        ss.Ablate(sites=f"L{LAYER}.{site}").on(model).__enter__()
    with refused("a hook of yours is on its MLP"):
        view_layer(target_of(model), LAYER, IDS, torch.ones_like(IDS, dtype=torch.bool))


def mlp_of_its_own(model):
    own = mlp_of(model).forward
    mlp_of(model).forward = lambda hidden: own(hidden) + 0.1 * hidden


def fewer_heads(model):
    attn = model.model.layers[LAYER].self_attn
    attn.num_key_value_groups = 2
    for name, shape in (("q_proj", (16, 32)), ("k_proj", (8, 32)), ("v_proj", (8, 32)), ("o_proj", (32, 16))):
        projection = attn.get_submodule(name)
        projection.weight = nn.Parameter(projection.weight[: shape[0], : shape[1]].clone())


def moved(model):
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def shared_projection(model):
    model.model.layers[2].mlp.down_proj = model.model.layers[0].mlp.down_proj


def run_twice(model):
    layers = model.model.layers
    own = layers[LAYER].forward
    layers[LAYER].forward = lambda hidden, **kwargs: own(layers[0](hidden, **kwargs), **kwargs)


def renamed(model):
    for layer in model.model.layers:
        mlp = layer.mlp
        mlp.narrow = mlp.down_proj
        del mlp.down_proj
        mlp.forward = lambda hidden, mlp=mlp: mlp.narrow(mlp.act_fn(mlp.gate_proj(hidden)) * mlp.up_proj(hidden))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (mlp_of_its_own, "does not compute what its class LlamaForCausalLM does: a moved"),
        (fewer_heads, r"layer 1 does not attend .* with the 4 heads of the configuration"),
        (moved, r"the layer at place 0 of .* calls itself layer 1"),
        (shared_projection, r"has one module in layers 0 and 2"),
        (run_twice, "layer 0 runs several times in a pass"),
        (renamed, r"layer 0 of LlamaForCausalLM has no .'down'., as layers of its class have"),
    ],
)
def test_what_is_not_as_its_class_is_refused_each_time(change, says):
    model = changed(change)
    for _ in range(2):
        with refused(says):
            target_of(model)


def test_a_forward_of_its_user_is_not_kept_alive():
    model = changed(by_forward)
    target_of(model)
    alive = weakref.ref(vars(mlp_of(model).down_proj)["forward"])
    del model
    gc.collect()
    assert alive() is None


def not_linear(model):
    mlp_of(model).down_proj.register_forward_hook(lambda _module, _args, output: output + output.tanh())


def modules_do_not_run(model):
    for layer in model.model.layers:
        down = layer.mlp.down_proj
        layer.mlp.forward = lambda hidden, down=down: linear(hidden[..., :1], down.weight[:, :1])


class Skip(nn.Module):
    def forward(self, hidden_states, *_args, **_kwargs):
        return hidden_states


def skipping(model):
    model.model.layers[LAYER] = Skip()


@pytest.mark.parametrize(
    ("change", "use", "says"),
    [
        (not_linear, columns_of, "not linear in its inputs"),
        (modules_do_not_run, lambda model: ss.Ablate("L0.N1").on(model).__enter__(), "modules of its MLP do not run"),
        (modules_do_not_run, lambda model: target_of(model).d_mlp, r"no layer of .* has neurons"),
        (skipping, lambda model: kv.H2O(8).on(model).__enter__(), r"layer 1 of .* has no attention"),
    ],
)
def test_what_a_changed_model_does_not_have_is_refused(change, use, says):
    model = changed(change)
    ss.trace(model, IDS, "blocks.0.hook_resid_post")
    with refused(says):
        use(model)
