"""`load`: a model from its name, folder or file, or a live one, as the kind of object asked for."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import sys
from collections.abc import Iterator
from typing import Any

import torch

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.models.adapters import ADAPTERS, adapter_for
from sinkscope.models.source import Local, Source, local_files, locate
from sinkscope.models.target import unwrap
from sinkscope.models.wrap import BACKENDS, Backend, wrap

_DTYPES = {
    "float32": torch.float32, "fp32": torch.float32, "float": torch.float32, "f32": torch.float32,
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
    "float16": torch.float16, "fp16": torch.float16, "half": torch.float16, "f16": torch.float16,
    "float64": torch.float64, "fp64": torch.float64, "double": torch.float64,
}  # fmt: skip
_PER_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types")  # lists in a config with an entry per layer
_CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def load(
    x: Any = None,
    *,
    backend: Backend | None = None,
    revision: str | None = None,
    layers: int | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    device_map: Any = None,
    quantization_config: Any = None,
    tokenizer: Any = None,
    trust_remote_code: bool = False,
    probe: bool = True,
) -> Any:
    """Load a model.

    Args:
        x: short name (`sinkscope.models()` lists them), hub id `org/name`, folder, `.gguf` file, or a live model;
            None: the model inside this package. A live Hugging Face model, TransformerBridge or nnsight model comes
            back as it is.
        backend: "bridge" (TransformerBridge, the default), "hf" (plain Hugging Face), or "nnsight". Asked for
            explicitly, a live Hugging Face model is copied and the copy wrapped, since wrapping changes it in place.
        revision: branch, tag or commit of a hub id.
        layers: load only the first `layers` decoder layers; tensors of the others are not read, and shards that hold
            nothing else are not downloaded.
        dtype: torch dtype or its name ("float32", "bf16", ...); None: that of the checkpoint.
        device: "cpu", "cuda", "cuda:1", "mps"; None: the first cuda device if there is one, else the CPU.
        device_map: passed through to transformers, instead of `device`.
        quantization_config: passed through to transformers.
        tokenizer: instead of the one beside the weights.
        trust_remote_code: run Python code that comes with the checkpoint.
        probe: check on a few tokens that edits reach the logits and that attention is recomputed rightly
            (`sinkscope.models.probe`). Live models are not probed.

    Returns:
        TransformerBridge, Hugging Face model or nnsight model, in eval mode. Its tokenizer is kept on the Hugging
        Face module as `tokenizer`, its name as `sinkscope_name`.

    Raises:
        SinkscopeError: one line that says what was wrong and what to do.
        UnsupportedError: no adapter for the architecture, or `backend` cannot wrap it.
    """
    if backend is not None and backend not in BACKENDS:
        raise SinkscopeError(f"backend {backend!r} is unknown; expected one of {', '.join(BACKENDS)}")
    if not (x is None or isinstance(x, str | os.PathLike)):
        settings = {
            "revision": revision, "layers": layers, "dtype": dtype, "device": device, "device_map": device_map,
            "quantization_config": quantization_config,
        }  # fmt: skip
        return _live(x, backend, tokenizer, settings)
    if layers is not None and (not isinstance(layers, int) or layers < 1):
        raise SinkscopeError(f"layers={layers!r}: zero layers make no model; expected a number of at least 1, or None")
    place = _placement(device, device_map)
    wanted_dtype = parse_dtype(dtype)
    source = locate(x, revision)
    with _quiet(), _explained(source):
        with local_files(source, layers, code=trust_remote_code) as local:
            config = _config(source, local, layers, trust_remote_code)
            tok = tokenizer if tokenizer is not None else _tokenizer(local, trust_remote_code)
            hf = _weights(source, local, config, wanted_dtype, place, quantization_config, trust_remote_code)
        if source.kind == "hub":
            hf.config._name_or_path = str(source.where)
            hf.config._commit_hash = local.commit
        hf.sinkscope_name = source.name
        hf.tokenizer = tok
        check_vocabulary(tok, hf)
        check_finite(hf)
        model = wrap(hf, tok, backend or "bridge")
        if probe:
            from sinkscope.models.probe import prove

            prove(model)
    return model


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A torch dtype from its name ("float32", "torch.bfloat16", "fp16", ...); None and "auto" give None.

    Raises:
        SinkscopeError: no floating type that models compute in.
    """
    if dtype is None or dtype == "auto":
        return None
    found = _DTYPES.get(dtype.lower().removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if found not in _DTYPES.values():
        raise SinkscopeError(
            f"dtype {str(dtype)!r} is not one that models run in; expected float32, bfloat16, float16, float64 or auto",
            page="unknown-dtype",
        )
    return found


def parse_device(device: torch.device | str | None) -> torch.device:
    """A device of this machine; None: the first cuda device if there is one, else the CPU.

    Raises:
        SinkscopeError: it is not there; the message lists those that are.
    """
    here = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0))]
    if torch.backends.mps.is_available():
        here.append("mps")
    if device is None:
        return torch.device(here[1] if len(here) > 1 and here[1].startswith("cuda") else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        found = None
    if found is not None:
        index = f":{found.index or 0}" if found.type == "cuda" else ""
        if f"{found.type}{index}" in here and (found.type == "cuda" or not found.index):
            return found
    raise SinkscopeError(
        f"device {str(device)!r} is not there; this machine has {', '.join(here)}", page="no-device"
    )


def check_vocabulary(tokenizer: Any, hf: Any) -> None:
    """Every token of the tokenizer has a row in the embedding (special tokens other than BOS and EOS excepted).

    Some models ship a tokenizer with special tokens for images that a text model never gets to see (Gemma 3 1B).

    Raises:
        SinkscopeError: the tokenizer belongs to another model.
    """
    if tokenizer is None:
        return
    rows = hf.get_input_embeddings().weight.shape[0]
    if len(tokenizer) <= rows:
        return
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special -= {tokenizer.bos_token_id, tokenizer.eos_token_id}
    if beyond := sorted(i for i in tokenizer.get_vocab().values() if i >= rows and i not in special):
        raise SinkscopeError(
            f"the tokenizer has {len(tokenizer):,} tokens and the embedding {rows:,} rows ({len(beyond):,} tokens have "
            "none): they belong to different models; use the tokenizer that came with the weights",
            page="vocabulary-mismatch",
        )


@torch.no_grad()
def check_finite(hf: torch.nn.Module) -> None:
    """No parameter holds NaN or infinity (those without data here, and quantised ones, are passed over).

    Raises:
        SinkscopeError: names the first that does.
    """
    for name, tensor in hf.named_parameters():
        # One number per tensor: NaN and infinity survive a sum. Cheaper than a boolean tensor of the same shape.
        if tensor.is_meta or tensor.dtype not in _DTYPES.values() or torch.isfinite(tensor.sum(dtype=torch.float64)):
            continue
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            raise SinkscopeError(
                f"tensor {name} holds {bad:,} values that are NaN or infinite (of {tensor.numel():,}, "
                f"{str(tensor.dtype).removeprefix('torch.')}); download the checkpoint again, or try dtype=float32",
                page="nan-weights",
            )


def _live(model: Any, backend: Backend | None, tokenizer: Any, settings: dict[str, Any]) -> Any:
    hf, kind = unwrap(model)
    if given := [name for name, value in settings.items() if value is not None]:
        raise SinkscopeError(
            f"{given[0]}= is for names, folders and files, and this {type(model).__name__} is loaded already; leave it "
            "out, or give the name of the model"
        )
    if backend is None or backend == kind:
        if tokenizer is not None:
            raise SinkscopeError(
                f"this {type(model).__name__} comes back as it is, so it cannot be given a tokenizer; pass tokenizer= "
                "to the measurement instead"
            )
        return model
    if kind != "hf":
        raise UnsupportedError(
            f"a live {type(model).__name__} cannot become backend={backend!r}: it changed the Hugging Face model "
            f"inside; load that again with sinkscope.load(name, backend={backend!r})"
        )
    copied = copy.deepcopy(hf).eval()
    tok = tokenizer if tokenizer is not None else getattr(model, "tokenizer", None)
    return wrap(copied, tok, backend)


def _placement(device: Any, device_map: Any) -> Any:
    """What transformers is given as `device_map`; None: the CPU."""
    if device_map is not None:
        if device is not None:
            raise SinkscopeError(f"device {str(device)!r} and device_map exclude each other; give one of them")
        return device_map
    found = parse_device(device)
    return None if found.type == "cpu" else {"": found}


def _config(source: Source, local: Local, layers: int | None, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    raw: dict[str, Any] = {}
    if local.gguf is None:
        raw = json.loads((local.folder / "config.json").read_text(encoding="utf-8"))
        _check_kind(source.name, raw)
        config = AutoConfig.from_pretrained(local.folder, trust_remote_code=trust_remote_code)
    else:
        config = AutoConfig.from_pretrained(local.folder, gguf_file=local.gguf)
        adapter_for(config.model_type)
    text = config.get_text_config()
    n_layers = text.num_hidden_layers
    if n_layers < 1:
        raise SinkscopeError(
            f"{source.name} has zero layers (num_hidden_layers is {n_layers} in its config.json); give a model that "
            "has some",
            page="zero-layers",
        )
    if layers is not None:
        if layers > n_layers:
            raise SinkscopeError(
                f"layers={layers} is more than {source.name} has; expected at most {n_layers}", page="zero-layers"
            )
        text.num_hidden_layers = layers
        for field in _PER_LAYER:
            if isinstance(per_layer := getattr(text, field, None), list):
                setattr(text, field, per_layer[:layers])
    return config


def _check_kind(name: str, raw: dict[str, Any]) -> None:
    """Is this the configuration of a causal language model that has an adapter?"""
    from transformers.models.auto import modeling_auto as auto

    model_type = raw.get("model_type") if isinstance(raw, dict) else None
    if not isinstance(model_type, str):
        raise SinkscopeError(
            f"the config.json of {name} has no model_type, so it is no transformers model; give one that has",
            page="no-config",
        )
    classes: list[str] = raw.get("architectures") or []
    causal = any(c.endswith(_CAUSAL) for c in classes)
    if model_type in ADAPTERS and (causal or not classes):
        return
    what = ""
    if raw.get("is_encoder_decoder"):
        what = "an encoder-decoder model"
    elif model_type in ADAPTERS:
        what = "not a causal language model"
    elif model_type in auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES or "vision_config" in raw:
        what = "a vision model"
    elif model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not causal:
        what = "an encoder-only model"
    if not what:
        adapter_for(model_type)
    named = f"architectures {', '.join(classes)}" if classes else f"model type {model_type}"
    raise UnsupportedError(
        f"{name} is {what} ({named}); expected a decoder-only causal language model, such as llama-2-7b or gpt2",
        page="not-causal-lm",
    )


def _tokenizer(local: Local, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    if local.gguf is not None:
        return AutoTokenizer.from_pretrained(local.folder, gguf_file=local.gguf)
    if not any((local.folder / f).is_file() for f in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    return AutoTokenizer.from_pretrained(local.folder, trust_remote_code=trust_remote_code)


def _weights(
    source: Source, local: Local, config: Any, dtype: Any, place: Any, quantization_config: Any, trust_remote_code: bool
) -> Any:
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"gguf_file": local.gguf, "device_map": place, "quantization_config": quantization_config}
    if local.pickled:
        print(
            f"note: {source.name} has pickled weights (.bin), read with weights_only so that no code in them runs; "
            "safetensors load faster",
            file=sys.stderr,
        )
        options["weights_only"] = True
    model, info = AutoModelForCausalLM.from_pretrained(
        local.folder,
        config=config,
        dtype=dtype or "auto",
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
        **{name: value for name, value in options.items() if value is not None},
    )
    if missing := sorted(info["missing_keys"]):
        raise SinkscopeError(
            f"{source.name} lacks {len(missing)} tensors that its configuration asks for, such as {missing[0]}; the "
            "weights belong to another config.json: download both from one revision",
            page="missing-tensors",
        )
    return model.eval()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nothing on stdout, no progress bars unless stderr is a terminal, no reports on unused tensors."""
    from huggingface_hub import utils as hub
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    bars = not sys.stderr.isatty()
    hf_bars, hub_bars = logging.is_progress_bar_enabled(), not hub.are_progress_bars_disabled()
    logging.set_verbosity_error()
    if bars and hf_bars:
        logging.disable_progress_bar()
    if bars and hub_bars:
        hub.disable_progress_bars()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars and hf_bars:
            logging.enable_progress_bar()
        if bars and hub_bars:
            hub.enable_progress_bars()


@contextlib.contextmanager
def _explained(source: Source) -> Iterator[None]:
    """Whatever goes wrong below, in one line."""
    try:
        yield
    except SinkscopeError:
        raise
    except Exception as error:
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise SinkscopeError(
                f"out of memory while loading {source.name}; try layers=N, dtype=bfloat16, a quantization_config or "
                'device_map="auto"',
                page="out-of-memory",
            ) from error
        if isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error):
            raise SinkscopeError(
                f"the pickled weights of {source.name} hold more than tensors, or are damaged, and are refused: "
                "loading them could run code; convert them to safetensors where you trust them",
                page="pickled-weights",
            ) from error
        raise SinkscopeError(
            f"{source.name} could not be loaded: {type(error).__name__}: {first}; if the files are whole, check that "
            "config.json, weights and tokenizer belong together",
            page="load-failed",
        ) from error
