"""Whether a model fits: bytes as they would be loaded, beside what is free on the host and on the device."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import torch
from safetensors.torch import save_file

from sinkscope.opening.load import fits, fits_in_memory


def test_a_model_takes_half_of_what_is_free_in_each_place(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=40))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (80, 80))
    assert [fits(size, torch.device("cuda")) for size in (0, 20, 21)] == [False, True, False]  # through the host
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (20, 80))
    assert [fits(20, torch.device(place)) for place in ("cpu", "cuda")] == [True, False]


def test_weights_are_counted_as_they_are_stored_or_as_twice_that_in_float32(tmp_path, monkeypatch):
    save_file({"w": torch.zeros(300, 100)}, tmp_path / "a.safetensors")
    free = 2 * (tmp_path / "a.safetensors").stat().st_size
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    assert fits_in_memory(tmp_path, "cpu") and not fits_in_memory(tmp_path, "cpu", "float32")
    assert not fits_in_memory("gpt2") and not fits_in_memory(tmp_path / "none")
