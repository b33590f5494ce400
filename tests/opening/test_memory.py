"""Whether a model fits: bytes as they would be loaded, beside what is free on the host and on the device."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch
from organisms import tiny_model

from sinkscope.opening import memory
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


VERSIONS = {
    "1": ("5:cpu,memory:/docker/abc", "memory", ["limit_in_bytes", "usage_in_bytes"], "total_inactive_file"),
    "2": ("0::/docker/abc", "", ["max", "current"], "inactive_file"),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("group", ["docker/abc", "docker", ""])
def test_a_limit_on_the_container_counts(version, group, tmp_path, monkeypatch):
    """Of the group, of one around it, or of the root that it sees; pages of files leave when room is needed."""
    line, folder, (limit, used), reclaimable = VERSIONS[version]
    monkeypatch.setattr(memory, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "MOUNT", tmp_path / "mount")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000))
    (tmp_path / "cgroup").write_text(f"12:freezer:/docker/abc\n{line}\n")
    assert memory.free_memory() == 10_000
    (tmp_path / "mount" / folder / "docker/abc").mkdir(parents=True)
    within = tmp_path / "mount" / folder / group
    (within / f"memory.{limit}").write_text("5000\n")
    (within / f"memory.{used}").write_text("1500\n")
    (within / "memory.stat").write_text(f"anon 900\n{reclaimable} 600\n")
    assert memory.free_memory() == 4100
    model = tiny_model("llama")[0]
    target = SimpleNamespace(hf=model, config=model.config, dtype=torch.float32, device=torch.device("cpu"))
    assert not fits(target)
    (within / f"memory.{limit}").write_text("max\n" if version == "2" else f"{2**62}\n")
    assert memory.free_memory() == 10_000
