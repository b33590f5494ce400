"""Models of which a process holds a part, or whose weights are no plain tensors: refused in one line, or served."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from organisms import organism, tiny_model
from refusals import refused
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.testing import assert_close

import sinkscope as ss
from sinkscope.models.neurons import columns
from sinkscope.opening.load import target_of

IDS = torch.arange(5, 17)[None]


@pytest.fixture
def mesh():
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def by_tensor_parallelism(model, mesh):
    down = model.model.layers[1].mlp.down_proj
    down.weight = nn.Parameter(distribute_tensor(down.weight.detach(), mesh, [Shard(1)]))


def by_fsdp(model, mesh):
    fully_shard(model, mesh=mesh)


def of_an_old_transformers(model, mesh):
    """It keeps plain local tensors."""
    model._tp_size = 2


def test_a_model_split_over_processes_is_refused_and_a_data_parallel_one_is_the_model_inside(mesh):
    """Also after a whole model of the same configuration was used."""
    model = tiny_model("llama")[0]
    with ss.Ablate(layer=1, neurons=[3, 11]).on(model):
        want = model(IDS).logits
    wrapped = nn.parallel.DistributedDataParallel(model)
    with ss.Ablate(layer=1, neurons=[3, 11]).on(wrapped):
        assert_close(wrapped(IDS).logits, want)
    with refused("DataParallel is not a model: expected a Hugging Face"):
        ss.trace(nn.DataParallel(model), IDS, "logits")
    for split in (by_tensor_parallelism, by_fsdp, of_an_old_transformers):
        part = tiny_model("llama")[0]
        split(part, mesh)
        with refused("is split over processes in a way that is not served", ("device_map= spreads it",)):
            ss.find_sinks(part)


class Scaled(Tensor):
    """A weight as torchao stores it: whole numbers, whose scale linear modules alone know."""

    SCALE = 0.01

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            return func(args[0], args[1].as_subclass(Tensor) * cls.SCALE, *args[2:])
        return super().__torch_function__(func, types, args, kwargs or {})


@torch.no_grad()
def test_weights_that_are_quantised_in_place_are_read_dequantised():
    plain, quantised = (copy.deepcopy(organism("llama", 3).model) for _ in range(2))
    for name, module in quantised.named_modules():
        if isinstance(module, nn.Linear) and ".layers." in name:
            whole = (module.weight.detach() / Scaled.SCALE).round()
            plain.get_submodule(name).weight.copy_(whole * Scaled.SCALE)
            module.weight = nn.Parameter(whole.as_subclass(Scaled), requires_grad=False)
    read = []
    for model in (quantised, plain):
        target = target_of(model)
        with ss.Ablate(layer=2, neurons=[28, 179]).on(model):
            logits = model(IDS).logits
        read.append((columns(target, 2, torch.tensor([28, 179, 0])), logits))
    assert_close(*read, atol=1e-3, rtol=1e-3)
