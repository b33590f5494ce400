"""Adapters of wide models come from narrow ones, and are kept for the next process; neither is trusted unproved."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from covering import every_nth
from organisms.decoders import decoder
from organisms.sizes import SIZES, sized_decoder
from organisms.tiny import MODEL_TYPES, tiny_model

from sinkscope.inference import adapter_cache, find, sample
from sinkscope.opening.live import target_of

WIDE = (
    "llama",
    "gpt_oss",
    "qwen3_moe",
    "gemma2",
    "phi3",
    "granite",
    "mixtral",
    "olmo2",
    "qwen3_next",
    "bloom",
)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty cache of the user, and a process that knows no adapter."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(find, "_KNOWN", {})
    return tmp_path / "sinkscope" / "adapters"


def _next_process(monkeypatch) -> list[int]:
    """Forget what this process knows, and count how often an adapter is inferred from now on."""
    monkeypatch.setattr(find, "_KNOWN", {})
    calls: list[int] = []
    real = find.inferred_adapter

    def counted(hf):
        calls.append(1)
        return real(hf)

    monkeypatch.setattr(find, "inferred_adapter", counted)
    return calls


def test_a_second_process_infers_nothing_and_has_the_same_adapter(folder, monkeypatch):
    adapter = target_of(tiny_model("gemma2")[0]).adapter
    assert len(list(folder.iterdir())) == 1
    calls = _next_process(monkeypatch)
    assert target_of(tiny_model("gemma2")[0]).adapter == adapter
    assert calls == []
    target_of(tiny_model("gemma2", hidden_size=48)[0])  # another configuration
    assert calls == [1]


def _damaged(file: Path) -> list[bytes]:
    content = json.loads(file.read_text())
    lacking = {**content, "result": {**content["result"]}}
    del lacking["result"]["o"]
    return [
        b"",
        file.read_bytes()[:200],
        b"\xff\xfe\x00",
        b"[1, 2]",
        b"9" * (1 << 17),
        json.dumps({**content, "kind": "find-sinks"}).encode(),
        json.dumps({**content, "key": "0" * 32}).encode(),
        json.dumps({**content, "result": {**content["result"], "down": 3}}).encode(),
        json.dumps({**content, "result": {**content["result"], "unproved": []}}).encode(),
        json.dumps(lacking).encode(),
    ]


@pytest.mark.slow
def test_a_damaged_or_foreign_file_is_ignored_and_made_anew(folder, monkeypatch):
    adapter = target_of(tiny_model("llama")[0]).adapter
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    for content in _damaged(file):
        file.write_bytes(content)
        calls = _next_process(monkeypatch)
        assert target_of(tiny_model("llama")[0]).adapter == adapter
        assert calls == [1] and file.read_bytes() == whole


def test_a_kept_adapter_of_wrong_places_is_not_believed(folder, monkeypatch):
    """It is proved like any other: sites are refused, and a wrong neuron refuses the model."""
    target_of(tiny_model("llama")[0])
    (file,) = folder.iterdir()
    content = json.loads(file.read_text())
    content["result"] |= {"mid": "self_attn", "attn_out": "input_layernorm"}
    file.write_text(json.dumps(content))
    monkeypatch.setattr(find, "_KNOWN", {})
    names = {name.partition(".")[2] for name, _ in target_of(tiny_model("llama")[0]).adapter.unproved}
    assert {"0.hook_attn_out", "0.hook_resid_mid"} <= names


def test_another_version_has_files_of_its_own(folder, monkeypatch):
    model = tiny_model("llama")[0]
    target_of(model)
    adapter_cache._maker.cache_clear()
    monkeypatch.setattr(adapter_cache, "version", lambda _: "99")
    calls = _next_process(monkeypatch)
    target_of(model)
    adapter_cache._maker.cache_clear()
    assert calls == [1] and len(list(folder.iterdir())) == 2


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(blocked))
    monkeypatch.setattr(find, "_KNOWN", {})
    assert target_of(tiny_model("llama")[0]).adapter.down == "mlp.down_proj"


@pytest.mark.parametrize("model_type", WIDE)
def test_a_narrow_model_of_the_same_modules_has_the_same_adapter(model_type, monkeypatch):
    model = sized_decoder(model_type, next(iter(SIZES.values()))).model
    direct = find.inferred_adapter(model)
    monkeypatch.setattr(sample, "_WIDE", 0)
    calls: list[torch.nn.Module] = []
    real = find.infer

    def seen(hf):
        calls.append(hf)
        return real(hf)

    monkeypatch.setattr(find, "infer", seen)
    assert find.inferred_adapter(model) == direct
    assert calls[0] is not model  # the model itself is not called
    widths = [sum(parameter.numel() for parameter in hf.parameters()) for hf in (calls[0], model)]
    assert len(calls) == 1 and widths[0] < 0.5 * widths[1]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", every_nth(MODEL_TYPES, 8))
def test_tiny_models_taken_for_wide_ones_have_the_same_adapter(model_type, monkeypatch):
    model = tiny_model(model_type)[0]
    direct = find.inferred_adapter(model)
    monkeypatch.setattr(sample, "_WIDE", 0)
    assert find.inferred_adapter(model) == direct


def test_a_model_that_its_user_changed_is_called_itself(monkeypatch):
    """A narrow model of its configuration has other modules."""
    model = decoder("llama")
    for layer in model.model.layers:
        layer.mlp.down_proj = torch.nn.Sequential(layer.mlp.down_proj)
    monkeypatch.setattr(sample, "_WIDE", 0)
    assert find.inferred_adapter(model).down == "mlp.down_proj.0"
