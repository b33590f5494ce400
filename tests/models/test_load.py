"""`load`: what it takes, what it gives back, and what it says when it cannot."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from checkpoints import checkpoint, spoiled
from gguf_file import write_gguf
from intervention_kit import loaded, logits
from organisms.tiny import tiny_model
from refusals import refused
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from sinkscope.opening.live import target_of
from sinkscope.opening.load import load, open_stream

IDS = torch.tensor([[1, 10, 11, 12, 13, 14, 15]])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"layers": 0}, "layers=0: llama has 3 layers; expected 1 to 3"),
        ({"layers": 4}, "layers=4: llama has 3 layers; expected 1 to 3"),
        ({"device": "cpu", "device_map": "auto"}, "exclude each other"),
        ({"dtype": "float13"}, r"^dtype 'float13' .*expected float32, bfloat16, float16"),
        ({"dtype": torch.int8}, r"^dtype 'torch.int8' .*expected float32, bfloat16, float16"),
    ],
)
def test_settings_that_a_checkpoint_cannot_have(settings, says):
    with refused(says):
        load(checkpoint("llama"), **settings)


def test_what_is_no_model_is_refused():
    for model, says in (
        (3, "int is no name, folder or file"),
        (tiny_model("llama")[0], "LlamaForCausalLM is no name, folder or file"),
        (checkpoint("llama") / "model.safetensors", "model.safetensors.? is no model that is here"),
    ):
        with refused(says):
            load(model)


def test_soft_cap_is_computed_whatever_transformers_would_choose():
    """Some versions choose SDPA for Gemma 2, which drops the cap."""
    for model in (load(checkpoint("gemma2")), open_stream(checkpoint("gemma2"))):
        assert target_of(model).config._attn_implementation == "eager"


@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_on_stdout_and_nothing_on_stderr(terminal, monkeypatch, capfd):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", terminal)
    load(checkpoint("llama"), layers=2)
    assert capfd.readouterr() == ("", "")


def test_gguf_computes_what_was_written(tmp_path):
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "tiny.gguf", *tiny_model("llama"))
    expected = logits(tiny_model("llama")[0], IDS)
    for backend in ("bridge", "hf"):
        model = loaded(backend, tmp_path / "tiny.gguf")
        assert_close(logits(model, IDS), expected, atol=1e-5, rtol=0)
        target = target_of(model)
        assert (target.name, target.tokenizer.bos_token_id) == ("tiny.gguf", 1)


def test_overflow_to_infinity_is_found(tmp_path):
    """In what is loaded: a layer that is left out may hold anything."""
    model, _ = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0] = torch.nan
        model.model.norm.weight[0] = 1e6
    model.save_pretrained(tmp_path)
    with refused(r"tensor model\.norm\.weight holds values that are NaN or infinite; .*dtype=float32"):
        load(tmp_path, layers=1, dtype="float16")
    load(tmp_path, layers=1)
    with refused(r"tensor model\.layers\.1\.mlp\.down_proj\.weight holds values that are NaN"):
        load(tmp_path)


class _Code:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_pickled_weights_load_and_no_code_runs(tmp_path):
    folder = spoiled(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    model = load(folder, device="cpu")
    assert_close(logits(model, IDS), logits(tiny_model("llama")[0], IDS), atol=1e-6, rtol=0)
    torch.save({**tensors, "x": _Code(tmp_path / "it-ran")}, folder / "pytorch_model.bin")
    with refused("pickled weights of m hold more than tensors.*convert them to safetensors"):
        load(folder)
    assert not (tmp_path / "it-ran").exists()


def test_out_of_memory_says_what_to_try(monkeypatch):
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", mock.Mock(side_effect=error))
    with refused(words=["out of memory", "llama", "layers=N", "dtype", "quantization_config"]):
        load(checkpoint("llama"))
