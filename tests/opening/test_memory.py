"""Whether a model fits: bytes as they would be loaded, beside what is free on the host and on the device."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import save_file

from sinkscope.opening.load import fits, fits_in_memory

GB = 1 << 30


def have(monkeypatch, host: int, device: int) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=host))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (device, 2 * device))


def test_a_model_larger_than_the_gpu_does_not_fit_beside_much_memory_of_the_host(monkeypatch):
    have(monkeypatch, 256 * GB, 24 * GB)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert fits(30 * GB, cpu) and not fits(30 * GB, cuda) and fits(12 * GB, cuda)
    have(monkeypatch, 16 * GB, 80 * GB)
    assert not fits(12 * GB, cuda), "the weights pass through the host"
    assert not fits(0, cpu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_counted_as_they_are_stored_or_as_twice_that_in_float32(dtype, tmp_path, monkeypatch):
    file = tmp_path / "a.safetensors"
    save_file({"w": torch.zeros(300, 100, dtype=dtype), "b": torch.zeros(100, dtype=dtype)}, file)
    size = file.stat().st_size
    have(monkeypatch, 2 * size, 0)
    assert fits_in_memory(tmp_path, "cpu") and not fits_in_memory(tmp_path, "cpu", "float32")
    have(monkeypatch, 2 * size - 2, 0)
    assert not fits_in_memory(tmp_path, "cpu")
    assert not fits_in_memory("gpt2") and not fits_in_memory(tmp_path / "none")
