"""Whether a model fits: bytes as they would be loaded, beside what is free on the host and on the device."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import torch
from organisms import tiny_model

from sinkscope.opening.load import fits


def test_a_model_takes_half_of_what_is_free_in_each_place(monkeypatch):
    model = tiny_model("llama")[0]
    size = sum(parameter.nbytes for parameter in model.parameters())
    target = SimpleNamespace(hf=model, config=model.config, dtype=torch.float32)

    def fit(place: str, host: int, device: int, dtype: str | None = None) -> bool:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=host))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (device, device))
        target.device = torch.device(place)
        return fits(target, dtype)

    assert fit("cpu", 2 * size, 0) and not fit("cpu", 2 * size - 2, 0)
    assert fit("cuda", 2 * size, 2 * size) and not fit("cuda", 2 * size, size) and not fit("cuda", size, 2 * size)
    assert fit("cpu", size, 0, "bfloat16") and not fit("cpu", size - 2, 0, "bfloat16")
