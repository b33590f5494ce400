"""`load`: what it takes, what it gives back, and what it says when it cannot."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from checkpoints import checkpoint, spoiled
from gguf_file import write_gguf
from hub_server import hub
from intervention_kit import loaded, logits
from organisms.tiny import tiny_model
from refusals import refused
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

import sinkscope as ss
from sinkscope.errors import SinkscopeError
from sinkscope.models.checkpoints.gguf_file import parsed_once
from sinkscope.opening.live import target_of
from sinkscope.opening.load import load, open_stream

IDS = torch.tensor([[1, 10, 11, 12, 13, 14, 15]])


# -- what comes back -----------------------------------------------------------------------------------------------


def test_the_model_is_plain_and_its_tokenizer_is_that_of_a_bridge_around_it():
    assert type(ss.load(checkpoint("qwen2"))).__name__ == "Qwen2ForCausalLM"
    bridge = loaded("bridge", checkpoint("qwen2"))
    assert not bridge.training
    assert bridge.original_model.sinkscope_name == "qwen2"
    # The bridge makes itself a BOS of the EOS where there is none; measurements must not believe it.
    own = bridge.original_model.tokenizer
    assert own is target_of(bridge).tokenizer is not bridge.tokenizer


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"layers": 0}, "layers=0: llama has 3 layers; expected 1 to 3"),
        ({"layers": 4}, "layers=4: llama has 3 layers; expected 1 to 3"),
        ({"device": "cpu", "device_map": "auto"}, "exclude each other"),
        *(
            ({"dtype": dtype}, r"^dtype '\S+' .*expected float32, bfloat16, float16")
            for dtype in ("float13", torch.int8)
        ),
    ],
)
def test_settings_that_a_checkpoint_cannot_have(settings, says):
    with refused(says):
        load(checkpoint("llama"), **settings)


def test_what_is_no_model_is_refused():
    for model in (3, tiny_model("llama")[0]):
        with refused(f"{type(model).__name__} is no name, folder or file"):
            load(model)
    file = checkpoint("llama") / "model.safetensors"
    with refused("model.safetensors.? is no model that is here"):
        load(file)


def test_dtype_and_names_of_dtypes(tmp_path):
    folder = checkpoint("llama")
    for name in ("bfloat16", "torch.bfloat16", torch.bfloat16):
        assert load(folder, dtype=name).dtype == torch.bfloat16
    tiny_model("llama")[0].half().save_pretrained(tmp_path)
    for place, kept in ((folder, torch.float32), (tmp_path, torch.float16)):
        assert load(place).dtype == load(place, dtype="auto").dtype == kept


def test_soft_cap_is_computed_whatever_transformers_would_choose():
    """Some versions choose SDPA for Gemma 2, which drops the cap."""
    for model in (load(checkpoint("gemma2")), open_stream(checkpoint("gemma2"))):
        assert target_of(model).config._attn_implementation == "eager"


@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_on_stdout_and_nothing_on_stderr(terminal, monkeypatch, capfd):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", terminal)
    load(checkpoint("llama"), layers=2)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


# -- gguf ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    pytest.importorskip("gguf")
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(file, *tiny_model("llama"))
    return file


def test_gguf_computes_what_was_written(gguf):
    expected = logits(tiny_model("llama")[0], IDS)
    for backend in ("bridge", "hf"):
        model = loaded(backend, gguf)
        assert_close(logits(model, IDS), expected, atol=1e-5, rtol=0)
        target = target_of(model)
        assert target.name == "tiny.gguf"
        assert target.tokenizer.bos_token_id == 1


def test_a_gguf_file_is_parsed_once_and_the_parser_is_left_as_it_was(gguf, monkeypatch):
    import gguf as library

    parsed, parser = [], library.GGUFReader

    class Counted(parser):
        def __init__(self, path, *args):
            parsed.append(str(path))
            super().__init__(path, *args)

    monkeypatch.setattr(library, "GGUFReader", Counted)
    names = library.get_tensor_name_map
    load(gguf)
    assert parsed == [str(gguf)] and library.GGUFReader is Counted
    assert library.get_tensor_name_map is names
    with parsed_once():
        mapped = library.GGUFReader(gguf)
        assert type(mapped.data) is np.ndarray, "a slice of a memory map takes four times as long"
        llama = library.MODEL_ARCH.LLAMA
        assert library.get_tensor_name_map(llama, 2) is library.get_tensor_name_map(llama, 2)


# -- names and hubs ------------------------------------------------------------------------------------------------


def test_a_folder_that_shares_a_models_name_does_not_hide_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    with hub(tmp_path / "home") as server:
        server.add("openai-community/gpt2", checkpoint("gpt2"))
        assert target_of(load("gpt2")).config.model_type == "gpt2"
        spoiled(tmp_path / "gpt2" / ".." / "llama-2-7b")
        assert target_of(load("llama-2-7b")).n_layers == 3  # a checkpoint in the folder comes first


# -- what is refused -----------------------------------------------------------------------------------------------


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


def test_a_folder_without_a_tokenizer_takes_a_given_one(tmp_path):
    folder = spoiled(tmp_path / "m")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert target_of(load(folder)).tokenizer is None
    given = copy.deepcopy(tiny_model("llama")[1])
    assert target_of(load(folder, tokenizer=given)).tokenizer is given


def test_only_devices_of_the_machine_are_taken(monkeypatch):
    from sinkscope.models.checkpoints.config import parse_device

    assert parse_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert str(parse_device(None)) == "cuda:0"
    assert str(parse_device("cuda")) == "cuda"
    assert str(parse_device("cuda:1")) == "cuda:1"
    with pytest.raises(SinkscopeError, match=r"'cuda:2' is not there; this machine has cpu, cuda:0, cuda:1"):
        parse_device("cuda:2")


def test_out_of_memory_says_what_to_try(monkeypatch):
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", mock.Mock(side_effect=error))
    with refused(words=["out of memory", "llama", "layers=N", "dtype", "quantization_config"]):
        load(checkpoint("llama"))
