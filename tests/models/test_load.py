"""`load`: what it takes, what it gives back, and what it says when it cannot."""

from __future__ import annotations

import copy
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import checkpoint, spoiled
from gguf_file import write_gguf
from hub_server import hub
from organisms.tiny import tiny_model
from organisms.tokens import word_tokenizer
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import sinkscope as ss
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.models.load import load
from sinkscope.models.open import open_stream
from sinkscope.models.wrapped import target_of

IDS = torch.tensor([[1, 10, 11, 12, 13, 14, 15]])


def refused(*args, **kwargs) -> str:
    """The error `load` gives; it is one line."""
    with pytest.raises(SinkscopeError) as caught:
        load(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        out = model(IDS)
    return out if isinstance(out, torch.Tensor) else out.logits


# -- what comes back -----------------------------------------------------------------------------------------------


def test_default_is_a_bridge_and_the_module_holds_name_and_tokenizer():
    from transformer_lens.model_bridge import TransformerBridge

    bridge = ss.load(checkpoint("qwen2"))
    assert isinstance(bridge, TransformerBridge)
    assert not bridge.training
    assert bridge.original_model.sinkscope_name == "qwen2"
    # The bridge makes itself a BOS of the EOS where there is none; measurements must not believe it.
    own = bridge.original_model.tokenizer
    assert own is target_of(bridge).tokenizer is not bridge.tokenizer


def test_tokenizer_without_bos_stays_without(tmp_path):
    model, _ = tiny_model("llama")
    model.save_pretrained(tmp_path)
    word_tokenizer(96, bos=False).save_pretrained(tmp_path)
    for backend in ("bridge", "hf", "nnsight"):
        assert target_of(load(tmp_path, backend=backend)).tokenizer.bos_token is None


def test_bridge_tokenizes_as_transformer_lens_does():
    """Ours is handed over so that no second one is fetched; the ids must be those of a bridge booted by itself."""
    from transformer_lens.model_bridge import TransformerBridge

    folder = checkpoint("llama")
    theirs = TransformerBridge.boot_transformers(str(folder), device="cpu")
    ours = load(folder)
    for prepend in (True, False):
        a, b = (m.to_tokens("poem book", prepend_bos=prepend) for m in (ours, theirs))
        assert a.tolist() == b.tolist()
    assert_close(logits(ours), logits(theirs), atol=1e-6, rtol=0)


def test_live_objects_come_back_as_they_are():
    model, tokenizer = tiny_model("llama")
    before = set(vars(model))
    assert load(model) is model
    assert load(model, backend="hf") is model
    assert set(vars(model)) == before
    for backend in ("bridge", "nnsight"):
        live = load(checkpoint("llama"), backend=backend)
        assert load(live) is live
        assert load(live, backend=backend) is live
    del tokenizer


@pytest.mark.parametrize("backend", ["bridge", "nnsight"])
def test_a_live_model_is_wrapped_on_request_as_a_copy(backend):
    model, tokenizer = tiny_model("llama")
    expected, parts, padding = logits(model), [type(m) for m in model.modules()], tokenizer.padding_side
    wrapped = load(model, backend=backend, tokenizer=tokenizer)
    target = target_of(wrapped)
    assert target.kind == backend
    assert target.hf is not model
    with torch.no_grad():
        next(target.hf.parameters()).zero_()
    assert [type(m) for m in model.modules()] == parts
    assert model.config._attn_implementation == "sdpa"
    assert tokenizer.padding_side == padding
    assert torch.equal(logits(model), expected)


def test_a_bridge_becomes_nothing_else():
    bridge = load(checkpoint("llama"))
    with pytest.raises(UnsupportedError, match=r"cannot become backend=\'nnsight\'.*load\(name, backend=\'nnsight\'\)"):
        load(bridge, backend="nnsight")


@pytest.mark.parametrize(
    "setting",
    [
        {"revision": "main"},
        {"layers": 1},
        {"dtype": "bf16"},
        {"device": "cpu"},
        {"device_map": "auto"},
        {"quantization_config": {}},
        {"tokenizer": object()},
    ],
)
def test_settings_are_not_silently_ignored_on_live_models(setting):
    message = refused(tiny_model("llama")[0], **setting)
    assert next(iter(setting)) in message
    assert "LlamaForCausalLM" in message


def test_something_else_is_no_model():
    assert "int is not a model" in refused(3)


def test_bundled_model_needs_no_network_and_no_name():
    if not (Path(ss.__file__).parent / "models" / "bundled" / "config.json").is_file():
        pytest.skip("not made yet: experiments/train_bundled.py")
    target = target_of(load(backend="hf"))
    assert target.name == "bundled"
    assert target.tokenizer.bos_token_id is not None
    assert target_of(load("bundled", backend="hf")).n_layers == target.n_layers


def test_dtype_and_names_of_dtypes():
    folder = checkpoint("llama")
    for name in ("bfloat16", "bf16", "torch.bfloat16", torch.bfloat16):
        assert load(folder, backend="hf", dtype=name).dtype == torch.bfloat16
    assert load(folder, backend="hf").dtype == load(folder, backend="hf", dtype="auto").dtype == torch.float32


def test_soft_cap_is_computed_whatever_transformers_would_choose():
    """Some versions choose SDPA for Gemma 2, which drops the cap."""
    model, _ = tiny_model("gemma2", attn_logit_softcapping=0.5)
    with torch.no_grad():
        expected = model(IDS).logits
    uncapped = copy.deepcopy(model)
    for module in uncapped.modules():
        if hasattr(module, "attn_logit_softcapping"):
            module.attn_logit_softcapping = None
    assert not torch.allclose(logits(uncapped), expected, atol=1e-4)
    for loaded in (load(checkpoint("gemma2"), backend="hf"), open_stream(checkpoint("gemma2"))):
        assert target_of(loaded).config._attn_implementation == "eager"


def test_dtype_of_the_checkpoint_is_kept(tmp_path):
    model, tokenizer = tiny_model("llama")
    model.half().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    bridge = load(tmp_path)
    assert bridge.original_model.dtype == bridge.cfg.dtype == torch.float16


def test_device_map_and_quantization_config_pass_through(monkeypatch):
    from transformers import AutoModelForCausalLM

    seen = {}

    def fake(*_args, **kwargs):
        seen.update(kwargs)
        raise RuntimeError("seen enough")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fake)
    quantization = object()
    refused(checkpoint("llama"), device_map="auto", quantization_config=quantization)
    assert (seen["device_map"], seen["quantization_config"]) == ("auto", quantization)
    assert seen["trust_remote_code"] is False
    seen.clear()
    refused(checkpoint("llama"))
    assert "device_map" not in seen


def test_device_map_places_the_model():
    for backend in ("hf", "bridge"):
        model = load(checkpoint("llama"), backend=backend, device_map={"": "cpu"})
        assert target_of(model).device == torch.device("cpu")
        assert_close(logits(model), logits(tiny_model("llama")[0]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("stage", ["transfer", "boot"])
def test_what_libraries_print_never_reaches_stdout(stage, tmp_path, monkeypatch, capsys):
    from transformer_lens.model_bridge import TransformerBridge

    real = TransformerBridge.boot_transformers

    def noisy(*args, **kwargs):
        print("noise")
        return real(*args, **kwargs)

    monkeypatch.setattr(TransformerBridge, "boot_transformers", noisy)
    with hub(tmp_path) as server:
        server.add("org/name", checkpoint("llama"))
        load("org/name" if stage == "transfer" else checkpoint("llama"))
    out, err = capsys.readouterr()
    assert out == ""
    assert "noise" in err


@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_on_stdout_and_nothing_on_stderr(terminal, monkeypatch, capfd):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", terminal)
    for backend in ("bridge", "hf", "nnsight"):
        load(checkpoint("llama"), backend=backend, layers=2)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


# -- first layers only ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [0, -1])
def test_zero_layers_asked_for(layers):
    assert re.search(rf"layers={layers}: .*at least 1", refused(checkpoint("llama"), layers=layers))


def test_more_layers_than_there_are():
    assert "layers=4 is more than llama has; expected at most 3" in refused(checkpoint("llama"), layers=4)


# -- gguf ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    pytest.importorskip("gguf")
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(file, *tiny_model("llama"))
    return file


def test_gguf_computes_what_was_written(gguf):
    expected = logits(tiny_model("llama")[0])
    for backend in ("bridge", "hf"):
        model = load(gguf, backend=backend)
        assert_close(logits(model), expected, atol=1e-5, rtol=0)
        target = target_of(model)
        assert target.name == "tiny.gguf"
        assert target.tokenizer.bos_token_id == 1


def test_file_that_is_no_gguf():
    file = checkpoint("llama") / "model.safetensors"
    message = refused(file)
    assert "model.safetensors is not a model" in message
    assert str(file.parent) in message


# -- names and hubs ------------------------------------------------------------------------------------------------


def test_short_name_and_hub_id_are_downloaded(tmp_path):
    with hub(tmp_path) as server:
        commit = server.add("meta-llama/Llama-2-7b-hf", checkpoint("llama"))
        for spelled in ("llama-2-7b", "meta-llama/Llama-2-7b-hf"):
            model = load(spelled, backend="hf")
            target = target_of(model)
            assert target.name == spelled.split("/")[-1]
            assert model.config._name_or_path == "meta-llama/Llama-2-7b-hf"
            assert model.config._commit_hash == commit
            assert_close(logits(model), logits(tiny_model("llama")[0]), atol=1e-6, rtol=0)
            assert target.tokenizer("poem")["input_ids"][0] == 1
        bridge = load("llama-2-7b")
        assert target_of(bridge).kind == "bridge"
        assert not [path for _, path in server.log if ".bin" in path]


def test_a_folder_that_shares_a_models_name_does_not_hide_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    with hub(tmp_path / "home") as server:
        server.add("openai-community/gpt2", checkpoint("gpt2"))
        assert target_of(load("gpt2", backend="hf")).config.model_type == "gpt2"
        spoiled(tmp_path / "gpt2" / ".." / "llama-2-7b")
        assert target_of(load("llama-2-7b", backend="hf")).n_layers == 3  # a checkpoint in the folder comes first


# -- what is refused -----------------------------------------------------------------------------------------------


def _nan(folder: Path):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_nan_in_a_layer_that_is_not_loaded_is_no_matter(tmp_path):
    folder = spoiled(tmp_path / "m")
    _nan(folder)
    load(folder, backend="hf", layers=1)


def test_overflow_to_infinity_is_found(tmp_path):
    model, tokenizer = tiny_model("llama")
    with torch.no_grad():
        model.model.norm.weight[0] = 1e6
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert re.search(r"tensor model\.norm\.weight holds 1 .*float16.*dtype=float32", refused(tmp_path, dtype="fp16"))
    load(tmp_path, backend="hf")


def test_special_tokens_without_a_row_are_no_mismatch(tmp_path):
    """Gemma 3 1B's tokenizer has a token for images beyond its embedding."""
    folder = spoiled(tmp_path / "m")
    tokenizer = word_tokenizer(96)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(folder)
    load(folder, backend="hf")
    tokenizer.add_tokens(["word"])
    tokenizer.save_pretrained(folder)
    assert "(1 tokens have none)" in refused(folder)


class _Code:
    def __reduce__(self):
        return os.mkdir, (self.path,)

    def __init__(self, path: str):
        self.path = path


def test_pickled_weights_load_with_a_note_and_no_code_runs(tmp_path, capsys):
    folder = spoiled(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    model = load(folder, backend="hf")
    assert_close(logits(model), logits(tiny_model("llama")[0]), atol=1e-6, rtol=0)
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("note: m has pickled weights (.bin), read with weights_only")

    trap = tmp_path / "it-ran"
    torch.save({**tensors, "x": _Code(str(trap))}, folder / "pytorch_model.bin")
    assert re.search(r"pickled weights of m hold more than tensors.*convert them to safetensors", refused(folder))
    assert not trap.exists()
    (folder / "pytorch_model.bin").write_bytes(b"\0" * 100)
    assert "pytorch_model.bin is no checkpoint of torch" in refused(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02" + b"\0" * 100)
    assert "pickled weights of m" in refused(folder)
    assert capsys.readouterr() == ("", ""), "only what is loaded has a note"


def test_no_tokenizer(tmp_path):
    folder = spoiled(tmp_path / "m")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    for backend in ("bridge", "nnsight"):
        assert re.search(r"needs a tokenizer.*tokenizer=.*backend=\"hf\"", refused(folder, backend=backend))
    assert target_of(load(folder, backend="hf")).tokenizer is None
    given = copy.deepcopy(tiny_model("llama")[1])
    assert target_of(load(folder, tokenizer=given)).tokenizer is given


@pytest.mark.parametrize("dtype", ["float13", "int8", torch.int8, torch.float8_e4m3fn])
def test_dtype_not_there(dtype):
    assert re.search(r"^dtype '\S+' .*expected float32, bfloat16, float16", refused(checkpoint("llama"), dtype=dtype))


def test_device_that_is_there(monkeypatch):
    from sinkscope.models.config import parse_device

    assert parse_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert str(parse_device(None)) == "cuda:0"
    assert str(parse_device("cuda")) == "cuda"
    assert str(parse_device("cuda:1")) == "cuda:1"
    with pytest.raises(SinkscopeError, match=r"'cuda:2' is not there; this machine has cpu, cuda:0, cuda:1"):
        parse_device("cuda:2")


def test_device_and_device_map():
    assert "exclude each other" in refused(checkpoint("llama"), device="cpu", device_map="auto")


@pytest.mark.parametrize(("backend", "package"), [("bridge", "transformer_lens"), ("nnsight", "nnsight")])
def test_package_not_installed(backend, package, monkeypatch):
    import sys

    for name in [n for n in sys.modules if n.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    message = refused(checkpoint("llama"), backend=backend)
    assert "pip install" in message
    assert 'backend="hf"' in message
    load(checkpoint("llama"), backend="hf")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_out_of_memory_says_what_to_try(error, monkeypatch):
    from transformers import AutoModelForCausalLM

    def fail(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    message = refused(checkpoint("llama"))
    assert all(word in message for word in ("out of memory", "llama", "layers=N", "dtype", "quantization_config"))
