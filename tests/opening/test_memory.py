"""Whether a model fits: bytes as they would be loaded, beside what is free on the host and on the device."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch
from organisms import tiny_model

from sinkscope.opening.load import fits


@pytest.mark.parametrize(
    ("place", "host", "device", "dtype", "most"),  # the free bytes, as often as the weights in float32 take them
    [
        *(("cpu", 2, 0, None, most) for most in (0, -1)),
        *(("cpu", 1, 0, "bfloat16", most) for most in (0, -1)),
        *(("cuda", *free) for free in ((2, 2, None, 0), (2, 1, None, -1), (1, 2, None, -1))),
    ],
)
def test_a_model_takes_half_of_what_is_free_in_each_place(place, host, device, dtype, most, monkeypatch):
    """It fits where nothing is missing of what is free (`most` is 0)."""
    model = tiny_model("llama")[0]
    size = sum(parameter.nbytes for parameter in model.parameters())
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=host * size + most))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (device * size, 0))
    target = SimpleNamespace(hf=model, config=model.config, dtype=torch.float32, device=torch.device(place))
    assert fits(target, dtype) == (most == 0)
