"""A proof holds for the object that was proved: what somebody replaced in a model is served as it is, or refused."""

from __future__ import annotations

import copy
from types import MethodType

import pytest
import torch
from organisms.tiny import tiny_model
from torch import nn

import sinkscope as ss
from sinkscope import kv
from sinkscope.errors import UnsupportedError
from sinkscope.models.neurons import columns, view_layer
from sinkscope.opening.live import target_of

IDS = torch.tensor([[1, 10, 11, 12, 13]])
LAYER = 1


def llama():
    return copy.deepcopy(tiny_model("llama")[0])


def low_rank(linear: nn.Linear) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    outputs, inputs = linear.weight.shape
    return torch.randn(outputs, 2, generator=generator) @ torch.randn(2, inputs, generator=generator)


class Wrapped(nn.Module):
    """A linear module inside another one, whose weight it shows."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base, self.change = base, low_rank(base)

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base(hidden) + hidden @ self.change.T


class Changed(nn.Linear):
    """A subclass that computes more than its weight says."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + input @ low_rank(self).T


def by_forward(mlp):
    own, change = mlp.down_proj.forward, low_rank(mlp.down_proj)
    mlp.down_proj.forward = lambda hidden: own(hidden) + hidden @ change.T


def by_hook(mlp):
    change = low_rank(mlp.down_proj)
    mlp.down_proj.register_forward_hook(lambda _module, args, output: output + args[0] @ change.T)


def by_wrapper(mlp):
    mlp.down_proj = Wrapped(mlp.down_proj)


def by_class(mlp):
    mlp.down_proj.__class__ = Changed


def by_parametrization(mlp):
    class Plus(nn.Module):
        def forward(self, weight):
            return weight + low_rank(mlp.down_proj.parametrizations.weight.original_linear[0])

    original = copy.deepcopy(mlp.down_proj)
    nn.utils.parametrize.register_parametrization(mlp.down_proj, "weight", nn.Identity())
    mlp.down_proj.parametrizations.weight.original_linear = (original,)
    nn.utils.parametrize.register_parametrization(mlp.down_proj, "weight", Plus())


WAYS = [by_forward, by_hook, by_wrapper, by_class, by_parametrization]


@pytest.mark.parametrize("change", WAYS)
def test_columns_are_those_with_which_the_model_computes(change):
    merged, changed = llama(), llama()
    target_of(llama())  # one that was proved before
    down = merged.model.layers[LAYER].mlp.down_proj
    down.weight.data += low_rank(down)
    change(changed.model.layers[LAYER].mlp)
    assert torch.allclose(changed(IDS).logits, merged(IDS).logits, atol=1e-4)
    written = [columns(target_of(model), LAYER, torch.tensor([3, 5])) for model in (changed, merged)]
    assert torch.allclose(*written, atol=1e-4)
    assert torch.allclose(
        columns(target_of(changed), 0, torch.tensor([3])), columns(target_of(merged), 0, torch.tensor([3]))
    )


def test_a_module_that_is_not_linear_has_no_columns():
    model = llama()
    model.model.layers[LAYER].mlp.down_proj.register_forward_hook(lambda _module, _args, output: output + output.tanh())
    with pytest.raises(UnsupportedError, match="not linear in its inputs"):
        columns(target_of(model), LAYER, torch.tensor([3]))


def test_what_was_put_in_place_and_taken_out_again_is_noticed():
    model = llama()
    before = columns(target_of(model), LAYER, torch.tensor([3]))
    by_forward(model.model.layers[LAYER].mlp)
    assert not torch.allclose(columns(target_of(model), LAYER, torch.tensor([3])), before)
    del model.model.layers[LAYER].mlp.down_proj.forward
    assert torch.equal(columns(target_of(model), LAYER, torch.tensor([3])), before)


@pytest.mark.parametrize(("family", "part", "site"), [("llama", "mlp", "N3"), ("mixtral", "mlp.experts", "E1.N3")])
def test_a_hook_on_the_mlp_is_refused_where_neurons_are_read_or_edited(family, part, site):
    """It may change what the MLP gives, which is then not what its neurons write."""
    model = copy.deepcopy(tiny_model(family)[0])
    where = torch.ones_like(IDS, dtype=torch.bool)
    edit = ss.Ablate(sites=f"L{LAYER}.{site}")
    handle = model.model.layers[LAYER].get_submodule(part).register_forward_hook(lambda _module, _args, output: output)
    with pytest.raises(UnsupportedError, match="a hook of yours is on its MLP"), edit.on(model):
        model(IDS)
    with pytest.raises(UnsupportedError, match="a hook of yours is on its MLP"):
        view_layer(target_of(model), LAYER, IDS, where)
    handle.remove()
    view_layer(target_of(model), LAYER, IDS, where)


def test_an_mlp_with_a_forward_of_its_own_is_refused_also_after_its_base_was_proved():
    target_of(llama())
    model = llama()
    mlp = model.model.layers[LAYER].mlp

    def forward(self, hidden):
        return self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden)) + 0.1 * hidden

    mlp.forward = MethodType(forward, mlp)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="does not compute what its class LlamaForCausalLM does: a moved"):
            target_of(model)
    del mlp.forward
    assert target_of(model).adapter.unproved == ()


def test_an_mlp_whose_modules_do_not_run_has_no_neurons():
    model = llama()
    for layer in model.model.layers:
        mlp = layer.mlp
        mlp.forward = lambda hidden, mlp=mlp: nn.functional.linear(hidden[..., :1], mlp.down_proj.weight[:, :1])
    with pytest.raises(UnsupportedError, match="the modules of its MLP do not run"):
        ss.Ablate(layer=0, neurons=[1]).on(model).__enter__()
    with pytest.raises(UnsupportedError, match=r"no layer of .* has neurons"):
        _ = target_of(model).d_mlp


def test_a_model_with_fewer_heads_in_a_layer_is_refused_also_after_its_base_was_proved():
    target_of(llama())
    model = llama()
    attn = model.model.layers[LAYER].self_attn
    width = attn.head_dim
    half = attn.q_proj.out_features // 2
    for name, rows in (("q_proj", half), ("k_proj", width), ("v_proj", width)):
        linear = attn.get_submodule(name)
        linear.weight = nn.Parameter(linear.weight[:rows].clone())
    attn.o_proj.weight = nn.Parameter(attn.o_proj.weight[:, :half].clone())
    attn.num_key_value_groups = half // width
    model(IDS)
    with pytest.raises(UnsupportedError, match=r"layer 1 has 2 heads, and the configuration 4"):
        target_of(model)


# -- places of layers ----------------------------------------------------------------------------------------------


def test_layers_that_are_numbered_in_two_ways_are_refused_also_after_the_model_was_proved():
    model = llama()
    target_of(model)
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]
    with pytest.raises(UnsupportedError, match=r"at place 0 of .* calls itself layer 1"):
        ss.trace(model, IDS, "blocks.1.hook_resid_post")


def shared_layer(layers):
    layers[1] = layers[0]


def shared_attention(layers):
    layers[1].self_attn = layers[0].self_attn


def shared_projection(layers):
    layers[2].mlp.down_proj = layers[0].mlp.down_proj


@pytest.mark.parametrize("share", [shared_layer, shared_attention, shared_projection])
def test_a_module_at_two_places_is_refused(share):
    model = llama()
    share(model.model.layers)
    with pytest.raises(UnsupportedError, match=r"has one module in layers 0 and [12]"):
        ss.trace(model, IDS, "blocks.0.hook_resid_post")


def test_a_renamed_projection_is_refused_with_the_row_to_write():
    model = llama()
    for layer in model.model.layers:
        mlp = layer.mlp
        mlp.narrow = mlp.down_proj
        del mlp.down_proj
        mlp.forward = lambda hidden, mlp=mlp: mlp.narrow(mlp.act_fn(mlp.gate_proj(hidden)) * mlp.up_proj(hidden))
    with pytest.raises(
        UnsupportedError, match=r"has no down, but 'mlp.narrow'.*register\(Adapter\('llama', down='...'"
    ):
        target_of(model)


def test_a_layer_that_fills_no_cache_is_refused_under_a_policy():
    class Skip(nn.Module):
        def forward(self, hidden_states, *_args, **_kwargs):
            return hidden_states

    model = llama()
    model.model.layers[1] = Skip()
    with pytest.raises(UnsupportedError, match=r"layer 1 of .* has no attention"), kv.H2O(8).on(model):
        model.generate(IDS, max_new_tokens=2)
    with ss.Ablate(layer=0, neurons=[1]).on(model):
        model(IDS)
