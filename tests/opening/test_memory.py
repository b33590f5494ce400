"""Whether a model fits: bytes as they would be loaded, beside what is free on the host and on the device."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch
from organisms import tiny_model

from sinkscope.opening.load import fits


@pytest.mark.parametrize(
    ("host", "device", "dtype"),  # how often the weights in float32 go into what is free
    [(2, 2, None), (1, 1, "bfloat16"), (2, 4, None), (4, 2, None)],
)
@pytest.mark.parametrize("missing", [0, 1])
def test_a_model_takes_half_of_what_is_free_in_each_place(host, device, dtype, missing, monkeypatch):
    model = tiny_model("llama")[0]
    size = sum(parameter.nbytes for parameter in model.parameters())
    target = SimpleNamespace(hf=model, config=model.config, dtype=torch.float32, device=torch.device("cuda"))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=host * size - missing))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (device * size - missing, 0))
    assert fits(target, dtype) == (not missing)
