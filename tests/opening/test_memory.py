"""Whether a model fits: bytes as they would be loaded, beside what is free on the host and on the device."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import save_file

from sinkscope.opening.load import fits, fits_in_memory


@pytest.mark.parametrize(
    ("host", "device", "size", "on_cpu", "on_cuda"),
    [
        (256, 24, 30, True, False),
        (256, 24, 12, True, True),
        (16, 80, 12, False, False),  # weights pass through the host
        (16, 80, 0, False, False),
    ],
)
def test_a_model_takes_half_of_what_is_free_in_each_place(host, device, size, on_cpu, on_cuda, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=host))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (device, 2 * device))
    assert [fits(size, torch.device(place)) for place in ("cpu", "cuda")] == [on_cpu, on_cuda]


def test_weights_are_counted_as_they_are_stored_or_as_twice_that_in_float32(tmp_path, monkeypatch):
    file = tmp_path / "a.safetensors"
    save_file({"w": torch.zeros(300, 100), "b": torch.zeros(100)}, file)
    for free, plain in ((2 * file.stat().st_size, True), (2 * file.stat().st_size - 2, False)):
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=free: SimpleNamespace(available=free))
        assert fits_in_memory(tmp_path, "cpu") == plain and not fits_in_memory(tmp_path, "cpu", "float32")
    assert not fits_in_memory("gpt2") and not fits_in_memory(tmp_path / "none")
