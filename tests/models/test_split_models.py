"""Models of which a process holds a part, or whose weights are no plain tensors: refused in one line, or served."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.distributed as dist
from organisms import organism, tiny_model
from refusals import refused
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.testing import assert_close
from torch.utils._pytree import tree_map

import sinkscope as ss
from sinkscope.models.checkpoints.fingerprint import fingerprint
from sinkscope.models.neurons import columns
from sinkscope.models.weights import input_columns
from sinkscope.opening.live import target_of

IDS = torch.arange(5, 17)[None]
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def mesh():
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@cache
def whole():
    """The model, which has been used: its adapter is known."""
    model, tokenizer = tiny_model("llama")
    ss.trace(model, IDS, "logits")
    return model, tokenizer


def by_tensor_parallelism(model, mesh):
    down = model.get_submodule(DOWN)
    down.weight = nn.Parameter(distribute_tensor(down.weight.detach(), mesh, [Shard(1)]))


def by_fsdp(model, mesh):
    fully_shard(model, mesh=mesh)


def of_an_old_transformers(model, mesh):
    """It keeps plain local tensors."""
    model._tp_size = 2


def as_a_pipeline(model, mesh):
    model.model.layers[2] = type("PipelineIdentityLayer", (nn.Identity,), {})()


SPLITS = (by_tensor_parallelism, by_fsdp, of_an_old_transformers, as_a_pipeline)
DOORS: dict[str, Callable] = {
    "find_sinks": lambda model, tokenizer: ss.find_sinks(model, tokenizer=tokenizer),
    "edit": lambda model, _: ss.Ablate(layer=1, neurons=[3]).on(model),
}


@pytest.mark.parametrize("split", SPLITS)
def test_a_model_split_over_processes_is_refused_at_every_door(mesh, split):
    """Also after a whole model of the same configuration was used."""
    model, tokenizer = whole()
    model = copy.deepcopy(model)
    split(model, mesh)
    for door in DOORS.values():
        with refused("is split over processes in a way that is not served", ("device_map= spreads it",)):
            door(model, tokenizer)


def test_a_data_parallel_model_is_the_model_inside(mesh):
    model, _ = whole()
    wrapped = nn.parallel.DistributedDataParallel(model)
    edit = ss.Ablate(layer=1, neurons=[3, 11])
    with edit.on(model):
        want = model(IDS).logits
    with edit.on(wrapped) as run:
        assert_close(wrapped(IDS).logits, want)
    assert run.events
    assert_close(ss.trace(wrapped, IDS, "logits")["logits"], model(IDS).logits)
    with refused("DataParallel is not a model: expected a Hugging Face"):
        ss.trace(nn.DataParallel(model), IDS, "logits")


class Int8(Tensor):
    """A weight as torchao stores it: rows of integers with a scale, which linear modules alone know how to read."""

    @staticmethod
    def __new__(cls, whole: Tensor, scale: Tensor):
        return Tensor._make_wrapper_subclass(cls, whole.shape, dtype=scale.dtype)

    def __init__(self, whole: Tensor, scale: Tensor):
        self.whole, self.scale = whole, scale

    def __tensor_flatten__(self):
        return ["whole", "scale"], None

    def dequantize(self):
        return self.whole * self.scale

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            return func(*tree_map(lambda part: part.dequantize() if isinstance(part, cls) else part, args))
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].whole, args[0].scale)
        raise NotImplementedError(f"{func} of a quantised weight")


def by_ours(model):
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            scale = module.weight.detach().abs().amax(1, keepdim=True) / 127
            whole = (module.weight.detach() / scale).round().to(torch.int8)
            module.weight = nn.Parameter(Int8(whole, scale), requires_grad=False)


@torch.no_grad()
def test_weights_that_are_quantised_in_place_are_read_dequantised():
    planted = organism("llama", 3)
    quantised, plain = copy.deepcopy(planted.model), copy.deepcopy(planted.model)
    by_ours(quantised)
    for name, module in quantised.named_modules():
        if isinstance(module, nn.Linear) and type(module.weight) is not nn.Parameter:
            plain.get_submodule(name).weight.copy_(module.weight.dequantize())
    target, want = target_of(quantised), target_of(plain)
    neurons = [28, 179, 0]
    assert_close(
        columns(target, 2, torch.tensor(neurons)), columns(want, 2, torch.tensor(neurons)), atol=1e-6, rtol=1e-5
    )
    of_heads = [input_columns(each, each.sub(1, "o")) for each in (target, want)]
    assert_close(*of_heads, atol=1e-6, rtol=1e-5)
    assert (target.d_mlp, target.head_columns(0, 1)) == (want.d_mlp, want.head_columns(0, 1))
    logits = []
    for model in (quantised, plain):
        with ss.Ablate(layer=2, neurons=[28, 179]).on(model):
            logits.append(model(IDS).logits)
    assert_close(*logits, atol=1e-3, rtol=1e-3)
    first = fingerprint(quantised)
    other = copy.deepcopy(planted.model)
    other.model.layers[1].mlp.down_proj.weight.mul_(1.001)
    by_ours(other)
    assert first == fingerprint(quantised) != fingerprint(other)
